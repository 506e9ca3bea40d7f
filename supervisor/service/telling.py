"""What has happened, for whoever listens: the last events of all allocations, and readers that come and go.

An event is told when its line is on the disk, in the order of the numbers. The last ones are kept (`KEPT`): a reader
that comes later, or reads slowly, goes on where it had been as long as that is among them. Nothing is held back for
anybody, and nothing is queued for anybody: a reader takes from what is kept.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from operator import attrgetter
from typing import Final, NamedTuple

from supervisor.core import kept_events as ev
from supervisor.core.events import Event as KeptEvent
from supervisor.core.events import encode
from supervisor.core.kept import Kept
from supervisor.service.found import Line
from supervisor.service.interface import Event, Refusal, none_yet

KEPT: Final = 20_000

WORDS: Final[dict[type[KeptEvent], str]] = {
    ev.Accepted: "accepted",
    ev.Admitted: "admitted",
    ev.SubmissionBegun: "submitting",
    ev.SubmissionEnded: "submitted",
    ev.EngineBegun: "starting",
    ev.EngineStarted: "started",
    ev.EngineRefused: "started",
    ev.StateSeen: "state",
    ev.RunSeen: "run",
    ev.RunTold: "record",
    ev.RunOver: "run",
    ev.StopAsked: "stopping",
    ev.CancelTried: "stopping",
    ev.StopTried: "stopping",
    ev.JobEnded: "state",
    ev.Sealed: "sealed",
    ev.Copied: "copied",
    ev.Troubled: "trouble",
}
"""The kinds of events; the one by which an allocation ends is `ended`, whatever it is."""


def event_of(line: Line, state: Kept) -> Event:
    """A line of a book as it is told; `state` is that after it."""
    data = encode(line.event)
    del data["event"]
    data["state"] = state.phase
    if state.phase != "ended":
        return Event(line.seq, line.utc, line.key, WORDS[type(line.event)], data)
    return Event(line.seq, line.utc, line.key, "ended", {**data, "verdict": state.verdict, "receipt": state.receipt})


class _Kept(NamedTuple):
    """An event as text: a third of what it takes as an object."""

    seq: int
    text: bytes

    def event(self) -> Event:
        return Event(self.seq, *json.loads(self.text))


def _kept(event: Event) -> _Kept:
    rest = [event.utc, event.key, event.kind, event.data]
    return _Kept(event.seq, json.dumps(rest, separators=(",", ":")).encode())


class Told:
    """The events that are kept."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[_Kept] = deque(maxlen=kept)
        self._forgotten = 0  # the number of the last event that is not kept any more
        self._news = asyncio.Event()
        self._closed = False

    def add(self, event: Event) -> None:
        """One more; its number is the greatest so far."""
        if len(self._events) == self._events.maxlen:
            self._forgotten = self._events[0].seq
        self._events.append(_kept(event))
        self._news.set()
        self._news = asyncio.Event()

    def restore(self, events: Iterable[Event]) -> None:
        """What was told before the start, in the order of the numbers."""
        for event in events:
            self.add(event)

    def close(self) -> None:
        """Nothing more comes: readers end when they have read everything."""
        self._closed = True
        self._news.set()

    @property
    def last(self) -> int:
        """The number of the last event; 0 before there is one."""
        return self._events[-1].seq if self._events else self._forgotten

    def after(self, seq: int | None, key: str | None) -> AsyncGenerator[Event, None]:
        """Events with a greater number, then those to come. Raises Refusal (410)."""
        first = self._forgotten if seq is None else seq
        self._check(first)
        return self._read(first, key)

    def _check(self, seq: int) -> None:
        if seq < self._forgotten:
            raise Refusal(410, "gone", f"events up to {self._forgotten} are not kept any more", oldest=self._forgotten)
        if seq > self.last:
            raise none_yet(seq, self.last)

    async def _read(self, seq: int, key: str | None) -> AsyncGenerator[Event, None]:
        while True:
            self._check(seq)
            news, found = self._news, self._some(seq)
            for kept in found:
                seq, event = kept.seq, kept.event()  # one at a time: many readers may be slow
                if key is None or event.key == key:
                    yield event
            if not found and self._closed:
                return
            if not found:
                await news.wait()

    def _some(self, seq: int, many: int = 256) -> list[_Kept]:
        begin = bisect_right(self._events, seq, key=attrgetter("seq"))
        return [self._events[index] for index in range(begin, min(begin + many, len(self._events)))]
