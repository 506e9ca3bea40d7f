"""The scenes in which a job has several parts (arrays, heterogeneous jobs) or several incarnations (requeued).

See scenes.py. The one that preempts uses node4 alone.
"""

from __future__ import annotations

from typing import Final

from tests.corpus.scenes import ANYWHERE, Play
from tests.corpus.stage import Scene

AGAIN: Final = 42
"""The exit code with which a job is queued again; see `faults.configuration`."""

SECOND_TIME: Final = '[ "${SLURM_RESTART_COUNT:-0}" -ge 1 ]'


async def requeued(scene: Scene) -> None:
    """A job that an administrator requeues while it runs; its second attempt fails with 6."""
    job = scene.submit(f"if {SECOND_TIME}; then sleep 2; exit 6; fi\nsleep 300", ANYWHERE, "--requeue")
    await scene.state(job, "RUNNING")
    await scene.look(job, queue={job: "RUNNING"})
    scene.expect(job, "running", "RUNNING", 75)
    scene.do("scontrol", "requeue", job)
    await scene.state(job, "PENDING")
    await scene.look(job, queue={job: "PENDING"})
    scene.expect(job, "running", "PENDING", 75, doubt="still in state PENDING")
    await scene.state(job, "RUNNING")
    await scene.look(job, queue={job: "RUNNING"})
    scene.expect(job, "running", "RUNNING", 75)
    await scene.ended(job)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 6, line="sacct")


async def requeuehold(scene: Scene) -> None:
    """A job that is requeued and held, released later, and succeeds then."""
    job = scene.submit(f"{SECOND_TIME} || sleep 300", ANYWHERE, "--requeue")
    await scene.state(job, "RUNNING")
    scene.do("scontrol", "requeuehold", job)
    await scene.state(job, "PENDING")
    for _ in range(2):
        await scene.look(job, queue={job: "PENDING"})
    scene.expect(job, "running", "PENDING", 75, doubt="still in state PENDING")
    scene.do("scontrol", "release", job)
    await scene.has_succeeded(job)


async def requeued_by_exit_code(scene: Scene) -> None:
    """A job whose code is one for which the site's RequeueExit queues it again; the second attempt succeeds."""
    job = scene.submit(f"{SECOND_TIME} && exit 0\nsleep 1\nexit {AGAIN}", ANYWHERE, "--requeue")
    await scene.state(job, "RUNNING")
    await scene.state(job, "PENDING")
    await scene.waits_again(job)
    await scene.has_succeeded(job)


async def special_exit(scene: Scene) -> None:
    """A job that is requeued and held as a special case: SPECIAL_EXIT is no end."""
    job = scene.submit("sleep 300", ANYWHERE, "--requeue")
    await scene.state(job, "RUNNING")
    scene.do("scontrol", "requeuehold", "State=SpecialExit", job)
    await scene.state(job, "SPECIAL_EXIT")
    for _ in range(2):
        await scene.look(job, queue={job: "SPECIAL_EXIT"})
    scene.expect(job, "running", "SPECIAL_EXIT", 75, doubt="still in state SPECIAL_EXIT")
    scene.do("scancel", job)


async def preempted_cancelled(scene: Scene) -> None:
    """A job of a partition whose PreemptMode is CANCEL: PREEMPTED is its end."""
    job = scene.submit("sleep 300", "--partition=cheap", "--nodelist=node4", "--exclusive")
    await scene.state(job, "RUNNING")
    scene.submit("sleep 1", "--partition=high", "--nodelist=node4", "--exclusive")
    await scene.ended(job)
    await scene.look(job, queue={job: "PREEMPTED"})
    scene.expect(job, "settled", "PREEMPTED", 1, line="sacct")


async def array(scene: Scene) -> None:
    """An array of four: two tasks fail. The whole id, which is the last one's raw id, proves nothing."""
    script = "case $SLURM_ARRAY_TASK_ID in 1) exit 3;; 3) exit 137;; esac"
    job = scene.submit(script, ANYWHERE, "--array=0-3")
    tasks = [f"{job}_{number}" for number in range(4)]
    await scene.ended(job, *tasks)  # accounting has a task's row before it knows whose task it is
    await scene.look(*tasks, job, queue=dict(zip(tasks, ("COMPLETED", "FAILED") * 2, strict=True)))
    for task, code in zip(tasks, (0, 3, 0, 137), strict=True):
        scene.expect(task, "settled", "FAILED" if code else "COMPLETED", code, line="sacct")
    scene.expect(job, "several", "FAILED", 75, doubt="several parts")


async def array_cancelled(scene: Scene) -> None:
    """An array that runs one task at a time, cancelled during its first: the others never started."""
    job = scene.submit("sleep 300", ANYWHERE, "--array=1-4%1")
    first, second = f"{job}_1", f"{job}_2"
    await scene.state(first, "RUNNING")
    await scene.look(first, second, job)
    scene.expect(first, "running", "RUNNING", 75)
    scene.expect(second, "running", "PENDING", 75)
    scene.do("scancel", job)
    await scene.ended(job)
    for _ in range(2):
        await scene.look(first, second, job)
    scene.expect(first, "settled", "CANCELLED by 0", 130, line="sacct")
    scene.expect(second, "settled", "CANCELLED", 130, line="scontrol")
    scene.expect(job, "several", "CANCELLED by 0", 75, doubt="several parts")


async def _heterogeneous(scene: Scene, script: str, first: tuple[str, int], second: tuple[str, int]) -> None:
    job = scene.submit(script, ANYWHERE, "--nodes=1", ":", ANYWHERE, "--nodes=1")
    components = [f"{job}+0", f"{job}+1"]
    await scene.ended(job)
    await scene.look(*components, job)
    for component, (state, code) in zip(components, (first, second), strict=True):
        scene.expect(component, "settled", state, code, line="sacct")
    scene.expect(job, "several", first[0], 75, doubt="several parts")


async def het_completed(scene: Scene) -> None:
    """A heterogeneous job of two components that succeeds."""
    await _heterogeneous(scene, "srun --het-group=0,1 true", ("COMPLETED", 0), ("COMPLETED", 0))


async def het_failed(scene: Scene) -> None:
    """A heterogeneous job whose batch script, which is the first component's, ends 5."""
    await _heterogeneous(scene, "exit 5", ("FAILED", 5), ("FAILED", 5))


SCENES: Final[tuple[Play, ...]] = (
    *(requeued, requeued_by_exit_code, requeuehold, special_exit, preempted_cancelled),
    *(array, array_cancelled, het_completed, het_failed),
)
