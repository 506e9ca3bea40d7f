"""Hints that something changed in some directories, for an event loop.

A hint says only "look again": names may be missing, events may be lost, a network file system raises none. So `changed`
is also called every `scan` seconds, whatever happens; a listing decides. When inotify cannot be had (limits, or a
directory that does not exist), `trouble` says why, and the scan alone carries on.

A file system that does not answer blocks whoever names a directory on it, so the loop never does: `watch` is for a
thread, to be called again while there is something `missing`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

from supervisor.watch.inotify import Inotify

SCAN: Final = 1.0  # seconds between looks that no event asked for

_NOT_YET: Final = frozenset({errno.ENOENT, errno.ENOTDIR})


class DirectoryHints:
    """Calls `changed()` in the loop after events in `directories`, and every `scan` seconds."""

    def __init__(self, directories: Iterable[str], changed: Callable[[], None], scan: float = SCAN) -> None:
        self._changed = changed
        self._scan = scan
        self._loop = asyncio.get_running_loop()
        self._missing = set(directories)
        self._one_at_a_time = threading.Lock()
        self._inotify: Inotify | None = None
        self.trouble: str | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            self.trouble = os.strerror(error.errno or 0)
        else:
            self._loop.add_reader(self._inotify.fileno(), self._heard)
        self._timer = self._loop.call_later(scan, self._tick)

    @property
    def missing(self) -> bool:
        """Whether there are directories that are not watched yet, and could be."""
        return self._inotify is not None and bool(self._missing)

    def watch(self) -> None:
        """Watch the directories that are there by now. Blocks as long as their file systems do: call it in a thread.
        While one call is under way, another returns at once."""
        if self._one_at_a_time.acquire(blocking=False):
            try:
                for directory in tuple(self._missing):
                    self._add(directory)
            finally:
                self._one_at_a_time.release()

    def close(self) -> None:
        """Stop; nothing is called after this."""
        self._timer.cancel()
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _add(self, directory: str) -> None:
        inotify = self._inotify
        if inotify is None:
            return
        try:
            inotify.add(directory)
        except OSError as error:
            if error.errno in _NOT_YET:
                return  # directories may appear late
            if self._inotify is not None:
                self.trouble = f"{directory}: {os.strerror(error.errno or 0)}"
        self._missing.discard(directory)

    def _heard(self) -> None:
        if self._inotify is not None:
            self._inotify.events()
            self._inotify.overflowed = False  # the listing that follows sees everything
            self._changed()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._scan, self._tick)
        self._changed()
