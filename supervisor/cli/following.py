"""Following the logs of a run or a job until nothing more can come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from supervisor.cli.live import Printer
from supervisor.cli.telling import StoryTeller
from supervisor.runs.follow import Follower, LogLines, News, Told, Trouble
from supervisor.runs.looks import Looks
from supervisor.runs.saved import Unreadable
from supervisor.runs.target import Target
from supervisor.runs.waiting import first_error, job_end
from supervisor.scheduler.client import SlurmClient, slurm_is_here
from supervisor.scheduler.parts import list_parts
from supervisor.scheduler.poller import Poller

LONGEST: Final = 1.0  # seconds between looks while nothing comes
DRAIN: Final = 3600.0  # whoever reads the logs may take its time
SILENT: Final = 10.0  # seconds that a Slurm which cannot be asked is waited for when all runs are over


class Following:
    """The end is that of the run, where one was asked for (`target.directories`); of a job, what Slurm says. `wanted`
    chooses logs by rank and kind; `ranks` are those that were asked for; `write` prints lines, and may take its time.
    """

    def __init__(
        self,
        target: Target,
        printer: Printer,
        wanted: Callable[[int, str], bool],
        ranks: Sequence[int] | None,
        write: Callable[[LogLines], None],
    ) -> None:
        self._ranks = ranks
        self._target = target
        self._teller = StoryTeller(target, printer)
        self._asks = not target.alone and slurm_is_here()
        self._write = write
        self._runs_over = asyncio.Event()
        self._follower = Follower(
            target.jobid,
            target.places,
            lambda _state, rank, kind: wanted(rank, kind),
            directories=target.directories,
            tasks="_" not in target.jobid,
            asked=target.asked,
            engine=not self._asks,
        )

    async def run(self) -> None:
        """To the end. Raises Unreadable when the run has no such rank, OSError when nobody reads any more."""
        looks = Looks(self._follower, self._heard, self._write, longest=LONGEST)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(looking) for looking in (looks.run(), looks.watch())]
                await self._end()
                await looks.drain(DRAIN)
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _end(self) -> None:
        """Wait until nothing more can come."""
        async with asyncio.TaskGroup() as group:
            over = group.create_task(self._runs_over.wait())
            tasks = [over, *([group.create_task(self._job_end())] if self._asks else [])]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A job whose runs are over may be queued again: it is Slurm that knows, if it can be asked.
            while not self._target.directories and self._asks and not tasks[-1].done():
                await asyncio.wait(tasks[-1:], timeout=SILENT)
                if self._teller.away:
                    break
            for task in tasks:
                task.cancel()

    async def _job_end(self) -> None:
        client = SlurmClient(cluster=self._target.cluster)
        poller = Poller(client)
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(poller.run())
            await job_end(
                self._target, poller, lambda jobid: list_parts(client, jobid), self._teller.seen, self._teller.ended
            )
            polling.cancel()

    def _heard(self, news: News) -> None:
        if isinstance(news, Trouble):
            self._teller.news(news)
        elif isinstance(news, Told):
            count = len(news.state.ranks)
            if news.record.seq == 1 and self._ranks and min(self._ranks) >= count:
                raise Unreadable(f"the run has no such rank: it has {count}, from 0 on")
        elif all(run.over for run in self._follower.runs.values()):
            self._runs_over.set()
