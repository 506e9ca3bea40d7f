"""What is told to whoever listens, and what the daemon writes into its log."""

from __future__ import annotations

import asyncio
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.service.interface import Event, Refusal
from supervisor.service.log import make_log
from supervisor.service.settings import Settings
from supervisor.service.telling import Told


def event(seq: int, key: str = "a") -> Event:
    return Event(seq, "", key, "state", {})


async def test_readers_go_on_where_they_were() -> None:
    told = Told(kept=4)
    for seq in (1, 2):
        told.add(event(seq))
    reader = told.after(None, None)
    assert [(await anext(reader)).seq for _ in range(2)] == [1, 2]
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    told.add(event(3, "b"))
    assert (await waiting).seq == 3
    later = told.after(1, "a")
    assert (await anext(later)).seq == 2
    told.close()
    assert [each.seq async for each in later] == []


async def test_a_reader_that_is_too_slow_is_told_so() -> None:
    told = Told(kept=2)
    told.add(event(1))
    slow = told.after(0, None)
    assert (await anext(slow)).seq == 1
    for seq in (2, 3, 4):
        told.add(event(seq))
    with pytest.raises(Refusal) as gone:
        await anext(slow)
    assert (gone.value.status, gone.value.kind) == (410, "gone")
    with pytest.raises(Refusal):
        told.after(1, None)
    assert (await anext(told.after(None, None))).seq == 3


async def test_a_number_that_was_never_told_is_of_another_state() -> None:
    told = Told()
    assert told.last == 0
    told.after(0, None)
    told.add(event(1))
    for never in (2, 41):
        with pytest.raises(Refusal) as gone:
            told.after(never, None)
        assert (gone.value.status, gone.value.kind) == (410, "gone") and "begin anew" in gone.value.text
    told.after(told.last, None)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("console", " warning trouble key=a1 text='no\\nspace' none=''\n"),
        ("json", '{"event": "trouble", "key": "a1", "level": "warning", "none": "", "text": "no\\nspace"'),
    ],
)
def test_one_line_an_event(kind: str, line: str) -> None:
    stream = io.StringIO()
    log = make_log(replace(Settings(), log_format=kind), stream, {})
    log.info("before")
    log.warning("trouble", key="a1", text="no\nspace", none="")
    log.debug("never")
    lines = stream.getvalue().splitlines(keepends=True)
    assert len(lines) == 2
    assert line in lines[1]
    if kind == "json":
        assert json.loads(lines[1])["timestamp"]


def test_the_journal_gets_priorities(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream:
        status = os.fstat(stream.fileno())
        log = make_log(Settings(), stream, {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"})
        log.error("storage", text="full")
        try:
            raise ValueError("x")
        except ValueError:
            log.critical("fault", exc_info=True)
    first, second = (tmp_path / "journal").read_text().splitlines()
    assert first == "<3>storage text=full"
    assert second.startswith("<2>fault exception=")
