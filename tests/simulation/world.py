"""A world for the machine: steps, agents, a marker file, artifacts and a clock, all simulated.

The world is what really is; the machine only hears of it. Commands change the world at once, as the engine carries
them out in the turn in which they are asked for. What happens in the world is a *move*; a move of an agent puts lines
on its channel, and a line is heard when the channel delivers it: in its agent's order, but at any time. So a start can
cross with a death, and a stop with an end.

A world may be *kind*: then nothing goes wrong by itself, and what is waited for comes. Only in such a world does a run
ever succeed, so worlds are kind for a while and then not.

`World.moves()` names everything that may legally happen next, and `World.take` gives an event to the machine, holds
every law (`laws.py`) against what it answers, and carries out its commands. Nobody sleeps: the clock jumps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import Layout
from supervisor.core.plan import Plan, parse_plan
from supervisor.core.run import step
from supervisor.core.state import (
    COLLECT_MARGIN,
    FINAL,
    KILL_MARGIN,
    LOOK_LIMIT,
    MARKER_LIMIT,
    REAP_LIMIT,
    RELEASE_LIMIT,
    SWEEP_LIMIT,
    TALKING,
    RankState,
    RunState,
)
from tests.simulation import laws
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
    ended_with: int | None = None
    mute: bool = False
    heard_at: float = 0.0
    sweep: bool = False


class World:
    """One run of a random plan."""

    def __init__(self, data: dict[str, Any], kind: bool = False, lazy: bool = False) -> None:
        self.kind = kind
        self.lazy = lazy  # no artifact is ever written
        self.plan: Plan = parse_plan(data, "simulated")
        self.data = data
        self.now = 1000.0
        self.state = RunState()
        self.records: list[ev.Record] = []
        self.asked: list[cmd.Command] = []
        self.steps = [Step(rank, self.plan.role_of(rank).agent == "on") for rank in self.plan.ranks]
        self.file: str | int | None = None  # the marker's place: nothing, empty, garbage, foreign, or a marker's code
        self.noted = 0
        self.told_marker: str | int | None = None
        self.reads: list[int] = []
        self.publish: cmd.PublishMarker | None = None
        self.disk: dict[str, str] = {}
        self.never: set[str] = set()
        self.told: dict[str, str] = {}
        self.looks: list[int] = []
        self.collecting = False

    # --- the machine ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The run begins: the first record."""
        nodes = [f"n{rank}" for rank in self.plan.ranks]
        self.take(ev.RunOpened("1", "1", "/run", "/run/.bench_done.1", nodes, "slurm", "n0", 1, self.data))
        self.disk = {contract.contract: "pending" for contract in self.state.contracts}
        self.told = dict(self.disk)

    def layout(self) -> Layout:
        assert self.state.opened is not None
        return Layout(self.plan, "1", "1", "/run", tuple(self.state.opened.nodes), "nonce")

    @property
    def over(self) -> bool:
        return self.state.phase == "ended"

    def take(self, event: ev.Event) -> None:
        """An event enters the machine; its answer is held against the laws and carried out."""
        record = ev.Record(self.state.seq + 1, self.now, "2026-01-01T00:00:00.000Z", event)
        before = self.state
        self.state, commands = step(before, record)
        self.records.append(record)
        self.asked += commands
        laws.hold(self, laws.Turn(before, record, self.state, commands))
        for command in commands:
            CARRY_OUT[type(command)](self, command)

    # --- the clock -----------------------------------------------------------------------------------------------

    @property
    def next_due(self) -> float:
        return min(self.state.deadlines.values(), default=float("inf"))

    def pass_time(self, seconds: float) -> None:
        """Time passes, at most to the next deadline, which is fired."""
        due = self.next_due
        self.now = min(self.now + seconds, max(due, self.now))
        if due <= self.now:
            self.fire(min(self.state.deadlines, key=lambda name: (self.state.deadlines[name], name)))

    def fire(self, name: str) -> None:
        self.now = max(self.now, self.state.deadlines[name])
        self.take(ev.TimerFired(name))

    # --- everything that may happen ------------------------------------------------------------------------------

    def moves(self) -> dict[str, Move]:
        """What may happen next, by name; empty when the run is over. Each of these happens finitely often."""
        if self.over:
            return {}
        found: dict[str, Move] = {}
        for place in self.steps:
            found |= {f"{name} {place.rank}": move for name, move in self._step_moves(place).items()}
        return found | self._file_moves() | self._artifact_moves()

    def _step_moves(self, place: Step) -> dict[str, Move]:
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
        place.ended_with = 128 + signal if signal else code
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

    # --- the marker ----------------------------------------------------------------------------------------------

    def _file_moves(self) -> dict[str, Move]:
        found: dict[str, Move] = {}
        if self.reads:
            found["marker read"] = self._read
        if self.publish is not None:
            found["marker published"] = self._published
        if self.plan.marker.by == "coordinator" and isinstance(self.file, int) and self.told_marker != self.file:
            found["marker seen"] = lambda _: self._seen()
        if self.collecting:
            found["collected"] = self._collected
        return found

    def _found(self) -> tuple[str, int | None]:
        return ("marker", self.file) if isinstance(self.file, int) else (self.file or "none", None)

    def _read(self, pick: Pick) -> None:
        asked = self.reads.pop(0)
        if self._often(pick, True, False):
            found, code = self._found()
            self.take(ev.MarkerRead(found, code, self.noted or None, "", asked))
        else:
            self.take(ev.MarkerFailed("EIO", asked=asked))

    def _seen(self) -> None:
        self.told_marker = self.file
        found, code = self._found()
        self.take(ev.MarkerRead(found, code))

    def _published(self, pick: Pick) -> None:
        wanted, self.publish = self.publish, None
        assert wanted is not None
        if not self._often(pick, True, False):
            self.take(ev.MarkerFailed("ENOSPC"))
        elif isinstance(self.file, int):
            self.take(ev.MarkerPublished(self.file, "already"))
        elif self.file is None or wanted.replace:
            outcome = "written" if self.file is None else "replaced"
            self.file = wanted.code
            self.take(ev.MarkerPublished(wanted.code, outcome))
        else:
            self.take(ev.MarkerFailed(f"in its place is {self.file}", blocked=True))

    def _collected(self, pick: Pick) -> None:
        self.collecting = False
        self.take(ev.Collected([], self._often(pick, [], ["no such file"])))

    # --- artifacts -----------------------------------------------------------------------------------------------

    def _artifact_moves(self) -> dict[str, Move]:
        found: dict[str, Move] = {}
        for contract in self.state.contracts:
            name = contract.contract
            if not contract.final and self.disk[name] != self.told[name]:
                found[f"seen {name}"] = partial(self._see, name)
            if self.disk[name] == "pending" and not self.lazy and (self.kind or name not in self.never):
                found[f"write {name}"] = partial(self._write, name)
        if self.looks:
            found["looked"] = lambda _: self._looked()
        return found

    def _write(self, name: str, pick: Pick) -> None:
        found = "valid" if self.kind else pick(("valid", "valid", "invalid", "never"))
        if found == "never":
            self.never.add(name)
        else:
            self.disk[name] = found

    def _see(self, name: str, _: Pick | None = None) -> None:
        self.told[name] = self.disk[name]
        problems = [] if self.disk[name] == "valid" else [f"{name}: not yet"]
        self.take(ev.ArtifactSeen(name, self.disk[name], problems, [{"path": name, "size": 1, "sha256": None}]))

    def _looked(self) -> None:
        asked = self.looks.pop(0)
        for contract in self.state.contracts:
            name = contract.contract
            if not contract.final and self.disk[name] != self.told[name]:
                self._see(name)
        if not self.over:
            self.take(ev.ArtifactsLooked(asked))

    # --- what people, scripts, Slurm and nodes do, as often as they like -------------------------------------------

    def disturbances(self) -> dict[str, Move]:
        """What may happen besides."""
        if self.over:
            return {}
        found: dict[str, Move] = {
            "note": lambda _: self.take(ev.Noted("foreign output", 0)),
            "fault": lambda _: self.take(ev.EngineFault("a bug")),
            "time limit": lambda pick: self.take(ev.TimeLimitKnown(self.now + pick((1000.0, 200.0, 5.0)), "later")),
            "stop": lambda pick: self.take(ev.StopRequested(pick(("TERM", "INT", "USR1", "HUP")))),
            "garbage": self._litter,
        }
        for place in self.steps:
            if place.made == "yes":
                found[f"vanish {place.rank}"] = partial(self._die, place)
            if place.agent not in ("none", "arming", "gone") and not place.mute:
                found[f"signal {place.rank}"] = partial(self._signal, place)
                found[f"mute {place.rank}"] = partial(self._mute, place)
            if place.mute:
                found[f"unmute {place.rank}"] = partial(self._unmute, place)
                if self.falls_silent_at(place) <= self.next_due:
                    found[f"silence {place.rank}"] = partial(self.fall_silent, place)
        coordinator = self.plan.coordinator
        if coordinator is None or self.steps[coordinator].agent == "running":
            found["script publishes"] = self._script_publishes
            found["script notes"] = self._script_notes
        if self.disk:
            name = min(self.disk)
            found["checker fault"] = lambda _: self.take(ev.CheckerFault(name, "a bug"))
        return found

    def _litter(self, pick: Pick) -> None:
        if self.file is None:
            self.file = pick(("empty", "garbage", "foreign"))

    def _script_publishes(self, pick: Pick) -> None:
        if self.file in (None, "empty"):
            self.file = self.noted or pick((0, 0, 5))

    def _script_notes(self, pick: Pick) -> None:
        self.noted = self.noted or pick((4, 6))

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

    def _mute(self, place: Step, _: Pick | None = None) -> None:
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

    def _start_step(self, command: cmd.StartStep) -> None:
        self.steps[command.rank].made = "asked"

    def _start_rank(self, command: cmd.StartRank) -> None:
        place = self.steps[command.rank]
        if place.agent == "waiting":
            place.agent = "starting"

    def _stop(self, command: cmd.StopRank | cmd.KillRank) -> None:
        place = self.steps[command.rank]
        place.ordered = True
        if place.agent == "waiting":
            place.agent = "gone"
            place.lines.append(ev.TreeGone(place.rank, 0))

    def _kill_step(self, command: cmd.KillStep) -> None:
        place = self.steps[command.rank]
        place.closed = place.ordered = True
        if place.agent == "waiting":
            place.agent = "gone"
            place.lines.append(ev.TreeGone(place.rank, 0))

    def _release(self, command: cmd.ReleaseStep) -> None:
        self.steps[command.rank].leave = command.exit

    def _sweep(self, command: cmd.Sweep) -> None:
        self.steps[command.rank].sweep = True

    def _collect(self, _: cmd.Collect) -> None:
        self.collecting = True

    def _publish(self, command: cmd.PublishMarker) -> None:
        self.publish = command

    # --- to the end ----------------------------------------------------------------------------------------------

    def finish_answering(self, pick: Pick) -> None:
        """From here on everything that is asked is answered, in any order, and every rank ends some day, or what is
        waited for comes."""
        while not self.over:
            moves = self.moves()
            if moves:
                moves[pick(sorted(moves))](pick)
            elif silent := [place for place in self.steps if place.mute]:
                silent[0].mute = False
            elif self.lazy and not self.state.deadlines:
                self.lazy = False
            else:
                self._time_must_pass()

    def finish_silent(self) -> None:
        """From here on nobody answers anything: only the engine itself says that agents are silent, and in the end a
        person loses patience with ranks that have no agent. That takes no longer than all limits together."""
        limit = self.now + self._all_limits()
        for place in self.steps:
            if not place.mute:
                self._mute(place)
        while not self.over:
            place = min(self.steps, key=self.falls_silent_at)
            if self.falls_silent_at(place) < self.next_due:
                self.fall_silent(place)
            elif self.state.deadlines:
                self._time_must_pass()
            else:
                assert self.state.decision is None, "it is decided, and waits without a deadline"
                assert any(not p.agent_on and self.machine(p).phase not in FINAL for p in self.steps)
                self.take(ev.StopRequested("TERM"))
        assert self.now <= limit

    def _all_limits(self) -> float:
        """Seconds: everything that can be waited for, one after the other, and a stop of both tiers."""
        state, limits = self.state, self.plan.deadlines
        until_decided = limits.run or 0.0, limits.artifacts or 0.0, (state.end_at or self.now) - self.now
        work = limits.journal + limits.hello * 2 + limits.silence + self.plan.marker.recheck + MARKER_LIMIT
        contracts = limits.finalization + 2 * LOOK_LIMIT
        grace = max(role.grace for role in self.plan.roles)
        tier = grace + KILL_MARGIN + REAP_LIMIT + max(SWEEP_LIMIT, RELEASE_LIMIT + REAP_LIMIT)
        end = 2 * (limits.journal + MARKER_LIMIT) + limits.collect + COLLECT_MARGIN
        return max(until_decided) + work + contracts + 2 * tier + end

    def _time_must_pass(self) -> None:
        assert self.state.deadlines, "nothing can happen any more, and the run is not over"
        self.pass_time(float("inf"))


CARRY_OUT: Final[dict[type[cmd.Command], Callable[[World, Any], None]]] = {
    cmd.StartStep: World._start_step,
    cmd.StartRank: World._start_rank,
    cmd.StopRank: World._stop,
    cmd.KillRank: World._stop,
    cmd.ReleaseStep: World._release,
    cmd.KillStep: World._kill_step,
    cmd.Sweep: World._sweep,
    cmd.ReadMarker: lambda world, command: world.reads.append(command.asked),
    cmd.PublishMarker: World._publish,
    cmd.CheckArtifacts: lambda world, command: world.looks.append(command.asked),
    cmd.Collect: World._collect,
    cmd.Finish: lambda world, command: None,
}
