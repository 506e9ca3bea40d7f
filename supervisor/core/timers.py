"""Handlers of deadlines, one for each kind of timer: the part of its name before the colon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.on_evidence import collected, late, marker_trouble
from supervisor.core.state import LOOK_LIMIT
from supervisor.core.turn import Turn


def timer_fired(turn: Turn, event: ev.TimerFired) -> None:
    if event.timer not in turn.state.deadlines:
        return  # cleared in the same instant
    turn.clear_timers(event.timer)
    name, _, argument = event.timer.partition(":")
    TIMERS[name](turn, argument)


def run_deadline(turn: Turn, _: str) -> None:
    text = f"the run did not end within its deadline of {turn.plan.deadlines.run:g} s"
    turn.fail(turn.failure(None, "deadline", codes.DEADLINE, text, origin="allocd"), "deadline")


def time_limit(turn: Turn, _: str) -> None:
    text = "Slurm's time limit is near: the run was stopped while there was time to end it in order"
    turn.fail(turn.failure(None, "time_limit", codes.DEADLINE, text, origin="allocd"), "time_limit")


def artifacts_deadline(turn: Turn, _: str) -> None:
    windows = [name for name in turn.state.deadlines if name.startswith(("finalization:", "late:"))]
    turn.clear_timers(*windows)
    last_look(turn, "deadline")


def finalization_over(turn: Turn, contract: str) -> None:
    last_look(turn, f"finalization:{contract}")


def last_look(turn: Turn, closed: str) -> None:
    """A window closes: look once more before judging, for the last look may be older than the files."""
    turn.change(look=turn.record.seq)
    turn.set_timer(f"late:{closed}", LOOK_LIMIT)
    turn.ask(cmd.CheckArtifacts(turn.record.seq))


def no_hello(turn: Turn, argument: str) -> None:
    number = int(argument)
    rank, limit = turn.rank(number), turn.plan.deadlines.hello
    if rank.phase == "issued":
        what = "was not made"
        turn.withdraw(number)
    else:
        what = "did not say hello"
        turn.kill_step(number)
    text = f"rank {number}: its step on {rank.node} {what} within {limit:g} s"
    turn.fail(turn.failure(number, "no_hello", codes.DEADLINE, text, origin="allocd"))


def not_launched(turn: Turn, argument: str) -> None:
    number = int(argument)
    limit = turn.plan.deadlines.hello
    text = f"rank {number}: its command on {turn.rank(number).node} was not executed within {limit:g} s"
    turn.kill_step(number)
    turn.fail(turn.failure(number, "not_started", codes.DEADLINE, text, origin="allocd"))


def rank_lost(turn: Turn, argument: str) -> None:
    number = int(argument)
    rank = turn.rank(number)
    turn.kill_step(number)
    if rank.end is None:
        text = f"rank {number}: its agent on {rank.node} has been silent for too long"
        turn.fail(turn.failure(number, "rank_lost", codes.FAILED, text, origin="allocd", provisional=True))


def recheck_over(turn: Turn, argument: str) -> None:
    """No marker came: the worker's death is what it looked like, and it keeps its place in the order."""
    suspect = turn.rank(int(argument)).suspect
    if suspect is not None:
        turn.change_rank(int(argument), suspect=None)
        turn.fail(suspect)


def step_overdue(turn: Turn, argument: str) -> None:
    turn.note(f"rank {argument}: its agent did not do as told in time; its step is ended from outside")
    turn.kill_step(int(argument))


def reap_overdue(turn: Turn, argument: str) -> None:
    number = int(argument)
    made = turn.rank(number).phase != "withdrawn"
    turn.change_rank(number, phase="abandoned")
    why = "its srun process could not be ended" if made else "nobody says whether its step was made"
    turn.doubt(f"rank {number}: {why}")


def sweep_overdue(turn: Turn, argument: str) -> None:
    number = int(argument)
    turn.change_rank(number, phase="over", left=-1)
    turn.doubt(f"rank {number}: nobody could look on {turn.rank(number).node} for processes that it left")


def marker_overdue(turn: Turn, _: str) -> None:
    marker_trouble(turn, "the marker's directory did not answer in time")


def collect_overdue(turn: Turn, _: str) -> None:
    limit = turn.plan.deadlines.collect
    collected(turn, ev.Collected(errors=[f"collection did not end within {limit:g} s"]))


TIMERS: Final[dict[str, Callable[[Turn, str], None]]] = {
    "run": run_deadline,
    "time_limit": time_limit,
    "artifacts": artifacts_deadline,
    "finalization": finalization_over,
    "late": late,
    "hello": no_hello,
    "launch": not_launched,
    "silence": rank_lost,
    "recheck": recheck_over,
    "stop": step_overdue,
    "release": step_overdue,
    "kill": reap_overdue,
    "sweep": sweep_overdue,
    "marker": marker_overdue,
    "collect": collect_overdue,
}
