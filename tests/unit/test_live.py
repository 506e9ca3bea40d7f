"""What a person sees while a run runs: lines, or a table on a terminal that can hold it; never in the engine's way."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli import live, telling
from supervisor.cli.live import Plain, Printer, Table, reporter
from supervisor.cli.main import main
from supervisor.core import events as ev
from supervisor.core.state import End, RankState, RunState
from supervisor.runs.follow import LogLines
from supervisor.runs.target import Target
from tests.faults.local import ALLOCCTL, LIMIT, SERVE, Local, await_files, role, sh, touch, until

FRAME = ("rank 0", "rank 1")
UP_TWO = "\x1b[2A\x1b[J"


class Stream(io.StringIO):
    """A stream that takes nothing before it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.writing = threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        assert self.open.wait(LIMIT)
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[Stream]:
    it = Stream()
    yield it
    it.open.set()


@pytest.fixture
def printer(stream: Stream) -> Iterator[Printer]:
    it = Printer(stream)
    yield it
    stream.open.set()
    it.close()


# --- the printer ---------------------------------------------------------------------------------------------------


def test_lines_are_written_in_order(stream: Stream, printer: Printer) -> None:
    stream.open.set()
    for number in range(100):
        printer.print(f"line {number}")
    printer.close(LIMIT)
    assert stream.getvalue().splitlines() == [f"line {number}" for number in range(100)]


def test_a_reader_that_does_not_read_holds_nobody_and_is_told_what_it_missed(
    stream: Stream, printer: Printer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BACKLOG", 3)
    printer.print("first")
    assert stream.writing.wait(LIMIT)
    for number in range(10):
        printer.print(f"line {number}")
    printer.close(0.01)  # gives up
    stream.open.set()
    printer.close(LIMIT)
    first, dropped, *rest = stream.getvalue().splitlines()
    assert first == "first"
    assert dropped.startswith("... 7 lines that nobody read in time")
    assert rest == ["line 7", "line 8", "line 9"]


def test_what_was_queued_is_waited_for_but_not_for_ever(stream: Stream, printer: Printer) -> None:
    printer.print("first")
    printer.flush(0.01)
    assert stream.getvalue() == ""
    stream.open.set()
    printer.print("second")
    printer.flush(LIMIT)
    assert stream.getvalue() == "first\nsecond\n"


def test_a_run_is_named_before_its_first_line(
    stream: Stream, printer: Printer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream.open.set()
    before: list[str] = []
    monkeypatch.setattr(telling, "put_lines", lambda *_: before.append(stream.getvalue()))
    teller = telling.StoryTeller(Target("7", {"7": ("7",)}), printer)
    teller.say("run 7 in /runs/7")
    teller.lines(LogLines("7", "rank-0.a.out", [b"words"]))
    assert before == ["allocctl: run 7 in /runs/7\n"]


def test_words_of_several_lines_stay_together(stream: Stream, printer: Printer) -> None:
    stream.open.set()
    Plain(printer)(ev.Record(1, 0.0, "", ev.Noted("one\ntwo\x1b[31m")), RunState())
    printer.close(LIMIT)
    assert stream.getvalue() == "   0.000s  one\n    two\\x1b[31m\n"


def test_a_stream_that_breaks_is_left_alone() -> None:
    stream = io.StringIO()
    stream.close()
    printer = Printer(stream)
    printer.print("nobody")
    printer.close(LIMIT)
    printer.print("nobody")


def test_the_frame_stands_below_the_lines_and_only_the_last_is_drawn(stream: Stream, printer: Printer) -> None:
    printer.print("begin")
    assert stream.writing.wait(LIMIT)
    printer.show(("old", "frame", "of three"))
    printer.show(FRAME)
    printer.print("line")
    stream.open.set()
    printer.close(LIMIT)
    assert stream.getvalue() == "begin\nline\nrank 0\nrank 1\n"


def drawn(*steps: tuple[str, object]) -> str:
    """What is on the stream after the steps, each written before the next."""
    stream = io.StringIO()
    printer = Printer(stream)
    for name, argument in steps:
        before = stream.getvalue()
        getattr(printer, name)(*() if argument is None else (argument,))
        until(lambda before=before: stream.getvalue() != before, name)  # type: ignore[misc]
    printer.close(LIMIT)
    return stream.getvalue()


def test_a_frame_is_drawn_over_the_one_before() -> None:
    assert drawn(("show", FRAME), ("show", ("one",))) == f"rank 0\nrank 1\n{UP_TWO}one\n"
    assert drawn(("show", FRAME), ("print", "x")) == f"rank 0\nrank 1\n{UP_TWO}x\nrank 0\nrank 1\n"
    assert drawn(("show", FRAME), ("show", ())) == f"rank 0\nrank 1\n{UP_TWO}"


def test_a_frame_that_is_settled_becomes_lines() -> None:
    settled = drawn(("show", FRAME), ("settle", None), ("print", "verdict"))
    assert settled == f"rank 0\nrank 1\n{UP_TWO}rank 0\nrank 1\nverdict\n"


# --- what is shown -------------------------------------------------------------------------------------------------


def state(*ranks: RankState) -> RunState:
    return RunState(phase="running", ranks=ranks, started_at=10.0)


def rank(number: int, **fields: object) -> RankState:
    return RankState(rank=number, role="worker", node="n1", grace=1.0, stop_signal="TERM", **fields)  # type: ignore[arg-type]


def test_plain_lines_have_the_seconds_and_leave_out_what_is_as_it_should_be(stream: Stream, printer: Printer) -> None:
    stream.open.set()
    plain = Plain(printer)
    for event in (ev.RankStarted(0, 77), ev.StepEnded(0, 0, ""), ev.ArtifactsLooked(1), ev.RankEnded(0, 7, None)):
        plain(ev.Record(1, 12.5, "", event), state())
    printer.close(LIMIT)
    assert stream.getvalue() == "   2.500s  rank 0 started (pid 77)\n   2.500s  rank 0 ended with code 7\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal of 60 columns and 10 lines: our side, the program's side."""
    ours, theirs = pty.openpty()
    resize(ours, 10, 60)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def resize(terminal: int, height: int, width: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def test_a_table_shows_each_rank_and_fits_the_terminal(
    terminal: tuple[int, int], printer: Printer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[tuple[str, ...]] = []
    monkeypatch.setattr(printer, "show", frames.append)
    bad = End(1, 11.0, 7, None)
    ranks = (rank(0, phase="running"), rank(1, end=bad, phase="over"), rank(2, silent=True))
    record = ev.Record(1, 12.5, "", ev.RankStarted(0, 77))
    Table(printer, terminal[1], color=True)(record, state(*ranks))
    first, second, third, summary = frames[0]
    assert first.split() == ["0", "worker", "n1", "running"]
    assert second.startswith("\x1b[31m")
    assert second.endswith("code 7\x1b[0m")
    assert third.split()[-1] == "silent"
    assert summary == "      2.5 s  running"
    resize(terminal[0], 10, 20)
    Table(printer, terminal[1], color=True)(record, state(*ranks))
    assert all(len(re.sub(r"\x1b\[\d+m", "", line)) <= 19 for line in frames[1])
    assert frames[1][1].endswith("\x1b[0m")
    Table(printer, terminal[1], color=False)(record, state(*ranks))
    assert not any("\x1b" in line for line in frames[2])


def test_a_terminal_that_becomes_too_small_gets_lines(
    terminal: tuple[int, int], stream: Stream, printer: Printer
) -> None:
    stream.open.set()
    table = Table(printer, terminal[1], color=False)
    resize(terminal[0], 3, 60)
    table(ev.Record(1, 12.5, "", ev.RankStarted(0, 77)), state(rank(0), rank(1)))
    printer.close(LIMIT)
    assert stream.getvalue() == "   2.500s  rank 0 started (pid 77)\n"


def test_what_fits_the_stream(terminal: tuple[int, int], printer: Printer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(terminal[1], "w", closefd=False) as tty:
        assert isinstance(reporter(printer, tty), Table)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(reporter(printer, tty), Plain)
    assert isinstance(reporter(printer, io.StringIO()), Plain)


# --- on a real terminal --------------------------------------------------------------------------------------------


def seen(terminal: tuple[int, int], argv: list[str], directory: Path, **env: str) -> str:
    """What a run shows on the terminal, to its last line."""
    whole = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(directory / "state"), **env}
    ours, theirs = terminal
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=whole)
    shown = b""
    try:
        while not re.search(rb"\[exit \d+, origin \w+\]\r\n", shown):
            assert select.select([ours], [], [], LIMIT)[0], shown
            shown += os.read(ours, 65536)
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()
    return shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["table", "no color", "too small"])
def test_a_run_on_a_terminal(tmp_path: Path, terminal: tuple[int, int], how: str) -> None:
    with Local(tmp_path) as local:
        plan = local.plan(
            {"worker": role(0, sh(f"{touch('up')}; exit 9")), "client": role(1, sh(f"{await_files('never', 0)}"))},
            coordinator=1,
        )
    resize(terminal[0], 3 if how == "too small" else 10, 200)
    shown = seen(terminal, [ALLOCCTL, "run", str(plan)], tmp_path, **({"NO_COLOR": "1"} if how == "no color" else {}))
    assert shown.count("[exit 9, origin native]") == 1
    assert ("\x1b[31m" in shown) == (how == "table")
    assert ("\x1b[3A" in shown) == (how != "too small")
    if how != "too small":
        *_, last = shown.split("\x1b[J")
        lines = last.splitlines()
        ends = [line for line in lines if re.search(r"\b[01]\s+(worker|client)\b", line)]
        assert len(ends) == 2
        assert "code 9" in ends[0]
        assert "[exit 9" in lines[-1]  # the table stays, the verdict stands below it


@pytest.mark.slow
def test_a_terminal_that_goes_away_stops_the_run_in_order(tmp_path: Path) -> None:
    """Its hang-up is a request to stop; that nothing can be shown any more changes nothing."""
    with Local(tmp_path) as local:
        plan = local.plan({"worker": role("0,1", SERVE)}, coordinator=1)
    ours, theirs = pty.openpty()
    resize(ours, 20, 80)
    argv = ["setsid", "--ctty", ALLOCCTL, "run", str(plan)]
    env = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path / "state")}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=env)
    os.close(theirs)
    try:
        until(lambda: len(list(tmp_path.glob("runs/*/up.*"))) == 2, "two ranks")
        os.close(ours)
        assert process.wait(LIMIT) == 143
    finally:
        process.kill()
        process.wait()
    (receipt,) = tmp_path.glob("runs/*/receipt.run.json")
    document = json.loads(receipt.read_text())
    assert "SIGHUP" in document["verdict"]["summary"]
    assert [rank["end"]["code"] for rank in document["ranks"]] == [0, 0]
    assert not any("display" in note for note in document["notes"])


def test_a_display_that_breaks_is_noted_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Plain, "__call__", broken)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with Local(tmp_path) as local:
        plan = local.plan({"client": role(0, sh("exit 7"))}, coordinator=0)
    assert main(["run", "--local", str(plan)]) == 7
    (receipt,) = tmp_path.glob("runs/*/receipt.run.json")
    assert json.loads(receipt.read_text())["notes"] == ["the display broke: RuntimeError: broken"]
