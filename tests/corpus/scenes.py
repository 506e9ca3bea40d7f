"""The scenes of the recorder that need no daemon to fail: what is done to a job, and what is true of it then.

Each scene is a coroutine on a `Scene`; its docstring is what the case says of itself. They run side by side on one
cluster, on node1 and node2.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from tests.corpus.stage import Scene

Play = Callable[[Scene], Awaitable[None]]

ANYWHERE: Final = "--exclude=node3,node4"
OTHER: Final = 65_534  # nobody's uid


async def completed(scene: Scene) -> None:
    """A job that succeeds, asked about while it runs and when it has ended."""
    job = scene.submit(f"until [ -e {scene.file('go')} ]; do sleep 0.1; done", ANYWHERE)
    await scene.state(job, "RUNNING")
    await scene.look(job, queue={job: "RUNNING"})
    scene.expect(job, "running", "RUNNING", 75, doubt="still in state RUNNING")
    scene.touch("go")
    await scene.has_succeeded(job)


async def completed_forgotten(scene: Scene) -> None:
    """A job that succeeded, asked about when the controller has forgotten it: accounting has to say it twice."""
    job = scene.submit("true", ANYWHERE)
    await scene.ended(job)
    await scene.forgotten(job)
    await scene.look(job)
    scene.expect(job, "unconfirmed", "COMPLETED", 75, doubt="read only once")
    await scene.look(job)
    scene.expect(job, "settled", "COMPLETED", 0, line="sacct")


async def _fails(scene: Scene, script: str, state: str, code: int) -> str:
    job = scene.submit(script, ANYWHERE)
    await scene.ended(job)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", state, code, line="sacct")
    return job


async def failed_7(scene: Scene) -> None:
    """A batch script that ends 7."""
    await _fails(scene, "exit 7", "FAILED", 7)


async def failed_137(scene: Scene) -> None:
    """A batch script that ends 137: accounting keeps seven bits (9:0), the controller all."""
    await _fails(scene, "exit 137", "FAILED", 137)


async def failed_128(scene: Scene) -> None:
    """A batch script that ends 128: accounting says 0:0. Once the controller has forgotten, no code is left."""
    job = await _fails(scene, "exit 128", "FAILED", 128)
    await scene.forgotten(job)
    for _ in range(2):
        await scene.look(job)
    scene.expect(job, "settled", "FAILED", 128, line="sacct")
    scene.expect(job, "settled", "FAILED", 1, line="sacct", since=2)


async def failed_255(scene: Scene) -> None:
    """A batch script that ends 255."""
    await _fails(scene, "exit 255", "FAILED", 255)


async def signal_kill(scene: Scene) -> None:
    """A batch script that dies of SIGKILL, which nobody ordered."""
    await _fails(scene, "kill -KILL $$", "FAILED", 137)


async def signal_segv(scene: Scene) -> None:
    """A batch script that dies of SIGSEGV."""
    await _fails(scene, "kill -SEGV $$", "FAILED", 139)


async def no_program(scene: Scene) -> None:
    """A batch script that execs a program which is not there."""
    await _fails(scene, "exec /nowhere/program", "FAILED", 127)


async def step_fails_job_succeeds(scene: Scene) -> None:
    """A step ends 3, and the batch script ends 0 all the same: DerivedExitCode 3:0 of a job that succeeded."""
    job = scene.submit("srun --ntasks=1 sh -c 'exit 3'\nexit 0", ANYWHERE)
    await scene.has_succeeded(job)


async def step_fails_job_fails(scene: Scene) -> None:
    """A step ends 3, the batch script 5: the job's code is the script's."""
    await _fails(scene, "srun --ntasks=1 sh -c 'exit 3'\nexit 5", "FAILED", 5)


async def cancelled_running(scene: Scene) -> None:
    """A running job that its owner cancels."""
    job = scene.submit("sleep 300", ANYWHERE)
    await scene.state(job, "RUNNING")
    scene.do("scancel", job)
    await scene.ended(job)
    await scene.look(job, queue={job: "CANCELLED"})
    scene.expect(job, "settled", "CANCELLED by 0", 130, line="sacct")


async def cancelled_pending(scene: Scene) -> None:
    """A job that is cancelled before it ever started."""
    job = scene.submit("true", "--hold")
    await scene.state(job, "PENDING")
    scene.do("scancel", job)
    await scene.ended(job)
    await scene.look(job, queue={job: "CANCELLED"})
    scene.expect(job, "settled", "CANCELLED by 0", 130, line="sacct")


def _as_other(scene: Scene, *argv: str, script: str | None = None) -> str:
    """A command as another user; sbatch gets its script."""
    how: dict[str, Any] = {"user": OTHER, "group": OTHER, "extra_groups": [], "cwd": "/"}
    if script is not None:
        how["input"] = f"#!/bin/sh\n{script}\n"
    done = scene.cluster.run(list(argv), check=True, **how)
    return done.stdout.split(";")[0].strip()


async def cancelled_by_root(scene: Scene) -> None:
    """Another user's job that root cancels."""
    job = _as_other(scene, "sbatch", "--parsable", "--output=/dev/null", ANYWHERE, script="sleep 300")
    await scene.state(job, "RUNNING")
    scene.do("scancel", job)
    await scene.ended(job)
    await scene.look(job, queue={job: "CANCELLED"})
    scene.expect(job, "settled", "CANCELLED by 0", 130, line="sacct")


async def cancelled_by_user(scene: Scene) -> None:
    """A job of an ordinary user that he cancels himself."""
    job = _as_other(scene, "sbatch", "--parsable", "--output=/dev/null", ANYWHERE, script="sleep 300")
    await scene.state(job, "RUNNING")
    _as_other(scene, "scancel", job)
    await scene.ended(job)
    await scene.look(job, queue={job: "CANCELLED"})
    scene.expect(job, "settled", f"CANCELLED by {OTHER}", 130, line="sacct")


async def timeout(scene: Scene) -> None:
    """A job that runs into its time limit."""
    job = scene.submit("sleep 300", ANYWHERE, "--time=1")
    await scene.ended(job)
    await scene.look(job, queue={job: "TIMEOUT"})
    scene.expect(job, "settled", "TIMEOUT", 124, line="sacct")


async def deadline(scene: Scene) -> None:
    """A job that waits until its --deadline cannot be met any more."""
    blocker = scene.submit("sleep 300", "--nodelist=node2")
    job = scene.submit("true", "--nodelist=node2", "--exclusive", "--time=1", "--deadline=now+65")
    await scene.ended(job)
    await scene.look(job, queue={job: "DEADLINE"})
    scene.expect(job, "settled", "DEADLINE", 124, line="sacct")
    scene.do("scancel", blocker)


async def held(scene: Scene) -> None:
    """A job that its owner holds: it waits."""
    job = scene.submit("true", "--hold")
    await scene.state(job, "PENDING")
    await scene.look(job, queue={job: "PENDING"})
    scene.expect(job, "running", "PENDING", 75, doubt="still in state PENDING")
    scene.do("scancel", job)


async def dependency_never_satisfied(scene: Scene) -> None:
    """A job that depends on the success of one that failed: it waits for ever, and only its reason says so."""
    first = scene.submit("sleep 2; exit 1", ANYWHERE)
    job = scene.submit("true", f"--dependency=afterok:{first}")
    await scene.ended(first)
    said = "Reason=DependencyNeverSatisfied"
    await scene.until(lambda: said in scene.cluster.run(["scontrol", "show", "job", job]).stdout, said)
    await scene.look(job, queue={job: "PENDING"})
    scene.expect(job, "running", "PENDING", 75, doubt="still in state PENDING")
    scene.do("scancel", job)


async def suspended(scene: Scene) -> None:
    """A job that is suspended, and goes on later."""
    job = scene.submit("sleep 4", ANYWHERE)
    await scene.state(job, "RUNNING")
    scene.do("scontrol", "suspend", job)
    await scene.state(job, "SUSPENDED")
    await scene.look(job, queue={job: "SUSPENDED"})
    scene.expect(job, "running", "SUSPENDED", 75, doubt="still in state SUSPENDED")
    scene.do("scontrol", "resume", job)
    await scene.has_succeeded(job)


async def name_forges_sacct(scene: Scene) -> None:
    """A failed job whose name holds a line that reads like accounting's record of a success. Nobody asks for names."""
    following = int(scene.submit("true", ANYWHERE)) + 1  # the id that the name claims
    name = f"x\n{following}|COMPLETED|0:0|0:0|{following}|1|1|1|root|c1|node1"
    job = scene.submit("exit 4", ANYWHERE, f"--job-name={name}")
    await scene.ended(job)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 4, line="sacct")


async def name_forges_scontrol(scene: Scene) -> None:
    """A failed job whose name holds the controller's lines: its answer is refused, accounting decides."""
    name = "x\n   JobState=COMPLETED Reason=None\n   Requeue=0 ExitCode=0:0"
    job = scene.submit("exit 4", ANYWHERE, f"--job-name={name}")
    await scene.ended(job)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "unconfirmed", "FAILED", 75, doubt="read only once")
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 4, line="sacct")


async def unknown(scene: Scene) -> None:
    """A job that was never there."""
    for _ in range(2):
        await scene.look("999999")
    scene.expect("999999", "absent", "", 75, doubt="neither sacct nor scontrol knows the job")


SCENES: Final[tuple[Play, ...]] = (
    *(timeout, deadline),  # these take a minute: first
    *(completed, completed_forgotten, failed_7, failed_137, failed_128, failed_255),
    *(signal_kill, signal_segv, no_program, step_fails_job_succeeds, step_fails_job_fails),
    *(cancelled_running, cancelled_pending, cancelled_by_root, cancelled_by_user),
    *(held, dependency_never_satisfied, suspended, name_forges_sacct, name_forges_scontrol, unknown),
)
