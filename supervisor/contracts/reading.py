"""Reading one file: opened safely, whole, and once.

* A FIFO, socket or device is never waited for (O_NONBLOCK) and never counts; a symbolic link is not followed. Neither
  does a file of a strange owner or with a second name, which may be somebody else's. What is refused is refused by the
  listing's word, before it is opened, and again by that of the descriptor.
* A file that changes while it is read is not whole. Nor is one that is empty or no JSON (yet).
* A `Reader` remembers. What was read whole is not read again while it is the same file (device, inode, size and both
  times). What was not whole is opened at each look (network file systems ask the server then, and seldom before) and
  read when it has changed. Times have a grain: two writes within a tick of the file system's clock look like one. So a
  file that is not whole is believed to be unchanged only when it was read once more a while after it first looked so.

The answer is *pending* while a file is refused, unreadable, empty or half-written: all of these may still change. It is
*invalid* when a file that was read whole says something wrong: waiting does not help.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from supervisor.contracts.content import Judge, Judged, NotWhole, judged
from supervisor.contracts.walk import OURS, Match, kind_of

__all__ = ["SIZE_CAP", "Judge", "Judged", "Reader", "Reading"]

SIZE_CAP: Final = 1 << 30
"""Bytes. No file above this is read: not accepted as JSON, and left without a sha256 otherwise."""
GRAIN: Final = 2.0
"""Seconds after which two writes have two times, on any file system."""

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_BLOCK: Final = 1 << 20  # bytes

Signature = tuple[int, int, int, int, int]
"""What a file is as long as nobody writes it: device, inode, size, and the times of the last change of its content and
of its inode (ns)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one file said."""

    path: str  # relative to the root
    answer: Literal["pending", "valid", "invalid"]
    problems: tuple[str, ...] = ()  # "FILE: place: found X; expected Y"
    size: int = 0  # bytes
    sha256: str | None = None  # None unless it was read whole
    summary: dict[str, Any] | None = None  # the judge's; None unless it was read whole


@dataclass(frozen=True, slots=True)
class _Memory:
    signature: Signature
    judge: Judge | None
    reading: Reading
    since: float  # seconds of the clock at which the file first looked so
    settled: bool  # it was read again, later than the grain of times


class Refused(Exception):
    """This file does not count now; the text says why."""


class Reader:
    """Reads the files below one root. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memories: dict[str, _Memory] = {}

    def read(self, match: Match, judge: Judge | None) -> Reading:
        """What a file holds; without a judge it is only read. Raises OSError for a fault of ours."""
        known = self._memories.get(match.path)
        if known is not None and known.judge != judge:
            known = None
        if known is not None and known.reading.answer != "pending" and known.signature == signature(match.status):
            return known.reading
        try:
            with opened(match) as (file, status):
                if known is not None and known.settled and known.signature == signature(status):
                    return known.reading
                now = self._clock()
                reading = _read(file, status, match.path, judge)
                same = known is not None and known.signature == signature(status)
                since = known.since if known is not None and same else now
                settled = reading.answer != "pending" or now - since >= GRAIN
                self._memories[match.path] = _Memory(signature(status), judge, reading, since, settled)
                return reading
        except Refused as reason:
            return Reading(match.path, "pending", (f"{match.path}: {reason}",), match.status.st_size)
        except OSError as error:
            return unreadable(match, error)

    def peek(self, match: Match) -> Reading:
        """Whether a file can be read, and its size. Raises OSError for a fault of ours."""
        try:
            with opened(match) as (_, status):
                return Reading(match.path, "valid", (), status.st_size)
        except Refused as reason:
            return Reading(match.path, "pending", (f"{match.path}: {reason}",), match.status.st_size)
        except OSError as error:
            return unreadable(match, error)

    def forget(self, seen: Collection[str]) -> None:
        """Drop the memories of files that a look did not see (`seen`: the paths that it saw)."""
        self._memories = {path: memory for path, memory in self._memories.items() if path in seen}

    def close(self) -> None:
        """End what is still at work."""


def signature(status: os.stat_result) -> Signature:
    """What a file is, by its status."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def opened(match: Match) -> Iterator[tuple[io.FileIO, os.stat_result]]:
    """A plain file of its own, and its status. Raises Refused for anything else, OSError."""
    _refuse(match.status)
    descriptor = os.open(match.name, _FILE, dir_fd=match.directory)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        _refuse(status)
        yield file, status


def _refuse(status: os.stat_result) -> None:
    """Raise Refused for what is no plain file, has a second name, or belongs to somebody else."""
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"found {kind_of(status)}; expected a plain file")
    if status.st_nlink > 1:
        raise Refused(f"found a file with {status.st_nlink} names (hard links); expected one")
    if status.st_uid not in (0, os.geteuid()):
        raise Refused(f"found a file of user {status.st_uid}; expected one of user {os.geteuid()} or root")


def unreadable(match: Match, error: OSError) -> Reading:
    """What a file says that cannot be read now. Raises an error that is ours."""
    if error.errno in OURS:
        raise error
    gone = error.errno == errno.ENOENT
    what = "found nothing any more; expected the file that was listed" if gone else error.strerror
    return Reading(match.path, "pending", (f"{match.path}: {what}",), match.status.st_size)


def _read(file: io.FileIO, status: os.stat_result, path: str, judge: Judge | None) -> Reading:
    """Raises Refused for a file that changes, which is not remembered, OSError."""
    size = status.st_size
    if judge is None:
        return Reading(path, "valid", (), size, _sha256(file, status) if size <= SIZE_CAP else None, {})
    if size == 0:
        return Reading(path, "pending", (f"{path}: found an empty file; expected content",), size)
    if size > SIZE_CAP:
        return Reading(path, "invalid", (f"{path}: found {size} bytes; expected at most {SIZE_CAP} of JSON",), size)
    data = b"".join(_blocks(file, status))
    try:
        said = judged(data, judge)
    except NotWhole as reason:
        return Reading(path, "pending", (f"{path}: {reason}",), size)
    problems = tuple(f"{path}: {problem}" for problem in said.problems)
    answer: Literal["invalid", "valid"] = "invalid" if problems else "valid"
    return Reading(path, answer, problems, size, hashlib.sha256(data).hexdigest(), said.summary)


def _blocks(file: io.FileIO, before: os.stat_result) -> Iterator[bytes]:
    """The whole content; raises Refused when the file is not what it was before reading."""
    size = 0
    while block := file.read(_BLOCK):
        size += len(block)
        if size > before.st_size:
            break
        yield block
    if size != before.st_size or signature(os.fstat(file.fileno())) != signature(before):
        raise Refused("found a file that is being written; expected it to stay as it is")


def _sha256(file: io.FileIO, status: os.stat_result) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, status):
        digest.update(block)
    return digest.hexdigest()
