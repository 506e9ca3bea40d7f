"""A process that may outlast a look: waited for in pieces, killed with its group, bounded in time and words."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from supervisor.contracts.child import OUTPUT_CAP, Child, Overstayed

LONG = 60.0  # seconds that a test would wait


def test_its_status_and_its_words(tmp_path: Path) -> None:
    child = Child(["sh", "-c", "pwd; echo $A >&2; exit 3"], LONG, cwd=tmp_path, env={"A": "x"})
    assert child.wait(LONG) == 3
    assert child.output.decode() == f"{tmp_path}\nx\n"
    assert child.wait(LONG) == 3
    child.end()


def test_a_signal_is_negative() -> None:
    assert Child(["sh", "-c", "kill -TERM $$"], LONG).wait(LONG) == -signal.SIGTERM


def test_it_has_nothing_to_read_and_is_its_own_group() -> None:
    child = Child([sys.executable, "-c", "import os,sys; print(sys.stdin.read(), os.getpgrp() == os.getpid())"], LONG)
    assert child.wait(LONG) == 0
    assert child.output == b" True\n"


def test_it_is_waited_for_in_pieces(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    child = Child(["sh", "-c", "read line < go; exit 7"], LONG, cwd=tmp_path)
    assert child.wait(0) is None
    assert child.wait(0) is None
    (tmp_path / "go").write_text("on\n")
    assert child.wait(LONG) == 7


def test_more_words_than_are_kept() -> None:
    child = Child([sys.executable, "-c", "print('x' * 1_000_000)"], LONG)
    assert child.wait(LONG) == 0
    assert child.output == b"x" * OUTPUT_CAP


def test_words_without_end_do_not_hold_a_look() -> None:
    child = Child(["yes"], LONG)
    assert child.wait(0) is None
    child.end()


def test_closed_words_are_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "closed")
    child = Child(["sh", "-c", "exec >&- 2>&-; : > closed; read line < closed; exit 4"], LONG, cwd=tmp_path)
    with open(tmp_path / "closed"):
        assert child.wait(0) is None
    (tmp_path / "closed").write_text("on\n")
    assert child.wait(LONG) == 4


def test_what_it_leaves_behind_is_killed(tmp_path: Path) -> None:
    """A grandchild that holds the pipe open is not waited for, and does not live on."""
    os.mkfifo(tmp_path / "lives")
    child = Child(["sh", "-c", "sleep 1000 > lives & exit 5"], LONG, cwd=tmp_path)
    with open(tmp_path / "lives") as lives:
        assert child.wait(LONG) == 5
        assert lives.read() == ""  # its end has come


def test_one_that_overstays_is_killed() -> None:
    child = Child(["sleep", "1000"], 0.1)
    with pytest.raises(Overstayed, match=r"took longer than 0\.1 s"):
        child.wait(LONG)
    assert child.wait(0) == -signal.SIGKILL


def test_one_that_is_ended_while_another_thread_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lives")
    child, said = Child(["sh", "-c", "exec sleep 1000 > lives"], LONG, cwd=tmp_path), list[int | None]()
    thread = threading.Thread(target=lambda: said.append(child.wait(LONG)))
    thread.start()
    with open(tmp_path / "lives") as lives:
        child.end()
        assert lives.read() == ""
    thread.join()
    assert said == [-signal.SIGKILL]
    child.end()


def test_one_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "none")], LONG)


def test_one_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Child(["sleep", "1000"], LONG)
