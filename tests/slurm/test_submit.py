"""`allocctl submit` on the real cluster: to the proven end, refused, in doubt, and what the job itself gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.submission import Submission, make_order
from supervisor.runs.plans import load_plan
from tests.slurm.jobs import ALLOCCTL, LIMIT, SERVE, Jobs, Run, await_files, role, sh, until


def base_of(jobs: Jobs) -> Path:
    return jobs.directory / "a base"


def submit(jobs: Jobs, plan: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`allocctl submit`, its runs in the test's own directory."""
    argv = [ALLOCCTL, "submit", "--dir", str(base_of(jobs)), str(plan), *words]
    return jobs.cluster.run(argv, env={**jobs.env, **(env or {})}, cwd=jobs.directory)


def submitted(jobs: Jobs, plan: Path, *words: str, env: dict[str, str] | None = None) -> Run:
    """The run of a submission that is expected to have a job."""
    done = submit(jobs, plan, *words, env=env)
    assert done.returncode == 0, done.stderr
    return Run(jobs, int(done.stdout), base_of(jobs))


def record(run: Run) -> Submission:
    """What is remembered of a job's submission."""
    path = run.jobs.directory / "state" / "allocd" / "jobs" / str(run.jobid) / "submission.json"
    return Submission.from_dict(json.loads(path.read_text()))


def output(run: Run) -> str:
    return Path(record(run).output.replace("%j", str(run.jobid))).read_text()


def two(jobs: Jobs, client: str, collect: int = 1, **tables: Any) -> Path:
    """A plan of a worker and a coordinator on two nodes. Its shutdown takes two graces of 5 s, and `collect`."""
    roles = {"worker": role(0, SERVE), "client": role(1, sh(client))}
    return jobs.plan(roles, coordinator=1, nodes=2, deadlines={"collect": collect}, **tables)


def controller(jobs: Jobs) -> int:
    """The pid of this cluster's slurmctld."""
    found = [pid for pid in jobs.cluster.processes_with(jobs.cluster.env["SLURM_CONF"]) if _name(pid) == "slurmctld"]
    return min(found)  # its helper for scripts is its child


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_from_the_submission_to_the_proven_end(jobs: Jobs) -> None:
    """A login shell with an active virtual environment, inside of what looks like another job."""
    client = f'{await_files("up", 0)}; env >"$ALLOCD_RUN_DIR/environment"'
    slurm = {"time": "00:10:00", "partition": "main", "options": ['--comment=a "b" #c \\ hetjob'], "requeue": False}
    venv = jobs.directory / "venv"
    (venv / "bin").mkdir(parents=True)
    env = {
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv}/bin:{jobs.env['PATH']}",
        "PYTHONHOME": "",
        "SLURM_JOB_ID": "1",
        "SLURM_ARRAY_JOB_ID": "1",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_WAIT": "1",
        "SBATCH_OUTPUT": "/dev/null",
        "SBATCH_QOS": "normal",
    }
    run = submitted(jobs, two(jobs, client, slurm=slurm), env=env)
    shown = run.job_end()
    assert (shown["JobState"], shown["ExitCode"], shown["Requeue"]) == ("COMPLETED", "0:0", "0")
    assert shown["Command"] == record(run).script and shown["StdOut"] == record(run).output.replace(
        "%j", str(run.jobid)
    )
    assert shown["Comment"] == 'a "b" #c \\ hetjob'
    environment = dict(line.partition("=")[::2] for line in (run.file("environment") or "").splitlines())
    assert "VIRTUAL_ENV" not in environment and str(venv) not in environment["PATH"]
    assert not [name for name in environment if name.startswith("SLURM_ARRAY")]
    assert run.directory.name == str(run.jobid)
    assert f"run {run.jobid} in {run.directory}" in output(run)
    assert "not the batch script's own process" not in (run.directory / "journal.jsonl").read_text()
    done = run.verify("--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.receipt("receipt.json")["verdict"]["outcome"] == "success"


def test_the_command_line_wins_and_the_signal_fits(jobs: Jobs) -> None:
    """The plan has ten minutes; the command line one, of which half is left for the end."""
    plan = two(jobs, "exec sleep 100", 60, slurm={"time": 10, "options": ["--comment=planned"]})
    run = submitted(jobs, plan, "--", "--time=1", "--comment=typed", "--begin=now+1hour")
    shown = jobs.cluster.job(run.jobid)
    assert (shown["TimeLimit"], shown["Comment"]) == ("00:01:00", "typed")
    assert "--signal=B:USR1@30" in Path(record(run).script).read_text()
    run = submitted(jobs, plan, "--", "-H", env={"SBATCH_TIMELIMIT": "7"})
    assert jobs.cluster.job(run.jobid)["TimeLimit"] == "00:07:00"
    assert "--signal=B:USR1@70" in Path(record(run).script).read_text()


def test_what_sbatch_refuses(jobs: Jobs) -> None:
    plan = two(jobs, ":", slurm={"partition": "nowhere"})
    done = submit(jobs, plan)
    assert (done.returncode, done.stdout) == (78, "")
    assert "sbatch refused: " in done.stderr and "nvalid partition" in done.stderr
    (path,) = base_of(jobs).glob("submit-*/submission.json")
    assert json.loads(path.read_text())["state"] == "refused"
    assert submit(jobs, plan, "--", "-p", "main", "-H").returncode == 0


def test_arrays_and_components_are_taken_by_sbatch(jobs: Jobs) -> None:
    array = submitted(jobs, two(jobs, ":", slurm={"array": "0-6:3%1"}), "--", "--hold")
    assert record(array).tasks == (0, 3, 6)
    listed = jobs.cluster.run(["squeue", "--noheader", f"--jobs={array.jobid}", "--format=%i"]).stdout
    assert listed.strip() == f"{array.jobid}_[0,3,6%1]"
    parts = [{"nodes": 1, "partition": "main"}, {"nodes": 2, "partition": "low", "options": ["--nice=7"]}]
    roles = {"all": role("0-2", sh(":"))}
    plan = jobs.plan(roles, coordinator=0, nodes=3, job={"name": "a hetjob", "nodes": 3}, slurm={"components": parts})
    het = submitted(jobs, plan, "--", "--hold")
    assert record(het).components == 2
    text = jobs.cluster.run(["scontrol", "--oneliner", "show", "job", str(het.jobid)], check=True).stdout
    found = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines()]
    asked = [(part["NumNodes"][0], part["Partition"], part["Nice"]) for part in found]
    assert asked == [("1", "main", "0"), ("2", "low", "7")]
    assert "JobName=a hetjob " in text


@pytest.mark.parametrize("broken", ["interpreter", "version"])
def test_a_node_that_cannot_run_allocctl_says_so(jobs: Jobs, broken: str) -> None:
    """The file changes between the submission and the start: the login node's check cannot know."""
    program = jobs.directory / "allocctl"
    program.write_text(Path(ALLOCCTL).read_text())
    program.chmod(0o755)
    run = submitted(jobs, two(jobs, ":"), "--allocctl", str(program), "--", "--hold")
    program.write_text("#!/nowhere/python3\n" if broken == "interpreter" else "#!/bin/sh\necho allocctl 0.0.1\n")
    jobs.cluster.run(["scontrol", "release", str(run.jobid)], check=True)
    shown = run.job_end()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "78:0")
    interpreter, version = "needs the interpreter /nowhere/python3", "is 'allocctl 0.0.1', but the plan"
    assert (interpreter if broken == "interpreter" else version) in output(run)


@dataclass
class Asleep:
    """A submission whose request waits, unread, at a controller that is stopped."""

    pid: int
    process: subprocess.Popen[str]
    sbatch: int

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def asleep(jobs: Jobs, plan: Path) -> Iterator[Asleep]:
    """Submit to a controller that is stopped until `wake`."""
    pid = controller(jobs)
    argv = [ALLOCCTL, "submit", "--dir", str(base_of(jobs)), str(plan)]
    os.kill(pid, signal.SIGSTOP)
    with subprocess.Popen(
        argv, env=jobs.env, cwd=jobs.directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            (sbatch,) = until(lambda: sbatch_of(process.pid), "sbatch")
            until(lambda: has_sent(sbatch), "the request of sbatch")
            yield Asleep(pid, process, sbatch)
        finally:
            os.kill(pid, signal.SIGCONT)


def sbatch_of(parent: int) -> list[int]:
    """The parent's children that are sbatch."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in map(int, children) if _name(pid) == "sbatch"]


def has_sent(pid: int) -> bool:
    """Whether the other end of one of the process's connections holds bytes that nobody has read."""
    sockets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            sockets.add(os.readlink(path)[8:-1])  # socket:[NUMBER]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {row[1] for row in rows if row[9] in sockets}
    return any(row[2] in ours and row[4].partition(":")[2] != "00000000" for row in rows)


def queue(jobs: Jobs) -> list[str]:
    return jobs.cluster.run(["squeue", "--noheader", "--format=%i|%o"], check=True).stdout.splitlines()


def test_a_controller_that_sleeps_while_it_is_asked(jobs: Jobs) -> None:
    """sbatch is given up, the controller goes on later and makes the job: it is found, and there is one."""
    with asleep(jobs, two(jobs, ":", slurm={"options": ["--hold"]})) as submission:
        submission.process.send_signal(signal.SIGINT)  # nobody waits longer than some seconds for sbatch then
        until(lambda: not sbatch_of(submission.process.pid), "the end of sbatch")
        (path,) = base_of(jobs).glob("submit-*/submission.json")
        assert json.loads(path.read_text())["state"] == "asked"
        submission.wake()
        out, err = submission.process.communicate(timeout=LIMIT)
    assert submission.process.returncode == 79, err
    assert "sbatch was interrupted; found by its script: job" in err
    assert queue(jobs) == [f"{out.strip()}|{path.with_name('job.sh')}"]


def test_what_a_killed_submission_left_is_settled_by_the_next_one(jobs: Jobs) -> None:
    """sbatch and whoever ran it are killed; the controller makes the job; the same command finds it."""
    plan = two(jobs, ":", slurm={"options": ["--hold"]})
    with asleep(jobs, plan) as submission:
        os.kill(submission.process.pid, signal.SIGKILL)
        os.kill(submission.sbatch, signal.SIGKILL)
        submission.process.wait(LIMIT)
        submission.wake()
    until(lambda: queue(jobs), "the job")
    run = submitted(jobs, plan)
    assert queue(jobs) == [f"{run.jobid}|{record(run).script}"]
    assert "whoever submitted it is gone; found by its script" in record(run).words


def test_the_template_and_the_script_say_the_same(tmp_path: Path) -> None:
    """deploy/allocd.sbatch is for people who write their own: what both set must be the same."""
    template = (Path(__file__).parents[2] / "deploy" / "allocd.sbatch").read_text()
    plan = load_plan(Path(__file__).parents[2] / "config" / "plans" / "demo.toml")
    made = make_order(
        plan, base=str(tmp_path), token="t", allocctl=sys.executable, version="1", options=(), environ={}, cluster=None,
        user="ann", uid=1,
    )  # fmt: skip

    def options(text: str) -> dict[str, str]:
        lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
        return dict(line.partition("=")[::2] for line in lines)

    theirs, ours = options(template), options(made.script)
    assert theirs["--signal"].partition("@")[0] == ours["--signal"].partition("@")[0] == "B:USR1"
    same = ("--no-requeue", "--open-mode", "--ntasks-per-node")
    assert {name: theirs[name] for name in same} == {name: ours[name] for name in same}
    assert 'exec "$allocctl" run ' in template and 'exec "$allocctl" run ' in made.script
