"""One step's process on asyncio: lines as they come, the end after the last line, ended from outside when told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.launch.process import LINE_LIMIT, StepProcess, use_pidfd_watcher

LIMIT = 10.0


@pytest.fixture(autouse=True)
async def _pidfd() -> None:
    use_pidfd_watcher()


@pytest.fixture
def stderr(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


class Heard:
    """The lines of a process, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._news = asyncio.Event()

    def __call__(self, line: bytes) -> None:
        self.lines.append(line)
        self._news.set()

    async def until(self, line: bytes) -> None:
        async with asyncio.timeout(LIMIT):
            while line not in self.lines:
                self._news.clear()
                await self._news.wait()


async def start(script: str, heard: Heard, stderr: int) -> StepProcess:
    return await StepProcess.start((sys.executable, "-IS", "-c", script), dict(os.environ), heard, stderr=stderr)


async def end(process: StepProcess) -> int:
    async with asyncio.timeout(LIMIT):
        return await process.wait()


async def test_lines_come_whole_and_before_the_end(stderr: int) -> None:
    heard = Heard()
    process = await start(
        "import sys; sys.stdout.write('one\\ntwo\\nlast without newline'); sys.exit(3)", heard, stderr
    )
    assert await end(process) == 3
    assert heard.lines == [b"one", b"two", b"last without newline"]


async def test_what_is_sent_arrives_and_a_closed_channel_is_silence(stderr: int) -> None:
    heard = Heard()
    process = await start("import sys; print(sys.stdin.readline().strip(), flush=True)", heard, stderr)
    process.send(b"hello\n")
    await heard.until(b"hello")
    assert await end(process) == 0
    process.send(b"too late\n")


async def test_a_line_without_end_is_passed_on_in_pieces(stderr: int) -> None:
    heard = Heard()
    process = await start(f"print('x' * {3 * LINE_LIMIT}, end='')", heard, stderr)
    assert await end(process) == 0
    assert b"".join(heard.lines) == b"x" * (3 * LINE_LIMIT)
    assert max(map(len, heard.lines)) <= LINE_LIMIT


async def test_terminate_closes_the_channel_and_sends_term(stderr: int) -> None:
    heard = Heard()
    script = "import signal, sys; print('up', flush=True); sys.stdin.read(); print('eof', flush=True); signal.pause()"
    process = await start(script, heard, stderr)
    await heard.until(b"up")
    process.terminate()
    assert await end(process) == -signal.SIGTERM


async def test_what_ignores_term_is_killed(stderr: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.launch.process.KILL_AFTER", 0.05)
    heard = Heard()
    script = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
    process = await start(script, heard, stderr)
    await heard.until(b"up")
    process.terminate()
    assert await end(process) == -signal.SIGKILL


async def test_a_pipe_that_somebody_else_holds_does_not_hold_the_end(
    stderr: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.launch.process.PIPES_AFTER", 0.05)
    heard = Heard()
    script = "import os, signal\npid = os.fork()\nif pid: print(pid, flush=True)\nelse: signal.pause()"
    process = await start(script, heard, stderr)
    assert await end(process) == 0
    os.kill(int(heard.lines[0]), signal.SIGKILL)


async def test_a_program_that_is_not_there_is_an_oserror(stderr: int) -> None:
    with pytest.raises(FileNotFoundError):
        await StepProcess.start(("/nonexistent/srun",), {}, Heard(), stderr=stderr)


async def test_without_a_channel_stdout_is_the_file(stderr: int, tmp_path: Path) -> None:
    heard = Heard()
    descriptor = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    script = "import sys; print('to the file', repr(sys.stdin.read()))"
    argv = (sys.executable, "-IS", "-c", script)
    process = await StepProcess.start(argv, dict(os.environ), heard, stdout=descriptor, stderr=stderr)
    os.close(descriptor)
    process.send(b"nobody listens\n")
    assert await end(process) == 0
    assert (tmp_path / "out").read_text() == "to the file ''\n"
    assert heard.lines == []
