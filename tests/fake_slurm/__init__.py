"""A Slurm of commands that answer from a file: a thousand jobs, and daemons that are away, without a cluster.

slurm = FakeSlurm(tmp_path / "slurm", history=[(0, "PENDING"), (2, "RUNNING"), (9, "FAILED", "7:0")])
env = {**os.environ, "PATH": slurm.path}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fake_slurm import commands

Moments = Sequence[tuple[float, str] | tuple[float, str, str]]
"""A history: seconds from the submission, the state from then on, the exit code as Slurm writes it."""

COMMON = {
    "reason": "None",
    "name": "sbatch",
    "user": "root",
    "uid": 0,
    "nodes": "node1",
    "limit": 10,  # minutes
    "script": "(null)",
    "cwd": "/",
    "line": "sbatch",
}
"""What jobs are that are put there, unless it is said."""


class FakeSlurm:
    """One cluster, below a directory. `history`: what becomes of the jobs that are submitted; with `real` they run
    their scripts on this machine instead."""

    def __init__(
        self, directory: Path, *, history: Moments = ((0, "RUNNING"),), real: bool = False, memory: float = 300.0
    ) -> None:
        """`memory`: seconds for which the controller knows a job that has ended."""
        self.directory = directory
        bin_directory = directory / "bin"
        bin_directory.mkdir(parents=True)
        program = bin_directory / "fake"
        program.write_text(f"#!{sys.executable} -IS\n{Path(commands.__file__).read_text()}")
        program.chmod(0o755)
        for name in commands.COMMANDS:
            (bin_directory / name).symlink_to("fake")
        self.path = f"{bin_directory}:{os.environ['PATH']}"
        self._cluster = commands.Cluster(str(directory))
        state = {
            "cluster": "c1",
            "next": 101,
            "jobs": {},
            "history": _moments([(0, "PENDING")] if real else history),
            "real": real,
            "memory": memory,
            "lag": 0.1,
            "now": None,
            "epoch": time.time() - time.monotonic(),
            "controller_away": [],
            "accounting_away": [],
            "cancelled": [],
        }
        (directory / "state.json").write_text(json.dumps(state))

    def state(self) -> dict[str, Any]:
        """The whole cluster, as it is now."""
        return self._cluster.read()

    def set(self, **values: Any) -> None:
        """Change what the cluster is."""
        with self._cluster.changed() as state:
            state.update(values)

    def become(self, history: Moments) -> None:
        """What becomes of the jobs that are submitted from now on."""
        self.set(history=_moments(history))

    def put(self, jobid: str, history: Moments, **values: Any) -> None:
        """A job that is there, with a history in epoch seconds."""
        self.put_all([(jobid, history)], **values)

    def put_all(self, jobs: Iterable[tuple[str, Moments]], **values: Any) -> None:
        """Many at once."""
        with self._cluster.changed() as state:
            for jobid, history in jobs:
                own = {"submit": int(history[0][0]), "moments": _moments(history), "steps": {}, "pids": []}
                state["jobs"][jobid] = COMMON | {"raw": jobid} | own | values

    def end(self, jobid: str, word: str, code: str = "0:0") -> None:
        """A job ends now."""
        with self._cluster.changed() as state:
            state["jobs"][jobid]["moments"].append([commands.clock(state), word, code])

    def away(self, *, controller: float = 0.0, accounting: float = 0.0) -> None:
        """slurmctld, slurmdbd are away for so many seconds from now."""
        now = commands.clock(self.state())
        self.set(controller_away=[[now, now + controller]], accounting_away=[[now, now + accounting]])

    def close(self) -> None:
        """End what its jobs still run."""
        for job in self.state()["jobs"].values():
            for pid in [*job["pids"], *(step["pid"] for step in job["steps"].values() if step["end"] is None)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _moments(history: Moments) -> list[list[Any]]:
    return [[*moment, "0:0"][:3] for moment in history]
