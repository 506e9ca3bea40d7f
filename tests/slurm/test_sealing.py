"""Sealing on a real cluster: one receipt whoever comes first, and no success that Slurm does not share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.slurm.jobs import ALLOCCTL, SERVE, SLEEP, UP, Event, Jobs, Run, await_files, role, sh, until

GO = sh(f"{UP}; {await_files('go', 1)}")


def verify(jobs: Jobs, *arguments: str) -> tuple[int, Event]:
    """`allocctl verify --json`: its exit code and its document."""
    done = jobs.allocctl("verify", "--json", *arguments, timeout=90)
    assert "Traceback" not in done.stderr
    document: Event = json.loads(done.stdout)
    assert done.returncode == document["verdict"]["code"], done.stderr
    return done.returncode, document


def two_ranks(jobs: Jobs, client: list[str], **tables: Any) -> Path:
    return jobs.plan({"worker": role(0, SERVE), "client": role(1, client)}, coordinator=1, nodes=2, **tables)


def go(run: Run) -> None:
    run.wait_file("up.1")
    (run.directory / "go.1").touch()


def test_two_who_verify_at_the_same_time_seal_one_receipt(jobs: Jobs) -> None:
    run = jobs.submit(two_ranks(jobs, GO), nodes=2)
    run.wait_file("up.1")
    argv = [ALLOCCTL, "verify", "--json", "--wait", str(run.jobid)]
    pipe = subprocess.PIPE
    waiting = [
        subprocess.Popen(argv, env=jobs.env, cwd=jobs.directory, stdout=pipe, stderr=pipe, text=True) for _ in range(4)
    ]
    go(run)
    said = [process.communicate(timeout=60) for process in waiting]
    assert [process.returncode for process in waiting] == [0] * 4, said
    assert {err for _, err in said} == {""}
    receipt = run.receipt("receipt.json")
    assert [json.loads(out) for out, _ in said] == [receipt] * 4
    assert sorted(path.name for path in run.directory.glob("*receipt*")) == ["receipt.json", "receipt.run.json"]
    # Steps that accounting has by now are those that the agents named.
    assert receipt["verdict"]["outcome"] == "success"
    assert not [text for text in receipt["disagreements"] if "no row" not in text and "not finished" not in text]


def test_a_run_whose_engine_was_killed_is_never_a_success(jobs: Jobs) -> None:
    """The engine is the batch script itself, so the job fails with it; its journal is all that is left."""
    run = jobs.submit(two_ranks(jobs, GO), nodes=2)
    run.wait_events("RankStarted", 2)
    os.kill(run.engine, signal.SIGKILL)
    run.job_end("FAILED")
    run.wait_gone()
    code, document = verify(jobs, str(run.jobid))
    assert (code, document["verdict"]["outcome"], document["verdict"]["origin"]) == (137, "failure", "slurm")
    assert (document["run"]["engine_lost"], document["run_sha256"]) == (True, None)
    assert "the engine was lost: it left no run receipt, and its journal ends at " in document["verdict"]["summary"]
    for verb in ("status", "explain"):
        assert "running when the engine was lost" in jobs.allocctl(verb, str(run.jobid)).stdout
    assert run.receipt("receipt.json") == document
    assert not (run.directory / "receipt.run.json").exists()
    # The same where the script hides it: Slurm calls the job COMPLETED, and nothing proves a success.
    hidden = jobs.submit(two_ranks(jobs, GO), nodes=2, after="exit 0")
    hidden.wait_file("up.1")
    os.kill(hidden.engine, signal.SIGKILL)
    hidden.job_end("COMPLETED")
    code, document = verify(jobs, str(hidden.jobid))
    assert (code, document["verdict"]["outcome"]) == (75, "unverifiable")
    assert "the engine was lost: it left no run receipt, and its journal ends at " in document["verdict"]["summary"]
    assert document["slurm"]["state"] == "COMPLETED"


def test_a_rank_that_copies_an_old_run_over_its_own_proves_nothing_by_it(jobs: Jobs) -> None:
    """Receipts, journal and all. The engine writes its own receipt at the end; the copied seal is set aside."""
    old = jobs.submit(two_ranks(jobs, GO), nodes=2)
    go(old)
    old.job_end("COMPLETED")
    assert verify(jobs, str(old.jobid))[0] == 0
    copying = f"cp -r {old.directory}/journal.jsonl {old.directory}/*.json $ALLOCD_RUN_DIR/"
    run = jobs.submit(two_ranks(jobs, sh(f"{UP}; {await_files('go', 1)}; {copying}; exit 7")), nodes=2)
    go(run)
    run.job_end("FAILED")
    done = jobs.allocctl("wait", "--json", str(run.jobid), timeout=90)
    document = json.loads(done.stdout)
    assert (done.returncode, document["run_id"], document["verdict"]["origin"]) == (7, str(run.jobid), "native")
    assert document == verify(jobs, str(run.jobid))[1] == run.receipt("receipt.json")
    assert run.receipt("receipt.json.not-ours") == old.receipt("receipt.json")
    assert "is of run" in " ".join(document["disagreements"])
    for verb in ("status", "explain", "receipt"):
        said = jobs.allocctl(verb, str(run.jobid))
        assert (said.returncode, "succe" in said.stdout.splitlines()[1]) == (0, False), said.stdout


def test_a_success_of_the_engine_is_none_when_slurm_says_cancelled(jobs: Jobs) -> None:
    run = jobs.submit(two_ranks(jobs, GO), nodes=2, after="sleep 1000")
    go(run)
    run.wait_file("receipt.run.json")
    assert run.receipt()["verdict"]["outcome"] == "success"
    jobs.cluster.run(["scancel", str(run.jobid)], check=True)
    run.job_end("CANCELLED")
    code, document = verify(jobs, str(run.jobid))
    verdict = document["verdict"]
    assert (code, verdict["outcome"], verdict["origin"], verdict["reason"]) == (
        130,
        "failure",
        "slurm",
        "slurm_cancelled",
    )
    assert "the run itself says success (0), which Slurm's record denies" in verdict["because"]
    assert document["run"]["verdict"]["outcome"] == "success"
    assert run.receipt("receipt.json") == document
    outcome = run.outcome()
    assert outcome is not None and "CANCELLED" in outcome


def test_ranks_that_slurm_killed_did_not_fail_by_themselves(jobs: Jobs) -> None:
    """A job that is cancelled with KILL: Slurm ends ranks, agents and engine as it pleases; its state says why."""
    worker = sh(f"{UP}; {SLEEP}")
    run = jobs.submit(jobs.plan({"worker": role("0-1", worker)}, coordinator=1, nodes=2), nodes=2)
    run.wait_file("up.0", "up.1")
    jobs.cluster.run(["scancel", "--signal=KILL", str(run.jobid)], check=True)
    run.job_end("CANCELLED")
    run.wait_gone()
    code, document = verify(jobs, str(run.jobid))
    assert (code, document["verdict"]["origin"], document["verdict"]["reason"]) == (130, "slurm", "slurm_cancelled")
    assert all(failure["provisional"] or failure["what"] == "stop" for failure in document["run"]["failures"])
    assert run.receipt("receipt.json") == document


def test_without_agents_the_steps_are_counted(jobs: Jobs) -> None:
    """Their ids are not known: a success needs as many steps that succeeded as were seen to succeed."""
    roles = {
        "client": role(0, sh(f"{UP}; {await_files('up', 1)}"), agent="off"),
        "worker": role(1, SERVE, agent="off"),
    }
    plan = jobs.plan(roles, coordinator=0, nodes=2)
    run = jobs.submit(plan, nodes=2)
    run.job_end()
    until(lambda: len(run.steps()) == 2, "two steps in accounting")
    run.ended_steps(2)
    code, document = verify(jobs, str(run.jobid))
    assert [rank["step"] for rank in document["run"]["ranks"]] == [None, None]
    assert (code, document["verdict"]["outcome"]) == (0, "success"), document["verdict"]
    assert document["steps_compared"] == {"by_id": 0, "by_count": 2}
    assert not [text for text in document["disagreements"] if "without an agent" in text]
