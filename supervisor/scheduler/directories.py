"""The directories of submissions: made, locked, looked for, and given up; each by a thread that nobody waits for past a
deadline.

A submission under way holds its directory's lock. The kernel gives it back however its owner ends, so that one which
is locked is somebody's work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from supervisor.core.submission import PLAN, RECORD, SCRIPT, Order, Submission
from supervisor.loop.files import read_whole
from supervisor.loop.threads import in_thread
from supervisor.scheduler.record import read_record

GIVEN_UP: Final = "plan.given-up.toml"
LOCK: Final = ".lock"
FILES: Final = 60.0  # seconds for the files of one submission
SEARCH: Final = 300.0  # seconds to look through all submissions in a place
_LET_GO: Final = 1.0  # seconds in which a lock is given back, usually

T = TypeVar("T")


class Locked(BlockingIOError):
    """Somebody else is at this submission."""


async def in_time(where: str, function: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """`in_thread`, with an error that says where no answer came from. A place of submissions that is gone holds few
    threads, however often it is tried."""
    try:
        return await in_thread(function, *args, limit=limit or FILES, place=os.path.dirname(where))
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{error}: is its file system away?", where) from None


def sentence(where: str, error: OSError) -> str:
    """What went wrong, and where."""
    return f"{where}: {error.strerror or error}"


def made(order: Order, plan_text: str, asked: Submission) -> AbstractAsyncContextManager[None]:
    """Hold the directory, made with the script, the plan's copy and the record that sbatch is asked. Raises OSError
    when it cannot be; then nothing is left of it, as soon as its file system answers."""
    lock = _Lock(order.directory)
    return _held(lock, partial(_make, order, plan_text, asked, lock))


def _make(order: Order, plan_text: str, asked: Submission, lock: _Lock) -> None:
    os.makedirs(os.path.dirname(order.directory), exist_ok=True)
    os.mkdir(order.directory)
    try:
        for name, text, mode in ((SCRIPT, order.script, 0o755), (PLAN, plan_text, 0o600)):  # env may hold secrets
            _write(os.path.join(order.directory, name), text, mode)
        lock.take()
        write_record(order.directory, asked)
        lock.check()
    except OSError:
        shutil.rmtree(order.directory, ignore_errors=True)
        raise


def _write(path: str, text: str, mode: int) -> None:
    """Raises OSError, which names the file."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        try:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error


def listed(directory: str) -> list[str]:
    """The names in a submission's directory."""
    try:
        return os.listdir(directory)
    except OSError:
        return []  # no output is to be seen there


def take_away(directory: str) -> None:
    """Take the plan's copy away, so that a job that comes all the same runs nothing. Raises OSError."""
    try:
        _move(directory, PLAN, GIVEN_UP)
    except FileNotFoundError:
        os.stat(os.path.join(directory, GIVEN_UP))  # by one who was killed then


def take_back(directory: str) -> None:
    """Put the plan's copy back. Raises OSError, FileNotFoundError where nobody has taken it away."""
    _move(directory, GIVEN_UP, PLAN)


def _move(directory: str, old: str, new: str) -> None:
    os.replace(os.path.join(directory, old), os.path.join(directory, new))


def write_record(directory: str, submission: Submission) -> None:
    """Put the record on the disk, whole or not at all. Raises OSError."""
    path = os.path.join(directory, RECORD)
    temporary = f"{path}.{secrets.token_hex(4)}"
    _write(temporary, json.dumps(submission.to_dict(), indent=1, ensure_ascii=False) + "\n", 0o644)
    os.replace(temporary, path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not every file system can; the file itself is durable
            raise
    finally:
        os.close(descriptor)


async def doubtful(base: str, plan_text: str, uid: int) -> list[str]:
    """Directories below `base` of this user's submissions of the plan that are in doubt, or under way. Raises
    OSError."""
    return await in_time(base, _doubtful, base, plan_text, uid, limit=SEARCH)


def _doubtful(base: str, plan_text: str, uid: int) -> list[str]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(base)):
            directory = os.path.join(base, name)
            if name.startswith("submit-") and _is_doubtful(directory, plan_text, uid):
                found.append(directory)
    return found


def _is_doubtful(directory: str, plan_text: str, uid: int) -> bool:
    try:
        submission = read_record(directory)
        if submission.state not in ("asked", "unknown") or submission.uid != uid:
            return False
        return _is_plan_in(directory, plan_text.encode())
    except (OSError, ValueError):
        return False  # no record: sbatch was not run


def _is_plan_in(directory: str, plan: bytes) -> bool:
    """Whether the plan's copy is this one, also where whoever was about to give the submission up was killed. Raises
    OSError, also for one that is longer."""
    try:
        return read_whole(os.path.join(directory, PLAN), len(plan)) == plan
    except FileNotFoundError:
        return read_whole(os.path.join(directory, GIVEN_UP), len(plan)) == plan


class _Lock:
    """A submission's lock. Whoever waited for it may have gone before a dead file system gives it: then it is given
    back as soon as it is had. Where the file system knows no locks, nothing is held."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._turn = threading.Lock()
        self._descriptor: int | None = None
        self._given_up = False

    def take(self) -> None:
        """Blocks. Raises Locked when another process has it, OSError."""
        descriptor = os.open(os.path.join(self.directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(descriptor)
                raise Locked(error.errno, "locked", self.directory) from error
        with self._turn:
            self._descriptor = descriptor
        self.check()

    def check(self) -> None:
        """Raises TimeoutError when nobody waits for it any more."""
        if self._given_up:
            self.give_up()
            raise TimeoutError(errno.ETIMEDOUT, "it is too late", self.directory)

    def give_up(self) -> None:
        """Let go of it, now and in future. Blocks."""
        with self._turn:
            descriptor, self._descriptor = self._descriptor, None
            self._given_up = True
        if descriptor is not None:
            os.close(descriptor)


@asynccontextmanager
async def _held(lock: _Lock, take: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a lock that `take` takes. Raises what that raises."""
    try:
        await in_time(lock.directory, take)
        yield
    finally:
        with contextlib.suppress(OSError):  # whatever becomes of the lock, what was done under it counts
            await in_thread(lock.give_up, limit=_LET_GO)


def locked(directory: str) -> AbstractAsyncContextManager[None]:
    """Hold a submission's lock. Raises Locked when another process has it, OSError."""
    lock = _Lock(directory)
    return _held(lock, lock.take)
