"""Ask Slurm about one job until the truth is settled, or until the patience for a doubt is used up.

A round asks accounting, then the controller; `core.truth.decide` judges all answers so far. Rounds follow
each other quickly at first (an end is believed at its second reading) and ever more slowly, with jitter, so
that many waiting clients do not march in step. While the controller says that the job lives, only the
controller is asked: that costs 6 ms, against 50 to 90 ms and a database query for sacct.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from supervisor.core.answers import Answer
from supervisor.core.slurm import parse_job_id
from supervisor.core.truth import Truth, decide

KEPT: Final = 24
"""Answers that are kept, so that a wait of days does not grow; confirmation looks at the last few only."""

FINAL: Final = ("settled", "elsewhere", "several")
"""Standings that asking again cannot change."""


class Asked(Protocol):
    """What a verification needs of a Slurm client."""

    async def sacct(self, jobid: str) -> Answer:
        """What accounting says."""

    async def show_job(self, jobid: str) -> Answer:
        """What the controller says."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Pauses between rounds in seconds: the first, the factor, the longest; and when absence is believed.

    A job is absent when every round of `absence` seconds (or of the whole patience, if that is shorter), and
    at least `absence_rounds` of them, got a valid answer without it from both books.
    """

    first: float = 0.2
    factor: float = 1.6
    longest: float = 5.0
    absence: float = 10.0
    absence_rounds: int = 3


async def verify_job(
    client: Asked,
    jobid: str,
    wait: bool,
    timeout: float,  # noqa: ASYNC109 - no cancel scope: past it the doubt itself is the answer
    *,
    limit: float | None = None,
    pace: Pace = Pace(),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    jitter: Callable[[], float] = random.random,
) -> Truth:
    """The truth about `jobid`, or a doubt with its reason; Slurm's trouble never raises.

    A job that is not over is a doubt of standing "running", returned at once unless `wait`; with `wait` it is
    followed until it ends, at most `limit` seconds (None: however long). Any other doubt is examined again
    for `timeout` seconds, counted from the last time that Slurm said the job lives.

    Raises `ValueError` for a malformed id.
    """
    begun = doubting = clock()
    pause, lived = pace.first, False
    answers: list[Answer] = []
    absence = _Absence(pace, timeout)
    while True:
        new = await _round(client, jobid, answers)
        answers = _trim([*answers, *new])
        truth = decide(jobid, answers)
        now = clock()
        if truth.standing in FINAL or absence.believed(new, now):
            return truth
        left = [] if limit is None else [limit - (now - begun)]
        if truth.standing == "running":
            if not wait:
                return truth
            answers, doubting = _essence(answers), now
            lived = True
        else:
            if lived:  # its end may be a moment old: look closely again
                lived, pause = False, pace.first
            left.append(timeout - (now - doubting))
        if min(left, default=1.0) <= 0:
            return truth
        await sleep(min([pause * (0.75 + jitter() / 2), *left]))
        pause = min(pause * pace.factor, pace.longest)


class _Absence:
    """An unbroken run of rounds in which both books answered without the job."""

    def __init__(self, pace: Pace, timeout: float) -> None:
        self._rounds = 0
        self._since = 0.0
        self._needed = pace.absence_rounds
        self._seconds = min(pace.absence, timeout)

    def believed(self, new: Sequence[Answer], now: float) -> bool:
        """Count one more round; whether the run is long enough, in rounds and in seconds."""
        if any(answer.outcome != "absent" for answer in new):
            self._rounds = 0
            return False
        if self._rounds == 0:
            self._since = now
        self._rounds += 1
        return self._rounds >= self._needed and now - self._since >= self._seconds


async def _round(client: Asked, jobid: str, answers: Sequence[Answer]) -> list[Answer]:
    """Ask once more; accounting is left out while the controller keeps saying that the job lives."""
    lived = any(_lives(a) for a in answers[-1:])
    new: list[Answer] = []
    if not lived:
        new.append(await client.sacct(jobid))
    new.append(await client.show_job(_controllers_id(jobid, [*answers, *new])))
    if lived and not _lives(new[-1]):
        new.append(await client.sacct(jobid))
    return new


def _lives(answer: Answer) -> bool:
    """Whether the controller said that the job is neither over nor about to be."""
    record = answer.record
    return record is not None and answer.source == "scontrol" and record.state.phase not in ("ended", "ending")


def _controllers_id(jobid: str, answers: Sequence[Answer]) -> str:
    """The id to ask the controller for: a plain id may be a whole array's or a heterogeneous job's there, and
    it would print every part; accounting knows which part has that id.
    """
    for answer in reversed(answers):
        if answer.record is not None and answer.source == "sacct":
            try:
                return parse_job_id(answer.record.display).allocation
            except ValueError:  # 12_[3-5]: tasks that have no record of their own yet
                return jobid
    return jobid


def _essence(answers: Sequence[Answer]) -> list[Answer]:
    """What each book said last, enough to go on from while a job lives."""
    last = {a.source: a for a in answers if a.outcome != "failed"}
    return [a for a in answers if a is last.get(a.source)]


def _trim(answers: list[Answer]) -> list[Answer]:
    """At most `KEPT` answers: the newest, and of the older ones the last that say something."""
    recent = answers[-(KEPT - 4) :]
    older = [a for a in answers[: -(KEPT - 4)] if a.outcome != "failed"]
    return older[-4:] + recent
