"""The start of a run, broken off at every point: nothing starts after the stop was decided, and nothing is left."""

from __future__ import annotations

import itertools
import shlex
import signal
import sys
import time
from collections.abc import Callable

import pytest

from tests.slurm.jobs import SERVE, UP, Allocation, Jobs, Run, await_files, role, sh, until

BLOCK = "while :; do sleep 0.02; done"


def _steps(jobs: Jobs, jobid: int) -> list[str]:
    """The names of a job's living steps."""
    return jobs.cluster.run(["squeue", "--steps", f"--jobs={jobid}", "--noheader", "--format=%j"]).stdout.split()


def _assert_nothing_is_left(jobs: Jobs, run: Run) -> None:
    """No process now; no step as soon as the controller has heard of its end."""
    assert run.processes() == [], jobs.describe(run.processes())
    run.until(lambda: not [name for name in _steps(jobs, run.jobid) if "allocd-" in name], "the end of all steps")


def _seconds_to_end(run: Run) -> float:
    """From the decision to the end of the run."""
    return float(run.first("Finish")["at"] - run.receipt()["decision"]["at"])


def _assert_nothing_started_after_the_decision(run: Run) -> None:
    decision = run.receipt()["decision"]["seq"]
    for name in ("StartStep", "StartRank"):
        assert all(command["seq"] < decision for command in run.events(name)), name
    told = {command["rank"] for command in run.events("StartRank")}
    started = {event["rank"] for event in run.events("RankStarted")}
    assert started <= told
    assert {rank for rank in range(4) if run.file(f"up.{rank}") is not None} <= started


Obstacle = tuple[dict[str, str], dict[str, str]]
"""What is added to the engine's environment, and to the plan's job table."""


def _block_srun(jobs: Jobs, _: Allocation) -> Obstacle:
    """Rank 0's srun does not get as far as asking Slurm."""
    return jobs.srun_wrapper(f'[ "$RANK" != 0 ] || {BLOCK}; exec $SRUN "$@"'), {}


def _hold_the_node(jobs: Jobs, allocation: Allocation) -> Obstacle:
    """Rank 0's srun waits, "Requested nodes are busy": another step has all of node1, and this one may not share it."""
    up = jobs.directory / "held"
    task = f": >{shlex.quote(str(up))}; exec sleep 1000"
    jobs.background(["srun", "--nodelist=node1", "--nodes=1", "--ntasks=1", "sh", "-c", task], allocation)
    until(up.exists, "a step that holds node1")
    alone = 'for word; do shift; [ "$RANK$word" = 0--overlap ] || set -- "$@" "$word"; done'
    return jobs.srun_wrapper(f'{alone}; exec $SRUN "$@"'), {}


def _block_agent(jobs: Jobs, _: Allocation) -> Obstacle:
    """Rank 0's step runs, and its agent does not come to say hello."""
    python, there = jobs.directory / "python", jobs.directory / "there"
    blocked = f": >{shlex.quote(str(there))}; {BLOCK}"
    python.write_text(f'#!/bin/sh\ncase "$*" in *" run "*" 0") {blocked};; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return {}, {"python": str(python)}


OBSTACLES: dict[str, tuple[Callable[[Jobs, Allocation], Obstacle], Callable[[Run], bool]]] = {
    "no step yet": (_block_srun, lambda run: bool(run.events("StepSpawned", rank=0))),
    "srun waits": (_hold_the_node, lambda run: len(run.events("RankStarted")) == 3),  # they came after it
    "no hello yet": (_block_agent, lambda run: (run.jobs.directory / "there").exists()),
}
"""What keeps rank 0 from starting, and how that is seen."""


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_peer_fails_before_rank_0_has_said_hello(jobs: Jobs, obstacle: str) -> None:
    """Rank 0 never runs: its step is ended from outside, wherever it is."""
    make, stands = OBSTACLES[obstacle]
    allocation = jobs.hold()
    env, job = make(jobs, allocation)
    bad = sh(f"{await_files('up', 2, 3)}; until [ -e $ALLOCD_RUN_DIR/go ]; do sleep 0.02; done; exit 5")
    roles = {"late": role(0, SERVE), "bad": role(1, bad), "worker": role("2-3", SERVE)}
    plan = jobs.plan(roles, coordinator=0, run={"start": "each"}, job={"name": "late", "nodes": 4, **job})
    run = jobs.start(plan, allocation, env=env)
    run.until(lambda: stands(run), "rank 0 to stand before the obstacle")
    (run.directory / "go").touch()
    assert run.wait() == 5, str(run)
    assert run.events("Hello", rank=0) == []
    assert (obstacle == "srun waits") == ("Cancelled pending job step" in run.log(0, "srun"))
    _assert_nothing_started_after_the_decision(run)
    receipt = run.receipt()
    assert [failure["rank"] for failure in receipt["failures"]] == [1]
    assert {each["rank"] for each in receipt["consequences"]} == {0, 2, 3}
    assert receipt["doubts"] == []
    assert {rank for rank in range(4) if run.file(f"ended.{rank}") is not None} == {2, 3}
    _assert_nothing_is_left(jobs, run)


def test_an_agent_that_does_not_come_is_its_ranks_failure_and_nobody_starts(jobs: Jobs) -> None:
    """All ranks start together or none does."""
    env, job = _block_agent(jobs, allocation := jobs.hold())
    roles = {"late": role(0, SERVE), "worker": role("1-3", SERVE)}
    plan = jobs.plan(roles, coordinator=3, deadlines={"hello": 2}, job={"name": "late", "nodes": 4, **job})
    run = jobs.start(plan, allocation, env=env)
    assert run.wait() == 124, str(run)
    assert [event["rank"] for event in run.events("Hello") if event["rank"] == 0] == []
    assert run.events("StartRank") == []
    first = run.receipt()["first_failure"]
    assert (first["rank"], first["what"], first["code"]) == (0, "no_hello", 124)
    _assert_nothing_is_left(jobs, run)


def test_the_verdict_on_a_step_that_cannot_be_made_has_sruns_own_words(jobs: Jobs) -> None:
    roles = {"bad": role(0, SERVE, srun_options=["--constraint=gold"]), "worker": role("1-3", SERVE)}
    run = jobs.start(jobs.plan(roles, coordinator=3), jobs.hold())
    assert run.wait() == 1, str(run)
    first = run.receipt()["first_failure"]
    assert (first["rank"], first["what"], first["origin"]) == (0, "step_lost", "allocd")
    assert "srun: error: " in first["text"]
    _assert_nothing_started_after_the_decision(run)
    _assert_nothing_is_left(jobs, run)


POINTS = [("RunOpened", 1), *itertools.product(("StepSpawned", "Hello", "RankStarted"), (1, 2, 3, 4))]


def test_a_stop_at_every_point_of_starting_four_steps(jobs: Jobs) -> None:
    """SIGTERM as soon as the journal shows the k-th step, hello or start: thirteen points, in one allocation."""
    allocation = jobs.hold()
    plan = jobs.plan({"worker": role("0-3", SERVE)}, coordinator=0)
    for event, count in POINTS:
        run = jobs.start(plan, allocation)
        run.wait_events(event, count)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, f"after {count} x {event}{run}"
        verdict = run.receipt()["verdict"]
        assert (verdict["reason"], verdict["code"]) == ("stop_requested", 143)
        _assert_nothing_started_after_the_decision(run)
        _assert_nothing_is_left(jobs, run)
        print(f"after {count} x {event}: ended {_seconds_to_end(run):.3f} s after the decision")


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_stop_before_ranks_without_agents_have_steps(jobs: Jobs, count: int) -> None:
    """There is nothing yet that Slurm could signal, and still nobody waits for the grace."""
    plan = jobs.plan({"worker": role("0-3", SERVE, agent="off", grace=60)}, coordinator=0)
    run = jobs.start(plan, jobs.hold())
    run.wait_events("StepSpawned" if count else "RunOpened", count or 1)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, str(run)
    decision = run.receipt()["decision"]["seq"]
    assert all(command["seq"] < decision for command in run.events("StartStep"))
    _assert_nothing_is_left(jobs, run)


def test_a_stop_while_a_step_without_agent_waits_for_its_node(jobs: Jobs) -> None:
    env, _ = _hold_the_node(jobs, allocation := jobs.hold())
    run = jobs.start(
        jobs.plan({"worker": role("0-3", SERVE, agent="off", grace=60)}, coordinator=0), allocation, env=env
    )
    run.wait_file(*(f"up.{rank}" for rank in (1, 2, 3)))
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, str(run)
    assert "Cancelled pending job step" in run.log(0, "err") and run.file("up.0") is None
    assert all(run.file(f"ended.{rank}") is not None for rank in (1, 2, 3))
    _assert_nothing_is_left(jobs, run)


def test_the_first_rank_starts_soon(jobs: Jobs) -> None:
    """Beside a bare srun, which starts one task on one node. The bound is for a loaded machine."""
    allocation = jobs.hold()
    bare, begin = jobs.directory / "bare", time.monotonic()
    jobs.background(["srun", "--overlap", "--nodes=1", "--ntasks=1", "sh", "-c", f": >{bare}"], allocation)
    until(bare.exists, "a bare srun's task")
    bare_time, begin = time.monotonic() - begin, time.monotonic()
    roles = {"worker": role("1-3", SERVE), "client": role(0, sh(f"{UP}; {await_files('up', 1, 2, 3)}"))}
    run = jobs.start(jobs.plan(roles, coordinator=0), allocation)
    run.wait_file("up.0", limit=10.0)
    print(
        f"to the first rank: allocctl run on four nodes {time.monotonic() - begin:.3f} s, a bare srun {bare_time:.3f} s"
    )
    assert run.wait() == 0, str(run)
