"""Engines of adopted allocations without processes: each claims its start, opens a run, and lives for as long as it
holds its two descriptors, as `service/adopting.py` looks at them. They outlive every daemon.

engines = Engines(site, monkeypatch)
async with site.holder() as holder:
    held = await holder.adopt(engines.request("bench"), None)
"""

from __future__ import annotations

import itertools
import os
import socket
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.core import events as ev
from supervisor.engine import receipts
from supervisor.runs import start as starts
from supervisor.runs.saved import fold_document
from supervisor.service import adopting
from supervisor.service.interface import AdoptRequest
from supervisor.service.life import utc_now
from tests.scripted_slurm import Moment
from tests.service.held import PLAN, Site, Slurm
from tests.unit.test_follow import append, line, opening

JOB = "7"


class Slurm7(Slurm):
    """With the steps of the job; `silent` times it does not say which there are."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs[JOB] = [Moment(0.0, "RUNNING")]
        self.steps: dict[str, str] = {}
        self.silent = 0

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        self.silent -= 1
        return dict(self.steps) if self.silent < 0 else None

    async def signal_step(self, step: str, signame: str) -> bool:
        self.steps = {name: known for name, known in self.steps.items() if known != step}
        return True


class Engine:
    """One that has claimed its start. Raises Claimed."""

    def __init__(self, place: str, base: Path, name: str, plan: str, slurm: Slurm7, number: int) -> None:
        self.name, self.slurm, self._step = name, slurm, f"{JOB}.{number}"
        self._held = [starts.claim(place)]
        self._place, self._plan = place, plan
        self.run_dir = base / f"{JOB}.s{number}"

    def open(self) -> Engine:
        """Open the run, with one step."""
        (self.run_dir / "logs").mkdir(parents=True)
        self._held.append(os.open(self.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.step = f"allocd-{self.run_dir.name}-r0"
        opened = replace(
            opening(self.run_dir.name, JOB, str(self.run_dir)),
            nodes=["a"],
            host=socket.gethostname(),
            pid=os.getpid(),
            plan={**tomllib.loads(self._plan), "slurm": {}},
            adopted=True,
            steps=self.step.removesuffix("r0"),
        )
        self._lines = 0
        self._tell(opened)
        self.slurm.steps[self.step] = self._step
        starts.announce(self._place, str(self.run_dir))
        return self

    def _tell(self, event: ev.Event) -> None:
        self._lines += 1
        text = line(self._lines, event).replace(b"1970-01-01T00:16:41Z", utc_now().encode())
        append(self.run_dir / "journal.jsonl", text)

    @property
    def lives(self) -> bool:
        return bool(self._held)

    def stop(self) -> None:
        """It is told to end in order."""
        self._tell(ev.StopRequested("TERM"))
        self.slurm.steps.pop(self.step, None)
        receipts.write_run_receipt(self.run_dir, fold_document(str(self.run_dir)))
        self.die()

    def die(self) -> None:
        """Killed: its step is left."""
        while self._held:
            os.close(self._held.pop())


class Engines:
    """All of them. `broken` and `quick` are names that mean what they say; those in `slow` come into being when a test
    says so, by `claim`."""

    def __init__(self, slurm: Slurm7, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm, self.base = slurm, base
        self.all: list[Engine] = []
        self.slow: Collection[str] = ()
        self.asked: Counter[str] = Counter()
        self._spawned: dict[str, tuple[str, str]] = {}
        self._numbers = itertools.count(1)
        base.mkdir()
        for name in ("GRACE", "GONE_LIMIT", "STEP_PAUSE", "LOOK_PAUSE"):
            monkeypatch.setattr(adopting, name, 0.01)
        monkeypatch.setattr(adopting, "ends_at_logout", lambda: None)
        monkeypatch.setattr(adopting, "spawn", self._spawn)
        monkeypatch.setattr(adopting, "stop", self._stop)

    def request(self, name: str) -> AdoptRequest:
        return AdoptRequest(PLAN.replace("bench", name), JOB, str(self.base), str(self.base), {"SECRET": "sesame"})

    def _spawn(self, argv: list[str], *, environ: Mapping[str, str], **_: Any) -> str:
        plan = Path(argv[-1]).read_text()
        name = tomllib.loads(plan)["job"]["name"]
        self._spawned[name] = (environ[starts.VARIABLE], plan)
        self.asked[name] += 1
        if name not in self.slow:
            engine = self.claim(name)
            if name == "broken":  # it ends before it has a run
                engine.die()
                return ""
            engine.open()
            if name == "quick":  # it has ended when somebody looks
                engine.stop()
        return ""

    def claim(self, name: str) -> Engine:
        """One that was spawned claims its start. Raises Claimed."""
        place, plan = self._spawned[name]
        engine = Engine(place, self.base, name, plan, self.slurm, next(self._numbers))
        self.all.append(engine)
        return engine

    def of(self, name: str) -> Engine:
        """The one engine of that plan."""
        (engine,) = [engine for engine in self.all if engine.name == name]
        return engine

    def _stop(self, run_dir: str, _place: str) -> bool:
        (engine,) = [engine for engine in self.all if str(engine.run_dir) == run_dir]
        if engine.lives:
            engine.stop()
            return True
        return False


def at(top: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Engines]:
    """A login node of which a job is known, with its engines."""
    monkeypatch.setenv("XDG_STATE_HOME", str(top / "registry"))
    monkeypatch.setattr("supervisor.runs.rounds.PAUSE", (0.01, 0.0, 0.0))
    slurm = Slurm7()
    site = Site(top, slurm=slurm)
    return site, Engines(slurm, top / "runs", monkeypatch)
