"""Where a bench plays: a directory, an environment, runs of allocctl in it, and ranks whose every move is known.

Ranks are shells that say who they are on one fifo (`talk`) as soon as they run, and wait on another (`gate`) for leave
to end. All moments are CLOCK_MONOTONIC in this process: deaths by pidfds, words by the fifo, names by inotify.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supervisor.watch.inotify import Inotify
from tests.slurm.jobs import toml

ALLOCCTL = str(Path(sys.executable).with_name("allocctl"))
POLLING = str(Path(__file__).with_name("polling.py"))
LIMIT = 60.0  # seconds for anything to happen; past it the bench is broken, and says so
RANKS = 4
_FOREIGN = ("SLURM", "ALLOCD", "SBATCH", "ENVIRONMENT", "PYTHON")


class BenchError(Exception):
    """What was to be measured did not happen."""


def environment(directory: Path, *others: Mapping[str, str]) -> dict[str, str]:
    """This environment without what allocations, runs and Python's own settings put into it (PYTHONDONTWRITEBYTECODE
    would have everything compiled at each start), and with a state directory of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    for other in others:
        env |= {name: value for name, value in other.items() if not name.startswith("PYTHON")}
    return {**env, "XDG_STATE_HOME": str(directory / "state")}


@dataclass
class Stage:
    """A directory to work in, the environment to start things in, and how often to measure. In an allocation `srun` is
    the beginning of a command line that starts a step in it."""

    directory: Path
    runs: int
    env: Mapping[str, str]
    srun: tuple[str, ...] = ()
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def place(self) -> Path:
        """A new directory."""
        path = self.directory / str(next(self.numbers))
        path.mkdir()
        return path

    @contextlib.contextmanager
    def scene(self) -> Iterator[Scene]:
        """A new scene, swept clean at its end."""
        scene = Scene(self, self.place())
        try:
            yield scene
        finally:
            scene.close()


class Scene:
    """One sample's play: its fifos, and the processes started for it."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self.directory = directory
        self._stage = stage
        self._processes: list[subprocess.Popen[bytes]] = []
        self._talk, self._gate = (self._fifo(name) for name in ("talk", "gate"))
        self._heard = b""
        self.log = directory / "log"

    def _fifo(self, name: str) -> int:
        os.mkfifo(self.directory / name)
        # Open at both ends: neither side ever waits for the other, or sees an end.
        return os.open(self.directory / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    # what ranks do

    def rank(self, last: str, who: str = "") -> list[str]:
        """A rank's command: it says its pid and `who` (shell words), then does `last`."""
        return ["sh", "-c", f'echo "$$ {who}" >{shlex.quote(str(self.directory / "talk"))}; {last}']

    def wait_for_leave(self, code: int = 0) -> str:
        """Shell: wait to be let go, then end with `code`."""
        return f"read line <{shlex.quote(str(self.directory / 'gate'))}; exit {code}"

    def let_go(self, count: int = 1) -> float:
        """Let that many ranks end. Returns when."""
        os.write(self._gate, b"\n" * count)
        return time.monotonic()

    # starting things

    def plan(self, roles: Mapping[str, Any], **tables: Any) -> Path:
        """A plan for four nodes; commands are taken literally."""
        literal = {
            name: {**role, "command": [word.replace("{", "{{").replace("}", "}}") for word in role["command"]]}
            for name, role in roles.items()
        }
        data = {"job": {"name": "bench", "nodes": RANKS}, "roles": literal, **tables}
        path = self.directory / "plan.toml"
        path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in data.items()))
        return path

    def allocctl_run(self, plan: Path) -> subprocess.Popen[bytes]:
        """Start a run of the plan; its directory is `self.run_dir` once a rank has said its first word."""
        return self.start([ALLOCCTL, "run", "--dir", str(self.directory / "runs"), str(plan)])

    @property
    def run_dir(self) -> Path:
        (path,) = (self.directory / "runs").iterdir()
        return path

    def polling(self, period: float, commands: Iterable[Sequence[str]]) -> subprocess.Popen[bytes]:
        """Start today's launcher; see polling.py."""
        return self.start([sys.executable, POLLING, f"{period:g}", *(json.dumps(list(each)) for each in commands)])

    def srun(self, *words: str) -> list[str]:
        """The command line of a step in the allocation."""
        return [*self._stage.srun, *words]

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process, its output in the scene's log."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=dict(self._stage.env),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    # seeing things

    def words(self, count: int) -> tuple[dict[str, int], float]:
        """What that many ranks said first, {who: pid}, and when the first of them spoke. BenchError after the limit."""
        deadline, first = time.monotonic() + LIMIT, 0.0
        while self._heard.count(b"\n") < count:
            if select.select([self._talk], [], [], 0.5)[0]:
                first = first or time.monotonic()
                self._heard += os.read(self._talk, 4096)
            elif time.monotonic() > deadline or all(each.poll() is not None for each in self._processes):
                raise BenchError(f"only {self._heard!r} was heard of {count} ranks{self}")
        lines = [line.split(maxsplit=1) for line in self._heard.decode().splitlines()]
        self._heard = b""
        return {who[0] if who else str(index): int(pid) for index, (pid, *who) in enumerate(lines)}, first

    def finish(self, process: subprocess.Popen[bytes], *codes: int) -> None:
        """Wait for a process that has to end with one of these codes."""
        try:
            found = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise BenchError(f"{process.args!r} has not ended within {LIMIT:g} s{self}") from None
        if found not in codes:
            raise BenchError(f"{process.args!r} ended with {found}, expected {codes}{self}")

    def __str__(self) -> str:
        return f"; in the log:\n{self.log.read_text(errors='replace')[-3000:] if self.log.exists() else ''}"

    def close(self) -> None:
        """End what still runs: in order, for an engine takes its ranks with it. Today's launchers leave theirs behind:
        each process leads a group of its own, and what is left of that is killed."""
        for process in self._processes:
            with process:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                    process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        os.close(self._talk)
        os.close(self._gate)


@contextlib.contextmanager
def deaths(pids: Iterable[int], names: Path | None = None) -> Iterator[Witness]:
    """A witness of the ends of processes, and of names that appear in a directory."""
    with contextlib.ExitStack() as stack:
        held: dict[int, int] = {}
        for pid in pids:
            held[descriptor := os.pidfd_open(pid)] = pid
            stack.callback(os.close, descriptor)
        inotify = None
        if names is not None:
            inotify = stack.enter_context(Inotify())
            inotify.add(names)
        yield Witness(held, inotify)


def see_first() -> None:
    """Let this process run before others whenever it has something to see, where that is allowed: on a busy machine the
    stamps would tell when the witness had its turn. What it starts is scheduled as usual."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


class Witness:
    """Stamps what it sees, in seconds: `ended` by pid, `appeared` by name."""

    def __init__(self, held: dict[int, int], inotify: Inotify | None) -> None:
        self.ended: dict[int, float] = {}
        self.appeared: dict[str, float] = {}
        self._held = held
        self._inotify = inotify
        self._poll = select.poll()
        for descriptor in held:
            self._poll.register(descriptor, select.POLLIN)
        if inotify is not None:
            self._poll.register(inotify.fileno(), select.POLLIN)

    def watch(self, *pids: int) -> Witness:
        """Look until these processes have ended. BenchError after the limit."""
        deadline = time.monotonic() + LIMIT
        while not self.ended.keys() >= set(pids):
            ready = self._poll.poll((deadline - time.monotonic()) * 1e3)
            now = time.monotonic()
            if not ready:
                raise BenchError(f"{sorted(set(pids) - self.ended.keys())} did not end within {LIMIT:g} s")
            for descriptor, _ in ready:
                if descriptor in self._held:
                    self.ended[self._held[descriptor]] = now
                    self._poll.unregister(descriptor)
                elif self._inotify is not None:
                    for event in self._inotify.events():
                        self.appeared.setdefault(event.name, now)
        return self
