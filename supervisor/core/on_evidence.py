"""Handlers of the marker, the artifacts and what is collected."""

from __future__ import annotations

from dataclasses import replace

from supervisor.core import artifacts, codes, delivery
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.state import Failure
from supervisor.core.turn import Turn


def marker_read(turn: Turn, event: ev.MarkerRead) -> None:
    marker = replace(turn.state.marker, found=event.found, note=turn.state.marker.note or event.note)
    turn.change(marker=marker)
    if turn.ending:
        return
    said = event.code if event.found == "marker" else None
    answered = 0 < turn.state.reading <= event.asked
    if said or (answered and marker.note):
        coordinator_said(turn, said or marker.note or 0, "published" if said else "noted")
    elif answered:
        open_windows(turn)
    elif said == 0:
        turn.change(declared=True)
        for rank in turn.state.ranks:
            turn.change_rank(rank.rank, suspect=None)
            turn.clear_timers(f"recheck:{rank.rank}")


def coordinator_said(turn: Turn, code: int, verb: str) -> None:
    number = turn.plan.coordinator
    who = "the run's script" if number is None else f"rank {number} ({turn.rank(number).role}), the coordinator,"
    turn.fail(turn.failure(number, "marker", code, f"{who} {verb} code {code}"))


def open_windows(turn: Turn) -> None:
    """The work is done, and marker and note say nothing else: what is still promised must come now. (Contracts of
    self-benchmarks have windows of their own: see the rule that opens them.)"""
    turn.clear_timers("marker")
    turn.change(reading=0)
    opened = [item.contract for item in turn.state.contracts if not (item.ranked or item.final)]
    for contract in opened:
        open_window(turn, contract)
    if opened:
        turn.ask(cmd.CheckArtifacts(turn.record.seq))


def open_window(turn: Turn, contract: str) -> None:
    """The finalization window of one contract opens, for the first and only time."""
    turn.change_contract(contract, artifacts.open_window)
    turn.set_timer(f"finalization:{contract}", turn.plan.deadlines.finalization)


def marker_published(turn: Turn, event: ev.MarkerPublished) -> None:
    turn.clear_timers("marker")
    status = replace(turn.state.marker, status="published", code=event.code, outcome=event.outcome, error=None)
    turn.change(marker=status)
    decision = turn.state.decision
    if decision is None or event.code == decision.exit:
        return
    turn.note(f"the marker says {event.code}, published earlier; the run was to end with {decision.exit}")
    if decision.reason == "completed" and not turn.state.failures:
        text = f"the marker says {event.code}, published before the supervisor could publish {decision.exit}"
        take_back(turn, turn.failure(turn.plan.coordinator, "marker", event.code, text))


def take_back(turn: Turn, failure: Failure) -> None:
    """A completed run is not completed after all: its ranks still end in order, with the failure's code."""
    decision = turn.state.decision
    assert decision is not None  # noqa: S101 - only called after one
    turn.change(failures=(*turn.state.failures, failure), decision=replace(decision, exit=failure.code))


def marker_failed(turn: Turn, event: ev.MarkerFailed) -> None:
    """It could not be read, which matters when the work seems done, or it could not be published."""
    marker = turn.state.marker
    if event.asked:
        if 0 < turn.state.reading <= event.asked:
            marker_trouble(turn, event.error)
        else:
            turn.note(f"a look at the marker failed: {event.error}")
    elif marker.status != "publishing":
        turn.note(f"the marker was given up before: {event.error}")
    elif event.blocked and not marker.replacing:  # the coordinator may have gone since: see retry_marker
        turn.clear_timers("marker")
        turn.change(marker=replace(marker, status="blocked", error=event.error))
    else:
        marker_trouble(turn, event.error)


def marker_trouble(turn: Turn, error: str) -> None:
    """Nobody can be told how the run ended, or what a script noted: no success may be claimed."""
    turn.clear_timers("marker")
    turn.change(marker=replace(turn.state.marker, status="failed", error=error))
    failure = turn.failure(None, "marker", codes.FAULT, f"marker: {error}", origin="allocd")
    decision = turn.state.decision
    if decision is None:
        turn.fail(failure)
    elif decision.reason == "completed" and not turn.state.failures:
        take_back(turn, failure)
    else:
        turn.note(failure.text)


def watch_changed(turn: Turn, event: ev.WatchChanged) -> None:
    turn.change(watches={**turn.state.watches, **dict.fromkeys(event.directories, event)})


def artifact_seen(turn: Turn, event: ev.ArtifactSeen) -> None:
    finding = artifacts.Finding.from_dict(
        {
            "contract": event.contract,
            "answer": event.answer,
            "problems": event.problems,
            "files": event.files,
            "notes": event.notes,
        }
    )
    if event.contract not in (item.contract for item in turn.state.contracts):
        raise turn.illegal(f"there is no contract {event.contract}")
    finding = finding.after(turn.contract(event.contract).finding, frozenset(event.gone))
    try:
        turn.change_contract(event.contract, lambda item: artifacts.observe(item, finding))
    except artifacts.IllegalArtifactEvent as error:
        raise turn.illegal(str(error)) from error
    if turn.contract(event.contract).final:
        turn.clear_timers(f"finalization:{event.contract}", f"late:finalization:{event.contract}")


def artifacts_looked(turn: Turn, event: ev.ArtifactsLooked) -> None:
    """The last look after a window closed is over: what is still open is late."""
    if event.asked < turn.state.look:
        return
    for timer in [name for name in turn.state.deadlines if name.startswith("late:")]:
        turn.clear_timers(timer)
        late(turn, timer.removeprefix("late:"))


def checker_fault(turn: Turn, event: ev.CheckerFault) -> None:
    text = f"artifact {event.contract} could not be judged: {event.text}"
    turn.fail(turn.failure(None, "fault", codes.FAULT, text, origin="allocd"))


def collected(turn: Turn, event: ev.Collected) -> None:
    """The evidence is there. A contract counts by what is left of it: a run that deleted or rewrote what made it
    complete was not completed; nobody knows whether it was when nobody could look."""
    for contract in turn.state.contracts:
        if contract.state != "complete":
            continue
        changed, unknown = delivery.changes(contract, event)
        if changed:
            _changed(turn, contract, f"artifact {contract.contract} changed after it was judged: {changed}")
        if unknown:
            text = f"artifact {contract.contract} could not be compared with what was judged: {unknown}"
            (turn.doubt if contract.required else turn.note)(text)
    turn.change(collected=event, phase="ended", deadlines={})
    turn.ask(cmd.Finish())


def _changed(turn: Turn, contract: artifacts.ArtifactState, text: str) -> None:
    decision = turn.state.decision
    completed = decision is not None and decision.reason == "completed" and not turn.state.failures
    if contract.required and completed:
        take_back(turn, turn.failure(None, "artifact", codes.ARTIFACTS, text, origin="allocd"))
    else:
        turn.note(text)


def late(turn: Turn, closed: str) -> None:
    """What is still open after the last look is late. `closed` says which limit has passed: "deadline", that of all
    contracts, which waits for nobody, or "finalization:CONTRACT"."""
    reason, _, contract = closed.partition(":")
    for item in turn.state.contracts:
        if not item.final and contract in ("", item.contract):
            turn.change_contract(item.contract, lambda item: artifacts.expire(item, reason))  # type: ignore[arg-type]
    if reason == "deadline":
        turn.fail_contract()
