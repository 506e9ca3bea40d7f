"""What it costs to wait for a job to which nothing happens: `allocctl wait` beside what today's launchers do, a squeue
every 10 s and a `tail -F` of the log."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from pathlib import Path

from tests.bench.stage import ALLOCCTL, RANKS, Stage
from tests.bench.table import Row

PERIOD = 10  # seconds of a launcher's poll
SETTLE = 50.0  # until nobody expects anything soon: the intervals have grown to their longest
MEASURED = 30.0
_TICK = os.sysconf("SC_CLK_TCK")


def waiting(stage: Stage) -> list[Row]:
    """Processor time of waits, the commands of Slurm's that they run included. All of them wait at the same time."""
    jobid = stage.env["SLURM_JOB_ID"]
    with contextlib.ExitStack() as stack:
        scene = stack.enter_context(stage.scene())
        every = {"ranks": f"0-{RANKS - 1}", "command": scene.rank("exec sleep 1000")}
        scene.allocctl_run(scene.plan({"all": every}, coordinator={"rank": 0}))
        scene.words(RANKS)
        log = shlex.quote(str(next(scene.run_dir.glob("logs/rank-0.*.out"))))
        ask = f"squeue --noheader --jobs={jobid} --format=%T"
        loop = f'tail -F {log} & while [ "$({ask})" = RUNNING ]; do sleep {PERIOD}; done'
        ours = [scene.start([ALLOCCTL, "wait", jobid, "--logs", "all"]).pid for _ in range(stage.runs)]
        theirs = [scene.start(["sh", "-c", loop]).pid for _ in range(stage.runs)]
        time.sleep(SETTLE)
        before = {pid: _processor(pid) for pid in (*ours, *theirs)}
        time.sleep(MEASURED)
        used = {pid: (_processor(pid) - early) * PERIOD / MEASURED for pid, early in before.items()}
    return [
        Row(
            f"a wait to which nothing happens, processor time in {PERIOD} s",
            "ms",
            [used[pid] * 1e3 for pid in ours],
            f"squeue every {PERIOD} s and tail -F",
            [used[pid] * 1e3 for pid in theirs],
        )
    ]


def _processor(pid: int) -> float:
    """Processor seconds of a process, to the nanosecond, of the children that it has waited for, in ticks, and of those
    that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    living = sum(map(_processor, map(int, children)))
    return time.clock_gettime(~pid << 3 | 2) + sum(map(int, fields[13:15])) / _TICK + living
