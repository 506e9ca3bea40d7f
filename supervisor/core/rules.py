"""What the state sets free: each rule is a sentence about the state, with what to do when it is true.

After every event the rules run, in this order and again, until none of them changes anything. So a handler only says
what happened; it need not remember what else that may allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core.on_evidence import open_window
from supervisor.core.state import COLLECT_MARGIN, COORDINATOR_FIRST, FINAL, RELEASE_LIMIT, RankState
from supervisor.core.turn import Turn


def start_ranks(turn: Turn) -> None:
    """All agents have said hello (or each, if the plan says so): the ranks may start."""
    ranks = turn.state.ranks
    waiting = any(rank.agent and rank.phase in ("issued", "spawned") for rank in ranks)
    if turn.ending or (waiting and turn.plan.start == "together"):
        return
    for number in [rank.rank for rank in ranks if rank.phase == "ready"]:
        turn.change_rank(number, phase="launching")
        turn.ask(cmd.StartRank(number))
        turn.set_timer(f"launch:{number}", turn.plan.deadlines.hello)


def all_running(turn: Turn) -> None:
    early = ("issued", "spawned", "ready", "launching")
    if turn.state.phase == "starting" and not any(rank.phase in early for rank in turn.state.ranks):
        turn.change(phase="running")


def nothing_to_wait_for(turn: Turn) -> None:
    """`finish = "artifacts"`: every contract has come to its end, or nobody is left who could still write."""
    if turn.plan.finish != "artifacts" or turn.state.phase not in ("starting", "running"):
        return
    left = any(rank.phase not in ("gone", *FINAL) for rank in turn.state.ranks)
    if not left or all(contract.final for contract in turn.state.contracts):
        turn.settle()


def open_windows_of_nodes(turn: Turn) -> None:
    """A self-benchmark's node has all its ranks' files, or nobody is left on it who could write them: what is still
    missing must come now."""
    if turn.ending:
        return
    for item in turn.state.contracts:
        if not item.ranked or item.rank is None or item.state not in ("pending", "ranks_complete"):
            continue
        left = turn.rank(item.rank).phase not in ("gone", *FINAL)
        if item.state == "ranks_complete" or not left:
            open_window(turn, item.contract)


def contracts_done(turn: Turn) -> None:
    """The work is done and every contract has come to its end: the run is decided."""
    if turn.state.work_done and all(contract.final for contract in turn.state.contracts):
        turn.fail_contract()
        turn.decide("completed", codes.OK)


def retry_marker(turn: Turn) -> None:
    """Something that is no marker stood in its place; with the coordinator gone it may be replaced."""
    decision = turn.state.decision
    if decision and turn.state.marker.status == "blocked" and turn.state.coordinator_gone:
        turn.publish(decision.exit)


def stop_ranks(turn: Turn) -> None:
    """The run is decided: its ranks are stopped, tier by tier."""
    for rank in tier(turn):
        if rank.stop is None and rank.phase not in FINAL:
            turn.stop(rank.rank)


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


def release(turn: Turn) -> None:
    """Trees that are gone: their agents may exit, each with the code that is its own or the marker's; but first they
    fetch what the plan collects from their nodes."""
    for rank in turn.state.ranks:
        if rank.phase != "gone" or rank.released or rank.suspect:
            continue
        code = step_code(turn, rank)
        turn.change_rank(rank.rank, released=True, exit=code)
        turn.ask(cmd.ReleaseStep(rank.rank, code))
        if not rank.killed_step:
            fetching = turn.plan.deadlines.collect if turn.plan.collect.nodes else 0.0
            turn.set_timer(f"release:{rank.rank}", fetching + RELEASE_LIMIT)


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


def trees_are_gone(turn: Turn) -> None:
    """Nothing runs any more. Where agents fetch from their nodes, collecting begins now, and has one deadline."""
    state = turn.state
    begins = state.phase == "stopping" and turn.plan.collect.nodes and state.collect_by is None
    if begins and all(rank.phase in ("gone", *FINAL) for rank in state.ranks):
        turn.change(collect_by=turn.now + turn.plan.deadlines.collect)


def all_over(turn: Turn) -> None:
    """Every rank is over and the marker is settled: collect the evidence. What agents needed for fetching is taken
    from the time for it, but a little is left in any case."""
    if turn.state.phase != "stopping" or turn.state.marker.status in ("publishing", "blocked"):
        return
    if all(rank.phase in FINAL for rank in turn.state.ranks):
        limit, due = turn.plan.deadlines.collect, turn.state.collect_by
        if due is not None:
            limit = min(limit, max(COLLECT_MARGIN, due - turn.now))
        turn.change(phase="collecting", deadlines={})
        turn.set_timer("collect", limit + COLLECT_MARGIN)
        turn.ask(cmd.Collect(limit))


RULES: Final[tuple[Callable[[Turn], None], ...]] = (
    start_ranks,
    all_running,
    open_windows_of_nodes,
    nothing_to_wait_for,
    contracts_done,
    retry_marker,
    stop_ranks,
    release,
    trees_are_gone,
    all_over,
)


def run_rules(turn: Turn) -> None:
    """Run the rules until the state, which is a new object whenever anything changes, stays as it is."""
    before = None
    while before is not turn.state:
        before = turn.state
        for rule in RULES:
            rule(turn)
