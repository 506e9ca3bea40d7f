"""Slurm's time limit of the job, as the engine's host counts: read at the start, again while the job runs, and once
more when it seems to have come, for a limit can be changed under way.

This host's wall clock is asked once, at the first reading. From then on the limit moves as Slurm's EndTime does: a
clock that is set meanwhile moves nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from supervisor.core import events as ev
from supervisor.core.state import RunState
from supervisor.engine.clock import utc
from supervisor.scheduler.client import SlurmClient

REREAD_SOONEST: Final = 30.0  # seconds between two readings of the job's end time, at least


class EndTimeReader(Protocol):
    """Who knows when the allocation ends: Slurm, or nobody."""

    async def end_time(self) -> float | None:
        """When it ends, in seconds since the epoch; None when that is not known now."""


class SlurmClock:
    """The EndTime of a job from the controller: of a heterogeneous job, by its components' `records`, the first.

    Each component has a limit of its own. When the leader's has come, Slurm ends them all; when another's has, it ends
    that one alone, with the ranks there (measured on 22.05). Of a job that is over, EndTime tells when it ended, and
    that is no limit.
    """

    def __init__(self, client: SlurmClient, records: Sequence[str]) -> None:
        self._client = client
        self._records = records

    async def end_time(self) -> float | None:
        answers = await asyncio.gather(*map(self._client.show_job, self._records))
        ends = [record.end for answer in answers if (record := answer.record) and record.state.phase == "running"]
        return min((end for end in ends if end is not None), default=None)


class TimeLimit:
    """Tells the machine of every end time that is news."""

    def __init__(self, clock: EndTimeReader, post: Callable[[ev.Event], None], state: Callable[[], RunState]) -> None:
        self._clock = clock
        self._post = post
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._told: tuple[float, float] | None = None  # EndTime, and what it is on the monotonic clock

    async def follow(self) -> None:
        """Slurm's EndTime now, and again when half of the rest has passed: a limit may be changed under way."""
        while True:
            await self.read()
            end_at = self._state().end_at
            rest = 600.0 if end_at is None else (end_at - self._loop.time()) / 2
            await asyncio.sleep(max(REREAD_SOONEST, rest))

    async def read(self) -> None:
        """Tell the machine of an end time that it does not know yet."""
        end = await self._clock.end_time()
        if end is None:
            return
        if self._told is None:
            end_at = self._loop.time() + (end - time.time())
        else:
            before, end_at = self._told
            if abs(end - before) < 1.0:
                return
            end_at += end - before
        self._told = end, end_at
        self._post(ev.TimeLimitKnown(end_at, utc(end, "seconds")))
