"""Judges of documents for the tests of what reads large files; they run in a process without any library."""

from __future__ import annotations

import os
import signal
from typing import Any

from supervisor.contracts.content import Judged


def hang(_: Any, options: dict[str, Any]) -> Judged:
    """Write one's process id into the FIFO `options["begun"]`, and come to no end."""
    with open(options["begun"], "w") as file:
        file.write(str(os.getpid()))
    signal.pause()
    return Judged()
