"""`allocctl verify` on a real cluster: only Slurm's record of the allocation proves how a job ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import ALLOCCTL, SERVE, SLEEP, UP, Event, Jobs, Run, await_files, role, sh

NO_SLURM = {"PATH": os.path.dirname(sys.executable)}


def verify(jobs: Jobs, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, Event]:
    """`allocctl verify --json`: its exit code and its document."""
    done = jobs.cluster.run(
        [ALLOCCTL, "verify", "--json", *arguments], env={**jobs.env, **(env or {})}, cwd=jobs.directory
    )
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    document: Event = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert done.returncode == document["verdict"]["code"], done.stderr
    return done.returncode, document


def outcome(directory: Path, jobid: int) -> str:
    return (directory / f"slurm_job_{jobid}_outcome.txt").read_text()


def two_ranks(jobs: Jobs, client: str = "") -> Path:
    script = sh(f"{UP}; {await_files('up', 0)}; {client}")
    return jobs.plan({"worker": role(0, SERVE), "client": role(1, script)}, coordinator=1, nodes=2)


# --- jobs that allocd did not run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "options", "code", "words"),
    [
        ("exit 0", (), 0, "COMPLETED 0:0"),
        ("srun sh -c 'exit 3'; exit 5", (), 5, "FAILED 5:0"),
        ("srun sh -c 'exit 3'; exit 0", (), 0, "COMPLETED 0:0"),
        ("exit 137", (), 137, "FAILED 137:0"),
        ("exit 6", ("--job-name=x|COMPLETED|0:0 JobState=COMPLETED ExitCode=0:0", "--comment=ExitCode=0:0"), 6, "6:0"),
    ],
    ids=["success", "a step's code decides nothing", "nor does it deny success", "137", "a name that lies"],
)
def test_a_job_is_judged_by_its_own_record(
    jobs: Jobs, script: str, options: tuple[str, ...], code: int, words: str
) -> None:
    jobid = jobs.cluster.sbatch(script, *options)
    found, document = verify(jobs, str(jobid), "--wait")
    assert found == code
    verdict = document["verdict"]
    assert (verdict["origin"], verdict["final"]) == ("slurm", True)
    assert words in verdict["summary"]
    assert (document["run"], document["run_id"]) == (None, None)
    if "exit 3" in script:
        assert "a step ended 3:0 (DerivedExitCode)" in " ".join(document["slurm"]["notes"])
    assert outcome(jobs.directory, jobid) == document["slurm"]["raw"] + "\n"
    raw = outcome(jobs.directory, jobid)
    assert raw.startswith((f"{jobid}|", f"JobId={jobid} "))


def test_a_job_that_lives_is_not_judged_but_can_be_waited_for(jobs: Jobs) -> None:
    go = jobs.directory / "go"
    jobid = jobs.cluster.sbatch(f"until [ -e {go} ]; do sleep 0.05; done; exit 4")
    jobs.cluster.wait_state(jobid, "RUNNING")
    code, document = verify(jobs, str(jobid))
    assert (code, document["verdict"]["outcome"]) == (75, "unverifiable")
    assert "still in state RUNNING" in document["verdict"]["summary"]
    assert list(jobs.directory.glob("*outcome*")) == []
    code, document = verify(jobs, str(jobid), "--wait", "--timeout", "0.5")
    assert (code, document["slurm"]["standing"]) == (75, "running")
    argv = [ALLOCCTL, "verify", str(jobid), "--wait"]
    with subprocess.Popen(argv, env=jobs.env, cwd=jobs.directory, stdout=subprocess.PIPE, text=True) as waiting:
        go.touch()
        said, _ = waiting.communicate(timeout=30)
    assert waiting.returncode == 4, said
    assert said.startswith(f"{jobid}: failure 4 (slurm): ")
    assert outcome(jobs.directory, jobid).split("|")[:3] == [str(jobid), "FAILED", "4:0"]


def test_a_job_that_nobody_knows_proves_nothing(jobs: Jobs) -> None:
    code, document = verify(jobs, "999999", "--patience", "1")
    assert (code, document["slurm"]["standing"]) == (75, "absent")
    assert list(jobs.directory.glob("*outcome*")) == []


# --- runs of ours --------------------------------------------------------------------------------------------------


def test_a_receipt_is_sealed_once_and_answers_without_slurm(jobs: Jobs) -> None:
    run = jobs.submit(two_ranks(jobs, "exit 7"), nodes=2)
    workspace = jobs.directory / "workspace"
    workspace.mkdir()
    env = {"GITHUB_WORKSPACE": str(workspace)}
    code, document = verify(jobs, str(run.jobid), "--wait", env=env)
    assert (code, document["verdict"]["origin"], document["verdict"]["final"]) == (7, "native", True)
    assert run.receipt("receipt.json") == document
    assert document["run"] == run.receipt()
    assert document["run"]["verdict"]["final"] is False
    assert outcome(workspace, run.jobid) == outcome(run.directory, run.jobid) == document["slurm"]["raw"] + "\n"
    sealed = (run.directory / "receipt.json").read_bytes()
    for name in (str(run.jobid), run.directory.name, f"{run.directory}/"):
        assert verify(jobs, name, env={**env, **NO_SLURM}) == (7, document)
    assert (run.directory / "receipt.json").read_bytes() == sealed
    elsewhere = jobs.directory / "elsewhere"
    elsewhere.mkdir()
    assert verify(jobs, str(run.jobid), env={"GITHUB_WORKSPACE": str(elsewhere), **NO_SLURM})[0] == 7
    assert outcome(elsewhere, run.jobid) == document["slurm"]["raw"] + "\n"


@pytest.fixture(scope="module")
def sealed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Jobs, Run, Event]:
    """A run that ended with 7, verified."""
    jobs = Jobs(cluster, tmp_path_factory.mktemp("sealed"))
    run = jobs.submit(two_ranks(jobs, "exit 7"), nodes=2)
    return jobs, run, verify(jobs, str(run.jobid), "--wait")[1]


def replay(jobs: Jobs, document: Event) -> tuple[int, Event]:
    path = jobs.directory / "replayed.json"
    path.write_text(json.dumps(document))
    done = jobs.allocctl("verify", "--json", "--replay", str(path))
    assert "Traceback" not in done.stderr
    answer: Event = json.loads(done.stdout or "{}")
    return done.returncode, answer


def test_a_replay_agrees_with_what_was_sealed(sealed: tuple[Jobs, Run, Event]) -> None:
    jobs, run, document = sealed
    code, answer = replay(jobs, document)
    assert (code, answer["agrees"], answer["verdict"]["code"]) == (7, True, 7)
    assert replay(jobs, run.receipt()) == (7, {**answer, "verdict": run.receipt()["verdict"]})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["verdict"].update(code=0, outcome="success"),
        lambda d: d["run"].update(failures=[]),
        lambda d: d["run"].update(failures=[], completed=True, first_failure=None),
        lambda d: d["run"]["failures"][0].update(code=8),
        lambda d: d["run"]["ranks"][0].update(host="elsewhere"),
        lambda d: d["slurm"]["answers"].clear(),
        lambda d: [a.update(stdout=a["stdout"].replace("FAILED", "CANCELLED")) for a in d["slurm"]["answers"]],
        lambda d: d["slurm"].update(raw="1|COMPLETED|0:0"),
    ],
    ids=["verdict", "failures", "failures and end", "code", "a fact that judges nothing", "answers", "a state", "raw"],
)
def test_a_replay_notices_what_was_changed(sealed: tuple[Jobs, Run, Event], change: Callable[[Event], Any]) -> None:
    jobs, _, document = sealed
    changed = json.loads(json.dumps(document))
    change(changed)
    assert changed != document
    code, answer = replay(jobs, changed)
    assert (code, answer["agrees"]) == (75, False)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "sealed", "verdict": {}}', '{"kind": 7}'])
def test_a_replay_of_something_else_is_refused(sealed: tuple[Jobs, Run, Event], text: str) -> None:
    jobs = sealed[0]
    path = jobs.directory / "no-receipt.json"
    path.write_text(text)
    done = jobs.allocctl("verify", "--replay", str(path))
    assert done.returncode == 78, done.stderr
    assert str(path) in done.stderr and "Traceback" not in done.stderr


def test_a_job_that_its_user_cancels_is_cancelled_and_no_rank_failed(jobs: Jobs) -> None:
    """Slurm's TERM reaches ranks before the engine: what it makes of them is no failure of their own."""
    worker = sh(f"{UP}; {SLEEP}")  # dies of TERM
    run = jobs.submit(jobs.plan({"worker": role("0,1,3", worker), "client": role(2, worker)}, coordinator=2))
    run.wait_file(*(f"up.{rank}" for rank in range(4)))
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
    assert "CANCELLED" in verdict["summary"] and "rank" not in verdict["summary"]
    assert all(failure["provisional"] or failure["what"] == "stop" for failure in document["run"]["failures"])
    assert outcome(run.directory, run.jobid).startswith((f"{run.jobid}|CANCELLED", f"JobId={run.jobid} "))
    run.wait_gone()


# --- Slurm in trouble ----------------------------------------------------------------------------------------------


def test_without_accounting_the_controller_decides_and_without_both_nobody(jobs: Jobs) -> None:
    cluster = jobs.cluster
    allocation = [jobs.submit(two_ranks(jobs, await_files("go", 1)), nodes=2) for _ in range(2)]
    for run in allocation:
        run.wait_file("up.1")
    cluster.stop_slurmdbd()
    for run in allocation:
        (run.directory / "go.1").touch()
        run.job_end("COMPLETED")
    first, second = allocation
    code, document = verify(jobs, str(first.jobid))
    assert (code, document["verdict"]["outcome"]) == (0, "success")
    assert "accounting could not be asked; the controller's record decides" in document["slurm"]["notes"]
    assert {answer["outcome"] for answer in document["slurm"]["answers"] if answer["source"] == "sacct"} == {"failed"}
    assert document["slurm"]["source"] == "scontrol"
    assert outcome(first.directory, first.jobid).startswith(f"JobId={first.jobid} ")
    cluster.stop_slurmctld()
    code, document = verify(jobs, str(second.jobid), "--patience", "0.5")
    assert (code, document["verdict"]["outcome"], document["slurm"]["standing"]) == (75, "unverifiable", "unasked")
    assert "the run itself says: success (0)" in " ".join(document["verdict"]["because"])
    assert not (second.directory / "receipt.json").exists()
    assert outcome(second.directory, second.jobid) == f"{second.jobid}|UNVERIFIABLE|\n"
    assert verify(jobs, str(first.jobid))[0] == 0
    cluster.start_slurmdbd()
    cluster.start_slurmctld()
    code, document = verify(jobs, str(second.jobid))
    assert (code, document["verdict"]["outcome"]) == (0, "success")
    assert second.receipt("receipt.json") == document


def test_a_job_that_the_controller_forgot_while_accounting_was_away(jobs: Jobs) -> None:
    """MinJobAge (10 s here) passes while slurmdbd is down: nobody can say how it ended, until accounting is back."""
    cluster = jobs.cluster
    cluster.stop_slurmdbd()
    jobid = cluster.sbatch("exit 4")
    code, document = verify(jobs, str(jobid), "--wait")
    assert (code, document["slurm"]["source"], document["verdict"]["final"]) == (4, "scontrol", True)
    cluster.wait_for(lambda: not cluster.job(jobid), "the controller to forget the job", 40)
    code, document = verify(jobs, str(jobid), "--patience", "0.5")
    assert (code, document["slurm"]["standing"]) == (75, "unasked")
    assert "the controller does not know the job (any more)" in document["verdict"]["summary"]
    cluster.start_slurmdbd()
    cluster.wait_for(lambda: bool(cluster.sacct(jobid)), "slurmctld to send what it has kept", 60)
    code, document = verify(jobs, str(jobid))
    assert (code, document["slurm"]["source"]) == (4, "sacct")


def test_a_controller_that_is_started_anew_is_waited_for_and_that_is_said(jobs: Jobs) -> None:
    cluster, go = jobs.cluster, jobs.directory / "go"
    jobid = cluster.sbatch(f"until [ -e {go} ]; do sleep 0.05; done; exit 4")
    cluster.wait_state(jobid, "RUNNING")
    cluster.stop_slurmctld()
    argv, pipe = [ALLOCCTL, "verify", str(jobid), "--wait", "--patience", "60"], subprocess.PIPE
    with subprocess.Popen(argv, env=jobs.env, cwd=jobs.directory, stdout=pipe, stderr=pipe, text=True) as waiting:
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        go.touch()
        cluster.start_slurmctld()
        out, _ = waiting.communicate(timeout=60)
    assert "scontrol did not answer within 5 s: asking again, for up to 60 s" in said or "scontrol ended with 1" in said
    assert waiting.returncode == 4, out
    assert out.startswith(f"{jobid}: failure 4 (slurm): ")


# --- what is not fit to start --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "env", "says"),
    [
        (2, {"PATH": "{tools}"}, "no srun on PATH"),
        (2, {"SLURM_JOB_NODELIST": "node[1-"}, "SLURM_JOB_NODELIST cannot be read"),
        (2, {"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": ""}, "no SLURM_JOB_NODELIST"),
        (2, {"SLURM_JOB_NODELIST": "node1"}, "the plan wants 2 nodes, but the allocation has 1 (node1)"),
        (2, {"SLURM_JOB_ID": "abc"}, "SLURM_JOB_ID"),
        (2, {"SLURM_RESTART_COUNT": "../x"}, "SLURM_RESTART_COUNT"),
        (["node1", "node9"], {}, "the plan names node9, but the allocation has node"),
        (1, {}, "nodes"),
    ],
    ids=["srun", "node list", "no node list", "too few", "job id", "restarts", "other nodes", "more ranks than nodes"],
)
def test_what_is_not_fit_to_start_is_said_and_nothing_starts(
    jobs: Jobs, nodes: Any, env: dict[str, str], says: str
) -> None:
    """An allocation's variables are enough: nothing is asked of Slurm before all this is known."""
    plan = jobs.plan({"worker": role("0-1", SERVE)}, nodes=nodes, run={"finish": "artifacts"}, artifacts=[
        {"name": "result", "path": "r"}
    ])  # fmt: skip
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    env = {name: text.replace("{tools}", NO_SLURM["PATH"]) for name, text in env.items()}
    done = jobs.cluster.run(
        [ALLOCCTL, "run", "--dir", "runs", str(plan)], env={**jobs.env, **allocation, **env}, cwd=jobs.directory
    )
    assert done.returncode == 78, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert list(jobs.directory.glob("runs/*/journal.jsonl")) == []
