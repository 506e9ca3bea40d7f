"""Handlers of the marker, the artifacts and what is collected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from supervisor.core import artifacts, codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.state import FINAL
from supervisor.core.turn import Turn


def marker_read(turn: Turn, event: ev.MarkerRead) -> None:
    marker = replace(turn.state.marker, found=event.found, note=event.note or turn.state.marker.note)
    turn.change(marker=marker)
    if turn.ending:
        return
    said = event.code if event.found == "marker" else None
    answered = 0 < turn.state.reading <= event.asked
    if said or (answered and marker.note):
        coordinator_said(turn, said or marker.note or 0, "published" if said else "noted")
    elif answered:
        coordinator_done(turn)
    elif said == 0:
        turn.change(declared=True)
        for rank in turn.state.ranks:
            turn.change_rank(rank.rank, suspect=None)
            turn.clear_timers(f"recheck:{rank.rank}")


def coordinator_said(turn: Turn, code: int, verb: str) -> None:
    turn.clear_timers("marker")
    turn.change(reading=0)
    number = turn.plan.coordinator
    who = "the run's script" if number is None else f"rank {number} ({turn.rank(number).role}), the coordinator,"
    turn.fail(turn.failure(number, "marker", code, f"{who} {verb} code {code}"))


def coordinator_done(turn: Turn) -> None:
    """The coordinator ended with zero and noted nothing else: what is promised may now come."""
    turn.clear_timers("marker")
    turn.change(reading=0, settling=True)
    if all(item.final for item in turn.state.contracts):
        return
    contracts = tuple(item if item.final else artifacts.open_window(item) for item in turn.state.contracts)
    turn.change(contracts=contracts)
    turn.set_timer("finalization", turn.plan.deadlines.finalization)
    turn.ask(cmd.CheckArtifacts(turn.record.seq))


def marker_published(turn: Turn, event: ev.MarkerPublished) -> None:
    turn.clear_timers("marker")
    status = replace(turn.state.marker, status="published", code=event.code, outcome=event.outcome, error=None)
    turn.change(marker=status)
    decision = turn.state.decision
    if decision and event.code != decision.exit:
        turn.note(f"the marker says {event.code}, published earlier; the run ends with {decision.exit}")


def marker_failed(turn: Turn, event: ev.MarkerFailed) -> None:
    turn.clear_timers("marker")
    coordinator = turn.state.coordinator
    if event.blocked and coordinator is not None and coordinator.phase not in ("gone", *FINAL):
        turn.change(marker=replace(turn.state.marker, status="blocked", error=event.error))
    else:
        marker_trouble(turn, event.error)


def marker_trouble(turn: Turn, error: str) -> None:
    """Nobody can be told how the run ended, or what a script noted: no success may be claimed."""
    turn.change(marker=replace(turn.state.marker, status="failed", error=error), reading=0)
    failure = turn.failure(turn.plan.coordinator, "marker", codes.FAULT, f"marker: {error}", origin="allocd")
    if turn.ending:
        turn.change(failures=(*turn.state.failures, failure))
    else:
        turn.fail(failure)


def artifact_seen(turn: Turn, event: ev.ArtifactSeen) -> None:
    finding = artifacts.Finding.from_dict(
        {"contract": event.contract, "answer": event.answer, "problems": event.problems, "files": event.files}
    )
    contracts = tuple(
        artifacts.observe(item, finding) if item.contract == event.contract and not item.final else item
        for item in turn.state.contracts
    )
    turn.change(contracts=contracts)


def artifacts_looked(turn: Turn, event: ev.ArtifactsLooked) -> None:
    """The last look after a window closed is over: what is still open is late."""
    for reason in ("deadline", "finalization"):
        if f"late:{reason}" in turn.state.deadlines and event.asked >= turn.state.look:
            turn.clear_timers(f"late:{reason}")
            expire(turn, reason)


def checker_fault(turn: Turn, event: ev.CheckerFault) -> None:
    text = f"the checker of artifact {event.contract} broke: {event.text}"
    turn.fail(turn.failure(None, "fault", codes.FAULT, text, origin="allocd"))


def collected(turn: Turn, event: ev.Collected) -> None:
    turn.finish(event)


def expire(turn: Turn, reason: Any) -> None:
    """What is still open after the last look is late; why, says which window closed."""
    contracts = tuple(item if item.final else artifacts.expire(item, reason) for item in turn.state.contracts)
    turn.change(contracts=contracts)
    bad = turn.broken_contracts()
    if reason == "deadline" and bad:
        turn.fail(turn.artifact_failure(bad[0]), "deadline")
