"""Logs that are read while they grow, on whatever file system, and whatever becomes of the files meanwhile.

A look lists the directory (a network client that is asked for a listing asks its server; one that is asked for a name
may remember that it was missing), then opens each log and reads what has come. Nothing is held open in between: the
next look opens anew, and sees what the server has by then.

How far a log was read is known by a position and by a *mark*, the last bytes before it. A file in which other bytes
stand there, or which is shorter, is not the file that was read: it has been truncated, replaced or rotated. Inode
numbers are not asked: some file systems change them, others give the same one again. Where a neighbour's name says that
it is what became of the log (`rank-0.client.out.1`) and the mark is in it, reading goes on there, so that a rotation
loses no line; the log itself begins again. A file that was replaced by one with the very same beginning is taken for
the one that was there.

Zeros at the end of a file are not read yet: a file system may show the length before it shows the content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

MARK: Final = 512  # bytes
LONG: Final = 1024 * 1024  # bytes: a line that is longer is told in pieces
LOOK: Final = 4 * 1024 * 1024  # bytes that one look reads, shared by all logs
LEAST: Final = 16 * 1024  # bytes of each log
KINDS: Final = ("out", "err", "srun")

NEVER: Final = (-1, -1)

_LISTED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Lines = tuple[str, list[bytes]]
"""The name of a log, and lines of it without their newlines."""


def parts(name: str) -> tuple[int, str] | None:
    """The rank and the kind in a log's name; None when it is no log's."""
    rank, dot, kind = name.removeprefix("rank-").partition(".")
    kind = kind.rpartition(".")[2]
    known = name.startswith("rank-") and rank.isdecimal() and dot and kind in KINDS
    return (int(rank), kind) if known else None


@dataclass(frozen=True)
class _File:
    """An open file, with its size and the time of its last change (ns)."""

    descriptor: int
    status: tuple[int, int]


@dataclass
class _Log:
    """One log: the name that its lines are told under, how far it was read, and the beginning of a line that has not
    ended yet. `seen` is the status that the file had when it was read to its end. `newest`: what was there before the
    last so many bytes is not read."""

    name: str
    newest: int | None = None
    position: int = 0
    mark: bytes = b""
    rest: bytes = b""
    seen: tuple[int, int] = NEVER

    def is_in(self, file: _File) -> bool:
        """Whether a file is the one that was read so far."""
        if file.status[0] < self.position:
            return False
        return os.pread(file.descriptor, len(self.mark), self.position - len(self.mark)) == self.mark

    def read(self, file: _File, share: int, last: bool) -> tuple[bytes, bool]:
        """What has come, at most `share` bytes, and whether that is all."""
        if self.newest is not None:
            self._skip(file, file.status[0] - self.newest)
            self.newest = None
        data = os.pread(file.descriptor, share, self.position)
        if len(data) < share and not last:
            data = data.rstrip(b"\0")
        self.position += len(data)
        self.mark = (self.mark + data)[-MARK:]
        return data, len(data) < share

    def _skip(self, file: _File, start: int) -> None:
        """Go to the first line that begins at `start` or after it, which is looked for as far as a line is long."""
        if start <= 0:
            return
        newline = os.pread(file.descriptor, LONG, start - 1).find(b"\n")
        self.position = start + max(0, newline)
        size = min(MARK, self.position)
        self.mark = os.pread(file.descriptor, size, self.position - size)

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that end in the data; of one that is too long, what there is."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONG:
            lines, self.rest = [*lines, self.rest], b""
        return lines

    def last_line(self) -> list[bytes]:
        """A last line that has no newline, if there is one."""
        rest, self.rest = self.rest, b""
        return [rest] if rest else []


class Logs:
    """The logs of one run, as far as they are `wanted` (by rank and kind). One thread at a time. `newest`: of logs that
    are there at the first look, read only the lines in their last so many bytes."""

    def __init__(self, run_dir: str, wanted: Callable[[int, str], bool], *, newest: int | None = None) -> None:
        self.directory = os.path.join(run_dir, "logs")
        self.more = False  # the last look left something for the next one
        self._wanted = wanted
        self._newest = newest
        self._logs: dict[str, _Log] = {}  # by the file's name now

    def look(self, last: bool = False) -> list[Lines]:
        """The complete lines that have come since the last look; with `last`, nothing is waited for any more. Raises
        OSError."""
        try:
            directory = os.open(self.directory, _LISTED)
        except FileNotFoundError:
            return []
        try:
            return self._look(directory, last)
        finally:
            os.close(directory)

    def last_lines(self) -> list[Lines]:
        """Last lines that have no newline."""
        return [(log.name, lines) for _, log in self._in_order() if (lines := log.last_line())]

    def names(self) -> list[str]:
        """The logs that were wanted so far, by rank."""
        return [name for name, _ in self._in_order()]

    def _in_order(self) -> list[tuple[str, _Log]]:
        """By rank; of one log, what was rotated away first: each has moved on before the next takes its name."""
        return sorted(self._logs.items(), key=lambda item: (parts(item[1].name) or (-1, ""), -len(item[0]), item[0]))

    def _look(self, directory: int, last: bool) -> list[Lines]:
        names = set(os.listdir(directory))
        for name in names - self._logs.keys():
            if (found := parts(name)) and self._wanted(*found):
                self._logs[name] = _Log(name, self._newest)
        self._newest = None
        self.more = False
        share = max(LEAST, LOOK // max(1, len(self._logs)))
        return [
            (log.name, lines)
            for name, log in self._in_order()
            for lines in self._new(directory, names, name, log, share, last)
            if lines
        ]

    def _new(
        self, directory: int, names: set[str], name: str, log: _Log, share: int, last: bool
    ) -> Iterator[list[bytes]]:
        with _opened(directory, name if name in names else None) as file:
            if file is not None and file.status == log.seen and not last:
                return
            if file is not None and log.is_in(file):
                yield self._read(file, log, share, last)
                return
            if moved := self._moved(directory, names, log):
                self._logs[moved] = self._logs.pop(name)
                with _opened(directory, moved) as former:
                    if former is not None:
                        yield self._read(former, log, share, last)
            elif file is not None:
                del self._logs[name]
                yield log.last_line()
            if file is not None and name == log.name:
                self._logs[name] = log = _Log(name)
                yield self._read(file, log, share, last)

    def _read(self, file: _File, log: _Log, share: int, last: bool) -> list[bytes]:
        data, all_of_it = log.read(file, share, last)
        log.seen = file.status if all_of_it else NEVER
        self.more |= not all_of_it
        return log.lines(data)

    def _moved(self, directory: int, names: set[str], log: _Log) -> str | None:
        """The name that a log has now which was rotated away."""
        if not log.position:
            return None
        for name in sorted(names - self._logs.keys()):
            if name.startswith(f"{log.name}."):
                with _opened(directory, name) as file:
                    if file is not None and log.is_in(file):
                        return name
        return None


@contextmanager
def _opened(directory: int, name: str | None) -> Iterator[_File | None]:
    """A regular file in the directory, open for reading; None when there is none. Links are not followed."""
    try:
        descriptor = -1 if name is None else os.open(name, _READ, dir_fd=directory)
    except OSError:
        descriptor = -1
    if descriptor < 0:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        yield _File(descriptor, (status.st_size, status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None
    finally:
        os.close(descriptor)
