"""Reading one file: opened safely, whole, and once.

* A FIFO, socket or device is never waited for (O_NONBLOCK) and never counts; a symbolic link is not followed. Neither
  does a file of a strange owner or with a second name, which may be somebody else's. What is refused is refused by the
  listing's word, before it is opened, and again by that of the descriptor.
* A file that changes while it is read is not whole. Nor is one that is empty or no JSON (yet).
* A `Reader` remembers. What was read whole is not read again while it is the same file (device, inode, size and both
  times). What was not whole, or is not what the contract needs, may be replaced: it is opened at each look and its
  server asked how it is (a listing may tell what was known a minute ago), and read when it has changed. Times have a
  grain: two writes within a tick of the file system's clock look like one. So a file that is not whole is believed to
  be unchanged only when it was read once more a while after it first looked so.
* A look has an end: what takes longer to read is read on in the next one.
* What is large is read and judged in a process of its own (see reader), for a parse holds all of this one; and not at
  all while its end shows that it is not whole.

The answer is *pending* while a file is refused, unreadable, empty or half-written: all of these may still change. It is
*invalid* when a file that was read whole says something wrong: waiting does not help.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from supervisor.contracts.content import (
    CHANGING,
    NOT_WHOLE,
    Changing,
    Content,
    Judge,
    NotWhole,
    examine,
    looks_cut,
    whole,
)
from supervisor.contracts.fresh import fresh_status
from supervisor.contracts.places import Place
from supervisor.contracts.reader import Apart, ApartError, Busy, Task, progress
from supervisor.contracts.walk import OURS, Match, Way, kind_of

SIZE_CAP: Final = 1 << 30
"""Bytes. No file above this is read: not accepted as JSON, and left without a sha256 otherwise."""
TEXT_CAP: Final = 16 << 20
"""Bytes of a file that is read as it is."""
GRAIN: Final = 2.0
"""Seconds after which two writes have two times, on any file system."""
LARGE: Final = 1 << 20
"""Bytes. A JSON file above this is judged in a process of its own: below, a parse holds the others for a few
milliseconds; a process takes 60 to start."""

SOON: Final = 0.1
"""Seconds to the next look at a large file that is being read: an examiner that wants to look again so soon is not done
with its look."""

_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_BLOCK: Final = 1 << 20  # bytes
PATIENCE: Final = 3.0
"""Seconds that one look reads, or waits for large files; the next one goes on."""
_ENDS: Final = 4096  # bytes at either end of a large file that are looked at first

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
    mtime_ns: int | None = None  # when it had last been changed; None unless its bytes were looked at


@dataclass(frozen=True, slots=True)
class _Memory:
    signature: Signature
    how: tuple[Judge | None, bool]
    reading: Reading
    since: float  # seconds of the clock at which the file first looked so
    settled: bool  # it was read again, later than the grain of times


class Refused(Exception):
    """This file does not count now; the text says why."""


class Reader:
    """Reads the files below one root, one at a time. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._turn = threading.Lock()
        self._waits_until: float | None = None
        self._doubted: frozenset[str] = frozenset()
        self._busy: set[str] = set()  # paths of files that are being read, or wait for that
        self._begun: dict[str, tuple[Signature | None, Any, int]] = {}  # checksums of the first so many bytes
        self._apart = Apart()
        self.done = 0  # files that were read, and blocks of files that are still being read

    def read(self, match: Match, judge: Judge | None, lines: bool = False) -> Reading:
        """What a file holds: one document, or one a line (the summary is their number then). Without a judge it is only
        read. Raises OSError for a fault of ours."""
        with self._turn:
            self._busy.discard(match.path)
            known = self._memories.get(match.path)
            if known is not None and known.how != (judge, lines):
                known = None
            settled = known is not None and known.reading.answer != "pending" and match.path not in self._doubted
            if known is not None and settled and known.signature == signature(match.status):
                return known.reading
            return self._look(match, lambda file, status: self._read(file, status, match.path, (judge, lines), known))

    def peek(self, match: Match) -> Reading:
        """Whether a file can be read, and its size. Raises OSError for a fault of ours."""
        return self._look(match, lambda file, status: Reading(match.path, "valid", (), status.st_size))

    def text(self, match: Match) -> tuple[Reading, bytes]:
        """A small file, and what it holds (nothing unless it is valid). Raises OSError for a fault of ours."""
        found = bytearray()

        def look(file: io.FileIO, status: os.stat_result) -> Reading:
            size, digest = status.st_size, hashlib.sha256()
            if size > TEXT_CAP:
                problem = f"{match.path}: found {size} bytes; expected at most {TEXT_CAP} of text"
                return Reading(match.path, "invalid", (problem,), size)
            found.extend(whole(file, size, digest.update))
            return Reading(match.path, "valid", (), size, digest.hexdigest(), {}, status.st_mtime_ns)

        return self._look(match, look), bytes(found)

    def again(self) -> float | None:
        """Seconds after which reading may say something else although no directory changes; None: no such."""
        if self._busy:
            return SOON
        unsettled = [memory.since for memory in self._memories.values() if not memory.settled]
        return max(SOON, min(unsettled) + GRAIN - self._clock()) if unsettled else None

    def forget(self, seen: Collection[str], doubted: Collection[str] = ()) -> None:
        """At the end of a look: drop what is known of files that it did not see (`seen`: the paths that it saw).
        `doubted`: whole files that are not what the contract needs (yet); they are opened in the next look, too."""
        self._waits_until = None
        self._doubted = frozenset(doubted)
        self._apart.keep(seen)
        self._busy.intersection_update(seen)
        self._begun = {path: begun for path, begun in self._begun.items() if path in seen}
        self._memories = {path: memory for path, memory in self._memories.items() if path in seen}

    def close(self) -> None:
        """End what is still at work, in whatever thread."""
        self._apart.close()

    def _look(self, match: Match, look: Callable[[io.FileIO, os.stat_result], Reading]) -> Reading:
        try:
            with opened(match) as (file, status):
                return look(file, status)
        except (Refused, Changing) as reason:
            what = str(reason)
        except Busy:
            self._busy.add(match.path)
            what = f"found {match.status.st_size} bytes, which are still being read; expected a moment's patience"
        except OSError as error:
            if error.errno in OURS or isinstance(error, ApartError):
                raise
            gone = error.errno == errno.ENOENT
            what = "found nothing any more; expected the file that was listed" if gone else str(error.strerror)
        return Reading(match.path, "pending", (f"{match.path}: {what}",), match.status.st_size)

    def _read(
        self,
        file: io.FileIO,
        status: os.stat_result,
        path: str,
        how: tuple[Judge | None, bool],
        known: _Memory | None,
    ) -> Reading:
        """Raises Changing for a file that changes, which is not remembered, OSError."""
        same = known if known is not None and known.signature == signature(status) else None
        if same is not None and same.settled:
            return same.reading
        now = self._clock()
        if self._waits_until is None:
            self._waits_until = now + PATIENCE
        elif now >= self._waits_until:
            raise Busy
        reading = replace(self._judge(file, status, path, *how), mtime_ns=status.st_mtime_ns)
        if signature(fresh_status(file.fileno())) != signature(status):
            raise Changing(CHANGING)
        self.done += 1
        since = same.since if same is not None else now
        settled = reading.answer != "pending" or now - since >= GRAIN
        self._memories[path] = _Memory(signature(status), how, reading, since, settled)
        return reading

    def _judge(self, file: io.FileIO, status: os.stat_result, path: str, judge: Judge | None, lines: bool) -> Reading:
        size = status.st_size
        if judge is None:
            return Reading(path, "valid", (), size, self._sha256(file, status, path) if size <= SIZE_CAP else None, {})
        if size == 0 and not lines:
            return Reading(path, "pending", (f"{path}: found an empty file; expected content",), size)
        if size > SIZE_CAP:
            problem = f"{path}: found {size} bytes; expected at most {SIZE_CAP} of JSON"
            return Reading(path, "invalid", (problem,), size)
        try:
            content = self._content(file, status, path, judge, lines)
        except NotWhole as reason:
            return Reading(path, "pending", (f"{path}: {reason}",), size)
        problems = tuple(f"{path}: {problem}" for problem in content.problems)
        return Reading(path, "invalid" if problems else "valid", problems, size, content.sha256, content.summary)

    def _content(self, file: io.FileIO, status: os.stat_result, path: str, judge: Judge, lines: bool) -> Content:
        size, descriptor = status.st_size, file.fileno()
        if size <= LARGE:
            return examine(file, size, judge, lines)
        ends = (os.pread(descriptor, _ENDS, at) for at in (0, max(0, size - _ENDS)))
        if not lines and looks_cut(*ends):
            raise NotWhole(NOT_WHOLE)
        task = Task(path, signature(status), size, judge, lines)
        return self._apart.examine(task, descriptor, self._left())

    def _sha256(self, file: io.FileIO, status: os.stat_result, path: str) -> str:
        """The checksum of a whole file, begun in this look or an earlier one. Raises Changing, Busy."""
        begun, digest, read = self._begun.pop(path, (None, hashlib.sha256(), 0))
        if begun != signature(status):
            digest, read = hashlib.sha256(), 0
        file.seek(read)
        while read <= status.st_size and (block := file.read(_BLOCK)):
            digest.update(block)
            read += len(block)
            self.done += 1
            if read < status.st_size and self._left() <= 0:
                self._begun[path] = signature(status), digest, read
                raise Busy
        if read != status.st_size:
            raise Changing(CHANGING)
        found: str = digest.hexdigest()
        return found

    def _left(self) -> float:
        """Seconds that this look may still wait."""
        return PATIENCE if self._waits_until is None else max(0.0, self._waits_until - self._clock())


class Readers:
    """A Reader for each place of an artifact: what examiners have in common."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._readers = {place.instance.contract_id: Reader() for place in places}
        self.way = Way()

    def reader(self, place: Place) -> Reader:
        """The one that remembers this place's files."""
        return self._readers[place.instance.contract_id]

    def again(self, place: Place) -> float | None:
        """See Examiner."""
        return self.reader(place).again()

    def progress(self) -> object:
        """See Examiner."""
        return sum(reader.done for reader in self._readers.values()), progress()

    def close(self) -> None:
        """End what is still at work, in whatever thread."""
        for reader in self._readers.values():
            reader.close()


def wrong_first(readings: Iterable[Reading]) -> list[str]:
    """The problems of all files: first of those that are wrong, then of those that may still change."""
    ordered = sorted(readings, key=lambda reading: reading.answer != "invalid")
    return [problem for reading in ordered for problem in reading.problems]


def signature(status: os.stat_result) -> Signature:
    """What a file is, by its status."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def opened(match: Match) -> Iterator[tuple[io.FileIO, os.stat_result]]:
    """A plain file of its own, and its status. Raises Refused for anything else, OSError."""
    _refuse(match.status)
    descriptor = os.open(match.name, _FILE, dir_fd=match.directory)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = fresh_status(descriptor)
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
