"""What it costs to ask, and to do nothing: a status, an import, memory, processor time and wake-ups."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.stage import ALLOCCTL, RANKS, Stage
from tests.bench.table import Row, interleaved

IDLE = 10.0  # seconds
POLL = 2.0
_SETTLE = 1.0  # after the last start: what is left over of it is no idleness
_PASS = (sys.executable, "-c", "pass")
_COUNT = "import sys; before = set(sys.modules); import supervisor; print(*sorted(set(sys.modules) - before))"


def status(stage: Stage) -> list[Row]:
    """A finished run's status, and the package's import, each in a new process beside one that does nothing."""
    with stage.scene() as scene:
        done = {"ranks": f"0-{RANKS - 1}", "command": scene.rank("exit 0"), "may_finish": True}
        process = scene.allocctl_run(scene.plan({"all": done}, coordinator={"rank": 0}))
        scene.words(RANKS)
        scene.finish(process, 0)
        # A path, for the place where runs are remembered is not what is measured.
        asked = (ALLOCCTL, "status", str(scene.run_dir))
        commands = {"status": asked, "import": (sys.executable, "-c", "import supervisor"), "python -c pass": _PASS}
        samples = interleaved(stage.runs, {name: lambda _, at=name: _wall(stage, commands[at]) for name in commands})  # type: ignore[misc]
    loaded = subprocess.run([sys.executable, "-c", _COUNT], check=True, capture_output=True, text=True).stdout.split()
    nothing = samples["python -c pass"]
    return [
        Row("allocctl status of a finished run", "ms", samples["status"], "python -c pass", nothing),
        Row(f"import supervisor (loads {', '.join(loaded)})", "ms", samples["import"], "python -c pass", nothing),
    ]


def _wall(stage: Stage, argv: Sequence[str]) -> float:
    begin = time.monotonic()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(stage.env))
    return (time.monotonic() - begin) * 1e3


def idle(stage: Stage) -> list[Row]:
    """Engines, today's launchers and bare interpreters side by side, with nothing to do: what they take. All of them in
    one stretch of time, for an idle second costs as much of ours as a busy one."""
    with contextlib.ExitStack() as stack:
        pids: dict[str, list[int]] = {"engine": [], "agent": [], _TODAY: [], _BARE: []}
        for _ in range(stage.runs):
            scene = stack.enter_context(stage.scene())
            every = {"ranks": f"0-{RANKS - 1}", "command": scene.rank(_SLEEP)}
            pids["engine"].append(scene.allocctl_run(scene.plan({"all": every}, coordinator={"rank": 0})).pid)
            pids["agent"] += map(_parent, scene.words(RANKS)[0].values())
            scene = stack.enter_context(stage.scene())
            pids[_TODAY].append(scene.polling(POLL, [scene.rank(_SLEEP)] * RANKS).pid)
            scene.words(RANKS)
            pids[_BARE].append(scene.start([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]).pid)
        everyone = [pid for some in pids.values() for pid in some]
        time.sleep(_SETTLE)
        before = [usage(pid) for pid in everyone]
        time.sleep(IDLE)
        used = {pid: usage(pid).since(early) for pid, early in zip(everyone, before, strict=True)}
    return [
        Row(
            f"{who}, idle: {what}",
            unit,
            [get(used[pid]) for pid in pids[who]],
            beside,
            [get(used[pid]) for pid in pids[beside]],
        )
        for who, beside in (("engine", _TODAY), ("agent", _BARE))
        for what, unit, get in _MEASURES
    ]


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: resident memory in bytes, processor time in seconds, and how often one of its
    threads gave the processor away, to be woken later."""

    memory: int
    processor: float
    wakeups: int

    def since(self, early: Usage) -> Usage:
        """The memory now, and what was used since then."""
        return Usage(self.memory, self.processor - early.processor, self.wakeups - early.wakeups)


def usage(pid: int) -> Usage:
    threads = [_status(path) for path in Path(f"/proc/{pid}/task").iterdir()]
    memory = int(threads[0]["VmRSS"].split()[0]) * 1024
    # The clock of another process's time: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED) of the kernel, exact where ticks
    # of 10 ms see nothing.
    processor = time.clock_gettime(~pid << 3 | 2)
    return Usage(memory, processor, sum(int(each["voluntary_ctxt_switches"]) for each in threads))


def _status(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in (path / "status").read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _parent(pid: int) -> int:
    return int(_status(Path(f"/proc/{pid}"))["PPid"])


_SLEEP = "exec sleep 1000"
_TODAY, _BARE = f"a loop over four processes, poll of {POLL:g} s", "a bare interpreter, asleep"
_MEASURES: tuple[tuple[str, str, Callable[[Usage], float]], ...] = (
    ("resident memory", "MB", lambda usage: usage.memory / 1e6),
    (f"processor time in {IDLE:g} s", "ms", lambda usage: usage.processor * 1e3),
    (f"wake-ups in {IDLE:g} s", "", lambda usage: usage.wakeups),
)
