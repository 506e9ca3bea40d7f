"""Ranks as Slurm steps: one srun per node, with every option given that a site's defaults or an inherited variable
could change.

Why each option is there (measured on Slurm 22.05):

* `--overlap`: without it a step that starts right after another on the same node waits about 1.9 s; `--mem=0` and
  `--cpu-bind=none` give the rank the node's share of the job instead of one core of it.
* `--input=all --output=all`: stdin and stdout of the single task are the control channel, whatever SLURM_STDOUTMODE or
  the site says. Never `--unbuffered`, which makes the task's stdout a terminal, nor `--label`.
* `--kill-on-bad-exit=0 --wait=0`: what a failure means is the engine's decision.
* `--job-name`: unique in the allocation. It is the only handle by which a run finds its own steps.
* `--jobid`: the raw id, for srun takes no other. `--het-group`: the component of a heterogeneous job that has the node;
  why its steps are looked for, and told by the agent, under another id than `--jobid` is said in `core/allocation.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from supervisor.core.allocation import Allocation, Component
from supervisor.core.layout import Layout
from supervisor.core.slurm import step_environment
from supervisor.launch.base import NoStep, StepCommand, agent_argv, fetch_argv, rank_directory, sweep_argv
from supervisor.launch.process import StepProcess
from supervisor.scheduler.client import SlurmClient


class SrunLauncher:
    """The launcher inside an allocation."""

    kind = "slurm"
    loses_early_signals = True

    def __init__(
        self,
        client: SlurmClient,
        allocation: Allocation,
        srun: str = "srun",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._client = client
        self._allocation = allocation
        self._srun = srun
        self._environment = step_environment(os.environ if environ is None else environ)

    def step(self, layout: Layout, rank: int) -> StepCommand:
        """srun of the agent, or of the rank's own command."""
        role = layout.plan.role_of(rank)
        if role.agent == "on":
            command = agent_argv(layout, rank)
            env = {**self._environment, "ALLOCD_STEP_JOB": self._owner(layout, rank).jobid}
            return StepCommand((*self._options(layout, rank), *layout.srun_options(rank), *command), env)
        env = {**self._environment, **layout.rank_environment(rank)}
        directory = rank_directory(layout, rank)
        where = () if directory is None else (f"--chdir={directory}",)  # on the node: it need not exist here
        options = (*self._options(layout, rank, stdin="none"), *where, *layout.srun_options(rank))
        return StepCommand((*options, *layout.rank_command(rank)), env)

    def sweep(self, layout: Layout, rank: int) -> StepCommand:
        """The search on the rank's node, as a short step of its own."""
        command = sweep_argv(layout, rank)
        return StepCommand((*self._options(layout, rank, name="sweep-", stdin="none"), *command), self._environment)

    def fetch(self, layout: Layout, rank: int) -> StepCommand:
        """The copying on the rank's node, as a short step of its own."""
        return StepCommand((*self._options(layout, rank, name="fetch-"), *fetch_argv(layout)), self._environment)

    async def signal(self, layout: Layout, rank: int, pid: int, signal: str) -> str | None:
        """`scancel --signal` of the step, found by its name: a signal to srun would kill the task without a word."""
        owner = self._owner(layout, rank).jobid if self._allocation.heterogeneous else layout.jobid
        steps = await self._client.steps_by_name(owner)
        if steps is None:
            return "Slurm did not say which steps run"
        step = steps.get(layout.step_name(rank))
        if step is None:
            raise NoStep(layout.step_name(rank))
        return None if await self._client.signal_step(step, signal) else f"scancel --signal={signal} {step} failed"

    def kill(self, process: StepProcess) -> None:
        """TERM to srun, at which Slurm kills the task; srun itself is killed only if it does not end then."""
        process.terminate()

    def _owner(self, layout: Layout, rank: int) -> Component:
        """The job to which Slurm counts the rank's step."""
        node = layout.nodes[rank]
        return next(component for component in self._allocation.components if node in component.nodes)

    def _options(self, layout: Layout, rank: int, name: str = "", stdin: str = "all") -> tuple[str, ...]:
        components = self._allocation.components
        group = components.index(self._owner(layout, rank))
        return (
            self._srun,
            f"--jobid={self._allocation.raw}",
            *([f"--het-group={group}"] if self._allocation.heterogeneous else []),
            f"--job-name={name}{layout.step_name(rank)}",
            f"--nodelist={layout.nodes[rank]}",
            "--nodes=1",
            "--ntasks=1",
            "--overlap",
            "--mem=0",
            "--cpu-bind=none",
            f"--input={stdin}",
            "--output=all",
            "--error=all",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--export=ALL",
        )
