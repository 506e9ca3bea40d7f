"""Fetching on a node: the program, by itself and as the last thing that a rank's agent does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent import agent
from supervisor.core.layout import Layout
from supervisor.engine.collect import NodeFacts, node_facts
from supervisor.engine.fetch import STEP_MARGIN, fetch
from supervisor.launch.base import StepCommand
from supervisor.launch.local import LocalLauncher
from supervisor.launch.process import use_pidfd_watcher
from tests.unit.test_agent import PATIENCE, PYTHON, Engine, alive, archive, engine, hire, wait_for
from tests.unit.test_collect import facts, layout

__all__ = ["archive", "engine", "hire"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    (path / "a.txt").write_text("a")
    return path


def specification(disk: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    target = "collected/nodes/0"
    spec = {"patterns": [f"{disk}/*.txt"], "root": f"{tmp_path}/run", "target": target, "facts": f"{target}.jsonl"}
    return {**spec, "size": 1 << 30, "seconds": 60, **more}


def told(tmp_path: Path) -> NodeFacts:
    return node_facts(layout(tmp_path / "run"), 0)


def copy_of(path: Path, tmp_path: Path) -> dict[str, Any]:
    return {**facts(path), "path": f"{tmp_path}/run/collected/nodes/0{path}", "rank": 0}


def run(archive: Path, spec: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PYTHON, "-I", "-S", str(archive), "fetch"],
        input=json.dumps(spec).encode() + b"\n",
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )


# --- the program -------------------------------------------------------------------------------------------------


def test_it_copies_and_tells(archive: Path, disk: Path, tmp_path: Path) -> None:
    (disk / "link.txt").symlink_to("a.txt")
    done = run(archive, specification(disk, tmp_path, patterns=[f"{disk}/*.txt", f"{disk}/no/*"]))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    found = told(tmp_path)
    assert found.files == [copy_of(disk / "a.txt", tmp_path)]
    assert found.errors == [f"{disk}/link.txt: a symbolic link, not followed", f"nothing matches {disk}/no/*"]
    assert found.whole


def test_each_try_begins_anew_and_what_is_there_stays(archive: Path, disk: Path, tmp_path: Path) -> None:
    assert run(archive, specification(disk, tmp_path, patterns=[f"{disk}/no", f"{disk}/a.txt"])).returncode == 0
    (disk / "a.txt").rename(disk / "b.txt")
    assert run(archive, specification(disk, tmp_path)).returncode == 0
    found = told(tmp_path)
    old = {**copy_of(disk / "b.txt", tmp_path), "source": str(disk / "a.txt")}
    assert [item["source"] for item in found.files] == [str(disk / "a.txt"), str(disk / "b.txt")]
    assert found.files[0]["sha256"] == old["sha256"]
    assert found.errors == []


def test_its_limits(archive: Path, disk: Path, tmp_path: Path) -> None:
    (disk / "b.txt").write_bytes(b"12345")
    assert run(archive, specification(disk, tmp_path, size=4)).returncode == 0
    assert [Path(item["path"]).name for item in told(tmp_path).files] == ["a.txt"]
    assert told(tmp_path).errors == [f"{disk}/b.txt: 5 bytes, but only 3 more may be copied"]
    assert run(archive, specification(disk, tmp_path, seconds=-1)).returncode == 0
    assert told(tmp_path).errors == [f"{disk}/{name}.txt: the time for collecting was over" for name in "ab"]


@pytest.mark.parametrize("trick", [os.mkfifo, lambda path: os.symlink("elsewhere", path)])
def test_facts_are_written_into_a_file_of_its_own_only(
    archive: Path, disk: Path, tmp_path: Path, trick: Callable[[Path], None]
) -> None:
    nodes = tmp_path / "run/collected/nodes"
    nodes.mkdir(parents=True)
    trick(nodes / "0.jsonl")
    done = run(archive, specification(disk, tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(b"fetch: 0.jsonl: ")
    assert sorted(path.name for path in nodes.iterdir()) == ["0.jsonl"]


def test_facts_that_are_torn_or_none(tmp_path: Path) -> None:
    assert told(tmp_path) == NodeFacts()
    path = tmp_path / "run/collected/nodes/0.jsonl"
    path.parent.mkdir(parents=True)
    good = '{"path": "/c/a", "source": "/a", "size": 1, "sha256": "00"}'
    lines = ['{"begin": 1}', good, "no JSON", '{"path": 7}', "[]", '{"error": "why"}']
    path.write_text("\n".join([*lines, '{"end": 1}']))
    found = told(tmp_path)
    assert [item["source"] for item in found.files] == ["/a"]
    assert (found.errors, found.whole) == (["why"], False), "its last line is not there yet"
    path.write_text("\n".join([*lines, '{"end": 1}', ""]))
    assert told(tmp_path).whole
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        told(tmp_path)


# --- as the last thing that an agent does ------------------------------------------------------------------------


def test_an_agent_fetches_between_bye_and_its_exit(engine: Engine, disk: Path, tmp_path: Path) -> None:
    engine.start(["sh", "-c", f"echo b >{disk}/b.txt; exit 5"], fetch=specification(disk, tmp_path))
    engine.until("gone")
    engine.say("ping")
    engine.until("pong")
    assert told(tmp_path) == NodeFacts()
    engine.say("bye", exit=9)
    assert engine.wait() == 9
    found = told(tmp_path)
    assert found.files == [copy_of(disk / name, tmp_path) for name in ("a.txt", "b.txt")]
    assert found.whole
    assert engine.story()[-1] == "pong"


def test_a_rank_that_never_ran_left_nothing_to_fetch(engine: Engine, disk: Path, tmp_path: Path) -> None:
    engine.spec(["/no/such/program"], fetch=specification(disk, tmp_path))
    engine.say("start")
    engine.until("gone")
    engine.say("bye")
    assert engine.wait() == 127
    assert told(tmp_path) == NodeFacts()


@pytest.mark.parametrize("none", [7, {}, {"seconds": "soon"}, {"seconds": -1}])
def test_a_specification_that_is_none_is_refused(engine: Engine, none: Any) -> None:
    engine.spec(["true"], fetch=none)
    engine.until("refused")
    assert "fetch" in engine.seen("refused")[0]["error"]


def test_a_fetch_that_breaks_is_on_stderr_and_holds_nobody(
    hire: Callable[..., Engine], disk: Path, tmp_path: Path
) -> None:
    engine = hire(stderr=subprocess.PIPE)
    engine.start(["true"], fetch={"seconds": 60})
    engine.until("gone")
    engine.say("bye", exit=3)
    assert engine.process.stderr is not None
    assert b"KeyError" in engine.process.stderr.read()
    assert engine.wait() == 3


@pytest.mark.parametrize("end", [pytest.param("limit", marks=pytest.mark.slow), "channel"])
def test_a_fetch_that_hangs_is_left_behind(engine: Engine, disk: Path, tmp_path: Path, end: str) -> None:
    """At its limit, or when the channel ends: nobody waits for it, and it does not outlive its agent."""
    with (disk / "endless.txt").open("wb") as file:
        file.truncate(1 << 40)
    spec = specification(disk, tmp_path, patterns=[f"{disk}/endless.txt"], size=1 << 50)
    engine.start(["true"], fetch={**spec, "seconds": 0.5 if end == "limit" else 3600})
    engine.until("gone")
    engine.say("bye", exit=3)
    target = tmp_path / f"run/collected/nodes/0{disk}"
    wait_for(lambda: target.exists() and bool(list(target.iterdir())), "the beginning of a copy")
    (fetcher,) = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text().split()
    os.kill(int(fetcher), signal.SIGSTOP)
    if end == "channel":
        engine.hang_up()
    assert engine.wait(agent.FETCH_MARGIN + 5) == 3
    wait_for(lambda: not alive(int(fetcher)), "the fetcher's end")
    found = told(tmp_path)
    assert (found.files, found.whole) == ([], False)


# --- by a step of its own ----------------------------------------------------------------------------------------


class Stand(LocalLauncher):
    """A launcher whose steps are something else."""

    def __init__(self, *argv: str) -> None:
        super().__init__()
        self.argv = argv

    def fetch(self, layout: Layout, rank: int) -> StepCommand:
        return StepCommand(self.argv, dict(os.environ))


async def fetch_by(tmp_path: Path, *argv: str, limit: float = PATIENCE) -> str:
    use_pidfd_watcher()
    return await fetch(layout(tmp_path), Stand(*argv), 0, limit)


async def test_a_step_gets_its_specification_on_stdin(tmp_path: Path) -> None:
    assert await fetch_by(tmp_path, "sh", "-c", f'echo banner; read -r line; echo "$line" >{tmp_path}/spec') == ""
    found = json.loads((tmp_path / "spec").read_text())
    assert found == layout(tmp_path).fetch_specification(0, PATIENCE - STEP_MARGIN)


async def test_what_goes_wrong_with_a_step_is_told_in_its_own_words(tmp_path: Path) -> None:
    failing = ("sh", "-c", "echo 'srun: error: job has expired' >&2; exit 3")
    assert await fetch_by(tmp_path, *failing) == "its step ended with 3: srun: error: job has expired"
    assert await fetch_by(tmp_path, "/no/such/srun") == "its step was not made: No such file or directory"
    waiting = ("sh", "-c", "echo 'srun: waiting' >&2; exec sleep 1000")
    assert await fetch_by(tmp_path, *waiting, limit=0.2) == "its step did not end within 0.2 s: srun: waiting"
