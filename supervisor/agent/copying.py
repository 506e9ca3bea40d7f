"""The one way in which files are found and copied: by the program on a node, by the engine at a run's end, and by
whoever keeps copies of a run elsewhere.

What lies in these directories may have been put there by a job. So:

* Only regular files are copied. Every name is opened relative to its directory's descriptor and never through a
  symbolic link, in the source below the directory that the caller trusts, and in the target below its root. A FIFO is
  not waited for, a device not opened.
* A copy is complete or not there: it is written under another name and renamed, and an older one is replaced. Where
  source and target are one file already, there is nothing to copy, only to read.
* The checksum is made of the very bytes that were written. A file is copied as long as it was when it was opened; one
  that changes meanwhile is copied all the same, and said to have changed.
* A file with holes is copied with holes: it takes no more room than it did.
* All copies of one collection share `Limits`: bytes, and time. Past them every further file is refused.

Trouble with one file is a sentence and hinders no other.

Patterns are those of the shell: `*`, `?`, `[...]`, and `**` for any number of directories. Wildcards match no hidden
name unless the pattern's part begins with a dot.

Standard library only, for Python 3.9 and later.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import stat
import time
from contextlib import contextmanager

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of the agent's own
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

BLOCK = 1 << 20  # bytes
ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
DIRECTORY = ROOT | os.O_NOFOLLOW
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

LINK = "a symbolic link, not followed"
SPECIAL = "not a regular file"

TEMPORARY = re.compile(r"\.[0-9]+\.[0-9a-f]{8}\.tmp")
"""What a file is called before it is whole; one that was cut off by a KILL is left, and no wildcard finds it."""

LITERAL = re.compile(r"(?:[^*?\[]|\[[*?\[]\])*")
ESCAPED = re.compile(r"\[([*?\[])\]")


class Limits:
    """What all copies of one collection may take together: bytes, and seconds from now."""

    def __init__(self, size: int, seconds: float) -> None:
        self.left = size
        self.end = time.monotonic() + seconds

    def check(self, size: int = 0) -> None:
        """Raises OSError when the time is over, or `size` more bytes are too many."""
        if time.monotonic() > self.end:
            raise OSError(errno.ETIME, "the time for collecting was over")
        if size > self.left:
            raise OSError(errno.EFBIG, f"{size} bytes, but only {self.left} more may be copied")


class Copy:
    """A finished copy: bytes, checksum, and what is to be said of it besides."""

    __slots__ = ("remark", "sha256", "size")

    def __init__(self, size: int, sha256: str, remark: str = "") -> None:
        self.size, self.sha256, self.remark = size, sha256, remark


@contextmanager
def opened(path: str, flags: int, directory: int | None = None, mode: int = 0o666) -> Iterator[int]:
    """A descriptor, closed at the end. Raises OSError."""
    descriptor = os.open(path, flags, mode, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_file(name: str, directory: int | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file to read, and what it was like when it was opened. Raises OSError, with a sentence of ours where
    that says more than the system's."""
    try:
        descriptor = os.open(name, FILE, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, SPECIAL)
        os.pread(descriptor, 1, 0)  # then a network file system's client knows how long it is by now
        yield descriptor, os.fstat(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def made(root: str, names: list[str]) -> Iterator[int]:
    """The directory `root/names...`, made where it is missing; below `root` no link is followed. Raises OSError."""
    os.makedirs(root, exist_ok=True)
    descriptor = os.open(root, ROOT)
    try:
        for name in names:
            try:
                os.mkdir(name, dir_fd=descriptor)
            except FileExistsError:
                pass
            below = os.open(name, DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def written(directory: int, name: str, mode: int) -> Iterator[int]:
    """A file to write, which has its name and its permissions at the end, in the place of whatever had that name; when
    anything fails it is not there. Raises OSError."""
    temporary = f".{os.getpid()}.{os.urandom(4).hex()}.tmp"  # not made of NAME, which may be the longest
    try:
        with opened(temporary, NEW, directory, 0o600) as descriptor:
            yield descriptor
            os.fchmod(descriptor, mode)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:  # whatever it is, nothing half-written stays
        try:
            os.unlink(temporary, dir_fd=directory)
        except OSError:
            pass
        raise


def checksum(name: str, limits: Limits, directory: int | None = None) -> Copy:
    """Read a file where it is. Raises OSError."""
    with opened_file(name, directory) as (source, status):
        return _pour(source, status, limits, None)


def copy(directory: int, name: str, target: int, limits: Limits) -> Copy:
    """Copy a file into the directory `target`, under its name. Raises OSError; nothing is left of a failed copy."""
    with opened_file(name, directory) as (source, status):
        if _same(status, target, name):
            return _pour(source, status, limits, None)
        limits.check(status.st_size)
        with written(target, name, stat.S_IMODE(status.st_mode) & 0o777) as sink:
            done = _pour(source, status, limits, sink)
        limits.left -= done.size
        return done


def _same(status: os.stat_result, target: int, name: str) -> bool:
    try:
        there = os.stat(name, dir_fd=target, follow_symlinks=False)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino)


def _pour(source: int, status: os.stat_result, limits: Limits, sink: int | None) -> Copy:
    """The file's bytes, as many as it had when it was opened, into the checksum and the sink."""
    digest, left = hashlib.sha256(), status.st_size
    holes = status.st_blocks * 512 < status.st_size
    while left:
        limits.check()
        block = os.read(source, min(BLOCK, left))
        if not block:
            raise OSError(errno.EIO, "it became shorter while it was read")
        left -= len(block)
        digest.update(block)
        if sink is not None and holes and not block.strip(b"\0"):
            os.lseek(sink, len(block), os.SEEK_CUR)
            continue
        while sink is not None and block:
            block = block[os.write(sink, block) :]
    if sink is not None and holes:
        os.ftruncate(sink, status.st_size)
    now = os.fstat(source)
    changed = (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns)
    remark = f"it changed while it was read: these are its first {status.st_size} bytes" if changed else ""
    return Copy(status.st_size, digest.hexdigest(), remark)


# --- finding -----------------------------------------------------------------------------------------------------


class Match:
    """What a pattern matched: the file's name in an open directory, which is closed when the next match is asked for;
    or, with a problem, what stood in the way."""

    __slots__ = ("directory", "name", "path", "problem")

    def __init__(self, directory: int, name: str, path: str, problem: str = "") -> None:
        self.directory, self.name, self.path, self.problem = directory, name, path, problem


def split(pattern: str) -> tuple[str, list[str]]:
    """The directory that an absolute pattern names literally, and the parts behind it; at least one."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    count = 0
    while count < len(parts) - 1 and LITERAL.fullmatch(parts[count]):
        count += 1
    return "/" + "/".join(map(unescape, parts[:count])), parts[count:]


def escape(text: str) -> str:
    """A pattern that matches this text alone."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def unescape(part: str) -> str:
    """The text that a literal pattern matches."""
    return ESCAPED.sub(r"\1", part)


def search(root: str, parts: list[str], hidden: bool = False) -> Iterator[Match]:
    """Every file below `root` that the parts of a pattern match, in the order of names; directories are entered and
    are no matches. `hidden`: `**` enters and finds hidden names too."""
    try:
        top = os.open(root, ROOT)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield Match(-1, "", root, str(error.strerror))
        return
    try:
        yield from _below(top, root, parts, hidden)
    finally:
        os.close(top)


def _below(directory: int, shown: str, parts: list[str], hidden: bool) -> Iterator[Match]:
    part, rest = parts[0], parts[1:]
    deeper = parts if part == "**" else rest
    if part == "**" and rest:  # it may stand for no directory at all
        yield from _below(directory, shown, rest, hidden)
    try:
        names = _names(directory, part, hidden)
    except OSError as error:
        yield Match(-1, "", shown, str(error.strerror))
        return
    for name in names:
        path = os.path.join(shown, name)
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
            inner = os.open(name, DIRECTORY, dir_fd=directory) if stat.S_ISDIR(mode) and deeper else -1
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Match(-1, name, path, str(error.strerror))
            continue
        if inner >= 0:
            try:
                yield from _below(inner, path, deeper, hidden)
            finally:
                os.close(inner)
        elif stat.S_ISLNK(mode):
            if not rest or _leads_to_a_directory(directory, name):
                yield Match(-1, name, path, LINK)
        elif not rest and not stat.S_ISDIR(mode):
            yield Match(directory, name, path, "" if stat.S_ISREG(mode) else SPECIAL)


def _names(directory: int, part: str, hidden: bool) -> list[str]:
    """By listing, for a network file system may take a name that is there for missing, having been asked too early."""
    literal = LITERAL.fullmatch(part) is not None
    try:
        listed = os.listdir(directory)
    except PermissionError:
        if literal:  # what may not be listed may still be entered
            return [unescape(part)]
        raise
    dots = literal or part.startswith(".") or (hidden and part == "**")
    matching = (name for name in listed if fnmatch.fnmatchcase(name, part) and (dots or not name.startswith(".")))
    return sorted(name for name in matching if literal or not TEMPORARY.fullmatch(name))


def _leads_to_a_directory(directory: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory).st_mode)
    except OSError:
        return False


# --- both --------------------------------------------------------------------------------------------------------


class Gatherer:
    """Copies what patterns match into one directory, each file once, and tells what came of it: `fact` gets path,
    source, size in bytes and sha256 of a copy, `trouble` a path and a sentence.

    The directory is `root/target`, and no link is followed below the root. A file below `base` keeps its path from
    there in the target, any other its whole path.
    """

    def __init__(
        self,
        root: str,
        target: str,
        base: str,
        limits: Limits,
        fact: Callable[[dict[str, Any]], None],
        trouble: Callable[[str, str], None],
    ) -> None:
        self.root, self.base, self.limits = root, base, limits
        self.way = [name for name in target.split("/") if name]
        self.target = os.path.join(root, *self.way)
        self.fact, self.trouble = fact, trouble
        self.seen: set[str] = set()
        self.taken: dict[str, str] = {}

    def gather(self, root: str, parts: list[str], hidden: bool = False) -> bool:
        """Copy what matches; whether anything did, links and what could not be read included."""
        found = False
        for match in search(root, parts, hidden):
            inside = f"{match.path}/".startswith(f"{self.target}/")
            found = found or not inside
            if inside or match.path in self.seen:  # what was collected is not collected again
                continue
            self.seen.add(match.path)
            if match.problem:
                self.trouble(match.path, match.problem)
            else:
                self.take(match)
        return found

    def take(self, match: Match) -> None:
        inside = match.path.startswith(self.base.rstrip("/") + "/")
        names = (os.path.relpath(match.path, self.base) if inside else match.path.lstrip("/")).split("/")
        path = os.path.join(self.target, *names)
        if path in self.taken:
            self.trouble(match.path, f"another file was collected as {path}")
            return
        try:
            with made(self.root, [*self.way, *names[:-1]]) as target:
                done = copy(match.directory, match.name, target, self.limits)
        except OSError as error:
            self.trouble(match.path, str(error.strerror or error))
            return
        self.taken[path] = match.path
        self.fact({"path": path, "source": match.path, "size": done.size, "sha256": done.sha256})
        if done.remark:
            self.trouble(match.path, done.remark)
