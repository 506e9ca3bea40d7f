"""Hints about directories: events where there are any, a scan in any case, and a loop that no file system holds."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from supervisor.watch import directories as module
from supervisor.watch.directories import DirectoryHints
from supervisor.watch.inotify import Inotify

LIMIT = 10.0
NEVER = 3600.0  # seconds: no scan comes within a test


class Hints:
    """Hints about some directories, and a way to wait for the next."""

    def __init__(self) -> None:
        self.count = 0
        self.made: list[DirectoryHints] = []
        self._news = asyncio.Event()

    def about(self, *paths: Path, scan: float = NEVER) -> DirectoryHints:
        self.made.append(DirectoryHints(map(str, paths), self._changed, scan))
        return self.made[-1]

    def _changed(self) -> None:
        self.count += 1
        self._news.set()

    async def after(self, act: Callable[[], object]) -> None:
        self._news.clear()
        act()
        async with asyncio.timeout(LIMIT):
            await self._news.wait()


def missing(hints: DirectoryHints) -> bool:
    return hints.missing


@pytest.fixture
async def hints() -> AsyncIterator[Hints]:
    mine = Hints()
    yield mine
    for each in mine.made:
        each.close()
        each.close()  # twice is harmless


async def test_an_event_is_a_hint(hints: Hints, tmp_path: Path) -> None:
    watched = hints.about(tmp_path)
    assert missing(watched)
    watched.watch()
    assert not missing(watched)
    assert watched.trouble is None
    await hints.after((tmp_path / "new").touch)
    await hints.after(lambda: (tmp_path / "new").rename(tmp_path / "final"))
    assert hints.count >= 2


async def test_a_scan_comes_without_any_event(hints: Hints, tmp_path: Path) -> None:
    hints.about(tmp_path / "nowhere", scan=0.01)
    await hints.after(lambda: None)
    await hints.after(lambda: None)


async def test_a_directory_may_appear_late(hints: Hints, tmp_path: Path) -> None:
    late = tmp_path / "a/b"
    watched = hints.about(late)
    watched.watch()
    assert missing(watched)
    late.mkdir(parents=True)
    watched.watch()
    assert not missing(watched)
    await hints.after((late / "new").touch)


async def test_a_watch_that_is_refused_is_trouble_and_no_failure(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, directory: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)

    monkeypatch.setattr(Inotify, "add", refuse)
    watched = hints.about(tmp_path, scan=0.01)
    watched.watch()
    assert watched.trouble == f"{tmp_path}: No space left on device"
    assert not watched.missing  # not asked for again and again
    await hints.after(lambda: None)


async def test_without_inotify_the_scan_carries_on(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "Inotify", refuse)
    watched = hints.about(tmp_path, scan=0.01)
    assert watched.trouble == "Too many open files"
    assert not watched.missing
    watched.watch()
    await hints.after(lambda: None)


async def test_a_directory_that_does_not_answer_holds_its_own_thread_only(
    hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, answer = threading.Event(), threading.Event()

    def hang(self: object, directory: str) -> int:
        called.set()
        assert answer.wait(LIMIT)
        raise OSError(errno.EIO, os.strerror(errno.EIO), directory)

    monkeypatch.setattr(Inotify, "add", hang)
    watched = hints.about(tmp_path, scan=0.01)
    thread = threading.Thread(target=watched.watch)
    thread.start()
    assert called.wait(LIMIT)
    watched.watch()  # returns at once
    await hints.after(lambda: None)  # and so does the loop
    watched.close()
    answer.set()
    thread.join(LIMIT)
    assert watched.trouble is None  # what comes after the end is no trouble
    count = hints.count
    await asyncio.sleep(0.03)
    assert hints.count == count
