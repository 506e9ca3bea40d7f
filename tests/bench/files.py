"""A file appears -> what it means is done: the marker, and a result that a plan promises. Ranks are local."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

from tests.bench.stage import RANKS, Scene, Stage, deaths
from tests.bench.table import Row, interleaved, rows

POLL = 1.0  # seconds
_SLEEP = "exec sleep 1000"
_RESULT = b'{"requests": {"failed": 0, "completed": 100}}\n'
_BESIDE = f"a shell's poll of {POLL:g} s"


def marker(stage: Stage) -> list[Row]:
    """From the marker's name in its directory, seen by inotify, to the end of the last worker, which dies of its first
    signal. Beside it a worker's script as it is written today, that looks for the file and ends its engine."""

    def allocctl(_: float) -> float:
        with stage.scene() as scene:
            client = {"ranks": 0, "command": scene.rank(scene.wait_for_leave(), who="client")}
            workers = {"ranks": f"1-{RANKS - 1}", "command": scene.rank(_SLEEP, who="$ALLOCD_RANK")}
            process = scene.allocctl_run(scene.plan({"c": client, "w": workers}, coordinator={"rank": 0}))
            pids, _when = scene.words(RANKS)
            del pids["client"]
            with deaths(pids.values(), scene.run_dir) as witness:
                scene.let_go()
                witness.watch(*pids.values())
            scene.finish(process, 0)
            visible = next(at for name, at in witness.appeared.items() if _is_marker(name))
            return (max(witness.ended.values()) - visible) * 1e3

    def poll(phase: float) -> float:
        with stage.scene() as scene:
            path = scene.directory / ".bench_done.1"
            engine, done = scene.start(scene.rank(_SLEEP, who="engine")), shlex.quote(str(path))
            scene.words(1)
            looks = f"until [ -s {done} ]; do sleep {POLL:g}; done; kill {engine.pid}"
            scene.start(scene.rank(looks, who="worker"))
            scene.words(1)
            return _appear(scene, path, b"0\n", engine, phase)

    ways = {"allocctl run": allocctl, _BESIDE: poll}
    return rows("marker visible -> all workers' processes gone", "ms", interleaved(stage.runs, ways))


def artifact(stage: Stage) -> list[Row]:
    """From the rename that completes the last promised file to the end of the engines, which the decision orders."""

    def allocctl(phase: float) -> float:
        with stage.scene() as scene:
            every = {"ranks": f"0-{RANKS - 1}", "command": scene.rank(_SLEEP, who="$ALLOCD_RANK")}
            fields = {"requests.failed": {"equals": 0}, "requests.completed": {"min": 1}}
            promised = {"name": "result", "path": "results/result.json", "format": "json", "fields": fields}
            plan = scene.plan({"engine": every}, run={"finish": "artifacts"}, artifacts=[promised])
            process = scene.allocctl_run(plan)
            pids, _ = scene.words(RANKS)
            path = scene.run_dir / "results" / "result.json"
            with deaths(pids.values()) as witness:
                begin = _rename(path, _RESULT, phase)
                witness.watch(*pids.values())
            scene.finish(process, 0)
            return (max(witness.ended.values()) - begin) * 1e3

    def poll(phase: float) -> float:
        with stage.scene() as scene:
            path = scene.directory / "result.json"
            looks = f"until [ -s {shlex.quote(str(path))} ]; do sleep {POLL:g}; done"
            process = scene.start(scene.rank(looks))
            scene.words(1)
            return _appear(scene, path, _RESULT, process, phase)

    ways = {"allocctl run": allocctl, _BESIDE: poll}
    return rows("last result renamed -> decided, engines gone", "ms", interleaved(stage.runs, ways))


def _appear(scene: Scene, path: Path, data: bytes, process: subprocess.Popen[bytes], phase: float) -> float:
    """Milliseconds from the file's rename to the end of a process of this scene."""
    with deaths([process.pid]) as witness:
        begin = _rename(path, data, phase)
        return (witness.watch(process.pid).ended[process.pid] - begin) * 1e3


def _rename(path: Path, data: bytes, phase: float) -> float:
    """Give a complete file its name, at a phase of the poll that it is compared with. Returns when."""
    temporary = path.with_name("result.tmp")
    temporary.write_bytes(data)
    time.sleep(phase * POLL)
    begin = time.monotonic()
    os.replace(temporary, path)
    return begin


def _is_marker(name: str) -> bool:
    return name.startswith(".bench_done.") and name.count(".") >= 2 and not name.endswith((".note", ".tmp"))
