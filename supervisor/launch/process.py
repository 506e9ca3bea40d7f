"""One step's process: made, listened to, written to and ended, on asyncio's subprocess transport.

Lines of the channel reach the owner by a plain call as they come (no task wakes up for a line: a failing rank's report
is acted on in the same turn of the loop), and the end is told once, after the last line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

LINE_LIMIT: Final = 64 * 1024
"""Bytes; a longer line is foreign output and is passed on in pieces."""

KILL_AFTER: Final = 2.0  # seconds from TERM to KILL: a hung srun is killed, never left (a stopped one drains the node)
PIPES_AFTER: Final = 1.0  # seconds that a pipe may stay open after the process: somebody else holds it


class StepProcess(asyncio.SubprocessProtocol):
    """A child process in a session of its own. `on_line` gets each line of stdout without its newline."""

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._buffer = b""
        self._transport: asyncio.SubprocessTransport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._code: int | None = None

    @classmethod
    async def start(
        cls,
        argv: tuple[str, ...],
        env: Mapping[str, str],
        on_line: Callable[[bytes], None],
        *,
        stderr: int,
        stdout: int | None = None,
        cwd: str | None = None,
    ) -> StepProcess:
        """Start `argv`. `stdout` None means a pipe (and a pipe for stdin); else both are files and stdin is
        /dev/null. Raises OSError when the process cannot be made."""
        loop = asyncio.get_running_loop()
        channel = stdout is None
        _, protocol = await loop.subprocess_exec(
            lambda: cls(on_line),
            *argv,
            stdin=asyncio.subprocess.PIPE if channel else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if channel else stdout,
            stderr=stderr,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        return protocol

    @property
    def pid(self) -> int:
        assert self._transport is not None  # noqa: S101 - set before start() returns
        return self._transport.get_pid()

    async def wait(self) -> int:
        """The exit code (negative: the signal that killed it), when the last line has been passed on."""
        return await asyncio.shield(self._ended)

    def send(self, line: bytes) -> None:
        """Write to the channel; silently nothing once it is closed: the end of the step tells the story."""
        pipe = self._transport.get_pipe_transport(0) if self._transport else None
        if isinstance(pipe, asyncio.WriteTransport) and not pipe.is_closing():
            pipe.write(line)

    def terminate(self) -> None:
        """Close the channel, TERM to the process now, KILL to its group `KILL_AFTER` seconds later."""
        if self._code is not None or self._transport is None:
            return
        pipe = self._transport.get_pipe_transport(0)
        if pipe is not None:
            pipe.close()
        self._signal(signal.SIGTERM)
        self._timers.append(self._loop.call_later(KILL_AFTER, self.kill))

    def kill(self) -> None:
        """KILL to the process and its group."""
        if self._code is None and self._transport is not None:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The leader of a session of its own, not yet reaped: the number cannot be another's.
        try:
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    # --- asyncio's calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)  # noqa: S101 - asyncio's contract
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._buffer + data).split(b"\n")
        self._buffer = b""
        for line in lines:
            self._on_line(line)
        while len(rest) > LINE_LIMIT:
            self._on_line(rest[:LINE_LIMIT])
            rest = rest[LINE_LIMIT:]
        self._buffer = rest

    def process_exited(self) -> None:
        assert self._transport is not None  # noqa: S101 - asyncio's contract
        self._code = self._transport.get_returncode()
        self._timers.append(self._loop.call_later(PIPES_AFTER, self._finish))

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._ended.done():
            return
        if self._buffer:
            self._on_line(self._buffer)
            self._buffer = b""
        self._ended.set_result(-signal.SIGKILL if self._code is None else self._code)
        if self._transport is not None:
            self._transport.close()


def use_pidfd_watcher() -> None:
    """On Python 3.11 asyncio makes a thread for every child; a pidfd does without, and later versions know by
    themselves. To be called in the loop that will start processes."""
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.get_event_loop_policy().set_child_watcher(watcher)
