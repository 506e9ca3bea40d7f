"""The Unix socket that is answered on: where it is, who may make it, and who may be behind it.

The socket is 0600 in a directory of ours that is 0700: nobody else can reach it. Nothing on the way to it may be a
symbolic link, for who could put one there could make us answer, or make a client ask, elsewhere.

    $RUNTIME_DIRECTORY                  systemd made it for this unit
    $XDG_RUNTIME_DIR/allocd             where that variable names a directory of ours: inside jobs it is often inherited
                                        from the login node, and names nothing
    ${TMPDIR:-/tmp}/allocd-UID          else

A socket file outlives its server. Whoever serves holds a lock on `NAME.lock` beside it, which ends with the process;
who gets that lock and is refused a connection (ECONNREFUSED) has found a stale socket, and replaces it. Asked without
the lock, two starters could each take the other's new socket for a stale one. (`bind` itself never replaces anything,
and `asyncio.start_unix_server` replaces a socket that lives.)

systemd may hand over a socket instead (LISTEN_PID, LISTEN_FDS; sd_listen_fds(3)): then it owns the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from typing import Final

from supervisor.core import codes

NAME: Final = "ctl.sock"
LONGEST: Final = 107  # bytes of a path that fit into sockaddr_un (unix(7))
BACKLOG: Final = 128  # connections that wait to be accepted
CONNECT_LIMIT: Final = 2.0  # seconds
FIRST_HANDED: Final = 3  # sd_listen_fds(3)


class Unusable(Exception):
    """Why there can be no socket. `code` is the exit code: 78 when something must be put right, 69 when another process
    answers there already."""

    def __init__(self, text: str, code: int = codes.CONFIG) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel saw it when it was made (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    @property
    def allowed(self) -> bool:
        """Our own user, or root, who can do everything anyway."""
        return self.uid in (os.geteuid(), 0)


def peer_of(connection: socket.socket) -> Peer:
    """Raises OSError."""
    form = "iII"  # struct ucred: pid_t, uid_t, gid_t
    return Peer(
        *struct.unpack(form, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form)))
    )


# --- where ----------------------------------------------------------------------------------------------------------


def runtime_directory(environ: Mapping[str, str]) -> str:
    """Where the socket's directory is, made or not. Touches nothing."""
    if given := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return given
    if (session := environ.get("XDG_RUNTIME_DIR", "")) and _is_ours(session):
        return os.path.join(session, "allocd")
    return os.path.join(environ.get("TMPDIR") or "/tmp", f"allocd-{os.geteuid()}")  # noqa: S108 - it is checked


def _is_ours(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return os.path.isabs(path) and stat.S_ISDIR(found.st_mode) and ours


def private_directory(path: str) -> str:
    """Make a directory that is ours alone, or see that the one that is there is. Raises Unusable."""
    if not os.path.isabs(path):
        raise Unusable(f"the socket's directory must be an absolute path, and is {path!r}")
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)  # its parent is not made: what lies there is somebody's decision
        found = os.lstat(path)
    except OSError as error:
        raise Unusable(f"the socket's directory cannot be made: {path}: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise Unusable(f"{path} is a symbolic link, and the socket's directory must be none: remove it")
    if not stat.S_ISDIR(found.st_mode):
        raise Unusable(f"{path} is no directory, and the socket's directory should be there: remove it")
    if found.st_uid != os.geteuid():
        raise Unusable(
            f"{path} belongs to uid {found.st_uid}, and the socket's directory must be ours ({os.geteuid()})"
        )
    if found.st_mode & 0o077:
        raise Unusable(f"{path} is open to others ({stat.S_IMODE(found.st_mode):04o}): chmod 0700 {path}")
    return path


# --- making one -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A socket that listens. `path` is None when its address is unknown; `lock` and `file` only of one of our own."""

    socket: socket.socket
    path: str | None
    lock: FileIO | None = None
    file: tuple[int, int] | None = None  # device and inode of the socket's file

    def close(self) -> None:
        """Close it, and remove its files as far as they are still ours. Does no harm when it is called twice."""
        self.socket.close()
        if self.lock is None or self.lock.closed or self.path is None:
            return
        with suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self.file:
                os.unlink(self.path)
        with suppress(OSError):
            if _is_at(f"{self.path}.lock", self.lock):
                os.unlink(f"{self.path}.lock")
        self.lock.close()


def listen(directory: str, name: str = NAME) -> Listener:
    """Listen on `directory/name`; the directory is made if need be. Raises Unusable."""
    path = os.path.join(directory, name)
    if (length := len(os.fsencode(path))) > LONGEST:
        raise Unusable(
            f"the socket's path has {length} bytes, and Linux takes {LONGEST}: {path}: set XDG_RUNTIME_DIR or TMPDIR "
            "to a directory with a shorter path"
        )
    private_directory(directory)
    lock = _locked(path)
    try:
        _make_room(path)
        return _bound(path, lock)
    except BaseException:
        lock.close()
        raise


def _locked(path: str) -> FileIO:
    """The lock beside the socket, held until the file is closed. Whoever held it before has removed its file: a
    lock on that would be one on nothing."""
    name = f"{path}.lock"
    while True:
        try:
            lock = FileIO(os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise Unusable(f"the socket's lock cannot be opened: {name}: {why}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(name, lock):
                return lock
        except BlockingIOError:
            lock.close()
            raise _taken(path, _who_answers(path)) from None
        except OSError as error:
            lock.close()
            raise Unusable(f"the socket's lock cannot be taken: {name}: {error.strerror}") from error
        lock.close()


def _is_at(name: str, file: FileIO) -> bool:
    """Whether a file is still the one with that name."""
    try:
        return os.path.samestat(os.lstat(name), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _make_room(path: str) -> None:
    """Remove a socket that nobody serves. The lock is held."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no socket"
        raise Unusable(f"{path} is {what}, and the socket should be there: remove it")
    if peer := _who_answers(path):
        raise _taken(path, peer)
    os.unlink(path)


def _taken(path: str, peer: Peer | None) -> Unusable:
    who = f"process {peer.pid} ({_command(peer.pid)})" if peer else "another process, which has its lock,"
    return Unusable(f"{who} answers on {path} already: stop it first, or ask it", codes.UNREACHABLE)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def _who_answers(path: str) -> Peer | None:
    """Who listens at a path; None when nobody does. Raises Unusable when that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_LIMIT)  # a full backlog blocks: somebody lives there
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            raise Unusable(f"whether somebody answers on {path} cannot be told: {error}", codes.UNREACHABLE) from error
        return peer_of(connection)


def _bound(path: str, lock: FileIO) -> Listener:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        os.chmod(path, 0o600)  # nobody else gets through the directory in between, nor connects before listen
        listening.listen(BACKLOG)
        found = os.lstat(path)
    except OSError as error:
        listening.close()
        raise Unusable(f"the socket cannot be made: {path}: {error.strerror}") from error
    return Listener(listening, path, lock, (found.st_dev, found.st_ino))


# --- one that was handed over ---------------------------------------------------------------------------------------


def handed_over(environ: MutableMapping[str, str]) -> Listener | None:
    """The socket that systemd opened for this process; None when it opened none. The variables are taken out of
    `environ`, for no child may think that it was meant. Raises Unusable for another number or kind of sockets."""
    pid, count, _ = (environ.pop(key, "") for key in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()):
        return None
    if count != "1":
        raise Unusable(
            f"systemd handed over {count or 'no'} sockets (LISTEN_FDS), and one is expected: see allocd.socket"
        )
    try:
        os.set_inheritable(FIRST_HANDED, False)
        given = socket.socket(fileno=FIRST_HANDED)
    except OSError as error:
        raise Unusable(f"what systemd handed over is no socket: {error.strerror}") from error
    listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (given.family, given.type) != (socket.AF_UNIX, socket.SOCK_STREAM) or not listens:
        given.close()
        raise Unusable(
            "what systemd handed over is no Unix stream socket that listens: ListenStream=%t/allocd/ctl.sock"
        )
    address = given.getsockname()
    return Listener(given, address if isinstance(address, str) and address.startswith("/") else None)


def open_listener(environ: MutableMapping[str, str], name: str = NAME) -> Listener:
    """What systemd handed over, else a socket of our own. Raises Unusable."""
    return handed_over(environ) or listen(runtime_directory(environ), name)
