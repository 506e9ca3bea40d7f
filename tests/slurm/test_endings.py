"""How a run ends when a rank ends by itself: the coordinator's word is the verdict, a worker's end is a failure, and
what we stop is never one."""

from __future__ import annotations

import os
import signal

import pytest

from tests.slurm.jobs import SERVE, SLEEP, UP, Jobs, Run, await_files, role, sh, touch

WORKERS = (0, 1, 3)
EVERYBODY_IS_UP = await_files("up", *WORKERS)


def _submit(jobs: Jobs, client: list[str], worker: list[str] = SERVE) -> Run:
    """Four nodes; rank 2 is the coordinator, as a benchmark's client is that shares its job with engines."""
    return jobs.submit(jobs.plan({"worker": role("0-1,3", worker), "client": role(2, client)}, coordinator=2))


def _job_code(run: Run) -> tuple[str, str]:
    record = run.job_end()
    return record["JobState"], record["ExitCode"]


def test_a_coordinator_that_ends_with_0_ends_everybody_normally(jobs: Jobs) -> None:
    run = _submit(jobs, sh(EVERYBODY_IS_UP))
    assert _job_code(run) == ("COMPLETED", "0:0"), str(run)
    assert run.processes() == []
    assert run.receipt()["verdict"]["outcome"] == "success"
    assert all(run.file(f"ended.{rank}") is not None for rank in WORKERS), "a handler did not run"
    assert [event["code"] for event in run.events("RankEnded")] == [0, 0, 0, 0]
    assert run.ended_steps(4) == dict.fromkeys(range(4), ("COMPLETED", "0:0"))
    verified = run.verify()
    assert verified.returncode == 0, verified.stdout + verified.stderr
    sealed = run.receipt("receipt.json")["verdict"]
    assert (sealed["outcome"], sealed["final"]) == ("success", True)
    assert (run.outcome() or "").startswith(f"{run.jobid}|COMPLETED|0:0")


def test_a_coordinator_that_ends_with_7_gives_its_code_to_every_step_and_to_the_job(jobs: Jobs) -> None:
    saying = f'trap "echo last words >&2; exit 0" TERM; echo rank $ALLOCD_RANK; {UP}; {SLEEP}'
    run = _submit(jobs, sh(f"echo rank 2; echo last words >&2; {EVERYBODY_IS_UP}; exit 7"), sh(saying))
    assert _job_code(run) == ("FAILED", "7:0"), str(run)
    assert run.ended_steps(4) == dict.fromkeys(range(4), ("FAILED", "7:0"))
    verdict = run.receipt()["verdict"]
    assert (verdict["outcome"], verdict["code"], verdict["origin"]) == ("failure", 7, "native")
    for rank in range(4):
        assert (run.log(rank, "out"), run.log(rank, "err")) == (f"rank {rank}\n", "last words\n")
    assert run.verify().returncode == 7


def test_a_coordinator_killed_by_sigkill_never_writes_so_its_marker_is_written_for_it(jobs: Jobs) -> None:
    run = _submit(jobs, sh(SLEEP))
    run.wait_events("RankStarted", 4)
    run.wait_file(*(f"up.{rank}" for rank in WORKERS))
    os.kill(run.first("RankStarted", rank=2)["pid"], signal.SIGKILL)
    assert _job_code(run) == ("FAILED", "137:0"), str(run)
    marker = run.file(f".bench_done.{run.jobid}") or ""
    assert marker.splitlines()[0] == "137" and "by=supervisor" in marker
    assert all(run.file(f"ended.{rank}") is not None for rank in WORKERS)
    receipt = run.receipt()
    assert receipt["verdict"]["code"] == 137
    assert (receipt["first_failure"]["rank"], receipt["first_failure"]["what"]) == (2, "signal")
    assert run.processes() == []
    assert run.verify().returncode == 137


@pytest.mark.parametrize("agent", ["on", "off"])
def test_our_own_sigterm_is_never_a_failure(jobs: Jobs, agent: str) -> None:
    """Workers without a handler die by it; with an agent or without, the run is as successful as its coordinator."""
    dies = role("0-1,3", sh(f"{UP}; exec sleep 1000"), agent=agent)
    run = jobs.start(jobs.plan({"worker": dies, "client": role(2, sh(EVERYBODY_IS_UP))}, coordinator=2), jobs.hold())
    assert run.wait() == 0, str(run)
    receipt = run.receipt()
    assert receipt["failures"] == [] and receipt["doubts"] == []
    assert {run.first("RankEnded", rank=rank)["signal"] for rank in WORKERS if agent == "on"} <= {signal.SIGTERM}
    assert run.processes() == []


def test_a_worker_that_ends_with_0_before_the_run_may_end_is_a_failure(jobs: Jobs) -> None:
    roles = {
        "worker": role("0,3", SERVE),
        "quitter": role(1, sh(await_files("up", 0, 2, 3))),
        "client": role(2, SERVE),
    }
    run = jobs.start(jobs.plan(roles, coordinator=2), jobs.hold())
    assert run.wait() == 1, str(run)
    receipt = run.receipt()
    assert [failure["rank"] for failure in receipt["failures"]] == [1]
    assert (receipt["first_failure"]["code"], receipt["verdict"]["origin"]) == (1, "native")
    assert all(run.file(f"ended.{rank}") is not None for rank in (0, 2, 3))


def test_a_worker_that_may_finish_is_none(jobs: Jobs) -> None:
    seen_end = """grep -q '"event":"RankEnded"' $ALLOCD_RUN_DIR/journal.jsonl"""  # not the plan's own text in it
    roles = {
        "worker": role("0,3", SERVE),
        "loader": role(1, sh(touch("up")), may_finish=True),
        "client": role(2, sh(f"{EVERYBODY_IS_UP}; until {seen_end}; do sleep 0.05; done")),
    }
    run = jobs.start(jobs.plan(roles, coordinator=2), jobs.hold())
    assert run.wait() == 0, str(run)
    assert run.events("RankEnded")[0]["rank"] == 1, "it was to end first"
    assert run.receipt()["failures"] == []


def test_a_second_request_to_stop_does_not_wait_for_the_grace(jobs: Jobs) -> None:
    """The first one stops the coordinator, which ignores it; the workers wait for their turn, and lose it. (Graces as
    long as the job's own time do not make a request to stop a time limit.)"""
    deaf = sh(f"trap '' TERM; {UP}; {SLEEP}")
    roles = {"worker": role("0-1,3", SERVE, grace=600), "client": role(2, deaf, grace=600)}
    run = jobs.start(jobs.plan(roles, coordinator=2), jobs.hold())
    run.wait_file(*(f"up.{rank}" for rank in range(4)))
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert [command["rank"] for command in run.wait_events("StopRank", 1)] == [2]
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, str(run)
    assert {run.first("RankEnded", rank=rank)["signal"] for rank in range(4)} == {signal.SIGKILL}
    receipt = run.receipt()
    assert [failure["what"] for failure in receipt["failures"]] == ["stop"]
    assert {each["rank"] for each in receipt["consequences"]} == {0, 1, 2, 3}
    assert run.processes() == []
