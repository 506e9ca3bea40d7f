"""What the agent costs: `python -m tests.bench.agent_bench [ROUNDS] [PYTHON]`. Medians and 90 % quantiles, in ms.

hello    from the agent's exec to its first line
started  from the start command to the line that says that exec has succeeded
ended    from the end of the rank's main process to the line that tells it
stop     from the stop command to the `ended` of a rank that has no handler
gone     from `ended` to `gone`: the look for leftovers, and the logs on the disk
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from supervisor.agent.build import agent_archive

NONCE = "bench"


class Run:
    """One agent with its rank; `times` holds milliseconds by name."""

    def __init__(self, archive: Path, python: str, root: Path) -> None:
        self.times: dict[str, float] = {}
        begin = time.perf_counter()
        argv = [python, "-I", "-S", str(archive), "run", NONCE, "0"]
        self.agent = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.expect("hello", begin)
        self.root = root

    def say(self, command: str, **fields: Any) -> float:
        assert self.agent.stdin is not None
        self.agent.stdin.write(json.dumps({"n": NONCE, "c": command, **fields}).encode() + b"\n")
        return time.perf_counter()

    def expect(self, name: str, begin: float, as_name: str | None = None) -> dict[str, Any]:
        assert self.agent.stdout is not None
        event: dict[str, Any] = json.loads(self.agent.stdout.readline())
        if event["e"] != name:
            raise RuntimeError(f"expected {name}, got {event}")
        self.times[as_name or name] = (time.perf_counter() - begin) * 1e3
        return event

    def start(self, argv: list[str]) -> int:
        logs = {"out": str(self.root / "out"), "err": str(self.root / "err")}
        self.say("spec", part=json.dumps({"argv": argv, "tag": f"bench-{os.getpid()}", **logs}), more=False)
        return int(self.expect("started", self.say("start"))["pid"])

    def finish(self, ended_at: float) -> None:
        self.expect("gone", ended_at)
        memory = Path(f"/proc/{self.agent.pid}/status").read_text().split("VmHWM:")[1]
        self.times["kB"] = float(memory.split()[0])
        self.say("bye", exit=0)
        assert self.agent.stdin is not None
        assert self.agent.stdout is not None
        self.agent.stdin.close()
        self.agent.stdout.close()
        self.agent.wait()


def killed(run: Run) -> None:
    """The rank's death is as sudden as it gets: KILL from outside, so that its moment is known."""
    pid = run.start(["sleep", "60"])
    begin = time.perf_counter()
    os.kill(pid, 9)
    run.expect("ended", begin)
    run.finish(time.perf_counter())


def stopped(run: Run) -> None:
    run.start(["sleep", "60"])
    run.expect("ended", run.say("stop", signal=15, grace=10, exit=0), as_name="stop")
    run.finish(time.perf_counter())


def main(rounds: int, python: str) -> None:
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        archive = Path(name) / "agent.pyz"
        begin = time.perf_counter()
        archive.write_bytes(agent_archive())
        print(f"archive built in {(time.perf_counter() - begin) * 1e3:.1f} ms, {archive.stat().st_size} bytes")
        for at in range(rounds):
            run = Run(archive, python, Path(name))
            (killed, stopped)[at % 2](run)
            for key, value in run.times.items():
                times.setdefault(key, []).append(value)
    for key, values in times.items():
        middle, high = statistics.median(values), statistics.quantiles(values, n=10)[-1]
        print(f"{key:8} median {middle:9.2f}   p90 {high:9.2f}   n={len(values)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, sys.argv[2] if len(sys.argv) > 2 else sys.executable)
