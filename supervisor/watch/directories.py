"""Hints that something changed in some directories, for an event loop.

A hint says only "look again": names may be missing, events may be lost, a network file system raises none. So `changed`
is also called every `scan` seconds, whatever happens; a listing decides. When inotify cannot be had (limits, or a
directory that does not exist), `trouble` says why, and the scan alone carries on.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterable
from typing import Final

from supervisor.watch.inotify import Inotify

SCAN: Final = 1.0  # seconds between looks that no event asked for


class DirectoryHints:
    """Calls `changed()` in the loop after events in `directories`, and every `scan` seconds."""

    def __init__(self, directories: Iterable[str], changed: Callable[[], None], scan: float = SCAN) -> None:
        self._changed = changed
        self._scan = scan
        self._loop = asyncio.get_running_loop()
        self._missing = set(directories)
        self._inotify: Inotify | None = None
        self.trouble: str | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            self.trouble = f"no events: {os.strerror(error.errno or 0)}"
        else:
            self._loop.add_reader(self._inotify.fileno(), self._heard)
        self._watch_missing()
        self._timer = self._loop.call_later(scan, self._tick)

    def close(self) -> None:
        """Stop; nothing is called after this."""
        self._timer.cancel()
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _heard(self) -> None:
        if self._inotify is not None:
            self._inotify.events()
            self._inotify.overflowed = False  # the listing that follows sees everything
            self._changed()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._scan, self._tick)
        self._watch_missing()
        self._changed()

    def _watch_missing(self) -> None:
        """Directories may appear late."""
        for directory in tuple(self._missing):
            try:
                if self._inotify is not None:
                    self._inotify.add(directory)
                    self._missing.discard(directory)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    self.trouble = f"{directory}: {os.strerror(error.errno or 0)}"
                    self._missing.discard(directory)
