"""How a rank's step is made: the command line, its environment, and how it is ended from outside.

A launcher only describes; `process.py` makes the processes. With an agent the step's stdin and stdout are the control
channel; without one (`agent = "off"`) they are /dev/null and the rank's own log file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from supervisor.core.layout import AGENT, Layout
from supervisor.core.substitution import substitute

if TYPE_CHECKING:
    from supervisor.launch.process import StepProcess


@dataclass(frozen=True)
class StepCommand:
    """One process to start: argument list, whole environment, working directory (None: the engine's)."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None = None


class NoStep(Exception):
    """There is no step of that name: srun has not got it yet, or it has just ended."""


class Launcher(Protocol):
    """What the engine asks of a launcher. Nothing here blocks."""

    kind: str
    loses_early_signals: bool  # whether `signal` may succeed though the rank was not there yet to get it

    def step(self, layout: Layout, rank: int) -> StepCommand:
        """The process that runs the rank: under its agent, or directly where the plan says `agent = "off"`."""

    def sweep(self, layout: Layout, rank: int) -> StepCommand:
        """The process that looks on the rank's node for what the rank left behind, and kills it."""

    def fetch(self, layout: Layout, rank: int) -> StepCommand:
        """The process that copies files from the rank's node, as its standard input says."""

    async def signal(self, layout: Layout, rank: int, pid: int, signal: str) -> str | None:
        """Signal a rank that has no agent (`signal` without SIG; `pid` is the step's process). Returns what went
        wrong, or None. Raises NoStep."""

    def kill(self, process: StepProcess) -> None:
        """Kill a rank that has no agent."""


def interpreter(layout: Layout) -> str:
    """The agents' Python: the plan's, or the engine's own. A relative path is one from where the engine was started."""
    python = layout.plan.python or sys.executable
    return os.path.abspath(python) if os.sep in python else python


def agent_argv(layout: Layout, rank: int) -> tuple[str, ...]:
    """The agent's command line: isolated and without site, for it needs the standard library only and starts in half
    the time."""
    return (interpreter(layout), "-I", "-S", layout.at(AGENT), "run", layout.nonce, str(rank))


def rank_directory(layout: Layout, rank: int) -> str | None:
    """The working directory that the plan gives a rank, for one that is started without an agent."""
    directory = layout.plan.role_of(rank).cwd
    return None if directory is None else substitute(directory, layout.values(rank))


def sweep_argv(layout: Layout, rank: int) -> tuple[str, ...]:
    """The command line of a search for a rank's left-over processes."""
    return (interpreter(layout), "-I", "-S", layout.at(AGENT), "sweep", layout.tag(rank))


def fetch_argv(layout: Layout) -> tuple[str, ...]:
    """The command line that copies files from the node where it runs."""
    return (interpreter(layout), "-I", "-S", layout.at(AGENT), "fetch")
