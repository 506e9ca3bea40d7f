"""Somebody else's allocation: its parts, its nodes, and why it cannot be adopted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pytest

from supervisor.core.allocation import Allocation, Component
from supervisor.core.answers import Answer, read_answer
from supervisor.core.slurm import parse_state
from supervisor.core.slurm_queue import QueueRow
from supervisor.scheduler.allocations import NoAllocation, find_allocation
from supervisor.scheduler.client import Queue

SHOWN = """\
JobId={raw} {parts}JobName=x
   UserId=ann({uid}) GroupId=ann(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=0 Reboot=0 ExitCode=0:0
   NodeList={nodes}
"""


@dataclass
class Slurm:
    """Jobs by display id, as scontrol shows them."""

    shown: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    booked: str = ""

    async def queue(self, jobids: Collection[str]) -> Queue:
        rows = {
            name: QueueRow(name, name, parse_state("RUNNING"), None, None, None, 1000, 0, "") for name in self.shown
        }
        return Queue(("squeue",), "", 0, problem=self.problem, rows=rows)

    async def show_job(self, jobid: str) -> Answer:
        return answer("scontrol", jobid, self.shown[jobid])

    async def sacct(self, jobid: str) -> Answer:
        return answer("sacct", jobid, self.booked)


def answer(source: str, jobid: str, text: str) -> Answer:
    return read_answer(
        source=source,  # type: ignore[arg-type]
        jobid=jobid,
        argv=[source],
        at="2026-11-30T20:28:38.000+00:00",
        returncode=0 if text or source == "sacct" else 1,
        stdout=text,
        stderr="" if text or source == "sacct" else "slurm_load_jobs error: Invalid job id specified\n",
    )


def shown(raw: int, nodes: str, parts: str = "", state: str = "RUNNING", uid: int = 1000, restarts: int = 0) -> str:
    return SHOWN.format(raw=raw, nodes=nodes, parts=parts, state=state, uid=uid, restarts=restarts)


def found(slurm: Slurm, jobid: str) -> Allocation:
    return asyncio.run(find_allocation(slurm, jobid, 1000)).allocation


def test_a_plain_job_with_its_owner_and_cluster() -> None:
    slurm = Slurm({"7": shown(7, "n[1-2]", restarts=1)}, booked="7|RUNNING|0:0|0:0|7|1000|1001|Unknown|ann|c|n[1-2]\n")
    told = asyncio.run(find_allocation(slurm, "7", 1000))
    assert told.allocation == Allocation("7", "7", 1, (Component("7", ("n1", "n2")),))
    assert (told.user, told.cluster) == ("ann", "c")
    assert asyncio.run(find_allocation(Slurm({"7": shown(7, "n1")}), "7", 1000)).cluster == ""


def test_a_task_is_known_by_array_and_task_and_named_to_srun_by_its_raw_id() -> None:
    slurm = Slurm({"5_3": shown(8, "n1", "ArrayJobId=5 ArrayTaskId=3 ")})
    assert found(slurm, "5_3") == found(slurm, "8") == Allocation("5_3", "8", 0, (Component("8", ("n1",)),))


def test_a_heterogeneous_job_is_adopted_whole_by_any_of_its_ids() -> None:
    parts = {f"7+{n}": shown(7 + n, f"n{n}", f"HetJobId=7 HetJobOffset={n} ") for n in (10, 2, 0)}
    wanted = Allocation("7", "7", 0, tuple(Component(str(7 + n), (f"n{n}",)) for n in (0, 2, 10)))
    assert found(Slurm(parts), "7") == found(Slurm(parts), "7+2") == wanted


@pytest.mark.parametrize(
    ("slurm", "jobid", "says"),
    [
        (Slurm(), "7", "Slurm does not know a job 7 that runs"),
        (Slurm(problem="squeue did not answer within 5 s"), "7", "could not be asked about job 7: squeue did not"),
        (Slurm({"7": ""}), "7", "Slurm does not tell of job 7: it is gone"),
        (Slurm({"7": shown(7, "(null)", state="PENDING")}), "7", "is in state PENDING, and only a job that runs"),
        (Slurm({"7": shown(7, "n1", state="COMPLETING")}), "7", "is in state COMPLETING"),
        (Slurm({"7": shown(7, "n1", uid=0)}), "7", "job 7 is ann's: only its owner"),
        (Slurm({"5_1": "", "5_2": ""}), "5", "job 5 is an array: name one of its tasks, such as 5_1"),
        (Slurm({"5_[1-9]": ""}), "5", "job 5 is an array"),
        (Slurm(), "7.0", "7.0 is a step: name its job"),
        (Slurm(), "--all", "--all"),
    ],
)
def test_what_cannot_be_adopted(slurm: Slurm, jobid: str, says: str) -> None:
    with pytest.raises(NoAllocation, match=re.escape(says)):
        found(slurm, jobid)
