"""Handlers of the events that belong to the run as a whole: its opening, its time limit, requests to stop."""

from __future__ import annotations

from supervisor.core import artifacts, codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.plan import parse_plan
from supervisor.core.state import EARLY_SIGNAL, KILL_MARGIN, TALKING, RankState
from supervisor.core.timers import time_limit
from supervisor.core.turn import Turn


def opened(turn: Turn, event: ev.RunOpened) -> None:
    plan = parse_plan(event.plan, event.run_id)
    ranks = []
    for number in plan.ranks:
        role = plan.role_of(number)
        ranks.append(
            RankState(
                rank=number,
                role=role.name,
                node=event.nodes[number],
                grace=role.grace,
                stop_signal=role.stop_signal,
                critical=role.critical,
                may_finish=role.may_finish,
                agent=role.agent == "on",
            )
        )
    contracts = tuple(artifacts.initial(instance) for instance in artifacts.instances(plan))
    turn.change(
        phase="starting",
        opened=event,
        plan=plan,
        ranks=tuple(ranks),
        contracts=contracts,
        started_at=turn.now,
    )
    if plan.deadlines.run is not None:
        turn.set_timer("run", plan.deadlines.run)
    if plan.collection_deadline is not None and contracts:
        turn.set_timer("artifacts", plan.collection_deadline)
    for rank in ranks:
        turn.ask(cmd.StartStep(rank.rank))
        turn.set_timer(f"hello:{rank.rank}", plan.deadlines.journal + plan.deadlines.hello)


def time_limit_known(turn: Turn, event: ev.TimeLimitKnown) -> None:
    turn.change(end_at=event.end_at, end_utc=event.end_utc)
    if turn.ending:
        return
    left = max(0.0, event.end_at - turn.now)
    budget = turn.state.budget
    if budget > left / 2:
        turn.note(
            f"the shutdown budget ({budget:.0f} s) is more than half of the time that is left ({left:.0f} s): "
            f"the stop begins {left / 2:.0f} s before the limit; ask Slurm for more time or shorten the plan's graces"
        )
        budget = left / 2
    turn.set_timer("time_limit", left - budget)


def stop_requested(turn: Turn, event: ev.StopRequested) -> None:
    """The first request ends the run in order, the second at once. Slurm's early signal is no request: somebody who
    has asked for an orderly stop already keeps the time for it."""
    if event.signal == "USR1" and short_of_time(turn):
        turn.note("Slurm's early signal has come; the stop waits for half of the time that there was")
        return
    again = bool(turn.state.stop_signals)
    turn.change(stop_signals=(*turn.state.stop_signals, event.signal))
    if event.signal == "USR1":
        time_limit(turn, "")
    elif again:
        kill_everything(turn)
    elif event.signal == "TERM" and near_the_limit(turn):
        time_limit(turn, "")
    else:
        code = codes.CANCELLED if event.signal == "INT" else codes.STOPPED
        text = f"the engine was told to stop (SIG{event.signal})"
        turn.fail(turn.failure(None, "stop", code, text, origin="allocd"), "stop_requested")


def short_of_time(turn: Turn) -> bool:
    """Whether the stop waits for half of a time that is too short for the shutdown budget. The early signal, which is
    asked for without knowing a partition's default limit, comes at the start of such a job."""
    due, end = turn.state.deadlines.get("time_limit"), turn.state.end_at
    return due is not None and end is not None and due > turn.now and end - due < turn.state.budget


def near_the_limit(turn: Turn) -> bool:
    """Whether a TERM may be Slurm's early signal: the stop for the time limit, which is half of a short job's time at
    most, is due within a minute."""
    due = turn.state.deadlines.get("time_limit")
    return due is not None and due - turn.now <= EARLY_SIGNAL


def kill_everything(turn: Turn) -> None:
    """No grace for anybody; the receipt is still written. Asking again makes nothing slower."""
    decision = turn.state.decision
    assert decision is not None  # noqa: S101 - the first request decided, if nothing had before
    for rank in turn.state.ranks:
        if rank.phase == "spawned":
            turn.change_rank(rank.rank, stop=rank.stop or decision.reason)
            turn.kill_step(rank.rank)
        elif rank.phase in TALKING and rank.phase != "gone" and not (rank.hurried or rank.killed_step):
            code = decision.exit if rank.exit is None else rank.exit
            turn.change_rank(rank.rank, stop=rank.stop or decision.reason, exit=code, hurried=True)
            turn.ask(cmd.KillRank(rank.rank, code))
            turn.set_timer(f"stop:{rank.rank}", KILL_MARGIN)


def noted(turn: Turn, event: ev.Noted) -> None:
    turn.note(event.text if event.rank is None else f"rank {event.rank}: {event.text}")


def engine_fault(turn: Turn, event: ev.EngineFault) -> None:
    """Before the decision it ends the run; after it, nobody can vouch for a success any more."""
    turn.note(f"fault: {event.text}")
    if turn.ending:
        turn.doubt(f"fault of allocd itself: {event.text}")
    else:
        turn.fail(turn.failure(None, "fault", codes.FAULT, event.text, origin="allocd"))
