"""Whether anything stirs in the directories of many runs: looked at in rounds, with one thread for each place of runs.

To look at a run closely costs a thread and a turn of the event loop; to ask whether it has grown costs two calls of
stat (`Follower.stirs`). So a service that follows many asks that of all of them every now and then (`PAUSE`), and looks
at those alone that have stirred, and once more in the next round, for what stirred may not have been visible yet.

A network file system's client answers stat from memory, for seconds where a file keeps growing and for up to a minute
where it has long been quiet (nfs(5): `acregmin`, `acregmax`). So late a change may be seen there; to ask the server
each time would be its load, and not ours. A close look, which does ask, comes now and then in any case (`rest`).

A place whose file system does not answer holds one thread for the rounds, and the few (`AT_ONCE`) that look closely;
nobody else waits for these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import uniform
from typing import Final, Protocol
from weakref import WeakValueDictionary

from supervisor.loop.threads import in_thread

PAUSE: Final = (0.25, 0.002, 0.02)
"""Seconds between rounds: at least, for each who takes part, and for each place. A thousand in a few places are asked
every other second."""
AT_ONCE: Final = 4  # close looks at one place: many together would only wait for each other
CLOSELY: Final = (10.0, 0.1)
"""Seconds between close looks at the same runs while nothing stirs: at least, and for each that is followed."""
FOREVER: Final = 1e6  # seconds: nobody waits for a round but the next one of the same place


class Stirring(Protocol):
    """Whose directories are looked at."""

    place: str

    def stirs(self) -> bool:
        """Whether there is something new, as far as a cheap look tells. Blocks; raises nothing."""


class _Place:
    def __init__(self) -> None:
        self.wakes: dict[Stirring, Callable[[], object]] = {}
        self.stirred: frozenset[Stirring] = frozenset()
        self.busy = False


class Rounds:
    """All that is followed. Used in one event loop."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.count = 0  # who takes part

    @property
    def rest(self) -> float:
        """Seconds from one close look to the next while nothing stirs."""
        least, each = CLOSELY
        return max(least, each * self.count * uniform(0.75, 1.25))  # noqa: S311 - not all of them at the same time

    def turns(self, place: str) -> asyncio.Semaphore:
        """Held by whoever looks closely at something in a place."""
        return self._turns.setdefault(place, asyncio.Semaphore(AT_ONCE))

    @contextmanager
    def among(self, who: Stirring, wake: Callable[[], object]) -> Iterator[None]:
        """Take part: `wake` is called when something stirs."""
        place = self._places.setdefault(who.place, _Place())
        place.wakes[who] = wake
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            del place.wakes[who]
            if not place.wakes:
                del self._places[who.place]

    async def run(self) -> None:
        """Go the rounds, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                least, each, each_place = PAUSE
                await asyncio.sleep(max(least, each * self.count, each_place * len(self._places)))
                for place in self._places.values():
                    if not place.busy:
                        group.create_task(self._round(place))

    async def _round(self, place: _Place) -> None:
        place.busy = True
        stirring = place.stirred
        with suppress(OSError):  # no thread to be had: the next round may get one
            stirring = await in_thread(_stirring, list(place.wakes), limit=FOREVER)
        for who in stirring | place.stirred:
            if wake := place.wakes.get(who):
                wake()
        place.stirred, place.busy = stirring, False


def _stirring(asked: list[Stirring]) -> frozenset[Stirring]:
    return frozenset(filter(_stirs, asked))


def _stirs(who: Stirring) -> bool:
    try:
        return who.stirs()
    except Exception:  # noqa: BLE001 - the close look that follows runs into it as well, and tells
        return True
