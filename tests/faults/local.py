"""Runs on this machine, without Slurm: the real `allocctl` program, real agents, real ranks.

    def test_something(local: Local) -> None:
        run = local.run(local.plan({"worker": role("0,1", SERVE), "client": role(2, sh("exit 7"))}, coordinator=2))
        assert run.code == 7
        assert run.first("RankEnded", rank=2)["code"] == 7

`start` is for a run that something happens to: signals, a full disk, an engine that is killed. Nothing here sleeps
for luck: what is waited for is asked for every few milliseconds, up to a deadline. Whatever a run leaves behind is
ended when the test is over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from supervisor.engine.journal import read_journal
from tests.run_files import Event, RunFiles
from tests.slurm.jobs import LIMIT, UP, alive, await_files, py, role, sh, toml, touch, until

__all__ = [
    "ALLOCCTL",
    "CHILD",
    "LIMIT",
    "SERVE",
    "STUBBORN",
    "UP",
    "Done",
    "Event",
    "Local",
    "Run",
    "alive",
    "await_files",
    "py",
    "role",
    "sh",
    "toml",
    "touch",
    "until",
]

ALLOCCTL: Final = str(Path(sys.executable).with_name("allocctl"))
CHILD: Final = 'sleep 1000 & until read -r name <"/proc/$!/comm" && [ "$name" = sleep ]; do :; done'
"""Shell: a child that is really there. A signal that comes between its fork and its exec is lost."""

SERVE: Final = sh(f"trap '{touch('ended')}; exit 0' TERM; {CHILD}; {UP}; wait")
"""A worker as it should be: says `up`, and on TERM says `ended` and exits 0."""

STUBBORN: Final = sh(f"trap '' TERM INT HUP; {UP}; while :; do sleep 1000; done")
"""A rank that does not go when it is told to."""

Done = subprocess.CompletedProcess[str]


@dataclass
class Run(RunFiles):
    """One `allocctl run`. `base` has what it printed, `place` its run directory, as the test sees it."""

    base: Path
    place: Path
    process: subprocess.Popen[bytes]
    _found: list[Path] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The run directory; waits for the first line of the journal in it."""
        if not self._found:
            self._found = until(self._opened, f"a run in {self.place}{self}")
        return self._found[0]

    def _opened(self) -> list[Path]:
        journals = self.place.glob("*/journal.jsonl")
        return [path.parent for path in journals if b"\n" in path.read_bytes()]

    def wait_file(self, *names: str) -> None:
        """Wait for files in the run directory."""
        until(lambda: all((self.directory / name).exists() for name in names), f"{', '.join(names)}{self}")

    def log(self, rank: int, kind: str) -> Path:
        """The path of a rank's log."""
        (path,) = self.directory.glob(f"logs/rank-{rank}.*.{kind}")
        return path

    # the journal

    def first(self, name: str, **wanted: Any) -> Event:
        """The first such event or command, waited for."""
        return until(lambda: self.events(name, **wanted), f"{name} {wanted or ''}{self}")[0]

    # the end

    def signal(self, number: signal.Signals) -> None:
        """Signal the engine."""
        self.process.send_signal(number)

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"allocctl run has not ended within {limit:g} s{self}") from None

    @property
    def code(self) -> int:
        """The exit code, once it has ended."""
        return self.wait()

    @property
    def stdout(self) -> str:
        return (self.base / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.base / "stderr").read_text(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line on stderr: the verdict."""
        return self.stderr.splitlines()[-1]

    def is_whole(self) -> bool:
        """Whether the journal reads to its end without damage, and the fold of it is the story of an ended run."""
        journal = read_journal(self.directory / "journal.jsonl")
        return journal.damage is None and not journal.tail

    # what is left

    def processes(self) -> list[int]:
        """Every living process of this run, by command line or environment. Not the engine."""
        mark = os.fsencode(f"/{self.directory.name}/")
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdecimal() or int(entry) in (os.getpid(), self.process.pid):
                continue
            with contextlib.suppress(OSError):
                words = Path("/proc", entry, "cmdline").read_bytes()
                if mark in words or mark in Path("/proc", entry, "environ").read_bytes():
                    found.append(int(entry))
        return [pid for pid in found if alive(pid)]

    def wait_gone(self, limit: float = LIMIT) -> None:
        """Wait until no process of this run is left."""
        until(lambda: not self.processes(), f"the end of {self.processes()}{self}", limit)

    def close(self) -> None:
        """End what a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT)
        if self._found or self._opened():
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def __str__(self) -> str:
        """For messages of failed waits: what is known of the run."""
        journals = "".join(path.read_text()[-3000:] for path in self.place.glob("*/journal.jsonl"))
        return f"\n--- stderr:\n{self.stderr[-3000:]}\n--- the end of the journal:\n{journals}"


@dataclass
class Local:
    """What one test runs; everything of it lies in `directory`. Made by the fixture `local`."""

    directory: Path
    runs: list[Run] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def env(self) -> dict[str, str]:
        """As outside of any job, with Python as it usually is, and the registry of runs in the test's own directory."""
        strange = ("SLURM", "ALLOCD", "PYTHON")
        ours = {name: text for name, text in os.environ.items() if not name.startswith(strange)}
        return {**ours, "XDG_STATE_HOME": str(self.directory / "state")}

    def plan(
        self, roles: Mapping[str, Event], *, coordinator: int | None = None, nodes: int = 3, **tables: Any
    ) -> Path:
        """Write a plan; further tables by their names: `deadlines={"run": 3}`."""
        data = {"job": {"name": "scenario", "nodes": nodes}, "roles": roles, **tables}
        if coordinator is not None:
            data["coordinator"] = {"rank": coordinator}
        return self.write("".join(f"{key} = {toml(value)}\n" for key, value in data.items()))

    def write(self, text: str | bytes) -> Path:
        """A plan as it stands."""
        path = self.directory / f"plan-{next(self._numbers)}.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def base(self) -> Path:
        """A directory for one run."""
        path = self.directory / f"runs-{next(self._numbers)}"
        path.mkdir()
        return path

    def start(
        self,
        plan: Path,
        *options: str,
        base: Path | None = None,
        place: Path | None = None,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Run:
        """Start `allocctl run`; `before` is put in front of it. `place` is where the test finds the run directory, if
        that is not in `base`."""
        base = base or self.base()
        with (base / "stdout").open("wb") as out, (base / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [*before, ALLOCCTL, "run", "--dir", str(base), *options, str(plan)],
                env={**self.env, **(env or {})},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.runs.append(Run(base, place or base, process))
        return self.runs[-1]

    def run(self, plan: Path, *options: str, **more: Any) -> Run:
        """Start it and wait for its end. Nothing of it may be left then."""
        run = self.start(plan, *options, **more)
        run.wait()
        assert "Traceback" not in run.stderr, run.stderr
        if run._opened():
            assert run.processes() == [], run
        return run

    def allocctl(self, *arguments: str, timeout: float = LIMIT, **more: Any) -> Done:
        """Another verb, as a person types it."""
        options: dict[str, Any] = {"env": self.env, "cwd": self.directory, "stdin": subprocess.DEVNULL, **more}
        return subprocess.run(
            [ALLOCCTL, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout, **options
        )

    def __enter__(self) -> Local:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self.runs:
            run.close()
