"""Where the service keeps its state, and that it alone does: one daemon for a host and a state directory.

    $STATE_DIRECTORY                                   as systemd made it
    $XDG_STATE_HOME/allocd/hosts/HOST/                 else: login nodes share $HOME, and each has its own
        lock            held by fcntl as long as the daemon lives; the kernel gives it back
        owner.json      {host, boot, pid, started, since}: who holds it, made by link(): there is never half of one
        allocations/    the books (book.py)

The lock decides between processes of one host. The record tells a person who that is, and decides between hosts: a
network file system may know no locks. A record is stale when its host is this one and its boot, its process or that
process's start is not: then it is replaced. One of another host is never touched, for nobody here can look there.

What belongs to somebody else, or could be exchanged by somebody else, is refused: each directory of our own (allocd,
hosts, HOST, allocations; or $STATE_DIRECTORY, allocations) must be a directory (no symbolic link in its place), ours,
and closed to others. What is above, $XDG_STATE_HOME itself, is the user's, and often a link. What lies in a directory
is opened relative to it, links not followed.

A daemon that is killed while the disk is full must come back on the full disk. So the file of a stale record becomes
that of the new one, and an orderly end keeps it for the next (`owner.json.free`): no block has to be found for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from supervisor.core import codes
from supervisor.loop.files import read_whole
from supervisor.runs.registry import state_home

OWNER: Final = "owner.json"
FREE: Final = f"{OWNER}.free"
LOCK: Final = "lock"
SIZE: Final = 1 << 16  # bytes: more is no record of ours

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_LASTING: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.EINVAL, errno.ENAMETOOLONG),
)
"""Errors that time does not mend."""


class Unusable(Exception):
    """The state directory cannot be ours; the message says what to do. `code` is the exit code: 78 when something must
    be put right, 69 when another daemon has it, 1 when it may go by itself (a full disk)."""

    def __init__(self, text: str, code: int = codes.CONFIG) -> None:
        super().__init__(text)
        self.code = code


def unusable(error: OSError, where: str) -> Unusable:
    """What an error of the file system means to one who wants to start."""
    text = f"{where}: {error.strerror or error}"
    if error.errno in _ROOM:
        text += ": make room there, or have the quota raised; what systemd started is started again by itself then"
    return Unusable(text, codes.CONFIG if error.errno in _LASTING else codes.FAILED)


@dataclass(frozen=True, slots=True)
class Owner:
    """A daemon that holds a state directory. `started` is its process's start in clock ticks since the boot."""

    host: str
    boot: str
    pid: int
    started: int
    since: str

    @property
    def alive(self) -> bool | None:
        """Whether it lives; None when it is on another host and nobody here can know."""
        if self.host != socket.gethostname():
            return None
        return self.boot == boot_id() and self.started == process_start(self.pid)


def this_process() -> Owner:
    """The record of this process."""
    pid = os.getpid()
    since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return Owner(socket.gethostname(), boot_id(), pid, process_start(pid) or 0, since)


def boot_id() -> str:
    """The kernel's name for this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None when there is none, or it has ended and nobody has
    waited for it: a first process that reaps none keeps it for ever."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # proc(5): from field 3 on
            return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


# --- where ------------------------------------------------------------------------------------------------------------


def _given(environ: Mapping[str, str]) -> str:
    """Systemd's; it may name several."""
    return (environ.get("STATE_DIRECTORY") or "").partition(":")[0].rstrip("/")


def hosts_directory(environ: Mapping[str, str]) -> str:
    """Where each login node has its state, where no $STATE_DIRECTORY is set."""
    return os.path.join(state_home(environ), "allocd", "hosts")


def state_directory(environ: Mapping[str, str]) -> str:
    """This host's state directory."""
    return _given(environ) or os.path.join(hosts_directory(environ), socket.gethostname())


def held_for(environ: Mapping[str, str]) -> StateDirectory:
    """This host's state directory, held. Raises Unusable."""
    return StateDirectory(state_directory(environ), os.path.dirname(_given(environ)) or state_home(environ))


def owners(environ: Mapping[str, str]) -> list[Owner]:
    """The daemons that hold this user's state, on whatever host, as far as their records tell: those that are known to
    be gone are left out. For a verb that finds no daemon here."""
    places = [state_directory(environ)]
    with suppress(OSError):
        hosts = hosts_directory(environ)
        places += [os.path.join(hosts, name) for name in sorted(os.listdir(hosts))]
    found: dict[Owner, None] = {}
    for place in places:
        if (owner := read_owner(os.path.join(place, OWNER))) is not None and owner.alive is not False:
            found[owner] = None
    return list(found)


def read_owner(path: str, directory: int | None = None) -> Owner | None:
    """The record in a file; None when there is none that can be read."""
    try:
        data = json.loads(read_whole(path, SIZE, directory=directory))
        return Owner(str(data["host"]), str(data["boot"]), int(data["pid"]), int(data["started"]), str(data["since"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


# --- ours -------------------------------------------------------------------------------------------------------------


class StateDirectory:
    """The state directory, held. `descriptor` leads to it, whatever becomes of its name."""

    def __init__(self, path: str, base: str = "") -> None:
        """Make it, check it, and take it. `base`: the directory above it that is the user's own affair; what is between
        them is ours (unless said, that is nothing). Raises Unusable."""
        self.path = path
        self.descriptor = _opened(path, base or os.path.dirname(path))
        self._lock: int | None = None
        try:
            self._lock = self._locked()
            self.owner = this_process()
            self._own()
        except OSError as error:
            self._let_go()
            raise unusable(error, os.path.join(path, LOCK if error.filename == LOCK else OWNER)) from None
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Give it back."""
        if read_owner(OWNER, self.descriptor) == self.owner:
            with suppress(OSError):
                self._rename(OWNER, FREE)
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        os.close(self.descriptor)

    def _locked(self) -> int | None:
        """The lock, held; None where the file system knows no locks."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(LOCK, flags, 0o600, dir_fd=self.descriptor)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._taken(read_owner(OWNER, self.descriptor)) from None
            return None
        return descriptor

    def _taken(self, owner: Owner | None) -> Unusable:
        who = f"process {owner.pid} on {owner.host}, since {owner.since}" if owner else "another process"
        return Unusable(f"{self.path} is held by an allocd already: {who}", codes.UNREACHABLE)

    def _own(self) -> None:
        """Put our record there. Raises Unusable, OSError."""
        temporary = f"{OWNER}.{secrets.token_hex(4)}"
        try:
            self._make_way(temporary)
            self._write(temporary)
            self._link(temporary, OWNER)
        except FileExistsError:
            raise self._taken(read_owner(OWNER, self.descriptor)) from None
        finally:
            self._remove(temporary)

    def _make_way(self, temporary: str) -> None:
        """Take away a record whose owner is known to be gone: its file, or the one that was kept at an orderly end,
        becomes the temporary one. Raises Unusable when the owner is not known to be gone."""
        owner = read_owner(OWNER, self.descriptor)
        if owner is not None and owner.alive is None:
            where = os.path.join(self.path, OWNER)
            raise Unusable(
                f"{self.path} is held by the allocd on {owner.host} (process {owner.pid}, since {owner.since}): use "
                f"that one, or remove {where} if that machine or its allocd is gone",
                codes.UNREACHABLE,
            )
        if owner is not None and owner.alive:
            raise self._taken(owner)
        self._take_away(owner, temporary)
        with suppress(FileNotFoundError):
            if owner is None:
                self._rename(FREE, temporary)
        if self._lock is not None:  # nobody else is at it: these were left by daemons that were killed
            for name in os.listdir(self.descriptor):
                if name.startswith(f"{OWNER}.") and name != temporary:
                    self._remove(name)

    def _take_away(self, judged: Owner | None, temporary: str) -> None:
        """Rename the record that was judged, or remove what is none. Raises Unusable when it is another by now: where
        there are no locks, somebody else may have made way for his own meanwhile, which is put back."""
        with suppress(FileNotFoundError):
            self._rename(OWNER, temporary)
            if (found := read_owner(temporary, self.descriptor)) != judged:
                self._link(temporary, OWNER)
                raise self._taken(found)
            if judged is None:
                self._remove(temporary)

    def _write(self, name: str) -> None:
        """Our record, over whatever is in that file, whose blocks are kept. Raises OSError."""
        data = json.dumps(asdict(self.owner)).encode()
        descriptor = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.descriptor
        )
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            file.truncate()
            os.fsync(descriptor)

    def _link(self, old: str, new: str) -> None:
        os.link(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)


# --- directories ------------------------------------------------------------------------------------------------------


def _opened(path: str, base: str) -> int:
    """The directory, made where it is not there, each of those between it and the user's one checked. Raises
    Unusable."""
    if not os.path.isabs(path):
        raise Unusable(f"{path!r} is no absolute path: set STATE_DIRECTORY or XDG_STATE_HOME to one")
    try:
        os.makedirs(base, mode=0o700, exist_ok=True)
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unusable(error, error.filename or base) from None
    names = os.path.relpath(path, base).split("/")
    for name in names:
        above = descriptor
        try:
            descriptor = own_directory(above, name, closed=name == names[-1])
        finally:
            os.close(above)
    return descriptor


def own_directory(above: int, name: str, *, closed: bool = True) -> int:
    """A directory of ours in an open one, made where it is not there. It is closed to others: wholly, or so that nobody
    else can exchange what is in it. Raises Unusable."""
    path = os.path.join(os.readlink(f"/proc/self/fd/{above}"), name)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        status = os.stat(name, dir_fd=above, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
            raise Unusable(f"{path} is {what}, and allocd's state must be in a directory of its own: move it away")
        if status.st_uid != os.geteuid():
            raise Unusable(f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()}): move it away")
        descriptor = os.open(name, OPEN_DIRECTORY, dir_fd=above)
    except OSError as error:
        raise unusable(error, path) from None
    try:
        _close_to_others(descriptor, 0o077 if closed else 0o022)
    except OSError as error:
        os.close(descriptor)
        raise unusable(error, path) from None
    return descriptor


def _close_to_others(descriptor: int, mask: int) -> None:
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & mask:
        os.fchmod(descriptor, mode & ~mask)
