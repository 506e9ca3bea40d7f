"""allocctl's verbs and a real daemon, each a process of its own, before a Slurm of small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from supervisor.core import codes
from supervisor.service.life import utc_now
from tests.fake_slurm import FakeSlurm
from tests.said import Said
from tests.service.running import ALLOCCTL, Running, plan, until
from tests.unit.test_follow import make_run


class Node:
    """A login node, with allocd or without, and a Slurm of small programs."""

    def __init__(self, top: Path, slurm: FakeSlurm, daemon: Running | None = None) -> None:
        self.top, self.base = top, top / "runs"
        self.plan = top / "plan.toml"
        self.plan.write_text(plan())
        environ = daemon.env if daemon else {**os.environ, "PATH": slurm.path, "XDG_STATE_HOME": str(top / "registry")}
        own = {"ALLOCD_SOCKET": daemon.path if daemon else "/dev/null", "ALLOCCTL": ALLOCCTL}
        self.env = {**environ, **own, "ALLOCD_RUNS": str(self.base)}

    def say(self, *words: str | Path) -> Said:
        argv = [sys.executable, "-m", "supervisor.cli.main", *map(str, words)]
        done = subprocess.run(argv, env=self.env, cwd=self.top, capture_output=True, text=True, timeout=60)
        return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path / "slurm")
    yield slurm
    slurm.close()


@pytest.mark.slow
def test_a_plan_is_submitted_by_the_daemon_and_waited_for(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.become([(0, "PENDING"), (0.2, "RUNNING"), (0.5, "FAILED", "7:0")])
    with Running(tmp_path, slurm, "--patience=0") as daemon:
        node = Node(tmp_path, slurm, daemon)
        done = node.say("submit", node.plan, "--", "-p", "debug")
        assert done.code == 0, done.err
        (held,) = node.say("list", "--all", "--json").document["allocations"]
        assert done.out.strip() == held["jobid"] and f"{held['key']} (job {held['jobid']}) submitted" in done.err
        for words in (["-q"], ["--json"], []):
            waited = node.say("wait", held["key"], *words)
            assert waited.code == 7, waited.err
            assert "[exit 7, origin slurm]" in waited.err.splitlines()[-1]
        assert "failure, exit code 7 (slurm)" in node.say("status", held["key"]).out
        assert "has ended already" in node.say("stop", held["jobid"]).err
        direct = node.say("submit", "--direct", "-q", node.plan)
        assert direct.code == 0 and node.say("list", "-aq").out.split() == [held["jobid"]]


def test_the_daemon_that_answers_is_stopped_wherever_its_state_is(tmp_path: Path, slurm: FakeSlurm) -> None:
    with Running(tmp_path, slurm) as daemon:
        node = Node(tmp_path, slurm, daemon)
        node.env = {**node.env, "STATE_DIRECTORY": "", "XDG_STATE_HOME": str(tmp_path / "other")}
        who = f"process {daemon.process.pid}"
        shown = node.say("service", "status")
        assert shown.code == 0 and f"a daemon without a unit: {who}\n" in shown.out and "no allocations\n" in shown.out
        assert who in node.say("service", "reload").out
        daemon.process.send_signal(signal.SIGSTOP)
        suspended = node.say("service", "stop", "--with-runs")
        daemon.process.send_signal(signal.SIGCONT)
        assert suspended.code == codes.UNREACHABLE and f"`kill -CONT {daemon.process.pid}`" in suspended.err
        assert f"the daemon, {who}, was stopped" in node.say("service", "stop").out
        assert daemon.process.wait(5) == 0
        assert "no daemon runs here" in node.say("service", "stop").out


ENGINE = """
import os, pathlib, signal, sys
from tests.service.engines import Engine, PLAN, Slurm7
place, base = sys.argv[1:]
os.makedirs(place)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
engine = Engine(place, pathlib.Path(base), "x", PLAN, Slurm7(), 6).open()
print("open", flush=True)
signal.sigwait({signal.SIGTERM})
engine.stop()
"""


@pytest.mark.parametrize("answers", [True, False])
def test_a_stop_with_runs_ends_those_that_no_daemon_holds_too(tmp_path: Path, slurm: FakeSlurm, answers: bool) -> None:
    with Running(tmp_path, slurm) if answers else nullcontext() as daemon:
        node = Node(tmp_path, slurm, daemon)
        place = Path(node.env["XDG_STATE_HOME"]) / "allocd" / "starts" / "7-adopted-directly"
        argv = [sys.executable, "-c", ENGINE, str(place), str(node.base)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as engine:
            try:
                assert engine.stdout is not None and engine.stdout.readline() == "open\n"
                said = node.say("service", "stop", "--with-runs", "--limit", "20", "--json")
                assert (said.code, engine.wait(5)) == (0, 0), said
            finally:
                engine.kill()
        assert (said.document["stopped"], said.document["ended"]) == (answers, ["7.s6"])
        assert "7.s6: asked to end" in said.document["told"]


@pytest.mark.slow
def test_what_waits_in_the_queue_has_a_key(tmp_path: Path, slurm: FakeSlurm) -> None:
    with Running(tmp_path, slurm, "--limit=1", "--patience=0") as daemon:
        node = Node(tmp_path, slurm, daemon)
        first = node.say("submit", "-q", node.plan).out.strip()
        second = node.say("submit", node.plan)
        key = second.out.strip()
        assert second.code == 0 and key.startswith("a") and "number 1 in the queue" in second.err
        left = node.say("wait", key, "--timeout", "0.2")
        assert left.code == codes.INTERRUPTED and f"`allocctl wait {key}` picks it up" in left.err
        until(lambda: daemon.health()["last_event"] == daemon.last_event(), "the number of the last line in the books")
        assert node.say("stop", key).code == 0
        withdrawn = node.say("wait", key, "--json")
        assert withdrawn.code == codes.CANCELLED and withdrawn.document["allocation"]["key"] == key
        assert node.say("stop", "--cancel", first).code == 0
        assert node.say("wait", "-q", first).code == codes.CANCELLED


@pytest.mark.slow
def test_a_job_is_stopped_and_cancelled_without_a_daemon(tmp_path: Path, slurm: FakeSlurm) -> None:
    node = Node(tmp_path, slurm)
    jobid = node.say("submit", "-q", node.plan).out.strip()
    early = node.say("stop", jobid)
    assert early.code == codes.UNREACHABLE and f"`allocctl stop --cancel {jobid}`" in early.err
    slurm.put("4711", [(0, "RUNNING")])
    foreign = node.say("stop", "--cancel", "4711")
    assert foreign.code == codes.CONFIG and "job 4711 was not submitted by allocctl here" in foreign.err
    run = make_run(node.base, jobid)
    journal = run / "journal.jsonl"
    journal.write_text(journal.read_text().replace("/run", str(run)))
    told = node.say("stop", str(run))
    assert told.code == 0 and f"the batch script of job {jobid} was sent SIGTERM" in told.err
    assert node.say("stop", "--cancel", jobid).code == 0
    assert slurm.state()["cancelled"] == [["--batch", "--signal=TERM", jobid], [jobid]]
    slurm.set(jobs={})
    assert "it is over" in node.say("stop", "--cancel", jobid).err


def begin(node: Node, run_id: str, *lines: str) -> None:
    """A run of the job has begun, and its rank 1 has printed these lines."""
    run = make_run(node.base, run_id)
    journal = run / "journal.jsonl"
    journal.write_text(journal.read_text().replace("1970-01-01T00:16:41Z", utc_now()).replace("/run", str(run)))
    (run / "logs" / "rank-1.client.out").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.slow
def test_a_task_of_an_array_that_the_daemon_holds_is_meant_by_its_name(tmp_path: Path, slurm: FakeSlurm) -> None:
    with Running(tmp_path, slurm, "--patience=0") as daemon:
        node = Node(tmp_path, slurm, daemon)
        node.plan.write_text(plan().replace("[slurm]", '[slurm]\narray = "0-3"'))
        array = node.say("submit", "-q", node.plan).out.strip()
        for task in (0, 3):
            begin(node, f"{array}_{task}", f"of task {task}")
        until(lambda: daemon.show(array)["run_id"] == f"{array}_3", "the last run is seen")
        until(lambda: daemon.show(f"{array}_0")["run_id"] == f"{array}_0", "the first one, too")

        slurm.end(f"{array}_1", "FAILED", "3:0")
        assert node.say("wait", "-q", "--patience=0", f"{array}_1").code == 3, "of the task, while others go on"
        until(lambda: daemon.show(f"{array}_1")["state"] == "ending", "the daemon sees that too")
        assert "has ended already: ending, FAILED" in node.say("stop", f"{array}_1").err
        for neither in (f"{array}_[0-1]", f"{array}.0"):
            refused = node.say("stop", "--cancel", neither)
            assert (refused.code, refused.err.count("name")) == (codes.CONFIG, 1), refused.err
        assert slurm.state()["cancelled"] == []
        assert f"task {array}_0 of a" in node.say("stop", f"{array}_0").err
        assert node.say("stop", "--cancel", f"{array}_2").code == 0
        assert node.say("wait", "-q", "--patience=0", f"{array}_2").code == codes.CANCELLED
        calls = [["--batch", "--signal=TERM", f"{array}_0"], [f"{array}_2"]]
        assert slurm.state()["cancelled"] == calls
        told = node.say("status", f"{array}_2")
        assert f"  {array}_2: failure, exit code 130" in told.out and f"{array}_1" not in told.out

        slurm.end(f"{array}_0", "FAILED", "5:0")
        followed = node.say("logs", "-f", f"{array}_0")
        assert (followed.code, followed.out) == (0, "rank-1.client.out: of task 0\n"), followed.err
        assert daemon.show(array)["state"] == "running", "task 3 goes on"
        assert node.say("stop", array).code == 0
        until(lambda: slurm.state()["cancelled"][2:], "the task that is left is told")
        assert slurm.state()["cancelled"] == [*calls, ["--batch", "--signal=TERM", f"{array}_3"]]
        slurm.end(f"{array}_3", "COMPLETED")
        assert "failure" in node.say("wait", "-q", "--patience=0", array).err


@pytest.mark.slow
def test_a_task_of_an_array_is_stopped_and_cancelled_without_a_daemon(tmp_path: Path, slurm: FakeSlurm) -> None:
    node = Node(tmp_path, slurm)
    node.plan.write_text(plan().replace("[slurm]", '[slurm]\narray = "0-3"'))
    array = node.say("submit", "-q", node.plan).out.strip()
    assert f"job {array} has no run yet" in node.say("stop", array).err
    for task in (0, 1):
        begin(node, f"{array}_{task}")
    assert node.say("stop", f"{array}_1").code == 0
    stopped = node.say("stop", array)
    assert stopped.code == 0 and "2 tasks have no run yet, and are not stopped" in stopped.err
    for words in (["--cancel", f"{array}+1"], [f"{array}+1"], ["--cancel", f"{array}_1.2"]):
        assert node.say("stop", *words).code == codes.CONFIG
    assert node.say("stop", "--cancel", f"{array}_2").code == 0
    told = [["--batch", "--signal=TERM", f"{array}_{task}"] for task in (1, 0, 1)]
    assert slurm.state()["cancelled"] == [*told, [f"{array}_2"]]


@pytest.mark.slow
def test_a_terminal_gets_a_table(tmp_path: Path, slurm: FakeSlurm) -> None:
    with Running(tmp_path, slurm, "--patience=0") as daemon:
        node = Node(tmp_path, slurm, daemon)
        jobid = node.say("submit", "-q", node.plan).out.strip()
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        argv = [sys.executable, "-m", "supervisor.cli.main", "watch", jobid]
        verb = subprocess.Popen(argv, env={**node.env, "TERM": "xterm"}, stdout=theirs, cwd=tmp_path)
        os.close(theirs)
        seen = b""
        while b"pending" not in seen and b"running" not in seen:
            seen += os.read(ours, 4096)
        node.say("stop", "--cancel", jobid)
        with suppress(OSError):  # EIO: the other side is closed
            while piece := os.read(ours, 4096):
                seen += piece
        os.close(ours)
        assert verb.wait(30) == 0
        assert b"KEY" in seen and b"told to cancel" in seen and b"failure (130)" in seen
