"""Papers that are no files: nobody waits for them, nobody follows them, and nobody's memory is filled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.engine.journal import read_journal
from supervisor.loop.files import opened, read_whole
from supervisor.loop.threads import in_thread
from supervisor.runs import papers
from supervisor.runs.papers import RECEIPT, RUN_RECEIPT, Unreadable, opening_of, read_receipt
from supervisor.runs.registry import JOURNAL

LIMIT = 10.0


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_text('{"event": "RunOpened", "run_id": "1.r0", "jobid": "1"}\n')
    path.symlink_to(target)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(papers.SIZE + 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "SIZE", 1000)


@pytest.mark.parametrize("name", [RECEIPT, RUN_RECEIPT])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a regular file"),
        (link, "a symbolic link, not followed"),
        (large, "more than 1000 bytes"),
    ],
)
async def test_a_receipt_that_is_none(tmp_path: Path, name: str, make: Callable[[Path], None], why: str) -> None:
    make(tmp_path / name)
    with pytest.raises(Unreadable, match=rf"{name} is not a receipt: {why}"):
        await in_thread(read_receipt, str(tmp_path), name, limit=LIMIT)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, ": not a regular file"),
        (link, ": a symbolic link, not followed"),
        (large, " does not begin with the opening of a run"),
    ],
)
async def test_a_journal_that_is_none(tmp_path: Path, make: Callable[[Path], None], why: str) -> None:
    make(tmp_path / JOURNAL)
    assert await in_thread(opening_of, str(tmp_path), limit=LIMIT) == (None, f"{tmp_path}/{JOURNAL}{why}")


@pytest.mark.parametrize("make", [os.mkfifo, link, os.mkdir])
async def test_no_events_are_read_from_what_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / JOURNAL)
    with pytest.raises(OSError, match=JOURNAL):
        await in_thread(read_journal, tmp_path / JOURNAL, limit=LIMIT)


def test_a_file_is_read_to_its_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert read_whole(path, 10) == b"0123456789"
    assert read_whole(path, 3, start=7) == b"789"
    with pytest.raises(OSError, match=f"more than 9 bytes: '{path}'"):
        read_whole(path, 9)
    place = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_whole("file", 10, directory=place) == b"0123456789"
    finally:
        os.close(place)
    with opened(path) as file:
        assert file.readline(4) == b"0123"
