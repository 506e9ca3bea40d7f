"""Markers on a disk: publish once, replace what is void, read what is complete.

`supervisor.core.marker` tells the theory. This module keeps its promises on real file systems; it
blocks (callers with an event loop use a thread) and imports little, for the command line is quick.

- Nobody ever sees half a marker of ours: it is written under a temporary name in the same directory,
  made durable, and given its name by `link()`, which refuses to replace. Where links are refused
  (FUSE, some network and cloud file systems) it is a rename after a listing; between these two a
  second publisher could slip in, which costs the rule "the first one counts", never a torn file.
- A failure leaves nothing behind. On a full disk the temporary file is removed and the OSError is
  raised; an empty marker is never made.
- A network file system may carry a request out, lose the answer, and report the retry as an error.
  So "it exists already" is believed only if the temporary file has not gained a second name, and
  whatever happened, the file is read back before anyone is told that it was written.
- A reader lists the directory first: a name that was looked for and missing stays missing in a
  client's cache for up to a minute, while opening and listing the directory asks the server.
  Content is read once, bounded, and not believed if its length is not the file's.
- A name that a job controls is opened without following a symbolic link and without blocking on a
  pipe; anything that is not a regular file is garbage.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from supervisor.core.marker import (
    MAX_BYTES,
    NOTE_SUFFIX,
    Foreign,
    Garbage,
    Marker,
    NotYet,
    Patience,
    Reading,
    Waited,
    judge,
    render,
)
from supervisor.watch.inotify import IN_IGNORED, IN_Q_OVERFLOW, Inotify

StrPath: TypeAlias = str | os.PathLike[str]
Outcome: TypeAlias = Literal["written", "already"]

LINK_REFUSED: Final = frozenset(
    {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
)
"""What `link()` says where hard links are not to be had; a rename is tried instead."""

_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class Published:
    """What an attempt to publish came to. `found` is what the file says now, read back.

    `written`: the marker that was given is the file. `already`: another file had the name before;
    `found` may be a valid marker (the first one counts), or one that is void: NotYet (empty or
    half-written), Garbage or Foreign.
    """

    outcome: Outcome
    found: Reading


class Naming:
    """How a temporary file gets its final name. Tests inject file systems that refuse or misreport."""

    def link(self, source: str, target: str, directory: int) -> None:
        os.link(source, target, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def rename(self, source: str, target: str, directory: int) -> None:
        os.rename(source, target, src_dir_fd=directory, dst_dir_fd=directory)


NAMING: Final = Naming()


def publish(path: StrPath, marker: Marker, *, naming: Naming = NAMING) -> Published:
    """Write the marker unless the name is taken. Raises OSError (nothing is left), MarkerError."""
    data = render(marker)
    with _directory(path) as (directory, name), _temporary(directory, name, data) as temporary:
        won = _claim(naming, temporary, name, directory)
        found, content = _look(directory, name, marker.attempt)
        _sync_directory(directory)
    return Published("written" if won and content == data else "already", found)


def replace(path: StrPath, marker: Marker, *, naming: Naming = NAMING) -> Published:
    """Write the marker over one that is void: absent, empty, invalid or another attempt's.

    Only for a caller who knows that the coordinator's processes are gone, since an empty file may be
    one that a living process is about to fill. A valid marker of the same attempt stays (`already`).
    Raises OSError (what was there is still there), MarkerError.
    """
    data = render(marker)
    with _directory(path) as (directory, name):
        standing, _ = _look(directory, name, marker.attempt)
        if isinstance(standing, Marker):
            return Published("already", standing)
        with _temporary(directory, name, data) as temporary:
            _rename(naming, temporary, name, directory, data)
            found, content = _look(directory, name, marker.attempt)
            _sync_directory(directory)
    return Published("written" if content == data else "already", found)


def read(path: StrPath, attempt: str | None = None) -> Reading:
    """One look, for an asker of `attempt` (None: of any). Raises OSError when it cannot look at all."""
    try:
        with _directory(path) as (directory, name):
            return _look(directory, name, attempt)[0]
    except OSError as error:
        if error.errno in _GONE:
            return NotYet("its directory does not exist", present=False)
        raise


def note(path: StrPath, code: int, attempt: str | None = None, *, naming: Naming = NAMING) -> int:
    """Remember a failed part beside the marker at `path`; the first code that is not 0 stays.

    Returns the code that is remembered now (0: none). A note of another attempt is replaced.
    Raises OSError, MarkerError (a code outside 0..255).
    """
    marker = Marker(code=code, attempt=attempt)
    render(marker)  # a code that is out of range is an error even if another one was noted before
    if code == 0:
        return noted(path, attempt)
    beside = note_path(path)
    published = publish(beside, marker, naming=naming)
    if isinstance(published.found, Foreign):
        published = replace(beside, marker, naming=naming)
    return _noted_code(published.found)


def noted(path: StrPath, attempt: str | None = None) -> int:
    """The first failure noted beside the marker at `path`; 0 if there is none. Raises OSError.

    A note that cannot be understood is still a note: something failed, and it counts as 1.
    """
    return _noted_code(read(note_path(path), attempt))


def note_path(path: StrPath) -> Path:
    """Where the note of the marker at `path` lies."""
    path = Path(path)
    return path.with_name(path.name + NOTE_SUFFIX)


def wait(
    path: StrPath,
    attempt: str | None = None,
    *,
    pid: int | None = None,
    recheck: float = 5.0,
    timeout: float | None = None,
) -> Waited:
    """Block until the marker is there, or waiting for it has become pointless (`Patience` tells when).

    `pid` is the process whose end makes the marker unlikely; `recheck` and `timeout` are seconds. A
    look that fails counts as one that saw nothing: the deadline bounds how often that is believed.
    """
    patience = Patience(time.monotonic(), recheck=recheck, timeout=timeout)
    with _Wake(Path(path), pid) as wake:
        while True:
            alive = wake.prepare()
            try:
                reading = read(path, attempt)
            except OSError as error:
                reading = NotYet(f"it could not be looked at: {error.strerror or error}")
            now = time.monotonic()
            if ended := patience.decide(reading, alive, now):
                return ended
            wake.sleep(patience.next_look(now) - now)


class _Wake:
    """Sleeps until the next look is due, the marker's name was heard of, or the process ended."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self._path, self._pid = path, pid
        self._alive = True
        self._process: int | None = None  # a pidfd
        self._hints: Inotify | None = None
        self._watching = False

    def __enter__(self) -> _Wake:
        with suppress(OSError):  # none to be had: looking once a second does without
            self._hints = Inotify()
        if self._pid is not None:
            try:
                self._process = os.pidfd_open(self._pid)
            except ProcessLookupError:
                self._alive = False
            except OSError:  # an old kernel, or a container that forbids it: /proc tells instead
                self._process = None
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._hints is not None:
            self._hints.close()
        if self._process is not None:
            os.close(self._process)

    def prepare(self) -> bool:
        """Watch from now on, then tell whether the process lives: both before the look that follows."""
        if self._hints is not None and not self._watching:
            with suppress(OSError):  # the directory may come later; watches may be used up
                self._hints.add(self._path.parent)
                self._watching = True
        if self._pid is not None and self._alive:
            self._alive = self._lives(self._pid)
        return self._alive

    def sleep(self, seconds: float) -> None:
        """At most so long. Events of other names (logs) wake nobody."""
        end = time.monotonic() + seconds
        poll = select.poll()
        if self._watching and self._hints is not None:
            poll.register(self._hints.fileno(), select.POLLIN)
        if self._process is not None and self._alive:
            poll.register(self._process, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(math.ceil(left * 1000))}
            if self._process in ready or self._heard():
                return

    def _heard(self) -> bool:
        if self._hints is None:
            return False
        for mask, name in self._hints.read():
            if mask & IN_IGNORED:  # the directory is gone
                self._watching = False
            if name == self._path.name or mask & (IN_IGNORED | IN_Q_OVERFLOW):
                return True
        return False

    def _lives(self, pid: int) -> bool:
        if self._process is not None:
            poll = select.poll()
            poll.register(self._process, select.POLLIN)
            return not poll.poll(0)
        try:
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return status.rpartition(b") ")[2][:1] not in b"ZX"  # ended, and nobody has waited for it


def _noted_code(reading: Reading) -> int:
    match reading:
        case Marker(code=code):
            return code
        case Garbage():
            return 1
        case NotYet(present=present):
            return 1 if present else 0
        case Foreign():
            return 0


@contextmanager
def _directory(path: StrPath) -> Iterator[tuple[int, str]]:
    """The marker's directory, opened (which makes a network client ask its server), and its name in it."""
    path = Path(path)
    if path.name in ("", ".."):
        raise OSError(errno.EINVAL, "the marker needs a file name", os.fspath(path))
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor, path.name
    finally:
        os.close(descriptor)


@contextmanager
def _temporary(directory: int, name: str, data: bytes) -> Iterator[str]:
    """A durable file with `data` under a name of its own; gone afterwards, whatever happens."""
    temporary = f".{name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o644, dir_fd=directory)
    try:
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _claim(naming: Naming, temporary: str, name: str, directory: int) -> bool:
    """Give the temporary file its final name unless the name is taken. True if it has it now."""
    try:
        naming.link(temporary, name, directory)
        return True
    except FileExistsError:
        # A retried request finds its own work: then the file has both names.
        return os.stat(temporary, dir_fd=directory, follow_symlinks=False).st_nlink > 1
    except OSError as error:
        if error.errno not in LINK_REFUSED:
            raise
    if _listed(directory, name):
        return False
    with suppress(FileNotFoundError):  # a retried rename that worked; reading back tells
        naming.rename(temporary, name, directory)
    return True


def _rename(naming: Naming, temporary: str, name: str, directory: int, data: bytes) -> None:
    try:
        naming.rename(temporary, name, directory)
    except FileNotFoundError:
        if _look(directory, name, None)[1] != data:
            raise


def _listed(directory: int, name: str) -> bool:
    with os.scandir(directory) as entries:
        return any(entry.name == name for entry in entries)


def _look(directory: int, name: str, attempt: str | None) -> tuple[Reading, bytes | None]:
    """List, open, read once. Returns the reading and the bytes that it rests on, if any were read."""
    if not _listed(directory, name):
        return NotYet("absent", present=False), None
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in _GONE:
            return NotYet("it vanished while it was opened", present=False), None
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return Garbage("it is not a regular file"), None
        raise
    try:
        return _content(descriptor, attempt)
    finally:
        os.close(descriptor)


def _content(descriptor: int, attempt: str | None) -> tuple[Reading, bytes | None]:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return Garbage("it is not a regular file"), None
    data = b""
    while len(data) <= MAX_BYTES and (piece := os.read(descriptor, MAX_BYTES + 1 - len(data))):
        data += piece
    if len(data) <= MAX_BYTES and os.fstat(descriptor).st_size != len(data):
        return NotYet("its length changed while it was read"), None
    return judge(data, attempt), data


def _sync_directory(directory: int) -> None:
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
