"""The last rank ends -> whoever waits for the job has its verdict: `allocctl submit --wait` beside a launch script that
submits, asks squeue until the job is gone, and then reads accounting."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable

from tests.bench.stage import ALLOCCTL, RANKS, Scene, Stage, deaths
from tests.bench.table import Row, interleaved, rows

PERIOD = 10.0  # seconds: how often a launcher asks squeue
RUNS = 15.0  # seconds that a job runs, and some more: its waiters do not look closely any longer

Start = Callable[[Scene], subprocess.Popen[bytes]]


def verdict(stage: Stage) -> list[Row]:
    """Each sample is a job of its own, of one rank, which ends at a phase of its own of the launcher's interval. Both
    ways must end with the job's code."""
    outside = Stage(stage.place(), stage.runs, {k: v for k, v in stage.env.items() if k not in _inherited(stage)})

    def allocctl(scene: Scene) -> subprocess.Popen[bytes]:
        role = {"ranks": [0], "command": scene.rank(scene.wait_for_leave(7))}
        plan = scene.plan({"all": role}, coordinator={"rank": 0}, slurm={"time": "00:10:00"})
        return scene.start([ALLOCCTL, "submit", str(plan), "--dir", str(scene.directory / "runs"), "--wait"])

    def launcher(scene: Scene) -> subprocess.Popen[bytes]:
        command = shlex.join(scene.rank(scene.wait_for_leave(7)))
        (scene.directory / "job.sh").write_text(f"#!/bin/sh\nsrun --nodes=1 --ntasks=1 {command}\n")
        script = (
            f"id=$(sbatch --parsable --nodes={RANKS} --time=10 job.sh)\n"
            f'while squeue --noheader --jobs="$id" 2>/dev/null | grep -q .; do sleep {PERIOD:g}; done\n'
            'until state=$(sacct -nPX -j "$id" -o State,ExitCode | grep -v RUNNING); [ "$state" ]; do sleep 1; done\n'
            'code=${state#*|}; exit "${code%:*}"\n'
        )
        return scene.start(["sh", "-c", script])

    def sample(start: Start, phase: float) -> float:
        with outside.scene() as scene:
            process = start(scene)
            (pid,) = scene.words(1)[0].values()
            with deaths([pid]) as witness:
                time.sleep(RUNS + phase * PERIOD)
                scene.let_go()
                ended = witness.watch(pid).ended[pid]
            scene.finish(process, 7)
            return time.monotonic() - ended

    ways = {
        "allocctl submit --wait": lambda phase: sample(allocctl, phase),
        f"sbatch, squeue every {PERIOD:g} s, sacct": lambda phase: sample(launcher, phase),
    }
    return rows("the last rank ends -> its verdict", "s", interleaved(stage.runs, ways))


def _inherited(stage: Stage) -> set[str]:
    """What the bench's own allocation puts into the environment: these jobs are none of its steps."""
    return {name for name in stage.env if name.startswith("SLURM_") and name != "SLURM_CONF"} | {"ENVIRONMENT"}
