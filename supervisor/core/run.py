"""The run machine: (state, record) -> (state, commands). It decides; everything else reports or obeys.

How a run ends, in the order of the rules below:

* A critical rank that fails ends the run at once (`peer_failed`): a non-zero end of the coordinator, any end of a worker
  before the run may end (zero counts as 1), a step that says no hello, a command that cannot be executed, an agent that
  dies or stays silent. All other ranks are stopped in the same turn. The first failure is the one with the lowest journal
  number; ends that come after the decision are consequences and never failures.
* A worker's death has a second look, for up to `marker.recheck` seconds, when the coordinator has ended already or
  publishes the marker itself: it may have died *because* the work is done. A marker that appears meanwhile, or the end of
  the run, judges it; otherwise it is the failure that it looked like, under its own sequence number.
* A zero of the coordinator is believed after a look at marker and note (a script may have noted a failed part), and then
  waits until every contract is complete, invalid or late. Only then is the marker published, and only when it is there
  are the workers stopped (`completed`). Failures pass this barrier.
* `finish = "artifacts"`: the same without a coordinator; the contracts alone end the run.
* Deadlines, the time limit and requests to stop end it in order: the coordinator, then the workers.

Timers are state (`RunState.deadlines`), not commands: a fold of the records restores them. After every event the RULES
run until none has anything to do; each rule is a sentence about the state, so that no handler has to remember what
else its event may set free.

An illegal event raises IllegalEvent with the run's story and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from supervisor.core import artifacts, codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.plan import Plan, parse_plan
from supervisor.core.state import (
    COLLECT_MARGIN,
    COORDINATOR_FIRST,
    EARLY_SIGNAL,
    FINAL,
    KILL_MARGIN,
    LOOK_LIMIT,
    MARKER_LIMIT,
    RANK_TABLE,
    REAP_LIMIT,
    RELEASE_LIMIT,
    RUN_TABLE,
    STOP_REASONS,
    SWEEP_LIMIT,
    TALKING,
    Decision,
    End,
    Failure,
    RankState,
    RunState,
)

STORY_LENGTH: Final = 20
KEPT_TIMERS: Final = frozenset({"marker", "silence", "stop", "release", "kill", "sweep"})
"""Deadlines that a decision does not end: they guard the end itself."""


class IllegalEvent(RuntimeError):
    """An event came in a state that does not allow it. The message tells the state and how it came about."""


def step(state: RunState, record: ev.Record) -> tuple[RunState, list[cmd.Command]]:
    """The next state and what to do now. Raises IllegalEvent; `state` is unchanged then (it is frozen)."""
    turn = _Turn(state, record)
    turn.take(record.event)
    turn.settle()
    return turn.state, turn.commands


def fold(records: Iterable[ev.Record]) -> RunState:
    """The state after all records, as recovery and every view compute it. Raises IllegalEvent."""
    state = RunState()
    for record in records:
        state, _ = step(state, record)
    return state


class _Turn:
    """One event's turn: a working copy of the state and the commands so far."""

    def __init__(self, state: RunState, record: ev.Record) -> None:
        self.state = replace(state, seq=record.seq, at=record.at)
        self.record = record
        self.commands: list[cmd.Command] = []

    # --- small tools ---------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.record.at

    @property
    def plan(self) -> Plan:
        return self.state.the_plan

    @property
    def ending(self) -> bool:
        return self.state.decision is not None

    def change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def rank(self, number: int) -> RankState:
        return self.state.ranks[number]

    def change_rank(self, number: int, **fields: Any) -> RankState:
        changed = replace(self.rank(number), **fields)
        ranks = self.state.ranks
        self.change(ranks=(*ranks[:number], changed, *ranks[number + 1 :]))
        return changed

    def ask(self, command: cmd.Command) -> None:
        self.commands.append(command)

    def note(self, text: str) -> None:
        self.change(notes=(*self.state.notes, text))

    def doubt(self, text: str) -> None:
        self.change(doubts=(*self.state.doubts, text))

    def set_timer(self, name: str, seconds: float) -> None:
        self.change(deadlines={**self.state.deadlines, name: self.now + seconds})

    def clear_timers(self, *names: str) -> None:
        kept = {name: due for name, due in self.state.deadlines.items() if name not in names}
        self.change(deadlines=kept)

    # --- permission ----------------------------------------------------------------------------------------------

    def take(self, event: ev.Event) -> None:
        """Check the tables, move the rank's phase, call the event's handler."""
        if isinstance(event, ev.RankEvent):
            self._take_rank_event(event)
        elif self.state.phase not in RUN_TABLE.get(type(event), ()):
            raise self._illegal(event, f"the run is {self.state.phase}")
        HANDLERS[type(event)](self, event)

    def _take_rank_event(self, event: ev.RankEvent) -> None:
        if not 0 <= event.rank < len(self.state.ranks):
            raise self._illegal(event, f"there is no rank {event.rank}")
        rank = self.rank(event.rank)
        following = RANK_TABLE[type(event)].get(rank.phase)
        if following is None:
            raise self._illegal(event, f"rank {event.rank} is {rank.phase}")
        if following:
            self.change_rank(event.rank, phase=following)

    def _illegal(self, event: ev.Event, why: str) -> IllegalEvent:
        state = self.state
        story = [
            f"run: {state.phase}, decision: {state.decision}",
            *(f"rank {rank.rank} ({rank.role}): {rank.phase}, end: {rank.end}" for rank in state.ranks),
            *(f"note: {text}" for text in state.notes[-STORY_LENGTH:]),
        ]
        return IllegalEvent(f"{event.name} (seq {self.record.seq}) is not allowed: {why}\n" + "\n".join(story))

    # --- failing and deciding ------------------------------------------------------------------------------------

    def failure(
        self,
        rank: int | None,
        what: str,
        code: int,
        text: str,
        *,
        origin: str = "native",
        provisional: bool = False,
    ) -> Failure:
        return Failure(self.record.seq, self.now, rank, what, code, origin, text, provisional)

    def fail(self, failure: Failure, reason: str = "peer_failed") -> None:
        """A failure before the decision is the run's; one of a rank that is not critical is only told."""
        if self.ending:
            return
        if failure.rank is not None and not self.rank(failure.rank).critical:
            self.note(f"not critical: {failure.text}")
            return
        self.change(failures=(*self.state.failures, failure))
        self.decide(reason, failure.code)

    def decide(self, reason: str, code: int) -> None:
        """End the run. Nothing after this is a failure; no step starts after this."""
        assert reason in STOP_REASONS  # noqa: S101 - a closed list
        if self.ending:
            return
        self._judge_suspects(reason)
        first = self.state.first_failure
        code = first.code if first else code
        self.change(decision=Decision(reason, self.record.seq, self.now, code), phase="stopping")
        self.change(deadlines={n: due for n, due in self.state.deadlines.items() if n.partition(":")[0] in KEPT_TIMERS})
        for rank in self.state.ranks:
            if rank.phase == "issued":
                self.change_rank(rank.rank, phase="withdrawn")
        self.publish(code)
        if reason == "completed":
            return  # the workers are stopped when the marker is there: see _stop_ranks
        self._stop_now(self._first_tier(reason))

    def _first_tier(self, reason: str) -> tuple[int, ...]:
        coordinator = self.state.coordinator
        if reason in COORDINATOR_FIRST and coordinator and coordinator.phase not in (*FINAL, "gone"):
            return (coordinator.rank,)
        return tuple(rank.rank for rank in self.state.ranks)

    def _judge_suspects(self, reason: str) -> None:
        """The end of the run judges second looks that are under way: dead because the work was done, or by itself."""
        by_marker = reason == "completed" or any(failure.what == "marker" for failure in self.state.failures)
        for rank in self.state.ranks:
            if rank.suspect and not by_marker:
                self.change(failures=(*self.state.failures, rank.suspect))
            if rank.suspect:
                self.change_rank(rank.rank, suspect=None)

    def _stop_now(self, ranks: Iterable[int]) -> None:
        decision = self.state.decision
        assert decision is not None  # noqa: S101 - only called after one
        for number in ranks:
            rank = self.rank(number)
            if rank.stop is not None or rank.phase in FINAL:
                continue
            self.change_rank(number, stop=decision.reason)
            if rank.phase == "spawned" and rank.agent:
                self.kill_step(number)
            elif rank.phase in ("ready", "launching", "running"):
                self.change_rank(number, exit=decision.exit)
                self.ask(cmd.StopRank(number, decision.reason, rank.grace, decision.exit))
                self.set_timer(f"stop:{number}", rank.grace + (KILL_MARGIN if rank.agent else 0.0))

    def kill_step(self, number: int) -> None:
        """End a rank's srun from outside; its agent, if there is one, ends its tree when the channel closes."""
        self.change_rank(number, killed_step=True)
        self.ask(cmd.KillStep(number))
        self.clear_timers(f"stop:{number}", f"release:{number}", f"hello:{number}", f"silence:{number}")
        self.set_timer(f"kill:{number}", REAP_LIMIT)

    def publish(self, code: int) -> None:
        coordinator = self.state.coordinator
        gone = coordinator is None or coordinator.phase in ("gone", *FINAL)
        self.change(marker=replace(self.state.marker, status="publishing"))
        self.set_timer("marker", MARKER_LIMIT)
        self.ask(cmd.PublishMarker(code, "supervisor", gone))

    # --- rules: what the state sets free ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Run the rules until none has anything to do."""
        if self.state.phase == "new":
            return
        while any(rule(self) for rule in RULES):
            pass

    def _start_ranks(self) -> bool:
        """All agents have said hello (or each, if the plan says so): the ranks may start."""
        if self.ending:
            return False
        waiting = any(rank.agent and rank.phase in ("issued", "spawned") for rank in self.state.ranks)
        if waiting and self.plan.start == "together":
            return False
        ready = [rank.rank for rank in self.state.ranks if rank.phase == "ready"]
        for number in ready:
            self.change_rank(number, phase="launching")
            self.ask(cmd.StartRank(number))
        return bool(ready)

    def _all_running(self) -> bool:
        if self.state.phase != "starting":
            return False
        early = ("issued", "spawned", "ready", "launching")
        if any(rank.phase in early for rank in self.state.ranks):
            return False
        self.change(phase="running")
        return True

    def _contracts_done(self) -> bool:
        """Every contract has come to its end, and nobody else's end is waited for: the run is decided."""
        alone = self.plan.finish == "artifacts" and self.state.phase in ("starting", "running")
        if self.ending or not (self.state.settling or alone):
            return False
        if any(not contract.final for contract in self.state.contracts):
            return False
        bad = self._broken_contracts()
        if not bad:
            self.decide("completed", codes.OK)
        else:
            self.fail(self._artifact_failure(bad[0]), "artifacts_invalid")
        return True

    def _broken_contracts(self) -> list[artifacts.ArtifactState]:
        required = {item.contract_id for item in artifacts.instances(self.plan) if item.artifact.required}
        return [c for c in self.state.contracts if c.state in ("invalid", "late") and c.contract in required]

    def _artifact_failure(self, contract: artifacts.ArtifactState) -> Failure:
        problems = "; ".join(contract.finding.problems) if contract.finding else "nothing was found"
        what = "late" if contract.state == "late" else "artifact"
        why = f" ({contract.reason})" if contract.reason else ""
        code = codes.DEADLINE if contract.reason == "deadline" else codes.ARTIFACTS
        text = f"artifact {contract.contract} is {contract.state}{why}: {problems}"
        return self.failure(None, what, code, text, origin="allocd")

    def _next_tier(self) -> bool:
        """The coordinator has been stopped: now the workers. Or the marker is there: the work is done."""
        decision = self.state.decision
        if decision is None:
            return False
        if decision.reason == "completed" and self.state.marker.status in ("publishing", "blocked"):
            return False
        coordinator = self.state.coordinator
        tier_is_up = decision.reason in COORDINATOR_FIRST and coordinator and coordinator.phase not in (*FINAL, "gone")
        todo = [rank.rank for rank in self.state.ranks if rank.stop is None and rank.phase not in FINAL]
        if tier_is_up or not todo:
            return False
        self._stop_now(todo)
        return True

    def _retry_marker(self) -> bool:
        """Something that is no marker stood in its place; with the coordinator gone it may be replaced."""
        coordinator = self.state.coordinator
        gone = coordinator is None or coordinator.phase in ("gone", *FINAL)
        if self.state.marker.status != "blocked" or not gone or self.state.decision is None:
            return False
        self.publish(self.state.decision.exit)
        return True

    def _release(self) -> bool:
        """Trees that are gone: their agents may exit, each with the code that is its own or the marker's."""
        todo = [rank for rank in self.state.ranks if rank.phase == "gone" and not rank.released and not rank.suspect]
        for rank in todo:
            code = self._step_code(rank)
            self.change_rank(rank.rank, released=True, exit=code)
            self.ask(cmd.ReleaseStep(rank.rank, code))
            self.clear_timers(f"stop:{rank.rank}", f"silence:{rank.rank}")
            self.set_timer(f"release:{rank.rank}", RELEASE_LIMIT)
        return bool(todo)

    def _step_code(self, rank: RankState) -> int:
        failed = next((f for f in self.state.failures if f.rank == rank.rank and f.what != "marker"), None)
        decision = self.state.decision
        if rank.exit is not None:
            return rank.exit
        if self.state.declared and not failed:
            return codes.OK
        if failed is not None or decision is None or rank.rank == self.plan.coordinator:
            return failed.code if failed else (rank.end.native if rank.end else codes.OK)
        return decision.exit

    def _all_over(self) -> bool:
        """Every rank is over and the marker is settled: collect the evidence."""
        if self.state.phase != "stopping" or self.state.marker.status in ("publishing", "blocked"):
            return False
        if any(rank.phase not in FINAL for rank in self.state.ranks):
            return False
        self.change(phase="collecting", deadlines={})
        self.set_timer("collect", self.plan.deadlines.collect + COLLECT_MARGIN)
        self.ask(cmd.Collect())
        return True

    def finish(self, collected: ev.Collected) -> None:
        self.change(collected=collected, phase="ended", deadlines={})
        self.ask(cmd.Finish())


RULES: Final[tuple[Callable[[_Turn], bool], ...]] = (
    _Turn._start_ranks,
    _Turn._all_running,
    _Turn._contracts_done,
    _Turn._next_tier,
    _Turn._retry_marker,
    _Turn._release,
    _Turn._all_over,
)


# --- handlers: the run -------------------------------------------------------------------------------------------


def _opened(turn: _Turn, event: ev.RunOpened) -> None:
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


def _time_limit_known(turn: _Turn, event: ev.TimeLimitKnown) -> None:
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


def _stop_requested(turn: _Turn, event: ev.StopRequested) -> None:
    turn.change(stop_signals=(*turn.state.stop_signals, event.signal))
    if len(turn.state.stop_signals) > 1:
        _kill_everything(turn)
    elif event.signal == "USR1" or (event.signal == "TERM" and _near_the_limit(turn)):
        _time_limit(turn, "")
    else:
        code = codes.CANCELLED if event.signal == "INT" else codes.STOPPED
        text = f"the engine was told to stop (SIG{event.signal})"
        turn.fail(turn.failure(None, "stop", code, text, origin="allocd"), "stop_requested")


def _near_the_limit(turn: _Turn) -> bool:
    end_at = turn.state.end_at
    return end_at is not None and end_at - turn.now <= turn.state.budget + EARLY_SIGNAL


def _kill_everything(turn: _Turn) -> None:
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


def _timer_fired(turn: _Turn, event: ev.TimerFired) -> None:
    if event.timer not in turn.state.deadlines:
        return  # cleared in the same instant
    turn.clear_timers(event.timer)
    name, _, argument = event.timer.partition(":")
    TIMERS[name](turn, argument)


def _run_deadline(turn: _Turn, _: str) -> None:
    text = f"the run did not end within its deadline of {turn.plan.deadlines.run:g} s"
    turn.fail(turn.failure(None, "deadline", codes.DEADLINE, text, origin="allocd"), "deadline")


def _time_limit(turn: _Turn, _: str) -> None:
    text = "Slurm's time limit is near: the run was stopped while there was time to end it in order"
    turn.fail(turn.failure(None, "time_limit", codes.DEADLINE, text, origin="allocd"), "time_limit")


def _artifacts_deadline(turn: _Turn, _: str) -> None:
    turn.clear_timers("finalization", "late:finalization")
    _last_look(turn, "deadline")


def _finalization_over(turn: _Turn, _: str) -> None:
    _last_look(turn, "finalization")


def _last_look(turn: _Turn, reason: str) -> None:
    """A window closes: look once more before judging, for the last look may be older than the files."""
    turn.change(look=turn.record.seq)
    turn.set_timer(f"late:{reason}", LOOK_LIMIT)
    turn.ask(cmd.CheckArtifacts(turn.record.seq))


def _expire(turn: _Turn, reason: Any) -> None:
    """What is still open after the last look is late; why, says which window closed."""
    contracts = tuple(item if item.final else artifacts.expire(item, reason) for item in turn.state.contracts)
    turn.change(contracts=contracts)
    bad = turn._broken_contracts()
    if reason == "deadline" and bad:
        turn.fail(turn._artifact_failure(bad[0]), "deadline")


def _no_hello(turn: _Turn, argument: str) -> None:
    number = int(argument)
    limit = turn.plan.deadlines.hello
    text = f"rank {number}: its step on {turn.rank(number).node} did not say hello within {limit:g} s"
    turn.fail(turn.failure(number, "no_hello", codes.DEADLINE, text, origin="allocd"))
    turn.kill_step(number)


def _rank_lost(turn: _Turn, argument: str) -> None:
    number = int(argument)
    text = f"rank {number}: its agent on {turn.rank(number).node} has been silent for too long"
    turn.fail(turn.failure(number, "rank_lost", codes.FAILED, text, origin="allocd", provisional=True))
    turn.kill_step(number)


def _recheck_over(turn: _Turn, argument: str) -> None:
    """No marker came: the worker's death is what it looked like, and it keeps its place in the order."""
    suspect = turn.rank(int(argument)).suspect
    if suspect is not None:
        turn.change_rank(int(argument), suspect=None)
        turn.fail(suspect)


def _step_overdue(turn: _Turn, argument: str) -> None:
    turn.note(f"rank {argument}: its agent did not do as told in time; its step is ended from outside")
    turn.kill_step(int(argument))


def _reap_overdue(turn: _Turn, argument: str) -> None:
    number = int(argument)
    turn.change_rank(number, phase="abandoned")
    turn.doubt(f"rank {number}: its srun process could not be ended")


def _sweep_overdue(turn: _Turn, argument: str) -> None:
    number = int(argument)
    turn.change_rank(number, phase="over", left=-1)
    turn.doubt(f"rank {number}: nobody could look on {turn.rank(number).node} for processes that it left")


def _marker_overdue(turn: _Turn, _: str) -> None:
    _marker_trouble(turn, f"the marker's directory did not answer within {MARKER_LIMIT:g} s")


def _collect_overdue(turn: _Turn, _: str) -> None:
    limit = turn.plan.deadlines.collect
    turn.finish(ev.Collected(errors=[f"collection did not end within {limit:g} s"]))


TIMERS: Final[dict[str, Callable[[_Turn, str], None]]] = {
    "run": _run_deadline,
    "time_limit": _time_limit,
    "artifacts": _artifacts_deadline,
    "finalization": _finalization_over,
    "late": _expire,
    "hello": _no_hello,
    "silence": _rank_lost,
    "recheck": _recheck_over,
    "stop": _step_overdue,
    "release": _step_overdue,
    "kill": _reap_overdue,
    "sweep": _sweep_overdue,
    "marker": _marker_overdue,
    "collect": _collect_overdue,
}


def _noted(turn: _Turn, event: ev.Noted) -> None:
    turn.note(event.text if event.rank is None else f"rank {event.rank}: {event.text}")


def _engine_fault(turn: _Turn, event: ev.EngineFault) -> None:
    turn.note(f"fault: {event.text}")
    turn.fail(turn.failure(None, "fault", codes.FAULT, event.text, origin="allocd"))


# --- handlers: steps and ranks -----------------------------------------------------------------------------------


def _spawned(turn: _Turn, event: ev.StepSpawned) -> None:
    rank = turn.change_rank(event.rank, step_name=event.step_name)
    if turn.ending:
        turn.change_rank(event.rank, stop=turn.state.decision.reason if turn.state.decision else None)
        turn.kill_step(event.rank)
    elif rank.agent:
        turn.set_timer(f"hello:{event.rank}", turn.plan.deadlines.hello)
    else:
        turn.change_rank(event.rank, phase="running", started=True, pid=event.pid)


def _step_refused(turn: _Turn, event: ev.StepRefused) -> None:
    text = f"rank {event.rank}: its step could not be started: {event.error}"
    turn.change_rank(event.rank, words=event.error)
    turn.fail(turn.failure(event.rank, "not_started", codes.FAILED, text, origin="allocd"))


def _hello(turn: _Turn, event: ev.Hello) -> None:
    turn.clear_timers(f"hello:{event.rank}")
    rank = turn.change_rank(event.rank, host=event.host, pid=event.pid, step=event.step)
    if turn.ending and not rank.killed_step:
        turn.change_rank(event.rank, stop=None)
        turn._stop_now((event.rank,))


def _started(turn: _Turn, event: ev.RankStarted) -> None:
    turn.change_rank(event.rank, pid=event.pid, started=True)


def _refused(turn: _Turn, event: ev.RankRefused) -> None:
    command_not_found = event.phase == "exec" and event.errno == 2
    code = 127 if command_not_found else 126
    text = f"rank {event.rank}: its command was not executed on {turn.rank(event.rank).node}: {event.error}"
    turn.change_rank(event.rank, refused=event.error)
    turn.fail(turn.failure(event.rank, "not_started", code, text))


def _rank_ended(turn: _Turn, event: ev.RankEnded) -> None:
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
    _judge_end(turn, event.rank, end)


def _judge_end(turn: _Turn, number: int, end: End) -> None:
    rank = turn.rank(number)
    if turn.ending:
        return
    if number == turn.plan.coordinator:
        _judge_coordinator(turn, number, end)
    elif turn.state.declared or (rank.may_finish and end.native == 0 and not end.provisional):
        return
    else:
        _judge_worker(turn, number, end)


def _judge_coordinator(turn: _Turn, number: int, end: End) -> None:
    if end.native == 0 and not end.provisional:
        turn.change(reading=turn.record.seq, phase="settling")
        turn.set_timer("marker", MARKER_LIMIT)
        turn.ask(cmd.ReadMarker(turn.record.seq))
    else:
        turn.fail(_end_failure(turn, number, end, "the coordinator"))


def _judge_worker(turn: _Turn, number: int, end: End) -> None:
    failure = _end_failure(turn, number, end, "before the run could end")
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


def _end_failure(turn: _Turn, number: int, end: End, circumstance: str) -> Failure:
    rank = turn.rank(number)
    how = f"was killed by signal {end.signal}" if end.code is None else f"ended with code {end.code}"
    after = f" after signal {end.outside} from outside" if end.outside else ""
    what = "signal" if end.code is None else "exit"
    code = end.native or (codes.STOPPED if end.outside else codes.FAILED)
    text = f"rank {number} ({rank.role}) on {rank.node} {how}{after}, {circumstance}"
    return turn.failure(number, what, code, text, provisional=end.provisional)


def _tree_gone(turn: _Turn, event: ev.TreeGone) -> None:
    turn.change_rank(event.rank, killed=event.killed, left=event.left)
    if event.left:
        turn.doubt(f"rank {event.rank}: {event.left} of its processes could not be killed")


def _agent_signalled(turn: _Turn, event: ev.AgentSignalled) -> None:
    turn.change_rank(event.rank, outside=event.signal)


def _silent(turn: _Turn, event: ev.RankSilent) -> None:
    turn.change_rank(event.rank, silent=True)
    turn.set_timer(f"silence:{event.rank}", max(0.0, turn.plan.deadlines.silence - event.seconds))


def _heard(turn: _Turn, event: ev.RankHeard) -> None:
    turn.change_rank(event.rank, silent=False)
    turn.clear_timers(f"silence:{event.rank}")


def _step_ended(turn: _Turn, event: ev.StepEnded) -> None:
    number = event.rank
    timers = ("hello", "silence", "stop", "release", "kill")
    turn.clear_timers(*(f"{name}:{number}" for name in timers))
    rank = turn.change_rank(number, returncode=event.returncode, words=event.words)
    if not rank.agent and rank.phase == "sweeping" and rank.end is None:
        _end_without_agent(turn, number, event.returncode)
    elif rank.phase == "over" and not rank.started and rank.refused is None and rank.end is None:
        _never_started(turn, number, event)
    elif rank.end is None and rank.phase == "sweeping" and rank.refused is None:
        _agent_lost(turn, number, event)
    elif rank.released and not rank.killed_step and event.returncode != rank.exit:
        turn.doubt(f"rank {number}: its agent was to end with {rank.exit}, but srun ended with {event.returncode}")
    if turn.rank(number).phase == "sweeping":
        turn.ask(cmd.Sweep(number))
        turn.set_timer(f"sweep:{number}", SWEEP_LIMIT)


def _end_without_agent(turn: _Turn, number: int, returncode: int) -> None:
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
    _judge_end(turn, number, end)


def _never_started(turn: _Turn, number: int, event: ev.StepEnded) -> None:
    rank = turn.rank(number)
    words = f": {event.words.strip()}" if event.words.strip() else ""
    code = abs(event.returncode) or codes.FAILED
    when = "before it said hello" if rank.pid is None else "before its command was started"
    text = f"rank {number}: its step on {rank.node} ended ({event.returncode}) {when}{words}"
    provisional = rank.outside is not None or event.returncode in (137, 143)
    turn.fail(turn.failure(number, "step_lost", code, text, origin="allocd", provisional=provisional))


def _agent_lost(turn: _Turn, number: int, event: ev.StepEnded) -> None:
    rank = turn.rank(number)
    words = f": {event.words.strip()}" if event.words.strip() else ""
    code = event.returncode if event.returncode > 0 else codes.SIGNAL_BASE - event.returncode if event.returncode else 1
    text = f"rank {number}: its agent on {rank.node} ended (srun: {event.returncode}) without telling how the rank did{words}"
    turn.fail(turn.failure(number, "step_lost", code, text, origin="allocd", provisional=True))


def _swept(turn: _Turn, event: ev.Swept) -> None:
    turn.clear_timers(f"sweep:{event.rank}")
    turn.change_rank(event.rank, killed=max(event.killed, 0), left=event.left)
    if event.left:
        why = f": {event.error}" if event.error else ""
        turn.doubt(f"rank {event.rank}: it is not sure that nothing of it is left on {turn.rank(event.rank).node}{why}")


# --- handlers: marker, artifacts, evidence -----------------------------------------------------------------------


def _marker_read(turn: _Turn, event: ev.MarkerRead) -> None:
    marker = replace(turn.state.marker, found=event.found, note=event.note or turn.state.marker.note)
    turn.change(marker=marker)
    if turn.ending:
        return
    said = event.code if event.found == "marker" else None
    answered = 0 < turn.state.reading <= event.asked
    if said or (answered and marker.note):
        _coordinator_said(turn, said or marker.note or 0, "published" if said else "noted")
    elif answered:
        _coordinator_done(turn)
    elif said == 0:
        turn.change(declared=True)
        for rank in turn.state.ranks:
            turn.change_rank(rank.rank, suspect=None)
            turn.clear_timers(f"recheck:{rank.rank}")


def _coordinator_said(turn: _Turn, code: int, verb: str) -> None:
    turn.clear_timers("marker")
    turn.change(reading=0)
    number = turn.plan.coordinator
    who = "the run's script" if number is None else f"rank {number} ({turn.rank(number).role}), the coordinator,"
    turn.fail(turn.failure(number, "marker", code, f"{who} {verb} code {code}"))


def _coordinator_done(turn: _Turn) -> None:
    """The coordinator ended with zero and noted nothing else: what is promised may now come."""
    turn.clear_timers("marker")
    turn.change(reading=0, settling=True)
    if all(item.final for item in turn.state.contracts):
        return
    contracts = tuple(item if item.final else artifacts.open_window(item) for item in turn.state.contracts)
    turn.change(contracts=contracts)
    turn.set_timer("finalization", turn.plan.deadlines.finalization)
    turn.ask(cmd.CheckArtifacts(turn.record.seq))


def _marker_published(turn: _Turn, event: ev.MarkerPublished) -> None:
    turn.clear_timers("marker")
    status = replace(turn.state.marker, status="published", code=event.code, outcome=event.outcome, error=None)
    turn.change(marker=status)
    decision = turn.state.decision
    if decision and event.code != decision.exit:
        turn.note(f"the marker says {event.code}, published earlier; the run ends with {decision.exit}")


def _marker_failed(turn: _Turn, event: ev.MarkerFailed) -> None:
    turn.clear_timers("marker")
    coordinator = turn.state.coordinator
    if event.blocked and coordinator is not None and coordinator.phase not in ("gone", *FINAL):
        turn.change(marker=replace(turn.state.marker, status="blocked", error=event.error))
    else:
        _marker_trouble(turn, event.error)


def _marker_trouble(turn: _Turn, error: str) -> None:
    """Nobody can be told how the run ended, or what a script noted: no success may be claimed."""
    turn.change(marker=replace(turn.state.marker, status="failed", error=error), reading=0)
    failure = turn.failure(turn.plan.coordinator, "marker", codes.FAULT, f"marker: {error}", origin="allocd")
    if turn.ending:
        turn.change(failures=(*turn.state.failures, failure))
    else:
        turn.fail(failure)


def _artifact_seen(turn: _Turn, event: ev.ArtifactSeen) -> None:
    finding = artifacts.Finding.from_dict(
        {"contract": event.contract, "answer": event.answer, "problems": event.problems, "files": event.files}
    )
    contracts = tuple(
        artifacts.observe(item, finding) if item.contract == event.contract and not item.final else item
        for item in turn.state.contracts
    )
    turn.change(contracts=contracts)


def _artifacts_looked(turn: _Turn, event: ev.ArtifactsLooked) -> None:
    """The last look after a window closed is over: what is still open is late."""
    for reason in ("deadline", "finalization"):
        if f"late:{reason}" in turn.state.deadlines and event.asked >= turn.state.look:
            turn.clear_timers(f"late:{reason}")
            _expire(turn, reason)


def _checker_fault(turn: _Turn, event: ev.CheckerFault) -> None:
    text = f"the checker of artifact {event.contract} broke: {event.text}"
    turn.fail(turn.failure(None, "fault", codes.FAULT, text, origin="allocd"))


def _collected(turn: _Turn, event: ev.Collected) -> None:
    turn.finish(event)


HANDLERS: Final[dict[type[ev.Event], Callable[[_Turn, Any], None]]] = {
    ev.RunOpened: _opened,
    ev.TimeLimitKnown: _time_limit_known,
    ev.StopRequested: _stop_requested,
    ev.TimerFired: _timer_fired,
    ev.Noted: _noted,
    ev.EngineFault: _engine_fault,
    ev.StepSpawned: _spawned,
    ev.StepRefused: _step_refused,
    ev.Hello: _hello,
    ev.RankStarted: _started,
    ev.RankRefused: _refused,
    ev.RankEnded: _rank_ended,
    ev.TreeGone: _tree_gone,
    ev.AgentSignalled: _agent_signalled,
    ev.RankSilent: _silent,
    ev.RankHeard: _heard,
    ev.StepEnded: _step_ended,
    ev.Swept: _swept,
    ev.MarkerRead: _marker_read,
    ev.MarkerPublished: _marker_published,
    ev.MarkerFailed: _marker_failed,
    ev.ArtifactSeen: _artifact_seen,
    ev.ArtifactsLooked: _artifacts_looked,
    ev.CheckerFault: _checker_fault,
    ev.Collected: _collected,
}
