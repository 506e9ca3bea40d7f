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
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, Protocol

from supervisor.core.settling import (
    Patience,
    Reply,
    Search,
    ids_by_output,
    ids_in_accounting,
    ids_in_queue,
    read_reply,
    sacct_commands_argv,
    shows_another,
    squeue_commands_argv,
)
from supervisor.core.slurm_records import scontrol_argv
from supervisor.core.submission import RECORD, Order, Submission, submission_environment
from supervisor.loop.flag import Flag
from supervisor.scheduler.client import Printed, SlurmClient, utc_now
from supervisor.scheduler.directories import (
    Locked,
    doubtful,
    in_time,
    listed,
    locked,
    made,
    sentence,
    take_away,
    take_back,
    write_record,
)
from supervisor.scheduler.record import read_record

DEADLINE: Final = 60.0
PATIENCE: Final = Patience()
LAST_CHANCE: Final = 5.0  # seconds for sbatch to answer after the first interrupt
WRONG_ID: Final = "sbatch has told job {}, which runs another script; found by its script: job {}"
_MARGIN: Final = 60  # minutes that clocks may differ by, when accounting is asked for jobs since a time


class Runs(Protocol):
    """Who runs a command of Slurm's to its end or its deadline."""

    async def run(self, argv: list[str]) -> Printed:
        """The command's end; trouble is told and does not raise."""


class Sbatch(SlurmClient):
    """Runs sbatch, in the environment and the directory that the job gets, too."""

    def __init__(self, environ: Mapping[str, str], cwd: str, *, deadline: float = DEADLINE) -> None:
        super().__init__(environ=environ, deadline=deadline, cwd=cwd)
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
        async with made(order, plan_text, asked):
            reply = await self._ask(list(asked.argv))
            if reply.kind == "doubtful":
                return await self._settled(order.directory, replace(asked, words=reply.words))
            asked = replace(asked, cluster=reply.cluster or asked.cluster, words=reply.words)
            ids = () if reply.jobid is None else await self._with_our_script(order.directory, asked, reply.jobid)
            answered = replace(
                asked,
                state=reply.kind,
                jobid=ids[0] if ids else None,
                answered=self._utc(),
                words=reply.words
                if reply.jobid in (None, *ids)
                else WRONG_ID.format(reply.jobid, " and job ".join(ids)),
            )
            several = ids if len(ids) > 1 else ()
            return await self._kept(Submitted(order.directory, answered, several, reached=reply.reached))

    async def settle_earlier(self, base: str, plan_text: str, uid: int) -> Submitted | None:
        """Settle every submission of this plan below `base` that is in doubt: the first that has a job, or that still
        cannot be settled; None when nothing stands in the way of another one. Raises OSError when that cannot be found
        out."""
        for directory in await doubtful(base, plan_text, uid):
            try:
                async with locked(directory):
                    submission = await in_time(directory, read_record, directory)
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
            async with locked(directory):
                submission = await in_time(directory, read_record, directory)
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

    async def _with_our_script(self, directory: str, asked: Submission, told: str) -> tuple[str, ...]:
        """The job whose id sbatch has told; where the controller shows another script with that id, those that run
        ours, if any are known."""
        shown = await self._slurm.run(scontrol_argv(told, asked.cluster))
        if shown.returncode != 0 or not shows_another(shown.stdout, asked.script):
            return (told,)
        found, _ = await self._look(directory, asked)
        return tuple(sorted(found, key=int)) or (told,)

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
            names, unseen = await in_time(directory, listed, directory), ""
        except OSError as error:
            names, unseen = [], sentence(directory, error)
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
            await in_time(directory, take_away, directory)
            ids, _ = await self._look(directory, doubt)
            search.ids |= ids
        except OSError as error:
            return sentence(directory, error)
        return ""

    async def _take_back(self, directory: str) -> str:
        """There is a job: it needs the plan's copy, whoever has taken that away. Returns the trouble with it."""
        try:
            await in_time(directory, take_back, directory)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return sentence(directory, error)
        return ""

    async def _kept(self, done: Submitted) -> Submitted:
        """With its record on the disk, or with the trouble that kept it from there."""
        done = replace(done, interrupted=self._stop.gently.is_set())
        try:
            await in_time(done.directory, write_record, done.directory, done.submission)
        except OSError as error:
            return replace(done, trouble=sentence(os.path.join(done.directory, RECORD), error))
        return done

    def _utc(self) -> str:
        return self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
