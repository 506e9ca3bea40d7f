"""Somebody who answers, in memory: everything that `interface.Answering` promises, and no Slurm behind it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from supervisor.service.api import Api
from supervisor.service.interface import (
    STATES,
    AdoptRequest,
    Allocation,
    Document,
    Event,
    Kind,
    Refusal,
    SubmitRequest,
    none_yet,
)
from supervisor.service.metrics import Metrics
from supervisor.service.server import Server
from supervisor.service.sockets import listen

NOW = "2026-01-02T03:04:05.678Z"


class World:
    """Answers. `endless`: events go on after those that are known, and what is submitted does not end at once, so that
    a stream may have no end; `kept`: how many events are remembered."""

    def __init__(self, *, endless: bool = True, kept: int = 100_000) -> None:
        self.meter = Metrics()
        self.meter.gauge("allocd_allocations", "Allocations, by state.", "state", self.states)
        self._since = datetime.now(UTC).isoformat()
        self.upset: dict[str, Exception] = {}  # by plan: what comes of submitting it
        self.waiting = 0  # readers of events that know all there is
        self._held: dict[str, Allocation] = {}
        self._asked: dict[str, tuple[Any, str]] = {}
        self._events: list[Event] = []
        self._dropped = 0
        self._news = asyncio.Condition()
        self._endless, self._kept = endless, kept
        self._numbers = itertools.count(1)

    # --- what happens -------------------------------------------------------------------------------------------------

    def put(self, kind: Kind = "submitted", **more: Any) -> Allocation:
        """One more allocation."""
        number = next(self._numbers)
        known: dict[str, Any] = {"state": "running", "name": "bench", "jobid": str(1000 + number), **more}
        made = Allocation(key=f"a{number}", kind=kind, created=NOW, changed=NOW, **known)
        self._held[made.key] = made
        return made

    def change(self, key: str, **changes: Any) -> Allocation:
        self._held[key] = replace(self._held[key], **changes)
        return self._held[key]

    async def tell(self, key: str, kind: str = "state", **data: Any) -> Event:
        """Something happens."""
        happened = Event(self._dropped + len(self._events) + 1, NOW, key, kind, data)
        async with self._news:
            self._events.append(happened)
            if len(self._events) > self._kept:
                del self._events[0]
                self._dropped += 1
            self._news.notify_all()
        return happened

    async def fall_silent(self) -> None:
        """No event comes any more: whoever waits for one is told so."""
        async with self._news:
            self._endless = False
            self._news.notify_all()

    @property
    def last(self) -> int:
        return self._dropped + len(self._events)

    def states(self) -> dict[str, float]:
        return {**dict.fromkeys(STATES, 0), **Counter(item.state for item in self._held.values())}

    # --- what is asked ------------------------------------------------------------------------------------------------

    def allocations(self) -> Sequence[Allocation]:
        return tuple(self._held.values())

    def find(self, name: str) -> Allocation:
        for item in reversed(self._held.values()):
            if name in (item.key, item.jobid, item.run_id):
                return item
        raise Refusal(404, "not_found", f"there is no allocation {name!r}")

    async def submit(self, request: SubmitRequest, key: str | None) -> Allocation:
        if request.plan in self.upset:
            raise self.upset[request.plan]
        return await self._new("submitted", request, key)

    async def adopt(self, request: AdoptRequest, key: str | None) -> Allocation:
        return await self._new("adopted", request, key, jobid=request.jobid)

    async def follow(self, jobid: str, cluster: str | None) -> Allocation:
        return await self._new("followed", (jobid, cluster), None, jobid=jobid, cluster=cluster)

    async def _new(self, kind: Kind, request: Any, key: str | None, **more: Any) -> Allocation:
        if key in self._asked:
            former, name = self._asked[key]
            if former != request:
                raise Refusal(409, "conflict", f"the idempotency key {key!r} was used for another request")
            return self._held[name]
        made = self.put(kind, state="pending" if self._endless else "ended", **more)
        if key is not None:
            self._asked[key] = (request, made.key)
        await self.tell(made.key, "accepted")
        return made

    async def stop(self, name: str, how: Literal["stop", "cancel"]) -> Allocation:
        found = self.find(name)
        await self.tell(found.key, "stopping", how=how)
        return self.change(found.key, stopping=how)

    def events(self, after: int | None, key: str | None = None) -> AsyncGenerator[Event, None]:
        if after is not None and after < self._dropped:
            raise Refusal(410, "gone", f"events up to {self._dropped} are not kept any more")
        if (after or 0) > self.last:
            raise none_yet(after or 0, self.last)
        return self._told(self._dropped if after is None else after, key)

    async def _told(self, after: int, key: str | None) -> AsyncGenerator[Event, None]:
        while True:
            while (at := max(0, after - self._dropped)) < len(self._events):
                happened = self._events[at]
                after = happened.seq
                if key in (None, happened.key):
                    yield happened
            async with self._news:
                if self._dropped + len(self._events) <= after:
                    if not self._endless:
                        return
                    self.waiting += 1
                    try:
                        await self._news.wait()
                    finally:
                        self.waiting -= 1

    def health(self) -> Document:
        return {
            "kind": "world",
            "pid": os.getpid(),
            "since": self._since,
            "states": self.states(),
            "last_event": self.last,
        }

    def metrics(self) -> bytes:
        return self.meter.render()


@asynccontextmanager
async def served(world: World, directory: Path, faults: list[str] | None = None) -> AsyncIterator[tuple[Server, str]]:
    """The world's API on a socket below `directory`: the server, and the socket's path. What breaks in it fails the
    test, or is in `faults`."""
    found: list[str] = [] if faults is None else faults
    api = Api(world, world.meter, found.append)
    listener = listen(str(directory / "allocd"))
    server = Server(api, listener)
    assert listener.path is not None
    task = asyncio.create_task(server.serve())
    try:
        await asyncio.wait_for(server.wait_until_it_listens(), 10)
        yield server, listener.path
    finally:
        server.stop()
        await asyncio.wait_for(task, 30)
    assert faults is not None or not found, found[0]
