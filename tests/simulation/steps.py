"""The steps of a simulated run: sruns, agents and ranks as they really are, their channels, and the clock.

A move of an agent puts lines on its channel, and a line is heard when the channel delivers it: in its agent's order,
but at any time. So a start can cross with a death, and a stop with an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.plan import Plan, parse_plan
from supervisor.core.state import TALKING, RankState, RunState
from tests.simulation.plans import Pick

Move = Callable[[Pick], None]
T = TypeVar("T")

SILENT_AFTER: Final = 15.0  # as the engine counts
LATER: Final = ("now", "now", "later")


@dataclass
class Step:
    """One rank's step as it really is. `made`: no, asked, yes, over. `agent`: none, arming, waiting, starting, running,
    clearing, gone."""

    rank: int
    agent_on: bool
    made: str = "no"
    agent: str = "none"
    lines: deque[ev.Event] = field(default_factory=deque)
    ordered: bool = False  # a stop or a kill has arrived, or a signal from outside
    closed: bool = False  # the channel was closed and srun was signalled
    leave: int | None = None  # the code of `bye`
    mute: bool = False
    heard_at: float = 0.0
    sweep: bool = False


class Steps:
    """The part of a world that runs on nodes. `take` is the rest's: it gives an event to the machine."""

    def __init__(self, data: dict[str, Any], kind: bool) -> None:
        self.kind = kind
        self.plan: Plan = parse_plan(data, "simulated")
        self.now = 1000.0
        self.state = RunState()
        self.steps = [Step(rank, self.plan.role_of(rank).agent == "on") for rank in self.plan.ranks]

    def take(self, event: ev.Event) -> None:
        """An event enters the machine."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        return self.state.phase == "ended"

    @property
    def next_due(self) -> float:
        return min(self.state.deadlines.values(), default=float("inf"))

    # --- what is expected of steps, agents and ranks -----------------------------------------------------------------

    def step_moves(self) -> dict[str, Move]:
        """What may happen next, by name."""
        found: dict[str, Move] = {}
        for place in self.steps:
            found |= {f"{name} {place.rank}": move for name, move in self._moves_of(place).items()}
        return found

    def _moves_of(self, place: Step) -> dict[str, Move]:
        found: dict[str, Move] = {}
        if place.made == "asked":
            found["spawn"] = lambda _: self._spawn(place)
            if not self.kind:
                found["refuse"] = lambda _: self._refuse(place)
        if place.lines:
            found["deliver"] = lambda _: self._deliver(place)
        if place.made == "yes":
            found |= self._agent_moves(place) if place.agent_on else {}
            dismissed = place.leave is not None and not place.mute
            if place.closed or dismissed or (not place.agent_on and self._may_end(place)):
                found["leave"] = lambda pick: self._leave(place, pick)
        if place.sweep and self.machine(place).phase == "sweeping":
            found["swept"] = lambda pick: self._swept(place, pick)
        return found

    def machine(self, place: Step) -> RankState:
        """What the machine believes of it."""
        return self.state.ranks[place.rank]

    def _agent_moves(self, place: Step) -> dict[str, Move]:
        if place.mute:
            return {}
        acts: dict[str, Move] = {}
        match place.agent:
            case "arming":
                acts["hello"] = lambda pick: self._hello(place, pick)
            case "starting":
                acts["exec"] = lambda pick: self._exec(place, pick)
            case "running":
                if self._may_end(place):
                    acts["end"] = lambda pick: self._end(place, pick)
                if place.ordered and not self.kind:
                    acts["give up"] = lambda pick: self._gone(place, pick, left=1)
            case "clearing":
                acts["clear"] = lambda pick: self._gone(place, pick)
        return acts

    def _may_end(self, place: Step) -> bool:
        """In a kind world a worker ends when it is told to."""
        role = self.plan.role_of(place.rank)
        return not self.kind or place.ordered or place.rank == self.plan.coordinator or role.may_finish

    def _often(self, pick: Pick, usual: T, *other: T) -> T:
        """The usual, mostly; in a kind world always."""
        return usual if self.kind else pick((usual, usual, usual, *other))

    def _spawn(self, place: Step) -> None:
        place.made = "yes"
        place.agent = "arming" if place.agent_on else "none"
        place.heard_at = self.now
        self.take(ev.StepSpawned(place.rank, 100 + place.rank, f"step-{place.rank}"))

    def _refuse(self, place: Step) -> None:
        place.made = "over"
        self.take(ev.StepRefused(place.rank, "no srun"))

    def _say(self, place: Step, pick: Pick | None, *lines: ev.Event) -> None:
        """Lines go on the channel, and are heard now or later."""
        place.lines += lines
        if pick is None or pick(LATER) == "now":
            while place.lines:
                self._deliver(place)

    def _deliver(self, place: Step) -> None:
        line = place.lines.popleft()
        if self.over:
            return
        if isinstance(line, ev.StepEnded):
            place.made = "over"
        else:
            place.heard_at = self.now
            if self.machine(place).silent and self.machine(place).phase in TALKING:
                self.take(ev.RankHeard(place.rank))
        self.take(line)

    def _hello(self, place: Step, pick: Pick) -> None:
        place.agent = "waiting"
        self._say(place, pick, ev.Hello(place.rank, f"n{place.rank}", 7, f"n{place.rank}", f"1.{place.rank}", "3.11"))
        if place.closed:
            self._gone(place, pick)

    def _exec(self, place: Step, pick: Pick) -> None:
        if self._often(pick, True, False):
            place.agent = "running"
            self._say(place, pick, ev.RankStarted(place.rank, 8))
        else:
            place.agent = "clearing"
            self._say(place, pick, ev.RankRefused(place.rank, "exec", pick((2, 13)), "refused"))

    def _end(self, place: Step, pick: Pick) -> None:
        usual = (None, 15) if place.ordered else (0, None)
        code, signal = self._often(pick, usual, (0, None), (3, None), (None, 15), (None, 9), (143, None), (None, 11))
        place.agent = "clearing"
        self._say(place, pick, ev.RankEnded(place.rank, code, signal))

    def _gone(self, place: Step, pick: Pick | None, left: int = 0) -> None:
        place.agent = "gone"
        self._say(place, pick, ev.TreeGone(place.rank, 0 if pick is None else pick((0, 1)), left))

    def _leave(self, place: Step, pick: Pick) -> None:
        """srun ends: after `bye`, after the channel was closed, or by itself where there is no agent."""
        if place.agent_on and place.leave is not None and not place.closed:
            self._vanish(place, pick, self._often(pick, place.leave, 1))
        else:
            self._vanish(place, pick, self._often(pick, 0, 3, 143, 137, -9, 255))

    def _vanish(self, place: Step, pick: Pick, code: int) -> None:
        place.made, place.agent = "ending", "none"
        self._say(place, pick, ev.StepEnded(place.rank, code, pick(("", "srun: error: words"))))

    def _swept(self, place: Step, pick: Pick) -> None:
        place.sweep = False
        left = self._often(pick, 0, 1, -1)
        self.take(ev.Swept(place.rank, pick((0, 2)), left, "no answer" if left < 0 else ""))

    # --- what nobody expects of them ---------------------------------------------------------------------------------

    def step_disturbances(self) -> dict[str, Move]:
        found: dict[str, Move] = {}
        for place in self.steps:
            if place.made == "yes":
                found[f"vanish {place.rank}"] = partial(self._die, place)
            if place.agent not in ("none", "arming", "gone") and not place.mute:
                found[f"signal {place.rank}"] = partial(self._signal, place)
                found[f"mute {place.rank}"] = partial(self.mute, place)
            if place.mute:
                found[f"unmute {place.rank}"] = partial(self._unmute, place)
                if self.falls_silent_at(place) < self.next_due:  # neither of them may ever be
                    found[f"silence {place.rank}"] = partial(self.fall_silent, place)
        return found

    def _signal(self, place: Step, pick: Pick) -> None:
        number = pick((15, 10, 1))
        lines: list[ev.Event] = [ev.AgentSignalled(place.rank, number)]
        if number != 10:
            place.ordered = True
            if place.agent == "waiting":
                place.agent = "gone"
                lines.append(ev.TreeGone(place.rank, 0))
        self._say(place, pick, *lines)

    def _die(self, place: Step, pick: Pick) -> None:
        self._vanish(place, pick, pick((1, 0, -9, 143)))

    def mute(self, place: Step, _: Pick | None = None) -> None:
        place.mute, place.heard_at = True, self.now

    def _unmute(self, place: Step, _: Pick) -> None:
        place.mute = False

    def falls_silent_at(self, place: Step) -> float:
        """When the engine says so of a mute agent; never, when it has or when nothing is asked of that agent."""
        rank = self.machine(place)
        asked = place.agent_on and place.made in ("yes", "ending") and rank.phase in TALKING and not rank.silent
        return place.heard_at + SILENT_AFTER if place.mute and asked else float("inf")

    def fall_silent(self, place: Step, _: Pick | None = None) -> None:
        self.now = max(self.now, self.falls_silent_at(place))
        self.take(ev.RankSilent(place.rank, self.now - place.heard_at))

    # --- carrying out commands -----------------------------------------------------------------------------------

    def start_step(self, command: cmd.StartStep) -> None:
        self.steps[command.rank].made = "asked"

    def start_rank(self, command: cmd.StartRank) -> None:
        place = self.steps[command.rank]
        if place.agent == "waiting":
            place.agent = "starting"

    def stop(self, command: cmd.StopRank | cmd.KillRank) -> None:
        place = self.steps[command.rank]
        place.ordered = True
        if place.agent == "waiting":
            place.agent = "gone"
            place.lines.append(ev.TreeGone(place.rank, 0))

    def kill_step(self, command: cmd.KillStep) -> None:
        place = self.steps[command.rank]
        place.closed = place.ordered = True
        if place.agent == "waiting":
            place.agent = "gone"
            place.lines.append(ev.TreeGone(place.rank, 0))

    def release(self, command: cmd.ReleaseStep) -> None:
        self.steps[command.rank].leave = command.exit

    def sweep(self, command: cmd.Sweep) -> None:
        self.steps[command.rank].sweep = True
