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
scancel it stays a duty; one that had no effect is sent again, after a minute or when somebody asks again. Only what was
submitted here is cancelled: an adopted or followed job is somebody else's.

**A stop reaches every run**: each engine is told once, that of every task of an array, of those that begin later and of
the attempt after a requeue. A task of an array can be ended by itself.

**Nothing terminal changes**: an event after the end is illegal. An illegal event raises IllegalEvent and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from supervisor.core import codes
from supervisor.core import kept_events as ev
from supervisor.core.duties import Duty, duties
from supervisor.core.events import Event
from supervisor.core.kept import HELD, OVER, Kept, Run, liveliness, unit_of
from supervisor.core.layout import RECEIPT
from supervisor.core.slurm import parse_state

ATTEMPTS: Final = 3
"""So often is a plan submitted of which Slurm knows nothing although sbatch ended in doubt. A controller that was not
reached counts nothing: it is waited for."""


class IllegalEvent(Exception):
    """An event that cannot be, in this state."""

    def __init__(self, state: Kept, event: Event, why: str = "") -> None:
        reason = f": {why}" if why else ""
        super().__init__(f"{event.name} in state {state.phase}{reason}\n  {event!r}\n  {state!r}")
        self.state, self.event = state, event


# --- the table --------------------------------------------------------------------------------------------------------

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


def of_task(state: Kept, task: str) -> Kept:
    """What is known of one task of an array. Its verdict is not: the sealed receipt in its run's directory tells."""
    runs = {run_id: run for run_id, run in state.runs.items() if unit_of(run_id) == task}
    run_id = next(reversed(runs), "")
    found = replace(
        state,
        units={name: word for name, word in state.units.items() if name == task},
        runs=runs,
        run_id=run_id,
        stopping=state.asked(task),
        parts={},
        verdict=None,
        receipt=f"{runs[run_id].directory}/{RECEIPT}" if run_id and state.verdict else "",
        first_failure="",
    )
    return _placed(found) if state.phase in HELD else found


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
            asked = state.is_asked(event.how, event.part)
            late = "it has a verdict" if state.verdict else ""
            strange = "" if not event.part or state.has_part(event.part) else "nobody has seen this part"
            wrong = "its job is somebody else's" if foreign else "asked already" if asked else late or strange
        case ev.CancelTried():
            wrong = "" if "cancel" in (state.stopping, *state.parts.values()) else "nobody asks for it"
        case ev.StopTried():
            run = state.runs.get(event.run_id or state.run_id)
            asked = "stop" in (state.stopping, *state.parts.values())
            wrong = "" if asked and run and (event.trouble or not run.stopped) else "nobody asks for it"
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
        return replace(state, phase="pending", begun=False, jobs=tuple(event.jobs), cluster=cluster, trouble=several)
    if event.outcome == "unknown":
        return replace(state, doubts=state.doubts + 1, trouble=event.words)
    state = replace(state, begun=False)
    if state.stopping:
        return _end(state, codes.CANCELLED, "cancelled", "it was cancelled before there was a job")
    if event.outcome == "unreached":
        return replace(state, unreached=state.unreached + 1, trouble=event.words)
    if event.outcome == "absent" and state.attempts + 1 < ATTEMPTS:
        return replace(state, attempts=state.attempts + 1, trouble=event.words)
    if event.outcome == "absent":
        return _end(state, codes.FAILED, "not_submitted", f"nothing was submitted: {event.words}")
    return _end(state, codes.CONFIG, "refused", f"Slurm refused it: {event.words}")


def _engine_started(state: Kept, event: ev.EngineStarted) -> Kept:
    runs = {**state.runs, event.run_id: Run(event.run_dir, live=True)}
    return replace(
        state,
        phase="running",
        begun=False,
        runs=runs,
        run_id=event.run_id,
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
    runs = _passed(state, event.jobid) if waits else state.runs
    return _placed(replace(state, units=units, reason=event.reason, runs=runs))


def _run_seen(state: Kept, event: ev.RunSeen) -> Kept:
    known = state.runs.get(event.run_id, Run(event.run_dir))
    runs = {**_passed(state, event.run_id), event.run_id: replace(known, directory=event.run_dir, live=True)}
    return _placed(replace(state, runs=runs, run_id=event.run_id))


def _passed(state: Kept, name: str) -> Mapping[str, Run]:
    """The runs, those of this job or task being of attempts that have passed."""
    mine = {run_id: run for run_id, run in state.runs.items() if run.live and unit_of(run_id) == unit_of(name)}
    return {**state.runs, **{run_id: replace(run, live=False) for run_id, run in mine.items()}}


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
    alive = liveliness(state.slurm)
    return replace(state, phase="ending" if alive == OVER else "running" if state.live else "pending")


def _stop_asked(state: Kept, event: ev.StopAsked) -> Kept:
    if event.how == "cancel":  # what has been taken before had no effect
        taken = tuple(name for name in state.cancelled if event.part and name != event.part)
        state = replace(state, cancelled=taken)
    if event.part:
        return replace(state, parts={**state.parts, event.part: event.how}, tries=0)
    state = replace(state, stopping=event.how, tries=0)
    if state.phase == "queued" or (state.phase == "submitting" and not state.begun):
        return _end(state, codes.CANCELLED, "cancelled", "it was cancelled before there was a job")
    return state


def _cancel_tried(state: Kept, event: ev.CancelTried) -> Kept:
    taken = event.jobs or (() if event.trouble else state.to_cancel)
    cancelled = tuple(dict.fromkeys((*state.cancelled, *taken)))
    return _tried(replace(state, cancelled=cancelled, cancels=state.cancels + (not event.trouble)), event.trouble)


def _stop_tried(state: Kept, event: ev.StopTried) -> Kept:
    if event.trouble:
        return _tried(state, event.trouble)
    return _tried(_run(state, event.run_id or state.run_id, stopped=True), "")


def _tried(state: Kept, trouble: str) -> Kept:
    return replace(state, tries=state.tries + 1 if trouble else 0, trouble=trouble)


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
    ev.CancelTried: _cancel_tried,
    ev.StopTried: _stop_tried,
    ev.JobEnded: _job_ended,
    ev.Sealed: _sealed,
    ev.Copied: _copied,
    ev.Troubled: lambda state, event: replace(state, trouble=event.text),
}
