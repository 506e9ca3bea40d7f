"""A real daemon in a process of its own, and talking to it over its socket."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.service.held import PLAN

ALLOCD: Final = [sys.executable, "-m", "supervisor.service.main"]
LIMIT: Final = 60.0


class Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("allocd", timeout=LIMIT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(LIMIT)
        self.sock.connect(self._path)


@dataclass
class Host:
    """A login node."""

    top: Path
    environ: dict[str, str]
    socket: Path
    process: subprocess.Popen[str] | None = None
    words: tuple[str, ...] = ()  # how a command is run there

    def start(self, *words: str) -> None:
        """Start it; returns when it answers."""
        self.process = subprocess.Popen(
            [*self.words, *ALLOCD, *words], env=self.environ, stderr=subprocess.PIPE, text=True, cwd=self.top
        )
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            try:
                if self.ask("GET", "/v1/health")["pid"] == self.process.pid:
                    return
            except OSError:
                assert self.process.poll() is None, self.process.communicate()[1]
                time.sleep(0.01)
        raise AssertionError("it does not answer")

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send it a signal; its exit code, and what it said."""
        assert self.process is not None
        self.process.send_signal(number)
        said = self.process.communicate(timeout=LIMIT)[1]
        process, self.process = self.process, None
        return process.returncode, said

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        connection = Connection(str(self.socket))
        try:
            data = None if body is None else json.dumps(body)
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, {**kind, **headers})
            answer = connection.getresponse()
            return json.loads(answer.read())
        finally:
            connection.close()

    def submit(self, key: str, plan: str = PLAN, allocctl: str = "/nodes/allocctl") -> str:
        """Submit a plan with an idempotency key. Returns the allocation's key."""
        return self.accept("allocations", {"plan": plan, "allocctl": allocctl}, key)

    def accept(self, what: str, request: dict[str, Any], key: str) -> str:
        """Let something be accepted."""
        more = {"cwd": str(self.top), "directory": str(self.top / "base"), "environ": self.variables}
        answer = self.ask("POST", f"/v1/{what}", {**request, **more}, **{"Idempotency-Key": key})
        assert "key" in answer, answer
        return str(answer["key"])

    @property
    def variables(self) -> dict[str, str]:
        """What a client sends of its environment."""
        return {name: self.environ[name] for name in ("PATH", "SLURM_CONF", "XDG_STATE_HOME") if name in self.environ}

    def get(self, name: str) -> dict[str, Any]:
        """One allocation."""
        found: dict[str, Any] = self.ask("GET", f"/v1/allocations/{name}")
        return found

    def until(self, name: str, *states: str) -> dict[str, Any]:
        """Wait for one of the states."""
        deadline = time.monotonic() + LIMIT
        while (found := self.get(name))["state"] not in states:
            assert time.monotonic() < deadline, f"it does not become {states}: {found}"
            time.sleep(0.02)
        return found

    def until_all_ended(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            found: list[dict[str, Any]] = self.ask("GET", "/v1/allocations")["allocations"]
            if len(found) == count and all(each["state"] == "ended" for each in found):
                return found
            time.sleep(0.05)
        raise AssertionError(f"not ended: {found}")
