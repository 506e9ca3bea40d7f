"""Waiting for a job: Slurm is asked how it is (`scheduler/poller.py`), its run directories are looked at (`looks.py`),
both until Slurm's truth about its end is settled. Then, in this order: the receipt is sealed, which waits for an engine
that still writes; what the runs have written is told to its end; and only then comes the verdict.

One task group holds everything: the poller, the looks, the judging, and a scancel where a person's interrupt asks for
one. Whoever waits may leave at any time, and the job goes on. What is learned is told to a `Teller` as it comes.

The journal hurries the poller: when a run's receipt appears the end of its job is near, and squeue is asked again with
each look, a few times. When the poller sees a change, it wakes the looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, Protocol

from supervisor.core.kept import OVER, liveliness
from supervisor.core.parts import Parts
from supervisor.core.truth import Truth
from supervisor.loop.flag import Flag
from supervisor.loop.threads import in_thread
from supervisor.runs.follow import Follower, LogLines, News, Over, Trouble, may_be_of_job
from supervisor.runs.looks import Looks
from supervisor.runs.registry import attempt_of, runs_of_job
from supervisor.runs.rounds import Rounds
from supervisor.runs.saved import run_document
from supervisor.runs.sealing import Sealed, came_again, find_runs, gather, is_denied, jobs_own, seal_job, sealed_already
from supervisor.runs.sight import lose_sight
from supervisor.runs.target import Target
from supervisor.scheduler.poller import Poller, Seen
from supervisor.scheduler.verify import Asked, verify_job

NEAR: Final = (0.0, 0.1, 0.3, 0.7, 1.5, 3.0)
"""Seconds after a run's receipt at which Slurm is asked again whether its job is over."""

DRAIN: Final = 30.0  # seconds in which nothing could be told, and what is left is given up
SEAL_MARGIN: Final = 60.0  # seconds that sealing may take on a slow file system, beyond its patience
CANCEL_AGAIN: Final = 2.0  # seconds until a scancel that failed is tried again
CANCEL_ANEW: Final = 60.0  # seconds until one that Slurm has taken, and that had no effect, is sent again


class Teller(Protocol):
    """Who is told."""

    def news(self, news: News) -> None:
        """Something in a run directory, log lines excepted."""

    def lines(self, lines: LogLines) -> None:
        """Lines of a log. Called in a thread, and may take its time."""

    def seen(self, jobid: str, seen: Seen) -> None:
        """What Slurm shows of one of the ids."""

    def ended(self, jobid: str, truth: Truth) -> None:
        """What is proven about the end of one of the ids."""

    def has_parts(self, target: Target) -> None:
        """The job has turned out to have parts."""

    def cancelled(self) -> None:
        """Slurm has taken the scancel that a person's interrupt asked for."""

    def say(self, text: str) -> None:
        """A sentence."""


class Client(Asked, Protocol):
    """Who is asked about one job, and cancels it."""

    async def cancel_job(self, jobid: str) -> str:
        """Cancel it; what went wrong, or ""."""


FindParts = Callable[[str], Awaitable[Parts]]
"""Which parts a job has, for one that is known by its id alone."""

JudgeRun = Callable[[str], Awaitable[Sealed]]
"""What is proven of the run in a directory."""


async def job_end(
    target: Target,
    poller: Poller,
    find_parts: FindParts,
    seen: Callable[[str, Seen], object],
    ended: Callable[[str, Truth], object],
) -> tuple[Target, str, dict[str, Truth]]:
    """Follow a job to its end, or all of its parts to theirs, while the poller runs. Returns the target as it has
    turned out to be, why it may have parts of which nobody told ("" for no reason), and the truth about each id."""
    truths = await _truths(target, poller, seen, ended)
    if all(truth.standing != "several" for truth in truths.values()):
        return target, "", truths
    parts = await find_parts(target.jobid)  # nobody had told that it has parts
    target = target.of_parts(parts)
    return target, parts.why, await _truths(target, poller, seen, ended)


async def _truths(
    target: Target, poller: Poller, seen: Callable[[str, Seen], object], ended: Callable[[str, Truth], object]
) -> dict[str, Truth]:
    async def end(jobid: str) -> Truth:
        follow = poller.follow(jobid, lambda now: seen(jobid, now))
        try:
            truth = await follow.end()
        finally:
            follow.close()
        if truth.standing != "several":
            ended(jobid, truth)
        return truth

    async with asyncio.TaskGroup() as group:
        ends = {jobid: group.create_task(end(jobid)) for ids in target.units.values() for jobid in ids}
    return {jobid: task.result() for jobid, task in ends.items()}


Turns = AbstractAsyncContextManager[object]
"""Held while files are read, where many would do that at the same time."""


async def sealed_before(target: Target, client: Asked, turns: Turns | None = None) -> Sealed | None:
    """What is proven already, if the job has runs and each is sealed. Slurm is asked once, whether it has given the id
    to another job since, or denies it. Raises OSError, Unreadable."""
    async with turns or nullcontext():
        runs = await in_thread(_sealed_runs, target, limit=SEAL_MARGIN)
    if not runs:
        return None
    first = next(iter(runs))
    truth = await verify_job(client, first, False, 0.0)
    if came_again(runs[first][0], truth) or is_denied(runs[first][0], truth):
        return None
    units = {unit: sealed for unit, (_, sealed) in runs.items()}
    return gather(units, target.jobid) if target.array else units[first]


def _sealed_runs(target: Target) -> dict[str, tuple[list[str], Sealed]]:
    """Each unit's runs of its last attempt (where they are usually found, or else where the target says), and what was
    sealed in them; {} when something is not sealed yet."""
    runs = {}
    for unit in target.units:
        found = find_runs(unit) or [path for place in target.places for path in runs_of_job(unit, place)]
        mine = jobs_own([path for path in found if may_be_of_job(path, target.asked)])
        if not mine or (sealed := sealed_already(unit, mine)) is None:
            return {}
        runs[unit] = (mine, sealed)
    return runs


class Wait:
    """One wait. `patience` is the seconds that sealing may wait for an engine to say its last word, and `outage` those
    in which an adopted run's directory may be away; `longest` tells how
    many there may be between two looks while nothing comes. `polls`: the poller is this wait's own, and runs as long as
    it does."""

    def __init__(
        self,
        target: Target,
        follower: Follower,
        teller: Teller,
        *,
        parts: FindParts,
        poller: Poller,
        client: Client,
        alone: JudgeRun | None = None,
        cancel: bool = False,
        patience: float = 30.0,
        outage: float = 0.0,
        drain: float = DRAIN,
        rounds: Rounds | None = None,
        polls: bool = True,
    ) -> None:
        self._target = target
        self._follower = follower
        self._teller = teller
        self._parts = parts
        self._poller = poller
        self._client = client
        self._alone = alone or judge_local
        self._cancel = cancel
        self._patience = patience
        self._outage = outage
        self._missed = False  # the papers of an adopted run
        self._drain = drain
        self._polls = polls
        self._looks = Looks(follower, self._heard, teller.lines, rounds=rounds)
        self._turns = rounds.turns(follower.place) if rounds else None
        self._pending: set[str] = set()  # ids that had not begun when they were last seen
        self._living: set[str] = set()  # ids that Slurm shows, and has not ended
        self._doubt = ""  # why the job may have parts of which nobody told
        self._begun = Flag()  # there is something to follow
        self._leaving = Flag()
        self._over = Flag()  # every run that was found is over
        self._near: list[asyncio.TimerHandle] = []  # when Slurm is asked again
        self._interrupts = 0
        self._cancelling = Flag()

    def interrupt(self) -> None:
        """A person wants to leave: at once, or, with `cancel`, after the job was cancelled and has ended."""
        self._interrupts += 1
        if self._cancel and self._interrupts == 1 and not self._target.alone:
            self._cancelling.set()
        else:
            self._leaving.set()

    async def run(self, timeout: float | None = None) -> Sealed | None:  # noqa: ASYNC109 - past it one leaves, no error
        """What is sealed at the end; None when one left before, or `timeout` seconds have passed. Raises OSError,
        Unreadable, ValueError."""
        try:
            async with asyncio.TaskGroup() as group:
                judging = group.create_task(self._judge())
                leaving = group.create_task(self._leaving.wait())
                helpers = [leaving, *(group.create_task(helper) for helper in self._helpers())]
                try:
                    await asyncio.wait((judging, leaving), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in (judging, *helpers):
                        task.cancel()
                    for timer in self._near:
                        timer.cancel()
        except BaseExceptionGroup as group_of_errors:
            raise first_error(group_of_errors) from None
        return None if judging.cancelled() else judging.result()

    def _helpers(self) -> list[Coroutine[Any, Any, None]]:
        if self._target.alone:
            return [self._look(), *([self._lose_sight()] if self._target.adopted else [])]
        polling = [self._poller.run()] if self._polls else []
        cancelling = [self._cancel_when_asked()] if self._cancel else []
        return [self._look(), *polling, *cancelling]

    async def _look(self) -> None:
        await self._begun.wait()
        await self._looks.run()

    async def _lose_sight(self) -> None:
        (directory,) = self._target.directories
        limits = {"patience": self._patience, "outage": max(self._patience, self._outage)}
        await lose_sight(directory, self._target.start, self._say_missed, **limits)

    def _say_missed(self, text: str, missed: bool) -> None:
        self._missed = missed
        self._teller.say(text)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _judge(self) -> Sealed:
        if before := await sealed_before(self._target, self._client, self._turns):
            return before
        self._begun.set()
        judged = await (self._judge_alone() if self._target.alone else self._judge_job())
        if trouble := await self._looks.drain(self._drain):
            self._teller.say(trouble)
        return judged

    async def _judge_job(self) -> Sealed:
        end = await job_end(self._target, self._poller, self._parts_found, self._seen, self._ended)
        self._target, self._doubt, truths = end
        return await self._sealed(truths, self._patience + SEAL_MARGIN)

    async def _parts_found(self, jobid: str) -> Parts:
        parts = await self._parts(jobid)
        self._teller.has_parts(self._target.of_parts(parts))
        return parts

    def _seen(self, jobid: str, seen: Seen) -> None:
        self._teller.seen(jobid, seen)
        if seen.state:
            (self._pending.add if seen.state == "PENDING" else self._pending.discard)(jobid)
        lives = seen.state and not seen.trouble and liveliness(seen.state) < OVER
        (self._living.add if lives else self._living.discard)(jobid)
        self._looks.wake()

    def _ended(self, jobid: str, truth: Truth) -> None:
        self._teller.ended(jobid, truth)
        self._living.discard(jobid)
        self._looks.wake()

    async def _sealed(self, truths: Mapping[str, Truth], limit: float) -> Sealed:
        """The receipts of all units, and of an array the judgement over them."""
        units = {
            unit: await in_thread(self._seal, unit, [truths[jobid] for jobid in ids], limit=limit)
            for unit, ids in self._target.units.items()
        }
        if not self._target.array:
            return units[self._target.jobid]
        return await in_thread(gather, units, self._target.jobid, self._doubt, limit=limit)

    def _seal(self, unit: str, truths: list[Truth]) -> Sealed:
        """In a thread. Of the runs that were followed those of the last attempt count, as where they are looked for."""
        mine = [run for run in self._follower.runs.values() if run.run_id.partition(".")[0] == unit]
        last = max((attempt_of(run.run_id) for run in mine), default=0)
        ours = [run.directory for run in mine if attempt_of(run.run_id) == last]
        doubts = [self._doubt] if self._doubt and not self._target.array else []
        return seal_job(
            *(unit, truths, self._patience),
            run_dirs=sorted(ours) or None,
            doubts=doubts,
            seen_pending=unit in self._pending,
        )

    async def _judge_alone(self) -> Sealed:
        await self._over.wait()
        return await self._alone(self._target.directories[0])

    # --- what is learned on the way ----------------------------------------------------------------------------------

    def _heard(self, news: News) -> None:
        if self._missed and isinstance(news, Trouble):
            return  # more is said of that
        self._teller.news(news)
        if isinstance(news, Over):
            self._hurry()
            if all(run.over for run in self._follower.runs.values()):
                self._over.set()

    def _hurry(self) -> None:
        """The end of a job is near when its run is over."""
        if not self._target.alone:
            loop = asyncio.get_running_loop()
            self._near += [loop.call_later(seconds, self._poller.hasten) for seconds in NEAR]

    # --- leaving -----------------------------------------------------------------------------------------------------

    async def _cancel_when_asked(self) -> None:
        await self._cancelling.wait()
        await self._cancel_job()
        self._teller.cancelled()
        while True:
            await asyncio.sleep(CANCEL_ANEW)
            if self._living:  # ids come again: one that may be over is left alone
                await self._cancel_job()

    async def _cancel_job(self) -> None:
        """Until Slurm has taken it."""
        said = ""
        while trouble := await self._client.cancel_job(self._target.jobid):
            if trouble != said:
                self._teller.say(f"job {self._target.jobid} could not be cancelled yet: {trouble}")
                said = trouble
            await asyncio.sleep(CANCEL_AGAIN)
        self._poller.hasten()


async def judge_local(directory: str) -> Sealed:
    """What a run without a job says itself. Raises OSError, Unreadable."""
    document, _ = await in_thread(run_document, directory, limit=SEAL_MARGIN)
    return Sealed([document])


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What broke first: the others are its consequences."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
