"""A world for the machine: steps, agents, a marker file, artifacts and a clock, all simulated.

The world is what really is; the machine only hears of it. Commands change the world at once, as the engine carries
them out in the turn in which they are asked for. What happens in the world is a *move*.

A world may be *kind*: then nothing goes wrong by itself, and what is waited for comes. Only in such a world does a run
ever succeed, so worlds are kind for a while and then not.

`World.moves()` names everything that is expected to happen next, `World.disturbances()` what may happen besides, and
`World.take` gives an event to the machine, holds every law (`laws.py`) against what it answers, and carries out its
commands. Nobody sleeps: the clock jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import Layout
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
)
from tests.simulation import laws
from tests.simulation.plans import Pick
from tests.simulation.steps import Move, Steps


class World(Steps):
    """One run of a random plan."""

    def __init__(self, data: dict[str, Any], kind: bool = False, lazy: bool = False) -> None:
        super().__init__(data, kind)
        self.lazy = lazy  # no artifact is ever written
        self.data = data
        self.records: list[ev.Record] = []
        self.asked: list[cmd.Command] = []
        self.file: str | int | None = None  # the marker's place: nothing, empty, garbage, foreign, or a marker's code
        self.noted = 0
        self.told_marker: str | int | None = None
        self.reads: list[int] = []
        self.publish: cmd.PublishMarker | None = None
        self.disk: dict[str, str] = {}
        self.never: set[str] = set()
        self.changed: str | None = None  # the contract whose file was deleted after it was complete
        self.told: dict[str, str] = {}
        self.looks: list[int] = []
        self.collecting = False

    # --- the machine and the clock -----------------------------------------------------------------------------------

    def open(self) -> None:
        """The run begins: the first record."""
        nodes = [f"n{rank}" for rank in self.plan.ranks]
        self.take(ev.RunOpened("1", "1", "/run", "/run/.bench_done.1", nodes, "slurm", "n0", 1, self.data))
        self.disk = {contract.contract: "pending" for contract in self.state.contracts}
        self.told = dict(self.disk)

    def layout(self) -> Layout:
        assert self.state.opened is not None
        return Layout(self.plan, "1", "1", "/run", tuple(self.state.opened.nodes), "nonce")

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
        return self.step_moves() | self._file_moves() | self._artifact_moves()

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
        errors: list[str] = self._often(pick, [], ["no such file"])
        names = list(self.disk)
        compared = self._often(pick, names, names[1:])
        self.changed = None if self.kind else pick((None, *names))
        gone = {"path": self.changed, "found": "nothing", "size": 0, "sha256": None, "problem": ""}
        differing = [{"contract": self.changed, **gone}] if self.changed else []
        self.take(ev.Collected([], errors, compared, differing))

    # --- artifacts -----------------------------------------------------------------------------------------------

    def _artifact_moves(self) -> dict[str, Move]:
        found: dict[str, Move] = {}
        for contract in self.state.contracts:
            name = contract.contract
            if not contract.final and self.disk[name] != self.told[name]:
                found[f"seen {name}"] = partial(self._see, name)
            if (
                self.disk[name] in ("pending", "ranks_complete")
                and not self.lazy
                and (self.kind or name not in self.never)
            ):
                found[f"write {name}"] = partial(self._write, name)
        if self.looks:
            found["looked"] = lambda _: self._looked()
        return found

    def _write(self, name: str, pick: Pick) -> None:
        ranked = next(item.ranked for item in self.state.contracts if item.contract == name)
        if ranked and self.disk[name] == "pending" and pick((True, False)):
            self.disk[name] = "ranks_complete"
            return
        found = "valid" if self.kind else pick(("valid", "valid", "invalid", "never"))
        if found == "never":
            self.never.add(name)
        else:
            self.disk[name] = found

    def _see(self, name: str, _: Pick | None = None) -> None:
        self.told[name] = self.disk[name]
        problems = [] if self.disk[name] == "valid" else [f"{name}: not yet"]
        self.take(
            ev.ArtifactSeen(
                name,
                self.disk[name],
                problems,
                [{"path": name, "size": 1, "sha256": None, "kind": "file", "problems": []}],
            )
        )

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
            **self.step_disturbances(),
            "note": lambda _: self.take(ev.Noted("foreign output", 0)),
            "fault": lambda _: self.take(ev.EngineFault("a bug")),
            "time limit": lambda pick: self.take(ev.TimeLimitKnown(self.now + pick((1000.0, 200.0, 5.0)), "later")),
            "stop": lambda pick: self.take(ev.StopRequested(pick(("TERM", "INT", "USR1", "HUP")))),
            "garbage": self._litter,
        }
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

    # --- carrying out commands -----------------------------------------------------------------------------------

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
                self.mute(place)
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
        until_decided = limits.run or 0.0, self.plan.collection_deadline or 0.0, (state.end_at or self.now) - self.now
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
    cmd.StartStep: World.start_step,
    cmd.StartRank: World.start_rank,
    cmd.StopRank: World.stop,
    cmd.KillRank: World.stop,
    cmd.ReleaseStep: World.release,
    cmd.KillStep: World.kill_step,
    cmd.Sweep: World.sweep,
    cmd.ReadMarker: lambda world, command: world.reads.append(command.asked),
    cmd.PublishMarker: World._publish,
    cmd.CheckArtifacts: lambda world, command: world.looks.append(command.asked),
    cmd.Collect: World._collect,
    cmd.Finish: lambda world, command: None,
}
