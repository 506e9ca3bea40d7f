"""`allocctl logs`: every line once and whole, whatever happens to the files, and an end when nothing more can come."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.main import main
from supervisor.cli.output import put_lines
from supervisor.runs.growing import LEAST, LONG, LOOK
from tests.faults.local import ALLOCCTL, LIMIT, until
from tests.unit.test_follow import append, end_run, line, opening

Out = Callable[[], bytes]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose engine is this process: it holds the directory open (see `alive`)."""
    directory = tmp_path / "run"
    (directory / "logs").mkdir(parents=True)
    ours: dict[str, Any] = {
        "run_id": "run",
        "jobid": "local-1",
        "launcher": "local",
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    (directory / "journal.jsonl").write_bytes(line(1, replace(opening("7"), **ours)))
    return directory


@pytest.fixture
def alive(run_dir: Path) -> Iterator[Callable[[], None]]:
    """The engine lives, until this is called."""
    held = [os.open(run_dir, os.O_RDONLY)]

    def end() -> None:
        while held:
            os.close(held.pop())

    yield end
    end()


@pytest.fixture
def out(capfdbinary: pytest.CaptureFixture[bytes]) -> Out:
    """What was printed since the last call."""
    return lambda: capfdbinary.readouterr().out


def log(run_dir: Path, name: str, content: bytes = b"") -> Path:
    path = run_dir / "logs" / name
    path.write_bytes(content)
    return path


# --- printing ------------------------------------------------------------------------------------------------------


def test_logs_in_the_order_of_ranks(run_dir: Path, out: Out) -> None:
    log(run_dir, "rank-10.client.out", b"last\n")
    log(run_dir, "rank-2.server.err", b"bytes \xff\x00 are kept\nno newline")
    log(run_dir, "rank-2.server.out", b"")
    assert main(["logs", str(run_dir)]) == 0
    assert out() == (
        b"rank-2.server.err: bytes \xff\x00 are kept\nrank-10.client.out: last\nrank-2.server.err: no newline\n"
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--rank", "1"], ["1.a.err", "1.a.out", "1.a.srun"]),
        (["--rank", "1", "--rank", "0", "--kind", "out"], ["0.b.out", "1.a.out"]),
        (["--kind", "err", "--kind", "srun"], ["0.b.err", "1.a.err", "1.a.srun"]),
    ],
)
def test_only_some(run_dir: Path, out: Out, options: list[str], names: list[str]) -> None:
    for name in ("1.a.out", "1.a.err", "1.a.srun", "0.b.out", "0.b.err"):
        log(run_dir, f"rank-{name}", b"x\n")
    assert main(["logs", str(run_dir), *options]) == 0
    assert out().decode().splitlines() == [f"rank-{name}: x" for name in names]


def test_no_such_rank(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(run_dir, "rank-0.a.out", b"x\n")
    assert main(["logs", str(run_dir), "--rank", "7"]) == 69
    assert "no such logs" in capsys.readouterr().err


def test_for_programs(run_dir: Path, out: Out) -> None:
    log(run_dir, "rank-0.a.out", "größer\n".encode() + b"\xff")
    assert main(["logs", str(run_dir), "--json"]) == 0
    lines = [json.loads(line) for line in out().splitlines()]
    expected = {"schema_version": 1, "run": "run", "file": "rank-0.a.out"}
    assert lines == [{**expected, "text": text} for text in ("größer", "\ufffd")]


def test_a_log_without_lines_is_printed_in_pieces(run_dir: Path, out: Out) -> None:
    """What is kept in memory has a bound."""
    log(run_dir, "rank-0.a.out", b"x" * (4 * LONG))
    assert main(["logs", str(run_dir)]) == 0
    pieces = out().splitlines()
    assert sum(len(piece) - len(b"rank-0.a.out: ") for piece in pieces) == 4 * LONG
    assert max(map(len, pieces)) <= LONG + max(LEAST, LOOK) + 20


def test_a_log_that_a_job_replaced_by_a_link_is_not_followed(run_dir: Path, out: Out, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (run_dir / "logs/rank-0.a.out").symlink_to(tmp_path / "secret")
    assert main(["logs", str(run_dir)]) == 0
    assert out() == b""


# --- following to the end ------------------------------------------------------------------------------------------


@pytest.fixture
def following(run_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """`allocctl logs -f` at work; the file that it prints into."""
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        process = subprocess.Popen([ALLOCCTL, "logs", "-f", str(run_dir)], stdout=file, cwd=tmp_path)
    yield printed
    try:
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("last_word", ["receipt", "death"])
def test_following_ends_when_nothing_more_can_come(
    run_dir: Path, alive: Callable[[], None], following: Path, last_word: str
) -> None:
    """With the receipt, or with the engine's death; the last line, without a newline, is printed in any case."""
    path = log(run_dir, "rank-0.a.out", b"one\n")
    until(lambda: following.read_bytes() == b"rank-0.a.out: one\n", "the first line")
    append(path, b"two\n")
    until(lambda: following.read_bytes().endswith(b"two\n"), "the second line")
    os.truncate(path, 0)
    append(path, b"3\n")
    until(lambda: following.read_bytes().endswith(b": 3\n"), "the third line")
    append(path, b"four")
    if last_word == "receipt":
        end_run(run_dir)
    else:
        alive()
    until(lambda: following.read_bytes().endswith(b"rank-0.a.out: four\n"), "the rest")


@pytest.mark.parametrize("journal", [b"garbage\n", b"{}\n", b"[]\n"])
def test_a_journal_that_does_not_tell_its_engine(
    run_dir: Path, capsys: pytest.CaptureFixture[str], journal: bytes
) -> None:
    (run_dir / "journal.jsonl").write_bytes(journal)
    assert main(["logs", "-f", str(run_dir)]) == 69
    assert "does not begin with the opening of a run" in capsys.readouterr().err


def test_a_run_without_logs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "logs").rmdir()
    assert main(["logs", str(run_dir)]) == 69
    assert "no such logs" in capsys.readouterr().err


def test_a_rank_that_the_run_does_not_have(
    run_dir: Path, alive: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "-f", str(run_dir), "--rank", "2"]) == 69
    assert "no such rank: it has 2" in capsys.readouterr().err


def test_a_reader_that_has_left_ends_the_following(run_dir: Path, alive: Callable[[], None]) -> None:
    path = log(run_dir, "rank-0.a.out", b"one\n")
    with subprocess.Popen([ALLOCCTL, "logs", "-f", str(run_dir)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"rank-0.a.out: one\n"
        process.stdout.close()
        append(path, b"two\n")
        assert process.wait(LIMIT) == 1


def test_a_terminal_obeys_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown what is in the log; files and pipes get the bytes."""
    lines = [b"\x1b[31mred\x07 \xc3\xbc\xff"]
    master, slave = pty.openpty()
    with open(master, "rb", buffering=0) as shown, open(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        put_lines("7", "log", lines, "7")
        assert shown.read(100) == "log: \\x1b[31mred\\x07 ü\ufffd\r\n".encode()
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as shown, open(writing, "w", encoding="utf-8") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        put_lines("7", "log", lines, "7")
        assert shown.read(100) == b"log: " + lines[0] + b"\n"
