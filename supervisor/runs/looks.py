"""Looking at a job's runs from an event loop: in threads, at a pace that follows what happens, never twice at a time.

While there is news the next look comes soon; while there is none, looks come ever more slowly. Where many
are followed, looks come when something stirs (`rounds.py`), and take turns. A file system that does not answer holds a
thread and nothing else: that is told once, and once more when it answers again. Lines of logs are written by a thread
too, and the next look waits for that: whoever reads them slowly slows down the reading, and nothing is dropped.

Where the file system tells of changes, its events wake the looks (`watch`); they are hints, and a look comes in any
case: on a shared file system nobody tells of what another machine wrote.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext, suppress
from typing import Final

from supervisor.loop.flag import Flag
from supervisor.loop.threads import in_thread
from supervisor.runs.follow import Follower, LogLines, News, Trouble
from supervisor.runs.rounds import Rounds

SHORTEST: Final = 0.2  # seconds between looks while there is news
LONGEST: Final = 2.0  # and while there is none
SLOWER: Final = 1.5
LOOK_LIMIT: Final = 10.0  # seconds that one look may take
EVENTS: Final = (200, 400)
"""Milliseconds: between two looks of watchfiles at what the kernel has told (each of these costs), and in which news
become one."""
FOREVER: Final = 1e6  # seconds: whoever reads the logs may take its time


class Looks:
    """`heard` is called in the loop for each piece of news but lines of logs, which go to `write`, in a thread. There
    are at most `longest` seconds between two looks; where the follower takes part in `rounds`, these say when."""

    def __init__(
        self,
        follower: Follower,
        heard: Callable[[News], None],
        write: Callable[[LogLines], None],
        *,
        longest: float = LONGEST,
        rounds: Rounds | None = None,
        limit: float = LOOK_LIMIT,
    ) -> None:
        self._follower = follower
        self._heard = heard
        self._write = write
        self._longest = longest
        self._rounds = rounds
        self._limit = limit
        self._looking = threading.Lock()
        self._hangs = False
        self._last = False
        self._progress = 0
        self._wake = Flag()
        self._drained = Flag()
        self._watched: frozenset[str] = frozenset()
        self._others = asyncio.Event()  # what is to be watched has changed

    def wake(self) -> None:
        """Something may have happened: look soon, and look closely."""
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled, or until `drain` has told everything."""
        with self._rounds.among(self._follower, self.wake) if self._rounds else nullcontext():
            await self._run(self._rounds.turns(self._follower.place) if self._rounds else nullcontext())

    async def _run(self, turns: AbstractAsyncContextManager[object]) -> None:
        pause = SHORTEST
        while True:
            last = self._last
            async with turns:
                busy = await self._look(last)
            self._watch_living()
            if self._follower.more:
                continue
            if last and not busy and not self._hangs:
                self._drained.set()
                return
            if self._rounds is not None:
                pause = self._rounds.rest
            else:
                pause = SHORTEST if busy else min(pause * SLOWER, self._longest)
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if self._last else pause):
                    await self._wake.wait()
                pause = SHORTEST
            self._wake.clear()

    async def watch(self) -> None:
        """Wake the looks at what the kernel tells of the runs that live, until cancelled. Where it tells nothing (no
        room for another watch, a directory that is gone), the looks' own pace is all there is."""
        from watchfiles import awatch

        step, debounce = EVENTS
        while True:
            self._others.clear()
            if self._watched:
                with suppress(OSError, RuntimeError):  # RuntimeError: watchfiles' own
                    changes = awatch(*self._watched, step=step, debounce=debounce, stop_event=self._others)
                    async with aclosing(changes):
                        async for _ in changes:
                            self.wake()
            await self._others.wait()

    def _watch_living(self) -> None:
        living = frozenset(run.directory for run in self._follower.runs.values() if not run.over)
        if living != self._watched:
            self._watched = living
            self._others.set()

    async def drain(self, limit: float) -> str | None:
        """Wait until everything is told that was written so far, when nobody writes any more. A sentence if it is not,
        for nothing could be told in the last `limit` seconds."""
        self._last = True
        self._wake.set()
        while True:
            before = self._progress
            try:
                async with asyncio.timeout(limit):
                    await self._drained.wait()
                return None
            except TimeoutError:
                if self._progress == before:
                    why = "its directories cannot be looked at" if self._hangs else "nobody reads them"
                    return f"not all lines that the run has written could be told: {why}"

    async def _look(self, last: bool) -> bool:
        """One look, or at most `limit` seconds of it; whether there was news."""
        try:
            await in_thread(self._in_turn, last, limit=self._limit)
        except OSError as error:  # a TimeoutError, or no thread to be had
            if not self._hangs:
                self._heard(Trouble(f"the run's directories cannot be looked at: {error}"))
            self._hangs = True
        else:
            if self._hangs:
                self._heard(Trouble("the run's directories can be looked at again"))
            self._hangs = False
        news = self._follower.take()
        lines = [item for item in news if isinstance(item, LogLines)]
        for item in news:
            if not isinstance(item, LogLines):
                self._heard(item)
        self._progress += len(news)
        if lines:
            await in_thread(self._write_all, lines, limit=FOREVER)
        return bool(news)

    def _in_turn(self, last: bool) -> None:
        """In the thread. While a look hangs, the next one waits for it, as long as a look may take."""
        if not self._looking.acquire(timeout=self._limit):
            raise TimeoutError(f"no answer within {self._limit:g} s")
        try:
            self._follower.look(last)
        finally:
            self._looking.release()

    def _write_all(self, lines: list[LogLines]) -> None:
        for item in lines:
            self._write(item)
            self._progress += 1
