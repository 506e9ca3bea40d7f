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
        turn.set_timer(f"launch:{number}", turn.plan.deadlines.hello)
    return bool(ready)


def all_running(turn: Turn) -> bool:
    if turn.state.phase != "starting":
        return False
    early = ("issued", "spawned", "ready", "launching")
    if any(rank.phase in early for rank in turn.state.ranks):
        return False
    turn.change(phase="running")
    return True


def nothing_to_wait_for(turn: Turn) -> bool:
    """`finish = "artifacts"`: every contract has come to its end, or nobody is left who could still write."""
    if turn.plan.finish != "artifacts" or turn.state.phase not in ("starting", "running"):
        return False
    left = any(rank.phase not in ("gone", *FINAL) for rank in turn.state.ranks)
    if left and any(not contract.final for contract in turn.state.contracts):
        return False
    turn.settle()
    return True


def contracts_done(turn: Turn) -> bool:
    """The work is done and every contract has come to its end: the run is decided."""
    if not turn.state.work_done or any(not contract.final for contract in turn.state.contracts):
        return False
    if not turn.fail_contract():
        turn.decide("completed", codes.OK)
    return True


def retry_marker(turn: Turn) -> bool:
    """Something that is no marker stood in its place; with the coordinator gone it may be replaced."""
    decision = turn.state.decision
    if decision is None or turn.state.marker.status != "blocked" or not turn.state.coordinator_gone:
        return False
    turn.publish(decision.exit)
    return True


def stop_ranks(turn: Turn) -> bool:
    """The run is decided: its ranks are stopped, tier by tier."""
    todo = [rank.rank for rank in tier(turn) if rank.stop is None and rank.phase not in FINAL]
    for number in todo:
        turn.stop(number)
    return bool(todo)


def tier(turn: Turn) -> tuple[RankState, ...]:
    """The ranks that may be stopped now. When the work is done, nobody before the marker is there; and where something
    stands in the marker's place, the coordinator before the others, for only then is it replaced."""
    decision, marker = turn.state.decision, turn.state.marker.status
    if decision is None or (decision.reason == "completed" and marker == "publishing"):
        return ()
    blocked = decision.reason == "completed" and marker == "blocked"
    coordinator = turn.state.coordinator
    if coordinator and not turn.state.coordinator_gone and (blocked or decision.reason in COORDINATOR_FIRST):
        return (coordinator,)
    return turn.state.ranks


def release(turn: Turn) -> bool:
    """Trees that are gone: their agents may exit, each with the code that is its own or the marker's."""
    todo = [rank for rank in turn.state.ranks if rank.phase == "gone" and not rank.released and not rank.suspect]
    for rank in todo:
        code = step_code(turn, rank)
        turn.change_rank(rank.rank, released=True, exit=code)
        turn.ask(cmd.ReleaseStep(rank.rank, code))
        if not rank.killed_step:
            turn.set_timer(f"release:{rank.rank}", RELEASE_LIMIT)
    return bool(todo)


def step_code(turn: Turn, rank: RankState) -> int:
    """What a step ends with: what it was told when it was stopped; a rank that failed, or ended while the run went on,
    with its own code; a worker that ended because the work was done, with the marker's."""
    if rank.exit is not None:
        return rank.exit
    failed = next((f for f in turn.state.failures if f.rank == rank.rank and f.what in ("exit", "signal")), None)
    if failed is not None:
        return failed.code
    if turn.state.declared:
        return codes.OK
    decision = turn.state.decision
    if decision is None or not rank.critical or rank.rank == turn.plan.coordinator:
        return rank.end.native if rank.end else codes.OK
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
    nothing_to_wait_for,
    contracts_done,
    retry_marker,
    stop_ranks,
    release,
    all_over,
)
