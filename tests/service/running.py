"""A daemon for real, a process of its own, before the Slurm of tests/fake_slurm.

with Running(tmp_path, slurm) as daemon:
    held = daemon.submit()
    daemon.until(held["key"], "ended")
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from supervisor.cli.asking import NobodyAnswers, ask, lines
from tests.fake_slurm import FakeSlurm

ALLOCCTL = str(Path(sys.executable).with_name("allocctl"))
LIMIT = 60.0  # seconds for anything to happen
ENDED_WITHIN = 120.0  # seconds for a graceful end
PLAN = """\
[job]
name = "bench"
nodes = {nodes}
[roles.server]
ranks = "0-{last}"
command = ["sleep", "1000"]
[slurm]
"""
_FOREIGN = ("SLURM", "ALLOCD", "SBATCH", "PYTHON", "NOTIFY", "WATCHDOG", "LISTEN")

T = TypeVar("T")


def plan(nodes: int = 1) -> str:
    """A plan of one rank a node; rank 0 coordinates."""
    return PLAN.format(nodes=nodes, last=nodes - 1) + "[coordinator]\nrank = 0\n"


def until(seen: Callable[[], T | None], what: object, limit: float = LIMIT) -> T:
    """What a look sees, as soon as it sees something."""
    deadline = time.monotonic() + limit
    while not (found := seen()):
        assert time.monotonic() < deadline, f"not seen within {limit:g} s: {what}"
        time.sleep(0.02)
    return found


class Running:
    """One daemon below `top`. A second one of the same `top` goes on where the first has ended. `state`: where it has
    its books; `settings` are flags, `env` more variables, `start` what Python is told to run."""

    def __init__(
        self,
        top: Path,
        slurm: FakeSlurm,
        *settings: str,
        state: Path | None = None,
        env: Mapping[str, str] | None = None,
        start: Sequence[str] = ("-m", "supervisor.service.main"),
    ) -> None:
        self.top, self.log = top, top / "allocd.log"
        self._words = [sys.executable, *start, "--log-format=json", *settings]
        self._runtime = tempfile.TemporaryDirectory(prefix="allocd-")  # sockets want short paths
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        own = {"PATH": slurm.path, "XDG_STATE_HOME": str(top / "registry"), "XDG_CONFIG_HOME": str(top / "config")}
        where = {"STATE_DIRECTORY": str(state or top / "state"), "RUNTIME_DIRECTORY": self._runtime.name}
        self.env = {**kept, **own, **where, "HOME": str(top), **(env or {})}
        self.path = f"{self._runtime.name}/ctl.sock"
        self.base = top / "runs"
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        for directory in (Path(self.env["STATE_DIRECTORY"]), self.base):
            directory.mkdir(mode=0o700, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            until(self._answers, f"an answer of the daemon{self}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}{self}"
        try:
            self.health()
        except NobodyAnswers:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.process:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(ENDED_WITHIN)
            finally:
                self.process.kill()
        self._runtime.cleanup()
        assert kind or self.process.returncode == 0, f"the daemon ended with {self.process.returncode}{self}"

    def __str__(self) -> str:
        return f"; in its log:\n{self.log.read_text(errors='replace')[-3000:]}"

    # --- asking -------------------------------------------------------------------------------------------------------

    def ask(self, method: str, target: str, body: Any = None, **headers: str) -> Any:
        """The document that answers. Raises Refused, NobodyAnswers."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(self.path, method, target, body, limit=LIMIT, headers=given)

    def submit(self, text: str = "", **headers: str) -> dict[str, Any]:
        """Have a plan submitted."""
        body = {"plan": text or plan(), "cwd": str(self.top), "directory": str(self.base), "allocctl": ALLOCCTL}
        found: dict[str, Any] = self.ask("POST", "/v1/allocations", body, **headers)
        return found

    def show(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/allocations/{name}")
        return found

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/v1/health")
        return found

    def until(self, name: str, state: str, limit: float = LIMIT) -> dict[str, Any]:
        """An allocation in that state."""

        def seen() -> dict[str, Any] | None:
            found = self.show(name)
            return found if found["state"] == state else None

        return until(seen, f"{name} is {state}{self}", limit)

    def counted(self, state: str) -> int:
        """How many allocations are in a state."""
        return int(self.health()["allocations"].get(state, 0))

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """The events that are kept, up to now."""
        found: list[dict[str, Any]] = []
        last = self.last_event()
        if last <= after:
            return []
        with closing(lines(self.path, f"/v1/events?after={after}", LIMIT)) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    found.append(json.loads(line.removeprefix(b"data: ")))
                    if found[-1]["seq"] >= last:
                        return found
        raise AssertionError("the stream ended before the last event")

    def last_event(self) -> int:
        """The number of the last line in the books."""
        books = Path(self.env["STATE_DIRECTORY"]).glob("allocations/*/journal.jsonl")
        whole: Iterator[bytes] = (line for book in books for line in book.read_bytes().splitlines(keepends=True))
        return max((json.loads(line)["seq"] for line in whole if line.endswith(b"\n")), default=0)
