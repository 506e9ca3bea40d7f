"""A rank's process fails -> every other rank's process is gone; and what a run costs over a bare srun.

On four nodes of a real Slurm cluster, in one allocation that stays for the whole bench.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from tests.bench.stage import RANKS, Scene, Stage, deaths
from tests.bench.table import Row, interleaved, rows
from tests.cluster import NODES

POLL = 2.0  # seconds: how often today's launcher looks
_NODE = '"$SLURMD_NODENAME"'
_VICTIM = NODES[2]

Start = Callable[[Scene], subprocess.Popen[bytes]]


def failure(stage: Stage) -> list[Row]:
    """The failing rank is let go at a phase of its own in each sample; the clock starts at its death, as seen by its
    pidfd, and stops at the last of the others'."""

    def command(scene: Scene) -> list[str]:
        fails = f"if [ {_NODE} = {_VICTIM} ]; then {scene.wait_for_leave(7)}; fi"
        return scene.rank(f"{fails}; exec sleep 1000", who="$SLURMD_NODENAME")

    def allocctl(scene: Scene) -> subprocess.Popen[bytes]:
        return scene.allocctl_run(scene.plan({"all": {"ranks": f"0-{RANKS - 1}", "command": command(scene)}}, **_SELF))

    def srun(scene: Scene) -> subprocess.Popen[bytes]:
        return scene.start(scene.srun("--kill-on-bad-exit=1", f"--nodes={RANKS}", *command(scene)))

    def four(scene: Scene) -> subprocess.Popen[bytes]:
        one_each = (scene.srun("--nodes=1", f"--nodelist={node}", *command(scene)) for node in NODES)
        return scene.polling(POLL, one_each)

    def sample(start: Start, phase: float) -> float:
        with stage.scene() as scene:
            process = start(scene)
            pids, _ = scene.words(RANKS)
            with deaths(pids.values()) as witness:
                time.sleep(phase * POLL)  # where in the poll's interval the failure falls
                scene.let_go()
                ended = witness.watch(*pids.values()).ended
            scene.finish(process, 7, 143)  # srun answers with the end of one that it killed itself
            return (max(ended.values()) - ended[pids[_VICTIM]]) * 1e3

    ways = {
        "allocctl run": lambda phase: sample(allocctl, phase),
        "srun -N4 --kill-on-bad-exit=1": lambda phase: sample(srun, phase),
        f"four sruns, a poll of {POLL:g} s": lambda phase: sample(four, phase),
    }
    return rows("a rank fails -> all others gone", "ms", interleaved(stage.runs, ways))


_SELF = {"run": {"finish": "artifacts"}, "artifacts": [{"name": "never", "path": "never"}]}
"""A run without a coordinator: four equal ranks, as srun starts them."""


def overhead(stage: Stage) -> list[Row]:
    """From the start of the command to the first word of a rank, and from the last rank's end to the command's."""

    def allocctl(scene: Scene) -> subprocess.Popen[bytes]:
        command = scene.rank(scene.wait_for_leave())
        others = {"ranks": f"1-{RANKS - 1}", "command": command, "may_finish": True}
        plan = scene.plan({"first": {"ranks": 0, "command": command}, "others": others}, coordinator={"rank": 0})
        return scene.allocctl_run(plan)

    def srun(scene: Scene) -> subprocess.Popen[bytes]:
        return scene.start(scene.srun(f"--nodes={RANKS}", *scene.rank(scene.wait_for_leave())))

    last: dict[str, list[float]] = {}  # the first of each is not counted

    def sample(name: str, start: Start) -> float:
        with stage.scene() as scene:
            begin = time.monotonic()
            process = start(scene)
            pids, first = scene.words(RANKS)
            with deaths((*pids.values(), process.pid)) as witness:
                scene.let_go(RANKS)
                ended = witness.watch(*pids.values(), process.pid).ended
            scene.finish(process, 0)
            end = ended.pop(process.pid)
            last.setdefault(name, []).append((end - max(ended.values())) * 1e3)
            return (first - begin) * 1e3

    ways: dict[str, Start] = {"allocctl run": allocctl, "srun of the same": srun}
    samples = interleaved(stage.runs, {name: lambda _, at=name: sample(at, ways[at]) for name in ways})  # type: ignore[misc]
    return [
        *rows("start -> first rank's process runs", "ms", samples),
        *rows("last rank's end -> command ends", "ms", {name: last[name][1:] for name in ways}),
    ]
