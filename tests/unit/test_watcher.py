"""The watcher: by events where they tell everything, else by polling; what becomes of each; and who is held by what."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from supervisor.engine import watcher as module
from supervisor.engine.watcher import Manner, Watcher
from supervisor.watch import polling
from supervisor.watch.filesystems import FileSystem
from supervisor.watch.inotify import Inotify
from supervisor.watch.polling import Target

LIMIT = 10.0
ROOM = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
NEVER = 3600.0  # seconds: no visit comes within a test


def target(path: Path, depth: int = 0) -> Target:
    return Target(str(path.parent), str(path), depth)


class Heard:
    """A watcher at work, and what it has said."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.told: list[tuple[str, str, str]] = []
        self.watcher: Watcher
        self._news = asyncio.Event()

    def saw(self, target: Target, changed: bool) -> None:
        self.seen.append((target.directory, changed))
        self._news.set()

    def tell(self, targets: Collection[Target], manner: Manner) -> None:
        self.told += ((each.directory, manner.by, manner.why) for each in targets)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def by(self, path: Path, by: str, why: str = "") -> None:
        """Until a directory is watched so."""

        def is_so() -> bool:
            last = [told for told in self.told if told[0] == str(path)][-1:]
            return bool(last) and last[0][1] == by and why in last[0][2]

        await self.until(is_so)

    async def changes(self, path: Path, act: Callable[[], object]) -> None:
        """Act, and wait until the directory is said to have changed."""
        count = self.seen.count((str(path), True))
        act()
        await self.until(lambda: self.seen.count((str(path), True)) > count)


@asynccontextmanager
async def watching(*groups: list[Target]) -> AsyncIterator[Heard]:
    heard = Heard()
    heard.watcher = Watcher(groups, heard.saw, heard.tell)
    task = asyncio.create_task(heard.watcher.run())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def events_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events do the work, no visit helps."""
    monkeypatch.setattr(module, "SCAN", NEVER)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is on a network file system."""
    monkeypatch.setattr(module, "file_system", lambda descriptor: FileSystem("nfs4", "/"))


@pytest.mark.usefixtures("events_only")
async def test_events_are_told_at_once(tmp_path: Path) -> None:
    async with watching([target(tmp_path, 1)]) as heard:
        await heard.by(tmp_path, "events")
        assert heard.seen == [(str(tmp_path), True)]  # the first visit: nobody knows what was before
        await heard.changes(tmp_path, (tmp_path / "new").touch)
        await heard.changes(tmp_path, (tmp_path / "d").mkdir)
        await heard.changes(tmp_path, lambda: None)  # the visit that the new directory asked for
        await heard.changes(tmp_path, (tmp_path / "d/x").touch)
    assert len(heard.told) == 1


@pytest.mark.usefixtures("network")
async def test_where_events_are_not_believed_a_listing_finds_what_is_new(tmp_path: Path) -> None:
    async with watching([target(tmp_path)]) as heard:
        await heard.by(tmp_path, "polling", "other machines")
        await heard.changes(tmp_path, (tmp_path / "new").touch)
        quiet = heard.seen.count((str(tmp_path), False))
        await heard.until(lambda: heard.seen.count((str(tmp_path), False)) > quiet)  # and it goes on
        await heard.changes(tmp_path, (tmp_path / "new").unlink)


@pytest.mark.usefixtures("network")
async def test_a_hint_is_believed_at_once_and_looked_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "FIRST", NEVER)
    monkeypatch.setattr(polling, "AFTER_HINT", (0.001, 0.002, 0.003))
    async with watching([target(tmp_path)]) as heard:
        await heard.by(tmp_path, "polling")
        await heard.until(lambda: bool(heard.seen))
        heard.seen.clear()
        heard.watcher.hint(target(tmp_path))
        assert heard.seen == [(str(tmp_path), True)]
        await heard.until(lambda: len(heard.seen) == 4)
        assert heard.seen == [(str(tmp_path), True)] * 4  # whether or not a look sees what the hint is about


@pytest.mark.usefixtures("network")
async def test_visits_become_rare_and_come_soon_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    pace = polling.Pace.next

    def next_pause(self: polling.Pace) -> float:
        pauses.append(pace(self))
        return pauses[-1]

    monkeypatch.setattr(polling, "FIRST", 0.01)
    monkeypatch.setattr(polling.Pace, "next", next_pause)
    async with watching([target(tmp_path)]) as heard:
        await heard.until(lambda: len(pauses) > 3)
        assert pauses.count(0.01) == 1
        await heard.changes(tmp_path, (tmp_path / "new").touch)
        assert pauses.count(0.01) == 2


@pytest.mark.usefixtures("events_only")
async def test_where_events_are_believed_a_hint_is_one_more(tmp_path: Path) -> None:
    async with watching([target(tmp_path)]) as heard:
        await heard.by(tmp_path, "events")
        await heard.until(lambda: bool(heard.seen))
        heard.watcher.hint(target(tmp_path))
        assert heard.seen == [(str(tmp_path), True)] * 2


@pytest.mark.usefixtures("events_only")
async def test_a_late_directory_is_polled_for_until_it_is_there(tmp_path: Path) -> None:
    late = tmp_path / "a/b"
    async with watching([target(late)]) as heard:
        await heard.by(late, "polling", "not there")
        await heard.changes(late, lambda: late.mkdir(parents=True))
        await heard.by(late, "events")
        await heard.changes(late, (late / "x").touch)
    assert [told[1] for told in heard.told] == ["polling", "events"]


@pytest.mark.usefixtures("events_only")
@pytest.mark.parametrize("leave", ["remove", "rename", "replace"])
async def test_a_directory_that_goes_and_comes(tmp_path: Path, leave: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    async with watching([target(place)]) as heard:
        await heard.by(place, "events")
        if leave == "remove":
            await heard.changes(place, place.rmdir)
        else:
            await heard.changes(place, lambda: place.rename(tmp_path / "old"))
        if leave != "replace":
            await heard.by(place, "polling", "not there")
        await heard.changes(place, place.mkdir)
        await heard.by(place, "events")
        await heard.changes(place, (place / "x").touch)
        await heard.by(place, "events")


async def test_a_replaced_parent_is_found_by_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No watch tells of it."""
    monkeypatch.setattr(module, "SCAN", 0.02)
    place = tmp_path / "a/b"
    place.mkdir(parents=True)
    async with watching([target(place)]) as heard:
        await heard.by(place, "events")

        def replace() -> None:
            (tmp_path / "a").rename(tmp_path / "old")
            place.mkdir(parents=True)

        await heard.changes(place, replace)
        await heard.by(place, "events")
        await heard.changes(place, (place / "x").touch)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
async def test_a_watch_that_is_refused_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    add, refusing = Inotify.add, True

    def limited(self: Inotify, directory: str, mask: int) -> int:
        if refusing:
            raise OSError(number, os.strerror(number), directory)
        return add(self, directory, mask)

    monkeypatch.setattr(Inotify, "add", limited)
    async with watching([target(tmp_path)]) as heard:
        await heard.by(tmp_path, "polling", "max_user_watches" if number == errno.ENOSPC else "memory")
        await heard.changes(tmp_path, (tmp_path / "new").touch)
        refusing = False
        await heard.by(tmp_path, "events")
    assert [told[1] for told in heard.told] == ["polling", "events"]


async def test_without_an_instance_it_polls_until_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, refusing = Inotify.__init__, True

    def limited(self: Inotify) -> None:
        if refusing:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        make(self)

    monkeypatch.setattr(Inotify, "__init__", limited)
    async with watching([target(tmp_path)]) as heard:
        await heard.by(tmp_path, "polling", "max_user_instances")
        await heard.changes(tmp_path, (tmp_path / "new").touch)
        refusing = False
        await heard.by(tmp_path, "events")
    assert [told[1] for told in heard.told] == ["polling", "events"]


async def test_after_an_overflow_it_polls_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: the loop does not read while the queue fills."""
    monkeypatch.setattr(module, "LOST_PAUSE", 0.2)
    loud, quiet = tmp_path / "loud", tmp_path / "quiet"
    loud.mkdir()
    quiet.mkdir()
    async with watching([target(loud), target(quiet)]) as heard:
        await heard.by(quiet, "events")
        names = [loud / "a", loud / "b"]
        names[0].touch()
        for number in range(ROOM // 2 + 2):
            names[number % 2].rename(names[1 - number % 2])
        (quiet / "unheard").touch()
        count = heard.seen.count((str(quiet), True))
        await heard.until(lambda: heard.seen.count((str(quiet), True)) > count)
        await heard.by(quiet, "polling", "events were lost")
        await heard.by(quiet, "events")
        await heard.changes(quiet, (quiet / "x").touch)
    assert [told[1] for told in heard.told if told[0] == str(quiet)] == ["events", "polling", "events"]


async def test_a_directory_that_may_not_be_read_is_polling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN", NEVER)
    refusing, real = True, os.open

    def limited(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if refusing and path in (str(tmp_path), tmp_path.name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr("supervisor.watch.polling.os.open", limited)
    async with watching([Target(str(tmp_path), str(tmp_path))]) as heard:
        await heard.by(tmp_path, "polling", "Permission denied")
        refusing = False
        await heard.by(tmp_path, "events")


async def test_one_that_does_not_answer_holds_neither_others_nor_itself_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIT_LIMIT", 0.1)
    dead, mate, other = tmp_path / "dead", tmp_path / "mate", tmp_path / "other"
    for each in (dead, mate, other):
        each.mkdir()
    answer, hung, settle = threading.Event(), threading.Event(), Watcher._settle

    def hang(self: Watcher, target: Target) -> tuple[bool, str]:
        if target.directory == str(dead) and not answer.is_set():
            hung.set()
            assert answer.wait(LIMIT)
        return settle(self, target)

    monkeypatch.setattr(Watcher, "_settle", hang)
    async with watching([target(dead), target(mate)], [target(other)]) as heard:
        await heard.by(other, "events")
        await heard.by(dead, "polling", "did not answer")
        assert hung.is_set()
        await heard.by(mate, "events")
        await heard.changes(mate, (mate / "x").touch)
        await heard.changes(other, (other / "x").touch)
        answer.set()
        await heard.by(dead, "events")
        await heard.changes(dead, (dead / "x").touch)


async def test_it_begins_again_with_what_came_during_a_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that wants watches settled, while a visit is on its way that has settled them already."""
    monkeypatch.setattr(module, "SCAN", NEVER)
    first, look = True, polling.look

    def slow(found: polling.Found, depth: int, names: bool) -> polling.Sight:
        nonlocal first
        sight = look(found, depth, names)
        if first:
            first = False
            (tmp_path / "d").mkdir()
        return sight

    monkeypatch.setattr(polling, "look", slow)
    async with watching([target(tmp_path, 1)]) as heard:
        await heard.by(tmp_path, "events")
        await heard.changes(tmp_path, lambda: None)
        await heard.until(lambda: len(heard.seen) >= 3)  # the event, the visit, and the visit that the event asked for
        await heard.changes(tmp_path, (tmp_path / "d/x").touch)


async def test_a_thousand_directories_are_told_in_few_words(tmp_path: Path) -> None:
    targets = [target(tmp_path / str(number)) for number in range(1000)]
    for each in targets:
        os.mkdir(each.directory)
    calls = []
    async with watching(targets) as heard:
        heard.watcher._told = lambda some, manner: calls.append((len(some), manner.by))
        await heard.until(lambda: len(heard.seen) >= 1000)
    assert sum(count for count, _ in calls) == 1000
    assert len(calls) == -(-1000 // module.BATCH)
