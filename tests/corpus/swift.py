"""The scenes whose moments last a few seconds: jobs that ignore TERM and are COMPLETING until KillWait has passed.

They are played alone, so that a moment is looked at while it lasts; see scenes.py.
"""

from __future__ import annotations

from typing import Final

from tests.corpus.parts import SECOND_TIME
from tests.corpus.scenes import ANYWHERE, Play
from tests.corpus.stage import Scene

STUBBORN: Final = "trap '' TERM\nfor i in $(seq 300); do sleep 1; done"


async def completing(scene: Scene) -> None:
    """A cancelled job whose script ignores TERM: COMPLETING until KillWait has passed."""
    job = scene.submit(f"touch {scene.file('up')}\n{STUBBORN}", ANYWHERE)
    await scene.state(job, "RUNNING")
    await scene.until(lambda: "up" in scene.files(), "the script's trap")
    scene.do("scancel", job)
    await scene.state(job, "COMPLETING")
    await scene.look(job, queue={job: "COMPLETING"})
    await scene.ended(job)
    await scene.look(job, queue={job: "CANCELLED"})
    scene.expect(job, "settled", "CANCELLED by 0", 130, line="sacct")


async def requeued_completing(scene: Scene) -> None:
    """A requeued job whose script ignores TERM: the controller says COMPLETING before it says PENDING."""
    script = f"if {SECOND_TIME}; then exit 0; fi\ntouch {scene.file('up')}\n{STUBBORN}"
    job = scene.submit(script, ANYWHERE, "--requeue")
    await scene.until(lambda: "up" in scene.files(), "the script's trap")
    scene.do("scontrol", "requeue", job)
    await scene.state(job, "COMPLETING")
    for _ in range(2):
        await scene.look(job, queue={job: "COMPLETING"})
    scene.expect(job, "running", "COMPLETING", 75)
    await scene.has_succeeded(job)


async def preempted_requeued(scene: Scene) -> None:
    """A job of a preemptable partition that makes room, comes back under its id, and succeeds."""
    script = f"if {SECOND_TIME}; then exit 0; fi\ntouch {scene.file('up')}\n{STUBBORN}"
    job = scene.submit(script, "--partition=low", "--nodelist=node3", "--exclusive", "--requeue")
    await scene.until(lambda: "up" in scene.files(), "the script's trap")
    high = scene.submit("sleep 8", "--partition=high", "--nodelist=node3", "--exclusive")
    await scene.state(job, "COMPLETING")
    for _ in range(2):
        await scene.look(job, queue={job: "COMPLETING"})
    scene.expect(job, "running", "COMPLETING", 75)
    await scene.state(job, "PENDING")
    await scene.look(job, queue={job: "PENDING"})
    scene.expect(job, "running", "PENDING", 75)
    await scene.ended(high, job)
    await scene.look(job, queue={job: "COMPLETED"})
    scene.expect(job, "settled", "COMPLETED", 0, line="sacct")


SCENES: Final[tuple[Play, ...]] = (completing, requeued_completing, preempted_requeued)
