"""The scenes that harm the cluster: lost nodes, dead daemons, a prolog that fails; see scenes.py.

They are played one after the other, each on a cluster that is whole again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.corpus.parts import AGAIN, SECOND_TIME
from tests.corpus.scenes import Play
from tests.corpus.stage import Scene

_PROLOG: Final = '#!/bin/sh\n[ "$SLURM_JOB_PARTITION" != broken ]\n'


def configuration(directory: Path) -> str:
    """What the scenes need beside the usual: a partition whose jobs are cancelled by preemption, one whose prolog fails
    (the program is written to `directory`), an exit code that queues a job again."""
    prolog = directory / "prolog"
    prolog.write_text(_PROLOG)
    prolog.chmod(0o755)
    return (
        "PartitionName=cheap PriorityTier=1 PreemptMode=CANCEL\n"
        f"PartitionName=broken PriorityTier=1 PreemptMode=OFF\nProlog={prolog}\nRequeueExit={AGAIN}\n"
    )


async def node_fail(scene: Scene) -> None:
    """A job whose node is lost, and which must not be requeued."""
    job = scene.submit("sleep 300", "--nodelist=node4", "--no-requeue")
    await scene.state(job, "RUNNING")
    scene.cluster.kill_slurmd("node4")
    await scene.ended(job)
    await scene.look(job, queue={job: "NODE_FAIL"})
    scene.expect(job, "settled", "NODE_FAIL", 1, line="sacct")


async def node_fail_requeued(scene: Scene) -> None:
    """A job whose node is lost; it is queued again under its id, runs elsewhere, and succeeds."""
    job = scene.submit(f"if {SECOND_TIME}; then sleep 2; exit 0; fi\nsleep 300", "--nodes=1", "--requeue")
    await scene.state(job, "RUNNING")
    node = scene.cluster.job(int(job))["NodeList"]
    scene.cluster.kill_slurmd(node)
    await scene.state(job, "PENDING")
    await scene.waits_again(job)
    await scene.has_succeeded(job)


async def launch_failed(scene: Scene) -> None:
    """A job whose prolog fails: Slurm queues it again and holds it, with the reason `launch failed requeued held`."""
    job = scene.submit("true", "--partition=broken", "--nodelist=node4", "--requeue")
    await scene.until(
        lambda: "launch_failed" in scene.cluster.run(["scontrol", "show", "job", job]).stdout.lower(), "the prolog"
    )
    await scene.waits_again(job)
    scene.do("scancel", job)


async def _failed_unseen_by_accounting(scene: Scene) -> str:
    """A job that ends with 4 when slurmdbd is down, which knows of it as running. Its id."""
    job = scene.submit(f"until [ -e {scene.file('go')} ]; do sleep 0.1; done; exit 4")
    await scene.state(job, "RUNNING")
    await scene.until(lambda: "RUNNING" in _words(scene, job), "accounting's row")
    scene.cluster.stop_slurmdbd()
    scene.touch("go")
    await scene.state(job, "FAILED")
    return job


async def accounting_down(scene: Scene) -> None:
    """slurmdbd is down from before the job's end until the controller has forgotten it, and comes back then."""
    job = await _failed_unseen_by_accounting(scene)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "unconfirmed", "FAILED", 75, doubt="read only once")
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 4, line="scontrol")
    await scene.forgotten(job)
    await scene.look(job)
    scene.expect(job, "settled", "FAILED", 4, line="scontrol")
    scene.expect(job, "unasked", "", 75, doubt="could not be asked", since=3)
    scene.cluster.start_slurmdbd()
    await scene.until(lambda: _words(scene, job) not in ("", "RUNNING"), "accounting to hear of the end")
    await scene.look(job)
    await scene.ended(job)
    for _ in range(2):
        await scene.look(job)
    scene.expect(job, "settled", "FAILED", 4, line="sacct")
    scene.expect(job, "settled", "FAILED", 4, line="sacct", since=4)


async def accounting_late(scene: Scene) -> None:
    """slurmdbd comes back after the job's end: accounting still says RUNNING, or an end without its time."""
    job = await _failed_unseen_by_accounting(scene)
    scene.cluster.start_slurmdbd()
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "unconfirmed", "FAILED", 75, doubt="read only once")
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 4, line="scontrol")
    await scene.ended(job)
    await scene.look(job)
    scene.expect(job, "settled", "FAILED", 4, line="sacct")


def _words(scene: Scene, job: str) -> str:
    argv = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State"]
    return scene.cluster.run(argv).stdout.strip()


async def controller_down(scene: Scene) -> None:
    """slurmctld is down while the job ends. Nobody can know how, until it is back."""
    job = scene.submit(f"until [ -e {scene.file('go')} ]; do sleep 0.1; done; exit 4")
    await scene.state(job, "RUNNING")
    await scene.until(lambda: "RUNNING" in _words(scene, job), "accounting's row")
    scene.cluster.stop_slurmctld()
    scene.touch("go")
    await scene.look(job)
    scene.deadline = 30.0  # so that scontrol says it in its own words
    await scene.look(job)
    scene.expect(job, "running", "RUNNING", 75)
    scene.cluster.start_slurmctld()
    await scene.ended(job)
    await scene.look(job, queue={job: "FAILED"})
    scene.expect(job, "settled", "FAILED", 4, line="sacct")


async def ended_then_controller_down(scene: Scene) -> None:
    """The job has ended, and slurmctld is down: accounting decides alone, at its second word."""
    job = scene.submit("exit 4")
    await scene.ended(job)
    scene.cluster.stop_slurmctld()
    await scene.look(job)
    scene.expect(job, "unconfirmed", "FAILED", 75, doubt="read only once")
    await scene.look(job)
    scene.expect(job, "settled", "FAILED", 4, line="sacct")


async def both_down(scene: Scene) -> None:
    """Neither daemon answers."""
    job = scene.submit("true")
    await scene.ended(job)
    scene.cluster.stop_slurmdbd()
    scene.cluster.stop_slurmctld()
    for _ in range(2):
        await scene.look(job)
    scene.expect(job, "unasked", "", 75, doubt="could not be asked")


async def accounting_stale(scene: Scene) -> None:
    """The end never reaches accounting: slurmdbd was down, and slurmctld lost what it had kept for it.

    Accounting says RUNNING for good. The controller has forgotten the job, and nothing is proven any more.
    """
    job = await _failed_unseen_by_accounting(scene)
    await scene.forgotten(job)
    scene.cluster.stop_slurmctld()
    (scene.cluster.directory / "state" / "dbd.messages").unlink()
    scene.cluster.start_slurmdbd()
    scene.cluster.start_slurmctld()
    scene.cluster.wait_ready()
    for _ in range(2):
        await scene.look(job)
    scene.expect(job, "unasked", "RUNNING", 75, doubt="no longer knows the job")


SCENES: Final[tuple[Play, ...]] = (
    *(node_fail, node_fail_requeued, launch_failed, accounting_down, accounting_late),
    *(controller_down, ended_then_controller_down, both_down, accounting_stale),
)
