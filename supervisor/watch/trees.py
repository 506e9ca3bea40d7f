"""Directory trees on one inotify instance: which watches they need now, and which of them an event is about.

A tree is `(root, directory, depth)`: a directory and so many levels below it. inotify knows no trees: a watch is on one
directory, whatever its path becomes, and a path that leads somewhere else today is nobody's event. So the watches of a
tree are *settled*: made to fit what is there now, again whenever an event says that directories came, went or moved,
and now and then without any (a directory above may have been replaced, which no watch tells). Where the directory is
missing, the nearest one above it is watched for the next name on the way down.

Who names what is missing makes a network file system's client remember for a while that it is missing, at the cost of
everybody on this machine. So a *careful* owner looks for names in listings only (see names), from the nearest directory
that was there when the tree was settled last.

    settle(tree)   blocks like the file system; in any thread, one call for a tree at a time
    read()         never blocks: what changed, and what wants to be settled

Events that come between the making of a watch and its entry in the table are dropped. Hence the rule: after a `settle`
that says True (a new watch) look at the tree, whatever the events say.

Agents use this module too: Python 3.9, no typing.
"""

from __future__ import annotations

import errno
import os
from _thread import allocate_lock

from supervisor.watch.inotify import (
    APPEARED,
    IN_CREATE,
    IN_DELETE,
    IN_DELETE_SELF,
    IN_DONT_FOLLOW,
    IN_IGNORED,
    IN_ISDIR,
    IN_MOVE_SELF,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    IN_UNMOUNT,
    Inotify,
)
from supervisor.watch.names import shows

TYPE_CHECKING = False  # not from typing: in an agent that import alone costs as much as all of ours
if TYPE_CHECKING:
    from collections.abc import Iterator

    Tree = tuple[str, str, int]

LIMIT = 1000  # watches of one tree
GONE = IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED
MASK = APPEARED | IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF
"""One mask for all: a directory has one watch in an instance, however many trees need it."""

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Trees:
    """The trees that were settled, on one inotify instance."""

    def __init__(self, careful: bool = False) -> None:
        """Raises OSError when there is no inotify instance to be had."""
        self._inotify = Inotify()
        self._careful = careful
        self._lock = allocate_lock()  # over the tables, never over what may block
        self._owners: dict[int, set[Tree]] = {}
        self._watches: dict[Tree, frozenset[int]] = {}
        self._reached: dict[Tree, str] = {}  # how far its way was there
        self._awaited: dict[Tree, str] = {}  # the name that a missing directory's tree waits for

    def fileno(self) -> int:
        """The descriptor that is readable while there is something to `read`."""
        return self._inotify.fileno()

    def settle(self, tree: Tree) -> bool:
        """Make the watches fit what is there. True if one is new. Raises OSError (ENOSPC: the user has no watch left;
        E2BIG: the tree is larger than LIMIT); the watches that could be made are kept."""
        _, directory, depth = tree
        watches: set[int] = set()
        awaited = ""
        try:
            awaited = self._top(self._nearest(tree) if self._careful else directory, directory, watches)
            if depth and not awaited:
                self._below(directory, depth, watches)
        finally:
            fresh = self._keep(tree, frozenset(watches), awaited)
        return fresh

    def drop(self, tree: Tree) -> None:
        """Watch the tree no more."""
        self._keep(tree, frozenset(), "")

    def read(self) -> tuple[set[Tree], set[Tree]]:
        """The trees that changed, and those that want to be settled. After an overflow that is all of both:
        see `lost`."""
        changed: set[Tree] = set()
        unsettled: set[Tree] = set()
        for watch, mask, name in self._inotify.events():
            for tree in tuple(self._owners.get(watch, ())):
                awaited = self._awaited.get(tree)
                if awaited and name != awaited and not mask & GONE:
                    continue  # its neighbours' business
                changed.add(tree)
                if awaited or mask & GONE or (tree[2] and mask & IN_ISDIR and mask & _NAMES):
                    unsettled.add(tree)
            if mask & IN_IGNORED:
                self._forget(watch)
        if self._inotify.overflowed:
            with self._lock:
                everything = set(self._watches)
            return everything, everything
        return changed, unsettled

    def lost(self) -> bool:
        """Whether events were lost since this was asked last."""
        lost, self._inotify.overflowed = self._inotify.overflowed, False
        return lost

    def close(self) -> None:
        """Give the instance back."""
        self._inotify.close()

    # how a tree's watches are found

    def _nearest(self, tree: Tree) -> str:
        """The directory, or the nearest one above it that is there. Nothing is watched on the way."""
        directory, path = tree[1], self._reached.get(tree, "/")
        path = path if os.path.isdir(path) else "/"
        while path != directory:
            name = os.path.relpath(directory, path).split("/")[0]
            below = os.path.join(path, name)
            if not (shows(path, name) and os.path.isdir(below)):
                break
            path = below
        self._reached[tree] = path
        return path

    def _top(self, start: str, directory: str, watches: set[int]) -> str:
        """Watch the directory and return "", or the nearest one above it and return the name that is missing there."""
        path = start
        while not self._add(path, MASK, watches):
            if path == os.path.dirname(path):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            path = os.path.dirname(path)
        while path != directory:  # down again: a name may have come before the watch did
            name = os.path.relpath(directory, path).split("/")[0]
            above, path = path, os.path.join(path, name)
            below: set[int] = set()
            if not (self._shows(above, name) and self._add(path, MASK, below)):
                return name
            watches.clear()
            watches |= below
        return ""

    def _shows(self, directory: str, name: str) -> bool:
        if self._careful:
            return shows(directory, name)
        return os.path.isdir(os.path.join(directory, name))

    def _below(self, directory: str, depth: int, watches: set[int]) -> None:
        for path in _directories(directory):
            if self._add(path, MASK | IN_DONT_FOLLOW, watches) and depth > 1:
                self._below(path, depth - 1, watches)

    def _add(self, path: str, mask: int, watches: set[int]) -> bool:
        """One more watch; False when there is no such directory."""
        if len(watches) >= LIMIT:
            raise OSError(errno.E2BIG, f"it has more than {LIMIT} directories to watch", path)
        try:
            watches.add(self._inotify.add(path, mask))
        except OSError as error:
            if error.errno in _NOT_THERE:
                return False
            raise
        return True

    # the tables

    def _keep(self, tree: Tree, watches: frozenset[int], awaited: str) -> bool:
        """Enter the watches of a tree and give back those that nobody needs any more. True if one is new."""
        with self._lock:
            before = self._watches.pop(tree, frozenset())
            self._awaited.pop(tree, None)
            if watches:
                self._watches[tree] = watches
            if awaited:
                self._awaited[tree] = awaited
            for watch in watches:
                self._owners.setdefault(watch, set()).add(tree)
            for watch in before - watches:
                owners = self._owners.get(watch)
                if owners is not None:
                    owners.discard(tree)
                    if not owners:
                        del self._owners[watch]
                        self._remove(watch)
        return not watches <= before

    def _remove(self, watch: int) -> None:
        try:  # noqa: SIM105 - an agent does without contextlib
            self._inotify.remove(watch)
        except OSError:
            pass  # it went with its directory

    def _forget(self, watch: int) -> None:
        with self._lock:
            for tree in self._owners.pop(watch, ()):
                self._watches[tree] = self._watches.get(tree, frozenset()) - {watch}


_NAMES = IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE


def _directories(path: str) -> Iterator[str]:
    """The directories in a directory; none when it is gone or may not be read."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield entry.path
    except OSError:
        pass
