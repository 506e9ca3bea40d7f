"""The books by themselves: order, numbers, what a disk can do to them, and what is found at the start."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from supervisor.core import kept_events as ev
from supervisor.service.book import PLAN, Book, put
from supervisor.service.found import BOOKS, JOURNAL, Found, Line

UTC = "2026-01-02T03:04:05.678Z"
NEW = ev.Accepted("submitted", "bench")


class Disk:
    """Fails with an error while there is one, after half of what was to be written."""

    def __init__(self) -> None:
        self.error = 0
        self.writes = 0

    def put(self, descriptor: int, data: bytes) -> None:
        self.writes += 1
        if error := self.error:  # read once: a thread writes, and it is mended beside that
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(error, os.strerror(error))
        put(descriptor, data)


class Shelf:
    """A state directory with books in it. `told` are the numbers and keys of the lines, in the order of telling."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.disk = Disk()
        self.told: list[tuple[int, str]] = []
        self.found: list[Found] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Book]:
        directory = os.open(self.top, os.O_RDONLY)
        book = Book(directory, told=self._told, put=self.disk.put, retry=0.01)
        try:
            self.found = book.replay()
            book.start()
            yield book
        finally:
            await book.close(5.0)
            os.close(directory)

    def _told(self, line: Line) -> None:
        self.told.append((line.seq, line.key))

    def journal(self, key: str) -> Path:
        return self.top / BOOKS / key / JOURNAL

    def numbers(self, key: str) -> list[tuple[int, int]]:
        return [(line["n"], line["seq"]) for line in map(json.loads, self.journal(key).read_text().splitlines())]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


async def test_lines_are_told_in_the_order_of_their_numbers(shelf: Shelf) -> None:
    async with shelf.open() as book:
        await asyncio.gather(*(book.create(key, {PLAN: "secret"}, UTC, NEW) for key in ("a", "b")))
        await asyncio.gather(*(book.append(key, UTC, ev.Troubled(f"{n}")) for n in range(20) for key in ("a", "b")))
        assert book.read_file("a", PLAN) == "secret"
    assert [seq for seq, _ in shelf.told] == list(range(1, 43))
    assert [n for n, _ in shelf.numbers("a")] == list(range(1, 22))
    assert sorted(seq for key in ("a", "b") for _, seq in shelf.numbers(key)) == list(range(1, 43))
    assert shelf.disk.writes < 20, "what comes at the same time is written at the same time"
    assert (shelf.top / BOOKS / "a").stat().st_mode & 0o777 == 0o700
    assert (shelf.top / BOOKS / "a" / PLAN).stat().st_mode & 0o777 == 0o600
    async with shelf.open() as book:
        assert [(found.key, len(found.lines)) for found in shelf.found] == [("a", 21), ("b", 21)]
        assert (await book.append("a", UTC, ev.Admitted())).seq == 43


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_what_cannot_be_written_now_is_written_later(shelf: Shelf, number: int) -> None:
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        shelf.disk.error = number
        lines = [book.append("a", UTC, ev.Troubled(f"{n}")) for n in range(3)]
        await troubled(book, True)
        with pytest.raises(OSError, match=r".") as refused:
            await book.create("b", {}, UTC, NEW)
        assert refused.value.errno in (errno.ENOSPC, number)
        assert len(shelf.told) == 1, "nothing is told that is not on the disk"
        assert f"{shelf.top}/{BOOKS} cannot be written: " in book.trouble
        shelf.disk.error = 0
        await asyncio.gather(*lines)
    assert not (shelf.top / BOOKS / "b").exists()
    assert shelf.numbers("a") == [(1, 1), (2, 2), (3, 3), (4, 4)]


async def troubled(book: Book, wanted: bool) -> None:
    async with asyncio.timeout(10):
        while bool(book.trouble) is not wanted:  # noqa: ASYNC110 - told by a thread
            await asyncio.sleep(0.005)


async def test_where_nothing_waits_to_be_written_a_book_on_trial_tells_that_there_is_room(shelf: Shelf) -> None:
    """Who is refused because of the trouble writes nothing that could end it."""
    async with shelf.open() as book:
        shelf.disk.error = errno.EDQUOT
        with pytest.raises(OSError, match=r"."):
            await book.create("a", {}, UTC, NEW)
        await troubled(book, True)
        writes = shelf.disk.writes
        async with asyncio.timeout(10):
            while shelf.disk.writes < writes + 3:  # noqa: ASYNC110 - told by a thread
                await asyncio.sleep(0.005)
        assert book.trouble
        shelf.disk.error = 0
        await troubled(book, False)
        assert (await book.create("a", {}, UTC, NEW)).seq == 1
    assert os.listdir(shelf.top / BOOKS) == ["a"]


async def test_a_full_disk_is_seen_before_it_refuses_a_line(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"f_blocks": 1000, "f_bavail": 15, "f_frsize": 4096}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**room))
    async with shelf.open() as book:
        await troubled(book, True)
        assert (await book.create("a", {}, UTC, NEW)).seq == 1  # who asks is refused by the holder, not here
        await asyncio.sleep(0)
        assert book.trouble, "a line that was small enough proves nothing"
        room["f_bavail"] = 16
        await troubled(book, False)
        room |= {"f_blocks": 0, "f_bavail": 0}  # a file system that does not say
        await book.append("a", UTC, ev.Admitted())
        assert not book.trouble


async def test_a_book_that_somebody_has_removed_loses_its_own_lines_only(shelf: Shelf) -> None:
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        await book.create("b", {}, UTC, NEW)
        shutil.rmtree(shelf.top / BOOKS / "a")
        lost, kept = book.append("a", UTC, ev.Admitted()), book.append("b", UTC, ev.Admitted())
        await kept
        with pytest.raises(FileNotFoundError):
            await lost
        assert not book.trouble
    assert shelf.numbers("b") == [(1, 2), (2, 3)]


async def test_a_link_in_place_of_a_journal_is_not_followed(shelf: Shelf, tmp_path: Path) -> None:
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        (tmp_path / "victim").touch()
        shelf.journal("a").unlink()
        shelf.journal("a").symlink_to(tmp_path / "victim")
        with pytest.raises(OSError, match="symbolic links"):
            await book.append("a", UTC, ev.Admitted())
    async with shelf.open():
        assert "symbolic links" in shelf.found[0].damage
    assert (tmp_path / "victim").read_bytes() == b""


async def test_a_book_that_nobody_was_told_of_is_removed(shelf: Shelf) -> None:
    for key, content in {"empty": b"", "torn": b'{"n":1,"se', "zeros": b"\0" * 99}.items():
        shelf.journal(key).parent.mkdir(parents=True)
        shelf.journal(key).write_bytes(content)
    (shelf.top / BOOKS / "bare").mkdir()
    async with shelf.open():
        assert shelf.found == []
    assert list((shelf.top / BOOKS).iterdir()) == []


@pytest.mark.parametrize(
    ("change", "damage"),
    [
        (lambda lines: [lines[0], lines[2]], "line 3 stands in the place of line 2"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"seq":3', b'"seq":2')], "number 2 follows number 2"),
        (lambda lines: [lines[0], b"\0" * 9 + b"\n", lines[2]], "line 2: "),
        (lambda lines: [*lines[:2], lines[2].replace(b"Troubled", b"Unheard")], "unknown event 'Unheard'"),
        (lambda lines: [*lines[:2], b"[]\n"], "no JSON object"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"n":3', b'"n":"x"')], "invalid literal"),
    ],
)
async def test_damage_is_named_and_nothing_is_changed(shelf: Shelf, change, damage: str) -> None:  # type: ignore[no-untyped-def]
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        for text in ("one", "two"):
            await book.append("a", UTC, ev.Troubled(text))
    lines = shelf.journal("a").read_bytes().splitlines(keepends=True)
    shelf.journal("a").write_bytes(b"".join(change(lines)))
    before = shelf.journal("a").read_bytes()
    async with shelf.open():
        assert damage in shelf.found[0].damage
    assert shelf.journal("a").read_bytes() == before


async def test_a_key_that_is_there_is_refused_and_kept(shelf: Shelf) -> None:
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        with pytest.raises(FileExistsError):
            await book.create("a", {}, UTC, NEW)
    assert shelf.numbers("a") == [(1, 1)]


async def test_a_book_that_was_refused_is_not_there_after_a_crash(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are on the disk, and only the directory that names it is not."""
    fsync, broken = os.fsync, True

    def fails(descriptor: int) -> None:
        if broken and os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"/{BOOKS}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    async with shelf.open() as book:
        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            await book.create("a", {}, UTC, NEW)
        assert os.listdir(shelf.top / BOOKS) == []
        broken = False
        await troubled(book, False)
        assert (await book.create("b", {}, UTC, NEW)).seq == 1
    async with shelf.open():
        assert [found.key for found in shelf.found] == ["b"]


@pytest.mark.parametrize(
    "damage", [b"\0" * 9 + b"\n", b"[]\n", b'{"n":9,"seq":2,"utc":"","event":"Admitted"}\n', b"{\n"]
)
async def test_no_number_is_used_twice_where_a_book_is_damaged(shelf: Shelf, damage: bytes) -> None:
    async with shelf.open() as book:
        await book.create("b", {}, UTC, NEW)
        await book.create("a", {}, UTC, NEW)
        for text in ("one", "two"):
            await book.append("a", UTC, ev.Troubled(text))
    lines = shelf.journal("a").read_bytes().splitlines(keepends=True)
    shelf.journal("a").write_bytes(b"".join([lines[0], damage, lines[2], b'{"seq":"5"}\n{"seq":1e9}\n{"se']))
    async with shelf.open() as book:
        assert [bool(found.damage) for found in shelf.found] == [False, True]
        assert (await book.append("b", UTC, ev.Admitted())).seq == 5


async def test_who_cannot_hear_of_a_line_keeps_nobody_from_it(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    heard = shelf._told

    def deaf(line: Line) -> None:
        if line.seq == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        heard(line)

    monkeypatch.setattr(shelf, "_told", deaf)
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        lines = [book.append("a", UTC, ev.Troubled(f"{n}")) for n in range(3)]
        async with asyncio.timeout(10):
            assert [line.seq for line in await asyncio.gather(*lines)] == [2, 3, 4]
    assert shelf.told == [(1, "a"), (3, "a"), (4, "a")]
    assert complaints == ["line 2 of the books could not be told"]


async def test_a_journal_that_was_cut_short_is_not_filled_with_zeros(shelf: Shelf) -> None:
    async with shelf.open() as book:
        await book.create("a", {}, UTC, NEW)
        await book.append("a", UTC, ev.Admitted())
        first = shelf.journal("a").read_bytes().partition(b"\n")[0] + b"\n"
        shelf.journal("a").write_bytes(first)
        with pytest.raises(OSError, match=rf"journal.jsonl has {len(first)} bytes, and had \d+"):
            await book.append("a", UTC, ev.Troubled("lost"))
        assert not book.trouble
    assert shelf.journal("a").read_bytes() == first


async def test_nothing_is_kept_of_what_is_forgotten(shelf: Shelf) -> None:
    async with shelf.open() as book:
        for key in ("a", "b", "c"):
            await book.create(key, {}, UTC, NEW)
        book.forget("a")
        shutil.rmtree(shelf.top / BOOKS / "b")
        assert [book.is_gone(key) for key in ("b", "c")] == [True, False]
        assert (list(book._count), list(book._size)) == (["c"], ["c"])
