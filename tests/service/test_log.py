"""The daemon's log: what a line looks like to the journal, to people and to programs."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pty
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest

from supervisor.service.log import Libraries, Outlet, make_log
from supervisor.service.settings import Settings


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "stderr").open("w+") as stream:
        yield stream


def journal(stream: TextIO) -> Mapping[str, str]:
    """The environment of a unit whose stderr this is."""
    status = os.fstat(stream.fileno())
    return {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}


def lines(stream: TextIO) -> list[str]:
    stream.flush()
    stream.seek(0)
    return stream.read().splitlines()


def test_the_journal_is_told_priorities(stream: TextIO) -> None:
    log = make_log(Settings(log_level="debug"), stream, journal(stream))
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(log, level)("trouble", key="a1", text="Slurm is\naway")
    assert lines(stream) == [f"<{number}>trouble key=a1 text='Slurm is\\naway'" for number in (7, 6, 4, 3, 2)]


def test_another_file_is_not_the_journal(stream: TextIO, tmp_path: Path) -> None:
    with (tmp_path / "other").open("w") as other:  # stderr was redirected
        make_log(Settings(), stream, journal(other)).info("started", allocations=3)
    (line,) = map(json.loads, lines(stream))
    assert (line["event"], line["level"], line["allocations"]) == ("started", "info", 3)
    assert line["timestamp"].endswith("Z")


def test_people_get_lines() -> None:
    leader, follower = pty.openpty()
    with open(leader, "rb") as terminal, open(follower, "w") as stream:
        make_log(Settings(), stream, {}).warning("trouble", text="\x1b[31mred")
        stream.flush()
        line = terminal.readline().decode()
    assert line.split("Z ", 1)[1].rstrip() == "warning trouble text='\\x1b[31mred'"


def test_what_is_less_than_wanted_is_left_out(stream: TextIO) -> None:
    log = make_log(Settings(log_level="warning", log_format="console"), stream, {})
    log.info("started")
    log.error("storage")
    assert [line.split("Z ", 1)[1] for line in lines(stream)] == ["error storage"]


def test_what_libraries_log_goes_the_same_way(stream: TextIO) -> None:
    handler = Libraries(make_log(Settings(), stream, journal(stream)))
    logger = logging.Logger("asyncio")
    logger.addHandler(handler)
    logger.info("selector chosen")
    logger.warning("it took %d s", 3)
    try:
        raise ValueError("found x")
    except ValueError:
        logger.exception("Task exception was never retrieved")
    warning, error = lines(stream)
    assert warning == "<4>library name=asyncio text='it took 3 s'"
    assert error.startswith("<3>library name=asyncio text='Task exception was never retrieved' exception=")
    assert "ValueError: found x" in error


def test_a_stream_without_a_number_is_written_to() -> None:
    stream = io.StringIO()
    make_log(Settings(), stream, {"JOURNAL_STREAM": "1:2"}).info("started")
    assert json.loads(stream.getvalue())["event"] == "started"


def test_what_is_logged_is_there_when_it_is_closed(stream: TextIO) -> None:
    outlet = Outlet(stream.fileno())
    log = make_log(Settings(), outlet, journal(stream))
    for number in range(100):
        log.info("state", n=number)
    outlet.close()
    assert lines(stream) == [f"<6>state n={number}" for number in range(100)]


def test_a_full_disk_costs_lines_only_and_their_number_is_told(stream: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    room, write = [3, 0, 0], os.write  # bytes that it takes of each of the first lines

    def full(descriptor: int, data: bytes) -> int:
        if not room:
            return write(descriptor, data)
        if room[0]:
            size, room[0] = write(descriptor, data[: room[0]]), 0
            return size
        room.pop(0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    outlet, told = Outlet(stream.fileno()), threading.Event()
    log = make_log(Settings(), outlet, journal(stream))

    def lost(count: int) -> None:
        log.warning("log", lost=count)
        told.set()

    outlet.lost = lost
    for number in range(4):
        log.info("state", n=number)
    assert told.wait(10)
    outlet.close()
    assert lines(stream) == ["<6>", "<6>state n=3", "<4>log lost=3"]


def test_a_pipe_that_nobody_reads_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    outlet = Outlet(writing, most=2)
    log = make_log(Settings(log_format="console"), outlet, {})
    begun = time.monotonic()
    for _ in range(5):
        log.info("state", text="x" * 100_000)
    outlet.close(0.01)
    assert time.monotonic() - begun < 5
    with open(reading, "rb") as pipe:
        thread = threading.Thread(target=pipe.read)
        thread.start()
        outlet.close(10)
        os.close(writing)
        thread.join(10)
