"""Looks at what the run's files say, and tells the machine what changed: contracts, and a marker that a script
publishes.

Looking is a thread's work and happens after a hint (an event in one of the directories, a request of the machine) or
once a second, never twice at a time. Contracts that have come to their end are not read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from supervisor.contracts import Examiner, Place, directories, examiner, places
from supervisor.core import events as ev
from supervisor.core.artifacts import Finding, Instance, instances
from supervisor.core.layout import Layout
from supervisor.core.marker import Foreign, Garbage, Marker, Reading, explain
from supervisor.engine import markers
from supervisor.engine.threads import in_thread
from supervisor.watch.directories import DirectoryHints

LOOK_LIMIT: Final = 25.0  # seconds for one contract; longer is a file system that does not answer
WATCH_LIMIT: Final = 0.5  # seconds that the first look waits for events to be asked for


def contract_root(layout: Layout, instance: Instance) -> Path:
    """The directory that a contract's files are in, substituted."""
    (place,) = places([instance], layout.values)
    return place.root


def contract_directories(layout: Layout, instance: Instance) -> tuple[Path, ...]:
    """The deepest directories of a contract that its patterns name literally."""
    (place,) = places([instance], layout.values)
    return directories(place)


class Looker:
    """One per run. `open_contracts` tells which contracts still matter; `post` gives events to the machine."""

    def __init__(
        self, layout: Layout, post: Callable[[ev.Event], None], open_contracts: Callable[[], frozenset[str]]
    ) -> None:
        self._layout = layout
        self._post = post
        self._open_contracts = open_contracts
        self.instances = instances(layout.plan)
        self._places = places(self.instances, layout.values)
        self._examiners: dict[str, Examiner] = {}  # by the artifact's name
        for artifact in layout.plan.artifacts:
            self._examiners[artifact.name] = examiner([p for p in self._places if p.instance.artifact is artifact])
        self._findings: dict[str, Finding] = {}
        self._hung: dict[str, float] = {}  # seconds of the last pause, for contracts whose directory did not answer
        self._not_before: dict[str, float] = {}
        self._watches_marker = layout.plan.marker.by == "coordinator"
        self._reading: Reading | None = None
        self._asked: list[int] = []
        self._wake = asyncio.Event()

    @property
    def has_work(self) -> bool:
        return bool(self.instances) or self._watches_marker

    def ask(self, asked: int) -> None:
        """Look at every open contract now, and say so with ArtifactsLooked(asked)."""
        self._asked.append(asked)
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled."""
        watched = {str(directory) for place in self._places for directory in directories(place)}
        if self._watches_marker:
            watched.add(str(Path(self._layout.marker).parent))
        hints = DirectoryHints(watched, self._wake.set)
        told = False
        try:
            while True:
                self._wake.clear()
                if hints.missing:
                    with suppress(TimeoutError):
                        await in_thread(hints.watch, limit=WATCH_LIMIT)
                if hints.trouble and not told:
                    told = True
                    self._post(ev.Noted(f"files are looked at once a second, for there are no events: {hints.trouble}"))
                await self._look()
                await self._wake.wait()
        finally:
            hints.close()
            for kept in self._examiners.values():
                kept.close()

    async def _look(self) -> None:
        asked, self._asked = self._asked, []
        wanted = self._open_contracts()
        for place in self._places:
            if place.instance.contract_id in wanted:
                await self._check(place)
        if self._watches_marker:
            await self._read_marker()
        for number in asked:
            self._post(ev.ArtifactsLooked(number))

    async def _check(self, place: Place) -> None:
        instance = place.instance
        if asyncio.get_running_loop().time() < self._not_before.get(instance.contract_id, 0.0):
            return  # each look that never returns leaves a thread behind: they become rare
        try:
            finding = await in_thread(self._examiners[instance.artifact.name].look, place, limit=LOOK_LIMIT)
        except TimeoutError:
            text = f"artifact {instance.contract_id}: {place.root} did not answer within {LOOK_LIMIT:g} s"
            self._post(ev.Noted(text))
            self._hung[instance.contract_id] = pause = 2 * self._hung.get(instance.contract_id, LOOK_LIMIT)
            self._not_before[instance.contract_id] = asyncio.get_running_loop().time() + pause
            return
        except Exception as error:  # noqa: BLE001 - a checker that breaks is our fault, never "pending"
            self._post(ev.CheckerFault(instance.contract_id, f"{type(error).__name__}: {error}"))
            return
        told = self._findings.get(instance.contract_id)
        if (
            told is None
            or finding.answer == "valid"
            or (told.answer, told.problems) != (finding.answer, finding.problems)
        ):
            self._findings[instance.contract_id] = finding  # a file that only grows is no news
            files = [asdict(fact) for fact in finding.files]
            self._post(ev.ArtifactSeen(finding.contract, finding.answer, list(finding.problems), files))

    async def _read_marker(self) -> None:
        reading = await read_marker(self._layout)
        if reading is not None and reading != self._reading:
            self._reading = reading
            if isinstance(reading, Marker):
                self._post(marker_event(reading, 0, 0))


async def read_marker(layout: Layout) -> Reading | None:
    """One look at the marker; None when its directory cannot be read now."""
    try:
        return await in_thread(markers.read, layout.marker, layout.run_id, limit=5.0)
    except (OSError, TimeoutError):
        return None


def marker_event(reading: Reading, note: int, asked: int) -> ev.MarkerRead:
    """What a look at the marker means to the machine."""
    match reading:
        case Marker():
            return ev.MarkerRead("marker", reading.code, note or None, asked=asked)
        case Garbage():
            return ev.MarkerRead("garbage", None, note or None, explain(reading), asked)
        case Foreign():
            return ev.MarkerRead("foreign", None, note or None, explain(reading), asked)
        case _:
            return ev.MarkerRead("none", None, note or None, explain(reading), asked)
