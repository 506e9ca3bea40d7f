"""allocctl's verbs and a real daemon, each a process of its own, before a Slurm of small programs."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from supervisor.core import codes
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
