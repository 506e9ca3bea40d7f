"""What must be true of every run, whatever happens: each law is a function over one turn of the machine, held after
every event, or over a run that is over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.artifacts import instances
from supervisor.core.receipt import replay, run_receipt
from supervisor.core.run import fold
from supervisor.core.state import COORDINATOR_FIRST, FINAL, GUARDS, Failure, RunState
from supervisor.core.timers import TIMERS
from supervisor.core.turn import KEPT_TIMERS
from supervisor.core.verdict import evidence_of, judge_run

if TYPE_CHECKING:
    from tests.simulation.world import World

PHASES: Final = ("new", "starting", "running", "settling", "stopping", "collecting", "ended")
ONCE: Final = (cmd.StartStep, cmd.StartRank, cmd.StopRank, cmd.KillRank, cmd.KillStep, cmd.ReleaseStep, cmd.Sweep)
GUARDED: Final = frozenset({"issued", "withdrawn", "spawned", "launching", "ending", "gone", "sweeping"})
"""Phases of a rank that end by a deadline at the latest. A rank that is ready waits for those that are not, and one
that runs may do so until it is told to stop."""


@dataclass(frozen=True)
class Turn:
    """One event, and what the machine made of it."""

    before: RunState
    record: ev.Record
    after: RunState
    commands: list[cmd.Command]

    def asked(self, *kinds: type[cmd.Command]) -> list[cmd.Command]:
        return [command for command in self.commands if isinstance(command, kinds)]


# --- after every event -------------------------------------------------------------------------------------------


def phases_go_forward(world: World, turn: Turn) -> None:
    assert PHASES.index(turn.before.phase) <= PHASES.index(turn.after.phase)
    assert (turn.after.decision is not None) == (turn.after.phase in PHASES[4:])


def events_are_journalled_faithfully(world: World, turn: Turn) -> None:
    line = json.dumps(ev.encode(turn.record.event))
    assert ev.decode(json.loads(line)) == turn.record.event
    for command in turn.commands:
        assert json.loads(json.dumps(cmd.encode(command)))["command"] == command.name


def first_failure_stays(world: World, turn: Turn) -> None:
    old, new = [identity(f) for f in turn.before.failures], [identity(f) for f in turn.after.failures]
    assert new[: len(old)] == old
    if old:
        assert identity(turn.before.first_failure) == identity(turn.after.first_failure)
    if new:
        first = turn.after.first_failure
        assert first is not None
        assert first.seq == min(failure.seq for failure in turn.after.failures)


def identity(failure: Failure | None) -> tuple[object, ...]:
    """A failure without what may come to light about it later."""
    assert failure is not None
    return failure.seq, failure.rank, failure.what, failure.code, failure.origin, failure.text


def decisions_are_final(world: World, turn: Turn) -> None:
    old, new = turn.before.decision, turn.after.decision
    if old is None or new is None:
        assert old is None
        return
    assert (new.reason, new.seq, new.at) == (old.reason, old.seq, old.at)
    added = turn.after.failures[len(turn.before.failures) :]
    assert all(old.reason == "completed" and failure.what in ("marker", "artifact") for failure in added)
    assert (new.exit != old.exit) <= bool(added)


def nothing_starts_after_the_decision(world: World, turn: Turn) -> None:
    if turn.after.decision is not None:
        assert not turn.asked(cmd.StartStep, cmd.StartRank)


def decision_tells_the_first_failure(world: World, turn: Turn) -> None:
    decision, first = turn.after.decision, turn.after.first_failure
    if decision is not None and decision.reason != "completed":
        assert first is not None
        assert decision.exit == first.code != 0
        assert all(failure.seq <= decision.seq for failure in turn.after.failures)


def ends_after_the_decision_are_no_failures(world: World, turn: Turn) -> None:
    decision = turn.after.decision
    for rank in turn.after.ranks:
        if decision and rank.end and rank.end.seq > decision.seq:
            assert not [f for f in turn.after.failures if f.rank == rank.rank and f.what in ("exit", "signal")]


def each_thing_is_asked_once(world: World, turn: Turn) -> None:
    if turn.commands:
        counts = Counter((type(c), c.rank) for c in world.asked if isinstance(c, ONCE))
        assert set(counts.values()) <= {1}, counts
    assert len([c for c in world.asked if isinstance(c, cmd.Collect)]) <= 1


def only_running_ranks_are_stopped(world: World, turn: Turn) -> None:
    for command in turn.commands:
        if isinstance(command, cmd.StopRank):
            assert turn.after.ranks[command.rank].phase in ("ready", "launching", "running")
            assert command.exit == turn.after.ranks[command.rank].exit
        if isinstance(command, cmd.KillRank):
            assert len(turn.after.stop_signals) > 1
        if isinstance(command, cmd.ReleaseStep):
            assert turn.after.ranks[command.rank].phase == "gone"
            assert command.exit == turn.after.ranks[command.rank].exit
        if isinstance(command, cmd.StartRank):
            assert turn.before.ranks[command.rank].phase in ("ready", "spawned")  # spawned: it is its hello


def ranks_start_together(world: World, turn: Turn) -> None:
    if turn.after.the_plan.start == "together" and turn.asked(cmd.StartRank):
        assert not [r for r in turn.after.ranks if r.agent and r.phase in ("issued", "spawned", "ready")]


def marker_is_published_once(world: World, turn: Turn) -> None:
    asked = turn.asked(cmd.PublishMarker)
    decided = turn.before.decision is None and turn.after.decision is not None
    again = turn.before.marker.status == "blocked" and turn.after.marker.status == "publishing"
    unblocked = isinstance(turn.record.event, ev.MarkerFailed) and turn.record.event.blocked
    assert len(asked) == (1 if decided else len(asked) and (again or unblocked))
    for command in asked:
        assert isinstance(command, cmd.PublishMarker)
        assert command.replace == turn.after.coordinator_gone
        assert turn.after.decision is not None and command.code == turn.after.decision.exit


def marker_comes_before_the_stop(world: World, turn: Turn) -> None:
    decision = turn.after.decision
    if decision and decision.reason == "completed":
        for command in turn.asked(cmd.StopRank):
            assert isinstance(command, cmd.StopRank)
            blocked = turn.after.marker.status == "blocked" and command.rank == turn.after.the_plan.coordinator
            assert blocked or turn.after.marker.status in ("published", "failed")


def coordinator_is_stopped_first(world: World, turn: Turn) -> None:
    decision = turn.after.decision
    if decision and decision.reason in COORDINATOR_FIRST and not turn.after.coordinator_gone:
        stopped = [c.rank for c in turn.asked(cmd.StopRank) if isinstance(c, cmd.StopRank)]
        assert stopped in ([], [turn.after.the_plan.coordinator])


def nobody_is_forgotten(world: World, turn: Turn) -> None:
    decision = turn.after.decision
    if decision is None or (decision.reason in COORDINATOR_FIRST and not turn.after.coordinator_gone):
        return
    if decision.reason == "completed" and turn.after.marker.status in ("publishing", "blocked"):
        return
    assert all(rank.stop == decision.reason for rank in turn.after.ranks if rank.phase not in FINAL)


def timers_are_known(world: World, turn: Turn) -> None:
    for name, due in turn.after.deadlines.items():
        kind, _, argument = name.partition(":")
        assert kind in TIMERS
        assert kind not in GUARDS or turn.after.ranks[int(argument)].phase in GUARDS[kind]
        assert due >= turn.record.at or name in turn.before.deadlines
        assert turn.after.decision is None or kind in KEPT_TIMERS | {"collect"}


def every_wait_has_a_deadline(world: World, turn: Turn) -> None:
    state = turn.after
    if state.phase not in ("collecting", "ended"):
        for rank in state.ranks:
            timers = {name for name in state.deadlines if name.endswith(f":{rank.rank}")}
            stopped = rank.stop is not None and rank.phase not in FINAL
            waiting = state.decision is not None and rank.stop is None and rank.phase in ("spawned", "launching")
            assert timers or waiting or not (rank.phase in GUARDED or stopped), (rank, state.deadlines)
    asking = state.marker.status == "publishing" or state.reading > 0
    assert asking == ("marker" in state.deadlines)
    assert state.phase == "settling" or not state.reading
    if state.work_done:
        for contract in (item for item in state.contracts if not item.final):
            window = f"finalization:{contract.contract}"
            assert {window, f"late:{window}", "late:deadline"} & set(state.deadlines) or (
                contract.ranked and contract.state == "pending" and "artifacts" in state.deadlines
            )
    if state.phase == "collecting":
        assert "collect" in state.deadlines


def the_end_is_the_end(world: World, turn: Turn) -> None:
    finish = turn.asked(cmd.Finish)
    assert len(finish) == (turn.after.phase == "ended" and turn.before.phase != "ended")
    if turn.before.phase == "ended":
        assert not turn.commands
    if turn.after.phase in ("collecting", "ended"):
        assert turn.after.marker.status in ("published", "failed")
    if turn.after.phase == "ended":
        assert not turn.after.deadlines


EVERY_TURN: Final[tuple[Callable[[World, Turn], None], ...]] = (
    phases_go_forward,
    events_are_journalled_faithfully,
    first_failure_stays,
    decisions_are_final,
    nothing_starts_after_the_decision,
    decision_tells_the_first_failure,
    ends_after_the_decision_are_no_failures,
    each_thing_is_asked_once,
    only_running_ranks_are_stopped,
    ranks_start_together,
    marker_is_published_once,
    marker_comes_before_the_stop,
    coordinator_is_stopped_first,
    nobody_is_forgotten,
    timers_are_known,
    every_wait_has_a_deadline,
    the_end_is_the_end,
)


def hold(world: World, turn: Turn) -> None:
    """Hold one turn against every law."""
    for law in EVERY_TURN:
        law(world, turn)


# --- when the run is over ----------------------------------------------------------------------------------------


def it_is_finished(world: World) -> None:
    assert world.over
    assert [type(c) for c in world.asked].count(cmd.Finish) == 1
    for rank in world.state.ranks:  # a step that is made long after it was given up may outlive the run
        assert rank.phase in FINAL or any(doubt.startswith(f"rank {rank.rank}:") for doubt in world.state.doubts)


def every_started_rank_was_ended(world: World) -> None:
    """By itself, or because it was told to; what nobody knows of is said."""
    told = {c.rank for c in world.asked if isinstance(c, cmd.StopRank | cmd.KillRank | cmd.KillStep)}
    for rank in world.state.ranks:
        own = rank.end is not None and not rank.end.ordered
        lost = rank.end is None and rank.returncode is not None
        given_up = rank.end is None and rank.left
        assert not rank.started or own or lost or given_up or rank.rank in told
        if rank.end is not None and rank.end.ordered:
            assert rank.stop is not None


def every_gone_tree_was_released(world: World) -> None:
    gone = {r.event.rank for r in world.records if isinstance(r.event, ev.TreeGone)}
    released = {c.rank for c in world.asked if isinstance(c, cmd.ReleaseStep)}
    assert released <= gone
    for rank in gone - released:  # its srun went before the second look, or it was given up before it spoke
        assert world.state.ranks[rank].phase in FINAL


def success_is_proven(world: World) -> None:
    state = world.state
    verdict = judge_run(evidence_of(state), final=True)
    assert (verdict.code == 0) == (verdict.outcome == "success")
    if verdict.outcome != "success":
        return
    assert state.decision is not None and state.decision.reason == "completed" and state.decision.exit == 0
    assert not state.failures and not state.doubts
    assert world.file == 0 and state.marker.status == "published"
    required = {item.contract_id for item in instances(world.plan) if item.artifact.required}
    assert all(c.state == "complete" for c in state.contracts if c.contract in required)
    collected = state.collected
    assert collected is not None and world.changed not in required
    assert required <= {*collected.compared}
    if world.plan.finish == "coordinator":
        coordinator = state.coordinator
        assert coordinator is not None and coordinator.end is not None and coordinator.end.native == 0
        assert world.noted == 0
    for rank in state.ranks:
        assert rank.end is not None or not rank.started or not rank.critical  # nobody saw it end
        early = rank.end is not None and rank.end.seq < state.decision.seq
        if early and rank.critical and rank.end and rank.rank != world.plan.coordinator and not rank.may_finish:
            assert world.plan.marker.recheck > 0 or state.declared
        if rank.end is not None and rank.end.native and early and not rank.may_finish and rank.critical:
            assert state.declared or rank.rank != world.plan.coordinator


def failure_is_the_first(world: World) -> None:
    state = world.state
    verdict = judge_run(evidence_of(state), final=True)
    first = state.first_failure
    if first is not None:
        assert (verdict.outcome, verdict.code, verdict.origin) == ("failure", first.code, first.origin)


def the_state_is_the_fold(world: World) -> None:
    assert fold(world.records) == world.state
    lines = [json.loads(json.dumps(ev.encode(record.event))) for record in world.records]
    restored = [ev.Record(r.seq, r.at, r.utc, ev.decode(line)) for r, line in zip(world.records, lines, strict=True)]
    assert fold(restored) == world.state


def the_receipt_agrees(world: World) -> None:
    document = run_receipt(world.state, world.records, world.layout(), versions={"allocd": "0"})
    saved = json.loads(json.dumps(document, allow_nan=False))
    verdict, same = replay(saved)
    assert same
    assert verdict.as_dict() == saved["verdict"]


AT_THE_END: Final[tuple[Callable[[World], None], ...]] = (
    it_is_finished,
    every_started_rank_was_ended,
    every_gone_tree_was_released,
    success_is_proven,
    failure_is_the_first,
    the_state_is_the_fold,
    the_receipt_agrees,
)


def hold_at_the_end(world: World) -> None:
    """Hold a run that is over against every law."""
    for law in AT_THE_END:
        law(world)
