"""The journal: what was appended is what is read, whatever the disk does in between."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import events as ev
from supervisor.engine import journal as module
from supervisor.engine.journal import Journal, read_journal


def line(seq: int, event: ev.Event) -> dict[str, Any]:
    return {"seq": seq, "utc": "2026-01-01T00:00:00.000Z", "at": float(seq), **ev.encode(event)}


def lines(count: int) -> list[dict[str, Any]]:
    return [line(seq, ev.Noted(f"note {seq}")) for seq in range(1, count + 1)]


async def written(path: Path, items: list[dict[str, Any]], limit: float = 5.0) -> tuple[bool, list[str]]:
    troubles: list[str] = []
    journal = Journal(str(path), limit, troubles.append)
    for item in items:
        journal.append(item)
    return await journal.close(), troubles


async def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    command = {"seq": 2, "utc": "", "at": 2.0, "command": "StopRank", "rank": 0}
    assert await written(path, [*lines(2), command, line(3, ev.RankEnded(1, None, 9, True))]) == (True, [])
    found = read_journal(path)
    assert [record.seq for record in found.records] == [1, 2, 3]
    assert found.records[2].event == ev.RankEnded(1, None, 9, True)
    assert found.commands == [command]
    assert (found.tail, found.damage, found.end) == (False, None, path.stat().st_size)


async def test_durable_means_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(str(path), 5.0, pytest.fail)
    journal.append(lines(1)[0])
    assert await journal.durable()
    assert len(read_journal(path).records) == 1
    assert await journal.durable()  # nothing new: nothing to wait for
    assert await journal.close()


async def test_an_existing_journal_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("somebody's\n")
    with pytest.raises(FileExistsError):
        Journal(str(path), 5.0, pytest.fail)
    assert path.read_text() == "somebody's\n"


class Disk:
    """os.write and os.fsync as a disk does them that is full, or slow, for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None  # bytes; None: plenty
        self.error: int | None = None  # of fsync
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr("supervisor.engine.journal.os.write", self.write)
        monkeypatch.setattr("supervisor.engine.journal.os.fsync", self.fsync)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        taken = data[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(taken)
        return self._write(descriptor, taken)

    def fsync(self, descriptor: int) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self._fsync(descriptor)


async def test_a_full_disk_loses_nothing_that_fits_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER", 0.01)
    disk = Disk(monkeypatch)
    path = tmp_path / "journal.jsonl"
    full = asyncio.Event()
    troubles: list[str] = []

    def trouble(text: str) -> None:
        troubles.append(text)
        full.set()

    journal = Journal(str(path), 5.0, trouble)
    journal.append(lines(3)[0])
    assert await journal.durable()
    disk.room = 40  # the next line is cut in the middle
    journal.append(lines(3)[1])
    assert not await journal.durable()
    await asyncio.wait_for(full.wait(), 5)
    assert read_journal(path).tail
    disk.room = None
    journal.append(lines(3)[2])
    assert await journal.close()
    assert len(troubles) == 1
    assert "No space left" in troubles[0]
    assert journal.trouble == troubles[0]  # it is told even though everything was written in the end
    found = read_journal(path)
    assert [record.seq for record in found.records] == [1, 2, 3]
    assert found.damage is None


async def test_a_disk_that_stays_full_is_told_and_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch).room = 0
    complete, troubles = await written(tmp_path / "journal.jsonl", lines(2))
    assert not complete
    assert len(troubles) == 1


async def test_a_failing_fsync_is_no_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.error = errno.EIO
    troubles: list[str] = []
    journal = Journal(str(tmp_path / "journal.jsonl"), 5.0, troubles.append)
    journal.append(lines(1)[0])
    assert not await journal.durable()
    assert troubles
    disk.error = None  # a later fsync that works says nothing about the pages that the failed one dropped
    journal.append(lines(2)[1])
    assert not await journal.close()


def test_a_torn_or_zeroed_tail_is_not_yet(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = b"".join(json.dumps(item).encode() + b"\n" for item in lines(3))
    for tail in (b'{"seq": 4, "ev', b"\0" * 40, b"\0" * 40 + b"\n", b'{"seq": 4}\n'):
        path.write_bytes(whole + tail)
        found = read_journal(path)
        assert len(found.records) == 3, tail
        assert found.tail, tail
        assert found.damage is None, tail
        assert found.end == len(whole), tail


def test_damage_in_the_middle_stops_there_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, second, third = (json.dumps(item).encode() + b"\n" for item in lines(3))
    path.write_bytes(first + b"garbage\n" + third)
    found = read_journal(path)
    assert len(found.records) == 1
    assert found.damage is not None
    assert found.damage.startswith(f"line 2 (byte {len(first)})")
    path.write_bytes(first + third + second)
    found = read_journal(path)
    assert found.damage == "record 3 follows record 1"


def test_a_follower_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    data = [json.dumps(item).encode() + b"\n" for item in lines(3)]
    path.write_bytes(data[0] + data[1][:10])
    found = read_journal(path)
    path.write_bytes(b"".join(data))
    more = read_journal(path, found.end, len(found.records))
    assert [record.seq for record in more.records] == [2, 3]


@given(st.integers(min_value=0))
def test_every_prefix_is_readable(cut: int) -> None:
    import tempfile

    data = b"".join(json.dumps(item).encode() + b"\n" for item in lines(4))
    cut %= len(data) + 1
    with tempfile.NamedTemporaryFile() as file:
        file.write(data[:cut])
        file.flush()
        found = read_journal(file.name)
    assert found.damage is None
    assert len(found.records) == data[:cut].count(b"\n")
