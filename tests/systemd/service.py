"""allocctl service, and the daemon that it makes, in the session of a user manager."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from supervisor.cli.asking import ask
from supervisor.core import codes
from tests.systemd.manager import LIMIT, Manager

SERVICE, SOCKET = "allocd.service", "allocd.socket"
PLAN = """\
[job]
name = "kept"
nodes = 1
[roles.all]
ranks = "0"
command = ["true"]
[coordinator]
rank = 0
[slurm]
"""


class Service:
    """allocctl service, in the session of a manager."""

    def __init__(self, systemd: Manager) -> None:
        self.systemd = systemd
        self.path = str(systemd.runtime / "allocd/ctl.sock")

    def do(self, *words: str, code: int = codes.OK, environ: Mapping[str, str] = MappingProxyType({})) -> str:
        """What the verb says, on stdout and stderr. It must end with this code."""
        done = self.systemd.run(sys.executable, "-m", "supervisor.cli.main", "service", *words, **environ)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}{self.systemd.tail()}"
        return done.stdout + done.stderr

    def health(self) -> dict[str, Any]:
        document: dict[str, Any] = ask(self.path, "GET", "/v1/health")
        return document

    def pid(self) -> int:
        return int(self.systemd.show(SERVICE, "MainPID"))

    def drop_in(self, text: str, unit: str = SERVICE) -> None:
        """More of a unit's, as `systemctl --user edit` would write it; before its next start."""
        directory = self.systemd.units / f"{unit}.d"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "test.conf").write_text(text)
        self.systemd.ask("daemon-reload")

    def wait_for_another(self, pid: int) -> int:
        """Until another process is the daemon, and answers. Its pid."""
        deadline = time.monotonic() + LIMIT
        while self.pid() in (0, pid):
            assert time.monotonic() < deadline, self.systemd.tail()
            time.sleep(0.02)
        assert self.health()["pid"] == self.pid()
        return self.pid()

    def accept(self) -> dict[str, Any]:
        """An allocation that is in the books: Slurm has refused it, and it stays told of."""
        body = {"plan": PLAN, "cwd": str(self.systemd.home), "directory": str(self.systemd.home / "runs")}
        found: dict[str, Any] = ask(self.path, "POST", "/v1/allocations", body)
        deadline = time.monotonic() + LIMIT
        while found["state"] != "ended":
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
            found = ask(self.path, "GET", f"/v1/allocations/{found['key']}")
        return found

    def kept(self) -> list[str]:
        return [each["key"] for each in ask(self.path, "GET", "/v1/allocations")["allocations"]]
