"""Handlers of what happens to steps and ranks, and the judgement of how a rank ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.state import ENDING_SIGNALS, KILL_MARGIN, NEAR_LOSS, NEAR_SIGNAL, SWEEP_LIMIT, End, Failure
from supervisor.core.turn import Turn

HIGHEST_SIGNAL: Final = 64
LAST_WORDS: Final = 3  # lines of srun's own that become part of a sentence


# --- from the step's start to its rank's -------------------------------------------------------------------------


def spawned(turn: Turn, event: ev.StepSpawned) -> None:
    rank = turn.change_rank(event.rank, step_name=event.step_name)
    if not rank.agent:
        turn.change_rank(event.rank, phase="running", started=True, pid=event.pid)
    if turn.was(event.rank) != "issued":
        decision = turn.state.decision
        turn.change_rank(event.rank, stop=decision.reason if decision else None)
        turn.kill_step(event.rank)
    elif rank.agent:
        turn.set_timer(f"hello:{event.rank}", turn.plan.deadlines.hello)


def step_refused(turn: Turn, event: ev.StepRefused) -> None:
    text = f"rank {event.rank}: its step could not be started: {event.error}"
    turn.change_rank(event.rank, words=event.error)
    turn.fail(turn.failure(event.rank, "not_started", codes.FAILED, text, origin="allocd"))


def hello(turn: Turn, event: ev.Hello) -> None:
    turn.change_rank(event.rank, host=event.host, pid=event.pid, step=event.step)


def started(turn: Turn, event: ev.RankStarted) -> None:
    turn.change_rank(event.rank, pid=event.pid, started=True)


def refused(turn: Turn, event: ev.RankRefused) -> None:
    command_not_found = event.phase == "exec" and event.errno == 2
    code = 127 if command_not_found else 126
    rank = turn.rank(event.rank)
    turn.change_rank(event.rank, refused=event.error, exit=code if rank.exit is None else rank.exit)
    guard_leftovers(turn, event.rank)
    program = turn.plan.role_of(event.rank).command[0]
    text = f"rank {event.rank}: {program} was not executed on {rank.node}: {event.error}"
    turn.fail(turn.failure(event.rank, "not_started", code, text))


# --- the rank's end ----------------------------------------------------------------------------------------------


def rank_ended(turn: Turn, event: ev.RankEnded) -> None:
    guard_leftovers(turn, event.rank)
    take_end(turn, event.rank, event.code, event.signal, event.core)


def guard_leftovers(turn: Turn, number: int) -> None:
    """The agent ends what the rank leaves behind, with the grace of a stop. A stop that was ordered has its timer."""
    rank = turn.rank(number)
    if not rank.killed_step and f"stop:{number}" not in turn.state.deadlines:
        turn.set_timer(f"stop:{number}", rank.grace + KILL_MARGIN)


def take_end(turn: Turn, number: int, code: int | None, signal: int | None, core: bool = False) -> None:
    rank = turn.rank(number)
    ordered = rank.stop is not None
    end = End(turn.record.seq, turn.now, code, signal, core, ordered=ordered, outside=rank.outside)
    turn.change_rank(number, end=end)
    if turn.ending:
        return
    if number == turn.plan.coordinator:
        judge_coordinator(turn, number, end)
    elif not (turn.state.declared or (rank.may_finish and end.native == 0 and not end.provisional)):
        judge_worker(turn, number, end)


def judge_coordinator(turn: Turn, number: int, end: End) -> None:
    if end.native == 0 and not end.provisional:
        turn.settle()
    else:
        turn.fail(end_failure(turn, number, end, "the coordinator"))


def judge_worker(turn: Turn, number: int, end: End) -> None:
    """A worker's end is a failure, at once or, where it may have ended because the work is done, after a second look:
    the coordinator has ended, or cannot be asked, or publishes the marker itself."""
    failure = end_failure(turn, number, end, "before the run could end")
    coordinator = turn.state.coordinator
    unknown = coordinator is not None and coordinator.silent
    perhaps_done = turn.state.phase == "settling" or unknown or turn.plan.marker.by == "coordinator"
    if perhaps_done and turn.rank(number).critical and turn.plan.marker.recheck > 0:
        turn.change_rank(number, suspect=failure)
        turn.set_timer(f"recheck:{number}", turn.plan.marker.recheck)
        turn.ask(cmd.ReadMarker(turn.record.seq))
    else:
        turn.fail(failure)


def end_failure(turn: Turn, number: int, end: End, circumstance: str) -> Failure:
    rank = turn.rank(number)
    how = f"was killed by signal {end.signal}" if end.code is None else f"ended with code {end.code}"
    after = f" after signal {end.outside} from outside" if end.outside else ""
    what = "signal" if end.code is None else "exit"
    code = end.native or (codes.SIGNAL_BASE + end.outside if end.outside else codes.FAILED)
    text = f"rank {number} ({rank.role}) on {rank.node} {how}{after}, {circumstance}"
    lost_peer = any(peer.silent for peer in turn.state.ranks if peer.rank != number)
    return turn.failure(number, what, code, text, provisional=end.provisional or lost_peer)


def tree_gone(turn: Turn, event: ev.TreeGone) -> None:
    rank = turn.change_rank(event.rank, killed=event.killed, left=event.left)
    if event.left:
        turn.doubt(f"rank {event.rank}: {event.left} of its processes could not be killed")
    if rank.end is None and rank.refused is None and rank.stop is None:
        gone_without_end(turn, event.rank)


def gone_without_end(turn: Turn, number: int) -> None:
    """Unasked, the agent gave up a rank that survives KILL, or was signalled before it had started one."""
    rank = turn.rank(number)
    code = codes.SIGNAL_BASE + rank.outside if rank.outside else codes.FAILED
    after = f" after signal {rank.outside} from outside" if rank.outside else ""
    what = "rank_lost" if rank.started else "not_started"
    how = "could not be killed" if rank.left else "was not started"
    text = f"rank {number} ({rank.role}) on {rank.node} {how}{after}"
    turn.change_rank(number, exit=code)
    turn.fail(turn.failure(number, what, code, text, origin="allocd", provisional=rank.outside is not None))


# --- what the agent tells besides --------------------------------------------------------------------------------


def agent_signalled(turn: Turn, event: ev.AgentSignalled) -> None:
    """Only signals that ask for an end explain one: Slurm's early USR1, say, is for whoever handles it."""
    if event.signal not in ENDING_SIGNALS:
        return
    number = event.rank
    rank = turn.change_rank(number, outside=event.signal)
    if rank.end is None or rank.end.ordered or turn.now - rank.end.at > NEAR_SIGNAL:
        return
    end = replace(rank.end, outside=event.signal)
    turn.change_rank(number, end=end)
    turn.provisional(lambda failure: failure.rank == number)
    if number == turn.plan.coordinator:
        turn.fail(end_failure(turn, number, end, "the coordinator"))


def silent(turn: Turn, event: ev.RankSilent) -> None:
    rank = turn.change_rank(event.rank, silent=True)
    peers_lost(turn, event.rank, turn.now - event.seconds)
    if not rank.killed_step:
        turn.set_timer(f"silence:{event.rank}", max(0.0, turn.plan.deadlines.silence - event.seconds))


def heard(turn: Turn, event: ev.RankHeard) -> None:
    turn.change_rank(event.rank, silent=False)
    turn.clear_timers(f"silence:{event.rank}")


def peers_lost(turn: Turn, number: int, since: float) -> None:
    """Nothing was heard of a rank since then: its node may be lost, and peers that ended later fell with it."""
    turn.provisional(lambda failure: failure.rank not in (None, number) and failure.at >= since)


# --- the step's end ----------------------------------------------------------------------------------------------


def step_ended(turn: Turn, event: ev.StepEnded) -> None:
    rank = turn.change_rank(event.rank, returncode=event.returncode, words=event.words)
    if rank.phase == "sweeping":
        turn.ask(cmd.Sweep(event.rank))
        turn.set_timer(f"sweep:{event.rank}", SWEEP_LIMIT)
    meaning = STEP_ENDS.get(turn.was(event.rank))
    if meaning:
        meaning(turn, event)


def never_started(turn: Turn, event: ev.StepEnded) -> None:
    rank = turn.rank(event.rank)
    when = "before it said hello" if rank.pid is None else "before its command was started"
    text = f"rank {event.rank}: its step on {rank.node} ended ({event.returncode}) {when}{said(event)}"
    provisional = rank.outside is not None or shell_code(event.returncode) in (137, 143)
    code = shell_code(event.returncode) or codes.FAILED
    turn.fail(turn.failure(event.rank, "step_lost", code, text, origin="allocd", provisional=provisional))


def end_untold(turn: Turn, event: ev.StepEnded) -> None:
    """srun ended while the rank ran, as far as is known: without an agent that is the rank's own end."""
    if turn.rank(event.rank).agent:
        agent_lost(turn, event)
        return
    returncode = event.returncode
    number = -returncode if returncode < 0 else returncode - codes.SIGNAL_BASE
    signal = number if 0 < number <= HIGHEST_SIGNAL else None  # codes above 128 are srun's way to tell of a signal
    take_end(turn, event.rank, None if signal else returncode, signal)


def agent_lost(turn: Turn, event: ev.StepEnded) -> None:
    rank = turn.rank(event.rank)
    how = f"its agent on {rank.node} ended (srun: {event.returncode}) without telling how the rank did"
    text = f"rank {event.rank}: {how}{said(event)}"
    code = shell_code(event.returncode) or codes.FAILED
    if turn.ending and rank.critical:
        turn.doubt(text)  # no failure any more, but nobody saw it end: no success may be built on that
    turn.fail(turn.failure(event.rank, "step_lost", code, text, origin="allocd", provisional=True))
    if not rank.killed_step:
        peers_lost(turn, event.rank, turn.now - NEAR_LOSS)


def compare_codes(turn: Turn, event: ev.StepEnded) -> None:
    """A success needs agreement: srun must end as the agent was told to."""
    rank = turn.rank(event.rank)
    if rank.released and rank.critical and not rank.killed_step and event.returncode != rank.exit:
        turn.doubt(f"rank {rank.rank}: its agent was to end with {rank.exit}, but srun ended with {event.returncode}")


STEP_ENDS: Final[Mapping[str, Callable[[Turn, ev.StepEnded], None]]] = {
    "spawned": never_started,
    "ready": never_started,
    "launching": agent_lost,
    "running": end_untold,
    "gone": compare_codes,
}
"""What the end of a step means, by the phase in which its rank was. In the others the rank's end is known."""


def shell_code(returncode: int) -> int:
    """A process's end by the shell's convention: 128 + N for signal N."""
    return returncode if returncode >= 0 else codes.SIGNAL_BASE - returncode


def said(event: ev.StepEnded) -> str:
    """srun's last words, as the end of a sentence."""
    lines = [line.strip() for line in event.words.splitlines() if line.strip()]
    return f": {'; '.join(lines[-LAST_WORDS:])}" if lines else ""


def swept(turn: Turn, event: ev.Swept) -> None:
    turn.change_rank(event.rank, killed=max(event.killed, 0), left=event.left)
    if event.left:
        why = f": {event.error}" if event.error else ""
        turn.doubt(f"rank {event.rank}: it is not sure that nothing of it is left on {turn.rank(event.rank).node}{why}")
