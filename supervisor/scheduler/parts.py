"""Ask about a whole array or heterogeneous job: which parts it has, and how each of them ended.

The parts are followed through one poller, so the number of calls does not grow with their number: one squeue for all
that live, one sacct for all that ended, scontrol only for those about which accounting alone does not decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from supervisor.core.parts import Parts, parts_of
from supervisor.core.slurm import parse_state
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide
from supervisor.scheduler.client import Queue
from supervisor.scheduler.inquiry import USUAL, Pace
from supervisor.scheduler.poller import Asked, Poller, Seen


class Lists(Protocol):
    """What listing parts needs of a Slurm client."""

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs, each task and component in a row of its own."""

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        """The display ids of accounting's rows for the job."""


async def list_parts(
    client: Lists, jobid: str, *, tasks: Sequence[int] | None = None, components: int | None = None
) -> Parts:
    """The parts of a job that is called by its plain id; `tasks` and `components` as its submission asked for them."""
    booked = await client.part_ids(jobid)
    queue = await client.queue([jobid])
    return parts_of(jobid, booked, None if queue.problem else queue.rows, tasks=tasks, components=components)


async def verify_parts(
    client: Asked,
    names: Sequence[str],
    wait: bool,
    patience: float,
    *,
    limit: float | None = None,
    pace: Pace = USUAL,
    told: Callable[[str, Seen], object] = lambda name, seen: None,
    make: Callable[..., Poller] = Poller,
) -> dict[str, Truth]:
    """The truth about each part, or a doubt with its reason, in the order of `names`; Slurm's trouble never raises.

    As `verify_job`: a part that is not over is a doubt, at once unless `wait`; with `wait` it is followed to its end,
    all of them together at most `limit` seconds (None: however long). `patience` is in seconds of doubt or silence.
    `told` hears of each change that Slurm shows of a part.
    """
    poller = make(client, pace=replace(pace, patience=patience, outage=patience))
    truths: dict[str, Truth] = {}
    async with asyncio.TaskGroup() as group:
        polling = group.create_task(poller.run())
        ends = [group.create_task(_end(poller, name, wait, told, truths)) for name in dict.fromkeys(names)]
        if ends:
            await asyncio.wait(ends, timeout=limit)
        for task in (polling, *ends):
            task.cancel()
    for name in names:
        if name not in truths:  # it lives, or the time was up
            truths[name] = decide(name, [await client.show_job(name)])
    return {name: truths[name] for name in names}


async def _end(
    poller: Poller, name: str, wait: bool, told: Callable[[str, Seen], object], truths: dict[str, Truth]
) -> None:
    """Wait for a part's end, and put its truth there; or, unless `wait`, until it is seen alive."""
    lives = asyncio.Event()

    def changed(seen: Seen) -> None:
        told(name, seen)
        if parse_state(seen.state).phase in ("waiting", "running") and not seen.trouble:
            lives.set()

    follow = poller.follow(name, changed)
    ended = asyncio.create_task(follow.end(), name=f"the end of {name}")
    alive = asyncio.create_task(lives.wait(), name=f"life of {name}")
    try:
        await asyncio.wait([ended] if wait else [ended, alive], return_when=asyncio.FIRST_COMPLETED)
    finally:
        follow.close()
        ended.cancel()
        alive.cancel()
        await asyncio.gather(ended, alive, return_exceptions=True)
    if follow.truth is not None:
        truths[name] = follow.truth
