"""Faults of the engine and of what it stands on: it is killed, its disk is full, fails, or does not answer.

In all of them the ranks end, in order, and what is said afterwards is never better than what is known.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.local import CHILD, LIMIT, SERVE, UP, Local, Run, await_files, role, sh, until

pytestmark = pytest.mark.slow

STRACE = shutil.which("strace")
BINDFS = shutil.which("bindfs")


# --- the engine is killed ------------------------------------------------------------------------------------------


@pytest.fixture
def lost(local: Local) -> Run:
    """A run whose engine was killed in the middle."""
    plan = local.plan({"worker": role("0,1", SERVE), "client": role(2, SERVE)}, coordinator=2)
    run = local.start(plan)
    run.wait_file("up.0", "up.1", "up.2")
    for rank in range(3):
        run.first("RankStarted", rank=rank)
    run.signal(signal.SIGKILL)
    run.wait()
    return run


def test_no_rank_outlives_its_engine_by_two_seconds(lost: Run) -> None:
    lost.wait_gone(2.0)
    assert all(lost.file(f"ended.{rank}") == "" for rank in range(3))  # by their own handlers, not by KILL


def test_what_a_killed_engine_leaves_is_told_and_never_a_success(local: Local, lost: Run) -> None:
    lost.wait_gone()
    assert lost.is_whole()
    assert not (lost.directory / "receipt.run.json").exists()
    name = str(lost.directory)

    status = local.allocctl("status", name)
    assert status.returncode == 0
    assert "its engine is gone" in status.stdout
    assert status.stdout.count("running when the engine was lost") == 3
    document = json.loads(local.allocctl("status", "--json", name).stdout)
    assert (document["engine"], document["over"]) == ("lost", False)
    assert document["verdict"]["outcome"] == "unverifiable"

    explain = local.allocctl("explain", name)
    assert explain.returncode == 0
    assert "running when the engine was lost" in explain.stdout

    verify = local.allocctl("verify", name, "--json")
    assert verify.returncode == 75
    verdict = json.loads(verify.stdout)["verdict"]
    assert verdict["outcome"] == "unverifiable"
    assert "the engine was lost: it left no run receipt, and its journal ends at " in verdict["summary"]

    assert local.allocctl("receipt", name).returncode == 75
    assert local.allocctl("logs", name, "-f").returncode == 0  # it ends, for nothing more can come


def test_a_failure_that_was_seen_stays_one_when_the_engine_is_lost(local: Local) -> None:
    """Killed after the first failure, while a worker uses its grace."""
    lingering = sh(f"trap ':' TERM; {UP}; while :; do sleep 0.05; done")
    plan = local.plan(
        {"worker": role(0, lingering, grace=60), "client": role(1, sh(f"{await_files('up', 0)}; exit 7"))},
        coordinator=1,
    )
    run = local.start(plan)
    run.first("RankEnded", rank=1)
    run.first("MarkerPublished")
    run.signal(signal.SIGKILL)
    run.wait()
    run.wait_gone()
    verify = local.allocctl("verify", str(run.directory), "--json")
    assert verify.returncode == 7
    assert json.loads(verify.stdout)["verdict"]["outcome"] == "failure"


# --- the disk is full ----------------------------------------------------------------------------------------------


@pytest.fixture
def small(local: Local) -> Iterator[Path]:
    """A directory for run directories on a disk of 4 MB."""
    directory = local.directory / "small"
    directory.mkdir()
    with mounted(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], directory):
        yield directory


@contextmanager
def mounted(argv: list[str], directory: Path) -> Iterator[None]:
    """A file system of its own at `directory`, for as long as this is open."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Use up the disk to its last byte."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


def running(run: Run, *ranks: int) -> None:
    """Wait until ranks are up, and the journal knows."""
    run.wait_file(*(f"up.{rank}" for rank in ranks))
    until(lambda: len(run.events("RankStarted")) == len(ranks), f"{len(ranks)} ranks{run}")


FULL = "No space left on device"


def test_a_disk_that_was_full_for_a_while_costs_no_line(local: Local, small: Path) -> None:
    """Ranks that nobody needs end while the disk is full; their lines are written when there is room again. They are
    more than the journal's last page has room for."""
    go = local.directory / "go"
    plan = local.plan(
        {
            "helper": role("0-9", sh(f"{UP}; until [ -e {go}.0 ]; do sleep 0.02; done; exit 3"), critical=False),
            "client": role(10, sh(f"{UP}; until [ -e {go}.1 ]; do sleep 0.02; done; exit 7")),
        },
        coordinator=10,
        nodes=11,
    )
    run = local.start(plan, "--dir", str(small), place=small)
    running(run, *range(11))
    filler = fill(small)
    Path(f"{go}.0").touch()
    until(lambda: FULL in run.stderr, f"the news{run}")
    assert len(run.events("StepEnded")) < 10
    filler.unlink()
    until(lambda: len(run.events("StepEnded", returncode=3)) == 10, f"every line{run}")
    Path(f"{go}.1").touch()
    assert run.wait() == 7
    assert run.is_whole()
    receipt = run.receipt()
    assert FULL in receipt["journal_trouble"]
    assert [event["seq"] for event in run.lines() if "event" in event] == list(range(1, run.lines()[-1]["seq"] + 1))


def test_on_a_full_disk_a_run_ends_in_order_and_says_so(local: Local, small: Path) -> None:
    plan = local.plan({"worker": role("0,2", SERVE), "client": role(1, SERVE)}, coordinator=1)
    run = local.start(plan, "--dir", str(small), place=small)
    running(run, 0, 1, 2)
    fill(small)
    before = run.lines()
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.processes() == []
    assert all(run.file(f"ended.{rank}") == "" for rank in range(3))
    assert "the engine was told to stop" in run.last_line
    assert "not everything could be saved" in run.last_line
    assert f"the receipt could not be written in {run.directory}: [Errno 28] {FULL}" in run.stderr
    assert "not every line of the journal could be written" in run.stderr
    assert run.lines()[: len(before)] == before
    assert not [path for path in run.directory.glob(".*") if path.suffix != ".lock"]  # no half-written receipt, marker
    assert "its engine is gone" in local.allocctl("status", str(run.directory)).stdout
    assert local.allocctl("verify", str(run.directory)).returncode in (75, 143)  # as far as the journal came


def test_a_success_whose_receipt_cannot_be_written_is_none(local: Local) -> None:
    """In the middle of the run files are limited to a size that is enough for the marker, and what is printed."""
    go = local.directory / "go"
    plan = local.plan({"client": role(0, sh(f"{UP}; until [ -e {go} ]; do sleep 0.02; done"))}, coordinator=0)
    run = local.start(plan)
    running(run, 0)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    go.touch()
    assert run.wait() == 125
    assert "the run completed, but the receipt could not be written" in run.last_line
    assert "File too large" in run.last_line
    assert "[exit 125, origin allocd]" in run.last_line
    assert not (run.directory / "receipt.run.json").exists()


# --- the disk fails ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("when", "command", "codes"),
    [("2+", "exit 7", {7}), ("1+", "exit 7", {7}), ("1+", "exit 0", {125})],
)
def test_a_failing_fsync_is_told(local: Local, when: str, command: str, codes: set[int]) -> None:
    """`when` counts the calls of each thread: from the journal's second on, or from everybody's first on."""
    assert STRACE is not None
    client = sh(f"{await_files('up', 0)}; {command}")
    plan = local.plan({"worker": role(0, SERVE), "client": role(1, client)}, coordinator=1)
    inject = f"inject=fsync:error=EIO:when={when}"
    run = local.start(plan, before=(STRACE, "-f", "-q", "-o", "/dev/null", "-e", "trace=fsync", "-e", inject))
    assert run.wait() in codes
    assert "Input/output error" in run.stderr
    assert "success" not in run.last_line
    assert "Traceback" not in run.stderr
    assert run.processes() == []
    if when == "2+":
        assert "Input/output error" in run.receipt()["journal_trouble"]


# --- the disk does not answer --------------------------------------------------------------------------------------


@contextmanager
def holdable(real: Path, mount: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`mount` shows `real` through a process: while that is stopped, the file system does not answer."""
    if BINDFS is None:
        pytest.skip("bindfs is not installed")
    server = subprocess.Popen([BINDFS, "-f", str(real), str(mount)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until(lambda: mount.is_mount() or server.poll() is not None, "bindfs")
        if server.poll() is not None:
            pytest.skip(f"no FUSE here: {server.communicate()[1].decode().strip()}")
        yield server
    finally:
        server.send_signal(signal.SIGCONT)
        if mount.is_mount():
            subprocess.run(["umount", "-l", str(mount)], check=True)
        server.terminate()
        server.communicate(timeout=LIMIT)


def hold(server: subprocess.Popen[bytes], client: subprocess.Popen[bytes]) -> None:
    """Stop the server while it serves nothing: a request that it has read already holds even a killed client."""

    def held() -> bool:
        server.send_signal(signal.SIGSTOP)
        until(lambda: states(server.pid) == {"T"}, "bindfs to stand still")
        if "D" not in states(client.pid):
            return True
        server.send_signal(signal.SIGCONT)
        return False

    until(held, "a moment without a request")


def states(pid: int) -> set[str]:
    """The states of a process's threads."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


def test_stops_are_carried_out_though_no_file_system_answers(local: Local) -> None:
    """The run directory hangs, journal, marker, logs and all. The ranks are told to end all the same, the coordinator
    first (whose agent waits 5 s for its logs to reach the disk), and the engine comes to its end and says what it could
    not do."""
    real, base, trace = (local.directory / name for name in ("real", "mount", "trace"))
    for directory in (real, base, trace):
        directory.mkdir()
    server = sh(f"trap 'echo $ALLOCD_RANK >>{trace}/ended; exit 0' TERM; {CHILD}; : >{trace}/up.$ALLOCD_RANK; wait")
    missing = {"name": "a", "root": str(base / "late"), "path": "a.json", "required": False}
    plan = local.plan(
        {"worker": role("0,2", server), "client": role(1, server)},
        coordinator=1,
        artifacts=[missing],
        deadlines={"journal": 1, "collect": 1},
    )
    with holdable(real, base) as held:
        run = local.start(plan, "--dir", str(base), place=real)
        until(lambda: all((trace / f"up.{rank}").exists() for rank in range(3)), f"three ranks{run}")
        until(lambda: len(run.events("RankStarted")) == 3, f"the news of them{run}")
        hold(held, run.process)
        asked = time.monotonic()
        run.signal(signal.SIGTERM)
        until(lambda: (trace / "ended").exists() and len((trace / "ended").read_text()) == 6, f"three ends{run}")
        assert time.monotonic() - asked < 8.0
        assert (trace / "ended").read_text().split()[0] == "1"
        until(lambda: "[exit 143" in run.stderr, f"the verdict{run}", 60.0)
        assert "the engine was told to stop (SIGTERM)" in run.last_line
        assert "not everything could be saved" in run.last_line
        assert "the journal could not be written within 1 s" in run.stderr
        assert "no answer" in run.stderr
    assert run.wait() == 143  # only now for sure: a thread whose request the server has read cannot end before
    run.wait_gone()
