"""One submission, from the directory to the proven answer: what `core/submission.py` and `core/settling.py` say, done.

The order is what makes it safe. The record says `asked`, on the disk, before sbatch runs; so whatever happens to this
process, the next submission of the same plan finds the record and settles it first. While a submission is under way its
record is locked, and the kernel gives the lock back however its owner ends: a record that is locked is somebody's work,
and one that is not and says `asked` is a doubt.

sbatch has a deadline (a minute: it waits and retries by itself while the controller is busy) and is killed at it. A
first SIGINT gives it a few seconds to answer, and then the doubt is settled as after a deadline; a second one stops the
asking, and the record says `unknown`.

Files are a thread's work, with a deadline: a file system that is gone holds up neither the loop nor the process's end.
Slurm's trouble never raises; `OSError` means that the directory could not be made, and then nothing was submitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from supervisor.core.settling import (
    Patience,
    Reply,
    Search,
    ids_by_output,
    ids_in_accounting,
    ids_in_queue,
    read_reply,
    sacct_commands_argv,
    squeue_commands_argv,
)
from supervisor.core.submission import PLAN, RECORD, SCRIPT, Order, Submission, submission_environment
from supervisor.loop.files import read_whole
from supervisor.loop.flag import Flag
from supervisor.loop.threads import in_thread
from supervisor.scheduler.client import Printed, SlurmClient, utc_now
from supervisor.scheduler.record import read_record

DEADLINE: Final = 60.0
PATIENCE: Final = Patience()
LAST_CHANCE: Final = 5.0  # seconds for sbatch to answer after the first interrupt
GIVEN_UP: Final = "plan.given-up.toml"
LOCK: Final = ".lock"
FILES: Final = 60.0  # seconds for the files of one submission
SEARCH: Final = 300.0  # seconds to look through all submissions in a place
_LET_GO: Final = 1.0  # seconds in which a lock is given back, usually
_MARGIN: Final = 60  # minutes that clocks may differ by, when accounting is asked for jobs since a time

T = TypeVar("T")


class Locked(BlockingIOError):
    """Somebody else is at this submission."""


class Runs(Protocol):
    """Who runs a command of Slurm's to its end or its deadline."""

    async def run(self, argv: list[str]) -> Printed:
        """The command's end; trouble is told and does not raise."""


class Sbatch(SlurmClient):
    """Runs sbatch, in the environment that the job gets, too."""

    def __init__(self, environ: Mapping[str, str], *, deadline: float = DEADLINE) -> None:
        super().__init__(environ=environ, deadline=deadline)
        self._environ = submission_environment(environ)


class Stop:
    """What a person's interrupts ask for: `gently` after the first, `now` after the second."""

    def __init__(self) -> None:
        self.gently = Flag()
        self.now = Flag()

    def ask(self) -> None:
        """One more interrupt."""
        (self.now if self.gently.is_set() else self.gently).set()


@dataclass(frozen=True, slots=True)
class Submitted:
    """How a submission ended: its record as it is on the disk, and what else must be told.

    `several`: ids of jobs that have the same script, when there is more than one. `earlier`: an earlier submission of
    the plan that was in doubt has turned out to have a job, and nothing was submitted now. `reached`: False when the
    controller never got the request. `interrupted`: a person wanted no more of it.
    """

    directory: str
    submission: Submission
    several: tuple[str, ...] = ()
    earlier: bool = False
    reached: bool = True
    interrupted: bool = False
    trouble: str = ""


class Submitter:
    """Submits plans, and settles what is in doubt."""

    def __init__(
        self,
        sbatch: Runs,
        slurm: Runs,
        stop: Stop,
        *,
        patience: Patience = PATIENCE,
        last_chance: float = LAST_CHANCE,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._sbatch = sbatch
        self._slurm = slurm
        self._stop = stop
        self._patience = patience
        self._last_chance = last_chance
        self._now = now

    async def submit(self, order: Order, plan_text: str) -> Submitted:
        """Submit once. Raises OSError when the directory cannot be made; then nothing is left of it."""
        asked = replace(order.submission, asked=self._utc())
        async with _made(order, plan_text, asked):
            reply = await self._ask(list(asked.argv))
            if reply.kind == "doubtful":
                return await self._settled(order.directory, replace(asked, words=reply.words))
            answered = replace(
                asked,
                state=reply.kind,
                jobid=reply.jobid,
                cluster=reply.cluster or asked.cluster,
                answered=self._utc(),
                words=reply.words,
            )
            return await self._kept(Submitted(order.directory, answered, reached=reply.reached))

    async def settle_earlier(self, base: str, plan_text: str, uid: int) -> Submitted | None:
        """Settle every submission of this plan below `base` that is in doubt: the first that has a job, or that still
        cannot be settled; None when nothing stands in the way of another one. Raises OSError when that cannot be found
        out."""
        for directory in await _in_time(base, doubtful, base, plan_text, uid, limit=SEARCH):
            try:
                async with _locked(directory):
                    submission = await _in_time(directory, read_record, directory)
                    if submission.state not in ("asked", "unknown"):
                        continue  # somebody else has settled it by now
                    done = replace(await self._settled(directory, submission), earlier=True)
            except (Locked, FileNotFoundError, ValueError):
                continue  # it is under way (its lock is held), or gone by now
            if done.submission.state != "absent":
                return done
        return None

    async def settle(self, directory: str) -> Submitted | None:
        """What came of the submission in a directory; None when sbatch was not run for it. Raises Locked while somebody
        else is at it, OSError and ValueError when its record cannot be read."""
        try:
            async with _locked(directory):
                submission = await _in_time(directory, read_record, directory)
                if submission.state in ("asked", "unknown"):
                    return await self._settled(directory, submission)
                return Submitted(directory, submission)
        except FileNotFoundError:  # the record is there before sbatch runs
            return None

    # --- sbatch ---

    async def _ask(self, argv: list[str]) -> Reply:
        """Run sbatch to its end, its deadline, or a while after an interrupt."""
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._sbatch.run(argv))
            gently, now = (group.create_task(event.wait()) for event in (self._stop.gently, self._stop.now))
            await asyncio.wait((asking, gently), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((asking, now), timeout=self._last_chance, return_when=asyncio.FIRST_COMPLETED)
            for task in (asking, gently, now):
                task.cancel()  # a client that is cancelled kills its command first
        if asking.cancelled():
            return Reply("doubtful", "sbatch was interrupted")
        printed = asking.result()
        return read_reply(printed.returncode, printed.stdout, printed.stderr, printed.trouble)

    # --- doubts ---

    async def _settled(self, directory: str, doubt: Submission) -> Submitted:
        """Look for the job until it is found, believed absent, or the patience is over; the record says which."""
        search, loop = Search(self._patience), asyncio.get_running_loop()
        begun = loop.time()
        while True:
            search.hear(loop.time(), *await self._look(directory, doubt))
            if search.finding != "open" or loop.time() - begun >= self._patience.limit or self._stop.now.is_set():
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.pause):
                    await self._stop.now.wait()
        trouble = await self._give_up(directory, doubt, search) if search.finding == "absent" else search.trouble
        if search.ids:
            trouble = await self._take_back(directory)
        why = doubt.words or "whoever submitted it is gone"
        done = replace(doubt, answered=self._utc())
        ids = sorted(search.ids, key=int)
        if ids:
            words = f"{why}; found by its script: job {' and job '.join(ids)}" + (f"; {trouble}" if trouble else "")
            done = replace(done, state="submitted", jobid=ids[0], words=words)
        elif search.finding == "absent" and not trouble:
            done = replace(done, state="absent", words=f"{why}; there is no such job")
        else:
            asked = f"; {trouble}" if trouble else ""
            done = replace(done, state="unknown", words=f"{why}; it could not be found out{asked}")
        return await self._kept(Submitted(directory, done, several=tuple(ids) if len(ids) > 1 else ()))

    async def _look(self, directory: str, doubt: Submission) -> tuple[set[str], str]:
        """Ids of the jobs with this script, and why there may be others: what could not be asked, or seen, or ""."""
        queue = await self._slurm.run(squeue_commands_argv(doubt.cluster))
        if queue.returncode == 0 and (ids := ids_in_queue(queue.stdout, doubt.script)):
            return ids, ""
        try:
            names, unseen = await _in_time(directory, _listed, directory), ""
        except OSError as error:
            names, unseen = [], _sentence(directory, error)
        since = self._now() - datetime.fromisoformat(doubt.asked)
        minutes = max(0, int(since.total_seconds() // 60)) + _MARGIN  # a clock that was set back: asked in the future
        argv = sacct_commands_argv(doubt.uid, minutes, doubt.cluster)
        book = await self._slurm.run(argv)
        booked = ids_in_accounting(book.stdout, doubt.script) if book.returncode == 0 else set()
        if queue.returncode == 0:
            trouble = unseen
        else:
            trouble = queue.trouble or f"squeue ended with {queue.returncode}: {queue.stderr.strip()[-300:]}"
        return ids_by_output(names) | booked, trouble

    async def _give_up(self, directory: str, doubt: Submission, search: Search) -> str:
        """Take the plan's copy away, so that a job that comes all the same runs nothing, and look once more; returns
        the trouble with it."""
        try:
            await _in_time(directory, _take_away, directory)
            ids, _ = await self._look(directory, doubt)
            search.ids |= ids
        except OSError as error:
            return _sentence(directory, error)
        return ""

    async def _take_back(self, directory: str) -> str:
        """There is a job: it needs the plan's copy, whoever has taken that away. Returns the trouble with it."""
        try:
            await _in_time(directory, _move, directory, GIVEN_UP, PLAN)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _sentence(directory, error)
        return ""

    async def _kept(self, done: Submitted) -> Submitted:
        """With its record on the disk, or with the trouble that kept it from there."""
        done = replace(done, interrupted=self._stop.gently.is_set())
        try:
            await _in_time(done.directory, write_record, done.directory, done.submission)
        except OSError as error:
            return replace(done, trouble=_sentence(os.path.join(done.directory, RECORD), error))
        return done

    def _utc(self) -> str:
        return self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- files ------------------------------------------------------------------------------------------------------------


async def _in_time(where: str, function: Callable[..., T], *args: Any, limit: float | None = None) -> T:
    """`in_thread`, with an error that says where no answer came from."""
    try:
        return await in_thread(function, *args, limit=limit or FILES)
    except TimeoutError as error:
        raise TimeoutError(errno.ETIMEDOUT, f"{error}: is its file system away?", where) from None


def _sentence(where: str, error: OSError) -> str:
    return f"{where}: {error.strerror or error}"


def _made(order: Order, plan_text: str, asked: Submission) -> AbstractAsyncContextManager[None]:
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


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []  # no output is to be seen there


def _take_away(directory: str) -> None:
    """Raises OSError."""
    try:
        _move(directory, PLAN, GIVEN_UP)
    except FileNotFoundError:
        os.stat(os.path.join(directory, GIVEN_UP))  # by one who was killed then


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


def doubtful(base: str, plan_text: str, uid: int) -> list[str]:
    """Directories below `base` of this user's submissions of the plan that are in doubt, or under way."""
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
        await _in_time(lock.directory, take)
        yield
    finally:
        with contextlib.suppress(OSError):  # whatever becomes of the lock, what was done under it counts
            await in_thread(lock.give_up, limit=_LET_GO)


def _locked(directory: str) -> AbstractAsyncContextManager[None]:
    """Hold a submission's lock. Raises Locked when another process has it, OSError."""
    lock = _Lock(directory)
    return _held(lock, lock.take)
