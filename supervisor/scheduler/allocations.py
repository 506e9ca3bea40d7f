"""Somebody else's allocation, as Slurm tells of it: what a program inside would read from its variables.

squeue lists the parts of the job (an array's tasks, the components of a heterogeneous job, for any id that belongs to
it); then the controller is asked for the record of each: its nodes, and its raw id. Only a job that runs can be
adopted, and only by its own user: srun of another one is refused by Slurm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from supervisor.core.allocation import Allocation, Component
from supervisor.core.answers import Answer
from supervisor.core.slurm import parse_job_id
from supervisor.core.slurm_records import JobRecord
from supervisor.scheduler.client import Queue


class NoAllocation(Exception):
    """There is no such allocation to run in; the message says why, and what to do."""


class Lists(Protocol):
    """What finding an allocation needs of a Slurm client."""

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs."""

    async def show_job(self, jobid: str) -> Answer:
        """What the controller says."""

    async def sacct(self, jobid: str) -> Answer:
        """What accounting says."""


@dataclass(frozen=True, slots=True)
class Found:
    """An allocation, its owner, and the name of its cluster ("" where accounting does not tell it yet)."""

    allocation: Allocation
    user: str
    cluster: str


async def find_allocation(client: Lists, jobid: str, uid: int) -> Found:
    """The running job `jobid` (`123`, a task `123_4`) of the user `uid`. Raises NoAllocation."""
    try:
        if parse_job_id(jobid).step is not None:
            raise NoAllocation(f"{jobid} is a step: name its job")
    except ValueError as error:
        raise NoAllocation(str(error)) from error
    names = await _parts(client, jobid)
    *answers, booked = await asyncio.gather(*map(client.show_job, names), client.sacct(names[0]))
    records = [_running(name, answer, uid) for name, answer in zip(names, answers, strict=True)]
    first = records[0]
    components = tuple(Component(record.jobid, record.nodes) for record in records)
    display = first.jobid if len(records) > 1 else first.display
    allocation = Allocation(display, first.jobid, first.restarts or 0, components)
    return Found(allocation, first.user, booked.record.cluster if booked.record else "")


async def _parts(client: Lists, jobid: str) -> list[str]:
    """The ids by which the controller knows the components of a heterogeneous job; of every other job its own."""
    queue = await client.queue([jobid])
    if queue.problem:
        raise NoAllocation(f"Slurm could not be asked about job {jobid}: {queue.problem}")
    if not queue.rows:
        raise NoAllocation(f"Slurm does not know a job {jobid} that runs: squeue lists those that do")
    if len(queue.rows) == 1 and "[" not in (only := next(iter(queue.rows))):
        return [only]
    if not all("+" in name for name in queue.rows):
        raise NoAllocation(f"job {jobid} is an array: name one of its tasks, such as {next(iter(queue.rows))}")
    return sorted(queue.rows, key=lambda name: int(name.partition("+")[2]))


def _running(name: str, answer: Answer, uid: int) -> JobRecord:
    record = answer.record
    if record is None:
        raise NoAllocation(f"Slurm does not tell of job {name}: {answer.problem or 'it is gone'}")
    if record.uid not in (None, uid):
        raise NoAllocation(f"job {name} is {record.user}'s: only its owner can start steps in it")
    if record.state.phase != "running" or not record.nodes:
        raise NoAllocation(f"job {name} is in state {record.state_text}, and only a job that runs can be adopted")
    return record
