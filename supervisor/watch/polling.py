"""Looking at directories without events, as a network file system's client needs it.

Such a client remembers: attributes for seconds, and that a name is missing for up to a minute, even for open(). Opening
a directory makes it ask its server again. So a look opens the directory and lists it, and names nothing that the
listing above has not shown. What it saw is kept as one number, to be compared with the next: device, inode and
change time of the directory and of those below it to the depth that is wanted, and the names in them. What files hold
is not its business.

A `Pace` says when the next look is due: soon after something happened, ever more rarely while nothing does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from supervisor.watch.names import shows

FIRST: Final = 0.05  # seconds to the first look
GROWTH: Final = 1.5
LAST: Final = 5.0  # seconds between looks when nothing has happened for long; slower never
AFTER_HINT: Final = (0.005, 0.02, 0.08, 0.32, 1.0)
"""Seconds between looks after a hint: a file may be visible later than the word of it."""
TOP: Final = "/"
DIRECTORIES: Final = 1000  # directories below one that a look goes into

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class Target(NamedTuple):
    """A directory that is waited on, with what is below it to `depth` levels. Below `root`, above it or the same, no
    link is followed."""

    root: str
    directory: str
    depth: int = 0


class Sight(NamedTuple):
    """What a look saw. Two sights that are equal saw the same; `partial` ones may hide a difference."""

    there: bool  # the directory itself, not only one above it
    print: int
    partial: bool = False  # more directories than a look goes into


class Pace:
    """Seconds from one look to the next."""

    def __init__(self) -> None:
        self._hinted: tuple[float, ...] = ()
        self._pause = FIRST
        self.urgent = False  # the look that is due is a hint's: what that was about may become visible with it

    def next(self) -> float:
        """The pause before the next look."""
        self.urgent = bool(self._hinted)
        if self._hinted:
            pause, *rest = self._hinted
            self._hinted = tuple(rest)
            return pause
        pause, self._pause = self._pause, min(self._pause * GROWTH, LAST)
        return pause

    def quicken(self) -> None:
        """Something has changed: more may follow."""
        self._pause = FIRST

    def hint(self) -> None:
        """Somebody says that something has changed, which may not be visible yet."""
        self._hinted, self._pause = AFTER_HINT, FIRST


class Found(NamedTuple):
    """An open directory: the one that is wanted (`there`), or the nearest one above it."""

    descriptor: int
    path: str
    there: bool


@contextmanager
def opened(target: Target, known: str, coherent: Callable[[int], bool]) -> Iterator[Found]:
    """Open the directory, or the nearest one above it. `known` is where it was found last (or TOP): that is named
    without having been listed, and so is what is below a descriptor that is `coherent`: on a file system that never
    takes for missing what is there. Raises OSError for one that may not be opened. Blocks like its file system."""
    path = known
    try:
        descriptor = os.open(path, _DIRECTORY)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        path = TOP
        descriptor = os.open(path, _DIRECTORY)
    try:
        for part in os.path.relpath(target.directory, path).split("/"):
            if part == "." or not (coherent(descriptor) or shows(descriptor, part)):
                break
            below_root = f"{path}/".startswith(f"{target.root}/")
            try:
                below = os.open(part, _DIRECTORY | (os.O_NOFOLLOW if below_root else 0), dir_fd=descriptor)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise
                break
            os.close(descriptor)
            descriptor, path = below, os.path.join(path, part)
        yield Found(descriptor, path, path == target.directory)
    finally:
        os.close(descriptor)


def look(found: Found, depth: int, names: bool) -> Sight:
    """What is to be seen in an open directory. Without `names` its own change time must do, unless directories below it
    are wanted too. Raises OSError."""
    if not found.there:
        status = os.fstat(found.descriptor)
        return Sight(False, hash((status.st_dev, status.st_ino, found.path)))
    prints: list[int] = []
    _add(found.descriptor, depth, names, prints)
    return Sight(True, hash(tuple(prints)), len(prints) > DIRECTORIES)


def _add(descriptor: int, depth: int, names: bool, prints: list[int]) -> None:
    """Append the print of a directory, and of those below it."""
    status = os.fstat(descriptor)
    itself = (status.st_dev, status.st_ino, status.st_mtime_ns)
    if not names and not depth:
        prints.append(hash(itself))
        return
    with os.scandir(descriptor) as entries:
        listed = sorted((entry.name, bool(depth) and entry.is_dir(follow_symlinks=False)) for entry in entries)
    prints.append(hash((itself, tuple(listed))))
    for name, is_directory in listed:
        if not is_directory or len(prints) > DIRECTORIES:
            continue
        try:
            below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        except OSError as error:
            if error.errno not in (*_NOT_THERE, errno.EACCES):
                raise
            continue
        try:
            _add(below, depth - 1, names, prints)
        finally:
            os.close(below)
