"""What the state sets free: each rule is a sentence about the state, with what to do when it is true.

After every event the rules run, in this order, until none has anything to do. So a handler only says what happened; it
need not remember what else that may allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core.state import COLLECT_MARGIN, COORDINATOR_FIRST, FINAL, RELEASE_LIMIT, RankState
from supervisor.core.turn import Turn


def start_ranks(turn: Turn) -> bool:
    """All agents have said hello (or each, if the plan says so): the ranks may start."""
    if turn.ending:
        return False
    waiting = any(rank.agent and rank.phase in ("issued", "spawned") for rank in turn.state.ranks)
    if waiting and turn.plan.start == "together":
        return False
    ready = [rank.rank for rank in turn.state.ranks if rank.phase == "ready"]
    for number in ready:
        turn.change_rank(number, phase="launching")
        turn.ask(cmd.StartRank(number))
    return bool(ready)


def all_running(turn: Turn) -> bool:
    if turn.state.phase != "starting":
        return False
    early = ("issued", "spawned", "ready", "launching")
    if any(rank.phase in early for rank in turn.state.ranks):
        return False
    turn.change(phase="running")
    return True


def contracts_done(turn: Turn) -> bool:
    """Every contract has come to its end, and nobody else's end is waited for: the run is decided."""
    alone = turn.plan.finish == "artifacts" and turn.state.phase in ("starting", "running")
    if turn.ending or not (turn.state.settling or alone):
        return False
    if any(not contract.final for contract in turn.state.contracts):
        return False
    bad = turn.broken_contracts()
    if not bad:
        turn.decide("completed", codes.OK)
    else:
        turn.fail(turn.artifact_failure(bad[0]), "artifacts_invalid")
    return True


def next_tier(turn: Turn) -> bool:
    """The coordinator has been stopped: now the workers. Or the marker is there: the work is done."""
    decision = turn.state.decision
    if decision is None:
        return False
    if decision.reason == "completed" and turn.state.marker.status in ("publishing", "blocked"):
        return False
    coordinator = turn.state.coordinator
    tier_is_up = decision.reason in COORDINATOR_FIRST and coordinator and coordinator.phase not in (*FINAL, "gone")
    todo = [rank.rank for rank in turn.state.ranks if rank.stop is None and rank.phase not in FINAL]
    if tier_is_up or not todo:
        return False
    turn.stop_now(todo)
    return True


def retry_marker(turn: Turn) -> bool:
    """Something that is no marker stood in its place; with the coordinator gone it may be replaced."""
    coordinator = turn.state.coordinator
    gone = coordinator is None or coordinator.phase in ("gone", *FINAL)
    if turn.state.marker.status != "blocked" or not gone or turn.state.decision is None:
        return False
    turn.publish(turn.state.decision.exit)
    return True


def release(turn: Turn) -> bool:
    """Trees that are gone: their agents may exit, each with the code that is its own or the marker's."""
    todo = [rank for rank in turn.state.ranks if rank.phase == "gone" and not rank.released and not rank.suspect]
    for rank in todo:
        code = step_code(turn, rank)
        turn.change_rank(rank.rank, released=True, exit=code)
        turn.ask(cmd.ReleaseStep(rank.rank, code))
        turn.clear_timers(f"stop:{rank.rank}", f"silence:{rank.rank}")
        turn.set_timer(f"release:{rank.rank}", RELEASE_LIMIT)
    return bool(todo)


def step_code(turn: Turn, rank: RankState) -> int:
    failed = next((f for f in turn.state.failures if f.rank == rank.rank and f.what != "marker"), None)
    decision = turn.state.decision
    if rank.exit is not None:
        return rank.exit
    if turn.state.declared and not failed:
        return codes.OK
    if failed is not None or decision is None or rank.rank == turn.plan.coordinator:
        return failed.code if failed else (rank.end.native if rank.end else codes.OK)
    return decision.exit


def all_over(turn: Turn) -> bool:
    """Every rank is over and the marker is settled: collect the evidence."""
    if turn.state.phase != "stopping" or turn.state.marker.status in ("publishing", "blocked"):
        return False
    if any(rank.phase not in FINAL for rank in turn.state.ranks):
        return False
    turn.change(phase="collecting", deadlines={})
    turn.set_timer("collect", turn.plan.deadlines.collect + COLLECT_MARGIN)
    turn.ask(cmd.Collect())
    return True


RULES: Final[tuple[Callable[[Turn], bool], ...]] = (
    start_ranks,
    all_running,
    contracts_done,
    next_tier,
    retry_marker,
    release,
    all_over,
)
