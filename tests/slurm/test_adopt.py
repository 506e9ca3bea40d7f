"""Adopted runs: steps that are started from outside, in a job that somebody else made."""

from __future__ import annotations

import signal

from tests.slurm.jobs import SERVE, UP, Jobs, Run, await_files, py, role, sh

WORK = {"worker": role("0-1", SERVE), "client": role(2, sh(f"{await_files('up', 0, 1)}; {UP}; exit 0"))}
"""Two workers, and a client that ends with 0 when both are up."""

SLEEPER = sh(f"{UP}; exec sleep 1000")
"""A rank that SIGTERM kills."""


def sealed(run: Run) -> dict[str, object]:
    document = run.receipt("receipt.json")
    assert document["run"]["adopted"] is True
    verdict: dict[str, object] = document["verdict"]
    assert verdict["final"] is True
    return verdict


def test_a_success_is_proven_by_the_steps_while_the_job_goes_on_and_stays_one_when_it_is_released(jobs: Jobs) -> None:
    held = jobs.hold()
    run = jobs.outside(jobs.plan(WORK, coordinator=2), held.jobid)
    assert run.wait() == 0
    assert run.directory.name == f"{held.jobid}.s1"
    verdict = sealed(run)
    assert (verdict["outcome"], verdict["origin"]) == ("success", "native")
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"
    assert run.outcome() is None  # that tells of jobs

    jobs.cluster.run(["scancel", str(held.jobid)], check=True)
    run.job_end("CANCELLED")
    again = jobs.allocctl("verify", f"{held.jobid}.s1")
    assert (again.returncode, again.stdout.split()[1]) == (0, "success")
    job = run.verify()
    assert (job.returncode, "CANCELLED" in job.stdout) == (130, True)
    assert sealed(run) == verdict


def test_from_outside_the_ranks_know_their_job_and_not_the_one_of_the_caller(jobs: Jobs) -> None:
    held = jobs.hold(2)
    tell = py(
        "import os; print(*(f'{name}={os.environ.get(name)}' for name in"
        " ('SLURM_JOB_ID', 'SLURM_JOB_NODELIST', 'SLURM_ARRAY_JOB_ID', 'SLURM_JOB_NAME')))"
    )
    plan = jobs.plan({"one": role(0, tell)}, coordinator=0, nodes=1)
    other = {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3", "SLURM_HET_SIZE": "2"}
    run = jobs.outside(plan, held.jobid, env={**other, "SLURM_JOB_NODELIST": "node9", "SLURM_JOB_NAME": "mine"})
    assert run.wait() == 0
    words = dict(word.split("=") for word in run.log(0, "out").split())
    assert words["SLURM_JOB_ID"] == str(held.jobid)
    assert words["SLURM_JOB_NODELIST"] in ("node[1-2]", jobs.cluster.job(held.jobid)["NodeList"])
    assert words["SLURM_ARRAY_JOB_ID"] == "None"


def test_a_failure_is_the_runs_own_and_the_job_goes_on(jobs: Jobs) -> None:
    held = jobs.hold()
    roles = {"worker": role("0-1", SERVE), "client": role(2, sh(f"{await_files('up', 0, 1)}; exit 7"))}
    run = jobs.outside(jobs.plan(roles, coordinator=2), held.jobid)
    assert run.wait() == 7
    assert (sealed(run)["code"], sealed(run)["origin"]) == (7, "native")
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"
    run.wait_gone()


def test_two_runs_in_one_allocation_and_a_stop_of_one(jobs: Jobs) -> None:
    held = jobs.hold()
    endless = {"worker": role("0-1", SERVE), "client": role(2, SERVE)}
    first = jobs.outside(jobs.plan(endless, coordinator=2), held.jobid)
    first.wait_file("up.0", "up.1", "up.2")
    second = jobs.outside(jobs.plan(WORK, coordinator=2), held.jobid)
    assert second.wait() == 0
    assert jobs.allocctl("status", str(first.directory)).stdout.count("running") >= 3
    assert first.process is not None
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 143
    assert sealed(first)["reason"] == "stop_requested"
    assert {state for state, _ in first.ended_steps(3).values()} == {"COMPLETED"}
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"


def test_a_job_that_is_cancelled_under_the_run_explains_its_end(jobs: Jobs) -> None:
    held = jobs.hold()
    run = jobs.outside(
        jobs.plan({"worker": role("0-1", SLEEPER), "client": role(2, SLEEPER)}, coordinator=2), held.jobid
    )
    run.wait_file("up.0", "up.1", "up.2")
    jobs.cluster.run(["scancel", str(held.jobid)], check=True)
    code = run.wait()
    verified = jobs.allocctl("verify", f"{held.jobid}.s1")
    assert (code, verified.returncode) == (130, 130)
    assert (sealed(run)["code"], sealed(run)["origin"]) == (130, "slurm")
