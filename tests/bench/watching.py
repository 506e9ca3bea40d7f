"""Directories that are waited on: what it costs while nothing happens, and how soon a result is found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.costs import IDLE, Usage, usage
from tests.bench.stage import ALLOCCTL, Scene, Stage
from tests.bench.table import Row, interleaved, rows
from tests.bench.watchers import PERIOD
from tests.mounts import two_mounts
from tests.slurm.jobs import until

DIRECTORIES, FILES = 1000, 100
_PROJECT = Path(__file__).parents[2]
_SLOWEST = 5.0  # seconds between looks without events when nothing has happened for long
_STAT, _WATCHFILES, _ASLEEP = f"stat of every file, {PERIOD:g} s", f"watchfiles, polling {PERIOD:g} s", "asleep"
_PATCHED = (
    "import runpy, sys; from supervisor.watch import polling; polling.FIRST = polling.LAST = {seconds}; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def watchers(stage: Stage) -> list[Row]:
    """1,000 directories of 100 files, and nothing happens: ours, by events and by polling, and what looks at every
    file. All in one stretch of time."""
    base = stage.place()
    for number in range(DIRECTORIES):
        directory = base / str(number)
        directory.mkdir()
        for file in range(FILES):
            (directory / str(file)).touch()
    ways = {"events": "events", "polling": "polling", _STAT: "stat", _WATCHFILES: "watchfiles", _ASLEEP: "asleep"}
    used: dict[str, Usage] = {}
    with contextlib.ExitStack() as stack:
        pids = {}
        for name, way in ways.items():
            argv = [sys.executable, "-m", "tests.bench.watchers", way, str(base)]
            process = stack.enter_context(
                subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=_PROJECT, env=dict(stage.env))
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            pids[name] = process.pid
        before = {name: usage(pid) for name, pid in pids.items()}
        time.sleep(IDLE)
        used = {name: usage(pid).since(before[name]) for name, pid in pids.items()}
    subprocess.run(["rm", "-rf", str(base)], check=True)
    what = f"{DIRECTORIES:,} directories of {FILES} files, idle, by"
    return [
        row
        for ours in ("events", "polling")
        for beside in (_STAT, _WATCHFILES, _ASLEEP)
        for row in (
            Row(f"{what} {ours}: resident memory", "MB", *_two(used, ours, beside, lambda one: one.memory / 1e6)),
            Row(
                f"{what} {ours}: processor time in {IDLE:g} s",
                "ms",
                *_two(used, ours, beside, lambda one: one.processor * 1e3),
            ),
        )
    ]


def _two(used: dict[str, Usage], ours: str, beside: str, get: Callable[[Usage], float]) -> tuple[Any, ...]:
    return [get(used[ours])], beside, [get(used[beside])]


def found(stage: Stage) -> list[Row]:
    """From the rename that completes a promised file to the moment at which the engine knows that it is right: by
    events; on a mount without events by the hint of an agent that sees the writer; there by polling alone, when nothing
    has happened for long."""
    measure = "result renamed -> found"
    try:
        with two_mounts(stage.place()) as (here, there):

            def events(_: float) -> float:
                with stage.scene() as scene:
                    place = scene.directory / "results"
                    place.mkdir()
                    return _found(scene, place, place)

            def hint(_: float) -> float:
                return behind(there, 3600.0, 0.0)

            def polled(phase: float) -> float:
                return behind(here, _SLOWEST, phase * _SLOWEST)

            def behind(written: Path, period: float, wait: float) -> float:
                name = f"results-{next(stage.numbers)}"
                (there / name).mkdir()
                with stage.scene() as scene:
                    return _found(scene, there / name, written / name, period, wait)

            ways = {"by events": events, "by an agent's hint, no events": hint, "by polling, no events": polled}
            return rows(measure, "ms", interleaved(stage.runs, ways))
    except pytest.skip.Exception as reason:
        return [Row(measure, skipped=str(reason))]


def _found(scene: Scene, seen: Path, written: Path, period: float = 0.0, wait: float = 0.0) -> float:
    """Milliseconds until a result is found in the directory `seen`, that is written through `written`. `period`:
    between two looks of the engine, if not its own; `wait`: seconds before it is written."""
    promised = {"name": "result", "root": str(seen), "path": "result.json", "format": "json"}
    engine = {"ranks": 0, "command": scene.rank("exec sleep 1000")}
    plan = scene.plan({"engine": engine}, run={"finish": "artifacts"}, artifacts=[promised])
    program = [sys.executable, "-c", _PATCHED.format(seconds=period)] if period else []
    process = scene.start([*program, ALLOCCTL, "run", "--dir", str(scene.directory / "runs"), str(plan)])
    scene.words(1)
    until(lambda: _is_watched(seen), f"a watch of {seen}")
    time.sleep(wait)
    temporary = written / "result.tmp"
    temporary.write_bytes(b'{"completed": 100}\n')
    begin = time.monotonic()
    os.replace(temporary, written / "result.json")
    scene.finish(process, 0)
    lines = map(json.loads, (scene.run_dir / "journal.jsonl").read_text().splitlines())
    at: float = next(line["at"] for line in lines if line.get("answer") == "valid")
    return (at - begin) * 1e3


def _is_watched(directory: Path) -> bool:
    """Whether a process here has asked inotify for the events of a directory."""
    inode = f" ino:{directory.stat().st_ino:x} "
    for opened in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):  # it has ended
            if any(line.startswith("inotify ") and inode in line for line in opened.read_text().splitlines()):
                return True
    return False
