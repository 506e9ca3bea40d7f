"""One job that may be over: hear answer after answer until its truth is settled, or until the doubt has lasted.

What is asked, and when, is the caller's trade (`verify.py` asks about one job, `poller.py` about many in one call);
what the answers mean is for `decide` to say (`core/two_books.py`). Between the two stands an `Inquiry`: it keeps the
answers, says how long to pause before the next ones, and when it is over. Each round of answers is one of three things:

- **life**: Slurm says that the job is not over. Every clock begins again.
- **doubt**: Slurm answered, and its answers prove nothing yet (an end that was read once, books that differ, a job that
  nobody knows). Readings follow each other quickly, for accounting is a tenth of a second late; a doubt that has lasted
  `patience` seconds is the answer. It begins with the first answer, however long that was waited for.
- **silence**: Slurm could not be asked. That says nothing about the job, so it uses up no patience where `outage`
  seconds are given for it; pauses grow to `Pace.away`, for a controller in trouble is not helped by questions.

Absence is believed by an unbroken run of rounds alone. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.core.answers import Answer
from supervisor.core.slurm import parse_job_id
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide

KEPT: Final = 24
"""Answers that are kept, so that a wait of days does not grow; confirmation looks at the last few only."""

FINAL: Final = ("settled", "elsewhere", "several")
"""Standings that asking again cannot change."""

_OFF: Final = re.compile(r"accounting storage is disabled|cannot be started")
"""A failure that waiting does not mend: no accounting on this cluster, no such command on this machine."""

Heard = Literal["life", "doubt", "silence"]


@dataclass(frozen=True, slots=True)
class Pace:
    """When questions are put, in seconds.

    Of a job that may be over: pauses begin at `first` and grow by `factor` up to `longest`, up to `away` while Slurm
    cannot be asked. It is absent when every round of `absence` seconds (or of the whole patience, if that is shorter),
    and at least `absence_rounds` of them, got a valid answer without it from both books. `patience` and `outage` limit
    doubt and silence.

    Of the jobs that live (the poller): an interval of `fast` after a change, growing by `slower` up to `slow`;
    `closest` is the least time between two questions, whoever is in a hurry. An end in squeue waits at most `late` for
    accounting to tell of it too.
    """

    first: float = 0.2
    factor: float = 1.6
    longest: float = 5.0
    absence: float = 10.0
    absence_rounds: int = 3
    patience: float = 30.0
    outage: float = 1800.0
    away: float = 60.0
    fast: float = 1.0
    slower: float = 1.5
    slow: float = 30.0
    closest: float = 0.25
    late: float = 1.0


USUAL: Final = Pace()


class Inquiry:
    """What was heard about one job, and what that makes of the next question.

    `patience` is in seconds of doubt; `outage` in seconds of silence, None to count silence as doubt. `now` is the time
    of the beginning on the clock that `hear` is told. Raises `ValueError` for a malformed id.
    """

    def __init__(self, jobid: str, pace: Pace, now: float, *, patience: float, outage: float | None = None) -> None:
        parse_job_id(jobid)
        self.jobid = jobid
        self.answers: list[Answer] = []
        self.pause = pace.first  # until the next question
        self.heard: Heard | None = None
        self._pace = pace
        self._outage = outage
        self._limits: dict[Heard, float] = {"doubt": patience, "silence": patience if outage is None else outage}
        self._spent: dict[Heard, float] = {"doubt": 0.0, "silence": 0.0}
        self._at = now
        self._grown = pace.first
        self._absence = _Absence(pace, patience)
        self._final = False

    def hear(self, new: Sequence[Answer], now: float) -> Truth:
        """Take in one round of answers, in the order in which they were given; what they prove so far."""
        self.answers = _trim([*self.answers, *new])
        truth = decide(self.jobid, self.answers)
        heard = self._meaning(truth, new)
        if heard == "life":
            self.lived(now)
        elif self.heard in ("doubt", "silence"):  # the time since then belongs to what was heard then
            self._spent[self.heard] += now - self._at
        if self.heard == "life" != heard:  # its end may be a moment old: look closely
            self._grown = self._pace.first
        self._at, self.heard = now, heard
        longest = self._pace.away if heard == "silence" and self._outage is not None else self._pace.longest
        self.pause = min(self._grown, longest)
        self._grown = self.pause * self._pace.factor
        self._final = truth.standing in FINAL or self._absence.believed(new, now)
        return truth

    def lived(self, now: float) -> None:
        """Somebody has seen the job alive: doubts are forgotten, and only what each book said last is kept."""
        self.answers = _essence(self.answers)
        self._spent = {"doubt": 0.0, "silence": 0.0}
        self._at, self.heard = now, "life"

    @property
    def left(self) -> float:
        """Seconds that the present doubt or silence may still last."""
        return math.inf if self.heard in (None, "life") else min(self._limits[k] - self._spent[k] for k in self._limits)

    @property
    def over(self) -> bool:
        """Whether the truth that `hear` returned last is the answer: it cannot change, or the doubt lasted too long."""
        return self._final or self.left <= 0

    def controllers_id(self, new: Sequence[Answer] = ()) -> str:
        """The id to ask the controller for: a plain id may be a whole array's or a heterogeneous job's there, and it
        would print every part; accounting (`new`: what it has just said) knows which part has that id.
        """
        for answer in reversed([*self.answers, *new]):
            if answer.record is not None and answer.source == "sacct":
                try:
                    return parse_job_id(answer.record.display).allocation
                except ValueError:  # 12_[3-5]: tasks that have no record of their own yet
                    return self.jobid
        return self.jobid

    def _meaning(self, truth: Truth, new: Sequence[Answer]) -> Heard:
        failed = silent(new)
        if self._outage is None:
            return "life" if truth.standing == "running" else "doubt"
        # Accounting goes on saying RUNNING when the controller that would tell it otherwise is gone.
        if truth.standing == "running" and "scontrol" not in failed:
            return "life"
        return "silence" if failed else "doubt"


def silent(answers: Sequence[Answer]) -> set[str]:
    """The books that could not be asked, and may be later."""
    return {answer.source for answer in answers if answer.outcome == "failed" and not _OFF.search(answer.problem)}


class _Absence:
    """An unbroken run of rounds in which both books answered without the job."""

    def __init__(self, pace: Pace, patience: float) -> None:
        self._rounds = 0
        self._since = 0.0
        self._needed = pace.absence_rounds
        self._seconds = min(pace.absence, patience)

    def believed(self, new: Sequence[Answer], now: float) -> bool:
        """Count one more round; whether the run is long enough, in rounds and in seconds."""
        if any(answer.outcome != "absent" for answer in new):
            self._rounds = 0
            return False
        if self._rounds == 0:
            self._since = now
        self._rounds += 1
        return self._rounds >= self._needed and now - self._since >= self._seconds


def _essence(answers: Sequence[Answer]) -> list[Answer]:
    """What each book said last, enough to go on from while a job lives."""
    last = {a.source: a for a in answers if a.outcome != "failed"}
    return [a for a in answers if a is last.get(a.source)]


def _trim(answers: list[Answer]) -> list[Answer]:
    """At most `KEPT` answers: the newest, and of the older ones the last that say something, from each book."""
    older, recent = answers[: -(KEPT - 5)], answers[-(KEPT - 5) :]
    said = [a for a in older if a.outcome != "failed"]
    last = {a.source: place for place, a in enumerate(said)}
    return [a for place, a in enumerate(said) if place >= len(said) - 3 or place == last[a.source]] + recent
