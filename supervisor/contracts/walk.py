"""What lies below a root, by listing.

The files come from a job, and so do their names: both are data, and hostile until looked at.

* Directories are *listed*, one component after the other, each opened relative to its parent's descriptor. A
  name that was looked for and missing stays missing on a network file system for up to a minute; a listing of a
  freshly opened directory does not. And what is reached this way cannot leave the root, whatever is renamed or
  replaced in between. A root that is not there (yet) is looked for in the same way, from the nearest directory that is.
* Symbolic links are refused wherever the job could have made them: in the components before the last one (the last
  one is whoever opens it's business), and in the part of the root that lies inside the run directory. (A root
  elsewhere is the plan's word; the links on the way to it are the site's.)

An error that is nobody's but ours (no descriptors, no memory, a value that is missing) is raised.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from supervisor.core.substitution import literal, show, substitute
from supervisor.watch.names import shows

NAMES_CAP: Final = 200_000
"""Directory entries that one look may list; a pattern that needs more is a problem of the plan."""
DEPTH_CAP: Final = 64
"""Directories below the root that `**` goes down."""
OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EINVAL})
"""Errors that say nothing about the place that was looked at."""
NO_DIRECTORY: Final = frozenset({errno.ENOTDIR, errno.ELOOP})
"""Errors that say what stands in a directory's place: a file, or a link that is not followed."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

TOP: Final = Path("/")

Pattern = tuple[str, ...]
"""A path below a root, one component each: names, and patterns of names."""


class Match(NamedTuple):
    """A directory entry that matches the pattern; `directory` is open as long as the walk stands at it."""

    path: str  # relative to the root
    directory: int  # descriptor
    name: str
    status: os.stat_result  # of the entry itself, links not followed


@dataclass(slots=True)
class Way:
    """How far the way to a root outside of the run directory was there when one was gone last: the next one is named as
    far as it is the same, and no directory is listed again for each of many roots below it."""

    reached: Path = TOP

    def start(self, root: Path) -> Path:
        """Where to begin: a directory above the root that was there."""
        return next(path for path in (self.reached, *self.reached.parents) if root.is_relative_to(path))


@dataclass(slots=True)
class Walk:
    """One look: what stood in its way, and how many names it has listed."""

    problems: list[str] = field(default_factory=list)
    names: int = 0
    top: str = ""  # what messages call the root; its path unless told
    only: frozenset[str] | None = None  # names that alone count in the last component, where the pattern is `*`
    way: Way = field(default_factory=Way)
    blind: bool = False  # some place could not be looked at: what was not found there may be there

    def below(self, root: Path, run_dir: str, pattern: Pattern) -> Iterator[Match]:
        """The entries below `root` that match, each once, without directories that only happen to fit a wildcard. A
        root that is not there (yet) has none."""
        try:
            with _opened(root, Path(run_dir), self.way) as directory:
                yield from self._outputs(directory, pattern)
        except OSError as error:
            self.trouble(self.top or str(root), error)

    def trouble(self, where: str, error: OSError) -> None:
        """A place that cannot be looked at: pending, unless the trouble is ours."""
        if error.errno in OURS:
            raise error
        if error.errno != errno.ENOENT:  # gone since it was listed
            self.problems.append(f"{where or '.'}: {error.strerror}")
            self.blind = self.blind or error.errno not in NO_DIRECTORY

    def _listing(self, directory: int, where: str) -> list[str]:
        try:
            names = os.listdir(directory)
        except OSError as error:
            self.trouble(where, error)
            return []
        self.names += len(names)
        if self.names > NAMES_CAP:
            self.problems.append(f"{where or '.'}: found too many names; expected at most {NAMES_CAP} in one look")
            self.blind = True
            return []
        return sorted(names)

    def _outputs(self, directory: int, pattern: Pattern) -> Iterator[Match]:
        seen: set[str] = set()
        for match in self._matches(directory, pattern):
            chance = self.only is None and _is_pattern(pattern[-1]) and stat.S_ISDIR(match.status.st_mode)
            if not chance and match.path not in seen:
                seen.add(match.path)
                yield match

    def _matches(self, directory: int, parts: Pattern, where: str = "", depth: int = 0) -> Iterator[Match]:
        """The entries below `directory` that match `parts`."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self._matches(directory, rest, where, depth)
        wanted = re.compile(fnmatch.translate("*" if part == "**" else part))
        for name in self._listing(directory, where):
            if self.only is not None and not rest:
                if name not in self.only:
                    continue
            elif not wanted.match(name) or (name[0] == "." and part[0] != "."):
                continue
            path = f"{where}/{name}" if where else name
            if not name.isprintable():
                self.problems.append(f"{path!a}: found control characters; expected a plain file name")
                continue
            try:
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                self.trouble(path, error)
                continue
            if not rest:
                yield Match(path, directory, name, status)
            else:
                yield from self._inside(Match(path, directory, name, status), part, parts, depth)

    def _inside(self, entry: Match, part: str, parts: Pattern, depth: int) -> Iterator[Match]:
        """The matches below an entry that stands where the pattern wants a directory."""
        if stat.S_ISLNK(entry.status.st_mode):
            self.problems.append(f"{entry.path}: found a symbolic link; expected a directory")
        elif not stat.S_ISDIR(entry.status.st_mode):
            if not _is_pattern(part):
                self.problems.append(f"{entry.path}: found {kind_of(entry.status)}; expected a directory")
        elif depth >= DEPTH_CAP:
            self.problems.append(f"{entry.path}: found more directories; expected at most {DEPTH_CAP} levels")
        else:
            try:
                inside = os.open(entry.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=entry.directory)
            except OSError as error:
                self.trouble(entry.path, error)
                return
            try:
                yield from self._matches(inside, parts if part == "**" else parts[1:], entry.path, depth + 1)
            finally:
                os.close(inside)


def kind_of(status: os.stat_result) -> str:
    """What an entry is, in words."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "a file")


def _is_pattern(part: str) -> bool:
    return re.search(r"[*?\[]", part) is not None


def pattern_of(path: str, values: Mapping[str, str]) -> Pattern:
    """The pattern that `path` is with the values put in. A value is literal: what it holds is no pattern.

    Raises ValueError for a value that would make another component of it.
    """
    known = {word: literal(value) for word, value in values.items()}
    parts = tuple(substitute(part, known) for part in path.split("/"))
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\0" in part:
            raise ValueError(f"{show(path)} becomes {show('/'.join(parts))}, which is no path below a root")
    return (*parts, "*") if parts[-1] == "**" else parts


def plain(pattern: Pattern) -> str:
    """The pattern as a message shows it."""
    return re.sub(r"\[([*?\[])\]", r"\1", "/".join(pattern))


def literal_part(pattern: Pattern) -> tuple[str, ...]:
    """The directories that the pattern names before its first wildcard."""
    found = []
    for part in pattern[:-1]:
        name = plain((part,))
        if _is_pattern(re.sub(r"\[[*?\[]\]", "", part)):
            break
        found.append(name)
    return tuple(found)


@contextmanager
def _opened(root: Path, run_dir: Path, way: Way) -> Iterator[int]:
    """A descriptor of the root, found in listings from where it was found last. Inside the run directory each component
    is opened on its own, no link followed."""
    inside = root.is_relative_to(run_dir)
    place, links = (run_dir, os.O_NOFOLLOW) if inside else (way.start(root), 0)
    try:
        directory = os.open(place, _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        if inside:
            raise
        place = TOP
        directory = os.open(place, _DIRECTORY)
    try:
        for part in root.relative_to(place).parts:
            if not shows(directory, part):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            below = os.open(part, _DIRECTORY | links, dir_fd=directory)
            os.close(directory)
            directory = below
            place /= part
        yield directory
    finally:
        if not inside:
            way.reached = place
        os.close(directory)
