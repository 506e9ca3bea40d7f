"""Handlers of what happens to steps and ranks, and the judgement of how a rank ended."""

from __future__ import annotations

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.state import KILL_MARGIN, MARKER_LIMIT, SWEEP_LIMIT, End, Failure
from supervisor.core.turn import Turn


def spawned(turn: Turn, event: ev.StepSpawned) -> None:
    rank = turn.change_rank(event.rank, step_name=event.step_name)
    if turn.ending:
        turn.change_rank(event.rank, stop=turn.state.decision.reason if turn.state.decision else None)
        turn.kill_step(event.rank)
    elif rank.agent:
        turn.set_timer(f"hello:{event.rank}", turn.plan.deadlines.hello)
    else:
        turn.change_rank(event.rank, phase="running", started=True, pid=event.pid)


def step_refused(turn: Turn, event: ev.StepRefused) -> None:
    text = f"rank {event.rank}: its step could not be started: {event.error}"
    turn.change_rank(event.rank, words=event.error)
    turn.fail(turn.failure(event.rank, "not_started", codes.FAILED, text, origin="allocd"))


def hello(turn: Turn, event: ev.Hello) -> None:
    turn.clear_timers(f"hello:{event.rank}")
    rank = turn.change_rank(event.rank, host=event.host, pid=event.pid, step=event.step)
    if turn.ending and not rank.killed_step:
        turn.change_rank(event.rank, stop=None)
        turn.stop_now((event.rank,))


def started(turn: Turn, event: ev.RankStarted) -> None:
    turn.change_rank(event.rank, pid=event.pid, started=True)


def refused(turn: Turn, event: ev.RankRefused) -> None:
    command_not_found = event.phase == "exec" and event.errno == 2
    code = 127 if command_not_found else 126
    text = f"rank {event.rank}: its command was not executed on {turn.rank(event.rank).node}: {event.error}"
    turn.change_rank(event.rank, refused=event.error)
    turn.fail(turn.failure(event.rank, "not_started", code, text))


def rank_ended(turn: Turn, event: ev.RankEnded) -> None:
    rank = turn.rank(event.rank)
    end = End(
        turn.record.seq,
        turn.now,
        event.code,
        event.signal,
        event.core,
        ordered=rank.stop is not None,
        outside=rank.outside,
    )
    turn.change_rank(event.rank, end=end)
    if rank.stop is None:  # its agent ends what the rank leaves behind, with the grace of a stop
        turn.set_timer(f"stop:{event.rank}", rank.grace + KILL_MARGIN)
    judge_end(turn, event.rank, end)


def judge_end(turn: Turn, number: int, end: End) -> None:
    rank = turn.rank(number)
    if turn.ending:
        return
    if number == turn.plan.coordinator:
        judge_coordinator(turn, number, end)
    elif turn.state.declared or (rank.may_finish and end.native == 0 and not end.provisional):
        return
    else:
        judge_worker(turn, number, end)


def judge_coordinator(turn: Turn, number: int, end: End) -> None:
    if end.native == 0 and not end.provisional:
        turn.change(reading=turn.record.seq, phase="settling")
        turn.set_timer("marker", MARKER_LIMIT)
        turn.ask(cmd.ReadMarker(turn.record.seq))
    else:
        turn.fail(end_failure(turn, number, end, "the coordinator"))


def judge_worker(turn: Turn, number: int, end: End) -> None:
    failure = end_failure(turn, number, end, "before the run could end")
    coordinator = turn.state.coordinator
    coordinator_over = coordinator is not None and coordinator.phase not in (
        "issued",
        "spawned",
        "ready",
        "launching",
        "running",
    )
    script = turn.plan.marker.by == "coordinator"
    if (coordinator_over or script) and turn.rank(number).critical and turn.plan.marker.recheck > 0:
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
    code = end.native or (codes.STOPPED if end.outside else codes.FAILED)
    text = f"rank {number} ({rank.role}) on {rank.node} {how}{after}, {circumstance}"
    return turn.failure(number, what, code, text, provisional=end.provisional)


def tree_gone(turn: Turn, event: ev.TreeGone) -> None:
    turn.change_rank(event.rank, killed=event.killed, left=event.left)
    if event.left:
        turn.doubt(f"rank {event.rank}: {event.left} of its processes could not be killed")


def agent_signalled(turn: Turn, event: ev.AgentSignalled) -> None:
    turn.change_rank(event.rank, outside=event.signal)


def silent(turn: Turn, event: ev.RankSilent) -> None:
    turn.change_rank(event.rank, silent=True)
    turn.set_timer(f"silence:{event.rank}", max(0.0, turn.plan.deadlines.silence - event.seconds))


def heard(turn: Turn, event: ev.RankHeard) -> None:
    turn.change_rank(event.rank, silent=False)
    turn.clear_timers(f"silence:{event.rank}")


def step_ended(turn: Turn, event: ev.StepEnded) -> None:
    number = event.rank
    timers = ("hello", "silence", "stop", "release", "kill")
    turn.clear_timers(*(f"{name}:{number}" for name in timers))
    rank = turn.change_rank(number, returncode=event.returncode, words=event.words)
    if not rank.agent and rank.phase == "sweeping" and rank.end is None:
        end_without_agent(turn, number, event.returncode)
    elif rank.phase == "over" and not rank.started and rank.refused is None and rank.end is None:
        never_started(turn, number, event)
    elif rank.end is None and rank.phase == "sweeping" and rank.refused is None:
        agent_lost(turn, number, event)
    elif rank.released and not rank.killed_step and event.returncode != rank.exit:
        turn.doubt(f"rank {number}: its agent was to end with {rank.exit}, but srun ended with {event.returncode}")
    if turn.rank(number).phase == "sweeping":
        turn.ask(cmd.Sweep(number))
        turn.set_timer(f"sweep:{number}", SWEEP_LIMIT)


def end_without_agent(turn: Turn, number: int, returncode: int) -> None:
    """`agent = "off"`: srun's end is all that is known. Codes above 128 are srun's way to tell of a signal."""
    rank = turn.rank(number)
    signal = (
        -returncode if returncode < 0 else returncode - codes.SIGNAL_BASE if returncode > codes.SIGNAL_BASE else None
    )
    end = End(
        turn.record.seq,
        turn.now,
        None if signal else returncode,
        signal,
        ordered=rank.stop is not None,
        outside=rank.outside,
    )
    turn.change_rank(number, end=end)
    judge_end(turn, number, end)


def never_started(turn: Turn, number: int, event: ev.StepEnded) -> None:
    rank = turn.rank(number)
    words = f": {event.words.strip()}" if event.words.strip() else ""
    code = abs(event.returncode) or codes.FAILED
    when = "before it said hello" if rank.pid is None else "before its command was started"
    text = f"rank {number}: its step on {rank.node} ended ({event.returncode}) {when}{words}"
    provisional = rank.outside is not None or event.returncode in (137, 143)
    turn.fail(turn.failure(number, "step_lost", code, text, origin="allocd", provisional=provisional))


def agent_lost(turn: Turn, number: int, event: ev.StepEnded) -> None:
    rank = turn.rank(number)
    words = f": {event.words.strip()}" if event.words.strip() else ""
    code = event.returncode if event.returncode >= 0 else codes.SIGNAL_BASE - event.returncode
    how = f"its agent on {rank.node} ended (srun: {event.returncode}) without telling how the rank did"
    text = f"rank {number}: {how}{words}"
    turn.fail(turn.failure(number, "step_lost", code or codes.FAILED, text, origin="allocd", provisional=True))


def swept(turn: Turn, event: ev.Swept) -> None:
    turn.clear_timers(f"sweep:{event.rank}")
    turn.change_rank(event.rank, killed=max(event.killed, 0), left=event.left)
    if event.left:
        why = f": {event.error}" if event.error else ""
        turn.doubt(f"rank {event.rank}: it is not sure that nothing of it is left on {turn.rank(event.rank).node}{why}")
