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
    if plan.deadlines.artifacts is not None and contracts:
        turn.set_timer("artifacts", plan.deadlines.artifacts)
    for rank in ranks:
        turn.ask(cmd.StartStep(rank.rank))


def time_limit_known(turn: Turn, event: ev.TimeLimitKnown) -> None:
    turn.change(end_at=event.end_at, end_utc=event.end_utc)
    if turn.ending:
        return
    left = event.end_at - turn.now
    budget = turn.state.budget
    if budget > left / 2:
        turn.note(
            f"the shutdown budget ({budget:.0f} s) is more than half of the time that is left ({left:.0f} s): "
            f"the stop begins {left / 2:.0f} s before the limit; ask Slurm for more time or shorten the plan's graces"
        )
        budget = left / 2
    turn.set_timer("time_limit", max(0.0, left - budget))


def stop_requested(turn: Turn, event: ev.StopRequested) -> None:
    turn.change(stop_signals=(*turn.state.stop_signals, event.signal))
    if len(turn.state.stop_signals) > 1:
        kill_everything(turn)
    elif event.signal == "USR1" or (event.signal == "TERM" and near_the_limit(turn)):
        time_limit(turn, "")
    else:
        code = codes.CANCELLED if event.signal == "INT" else codes.STOPPED
        text = f"the engine was told to stop (SIG{event.signal})"
        turn.fail(turn.failure(None, "stop", code, text, origin="allocd"), "stop_requested")


def near_the_limit(turn: Turn) -> bool:
    end_at = turn.state.end_at
    return end_at is not None and end_at - turn.now <= turn.state.budget + EARLY_SIGNAL


def kill_everything(turn: Turn) -> None:
    """The second request: no grace for anybody; the receipt is still written."""
    if not turn.ending:
        code = codes.CANCELLED if turn.state.stop_signals[-1] == "INT" else codes.STOPPED
        turn.fail(turn.failure(None, "stop", code, "told to stop twice", origin="allocd"), "stop_requested")
    decision = turn.state.decision
    assert decision is not None  # noqa: S101 - decided just now at the latest
    for rank in turn.state.ranks:
        if rank.phase in TALKING and rank.phase != "gone":
            turn.change_rank(rank.rank, stop=rank.stop or decision.reason, exit=rank.exit or decision.exit)
            turn.ask(cmd.KillRank(rank.rank, rank.exit or decision.exit))
            turn.set_timer(f"stop:{rank.rank}", KILL_MARGIN)
        elif rank.phase == "spawned":
            turn.change_rank(rank.rank, stop=rank.stop or decision.reason)
            turn.kill_step(rank.rank)


def noted(turn: Turn, event: ev.Noted) -> None:
    turn.note(event.text if event.rank is None else f"rank {event.rank}: {event.text}")


def engine_fault(turn: Turn, event: ev.EngineFault) -> None:
    turn.note(f"fault: {event.text}")
    turn.fail(turn.failure(None, "fault", codes.FAULT, event.text, origin="allocd"))
