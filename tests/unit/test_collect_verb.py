"""`allocctl collect`: from which allocation, if any, a run's nodes can be reached now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from supervisor.cli.collect import Unreachable, allocation_of
from supervisor.core.allocation import Allocation, Component
from supervisor.core.answers import Answer, read_answer
from supervisor.core.slurm_queue import parse_squeue_jobs
from supervisor.scheduler.client import Queue, SlurmClient
from tests.unit.test_srun import HET, PLAIN, TASK, layout_of

RUNNING = "   JobState=RUNNING\n   Requeue=1 Restarts=0\n   ExitCode=0:0\n   StartTime=1\n   NodeList={}\n"
HEADS = {
    "7": "JobId=7 JobName=x\n",
    "5_3": "JobId=7 ArrayJobId=5 ArrayTaskId=3 JobName=x\n",
    "7+0": "JobId=7 HetJobId=7 HetJobOffset=0 JobName=x\n",
    "7+1": "JobId=8 HetJobId=7 HetJobOffset=1 JobName=x\n",
}


class Slurm(SlurmClient):
    """Knows jobs by their display ids."""

    def __init__(self, **jobs: str) -> None:
        super().__init__(environ={})
        self.jobs = jobs

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        return tuple(self.jobs)

    async def queue(self, jobids: Collection[str]) -> Queue:
        rows = "".join(f"7|{name}|RUNNING|1000|N/A|N/A|1000|0|None|\n" for name in self.jobs)
        return Queue(("squeue",), "then", 0, rows, rows={row.display: row for row in parse_squeue_jobs(rows)})

    async def show_job(self, jobid: str) -> Answer:
        text = HEADS[jobid] + self.jobs[jobid] if jobid in self.jobs else ""
        return read_answer(
            source="scontrol",
            jobid=jobid,
            argv=["scontrol"],
            at="2025-01-01T00:00:00+00:00",
            returncode=0 if text else 1,
            stdout=text,
            stderr="" if text else "slurm_load_jobs error: Invalid job id specified",
            trouble="",
        )


@pytest.mark.parametrize(
    ("jobs", "allocation"),
    [
        ({"7": RUNNING.format("n[1-2]")}, PLAIN),
        ({"5_3": RUNNING.format("n[1-2]")}, TASK),
        ({"7+0": RUNNING.format("n1"), "7+1": RUNNING.format("n2")}, HET),
    ],
)
async def test_a_job_that_runs(jobs: dict[str, str], allocation: Allocation) -> None:
    assert await allocation_of(Slurm(**jobs), layout_of(allocation)) == allocation


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ({}, "job 7 does not run"),
        ({"7": RUNNING.format("n[1-2]").replace("RUNNING", "COMPLETED")}, "job 7 does not run.*COMPLETED"),
        ({"7": RUNNING.format("n[1-2]").replace("RUNNING", "PENDING")}, "job 7 does not run.*PENDING"),
        ({"7": RUNNING.format("n[1-2]").replace("Restarts=0", "Restarts=1")}, "requeued since"),
        ({"7": RUNNING.format("n[3-4]")}, "not on the run's nodes any more"),
    ],
)
async def test_why_the_nodes_cannot_be_reached(jobs: dict[str, str], why: str) -> None:
    with pytest.raises(Unreachable, match=why):
        await allocation_of(Slurm(**jobs), layout_of(PLAIN))


async def test_the_attempt_that_runs_is_reached() -> None:
    again = replace(layout_of(PLAIN), run_id="7.r2.s3")
    jobs = {"7": RUNNING.format("n[1-2]").replace("Restarts=0", "Restarts=2")}
    expected = Allocation("7", "7", 2, (Component("7", ("n1", "n2")),))
    assert await allocation_of(Slurm(**jobs), again) == expected
