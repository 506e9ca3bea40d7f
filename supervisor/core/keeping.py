"""An allocation as the service holds it: (state, event) -> (state, duties).

    queued --Admitted--> submitting --SubmissionEnded(submitted) | EngineStarted--> pending
    pending <--StateSeen, RunSeen--> running <--StateSeen--> ending --Sealed, Copied--> ended
    (followed: from Accepted straight to pending)

**Duties, not orders.** What comes with a state is everything that is to be under way in it: submit, settle, follow,
cancel. Whoever carries them out begins those that are not under way, and carries no duty out twice: one that is to be
tried again is another one, for it counts its tries. So a service that was killed at any moment goes on by folding its
book and taking up the duties of the state that it finds; there is no other kind of recovery.

**At most one job.** Submitting has two records. `SubmissionBegun` is on the disk before sbatch runs; a state in which
it has begun and has not ended knows one duty, `Settle`: find out, by the directory that the record names, what came of
it. Only what is proven absent, or never reached the controller, is submitted again, and not for ever. An engine for an
adopted allocation is started by the same rule.

**A cancel is never lost.** Before sbatch runs it ends the allocation at once. While sbatch runs it waits for the answer
(`Hurry` asks for that soon), and what was submitted is then cancelled, every job of it. Until Slurm has taken the
scancel it stays a duty. Only what was submitted here is cancelled: an adopted or followed job is somebody else's.

**Nothing terminal changes**: an event after the end is illegal. An illegal event raises IllegalEvent and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from supervisor.core import codes
from supervisor.core import kept_events as ev
from supervisor.core.events import Event
from supervisor.core.slurm import parse_state

ATTEMPTS: Final = 3
"""So often is a plan submitted of which Slurm knows nothing although sbatch ended in doubt. A controller that was not
reached counts nothing: it is waited for."""

PAUSES: Final = (2.0, 5.0, 15.0, 30.0, 60.0)
"""Seconds before something is tried again; the last one from then on."""


class IllegalEvent(Exception):
    """An event that cannot be, in this state."""

    def __init__(self, state: Kept, event: Event, why: str = "") -> None:
        reason = f": {why}" if why else ""
        super().__init__(f"{event.name} in state {state.phase}{reason}\n  {event!r}\n  {state!r}")
        self.state, self.event = state, event


@dataclass(frozen=True)
class Run:
    """A run of the allocation: its directory, the last line of its journal that was told, and whether it is over."""

    directory: str
    told: int = 0
    over: bool = False


@dataclass(frozen=True)
class Kept:
    """Everything that is known. `phase` is a state of the interface's, or `new`; `units` are the job's parts (itself,
    where it has none) with Slurm's last word for each."""

    phase: str = "new"
    kind: str = ""
    name: str = ""
    given: str = ""
    digest: str = ""
    jobs: tuple[str, ...] = ()
    cluster: str = ""
    directory: str = ""  # of the submission that is under way, or was the last one
    begun: bool = False  # sbatch, or the engine's start, is under way or in doubt
    attempts: int = 0  # submissions that left no job, by those of whom nobody knows why
    unreached: int = 0
    doubts: int = 0  # how often this submission could not be settled
    runs: Mapping[str, Run] = field(default_factory=dict)
    run_id: str = ""  # of the last attempt
    live: bool = False  # that run is of the attempt that Slurm shows
    units: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    pid: int = 0
    unit: str = ""
    stopping: str = ""
    tries: int = 0  # of what is being stopped so
    taken: bool = False  # the stop or the cancel was taken
    verdict: Mapping[str, Any] | None = None
    receipt: str = ""
    first_failure: str = ""
    trouble: str = ""

    @property
    def jobid(self) -> str:
        """The job's id; "" before it is known."""
        return self.jobs[0] if self.jobs else ""

    @property
    def run_dir(self) -> str:
        """The directory of the last attempt's run; "" before it is known."""
        return self.runs[self.run_id].directory if self.run_id in self.runs else ""

    @property
    def slurm(self) -> str:
        """Slurm's word for the job; of several parts, that of the one that lives most."""
        return min(self.units.values(), key=_liveliness, default="")

    @property
    def admitted(self) -> bool:
        """Whether it counts among those that the service has under way. A job that is only followed does not."""
        return self.kind != "followed" and self.phase in ("submitting", "pending", "running", "ending")


# --- duties -----------------------------------------------------------------------------------------------------------


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
    """Let the submission that is under way come to its answer soon."""

    directory: str


@dataclass(frozen=True)
class Start(Duty):
    """Start the engine for an adopted allocation, unless (`again`) it is there already: EngineBegun, then
    EngineStarted or EngineRefused."""

    again: bool


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
    """scancel of all jobs; tell CancelTried."""

    jobs: tuple[str, ...]
    tries: int


@dataclass(frozen=True)
class StopEngine(Duty):
    """Tell the engine of the run to end in order; tell StopTried."""

    run_id: str
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
    StopEngine: "stop",
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
        yield Start(state.begun)
    elif not state.begun:
        yield Submit(state.attempts + state.unreached, after=_pause(state.attempts + state.unreached))
    else:
        yield Settle(state.directory, state.doubts, after=_pause(state.doubts))
        if state.stopping == "cancel":
            yield Hurry(state.directory)


def _to_follow(state: Kept) -> Iterable[Duty]:
    yield Attend(state.run_id) if state.kind == "adopted" else Follow(state.jobid)
    if state.taken:
        return
    after = _pause(state.tries)
    if state.stopping == "cancel":
        yield Cancel(state.jobs, state.tries, after=after)
    if state.stopping == "stop" and state.live and not state.runs[state.run_id].over:
        yield StopEngine(state.run_id, state.tries, after=after)


def _pause(tries: int) -> float:
    return PAUSES[min(tries, len(PAUSES)) - 1] if tries else 0.0


# --- the table --------------------------------------------------------------------------------------------------------

HELD: Final = frozenset({"pending", "running", "ending"})
"""States in which Slurm has it."""
OPEN: Final = frozenset({"queued", "submitting", *HELD})

TABLE: Final[Mapping[type[Event], frozenset[str]]] = {
    ev.Accepted: frozenset({"new"}),
    ev.Admitted: frozenset({"queued"}),
    ev.SubmissionBegun: frozenset({"submitting"}),
    ev.SubmissionEnded: frozenset({"submitting"}),
    ev.EngineBegun: frozenset({"submitting"}),
    ev.EngineStarted: frozenset({"submitting"}),
    ev.EngineRefused: frozenset({"submitting"}),
    ev.StateSeen: HELD,
    ev.RunSeen: HELD,
    ev.RunTold: HELD,
    ev.RunOver: HELD,
    ev.StopAsked: OPEN,
    ev.CancelTried: HELD,
    ev.StopTried: HELD,
    ev.JobEnded: HELD,
    ev.Sealed: HELD,
    ev.Copied: frozenset({"ending"}),
    ev.Troubled: OPEN,
}


def step(state: Kept, event: Event) -> tuple[Kept, tuple[Duty, ...]]:
    """The next state, and all that is to be under way in it. Raises IllegalEvent."""
    allowed = TABLE.get(type(event))
    if allowed is None or state.phase not in allowed:
        raise IllegalEvent(state, event)
    if why := _objection(state, event):
        raise IllegalEvent(state, event, why)
    state = HANDLERS[type(event)](state, event)
    return state, duties(state)


def fold(events: Iterable[Event]) -> Kept:
    """The state after all events. Raises IllegalEvent."""
    state = Kept()
    for event in events:
        state, _ = step(state, event)
    return state


def _objection(state: Kept, event: Event) -> str:
    """Why an event that the table allows cannot be all the same."""
    match event:
        case ev.SubmissionBegun():
            wrong = "one is under way" if state.begun else "nothing is to be submitted" if _is_foreign(state) else ""
        case ev.SubmissionEnded():
            none = event.outcome == "submitted" and not event.jobs
            wrong = "none has begun" if not state.begun or _is_foreign(state) else "no job" if none else ""
        case ev.EngineBegun() | ev.EngineRefused():
            wrong = "" if state.kind == "adopted" else "no engine is ours to start"
        case ev.EngineStarted():
            wrong = "" if state.kind == "adopted" and state.begun else "none has begun to start"
        case ev.RunTold() | ev.RunOver():
            wrong = "" if event.run_id in state.runs else "nobody has seen this run"
            if isinstance(event, ev.RunTold) and not wrong and event.line <= state.runs[event.run_id].told:
                wrong = "told already"
        case ev.StopAsked():
            foreign = event.how == "cancel" and _is_foreign(state)
            asked = state.stopping in (event.how, "cancel")
            late = "it has a verdict" if state.verdict else ""
            wrong = "its job is somebody else's" if foreign else "asked already" if asked else late
        case ev.CancelTried() | ev.StopTried():
            how = "cancel" if isinstance(event, ev.CancelTried) else "stop"
            wrong = "" if state.stopping == how and not state.taken else "nobody asks for it"
        case ev.Sealed():
            wrong = "it has a verdict" if state.verdict else ""
        case ev.Copied():
            wrong = "" if state.verdict else "it has no verdict yet"
        case _:
            wrong = ""
    return wrong


def _is_foreign(state: Kept) -> bool:
    return state.kind != "submitted"


# --- handlers ---------------------------------------------------------------------------------------------------------


def _accepted(state: Kept, event: ev.Accepted) -> Kept:
    return replace(
        state,
        phase="pending" if event.kind == "followed" else "queued",
        kind=event.kind,
        name=event.title,
        given=event.given,
        digest=event.digest,
        jobs=(event.jobid,) if event.jobid else (),
        cluster=event.cluster,
    )


def _begun(state: Kept, event: ev.SubmissionBegun) -> Kept:
    return replace(state, begun=True, doubts=0, directory=event.directory)


def _submission_ended(state: Kept, event: ev.SubmissionEnded) -> Kept:
    if event.outcome == "submitted":
        several = f"it was submitted more than once: jobs {' and '.join(event.jobs)}" if len(event.jobs) > 1 else ""
        cluster = event.cluster or state.cluster
        return replace(
            state, phase="pending", begun=False, jobs=tuple(event.jobs), cluster=cluster, trouble=several, live=False
        )
    if event.outcome == "unknown":
        return replace(state, doubts=state.doubts + 1, trouble=event.words)
    state = replace(state, begun=False)
    if state.stopping == "cancel":
        return _end(state, codes.CANCELLED, "cancelled", "it was cancelled before there was a job")
    if event.outcome == "unreached":
        return replace(state, unreached=state.unreached + 1, trouble=event.words)
    if event.outcome == "absent" and state.attempts + 1 < ATTEMPTS:
        return replace(state, attempts=state.attempts + 1, trouble=event.words)
    if event.outcome == "absent":
        return _end(state, codes.FAILED, "not_submitted", f"nothing was submitted: {event.words}")
    return _end(state, codes.CONFIG, "refused", f"Slurm refused it: {event.words}")


def _engine_started(state: Kept, event: ev.EngineStarted) -> Kept:
    runs = {**state.runs, event.run_id: Run(event.run_dir)}
    return replace(
        state,
        phase="running",
        begun=False,
        runs=runs,
        run_id=event.run_id,
        live=True,
        pid=event.pid,
        unit=event.unit,
        trouble="",
    )


def _engine_refused(state: Kept, event: ev.EngineRefused) -> Kept:
    return _end(replace(state, begun=False), event.code, "not_started", f"its engine was not started: {event.words}")


def _state_seen(state: Kept, event: ev.StateSeen) -> Kept:
    word = event.slurm or state.units.get(event.jobid, "")
    units = {**state.units, event.jobid: word}
    waits = parse_state(word).phase == "waiting" if word else False
    return _placed(replace(state, units=units, reason=event.reason, live=state.live and not waits))


def _run_seen(state: Kept, event: ev.RunSeen) -> Kept:
    known = state.runs.get(event.run_id, Run(event.run_dir))
    runs = {**state.runs, event.run_id: replace(known, directory=event.run_dir)}
    return _placed(replace(state, runs=runs, run_id=event.run_id, live=True))


def _run_told(state: Kept, event: ev.RunTold) -> Kept:
    return _run(state, event.run_id, told=event.line)


def _run_over(state: Kept, event: ev.RunOver) -> Kept:
    return _run(state, event.run_id, over=True)


def _run(state: Kept, run_id: str, **changed: Any) -> Kept:
    return replace(state, runs={**state.runs, run_id: replace(state.runs[run_id], **changed)})


def _job_ended(state: Kept, event: ev.JobEnded) -> Kept:
    units = {**state.units, event.jobid: event.slurm} if event.slurm else state.units
    return _placed(replace(state, units=units))


def _placed(state: Kept) -> Kept:
    """In the state that Slurm's words and the runs that were seen amount to."""
    if state.kind == "adopted":
        return state
    alive = _liveliness(state.slurm)
    return replace(state, phase="ending" if alive == _OVER else "running" if state.live else "pending")


def _liveliness(word: str) -> int:
    """How much a job in this state lives: 0 most. Nothing is concluded from a word that nobody knows."""
    phase = parse_state(word).phase if word else "unknown"
    return {"running": 0, "waiting": 1, "ending": _OVER, "ended": _OVER}.get(phase, 0)


_OVER: Final = 2


def _stop_asked(state: Kept, event: ev.StopAsked) -> Kept:
    state = replace(state, stopping=event.how, tries=0, taken=False)
    if state.phase == "queued" or (state.phase == "submitting" and not state.begun):
        return _end(state, codes.CANCELLED, "cancelled", "it was cancelled before there was a job")
    return state


def _tried(state: Kept, event: ev.CancelTried | ev.StopTried) -> Kept:
    if event.trouble:
        return replace(state, tries=state.tries + 1, trouble=event.trouble)
    return replace(state, taken=True, trouble="")


def _sealed(state: Kept, event: ev.Sealed) -> Kept:
    return replace(
        state,
        phase="ending",
        verdict=event.verdict,
        receipt=event.receipt,
        first_failure=event.first_failure,
        trouble="",
    )


def _copied(state: Kept, event: ev.Copied) -> Kept:
    return replace(state, phase="ended", trouble="; ".join(event.trouble))


def _end(state: Kept, code: int, reason: str, summary: str) -> Kept:
    """The end of what never became a job or a run."""
    verdict = {"outcome": "failure", "code": code, "origin": "allocd", "reason": reason, "summary": summary}
    return replace(state, phase="ended", verdict=verdict, trouble="")


HANDLERS: Final[Mapping[type[Event], Callable[[Kept, Any], Kept]]] = {
    ev.Accepted: _accepted,
    ev.Admitted: lambda state, _: replace(state, phase="submitting"),
    ev.SubmissionBegun: _begun,
    ev.SubmissionEnded: _submission_ended,
    ev.EngineBegun: lambda state, _: replace(state, begun=True),
    ev.EngineStarted: _engine_started,
    ev.EngineRefused: _engine_refused,
    ev.StateSeen: _state_seen,
    ev.RunSeen: _run_seen,
    ev.RunTold: _run_told,
    ev.RunOver: _run_over,
    ev.StopAsked: _stop_asked,
    ev.CancelTried: _tried,
    ev.StopTried: _tried,
    ev.JobEnded: _job_ended,
    ev.Sealed: _sealed,
    ev.Copied: _copied,
    ev.Troubled: lambda state, event: replace(state, trouble=event.text),
}
