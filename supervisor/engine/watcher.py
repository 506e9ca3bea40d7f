"""Directories that change, for an event loop: by their events where those are the whole truth, else by polling, and
never in the belief that silence is good news.

Every directory is *visited* now and then by a thread: it is opened, its file system is looked up, its watches are made
to fit what is there, and what is to be seen is compared with the last time. Each visit decides anew how the directory
is watched until the next:

    events     its file system tells of every writer, and it is watched: visits are rare (SCAN), events do the rest
    polling    anything else: another file system, no watch to be had, events that were lost, a directory that is not
               there (yet, or any more) or may not be read. Visits come soon after a change or a hint, and ever more
               rarely while nothing happens

`told` hears of every change between the two, with the reason, and at the start how it is with each. `seen` hears of
every visit and every event; whether that is worth a look at the files is its owner's business.

A file system that does not answer holds whoever names something on it. So targets come in groups, each with a thread of
its own at a time; one that holds its thread is left to it, and tried again ever more rarely.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from supervisor.loop.threads import in_thread
from supervisor.watch import polling
from supervisor.watch.filesystems import UNKNOWN, FileSystem, file_system
from supervisor.watch.polling import Pace, Sight, Target
from supervisor.watch.trees import Trees

SCAN: Final = 5.0  # seconds between visits where events do the work
VISIT_LIMIT: Final = 10.0  # seconds for a batch of visits; longer is a file system that does not answer
BATCH: Final = 64  # directories that one thread visits
EARLY: Final = 0.25  # part of its pause by which a visit may be early, to share another's thread
LOST_PAUSE: Final = 5.0  # seconds without belief in events after some were lost
HUNG_LIMIT: Final = 600.0  # seconds, at most, until a directory that did not answer is tried again

LIMITS: Final = {
    errno.ENOSPC: "this user has no inotify watch left (fs.inotify.max_user_watches)",
    errno.EMFILE: "this user has no inotify instance left (fs.inotify.max_user_instances), or we no descriptor",
    errno.ENOSYS: "this system has no inotify",
}


class Manner(NamedTuple):
    """How a directory is watched, on what file system, and why so."""

    by: Literal["events", "polling"]
    file_system: str
    why: str


@dataclass(slots=True, eq=False)
class _Watched:
    """One target, and what is known of it."""

    target: Target
    known: str  # the deepest directory on its way that was there
    pace: Pace = field(default_factory=Pace)
    manner: Manner | None = None
    sight: Sight | None = None
    pause: float = 0.0
    due: float = 0.0
    lost_until: float = 0.0  # its events are not believed before
    hung: float = 0.0  # seconds of the last pause after it did not answer


class _Visit(NamedTuple):
    manner: Manner
    sight: Sight | None  # None: it may not be read
    fresh: bool  # it has a new watch: what happened before was not heard
    known: str


@dataclass(slots=True, eq=False)
class _Group:
    watched: list[_Watched]
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Batch:
    """Visits of one thread, as far as they have come; `over`: nobody waits for the rest."""

    now: float
    visits: list[_Visit] = field(default_factory=list)
    devices: dict[int, FileSystem] = field(default_factory=dict)
    reached: str = polling.TOP  # the last directory that was found
    over: bool = False

    def start(self, watched: _Watched) -> str:
        """Where to look for a directory from: where it was found last, or else what it has in common with the last one
        that was found: what is above many directories is not listed for each."""
        if watched.known != polling.TOP:
            return watched.known
        return os.path.commonpath((self.reached, watched.target.directory))

    def mounted(self, descriptor: int) -> FileSystem:
        """What an open directory is on; asked once for each device."""
        device = os.fstat(descriptor).st_dev
        if device not in self.devices:
            self.devices[device] = file_system(descriptor)
        return self.devices[device]

    def believed(self, descriptor: int) -> bool:
        """Whether an open directory is on a file system of this machine alone."""
        return self.mounted(descriptor).believed


class Watcher:
    """Watches targets in groups (a target in two groups belongs to the first). To be made and used in the loop.

    `seen(target, changed)` is called after each visit, and for each event; `told(targets, manner)` when they are
    watched in another manner than before.
    """

    def __init__(
        self,
        groups: Iterable[Iterable[Target]],
        seen: Callable[[Target, bool], None],
        told: Callable[[Collection[Target], Manner], None],
    ) -> None:
        self._seen, self._told = seen, told
        self._loop = asyncio.get_running_loop()
        self._all: dict[tuple[str, int], tuple[_Watched, _Group]] = {}
        self._groups: list[_Group] = []
        for targets in groups:
            group = _Group([])
            for target in targets:
                if target[1:] not in self._all:
                    group.watched.append(_Watched(target, polling.TOP))
                    self._all[target[1:]] = group.watched[-1], group
            self._groups.append(group)
        self._trees: Trees | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in self._groups:
                    tasks.create_task(self._attend(group))
        finally:
            if self._trees is not None:
                self._loop.remove_reader(self._trees.fileno())
                self._trees.close()
                self._trees = None
                self._trouble = "over"

    def hint(self, target: Target) -> None:
        """Somebody else, an agent on the writer's node, says that something has changed. Where it may be visible later
        than the word of it, it is looked for again soon, several times."""
        watched, group = self._all[target[1:]]
        self._seen(watched.target, True)
        if watched.manner is None or watched.manner.by == "polling":
            watched.pace.hint()
            self._hasten(watched, group, watched.pace.next())

    # --- visits ------------------------------------------------------------------------------------------------------

    async def _attend(self, group: _Group) -> None:
        while group.watched:
            group.wake.clear()
            now = self._loop.time()
            pause = min(each.due for each in group.watched) - now
            if pause > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await group.wake.wait()
                continue
            await self._round([each for each in group.watched if each.due - EARLY * each.pause <= now][:BATCH])

    async def _round(self, due: list[_Watched]) -> None:
        """Visit these, and tell what came of it."""
        self._open()
        for each in due:
            each.due = math.inf  # until the visit says otherwise, or an event that comes in the middle of it
        batch = _Batch(self._loop.time())
        hung: list[_Watched] = []
        try:
            await in_thread(self._visit_all, due, batch, limit=VISIT_LIMIT)
        except TimeoutError:
            hung = due[len(batch.visits) :][:1]
        except OSError:
            await asyncio.sleep(SCAN)  # no thread to be had
        finally:
            batch.over = True
        visits = dict(zip(due, batch.visits, strict=False))
        for each in due:
            if each in hung:
                self._leave(each)
            elif each not in visits:
                each.due = self._loop.time()
        manners: dict[Manner, list[Target]] = {}
        for watched, visit in visits.items():
            if watched.manner != visit.manner:
                watched.manner = visit.manner
                manners.setdefault(visit.manner, []).append(watched.target)
        for manner, targets in manners.items():
            self._told(targets, manner)
        for watched, visit in visits.items():
            self._compare(watched, visit)

    def _compare(self, watched: _Watched, visit: _Visit) -> None:
        """What a visit means: whether something has changed, and when the next is due."""
        partial = visit.sight is not None and visit.sight.partial
        changed = visit.fresh or partial or visit.sight != watched.sight or watched.pace.urgent
        if visit.sight != watched.sight:
            watched.pace.quicken()
        if visit.manner.by == "events":
            watched.pace = Pace()
        watched.sight, watched.known, watched.hung = visit.sight, visit.known, 0.0
        watched.pause = SCAN if visit.manner.by == "events" else watched.pace.next()
        watched.due = min(watched.due, self._loop.time() + watched.pause)
        self._seen(watched.target, changed)

    def _leave(self, watched: _Watched) -> None:
        """It does not answer. Each such visit leaves a thread behind: they become rare."""
        watched.hung = min(2 * watched.hung or 2 * VISIT_LIMIT, HUNG_LIMIT)
        watched.pause, watched.due = 0.0, self._loop.time() + watched.hung
        kind = watched.manner.file_system if watched.manner else UNKNOWN
        manner = Manner("polling", kind, f"it did not answer within {VISIT_LIMIT:g} s")
        if watched.manner != manner:
            watched.manner = manner
            self._told([watched.target], manner)

    def _visit_all(self, due: list[_Watched], batch: _Batch) -> None:
        for watched in due:
            visit = self._visit(watched, batch)
            if batch.over:
                return
            batch.visits.append(visit)

    def _visit(self, watched: _Watched, batch: _Batch) -> _Visit:
        """In a thread: blocks like the directory's file system."""
        target = watched.target
        kind = watched.manner.file_system if watched.manner else UNKNOWN
        try:
            with polling.opened(target, batch.start(watched), batch.believed) as found:
                batch.reached = found.path
                mounted = batch.mounted(found.descriptor)
                kind, fresh = mounted.kind, False
                if mounted.believed:
                    fresh, why = self._settle(target)
                    if batch.now < watched.lost_until:
                        why = "events were lost: the kernel's queue was full"
                    elif not (why or found.there):
                        why = "it is not there"
                else:
                    why = mounted.reason
                    if self._trees is not None:
                        self._trees.drop(target)
                manner = Manner("polling", kind, why) if why else Manner("events", kind, mounted.reason)
                return _Visit(manner, polling.look(found, target.depth, bool(why)), fresh, found.path)
        except OSError as error:
            manner = Manner("polling", kind, f"it may not be read: {os.strerror(error.errno or 0)}")
            return _Visit(manner, None, False, polling.TOP)

    def _settle(self, target: Target) -> tuple[bool, str]:
        """Have its events told from now on. Whether there are new ones, and what is in the way."""
        trees = self._trees
        if trees is None:
            return False, self._trouble
        try:
            return trees.settle(target), ""
        except OSError as error:
            return True, LIMITS.get(error.errno or 0) or error.strerror or str(error)

    # --- events ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Have an inotify instance, if there is one to be had by now."""
        if self._trees is None and self._trouble != "over":
            try:
                self._trees = Trees()
            except OSError as error:
                self._trouble = LIMITS.get(error.errno or 0) or error.strerror or str(error)
            else:
                self._loop.add_reader(self._trees.fileno(), self._heard)

    def _heard(self) -> None:
        if self._trees is None:
            return
        changed, unsettled = self._trees.read()
        lost = self._trees.lost()
        for tree in changed | unsettled:
            watched, group = self._all[tree[1:]]
            if lost:
                watched.lost_until = self._loop.time() + LOST_PAUSE
            if tree in unsettled:
                watched.pace.quicken()
                self._hasten(watched, group, 0.0)
            if tree in changed:
                self._seen(watched.target, True)

    def _hasten(self, watched: _Watched, group: _Group, pause: float) -> None:
        """Let it be visited in so many seconds, if it does not hold a thread already."""
        if not watched.hung:
            watched.due = min(watched.due, self._loop.time() + pause)
            group.wake.set()
