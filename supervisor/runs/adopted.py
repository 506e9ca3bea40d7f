"""The last word about an adopted run: Slurm is asked about its steps until it can be sealed.

A run's engine asks so when it has ended, and `verify` and `wait` of the run's id ask again where that was too early:
accounting is a tenth of a second late, and can be away for minutes. What is asked for is said in `core/verdict.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Protocol

from supervisor.core.answers import Answer
from supervisor.core.truth import Truth
from supervisor.loop.threads import in_thread
from supervisor.runs.papers import papers_of
from supervisor.runs.sealing import Sealed, seal_adopted
from supervisor.scheduler.client import Queue
from supervisor.scheduler.inquiry import USUAL, Inquiry, silent
from supervisor.scheduler.parts import list_parts

SEAL_LIMIT: Final = 60.0  # seconds for the files of one attempt


class Asked(Protocol):
    """Who is asked."""

    async def sacct(self, jobid: str) -> Answer:
        """What accounting says of a job and its steps."""

    async def show_job(self, jobid: str) -> Answer:
        """What the controller says."""

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs."""

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        """The display ids of accounting's rows for the job."""


async def settle(
    client: Asked,
    run_dir: str,
    patience: float,
    *,
    outage: float | None = None,
    wait: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Sealed:
    """What is sealed of the run, or, when the records have not come within `patience` seconds, what is known of it. The
    time in which Slurm could not be asked does not count, up to `outage` seconds of it (None: it counts). A run that
    lives is waited for only with `wait`. Raises OSError, Unreadable."""
    papers = await in_thread(papers_of, run_dir, limit=SEAL_LIMIT)
    if papers.sealed is not None:
        return Sealed([papers.sealed], before=True)
    left = {False: patience, True: patience if outage is None else outage}  # by whether Slurm is away
    at, away, pause = clock(), False, 0.0
    inquiries = await _inquiries(client, papers.jobid, patience)
    while True:
        truths = [await _hear(client, inquiry) for inquiry in inquiries]
        sealed = await in_thread(seal_adopted, run_dir, truths, 0.0, limit=SEAL_LIMIT)
        now = clock()
        left[away] -= now - at
        at, away = now, outage is not None and any(silent(truth.answers[-2:]) for truth in truths)
        if sealed.document["verdict"]["final"] or left[away] <= 0 or (_lives(sealed) and not wait):
            return sealed
        pause = min(pause * USUAL.factor, USUAL.away) if away and pause else inquiries[0].pause
        await sleep(min(pause, left[away]))


def _lives(sealed: Sealed) -> bool:
    """Whether the engine still writes (or is on another host, and may)."""
    return sealed.document["run"].get("alive", False) is not False


async def _inquiries(client: Asked, jobid: str, patience: float) -> list[Inquiry]:
    """One for the job, or for each component of a heterogeneous one."""
    whole = Inquiry(jobid, USUAL, time.monotonic(), patience=patience)
    if (await _hear(client, whole)).standing != "several":
        return [whole]
    parts = await list_parts(client, jobid)
    return [Inquiry(name, USUAL, time.monotonic(), patience=patience) for name in parts.names]


async def _hear(client: Asked, inquiry: Inquiry) -> Truth:
    """One round of both books: accounting always, for it alone knows of steps."""
    new = [await client.sacct(inquiry.jobid)]
    new.append(await client.show_job(inquiry.controllers_id(new)))
    return inquiry.hear(new, time.monotonic())
