"""A holder with real books and a written-down Slurm: what is submitted becomes a job with a history.

site = Site(tmp_path)
async with site.holder() as holder:
    held = await holder.submit(site.request(), None)
    await site.until(holder, held.key, "ended")
"""

from __future__ import annotations

import asyncio
import getpass
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.settling import Patience
from supervisor.core.submission import SCRIPT
from supervisor.scheduler.client import Printed
from supervisor.scheduler.inquiry import Pace
from supervisor.scheduler.poller import Poller
from supervisor.scheduler.submit import Stop, Submitter
from supervisor.service.book import Book, put
from supervisor.service.found import Line
from supervisor.service.holder import Holder
from supervisor.service.interface import Allocation, SubmitRequest
from supervisor.service.place import StateDirectory
from supervisor.service.settings import Settings
from supervisor.service.world import Cluster, World
from tests.scripted_slurm import Moment
from tests.unit.test_wait import Scripted

PLAN = """
[job]
name = "bench"
nodes = 1
[roles.all]
ranks = "0"
command = ["x"]
[coordinator]
rank = 0
[slurm]
"""
QUICK = Patience(pause=0.01, absence=0.03, looks=3, limit=30)
PACE = Pace(patience=30.0, outage=300.0)


class Slurm(Scripted):
    """The scripted one, which takes submissions as well: `history` is what becomes of the next jobs, arrays of so many
    `tasks` where there are some, `sbatch` what sbatch does instead of answering. It outlives every daemon."""

    def __init__(self) -> None:
        super().__init__({})
        self.user, self.epoch = getpass.getuser(), int(time.time())
        self.history: list[tuple[float, str, str]] = [
            (0, "PENDING", "0:0"),
            (20, "RUNNING", "0:0"),
            (60, "FAILED", "7:0"),
        ]
        self.scripts: dict[str, str] = {}
        self.submitted = self.tasks = 0
        self.sbatch: Callable[[str], Any] | None = None
        self.terminated: list[str] = []
        self.refuses_signal: dict[str, str] = {}  # by the job's id

    def make(self, script: str) -> str:
        """A job that runs the script."""
        self.submitted += 1
        jobid = str(100 + self.submitted)
        for name in [f"{jobid}_{task}" for task in range(self.tasks)] or [jobid]:
            self.jobs[name] = [Moment(self.now + at, state, code) for at, state, code in self.history]
        self.scripts[jobid] = script
        return jobid

    async def run(self, argv: Sequence[str]) -> Printed:
        """sbatch, and squeue and sacct as they are asked for scripts."""
        if argv[0] == "sbatch":
            if self.sbatch is not None:
                printed: Printed = await self.sbatch(argv[-1])
                return printed
            return Printed(0, self.make(argv[-1]) + "\n")
        if argv[0] == "squeue":
            return Printed(0, "".join(f"{jobid}|{script}\n" for jobid, script in self.scripts.items()))
        return Printed(1, "", "no accounting")

    async def signal_batch(self, jobid: str, signame: str) -> str:
        self.terminated.append(jobid)
        return self.refuses_signal.get(jobid, "")

    async def cancel_job(self, jobid: str) -> str:
        if jobid not in self.jobs:  # a whole array
            before = list(self.cancelled)
            troubles = [await self.cancel_job(name) for name in self.jobs if name.startswith(f"{jobid}_")]
            self.cancelled = [*before, jobid]
            return troubles[0]
        if self.jobs[jobid] and (last := self.state(jobid, self.now)) and last.over:
            return ""
        self.jobs[jobid] = [moment for moment in self.jobs[jobid] if moment.at <= self.now]
        return await super().cancel_job(jobid)

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        return {}

    async def signal_step(self, step: str, signame: str) -> bool:
        raise AssertionError("no step is to be signalled")

    async def cancel_step(self, step: str) -> bool:
        raise AssertionError("no step is to be ended")


class Scene(World):
    """The world of one daemon."""

    def __init__(self, slurm: Slurm, settings: Settings) -> None:
        super().__init__(settings)
        self.slurm = slurm

    def make_cluster(self, name: str) -> Cluster:
        slurm = self.slurm
        return Cluster(slurm, Poller(slurm, pace=PACE, clock=lambda: slurm.now, sleep=slurm.sleep))

    def submitter(self, environ: Any, stop: Stop, cwd: str = "/") -> Submitter:
        return Submitter(self.slurm, self.slurm, stop, patience=QUICK, last_chance=0.2)


@dataclass
class Site:
    """A login node. What is in here outlives its daemons."""

    top: Path
    slurm: Slurm = field(default_factory=Slurm)
    settings: Settings = field(default_factory=lambda: Settings(patience=0.0))
    seen: list[str] = field(default_factory=list)  # every event's line, of all daemons

    def __post_init__(self) -> None:
        (self.top / "bin").mkdir(exist_ok=True)
        (self.top / "bin" / "sbatch").touch(mode=0o755)

    @property
    def state(self) -> Path:
        return self.top / "state" / "held"

    def request(self, plan: str = PLAN, **more: Any) -> SubmitRequest:
        environ = {"PATH": f"{self.top}/bin", "SECRET": "sesame"}
        return SubmitRequest(plan, str(self.top), directory="base", allocctl="/nodes/allocctl", environ=environ, **more)

    @asynccontextmanager
    async def holder(self, write: Callable[[int, bytes], None] = put, **more: Any) -> AsyncIterator[Holder]:
        """A daemon's heart, from its start to its graceful end. What kills the books is raised."""
        directory = StateDirectory(str(self.state))
        try:
            holders: list[Holder] = []

            def told(line: Line) -> None:
                self.seen.append(f"{line.seq} {line.key} {line.event.name}")
                holders[0].on_disk(line)

            book = Book(directory.descriptor, told=told, put=write, retry=0.01)
            try:
                holder = Holder(book, Scene(self.slurm, self.settings), **more)
                holders.append(holder)
                holder.restore(book.replay())
                book.start()
                async with asyncio.TaskGroup() as group:
                    running = group.create_task(holder.run())
                    try:
                        await asyncio.sleep(0)
                        yield holder
                    finally:
                        holder.leave()
                        await asyncio.wait([running])
            finally:
                await book.close(5.0)
        finally:
            directory.close()

    async def until(self, holder: Holder, name: str, *states: str) -> Allocation:
        """Wait for one of the states."""
        async with asyncio.timeout(20):
            generator = holder.events(None)
            while (found := holder.find(name)).state not in states:
                await anext(generator)
            await generator.aclose()
        return found

    @property
    def submissions(self) -> list[Path]:
        return sorted(path.parent for path in (self.top / "base").glob(f"submit-*/{SCRIPT}"))


def site_in(top: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """One whose user has nothing set, and works in a directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(top / "registry"))
    for name in ("ALLOCD_RUNS", "GITHUB_WORKSPACE", "GITHUB_ACTIONS", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    (top / "work").mkdir()
    monkeypatch.chdir(top / "work")
    return Site(top)
