"""Whoever interrupts when the end was told, or is about to be, changes nothing: the exit code is what is told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli.main import main
from supervisor.cli.output import ENDING
from tests.faults.local import ALLOCCTL, LIMIT, Local, role, sh, until

pytestmark = pytest.mark.slow

HURRIED = """
import os, sys
from supervisor.cli import interrupts, output, wait
from supervisor.cli.main import main
from supervisor.engine import session

def then_signalled(function, numbers):
    def both(*arguments, **options):
        done = function(*arguments, **options)
        for number in numbers:
            os.kill(os.getpid(), number)
        return done
    return both

session.drive = then_signalled(session.drive, output.ENDING)
wait._tell = then_signalled(wait._tell, interrupts.SIGNALS)
sys.exit(main())
"""
"""allocctl, to which every signal that it hears comes when a run is over, and when a wait has told the verdict."""


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    with Local(tmp_path) as it:
        yield it


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def failing(local: Local) -> str:
    return str(local.plan({"a": role(0, sh("exit 7"))}, coordinator=0, nodes=1))


def test_what_was_judged_is_told(local: Local) -> None:
    base = local.base()

    def hurried(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", HURRIED, *words]
        return subprocess.run(argv, env=local.env, capture_output=True, text=True, timeout=LIMIT, check=False)

    done = hurried("run", "--local", "--dir", str(base), failing(local))
    assert done.returncode == 7 and done.stderr.endswith("[exit 7, origin native]\n"), done.stderr
    done = hurried("wait", str(next(base.iterdir())))
    assert done.returncode == 7 and done.stderr.endswith("[exit 7, origin native]\n"), done.stderr


@pytest.mark.parametrize("number", ENDING)
def test_a_reader_that_does_not_read_can_be_left(local: Local, number: signal.Signals) -> None:
    """The verdict is told on stderr; the document that was asked for finds nobody."""
    argv = [ALLOCCTL, "run", "--local", "--json", "--dir", str(local.base()), failing(local)]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b" " * 4096)  # it is full
    process = subprocess.Popen(argv, env=local.env, stdout=writing, stderr=subprocess.PIPE, text=True)
    with contextlib.closing(process.stderr or sys.stderr) as stderr, ended(process):
        assert any("[exit 7, origin native]" in line for line in stderr)

        def left() -> bool:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            return process.poll() is not None

        until(left, "the end")
        assert process.returncode == 7
    os.close(reading)
    os.close(writing)


def test_a_program_that_calls_us_keeps_its_signals(local: Local, capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in ENDING]
    assert main(["run", "--local", "--dir", str(local.base()), failing(local)]) == 7
    assert [signal.getsignal(number) for number in ENDING] == before
