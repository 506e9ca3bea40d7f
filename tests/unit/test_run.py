"""The run machine by example: one rule of how a run starts and ends in each test.

`tests/simulation` drives the same machine with every order of events; here it can be read what it is meant to do. A
plan has three ranks unless a test says otherwise: rank 0 is the coordinator, 1 and 2 are workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.run import IllegalEvent, fold, step
from supervisor.core.state import RankState, RunState
from supervisor.core.verdict import Verdict, evidence_of, judge_run

TERM, KILL, USR1 = 15, 9, 10
SILENCE, RECHECK, FINALIZATION, GRACE, HELLO = 60.0, 5.0, 40, 8.0, 20.0
RESULT = {"name": "result", "path": "result.json"}
NOTHING = ev.Collected()


class Run:
    """One run: its state, what was asked for after the last event, and everything that was ever asked."""

    def __init__(
        self, *, size: int = 3, coordinator: int | None = 0, roles: Mapping[int, Mapping[str, Any]] = {}, **plan: Any
    ) -> None:
        data: dict[str, Any] = {
            "job": {"name": "test", "nodes": size},
            "roles": {
                f"r{rank}": {"ranks": rank, "command": ["true"], "grace": GRACE, **roles.get(rank, {})}
                for rank in range(size)
            },
            "marker": {"recheck": RECHECK, **plan.pop("marker", {})},
            "deadlines": {
                "hello": HELLO,
                "finalization": FINALIZATION,
                "silence": SILENCE,
                **plan.pop("deadlines", {}),
            },
            **plan,
        }
        if coordinator is not None:
            data["coordinator"] = {"rank": coordinator}
        self.now = 100.0
        self.state = RunState()
        self.records: list[ev.Record] = []
        self.commands: list[cmd.Command] = []
        self.asked: list[cmd.Command] = []
        nodes = [f"node{rank}" for rank in range(size)]
        self.take(ev.RunOpened("7", "7", "/run", "/run/.bench_done.7", nodes, "slurm", "node0", 1, data))

    def take(self, *events: ev.Event, after: float = 0.0) -> list[cmd.Command]:
        """Events happen, `after` seconds from the one before; the commands of the last are returned."""
        for event in events:
            self.now += after
            record = ev.Record(self.state.seq + 1, self.now, "2026-01-01T00:00:00.000Z", event)
            self.state, self.commands = step(self.state, record)
            self.records.append(record)
            self.asked += self.commands
        return self.commands

    def fire(self, timer: str) -> list[cmd.Command]:
        """Nothing happens until this deadline has passed."""
        self.now = self.state.deadlines[timer]
        return self.take(ev.TimerFired(timer))

    def rank(self, number: int) -> RankState:
        return self.state.ranks[number]

    def connect(self, *ranks: int) -> Run:
        """Their agents say hello."""
        for rank in ranks or self.state.the_plan.ranks:
            self.take(ev.StepSpawned(rank, 50 + rank, f"step{rank}"))
            if self.rank(rank).agent:
                self.take(ev.Hello(rank, f"node{rank}", 60 + rank, f"node{rank}", f"7.{rank}", "3.11"))
        return self

    def start(self) -> Run:
        """Every rank runs."""
        self.connect()
        for rank in self.state.ranks:
            if rank.agent:
                self.take(ev.RankStarted(rank.rank, 70 + rank.rank))
        return self

    def end(self, rank: int, code: int | None = None, signal: int | None = None) -> list[cmd.Command]:
        return self.take(ev.RankEnded(rank, code, signal))

    def read_marker(self, found: str = "none", code: int | None = None, note: int | None = None) -> list[cmd.Command]:
        """The look at the marker that was asked for last."""
        asked = [command.asked for command in self.asked if isinstance(command, cmd.ReadMarker)]
        return self.take(ev.MarkerRead(found, code, note, "", asked[-1]))

    def see(self, answer: str = "valid", contract: str = "result") -> list[cmd.Command]:
        problems = [] if answer == "valid" else ["result.json: found nothing"]
        return self.take(ev.ArtifactSeen(contract, answer, problems, []))

    def complete(self) -> list[cmd.Command]:
        """The coordinator ends with zero, and nothing says otherwise."""
        self.end(0, 0)
        return self.read_marker()

    def wind_up(self, collected: ev.Collected | None = NOTHING) -> None:
        """Everybody does as told, until the run is over. `collected`: None when that does not come to its end."""
        if self.state.marker.status == "publishing":
            self.take(ev.MarkerPublished(self.exit, "written"))
        for rank in self.state.ranks:
            number = rank.rank
            if rank.phase in ("launching", "running"):
                self.take(
                    *([ev.RankStarted(number, 1)] if rank.phase == "launching" else []), ev.RankEnded(number, 0, None)
                )
            if self.rank(number).phase in ("ready", "ending"):
                self.take(ev.TreeGone(number, 0))
            if self.rank(number).phase == "gone":
                self.take(ev.StepEnded(number, self.rank(number).exit or 0))
            if self.rank(number).phase == "spawned":
                self.take(ev.StepEnded(number, 143))
            if self.rank(number).phase == "sweeping":
                self.take(ev.Swept(number, 0, 0))
        assert self.state.phase == "collecting"
        if collected is None:
            self.fire("collect")
        else:
            self.take(collected)

    @property
    def exit(self) -> int:
        assert self.state.decision is not None
        return self.state.decision.exit

    @property
    def reason(self) -> str:
        return self.state.decision.reason if self.state.decision else "undecided"

    @property
    def verdict(self) -> Verdict:
        return judge_run(evidence_of(self.state), final=True)

    def failure(self) -> tuple[int | None, str, int]:
        """Rank, kind and code of the first failure."""
        first = self.state.first_failure
        assert first is not None
        return first.rank, first.what, first.code

    def asked_for(self, *kinds: type[cmd.Command]) -> list[cmd.Command]:
        """What the last event made the machine ask for, of these kinds."""
        return [command for command in self.commands if isinstance(command, kinds)]


def stops(run: Run) -> list[int]:
    """The ranks that the last event stopped."""
    return [command.rank for command in run.commands if isinstance(command, cmd.StopRank)]


# --- starting ----------------------------------------------------------------------------------------------------


def test_every_step_is_asked_for_at_once() -> None:
    assert Run().commands == [cmd.StartStep(0), cmd.StartStep(1), cmd.StartStep(2)]


def test_ranks_start_when_the_last_agent_has_said_hello() -> None:
    run = Run().connect(0, 2)
    assert not run.asked_for(cmd.StartRank)
    run.connect(1)
    assert run.commands == [cmd.StartRank(0), cmd.StartRank(1), cmd.StartRank(2)]


def test_each_rank_starts_at_once_where_the_plan_says_so() -> None:
    run = Run(run={"start": "each"}).connect(2)
    assert run.commands == [cmd.StartRank(2)]


def test_a_rank_without_an_agent_starts_with_its_step() -> None:
    run = Run(roles={1: {"agent": "off"}})
    run.take(ev.StepSpawned(1, 51, "step1"))
    assert run.rank(1).phase == "running"
    assert run.commands == []


def test_a_step_that_says_no_hello_is_its_failure_with_the_words_of_srun() -> None:
    run = Run().connect(0, 1)
    run.take(ev.StepSpawned(2, 52, "step2"))
    run.fire("hello:2")
    assert run.failure() == (2, "no_hello", 124)
    assert cmd.KillStep(2) in run.commands
    assert stops(run) == [0, 1]
    run.take(ev.StepEnded(2, 1, "srun: error: node2: task launch failed"))
    assert "task launch failed" in run.rank(2).words


def test_a_step_that_is_never_made_does_not_hold_the_run() -> None:
    run = Run().connect(0, 1)
    run.fire("hello:2")
    assert run.failure() == (2, "no_hello", 124)
    run.fire("kill:2")
    assert run.rank(2).phase == "abandoned"


def test_a_step_that_ends_before_its_hello_is_a_failure_at_once() -> None:
    run = Run().connect(0, 1)
    run.take(ev.StepSpawned(2, 52, "step2"), ev.StepEnded(2, 1, "srun: error: Unable to create step"))
    assert run.failure() == (2, "step_lost", 1)
    assert "Unable to create step" in run.verdict.summary


def test_a_step_that_cannot_be_made_is_a_failure() -> None:
    run = Run()
    run.take(ev.StepRefused(1, "srun: No such file or directory"))
    assert run.failure() == (1, "not_started", 1)


@pytest.mark.parametrize(
    ("phase", "errno", "code"),
    [("exec", 2, 127), ("exec", 13, 126), ("cwd", 2, 126), ("out", 2, 126)],
    ids=["not found", "not executable", "no directory", "no log"],
)
def test_a_command_that_is_not_executed_has_the_code_of_the_shell(phase: str, errno: int, code: int) -> None:
    run = Run().connect()
    run.take(ev.RankRefused(1, phase, errno, "no"))
    assert run.failure() == (1, "not_started", code)
    run.take(ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, code)]


def test_what_was_not_executed_keeps_its_code_also_where_it_is_not_critical() -> None:
    run = Run(roles={1: {"critical": False}}).connect()
    run.take(ev.RankRefused(1, "exec", 2, "no"), ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 127)]


def test_the_time_for_a_hello_counts_from_the_steps_start() -> None:
    run = Run()
    run.take(ev.StepSpawned(0, 50, "step0"), after=3.0)
    assert run.state.deadlines["hello:0"] == run.now + HELLO


@pytest.mark.parametrize(("returncode", "provisional"), [(1, False), (137, True), (143, True), (-9, True)])
def test_a_step_that_was_killed_before_its_start_is_provisional(returncode: int, provisional: bool) -> None:
    run = Run().connect(0, 1)
    run.take(ev.StepSpawned(2, 52, "step2"), ev.StepEnded(2, returncode))
    assert run.failure() == (2, "step_lost", returncode if returncode > 0 else 128 - returncode)
    assert run.state.failures[0].provisional is provisional


def test_a_command_whose_exec_never_ends_does_not_hold_the_run() -> None:
    run = Run().connect()
    run.fire("launch:1")
    assert run.failure() == (1, "not_started", 124)
    assert cmd.KillStep(1) in run.commands


def test_a_rank_whose_agent_is_told_to_end_before_the_start_never_starts() -> None:
    run = Run().connect(0, 1)
    run.take(ev.AgentSignalled(1, TERM), ev.TreeGone(1, 0))
    assert run.failure() == (1, "not_started", 128 + TERM)
    assert run.state.failures[0].provisional
    assert "was not started after signal 15 from outside" in run.verdict.summary


def test_a_rank_that_never_started_has_its_signals_code_also_where_it_is_not_critical() -> None:
    run = Run(roles={1: {"critical": False}}).connect(0, 1)
    run.take(ev.AgentSignalled(1, TERM), ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 128 + TERM)]


# --- workers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "signal", "expected"), [(3, None, 3), (0, None, 1), (None, 11, 139)])
def test_a_worker_that_ends_early_is_the_first_failure(code: int | None, signal: int | None, expected: int) -> None:
    """Its own code, or 1 if that was zero: it should not have ended."""
    run = Run().start()
    run.end(1, code, signal)
    assert run.failure() == (1, "exit" if signal is None else "signal", expected)
    assert (run.reason, run.exit) == ("peer_failed", expected)


def test_a_failure_stops_everybody_in_the_same_turn() -> None:
    run = Run().start()
    run.end(1, 3)
    assert run.asked_for(cmd.StopRank) == [
        cmd.StopRank(0, "peer_failed", GRACE, 3),
        cmd.StopRank(2, "peer_failed", GRACE, 3),
    ]


def test_ends_after_the_decision_are_consequences() -> None:
    run = Run().start()
    run.end(1, 3)
    run.end(0, 9)
    run.end(2, None, TERM)
    assert [failure.rank for failure in run.state.failures] == [1]
    run.wind_up()
    assert run.verdict.code == 3


def test_a_rank_that_may_finish_may_end_with_zero() -> None:
    run = Run(roles={1: {"may_finish": True}}).start()
    run.end(1, 0)
    assert run.reason == "undecided"
    run.take(ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 0)]


def test_a_rank_that_may_finish_may_not_fail() -> None:
    run = Run(roles={1: {"may_finish": True}}).start()
    run.end(1, 2)
    assert run.failure() == (1, "exit", 2)


def test_what_is_not_critical_is_only_told() -> None:
    run = Run(roles={1: {"critical": False}}).start()
    run.end(1, 5)
    assert run.reason == "undecided"
    assert "rank 1 (r1) on node1 ended with code 5" in run.state.notes[-1]
    run.take(ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 5)]


def test_the_engine_of_a_worker_dies_while_the_coordinator_runs() -> None:
    """No second look: nobody said that the work is done."""
    run = Run().start()
    run.end(2, 1)
    assert not run.asked_for(cmd.ReadMarker)
    assert run.reason == "peer_failed"


# --- the second look ---------------------------------------------------------------------------------------------


def test_a_worker_that_ends_when_the_coordinator_has_ended_gets_a_second_look() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.end(1, 1)
    assert run.reason == "undecided"
    assert run.rank(1).suspect is not None
    run.see()
    assert run.reason == "completed"
    assert run.state.failures == ()


def test_a_second_look_that_sees_nothing_finds_the_failure_that_it_was() -> None:
    """It keeps its place in the order: the number of the worker's end."""
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.end(1, 4)
    died = run.state.seq
    run.take(ev.Noted("something else"))
    run.fire("recheck:1")
    assert run.failure() == (1, "exit", 4)
    assert run.state.failures[0].seq == died


def test_a_worker_whose_coordinator_does_not_answer_gets_a_second_look() -> None:
    run = Run().start()
    run.take(ev.RankSilent(0, 15.0))
    run.end(1, 1)
    assert run.reason == "undecided"
    assert run.asked_for(cmd.ReadMarker)


def test_a_worker_gets_a_second_look_where_the_script_publishes() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 1)
    assert run.reason == "undecided"
    run.read_marker("marker", 0)
    assert run.rank(1).suspect is None
    assert "recheck:1" not in run.state.deadlines
    assert run.reason == "undecided"


def test_the_second_look_can_be_switched_off() -> None:
    run = Run(marker={"by": "coordinator", "recheck": 0}).start()
    run.end(1, 6)
    assert run.failure() == (1, "exit", 6)


def test_a_run_that_ends_for_another_cause_finds_a_suspect_guilty() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 6)
    run.take(ev.StopRequested("TERM"))
    assert run.failure() == (1, "exit", 6)
    assert run.exit == 6


def test_a_marker_directory_that_fails_does_not_hide_a_death() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 6)
    run.take(ev.MarkerFailed("EIO", asked=run.state.seq))
    assert run.reason == "undecided"
    assert run.state.notes == ("a look at the marker failed: EIO",)
    run.fire("recheck:1")
    assert run.failure() == (1, "exit", 6)


def test_what_the_coordinator_says_explains_a_suspect_and_trouble_with_the_marker_does_not() -> None:
    run = Run().start()
    run.end(0, 0)
    run.end(1, 6)
    run.read_marker(note=4)
    assert [(failure.rank, failure.code) for failure in run.state.failures] == [(0, 4)]
    run = Run().start()
    run.end(0, 0)
    run.end(1, 6)
    run.fire("marker")
    assert run.failure() == (1, "exit", 6)


def test_each_suspect_ends_with_its_own_code() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 6)
    run.end(2, 8)
    run.fire("recheck:1")
    assert [failure.rank for failure in run.state.failures] == [1, 2]
    run.take(ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 6)]
    run.take(ev.TreeGone(2, 0))
    assert run.commands == [cmd.ReleaseStep(2, 8)]


def test_a_suspect_is_not_released_before_it_is_judged() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 6)
    run.take(ev.TreeGone(1, 0))
    assert not run.asked_for(cmd.ReleaseStep)
    run.fire("recheck:1")
    assert cmd.ReleaseStep(1, 6) in run.commands


# --- the coordinator ---------------------------------------------------------------------------------------------


def test_a_coordinator_that_fails_ends_the_run_with_its_code() -> None:
    run = Run().start()
    run.end(0, 7)
    assert run.failure() == (0, "exit", 7)
    assert stops(run) == [1, 2]
    assert cmd.PublishMarker(7, "supervisor", replace=False) in run.commands
    assert {command.exit for command in run.commands if isinstance(command, cmd.StopRank)} == {7}


def test_a_coordinator_that_is_killed_publishes_128_and_the_signal() -> None:
    run = Run().start()
    run.end(0, None, KILL)
    assert run.asked_for(cmd.PublishMarker) == [cmd.PublishMarker(137, "supervisor", replace=False)]


def test_a_zero_of_the_coordinator_is_believed_after_a_look_at_marker_and_note() -> None:
    run = Run().start()
    run.end(0, 0)
    assert run.commands == [cmd.ReadMarker(run.state.seq)]
    assert run.state.phase == "settling"
    run.read_marker()
    assert run.reason == "completed"


def test_workers_are_stopped_when_the_marker_is_there_and_not_before() -> None:
    run = Run().start()
    run.complete()
    assert run.commands == [cmd.PublishMarker(0, "supervisor", replace=False)]
    run.take(ev.MarkerPublished(0, "written"))
    assert run.commands == [cmd.StopRank(1, "completed", GRACE, 0), cmd.StopRank(2, "completed", GRACE, 0)]


def test_a_completed_run_is_a_success() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.see()
    run.complete()
    run.wind_up()
    assert run.asked_for(cmd.Finish)
    assert (run.verdict.outcome, run.verdict.code) == ("success", 0)
    assert fold(run.records) == run.state


def test_a_critical_rank_that_nobody_saw_end_leaves_a_success_unproven() -> None:
    """Its agent, or its slurmstepd, was killed while it was being stopped: the work was done, but who knows by whom."""
    run = Run(size=2).start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"))
    run.take(ev.StepEnded(1, -KILL, "srun: error: node1: task 0: Killed\nsrun: Terminating"), ev.Swept(1, 0, 0))
    run.wind_up()
    assert (run.verdict.outcome, run.verdict.code) == ("unverifiable", 75)
    assert "\n" not in run.verdict.summary


def test_a_slow_journal_is_no_slow_marker() -> None:
    """Its record goes to the disk before the marker is written, and may take its own time."""
    run = Run(deadlines={"journal": 30}).start()
    run.complete()
    assert run.state.deadlines["marker"] - run.now == 30 + 10


def test_the_coordinators_step_ends_with_its_own_code_and_a_worker_whose_work_was_done_with_the_markers() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.end(1, 9)  # a second look
    run.see()
    run.take(ev.TreeGone(1, 0))
    assert run.commands == [cmd.ReleaseStep(1, 0)]
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.take(ev.StopRequested("TERM"), ev.TreeGone(0, 0))
    assert cmd.ReleaseStep(0, 0) in run.commands


def test_a_noted_code_outlives_the_coordinators_zero() -> None:
    run = Run().start()
    run.end(0, 0)
    run.read_marker(note=4)
    assert run.failure() == (0, "marker", 4)
    assert run.asked_for(cmd.PublishMarker) == [cmd.PublishMarker(4, "supervisor", replace=False)]
    assert run.verdict.origin == "native"


def test_a_noted_code_is_kept_whatever_a_later_look_sees() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.take(ev.MarkerRead("empty", note=4))
    assert (run.state.marker.found, run.state.marker.note) == ("empty", 4)
    run.end(0, 0)
    run.read_marker()
    assert run.failure() == (0, "marker", 4)


def test_a_marker_that_says_otherwise_outlives_the_coordinators_zero() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(0, 0)
    run.read_marker("marker", 5)
    assert run.failure() == (0, "marker", 5)


def test_a_script_that_publishes_a_failure_ends_the_run_at_once() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.take(ev.MarkerRead("marker", 5))
    assert run.failure() == (0, "marker", 5)
    assert stops(run) == [0, 1, 2]


def test_workers_may_end_once_the_script_has_published_zero() -> None:
    """With whatever code: it was because of the marker. Their steps end with the marker's."""
    run = Run(marker={"by": "coordinator"}).start()
    run.take(ev.MarkerRead("marker", 0))
    run.end(1, 143)
    run.take(ev.TreeGone(1, 0))
    assert run.reason == "undecided"
    assert run.commands == [cmd.ReleaseStep(1, 0)]


def test_a_marker_zero_and_then_another_end_of_the_coordinator_counts_as_that_end() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.take(ev.MarkerRead("marker", 0))
    run.end(0, 9)
    assert run.failure() == (0, "exit", 9)


def test_a_look_that_fails_when_it_matters_claims_no_success() -> None:
    run = Run().start()
    run.end(0, 0)
    run.take(ev.MarkerFailed("EIO", asked=run.state.seq))
    assert run.failure() == (None, "marker", 125)


def test_a_look_that_is_not_answered_claims_no_success() -> None:
    run = Run().start()
    run.end(0, 0)
    run.fire("marker")
    assert run.failure() == (None, "marker", 125)


# --- publishing --------------------------------------------------------------------------------------------------


def test_what_blocks_the_marker_is_replaced_when_the_coordinator_is_gone() -> None:
    run = Run().start()
    run.complete()
    run.take(ev.MarkerFailed("garbage is in its place", blocked=True))
    assert not run.asked_for(cmd.StopRank, cmd.PublishMarker)
    run.take(ev.TreeGone(0, 0))
    assert cmd.PublishMarker(0, "supervisor", replace=True) in run.commands
    run.take(ev.MarkerPublished(0, "replaced"))
    assert stops(run) == [1, 2]


def test_what_blocks_the_marker_is_replaced_also_when_the_coordinator_went_meanwhile() -> None:
    run = Run().start()
    run.complete()
    run.take(ev.TreeGone(0, 0), ev.MarkerFailed("garbage is in its place", blocked=True))
    assert run.commands == [cmd.PublishMarker(0, "supervisor", replace=True)]


def test_a_completed_run_whose_marker_is_blocked_stops_a_living_coordinator_first() -> None:
    """`finish = "artifacts"`: nobody else would end it, and only then may the marker be replaced."""
    run = Run(run={"finish": "artifacts"}, artifacts=[RESULT]).start()
    run.see()
    run.read_marker("garbage")
    run.take(ev.MarkerFailed("garbage is in its place", blocked=True))
    assert stops(run) == [0]


def test_a_marker_that_cannot_be_published_is_no_success() -> None:
    run = Run().start()
    run.complete()
    assert run.state.deadlines["marker"] == run.now + 10.0 + 5.0  # its record is on the disk before it
    run.take(ev.MarkerFailed("ENOSPC"))
    assert run.failure() == (None, "marker", 125)
    assert stops(run) == [1, 2]
    assert run.verdict.code == 125


def test_a_marker_that_cannot_be_published_hides_no_other_cause() -> None:
    run = Run().start()
    run.take(ev.StopRequested("TERM"))
    run.fire("marker")
    assert [failure.what for failure in run.state.failures] == ["stop"]


def test_a_completed_run_whose_marker_says_otherwise_is_taken_back() -> None:
    """Published by the script after we had looked: a non-zero marker stays."""
    run = Run().start()
    run.complete()
    run.take(ev.MarkerPublished(5, "already"))
    assert run.failure() == (0, "marker", 5)
    assert {command.exit for command in run.commands if isinstance(command, cmd.StopRank)} == {5}


def test_a_look_that_fails_late_is_no_failure_to_publish() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.end(0, 0)
    asked = run.state.seq
    run.take(ev.StopRequested("TERM"), ev.MarkerFailed("EIO", asked=asked))
    assert run.state.marker.status == "publishing"
    assert "marker" in run.state.deadlines


def test_a_marker_that_comes_late_changes_nothing_any_more() -> None:
    run = Run().start()
    run.complete()
    run.fire("marker")
    run.take(ev.MarkerPublished(0, "written"))
    assert run.failure() == (None, "marker", 125)
    run.take(ev.MarkerFailed("garbage is in its place", blocked=True))
    assert not run.commands


# --- artifacts ---------------------------------------------------------------------------------------------------


def test_a_zero_waits_for_the_contracts_and_asks_for_a_look() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    assert run.commands == [cmd.CheckArtifacts(run.state.seq)]
    assert run.reason == "undecided"
    run.see()
    assert run.reason == "completed"


def test_failures_pass_the_barrier() -> None:
    run = Run(artifacts=[RESULT], marker={"recheck": 0}).start()
    run.complete()
    run.end(1, 2)
    assert run.failure() == (1, "exit", 2)


def test_an_invalid_artifact_fails_the_run_when_the_work_is_done() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.see("invalid")
    assert run.reason == "undecided"
    run.complete()
    assert run.failure() == (None, "artifact", 65)
    assert run.reason == "artifacts_invalid"


def test_a_window_that_closes_makes_late_after_one_more_look() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    closes = run.now + FINALIZATION
    run.fire("finalization:result")
    assert run.now == closes
    assert run.commands == [cmd.CheckArtifacts(run.state.seq)]
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.failure() == (None, "late", 65)
    assert run.reason == "artifacts_invalid"


def test_the_window_is_for_what_is_still_open() -> None:
    run = Run(artifacts=[{"name": "other", "path": "other.json"}, RESULT]).start()
    run.see(contract="other")
    run.complete()
    assert "finalization:result" in run.state.deadlines
    assert "finalization:other" not in run.state.deadlines
    assert [contract.state for contract in run.state.contracts] == ["complete", "finalizing"]


def test_the_last_look_may_still_find_it() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.fire("finalization:result")
    run.see()
    assert run.reason == "completed"


def test_an_answer_to_an_earlier_look_is_not_the_last() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    earlier = run.state.seq
    run.fire("finalization:result")
    run.take(ev.ArtifactsLooked(earlier))
    assert run.reason == "undecided"


def test_a_look_that_is_not_answered_ends_too() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.complete()
    run.fire("finalization:result")
    run.fire("late:finalization:result")
    assert run.failure() == (None, "late", 65)


def judged_and_collected(collected: ev.Collected | None, required: bool = True) -> Run:
    """A run that was completed with a file of the contract there; None: collecting it overstayed."""
    run = Run(artifacts=[{**RESULT, "required": required}]).start()
    file = {"path": "result.json", "size": 7, "sha256": "aa" * 32, "kind": "file", "problems": []}
    run.take(ev.ArtifactSeen("result", "valid", [], [file]))
    run.complete()
    run.wind_up(collected)
    return run


def found(**facts: Any) -> ev.Collected:
    item = {"contract": "result", "path": "result.json", "found": "a file", "size": 7, "sha256": "bb" * 32}
    return ev.Collected([], [], ["result"], [{**item, "problem": "", **facts}])


@pytest.mark.parametrize("facts", [{}, {"found": "nothing", "sha256": None}])
def test_a_contract_whose_file_is_another_at_the_end_is_not_kept(facts: dict[str, Any]) -> None:
    run = judged_and_collected(found(**facts))
    assert (run.verdict.code, run.verdict.reason) == (65, "artifacts")
    assert "artifact result changed after it was judged: result.json: found " in run.verdict.summary
    assert run.state.decision is not None and run.state.decision.exit == 65
    optional = judged_and_collected(found(**facts), required=False)
    assert optional.verdict.code == 0
    assert optional.state.notes[-1] == run.verdict.summary


def test_a_contract_whose_files_nobody_could_compare_is_unproven() -> None:
    for collected in (ev.Collected(), None, found(sha256=None, problem="no time")):
        run = judged_and_collected(collected)
        assert (run.verdict.code, run.verdict.outcome) == (75, "unverifiable")
        assert run.verdict.summary.startswith("artifact result could not be compared with what was judged: ")
    assert judged_and_collected(ev.Collected([], [], ["result"])).verdict.code == 0


def test_the_deadline_of_the_artifacts_is_a_deadline() -> None:
    """Also while the coordinator runs; the code is 124, and not 65 as for the window."""
    run = Run(artifacts=[RESULT], deadlines={"artifacts": 300}).start()
    run.fire("artifacts")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.failure() == (None, "late", 124)
    assert run.reason == "deadline"


def test_the_deadline_caps_the_window() -> None:
    run = Run(artifacts=[RESULT], deadlines={"artifacts": 30}).start()
    run.complete()
    run.fire("artifacts")
    assert "finalization:result" not in run.state.deadlines
    run.fire("late:deadline")
    assert run.failure() == (None, "late", 124)


def test_a_deadline_that_only_what_is_not_required_has_missed_ends_nothing() -> None:
    run = Run(artifacts=[{**RESULT, "required": False}], deadlines={"artifacts": 30}).start()
    run.fire("artifacts")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.state.contracts[0].state == "late"
    assert run.reason == "undecided"
    assert not run.state.deadlines


def test_what_is_not_required_may_be_missing() -> None:
    run = Run(artifacts=[{**RESULT, "required": False}]).start()
    run.complete()
    run.fire("finalization:result")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.reason == "completed"


def test_what_is_wrong_is_told_rather_than_what_is_missing() -> None:
    other = {"name": "other", "path": "other.json"}
    run = Run(artifacts=[RESULT, other]).start()
    run.see("invalid", "other")
    run.complete()
    run.fire("finalization:result")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.failure() == (None, "artifact", 65)
    assert "other" in run.verdict.summary


def test_a_checker_that_breaks_is_our_fault() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.take(ev.CheckerFault("result", "KeyError: 'a'"))
    assert run.failure() == (None, "fault", 125)


# --- self-benchmarks: a window for each node ------------------------------------------------------------------------

FPM = {"name": "fpm", "path": "bench.json", "contract": "fpm", "ranks_per_node": 4, "roles": ["r1", "r2"]}


def windows(run: Run) -> dict[str, float]:
    """Seconds until each open window closes."""
    prefix = "finalization:"
    due = run.state.deadlines.items()
    return {name.removeprefix(prefix): at - run.now for name, at in due if name.startswith(prefix)}


def test_a_nodes_window_opens_with_its_last_rank_and_only_once() -> None:
    run = Run(artifacts=[FPM]).start()
    run.see("pending", "fpm@1")
    assert windows(run) == {}
    run.see("ranks_complete", "fpm@1")
    assert windows(run) == {"fpm@1": FINALIZATION}
    run.take(ev.Noted("time passes"), after=10)
    run.see("pending", "fpm@1")  # a network file system shows the past
    run.see("ranks_complete", "fpm@1")
    run.see("ranks_complete", "fpm@2")
    assert windows(run) == {"fpm@1": FINALIZATION - 10, "fpm@2": FINALIZATION}


def test_the_coordinators_zero_opens_no_nodes_window() -> None:
    """The ranks are still being measured: the window is for what comes after them."""
    run = Run(artifacts=[FPM, RESULT]).start()
    run.complete()
    assert windows(run) == {"result": FINALIZATION}
    run.see("ranks_complete", "fpm@2")
    run.see("valid", "fpm@2")
    assert windows(run) == {"result": FINALIZATION}


def test_a_nodes_window_that_closes_ends_nothing_but_that_nodes_wait() -> None:
    run = Run(artifacts=[FPM]).start()
    run.see("ranks_complete", "fpm@1")
    run.complete()
    run.fire("finalization:fpm@1")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert [contract.state for contract in run.state.contracts] == ["late", "pending"]
    assert run.reason == "undecided"
    assert not stops(run)
    run.see("valid", "fpm@2")
    assert run.failure() == (None, "late", 65)


def test_the_collection_deadline_caps_a_nodes_window() -> None:
    run = Run(artifacts=[FPM], deadlines={"artifacts": 30}).start()
    run.complete()
    run.see("ranks_complete", "fpm@1")
    run.fire("artifacts")
    assert windows(run) == {}
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.failure() == (None, "late", 124)
    assert {contract.reason for contract in run.state.contracts} == {"deadline"}


def test_a_self_benchmark_has_a_collection_deadline_in_any_case() -> None:
    run = Run(artifacts=[FPM]).start()
    assert run.state.deadlines["artifacts"] - run.state.started_at == 14_400
    assert "artifacts" not in Run(artifacts=[RESULT]).start().state.deadlines


def test_a_node_without_anybody_who_could_write_gets_its_window() -> None:
    """It would hold the others until the collection deadline otherwise."""
    run = Run(artifacts=[FPM], roles={1: {"critical": False}}).start()
    run.end(1, 3)
    assert windows(run) == {}
    run.take(ev.TreeGone(1, 0))
    assert windows(run) == {"fpm@1": FINALIZATION}
    run.see("ranks_complete", "fpm@1")
    run.see("valid", "fpm@1")
    assert windows(run) == {}


# --- runs that their artifacts end -------------------------------------------------------------------------------


def test_the_contracts_alone_end_a_run_without_a_coordinator() -> None:
    run = Run(coordinator=None, run={"finish": "artifacts"}, artifacts=[RESULT]).start()
    run.see()
    assert run.commands == [cmd.ReadMarker(run.state.seq)]
    run.read_marker()
    assert run.reason == "completed"
    run.take(ev.MarkerPublished(0, "written"))
    assert stops(run) == [0, 1, 2]
    run.wind_up()
    assert run.verdict.outcome == "success"


def test_every_contract_must_have_come_to_its_end() -> None:
    other = {"name": "other", "path": "other.json"}
    run = Run(coordinator=None, run={"finish": "artifacts"}, artifacts=[RESULT, other]).start()
    run.see()
    assert run.state.phase == "running"
    run.see("invalid", "other")
    assert run.state.phase == "settling"


def test_a_noted_code_counts_there_too() -> None:
    run = Run(coordinator=None, run={"finish": "artifacts"}, artifacts=[RESULT]).start()
    run.see()
    run.read_marker(note=4)
    assert run.failure() == (None, "marker", 4)


def test_the_window_opens_when_nobody_is_left_who_could_write() -> None:
    """Ranks that may finish have finished, and the file is not there: it never will be."""
    may = {rank: {"may_finish": True} for rank in range(2)}
    run = Run(size=2, coordinator=None, roles=may, run={"finish": "artifacts"}, artifacts=[RESULT]).start()
    run.end(0, 0)
    run.end(1, 0)
    run.take(ev.TreeGone(0, 0), ev.TreeGone(1, 0))
    run.read_marker()
    run.fire("finalization:result")
    run.take(ev.ArtifactsLooked(run.state.seq))
    assert run.failure() == (None, "late", 65)


# --- stopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("INT", 130), ("HUP", 143)])
def test_a_request_to_stop_ends_the_coordinator_first(signal: str, code: int) -> None:
    run = Run().start()
    run.take(ev.StopRequested(signal))
    assert (run.reason, run.exit) == ("stop_requested", code)
    assert stops(run) == [0]
    run.end(0, None, TERM)
    assert stops(run) == []
    run.take(ev.TreeGone(0, 0))
    assert stops(run) == [1, 2]
    run.wind_up()
    assert (run.verdict.code, run.verdict.reason) == (code, "stop_requested")


def test_the_second_request_kills_everybody() -> None:
    run = Run().start()
    run.take(ev.StopRequested("TERM"), ev.StopRequested("INT"))
    assert run.asked_for(cmd.KillRank) == [cmd.KillRank(rank, 143) for rank in (0, 1, 2)]
    assert {run.rank(rank).stop for rank in (0, 1, 2)} == {"stop_requested"}
    assert run.state.deadlines["stop:0"] == run.now + 10.0  # and no grace
    run.fire("stop:0")
    assert run.commands == [cmd.KillStep(0)]


def test_the_second_request_ends_also_the_steps_that_said_no_hello() -> None:
    run = Run(run={"start": "each"}).connect(0)
    run.take(ev.StepSpawned(1, 51, "step1"), ev.StopRequested("TERM"))
    assert not run.asked_for(cmd.KillStep)  # the coordinator first
    run.take(ev.StopRequested("TERM"))
    assert run.asked_for(cmd.KillStep) == [cmd.KillStep(1)]
    assert run.rank(1).stop == "stop_requested"


def test_more_requests_make_nothing_slower() -> None:
    run = Run().start()
    run.take(ev.StopRequested("TERM"), ev.StopRequested("TERM"))
    due = dict(run.state.deadlines)
    run.take(ev.StopRequested("TERM"), after=3.0)
    assert not run.commands
    assert run.state.deadlines == due


def test_nothing_starts_after_a_stop() -> None:
    run = Run().connect(0, 1)
    run.take(ev.StopRequested("TERM"))
    run.connect(2)
    assert not run.asked_for(cmd.StartRank)
    assert cmd.KillStep(2) in run.asked


def test_a_stop_before_hello_ends_the_step_from_outside() -> None:
    run = Run()
    run.take(ev.StepSpawned(0, 50, "step0"), ev.StopRequested("TERM"))
    assert cmd.KillStep(0) in run.commands
    assert not run.asked_for(cmd.StopRank)


def test_a_stop_at_once_starts_nothing() -> None:
    run = Run()
    run.take(ev.StopRequested("TERM"))
    for rank in range(3):
        run.take(ev.StepRefused(rank, "a stop was decided first"))
    run.wind_up()
    assert run.verdict.code == 143


def test_the_deadline_of_the_run_is_kept() -> None:
    run = Run(deadlines={"run": 50}).start()
    run.fire("run")
    assert (run.reason, run.failure()) == ("deadline", (None, "deadline", 124))
    assert stops(run) == [0]


def test_an_agent_that_does_not_do_as_told_is_ended_from_outside() -> None:
    run = Run().start()
    run.end(1, 3)
    run.fire("stop:2")
    assert run.commands == [cmd.KillStep(2)]
    assert "rank 2: its agent did not do as told in time" in run.state.notes[-1]
    run.fire("kill:2")
    assert run.rank(2).phase == "abandoned"
    assert "could not be ended" in run.state.doubts[-1]


def test_an_abandoned_agent_may_still_talk() -> None:
    run = Run().start()
    run.end(1, 3)
    run.fire("stop:2")
    run.fire("kill:2")
    state = run.state
    run.take(ev.RankEnded(2, 0, None), ev.TreeGone(2, 0))
    assert (run.state.ranks, run.state.deadlines) == (state.ranks, state.deadlines)
    run.take(ev.StepEnded(2, 0))
    assert run.rank(2).phase == "over"


def test_an_agent_that_may_go_and_stays_is_ended_from_outside() -> None:
    run = Run().start()
    run.end(1, 3)
    run.take(ev.TreeGone(1, 0))
    run.fire("release:1")
    assert run.commands == [cmd.KillStep(1)]


# --- the time limit ----------------------------------------------------------------------------------------------


def test_the_stop_begins_early_enough_for_an_orderly_end() -> None:
    """A grace per tier, the window where something is promised, and collection."""
    run = Run(artifacts=[RESULT], deadlines={"collect": 10}).start()
    run.take(ev.TimeLimitKnown(run.now + 1000, "later"))
    assert run.state.deadlines["time_limit"] == run.now + 1000 - (GRACE + GRACE + FINALIZATION + 10)
    run.fire("time_limit")
    assert (run.reason, run.exit) == ("time_limit", 124)
    assert stops(run) == [0]


def test_a_limit_that_was_extended_counts() -> None:
    run = Run(deadlines={"collect": 10}).start()
    run.take(ev.TimeLimitKnown(run.now + 100, "soon"), ev.TimeLimitKnown(run.now + 1000, "later"))
    assert run.state.deadlines["time_limit"] == run.now + 1000 - (GRACE + GRACE + 10)


@pytest.mark.parametrize("left", [20.0, -5.0])
def test_a_budget_that_does_not_fit_begins_at_half_of_what_is_left(left: float) -> None:
    run = Run(deadlines={"collect": 60}).start()
    run.take(ev.TimeLimitKnown(run.now + left, "soon"))
    assert run.state.deadlines["time_limit"] == run.now + max(0.0, left) / 2
    assert "more than half of the time" in run.state.notes[-1]


def test_slurms_early_signal_is_the_time_limit() -> None:
    run = Run().start()
    run.take(ev.StopRequested("USR1"))
    assert (run.reason, run.exit) == ("time_limit", 124)


@pytest.mark.parametrize(("left", "reason"), [(100.0, "undecided"), (1000.0, "time_limit")])
def test_slurms_early_signal_takes_no_more_than_half_of_a_short_job(left: float, reason: str | None) -> None:
    run = Run(deadlines={"collect": 60}).start()
    run.take(ev.TimeLimitKnown(run.now + left, "soon"), ev.StopRequested("USR1"))
    assert run.reason == reason
    if reason == "undecided":
        assert "early signal" in run.state.notes[-1]
        run.take(ev.StopRequested("TERM"))
        assert run.reason == "time_limit" and not run.asked_for(cmd.KillRank)


def test_slurms_early_signal_does_not_hurry_an_orderly_stop() -> None:
    run = Run().start()
    run.take(ev.StopRequested("TERM"), ev.StopRequested("USR1"))
    assert not run.asked_for(cmd.KillRank)


@pytest.mark.parametrize(("left", "reason"), [(100.0, "time_limit"), (1000.0, "stop_requested")])
def test_a_term_near_the_end_of_the_job_is_the_time_limit(left: float, reason: str) -> None:
    run = Run(deadlines={"collect": 30}).start()
    run.take(ev.TimeLimitKnown(run.now + left, "soon"), ev.StopRequested("TERM"))
    assert run.reason == reason


# --- provisional ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "provisional"),
    [
        ([ev.RankEnded(1, None, TERM)], True),
        ([ev.RankEnded(1, None, KILL)], True),
        ([ev.RankEnded(1, 143, None)], True),
        ([ev.RankEnded(1, None, 11)], False),
        ([ev.RankEnded(1, 3, None)], False),
        ([ev.AgentSignalled(1, TERM), ev.RankEnded(1, 3, None)], True),
        ([ev.AgentSignalled(1, USR1), ev.RankEnded(1, 3, None)], False),
        ([ev.RankEnded(1, 3, None), ev.AgentSignalled(1, TERM)], True),
        ([ev.RankSilent(2, 15.0), ev.RankEnded(1, 3, None)], True),
        ([ev.RankEnded(1, 3, None), ev.RankSilent(2, 15.0)], True),
        ([ev.RankEnded(1, 3, None), ev.StepEnded(2, 1, "srun: error: Node failure on node2")], True),
    ],
    ids=[
        "killed by TERM",
        "killed by KILL",
        "a shell whose child was killed",
        "crashed",
        "exited",
        "exited after its agent was told to end",
        "exited after its agent got the early signal",
        "told just before its agent's signal",
        "fell when a peer's node was silent",
        "fell after a peer's node was heard for the last time",
        "fell just before a peer's agent vanished",
    ],
)
def test_an_end_that_slurm_may_explain_is_provisional(events: list[ev.Event], provisional: bool) -> None:
    run = Run().start()
    run.take(*events)
    assert run.reason == "peer_failed"  # it stops the others all the same
    assert run.failure()[0] == 1
    assert run.state.failures[0].provisional is provisional


def test_a_suspect_may_turn_out_to_be_provisional() -> None:
    run = Run(marker={"by": "coordinator"}).start()
    run.end(1, 3)
    run.take(ev.AgentSignalled(1, TERM))
    end = run.rank(1).end
    assert end is not None and end.outside == TERM
    run.fire("recheck:1")
    assert run.failure() == (1, "exit", 3)
    assert run.state.failures[0].provisional


def test_a_peer_that_falls_silent_long_after_explains_nothing() -> None:
    run = Run().start()
    run.end(1, 3)
    run.take(ev.RankSilent(2, 15.0), after=30.0)
    assert not run.state.failures[0].provisional


def test_a_signal_long_after_an_end_explains_nothing() -> None:
    run = Run().start()
    run.end(1, 3)
    run.take(ev.AgentSignalled(1, TERM), after=5.0)
    assert not run.state.failures[0].provisional


def test_a_zero_of_the_coordinator_after_a_signal_is_no_zero() -> None:
    run = Run().start()
    run.take(ev.AgentSignalled(0, TERM))
    run.end(0, 0)
    assert run.failure() == (0, "exit", 143)
    assert run.state.failures[0].provisional


def test_a_zero_of_the_coordinator_told_just_before_its_signal_is_no_zero() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.end(0, 0)
    run.take(ev.AgentSignalled(0, TERM), after=0.01)
    assert run.failure() == (0, "exit", 143)


def test_our_own_signals_are_no_failures() -> None:
    run = Run().start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"), ev.AgentSignalled(1, TERM))
    run.end(1, None, TERM)
    end = run.rank(1).end
    assert end is not None and not end.provisional
    assert run.state.failures == ()


# --- agents that are lost ----------------------------------------------------------------------------------------


def test_an_agent_that_stays_silent_is_lost() -> None:
    run = Run().start()
    heard = run.now
    run.take(ev.RankSilent(1, 15.0), after=15.0)
    run.fire("silence:1")
    assert run.now == heard + SILENCE
    assert run.failure() == (1, "rank_lost", 1)
    assert run.state.failures[0].provisional
    assert cmd.KillStep(1) in run.commands
    assert stops(run) == [0, 2]


def test_an_agent_that_answers_again_is_not_lost() -> None:
    run = Run().start()
    run.take(ev.RankSilent(1, 15.0), ev.RankHeard(1))
    assert "silence:1" not in run.state.deadlines
    assert not run.rank(1).silent


def test_an_agent_that_dies_is_a_failure_and_its_node_is_searched() -> None:
    run = Run().start()
    run.take(ev.StepEnded(1, 137, "srun: error: node1: task 0: Killed"))
    assert run.failure() == (1, "step_lost", 137)
    assert cmd.Sweep(1) in run.commands


@pytest.mark.parametrize(
    ("event", "doubt"),
    [
        (ev.Swept(1, 2, 0), None),
        (ev.Swept(1, 0, 3), "rank 1: it is not sure that nothing of it is left on node1"),
        (ev.Swept(1, 0, -1, "no answer"), "rank 1: it is not sure that nothing of it is left on node1: no answer"),
    ],
)
def test_what_a_search_leaves_open_is_a_doubt(event: ev.Swept, doubt: str | None) -> None:
    run = Run().start()
    run.take(ev.StepEnded(1, 137), event)
    assert run.state.doubts == (() if doubt is None else (doubt,))


def test_a_search_that_is_not_answered_is_a_doubt() -> None:
    run = Run().start()
    run.take(ev.StepEnded(1, 137))
    run.fire("sweep:1")
    assert "nobody could look on node1" in run.state.doubts[0]


def test_processes_that_survive_kill_are_a_doubt() -> None:
    run = Run().start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"))
    run.take(ev.TreeGone(1, 0, left=1))
    assert run.state.doubts == ("rank 1: 1 of its processes could not be killed",)
    run.wind_up()
    assert (run.verdict.outcome, run.verdict.code) == ("unverifiable", 75)


def test_a_rank_that_its_agent_gives_up_unasked_is_lost() -> None:
    run = Run().start()
    run.take(ev.AgentSignalled(1, TERM), ev.TreeGone(1, 0, left=1))
    assert run.failure() == (1, "rank_lost", 143)
    assert "could not be killed after signal 15 from outside" in run.verdict.summary


def test_srun_must_end_as_its_agent_was_told() -> None:
    """A success needs agreement: a 0 of srun alone proves nothing, and another code contradicts it."""
    run = Run().start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"))
    run.end(1, 0)
    run.take(ev.TreeGone(1, 0), ev.StepEnded(1, 1))
    assert run.state.doubts == ("rank 1: its agent was to end with 0, but srun ended with 1",)


# --- agent = "off" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returncode", "what", "code"),
    [(3, "exit", 3), (0, "exit", 1), (139, "signal", 139), (-9, "signal", 137), (255, "exit", 255)],
)
def test_without_an_agent_the_end_of_srun_is_all_that_is_known(returncode: int, what: str, code: int) -> None:
    run = Run(roles={1: {"agent": "off"}}).start()
    run.take(ev.StepEnded(1, returncode))
    assert run.failure() == (1, what, code)
    assert cmd.Sweep(1) in run.commands


def test_without_an_agent_the_grace_is_kept_by_the_machine() -> None:
    run = Run(roles={1: {"agent": "off"}}).start()
    run.end(2, 3)
    assert cmd.StopRank(1, "peer_failed", GRACE, 3) in run.commands
    assert run.state.deadlines["stop:1"] == run.now + GRACE
    run.fire("stop:1")
    assert run.commands == [cmd.KillStep(1)]


# --- our own faults, and the end ---------------------------------------------------------------------------------


def test_our_own_fault_ends_the_run() -> None:
    run = Run().start()
    run.take(ev.EngineFault("a bug"))
    assert run.failure() == (None, "fault", 125)
    assert run.state.notes == ("fault: a bug",)


def test_what_is_worth_telling_changes_nothing_else() -> None:
    run = Run().start()
    before = run.state
    run.take(ev.Noted("a banner", 2), ev.Noted("a degraded journal"))
    assert run.state.notes == ("rank 2: a banner", "a degraded journal")
    assert replace(run.state, notes=before.notes, seq=before.seq, at=before.at) == before


def test_a_timer_that_was_cleared_in_the_same_instant_means_nothing() -> None:
    run = Run().start()
    before = run.state
    run.take(ev.TimerFired("hello:1"))
    assert not run.commands
    assert replace(run.state, seq=before.seq, at=before.at) == before


def test_our_own_fault_after_the_decision_denies_a_success() -> None:
    run = Run().start()
    run.complete()
    run.take(ev.EngineFault("a bug"))
    run.wind_up()
    assert run.verdict.outcome == "unverifiable"


def test_collection_has_a_deadline() -> None:
    run = Run(coordinator=0, collect={"required": True}, deadlines={"collect": 10})
    run.take(ev.StopRequested("TERM"))
    run.take(*(ev.StepRefused(rank, "too late") for rank in range(3)), ev.MarkerPublished(143, "written"))
    assert run.commands == [cmd.Collect(10)]
    run.fire("collect")
    assert run.commands == [cmd.Finish()]
    assert run.state.collected is not None and "did not end within 10 s" in run.state.collected.errors[0]


def test_agents_that_fetch_have_the_time_for_it() -> None:
    """Their release has the collection's limit on top; and what they took of it is not there a second time."""
    run = Run(collect={"nodes": ["/tmp/*"]}, deadlines={"collect": 40}).start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"), *(ev.RankEnded(rank, 0, None) for rank in (1, 2)))
    run.take(ev.TreeGone(0, 0), ev.TreeGone(1, 0), after=5.0)
    run.take(ev.StepEnded(0, 0), ev.StepEnded(1, 0), after=5.0)
    assert run.state.collect_by is None, "a tree is left"
    run.take(ev.TreeGone(2, 0), after=5.0)
    assert run.state.deadlines["release:2"] == run.now + 40 + 10
    run.take(ev.StepEnded(2, 0), after=15.0)
    assert run.commands == [cmd.Collect(25)]


def test_a_little_time_for_collecting_is_left_whatever_agents_took() -> None:
    run = Run(collect={"nodes": ["/tmp/*"]}, deadlines={"collect": 40}).start()
    run.complete()
    run.take(ev.MarkerPublished(0, "written"), *(ev.RankEnded(rank, 0, None) for rank in (1, 2)))
    run.take(*(ev.TreeGone(rank, 0) for rank in range(3)))
    run.take(ev.StepEnded(0, 0), ev.StepEnded(1, 0))
    run.fire("release:2")
    assert run.commands == [cmd.KillStep(2)]
    run.take(ev.StepEnded(2, -9))
    assert run.commands == [cmd.Collect(5)]


def test_an_illegal_event_tells_the_story_and_changes_nothing() -> None:
    run = Run().start()
    state = run.state
    with pytest.raises(IllegalEvent, match=r"Hello \(seq \d+\) is not allowed: rank 1 is running\nrun: running"):
        run.take(ev.Hello(1, "node1", 1, None, None, "3.11"))
    assert run.state is state
    with pytest.raises(IllegalEvent, match="there is no rank 3"):
        run.take(ev.RankStarted(3, 1))
    with pytest.raises(IllegalEvent, match="the run is running"):
        run.take(ev.Collected())
