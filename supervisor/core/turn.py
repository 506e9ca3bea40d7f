"""One event's turn: a working copy of the state, the permission tables applied, and the few things that every handler
and rule does: fail, decide, stop, publish.

A turn is thrown away after its event; what is kept is its state and its commands. If anything in it raises, nothing
has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from supervisor.core import codes
from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.artifacts import ArtifactState, few
from supervisor.core.plan import Plan
from supervisor.core.state import (
    BEFORE_THE_END,
    GUARDS,
    KILL_MARGIN,
    LATE,
    MARKER_LIMIT,
    RANK_TABLE,
    REAP_LIMIT,
    RUN_TABLE,
    SAME,
    STOP_REASONS,
    Decision,
    Failure,
    RankState,
    RunState,
)

STORY_LENGTH: Final = 20
KEPT_TIMERS: Final = frozenset({"marker", "silence", "stop", "release", "kill", "sweep"})
"""Deadlines that a decision does not end: they guard the end itself."""


class IllegalEvent(RuntimeError):
    """An event came in a state that does not allow it. The message tells the state and how it came about."""


class Turn:
    """One event's turn: a working copy of the state and the commands so far."""

    def __init__(self, state: RunState, record: ev.Record) -> None:
        self.before = state
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

    def was(self, number: int) -> str:
        """The rank's phase before this event."""
        return self.before.ranks[number].phase

    def change_rank(self, number: int, **fields: Any) -> RankState:
        changed = replace(self.rank(number), **fields)
        ranks = self.state.ranks
        self.change(ranks=(*ranks[:number], changed, *ranks[number + 1 :]))
        return changed

    def contract(self, name: str) -> ArtifactState:
        return next(item for item in self.state.contracts if item.contract == name)

    def change_contract(self, name: str, change: Callable[[ArtifactState], ArtifactState]) -> None:
        """Change one contract, unless it has come to its end: nothing takes that back."""
        contracts = self.state.contracts
        self.change(
            contracts=tuple(change(item) if item.contract == name and not item.final else item for item in contracts)
        )

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

    def drop_timers(self) -> None:
        """Forget the timers of ranks that are past what those guard."""
        kept = {name: due for name, due in self.state.deadlines.items() if self._guards(*name.partition(":")[::2])}
        self.change(deadlines=kept)

    def _guards(self, kind: str, argument: str) -> bool:
        return kind not in GUARDS or self.rank(int(argument)).phase in GUARDS[kind]

    # --- permission ----------------------------------------------------------------------------------------------

    def permit(self, event: ev.Event) -> bool:
        """Check the tables and move the rank's phase. False: legal, but too late to mean anything. Raises
        IllegalEvent."""
        if isinstance(event, ev.RankEvent):
            return self._take_rank_event(event)
        if self.state.phase not in RUN_TABLE.get(type(event), ()):
            raise self.illegal(f"the run is {self.state.phase}")
        return True

    def _take_rank_event(self, event: ev.RankEvent) -> bool:
        if self.state.phase not in BEFORE_THE_END:
            raise self.illegal(f"the run is {self.state.phase}")
        if not 0 <= event.rank < len(self.state.ranks):
            raise self.illegal(f"there is no rank {event.rank}")
        rank = self.rank(event.rank)
        following = RANK_TABLE[type(event)].get(rank.phase)
        if following is None:
            raise self.illegal(f"rank {event.rank} is {rank.phase}")
        if following not in (SAME, LATE):
            self.change_rank(event.rank, phase=following)
        return following != LATE

    def illegal(self, why: str) -> IllegalEvent:
        """The error for this turn's event, with the run's story."""
        state, event = self.before, self.record.event
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
        """End the run. Nothing after this is a failure; no step starts after this. The rule `stop_ranks` does the
        rest."""
        assert reason in STOP_REASONS  # noqa: S101 - a closed list
        if self.ending:
            return
        self._judge_suspects(reason)
        first = self.state.first_failure
        code = first.code if first else code
        self.change(decision=Decision(reason, self.record.seq, self.now, code), phase="stopping", reading=0)
        self.change(deadlines={n: due for n, due in self.state.deadlines.items() if n.partition(":")[0] in KEPT_TIMERS})
        for rank in self.state.ranks:
            if rank.phase == "issued":
                self.withdraw(rank.rank)
        self.publish(code)

    def _judge_suspects(self, reason: str) -> None:
        """The end of the run judges second looks that are under way: dead because the work was done, or by itself."""
        said = (failure.what == "marker" and failure.origin == "native" for failure in self.state.failures)
        by_marker = reason == "completed" or any(said)
        for rank in self.state.ranks:
            if rank.suspect and not by_marker:
                self.change(failures=(*self.state.failures, rank.suspect))
            if rank.suspect:
                self.change_rank(rank.rank, suspect=None)

    def stop(self, number: int) -> None:
        """Stop a rank because the run is decided. One that was not started yet never will be; one that has ended
        already is ended by its agent."""
        decision, rank = self.state.decision, self.rank(number)
        assert decision is not None  # noqa: S101 - only called after one
        self.change_rank(number, stop=decision.reason)
        if rank.phase == "spawned":
            self.kill_step(number)
        elif rank.phase in ("ready", "launching", "running") and not rank.killed_step:
            self.change_rank(number, exit=decision.exit)
            self.ask(cmd.StopRank(number, decision.reason, rank.grace, decision.exit))
            self.set_timer(f"stop:{number}", rank.grace + (KILL_MARGIN if rank.agent else 0.0))

    def withdraw(self, number: int) -> None:
        """The step that was asked for is not wanted any more: it is refused, or ended as soon as it is made."""
        self.change_rank(number, phase="withdrawn")
        self.set_timer(f"kill:{number}", REAP_LIMIT)

    def kill_step(self, number: int) -> None:
        """End a rank's srun from outside, once; its agent, if there is one, ends its tree when the channel closes."""
        if self.rank(number).killed_step:
            return
        self.change_rank(number, killed_step=True)
        self.ask(cmd.KillStep(number))
        self.clear_timers(*(f"{kind}:{number}" for kind in GUARDS if kind != "recheck"))
        self.set_timer(f"kill:{number}", REAP_LIMIT)

    def provisional(self, explained: Callable[[Failure], bool]) -> None:
        """Something came to light that may explain failures of ranks: Slurm's own word will outrank those."""

        def seen(failure: Failure) -> Failure:
            return replace(failure, provisional=failure.provisional or explained(failure))

        self.change(failures=tuple(map(seen, self.state.failures)))
        for rank in self.state.ranks:
            if rank.suspect:
                self.change_rank(rank.rank, suspect=seen(rank.suspect))

    # --- marker and artifacts ------------------------------------------------------------------------------------

    def publish(self, code: int) -> None:
        gone = self.state.coordinator_gone
        self.change(marker=replace(self.state.marker, status="publishing", replacing=gone))
        self.set_timer("marker", MARKER_LIMIT + self.plan.deadlines.journal)  # its record goes to the disk first
        self.ask(cmd.PublishMarker(code, "supervisor", gone))

    def settle(self) -> None:
        """The work seems to be done: look whether marker or note say something else."""
        self.change(reading=self.record.seq, phase="settling")
        self.set_timer("marker", MARKER_LIMIT)
        self.ask(cmd.ReadMarker(self.record.seq))

    def fail_contract(self) -> None:
        """Fail the run for a broken contract that it needs, if there is one: rather for what is wrong than for what
        is missing."""
        broken = [c for c in self.state.contracts if c.state in ("invalid", "late") and c.required]
        contract = min(broken, key=lambda each: each.state != "invalid", default=None)
        if contract is None:
            return
        deadline = contract.reason == "deadline"
        problems = "; ".join(few(contract.finding.problems)) if contract.finding else "nothing was found"
        why = f" ({contract.reason})" if contract.reason else ""
        self.fail(
            self.failure(
                None,
                "late" if contract.state == "late" else "artifact",
                codes.DEADLINE if deadline else codes.ARTIFACTS,
                f"artifact {contract.contract} is {contract.state}{why}: {problems}",
                origin="allocd",
            ),
            "deadline" if deadline else "artifacts_invalid",
        )
