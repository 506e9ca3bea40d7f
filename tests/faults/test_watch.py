"""Results on a file system without events: a directory that is mounted twice, written here and seen there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.local import LIMIT, SERVE, Local, Run, role, until
from tests.mounts import two_mounts

pytestmark = pytest.mark.slow

PRODUCER = str(Path(__file__).parents[1] / "artifacts" / "producer.py")

HOURLY = (
    "import runpy, sys; from supervisor.watch import polling; polling.FIRST = polling.LAST = 3600.0; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""A program: allocctl that polls once an hour."""


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    with two_mounts(tmp_path) as both:
        yield both


def started(local: Local, there: Path, **options: Any) -> Run:
    """A run that ends when a result has appeared there, in a directory that is not there yet; all is ready for it."""
    result = {"name": "result", "root": str(there), "path": "out/result.json", "format": "json"}
    plan = local.plan({"worker": role(0, SERVE)}, nodes=1, run={"finish": "artifacts"}, artifacts=[result])
    run = local.start(plan, **options)
    how = run.first("WatchChanged")
    assert (how["directories"], how["by"]) == ([str(there / "out")], "polling")
    assert how["file_system"].startswith("fuse")
    run.first("RankStarted")
    run.first("ArtifactSeen", answer="pending")
    return run


def benchmark(local: Local, there: Path, through: Path, **options: Any) -> Run:
    """A self-benchmark of two nodes whose directory is read there, and written through this mount."""
    through.mkdir()
    command = [sys.executable, "-S", PRODUCER, "--base", str(through / "bench.json"), "--node", "{rank}"]
    engine = role("0-1", [*command, "--nodes", "2", "--local", "2", "--delay", "0.2", "--probe-delay", "0.5", "--stay"])
    fpm = {"name": "fpm", "root": str(there), "path": "bench.json", "contract": "fpm", "ranks_per_node": 2}
    plan = local.plan({"engine": engine}, nodes=2, run={"finish": "artifacts"}, artifacts=[fpm])
    return local.start(plan, **options)


def outcome(run: Run) -> list[tuple[Any, ...]]:
    """What each node's contract has come to: state, and kind, name and content of each file."""
    return [
        (item["contract"], item["state"], [(file["kind"], file["path"], file["sha256"]) for file in files])
        for item in run.receipt()["artifacts"]
        for files in [item["finding"]["files"]]
    ]


def put(directory: Path) -> None:
    """A result, whole from its first moment."""
    directory.mkdir()
    (directory / "result.tmp").write_text('{"ok": true}')
    (directory / "result.tmp").rename(directory / "result.json")


def test_what_another_machine_writes_is_found_by_polling(local: Local, mounts: tuple[Path, Path]) -> None:
    here, there = mounts
    run = started(local, there)
    assert not (there / "asked").exists()
    put(here / "out")
    (here / "asked").touch()
    assert run.wait() == 0, run
    assert not (there / "asked").exists(), "this mount forgets: the test shows nothing"
    status = local.allocctl("status", str(run.directory), "--json").stdout
    assert '"by": "polling"' in status


def test_what_a_rank_writes_is_found_by_its_agents_hint(local: Local, mounts: tuple[Path, Path]) -> None:
    """The agent watches the mount that is written through; the engine polls too rarely to find anything."""
    _, there = mounts
    run = started(local, there, before=[sys.executable, "-c", HOURLY])
    put(there / "out")
    assert run.wait() == 0, run


def test_a_self_benchmark_ends_the_same_whoever_tells_of_its_files(
    local: Local, mounts: tuple[Path, Path], tmp_path: Path
) -> None:
    """By polling, for no event crosses from mount to mount; by hints alone; and by this machine's own events."""
    here, there = mounts
    told = benchmark(local, tmp_path / "disk", tmp_path / "disk")
    hinted = benchmark(local, there / "hinted", there / "hinted", before=[sys.executable, "-c", HOURLY])
    polled = benchmark(local, there / "polled", here / "polled")
    assert [run.wait() for run in (told, hinted, polled)] == [0, 0, 0], (told, hinted, polled)
    assert {state for _, state, _ in outcome(told)} == {"complete"}
    assert [len(files) for _, _, files in outcome(told)] == [4, 4]
    assert outcome(told) == outcome(hinted) == outcome(polled)
    for run, by in ((told, "events"), (hinted, "polling"), (polled, "polling")):
        assert {watch["by"] for watch in run.receipt()["watches"]} == {by}


def test_a_run_says_that_it_polls_while_it_does(local: Local, mounts: tuple[Path, Path]) -> None:
    here, there = mounts
    run = started(local, there)
    until(lambda: "watching" in local.allocctl("status", str(run.directory)).stdout, "status to tell of polling", LIMIT)
    (line,) = (line for line in local.allocctl("status", str(run.directory)).stdout.splitlines() if "watching" in line)
    assert line.strip().startswith(f"watching {there}/out: polling (fuse")
    put(here / "out")
    assert run.wait() == 0


def test_without_any_inotify_instance_a_run_polls_and_says_so(local: Local, tmp_path: Path) -> None:
    """A real limit: in a user namespace that has none."""
    limited = ["unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_inotify_instances && exec "$@"', "sh"]
    if subprocess.run([*limited, "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    result = {"name": "result", "root": str(tmp_path), "path": "out/result.json", "format": "json"}
    plan = local.plan({"worker": role(0, SERVE)}, nodes=1, run={"finish": "artifacts"}, artifacts=[result])
    run = local.start(plan, before=limited)
    how = run.first("WatchChanged")
    assert (how["by"], "max_user_instances" in how["why"]) == ("polling", True)
    assert "no hints" in run.first("Noted", rank=0)["text"]  # its agent has none either
    put(tmp_path / "out")
    assert run.wait() == 0, run
    (watch,) = run.receipt()["watches"]
    assert (watch["directory"], watch["by"]) == (str(tmp_path / "out"), "polling")
