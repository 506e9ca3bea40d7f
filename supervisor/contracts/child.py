"""A process of ours that may outlast a look: it is waited for a while, and again at the next look.

A look has to come to its end soon (a file system that does not answer is told by that), but a checker may take an hour
and a large file a minute. So nobody waits for a process to its end. It is in a process group of its own, which is
killed with it; what it leaves behind there is killed too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

OUTPUT_CAP: Final = 64 << 10  # bytes of output that are kept; the rest is read and dropped

DYING: Final = 2.0
"""Seconds that a killed process may take to die; one that hangs in a file system that is gone is left behind."""


def ticks(process: str) -> int:
    """Clock ticks of a processor that a process or thread has used, by its directory in /proc; 0 when it is gone."""
    try:
        words = Path(process, "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])  # utime and stime: see proc_pid_stat(5)


class Overstayed(Exception):
    """The process took longer than it may, and was killed."""


class Child:
    """A process, from its start. `limit`: seconds that it may take. It may be waited for in one thread and ended in
    another. Raises OSError when it cannot be started."""

    def __init__(
        self,
        command: Sequence[str],
        limit: float,
        *,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Collection[int] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.output = bytearray()
        self.limit = limit
        self._until = time.monotonic() + limit
        self._turn = threading.Lock()  # whoever waits for it, or ends it
        self._guard = threading.Lock()  # its number: it is signalled, or reaped
        self._over = False
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._kill()
            self._process.communicate()
            raise
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._poll.register(self._pidfd, select.POLLIN)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None while it is still at work after so many seconds. Raises
        Overstayed."""
        until = time.monotonic() + seconds
        with self._turn:
            while not self._over:
                now = time.monotonic()
                if now >= self._until:
                    self._end()
                    raise Overstayed(f"took longer than {self.limit:g} s")
                ready = dict(self._poll.poll(max(0.0, min(until, self._until) - now) * 1000))
                if self._pidfd in ready:
                    self._end()
                    break
                if ready:
                    self._drain()
                if time.monotonic() >= until:
                    return None
        return self._process.returncode

    def spent(self) -> int:
        """Clock ticks of a processor that it has used: it does something as long as they grow."""
        return ticks(f"/proc/{self._process.pid}")

    def end(self) -> None:
        """Kill it and its group, if it lives. Whoever waits for it learns that."""
        self._kill()
        with self._turn:
            if not self._over:
                self._end()

    def _kill(self) -> None:
        with self._guard:
            if self._process.returncode is None:  # not reaped, so the number is still its own
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._over = True
        self._kill()  # those that it left behind, too
        self._drain()
        gone = select.poll()
        gone.register(self._pidfd, select.POLLIN)
        if gone.poll(DYING * 1000):
            with self._guard:
                self._process.wait()
        self._pipe.close()
        os.close(self._pidfd)

    def _drain(self) -> None:
        """What is in the pipe, which holds no more than that."""
        with suppress(BlockingIOError, KeyError):
            block = os.read(self._pipe.fileno(), OUTPUT_CAP)
            self.output += block[: OUTPUT_CAP - len(self.output)]
            if not block:
                self._poll.unregister(self._pipe)
