"""What is to be under way for an allocation that the service holds, in each of its states; `keeping.py` says why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from supervisor.core.kept import HELD, Kept

PAUSES: Final = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before something is tried again; the last one from then on."""
AGAIN: Final = 60.0
"""Seconds until a scancel that Slurm has taken is sent again, as long as the job lives; ever more, to an hour."""


@dataclass(frozen=True)
class Duty:
    """Something that is to be under way. Of the duties of one slot one is carried out at a time. `after`: seconds to
    wait before."""

    after: float = field(default=0.0, kw_only=True)

    @property
    def slot(self) -> str:
        return SLOTS[type(self)]


@dataclass(frozen=True)
class Submit(Duty):
    """Make the order, tell SubmissionBegun, run sbatch, tell SubmissionEnded."""

    attempt: int


@dataclass(frozen=True)
class Settle(Duty):
    """Find out what came of the submission in the directory; tell SubmissionEnded."""

    directory: str
    doubts: int


@dataclass(frozen=True)
class Hurry(Duty):
    """Let the submission, or the engine's start, that is under way come to its answer soon."""

    directory: str


@dataclass(frozen=True)
class Start(Duty):
    """Start the engine for an adopted allocation, unless it is there already: EngineBegun, then EngineStarted or
    EngineRefused."""


@dataclass(frozen=True)
class Follow(Duty):
    """Follow the job and its runs to the proven end: StateSeen, RunSeen, RunTold, RunOver, JobEnded, Sealed."""

    jobid: str


@dataclass(frozen=True)
class Attend(Duty):
    """The same for an engine of ours in somebody else's allocation: to the end of its run."""

    run_id: str


@dataclass(frozen=True)
class Cancel(Duty):
    """scancel of these jobs and tasks, after so many that were `sent`; tell CancelTried."""

    jobs: tuple[str, ...]
    sent: int
    tries: int


@dataclass(frozen=True)
class CancelAgain(Duty):
    """scancel of what lives although Slurm has taken one (`Kept.uncancelled`, as it is then); tell CancelTried."""

    sent: int
    tries: int


@dataclass(frozen=True)
class StopEngines(Duty):
    """Tell the engines of the runs that are to end (`Kept.to_stop`, as it is then) to end in order, each once; tell
    StopTried. It is another duty when one was told (`told` counts them), not when one more is to be: a pause after a
    failure does not begin anew with each task that starts."""

    told: int
    tries: int


@dataclass(frozen=True)
class Copy(Duty):
    """Copy what the runs left; tell Copied."""


SLOTS: Final[dict[type[Duty], str]] = {
    Submit: "start",
    Settle: "start",
    Start: "start",
    Hurry: "hurry",
    Follow: "follow",
    Attend: "follow",
    Cancel: "cancel",
    CancelAgain: "cancel",
    StopEngines: "stop",
    Copy: "copy",
}


def duties(state: Kept) -> tuple[Duty, ...]:
    """Everything that is to be under way."""
    if state.phase == "submitting":
        return tuple(_to_start(state))
    if state.phase in HELD and state.verdict is None:
        return tuple(_to_follow(state))
    return (Copy(),) if state.phase == "ending" else ()


def _to_start(state: Kept) -> Iterable[Duty]:
    if state.kind == "adopted":
        yield Start()
        if state.stopping:
            yield Hurry(state.directory)
    elif not state.begun:
        yield Submit(state.attempts + state.unreached, after=_pause(state.attempts + state.unreached))
    else:
        yield Settle(state.directory, state.doubts, after=_pause(state.doubts))
        if state.stopping == "cancel":
            yield Hurry(state.directory)


def _to_follow(state: Kept) -> Iterable[Duty]:
    yield Attend(state.run_id) if state.kind == "adopted" else Follow(state.jobid)
    after = _pause(state.tries)
    if to_cancel := state.to_cancel:
        yield Cancel(to_cancel, state.cancels, state.tries, after=after)
    elif state.uncancelled:
        yield CancelAgain(state.cancels, state.tries, after=after or AGAIN * min(state.cancels, 60))
    if state.to_stop:
        yield StopEngines(sum(run.stopped for run in state.runs.values()), state.tries, after=after)


def _pause(tries: int) -> float:
    return PAUSES[min(tries, len(PAUSES)) - 1] if tries else 0.0
