"""Ranks on this machine: every "node" is an agent (or the command itself) in a process group of its own."""

from __future__ import annotations

import os
import signal as signals

from supervisor.core.layout import Layout
from supervisor.launch.base import StepCommand, agent_argv, fetch_argv, rank_directory, sweep_argv
from supervisor.launch.process import StepProcess


class LocalLauncher:
    """The launcher where there is no Slurm: the same plan can be tried anywhere."""

    kind = "local"
    loses_early_signals = False

    def __init__(self) -> None:
        self._environment = dict(os.environ)

    def step(self, layout: Layout, rank: int) -> StepCommand:
        """The agent as our child, or the rank's own command."""
        if layout.plan.role_of(rank).agent == "on":
            return StepCommand(agent_argv(layout, rank), self._environment)
        env = {**self._environment, **layout.rank_environment(rank)}
        return StepCommand(tuple(layout.rank_command(rank)), env, rank_directory(layout, rank))

    def sweep(self, layout: Layout, rank: int) -> StepCommand:
        """The search on this machine."""
        return StepCommand(sweep_argv(layout, rank), self._environment)

    def fetch(self, layout: Layout, rank: int) -> StepCommand:
        """The copying on this machine."""
        return StepCommand(fetch_argv(layout), self._environment)

    async def signal(self, layout: Layout, rank: int, pid: int, signal: str) -> str | None:
        """Signal the rank's process group."""
        try:
            os.killpg(pid, signals.Signals[f"SIG{signal}"])
        except ProcessLookupError:
            return None
        except OSError as error:
            return str(error)
        return None

    def kill(self, process: StepProcess) -> None:
        """KILL to the rank's process group, now."""
        process.kill()
