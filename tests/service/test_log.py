"""The daemon's log: what a line looks like to the journal, to people and to programs."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest

from supervisor.service.log import Libraries, make_log
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
