"""Adopted runs: steps that are started from outside, in a job that somebody else made."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from supervisor.runs.registry import registry
from supervisor.service.adopting import alive, stop
from tests.slurm.jobs import ALLOCCTL, LIMIT, SERVE, UP, Jobs, Run, await_files, py, role, sh, until

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


# --- what may happen to the job -------------------------------------------------------------------------------------


def test_an_allocation_without_a_shell(jobs: Jobs) -> None:
    done = jobs.cluster.run(["salloc", "--no-shell", "--nodes=4"], check=True)
    (jobid,) = re.findall(r"Granted job allocation (\d+)", done.stderr)
    run = jobs.outside(jobs.plan(WORK, coordinator=2), jobid)
    assert run.wait() == 0
    jobs.cluster.run(["scancel", jobid], check=True)
    run.job_end()
    assert jobs.allocctl("verify", f"{jobid}.s1").returncode == 0


def states(jobs: Jobs, jobid: int) -> list[str]:
    argv = ["squeue", "--noheader", "--array", f"--jobs={jobid}", "--format=%T"]
    return jobs.cluster.run(argv).stdout.split()


def test_a_task_of_an_array(jobs: Jobs) -> None:
    array = jobs.batch("exec sleep 1000\n", "--array=1-2", nodes=1)
    jobs.cluster.wait_for(lambda: states(jobs, array) == ["RUNNING"] * 2, "two tasks that run")
    plan = jobs.plan({"one": role(0, ["true"])}, coordinator=0, nodes=1)
    refused = jobs.allocctl("run", f"--jobid={array}", str(plan))
    assert (refused.returncode, "is an array: name one of its tasks" in refused.stderr) == (78, True)
    task = jobs.outside(plan, f"{array}_1")
    assert task.wait() == 0
    assert (task.directory.name, sealed(task)["outcome"]) == (f"{array}_1.s1", "success")


def test_a_heterogeneous_job(jobs: Jobs) -> None:
    het = jobs.cluster.sbatch("#!/bin/sh\n#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=2\nexec sleep 1000\n")
    jobs.cluster.wait_for(lambda: states(jobs, het) == ["RUNNING"] * 2, "two components that run")
    run = jobs.outside(jobs.plan(WORK, coordinator=2, nodes=3), het)
    assert run.wait() == 0
    document = run.receipt("receipt.json")
    assert (document["verdict"]["outcome"], len(document["components"])) == ("success", 2)
    assert jobs.allocctl("verify", "--replay", str(run.directory / "receipt.json")).returncode == 0


@pytest.mark.slow
def test_the_run_ends_before_the_time_limit_of_the_job(jobs: Jobs) -> None:
    held = jobs.hold(4, "--time=10")
    limit = "EndTime=now+25"  # --time has whole minutes
    jobs.cluster.run(["scontrol", "update", f"JobId={held.jobid}", limit], check=True)
    endless = {"worker": role("0-1", SERVE, grace=1), "client": role(2, SERVE, grace=1)}
    run = jobs.outside(jobs.plan(endless, coordinator=2, deadlines={"collect": 5}), held.jobid)
    assert run.wait(limit=90) == 124
    assert sealed(run)["reason"] == "time_limit"
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"


# --- the engine that lives on ---------------------------------------------------------------------------------------


def adopt(jobs: Jobs, jobid: int, plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`allocctl adopt` to its end."""
    return jobs.allocctl("adopt", *options, "--dir", str(jobs.directory / "adopted"), str(jobid), str(plan))


def following(jobs: Jobs, jobid: int, plan: Path) -> tuple[subprocess.Popen[str], Run]:
    """`allocctl adopt` under way, with ranks that are up."""
    base = jobs.directory / "adopted"
    base.mkdir()
    process = subprocess.Popen(
        [ALLOCCTL, "adopt", "--dir", str(base), str(jobid), str(plan)],
        env=jobs.env,
        cwd=jobs.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Run(jobs, jobid, base)
    run.wait_file("up.0", "up.1", "up.2")
    return process, run


ENDLESS = {"worker": role("0-1", SERVE), "client": role(2, SERVE)}


def test_adopt_follows_an_engine_of_its_own(jobs: Jobs) -> None:
    held = jobs.hold()
    plan = jobs.plan(WORK, coordinator=2)
    done = adopt(jobs, held.jobid, plan)
    assert done.returncode == 0, done.stderr
    assert f"run {held.jobid}.s1 in" in done.stderr
    assert "[exit 0, origin native]" in done.stderr.splitlines()[-1]
    document = json.loads(adopt(jobs, held.jobid, plan, "--json").stdout)
    assert (document["kind"], document["run_id"], document["verdict"]["code"]) == ("sealed", f"{held.jobid}.s2", 0)


def test_a_run_in_the_foreground_is_the_engine(jobs: Jobs) -> None:
    held = jobs.hold()
    done = adopt(jobs, held.jobid, jobs.plan(WORK, coordinator=2), "--foreground", "-q")
    assert (done.returncode, done.stdout) == (0, f"{held.jobid}.s1\n")


def test_an_engine_lives_on_without_its_starter_and_is_stopped_by_its_run(jobs: Jobs) -> None:
    held = jobs.hold()
    done = adopt(jobs, held.jobid, jobs.plan(ENDLESS, coordinator=2), "--detach", "--json")
    started = json.loads(done.stdout)
    run = Run(jobs, held.jobid, Path(started["run_dir"]).parent)
    run.wait_file("up.0", "up.1", "up.2")
    assert (run.engine, started["unit"]) == (started["pid"], None)  # no user manager on the cluster's machine
    assert alive(started["run_dir"])
    assert os.getsid(run.engine) != os.getsid(0)
    assert stop(started["run_dir"])
    waited = jobs.allocctl("wait", f"{held.jobid}.s1")
    assert (waited.returncode, "[exit 143, origin allocd]" in waited.stderr) == (143, True)
    until(lambda: alive(started["run_dir"]) is False, "the end of the engine")
    assert not stop(started["run_dir"])
    assert sealed(run)["reason"] == "stop_requested"


def test_who_leaves_the_run_does_not_end_it(jobs: Jobs) -> None:
    held = jobs.hold()
    process, run = following(jobs, held.jobid, jobs.plan(ENDLESS, coordinator=2))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT)
    assert (process.returncode, f"`allocctl wait {held.jobid}.s1`" in said) == (79, True)
    assert alive(str(run.directory))
    stop(str(run.directory))
    assert jobs.allocctl("wait", f"{held.jobid}.s1").returncode == 143


def test_what_a_killed_engine_leaves_is_found_and_ended_and_the_job_goes_on(jobs: Jobs) -> None:
    """Agents end their ranks by themselves; rank 0 has none, and its srun lives on."""
    held = jobs.hold()
    deaf = role(0, sh(f"trap '' TERM; {UP}; while :; do sleep 1; done"), agent="off")
    roles = {"deaf": deaf, "worker": role(1, SERVE), "client": role(2, SERVE)}
    process, run = following(jobs, held.jobid, jobs.plan(roles, coordinator=2))
    os.kill(run.engine, signal.SIGKILL)
    _, said = process.communicate(timeout=2 * LIMIT)
    assert process.returncode == 75, said
    assert f"had left steps {held.jobid}." in said
    run.wait_gone()
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"
    assert sealed(run)["outcome"] == "unverifiable"


def test_a_start_that_is_refused_says_why(jobs: Jobs) -> None:
    plan = jobs.plan(WORK, coordinator=2)
    nobody = adopt(jobs, 999999, plan)
    assert (nobody.returncode, "Slurm does not know a job 999999" in nobody.stderr) == (78, True)
    held = jobs.hold(1)
    small = adopt(jobs, held.jobid, plan, "--json")
    assert (small.returncode, json.loads(small.stdout)["exit"]) == (78, 78)
    assert "the plan wants 4 nodes, but the allocation has 1" in small.stderr


def test_a_run_that_was_moved_away_is_stopped_by_its_claim(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", jobs.env.get("XDG_STATE_HOME", os.environ["XDG_STATE_HOME"]))
    held = jobs.hold()
    run_id = adopt(jobs, held.jobid, jobs.plan(ENDLESS, coordinator=2), "--direct", "--detach").stdout.strip()
    run_dir = jobs.directory / "adopted" / run_id
    until(lambda: len(list(run_dir.glob("up.*"))) == 3, "ranks that are up")
    (start,) = [path.parent for path in Path(registry()).parent.glob("starts/*/run") if path.readlink() == run_dir]
    moved = run_dir.rename(jobs.directory / "moved")
    assert alive(str(run_dir)) is None and alive(str(run_dir), str(start))
    assert stop(str(run_dir), str(start))
    until(lambda: not alive(str(run_dir), str(start)), "the engine's end")
    assert "StopRequested" in (moved / "journal.jsonl").read_text()
    assert not stop(str(run_dir), str(start))
