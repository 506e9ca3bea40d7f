"""One poller a cluster: it follows any number of jobs, each to the truth about its end, with few questions.

    poller = Poller(client)
    async with asyncio.TaskGroup() as group:
        polling = group.create_task(poller.run())
        follow = poller.follow("123", changed=print)
        truth = await follow.end()
        polling.cancel()

Slurm's controller is one process that serves everybody, so its questions are put by one loop, one after another: never
two at the same time, and never one for each job where one for all will do. A job is in one of two states here:

- **living**: squeue shows all of these in one call. The interval is one for all of them, for it costs the same to ask
  about one: `Pace.fast` after a change of any, then ever longer, `Pace.slow` at most. A change is another state, reason
  or restart count; a new follow or `hasten()` begins anew at the fast end.
- **examined**: squeue shows that it has ended (or is ending), does not show it, or could not be asked. That proves
  nothing, so the two books are read until `decide` has settled it: one sacct for all of these together, one
  scontrol for each, at the pauses of its `Inquiry`. A job whose time is nearly up is taken along when another's is up.
  Accounting is a tenth of a second late as a rule; it gets `Pace.late` before the controller is asked. A job that
  squeue, which speaks for the controller, and accounting both call COMPLETED needs no scontrol.
  Where accounting has been read twice it may settle an end without the controller; `decide` knows which ends.

A job that lives after all is followed on. If it has been started anew (PREEMPTED, NODE_FAIL, `scontrol requeue`), it is
examined once while it lives: then a record of the living incarnation is among its answers, and accounting's end of the
one before is known for history, also when the controller goes away.

**While the controller is away** a question costs its whole deadline. One scontrol that fails counts for all jobs of the
round, each gets that failure as its evidence; the next round begins with one squeue for all, which shows when the
controller is back. Silence proves nothing, so it is waited out with pauses that grow (`Inquiry`), up to `Pace.outage`.

A follow that has ended is forgotten here; its truth never changes.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from supervisor.core.answers import Answer
from supervisor.core.slurm_queue import QueueRow
from supervisor.core.truth import Truth
from supervisor.loop.flag import Flag
from supervisor.scheduler.client import Queue
from supervisor.scheduler.inquiry import USUAL, Inquiry, Pace

_BACKOFF: Final = 2.0
"""The interval grows by this factor while squeue fails, up to `Pace.away`."""


class Asked(Protocol):
    """What a poller needs of a Slurm client."""

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs."""

    async def accounting(self, jobids: Collection[str]) -> Mapping[str, Answer]:
        """What accounting says about each of them."""

    async def show_job(self, jobid: str) -> Answer:
        """What the controller says about one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What Slurm last showed of a job: its state's word ("" before the first answer), why it waits, how often it was
    started anew, when (`at`: UTC in ISO 8601); and the `trouble` that keeps Slurm from being asked now, or "".
    """

    state: str = ""
    reason: str = ""
    restarts: int | None = None
    at: str = ""
    trouble: str = ""


Changed = Callable[[Seen], object]


class Follow:
    """One job that is followed to its end. Made by `Poller.follow`."""

    def __init__(self, poller: Poller, inquiry: Inquiry, changed: Changed | None) -> None:
        self.jobid = inquiry.jobid
        self.seen = Seen()
        self.truth: Truth | None = None
        self.inquiry = inquiry
        self.due: float | None = None  # when to examine it next; None: it lives, as far as is known
        self.row: QueueRow | None = None  # what squeue showed last, and when
        self.row_at = 0.0
        self.incarnation: int | None = 0  # restart count of the controller's record among the answers, if one is needed
        self._poller = poller
        self._changed = changed
        self._ended = Flag()

    @property
    def lives(self) -> bool:
        """Whether squeue showed it last as one that neither ends nor has ended."""
        return self.row is not None and self.row.state.phase not in ("ending", "ended")

    async def end(self) -> Truth:
        """The truth about the job's end, or the doubt that lasted too long; waits for it. Any number may wait."""
        await self._ended.wait()
        if self.truth is None:
            raise AssertionError("a follow that has ended has a truth")
        return self.truth

    def close(self) -> None:
        """Follow it no longer. Whoever waits for its end waits in vain."""
        self._poller.forget(self)

    def show(self, seen: Seen) -> bool:
        """Take note of what is seen now, and tell the follower of a change. Returns whether the job has changed: that
        Slurm cannot be asked, or answers again, is no reason to ask it more often."""
        before, self.seen = self.seen, seen
        if self._changed is not None and replace(before, at="") != replace(seen, at=""):
            self._changed(seen)
        return replace(before, at="", trouble="") != replace(seen, at="", trouble="")

    def settle(self, truth: Truth) -> None:
        """The end, once."""
        if self.truth is None:
            self.truth = truth
            self._ended.set()


class Poller:
    """See the top. Times are those of `clock`, in seconds; `jitter` gives numbers of 0..1. Another `pace` counts at
    once; its patience and outage for jobs that are followed from then on."""

    def __init__(
        self,
        client: Asked,
        *,
        pace: Pace = USUAL,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self.pace = pace
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._follows: list[Follow] = []
        self._woken = asyncio.Event()
        self._running = False
        self._fault = ""
        self._interval = pace.fast
        self._asked_at = -math.inf  # when squeue last answered
        self._queue_due = -math.inf
        self._hurried = False
        self._failing = False  # squeue's last answer was none
        self._away = False  # scontrol's

    def follow(self, jobid: str, changed: Changed | None = None) -> Follow:
        """Follow a job, array task or component by its display id; `changed` is called at each change of what is seen.

        Raises `ValueError` for a malformed id.
        """
        inquiry = Inquiry(jobid, self.pace, self._clock(), patience=self.pace.patience, outage=self.pace.outage)
        follow = Follow(self, inquiry, changed)
        self._follows.append(follow)
        self.hasten()
        return follow

    def forget(self, follow: Follow) -> None:
        """Follow a job no longer."""
        if follow in self._follows:
            self._follows.remove(follow)

    def hasten(self) -> None:
        """Something suggests that a job has just changed: ask squeue as soon as may be, and often from then on. Trouble
        is given its time."""
        self._hurried = True
        if not self._failing:
            self._interval = self.pace.fast
            self._queue_due = min(self._queue_due, self._asked_at + self.pace.closest)
        self._woken.set()

    async def run(self) -> None:
        """Put the questions until cancelled. One at a time: a second call while one runs raises `RuntimeError`."""
        if self._running:
            raise RuntimeError("this poller runs already, and it puts one question at a time")
        self._running = True
        try:
            while True:
                await self._rest()
                await self._round()
                self._fault = ""
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._running = False

    @property
    def fault(self) -> str:
        """What broke the last round, or "". One that nothing is followed by has none."""
        return self._fault if self._follows else ""

    # --- when ---

    async def _rest(self) -> None:
        """Wait until something is due."""
        while (pause := self._next() - self._clock()) > 0:
            waits = [asyncio.create_task(self._woken.wait(), name="poller is woken")]
            if pause < math.inf:
                waits.append(asyncio.create_task(self._slept(pause), name="poller sleeps"))
            try:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
            for wait in done:
                wait.result()
            self._woken.clear()

    async def _slept(self, seconds: float) -> Literal[True]:
        await self._sleep(seconds)
        return True

    def _next(self) -> float:
        return min((self._queue_due if f.due is None else f.due for f in self._follows), default=math.inf)

    def _later(self, seconds: float) -> float:
        """That time from now, with jitter, so that many pollers do not march in step."""
        return self._clock() + seconds * (0.75 + self._jitter() / 2)

    def _examined(self) -> list[Follow]:
        """What is to be examined now: what is due, and what would be within half of its pause."""
        now = self._clock()
        return [f for f in self._follows if f.due is not None and f.due - f.inquiry.pause / 2 <= now]

    # --- what ---

    async def _round(self) -> None:
        living = [f for f in self._follows if f.due is None] if self._clock() >= self._queue_due else []
        if asked := living + (self._examined() if self._away else []):
            await self._ask_queue(asked)
        if due := self._examined():
            await self._examine(due)

    async def _ask_queue(self, asked: Sequence[Follow]) -> None:
        """One squeue for these jobs. Whoever does not live by it is to be examined now."""
        self._hurried = False
        queue = await self._client.queue(sorted({f.jobid for f in asked}))
        now = self._asked_at = self._clock()
        if queue.problem:
            for f in asked:
                f.due = now
            self._interval = min(max(self._interval, self.pace.fast) * _BACKOFF, self.pace.away)
            self._queue_due = self._later(self._interval)
            self._failing = True
            return
        changed = [self._note(f, queue.rows.get(f.jobid), queue.at) for f in asked]
        if any(changed) or self._failing:
            self._interval = self.pace.fast
        else:
            self._interval = min(self._interval * self.pace.slower, self.pace.slow)
        self._queue_due = self._later(self._interval)
        self._failing = self._away = False
        if self._hurried:  # while the question was on its way
            self.hasten()

    def _note(self, f: Follow, row: QueueRow | None, at: str) -> bool:
        """Take in what squeue shows of a job; whether that is a change."""
        now = self._clock()
        f.row, f.row_at = row, now
        if f.lives:
            f.inquiry.lived(now)
        asks = not f.lives or (row is not None and row.restarts not in (None, f.incarnation))
        f.due = now if asks else None
        trouble = f.seen.trouble if asks else ""  # the other books' words: they are asked now, and say whether it lasts
        if row is None:
            return f.show(replace(f.seen, at=at, trouble=trouble))
        return f.show(Seen(row.state.word, row.reason, row.restarts, at, trouble))

    async def _examine(self, due: Sequence[Follow]) -> None:
        """Read both books about these jobs, accounting's in one call."""
        books = await self._client.accounting(sorted({f.jobid for f in due}))
        away: Answer | None = None
        for f in due:
            new = [books[f.jobid]]
            if self._late(f, new[0]):
                f.due = self._later(self.pace.first)
                continue
            if away is not None:
                new.append(replace(away, jobid=f.jobid))
            elif f in self._follows and not _success(f, new[0]):
                new.append(live := await self._client.show_job(f.inquiry.controllers_id(new)))
                self._away = live.outcome == "failed" and live.returncode != 0  # and not merely unreadable
                if self._away:
                    away = live
                    # Should this job alone be the trouble, the others come before it next time.
                    self._follows = [*(other for other in self._follows if other is not f), f]
            if f in self._follows:  # and was not closed meanwhile
                self._judge(f, new)

    def _late(self, f: Follow, book: Answer) -> bool:
        """Whether accounting gets a moment more to tell of the end that squeue has shown."""
        if book.outcome == "failed" or (book.record is not None and book.record.terminal):
            return False
        return f.row is not None and f.row.state.terminal and self._clock() - f.row_at < self.pace.late

    def _judge(self, f: Follow, new: Sequence[Answer]) -> None:
        """What one round of answers makes of a job: settled, followed on, or to be examined again."""
        now = self._clock()
        truth = f.inquiry.hear(new, now)
        changed = f.show(_seen(f.seen, new))
        if f.inquiry.over:
            self.forget(f)
            f.settle(truth)
        elif f.inquiry.heard == "life":
            f.due = None
            f.incarnation = f.seen.restarts
            if changed:
                self.hasten()
        elif f.inquiry.heard == "silence" and f.lives and not self._failing:
            f.due = f.incarnation = None  # its record is asked for again with squeue's next round
        else:
            f.incarnation = None
            f.due = self._later(f.inquiry.pause)


def _seen(before: Seen, new: Sequence[Answer]) -> Seen:
    """What these answers show: the controller's, or accounting's where it tells of an end or is the first to tell
    anything (of what lives it knows less than squeue has shown)."""
    problems = "; ".join(f"{answer.source}: {answer.problem}" for answer in new if answer.outcome == "failed")
    said = [a for a in new if a.record and (a.source == "scontrol" or a.record.terminal or not before.state)]
    if not said or (record := said[-1].record) is None:
        return replace(before, trouble=problems)
    restarts = before.restarts if record.restarts is None else record.restarts
    reason = before.reason if record.state.word == before.state else ""
    return Seen(record.state.word, reason, restarts, said[-1].at, problems)


def _success(f: Follow, book: Answer) -> bool:
    """Whether squeue and accounting tell the same success."""
    record = book.record
    both = f.row is not None and record is not None and f.row.state.word == record.state.word == "COMPLETED"
    return both and record is not None and record.terminal and record.exit.zero
