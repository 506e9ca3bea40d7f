"""Ranks that wait, at no cost, until the test lets them go."""

from __future__ import annotations

import os
from pathlib import Path

from tests.slurm.jobs import UP, sh


class Gate:
    """A pipe at which a rank waits until it is let go; before that is right, too."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        # Open at both ends: neither side ever waits for the other, or sees an end.
        self._pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def then(self, last: str) -> list[str]:
        """A rank's command: it says that it is up, waits, and does `last` (shell)."""
        return sh(f"{UP}; read line <{self._path}; {last}")

    def open(self) -> None:
        """Let one rank go."""
        os.write(self._pipe, b"\n")

    def close(self) -> None:
        """It is not needed any more."""
        os.close(self._pipe)
