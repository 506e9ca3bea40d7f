"""What a run leaves in its directory, as tests of real runs read it, with Slurm (tests/slurm) or not (tests/faults)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class RunFiles:
    """The files of one run."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        raise NotImplementedError

    def file(self, name: str) -> str | None:
        """The content of a file in the run directory; None when it is not there."""
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else None

    def lines(self) -> list[Event]:
        """Every complete line of the journal, events and commands, as it is now."""
        data = (self.directory / "journal.jsonl").read_bytes()
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]

    def events(self, name: str, **wanted: Any) -> list[Event]:
        """The events of a kind so far (or the commands: their names differ) whose fields are as wanted."""
        return [
            line
            for line in self.lines()
            if name in (line.get("event"), line.get("command"))
            and all(line.get(key) == value for key, value in wanted.items())
        ]

    def receipt(self, name: str = "receipt.run.json") -> Event:
        """The run's receipt: what the engine saw; or the sealed one (`receipt.json`)."""
        document: Event = json.loads((self.directory / name).read_text())
        return document
