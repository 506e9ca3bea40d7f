"""The daemon on the real cluster: it is killed while its jobs run, and each comes to its proven end all the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.host import Host
from tests.slurm.jobs import ALLOCCTL, SERVE, UP, Jobs, Run, await_files, role, sh, until

SLEEPER = sh(f"{UP}; exec sleep 1000")


@pytest.fixture
def host(jobs: Jobs) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="allocd-") as run:  # a socket's path is short
        environ = {**jobs.env, "XDG_RUNTIME_DIR": run, "XDG_CONFIG_HOME": str(jobs.directory / "config")}
        host = Host(jobs.directory, environ, Path(run) / "allocd" / "ctl.sock")
        yield host
        if host.process is not None:
            host.end(signal.SIGKILL)


def plan(jobs: Jobs, client: str) -> str:
    roles = {"worker": role(0, SERVE), "client": role(1, sh(f"{await_files('up', 0)}; {client}"))}
    return jobs.plan(roles, coordinator=1, nodes=2, slurm={"time": "00:10:00"}).read_text()


def test_jobs_live_through_the_death_of_the_daemon(jobs: Jobs, host: Host) -> None:
    host.start()
    good = host.submit("good", plan(jobs, 'until [ -e "$ALLOCD_RUN_DIR/go" ]; do sleep 0.1; done'), ALLOCCTL)
    bad = host.submit("bad", plan(jobs, 'until [ -e "$ALLOCD_RUN_DIR/go" ]; do sleep 0.1; done; exit 7'), ALLOCCTL)
    for key in (good, bad):
        host.until(key, "running")
    host.end(signal.SIGKILL)
    for directory in jobs.directory.glob("base/[0-9]*"):
        (directory / "go").touch()
    host.start()
    ends = {key: host.until(key, "ended") for key in (good, bad)}
    assert [ends[key]["verdict"]["code"] for key in (good, bad)] == [0, 7]
    assert ends[bad]["first_failure"] == "rank 1 (client) on node2 ended with code 7, the coordinator"
    for end in ends.values():
        assert json.loads(Path(end["receipt"]).read_text())["jobid"] == end["jobid"]
    assert host.end()[0] == 0


def test_what_was_submitted_is_cancelled(jobs: Jobs, host: Host) -> None:
    host.start()
    key = host.submit("long", plan(jobs, "sleep 1000"), ALLOCCTL)
    host.until(key, "running")
    host.ask("POST", f"/v1/allocations/{key}/stop", {"how": "cancel"})
    end = host.until(key, "ended")
    assert (end["verdict"]["code"], end["verdict"]["origin"]) == (130, "slurm")


def test_an_engine_is_asked_to_end_in_order(jobs: Jobs, host: Host) -> None:
    host.start()
    key = host.submit("long", plan(jobs, "sleep 1000"), ALLOCCTL)
    host.until(key, "running")
    host.ask("POST", f"/v1/allocations/{key}/stop", {"how": "stop"})
    assert host.until(key, "ended")["verdict"]["code"] == 143


def test_an_adopted_run_lives_through_the_death_of_the_daemon(jobs: Jobs, host: Host) -> None:
    held = jobs.hold(2)
    host.start()
    text = plan(jobs, 'until [ -e "$ALLOCD_RUN_DIR/go" ]; do sleep 0.1; done')
    key = host.accept("adoptions", {"plan": text, "jobid": str(held.jobid)}, "adopted")
    run = Path(host.until(key, "running")["run_dir"])
    host.end(signal.SIGKILL)
    (run / "go").touch()
    host.start()
    end = host.until(key, "ended")
    assert (end["kind"], end["verdict"]["code"], end["jobid"]) == ("adopted", 0, str(held.jobid))
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"


def test_what_a_lost_host_leaves_of_an_adopted_run_is_ended_when_the_daemon_is_back(jobs: Jobs, host: Host) -> None:
    """The daemon, the engine and its sruns are killed together. Agents that nobody tells of it go on."""
    held = jobs.hold(2)
    host.start()
    text = jobs.plan({"worker": role(0, SERVE), "client": role(1, SERVE)}, coordinator=1, nodes=2).read_text()
    key = host.accept("adoptions", {"plan": text, "jobid": str(held.jobid)}, "adopted")
    run = Run(jobs, held.jobid, jobs.directory / "base", _found=[Path(host.until(key, "running")["run_dir"])])
    run.wait_file("up.0", "up.1")
    sruns = [pid for pid in run.processes() if Path(f"/proc/{pid}/comm").read_text() == "srun\n"]
    assert len(sruns) >= 2
    host.end(signal.SIGKILL)
    for pid in (run.engine, *sruns):
        os.kill(pid, signal.SIGKILL)
    host.start()
    end = host.until(key, "ended")
    assert (end["verdict"]["outcome"], end["verdict"]["code"]) == ("unverifiable", 75)
    assert "the engine was lost" in end["verdict"]["summary"]
    run.wait_gone()
    steps = jobs.cluster.run(["squeue", "--steps", f"--jobs={held.jobid}", "--noheader", "--format=%j"], check=True)
    assert steps.stdout.split() == ["batch"]
    assert jobs.cluster.job(held.jobid)["JobState"] == "RUNNING"


def test_tasks_of_an_array_are_ended_by_themselves_and_then_all_in_order(jobs: Jobs, host: Host) -> None:
    host.start()
    roles = {"client": role(0, SERVE)}
    text = jobs.plan(roles, coordinator=0, nodes=1, slurm={"time": "00:10:00", "array": "0-3"}).read_text()
    key = host.submit("array", text, ALLOCCTL)
    array = str(until(lambda: host.get(key)["jobid"], "there is a job"))
    tasks = [f"{array}_{task}" for task in range(4)]
    runs = [jobs.directory / "base" / task for task in tasks]
    for run in runs:
        until((run / "up.0").exists, f"the rank of {run} is up")
    until(lambda: len(host.get(key)["run_dirs"]) == 4, "all runs are seen")

    def code(run: Path) -> int:
        return int(json.loads((run / "receipt.run.json").read_text())["verdict"]["code"])

    host.ask("POST", f"/v1/allocations/{tasks[1]}/stop", {"how": "stop"})
    host.ask("POST", f"/v1/allocations/{tasks[2]}/stop", {"how": "cancel"})
    words = [ALLOCCTL, "wait", "-q", "--socket", str(host.socket)]
    ends = [
        subprocess.run([*words, task], env=host.environ, cwd=host.top, check=False).returncode for task in tasks[1:3]
    ]
    assert ends == [143, 130], "each its own, while the others go on"
    assert [(run / "ended.0").exists() for run in runs] == [False, True, True, False]
    assert [host.get(task)["state"] for task in tasks] == ["running", "ending", "ending", "running"]
    assert (host.get(key)["stopping"], host.get(key)["state"]) == (None, "running")

    host.ask("POST", f"/v1/allocations/{key}/stop", {"how": "stop"})
    assert host.until(key, "ended")["verdict"]["code"] == 143
    assert [code(runs[task]) for task in (0, 1, 3)] == [143, 143, 143]
    receipts = [json.loads((run / "receipt.json").read_text()) for run in runs]
    assert [receipt["verdict"]["code"] for receipt in receipts] == [143, 143, 130, 143]
    assert [receipt["jobid"] for receipt in receipts] == tasks
