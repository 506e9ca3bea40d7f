"""Where the service keeps its state, and that it alone does: one daemon for a host and a state directory.

    $STATE_DIRECTORY                                   as systemd made it
    $XDG_STATE_HOME/allocd/hosts/HOST/                 else: login nodes share $HOME, and each has its own
        lock            held by fcntl as long as the daemon lives; the kernel gives it back
        owner.json      {host, boot, pid, started, since}: who holds it, made by link(): there is never half of one
        allocations/    the books (book.py)

The lock decides between processes of one host. The record tells a person who that is, and decides between hosts: a
network file system may know no locks. A record is stale when its host is this one and its boot, its process or that
process's start is not: then it is replaced. One of another host is never touched, for nobody here can look there.

What belongs to somebody else, or could be exchanged by somebody else, is refused: the directory must be a directory (no
symbolic link in its place), ours, and closed to others; what lies in it is opened relative to it, links not followed.
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

OWNER: Final = "owner.json"
LOCK: Final = "lock"

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Unusable(Exception):
    """The state directory cannot be ours; the message says what to do."""


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


def hosts_directory(environ: Mapping[str, str]) -> str:
    """Where each login node has its state, where no $STATE_DIRECTORY is set."""
    base = environ.get("XDG_STATE_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "allocd", "hosts")


def state_directory(environ: Mapping[str, str]) -> str:
    """This host's state directory."""
    given = (environ.get("STATE_DIRECTORY") or "").partition(":")[0]  # systemd may name several
    return given or os.path.join(hosts_directory(environ), socket.gethostname())


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
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        with open(descriptor, encoding="utf-8") as file:
            data = json.load(file)
        return Owner(str(data["host"]), str(data["boot"]), int(data["pid"]), int(data["started"]), str(data["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- ours -------------------------------------------------------------------------------------------------------------


class StateDirectory:
    """The state directory, held. `descriptor` leads to it, whatever becomes of its name."""

    def __init__(self, path: str) -> None:
        """Make it, check it, and take it. Raises Unusable, OSError."""
        self.path = path
        self.descriptor = _opened(path)
        self._lock: int | None = None
        try:
            self._lock = self._locked()
            self.owner = this_process()
            self._own()
        except BaseException:
            self._let_go()
            raise

    def close(self) -> None:
        """Give it back."""
        if read_owner(OWNER, self.descriptor) == self.owner:
            with suppress(OSError):
                os.unlink(OWNER, dir_fd=self.descriptor)
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
                raise Unusable(self._taken(read_owner(OWNER, self.descriptor))) from None
            return None
        return descriptor

    def _taken(self, owner: Owner | None) -> str:
        who = f"process {owner.pid} on {owner.host}, since {owner.since}" if owner else "another process"
        return f"{self.path} is held by an allocd already: {who}"

    def _own(self) -> None:
        """Put our record there. Raises Unusable, OSError."""
        temporary = f"{OWNER}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600, dir_fd=self.descriptor), "w", encoding="utf-8") as file:
            json.dump(asdict(self.owner), file)
            file.flush()
            os.fsync(file.fileno())
        try:
            if not self._link(temporary):
                self._replace_stale()
                if not self._link(temporary):
                    raise Unusable(self._taken(read_owner(OWNER, self.descriptor)))
        finally:
            os.unlink(temporary, dir_fd=self.descriptor)

    def _link(self, temporary: str) -> bool:
        try:
            os.link(temporary, OWNER, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except FileExistsError:
            return False
        return True

    def _replace_stale(self) -> None:
        """Take away a record whose owner is known to be gone. Raises Unusable when it is not."""
        owner = read_owner(OWNER, self.descriptor)
        if owner is not None and owner.alive is None:
            where = os.path.join(self.path, OWNER)
            raise Unusable(
                f"{self.path} is held by the allocd on {owner.host} (process {owner.pid}, since {owner.since}): use "
                f"that one, or remove {where} if that machine or its allocd is gone"
            )
        if owner is not None and owner.alive:
            raise Unusable(self._taken(owner))
        with suppress(FileNotFoundError):
            os.unlink(OWNER, dir_fd=self.descriptor)


def _opened(path: str) -> int:
    """The directory, made where it is not there. Raises Unusable, OSError."""
    if not os.path.isabs(path):
        raise Unusable(f"{path!r} is no absolute path: set STATE_DIRECTORY or XDG_STATE_HOME to one")
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, OPEN_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            what = "a symbolic link" if os.path.islink(path) else "no directory"
            raise Unusable(f"{path} is {what}: the state directory must be a directory of its own") from None
        raise
    try:
        _check(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise Unusable(f"{path} belongs to user {status.st_uid}, not to us ({os.geteuid()})")
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(descriptor, 0o700)
