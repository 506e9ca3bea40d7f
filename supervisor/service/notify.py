"""Telling systemd how the daemon is: sd_notify(3), written out. It is one datagram to one socket.

    READY=1                         it answers; `systemctl start` returns
    STATUS=...                      a sentence for `systemctl status`
    RELOADING=1, MONOTONIC_USEC=    it reads its settings again; READY=1 ends that
    STOPPING=1                      it is on its way out
    WATCHDOG=1                      it is well; without one in each WatchdogSec systemd ends it and starts another

Without systemd, or when its socket is gone, all of this does nothing: nobody who holds allocations may fail because
nobody listens. Nothing here waits: a datagram that finds no room is dropped, and the next one says more.

The variables are taken out of the environment: no child may speak in our name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Final

LONGEST_STATUS: Final = 400  # characters


class Notifier:
    """The way to systemd. `watchdog`: seconds within which it wants to hear that we are well; None: it does not."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = _address(environ.pop("NOTIFY_SOCKET", ""))
        seconds, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        self.watchdog = _seconds(seconds) if self._address and pid in ("", str(os.getpid())) else None
        self._status = ""

    def ready(self, status: str) -> None:
        """It answers, for the first time or after a reload."""
        self._status = ""
        self._tell("READY=1", self._sentence(status))

    def status(self, text: str) -> None:
        """How it is, for people. Told only when it is another sentence than before."""
        if line := self._sentence(text):
            self._tell(line)

    def reloading(self) -> None:
        """The settings are read again; `ready` is to follow."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """It ends."""
        self._tell("STOPPING=1", self._sentence(status))

    async def keep_telling(self, well: Callable[[], bool]) -> None:
        """The watchdog's task: say that we are well, twice in each interval, as long as `well` says so. It comes from
        the loop that does the work: a loop that hangs tells nothing. Ends at once where nobody wants to hear it."""
        while self.watchdog is not None:
            if well():
                self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / 2)

    def _sentence(self, text: str) -> str:
        line = " ".join(text.split())[:LONGEST_STATUS]
        if line == self._status:
            return ""
        self._status = line
        return f"STATUS={line}"

    def _tell(self, *lines: str) -> None:
        if not self._address:
            return
        data = "\n".join(filter(None, lines)).encode(errors="replace")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            way.sendto(data, self._address)


def _address(given: str) -> str:
    """A socket's address as the kernel takes it; "" when there is none. `@` stands for an abstract one's zero byte."""
    if given.startswith("@"):
        return "\0" + given[1:]
    return given if given.startswith("/") else ""


def _seconds(microseconds: str) -> float | None:
    return int(microseconds) / 1e6 if microseconds.isascii() and microseconds.isdigit() and int(microseconds) else None
