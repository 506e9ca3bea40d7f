"""Where `allocctl run` runs its plan: on this machine, in the allocation that it is in, or in one that somebody else
made (`--jobid`)."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.core.allocation import Allocation
    from supervisor.core.plan import Plan
    from supervisor.engine.time_limit import EndTimeReader
    from supervisor.launch.base import Launcher
    from supervisor.scheduler.client import SlurmClient


@dataclass(frozen=True)
class Place:
    """Where the plan runs. `jobid` is the id of the job (or of the run alone); `notes` are sentences for the journal;
    `adopted`: steps are started from outside, in a job that somebody else made."""

    jobid: str
    attempt: str
    nodes: tuple[str, ...]
    launcher: Launcher
    clock: EndTimeReader | None = None
    notes: tuple[str, ...] = ()
    cluster: str = ""
    user: str = ""
    adopted: bool = False


def here(plan: Plan) -> Place:
    """This machine."""
    from supervisor.engine.prepare import local_attempt, local_nodes
    from supervisor.launch.local import LocalLauncher

    attempt = local_attempt()
    return Place(attempt, attempt, local_nodes(plan), LocalLauncher(), notes=_not_the_batch_process())


def in_slurm(plan: Plan, base: str) -> Place:
    """The allocation that we are in. Raises Unfit."""
    from supervisor.core.allocation import allocation_from
    from supervisor.engine.prepare import Unfit, slurm_nodes
    from supervisor.engine.time_limit import SlurmClock
    from supervisor.launch.srun import SrunLauncher
    from supervisor.scheduler.client import SlurmClient

    client = SlurmClient()
    try:
        allocation = allocation_from(os.environ)
    except ValueError as error:
        raise Unfit(f"{error}: unset SLURM_JOB_ID, or use --local") from error
    allocation, notes = _confirmed(allocation, client, base)
    launcher = SrunLauncher(client, allocation, _srun("SLURM_JOB_ID is set", "or use --local"))
    return Place(
        allocation.jobid,
        allocation.attempt,
        slurm_nodes(plan, allocation.nodes),
        launcher,
        SlurmClock(client, allocation.records),
        (*notes, *_not_the_batch_process()),
        os.environ.get("SLURM_CLUSTER_NAME", ""),
        os.environ.get("SLURM_JOB_USER", ""),
    )


def elsewhere(plan: Plan, jobid: str) -> Place:
    """An allocation that somebody else made, as Slurm tells of it. Raises Unfit."""
    from supervisor.core.allocation import environment_in
    from supervisor.engine.prepare import Unfit, slurm_nodes
    from supervisor.engine.time_limit import SlurmClock
    from supervisor.launch.srun import SrunLauncher
    from supervisor.scheduler.allocations import NoAllocation, find_allocation
    from supervisor.scheduler.client import SlurmClient

    client = SlurmClient()
    try:
        found = asyncio.run(find_allocation(client, jobid, os.getuid()))
    except NoAllocation as error:
        raise Unfit(str(error)) from error
    allocation = found.allocation
    srun = _srun("steps in another allocation need it", "or run it on a login node")
    launcher = SrunLauncher(client, allocation, srun, environment_in(allocation, os.environ))
    note = f"job {allocation.jobid} is somebody else's: its early signal does not come here, and EndTime alone counts"
    return Place(
        allocation.jobid,
        allocation.attempt,
        slurm_nodes(plan, allocation.nodes),
        launcher,
        SlurmClock(client, allocation.records),
        (note,),
        found.cluster,
        found.user,
        adopted=True,
    )


def _srun(why: str, instead: str) -> str:
    """The path of srun. Raises Unfit."""
    from supervisor.engine.prepare import Unfit

    srun = shutil.which("srun")
    if srun is None:
        raise Unfit(f"{why}, but there is no srun on PATH: add Slurm's bin directory, {instead}")
    return srun


def _confirmed(allocation: Allocation, client: SlurmClient, base: str) -> tuple[Allocation, tuple[str, ...]]:
    """The allocation as the controller knows it, asked only where the variables alone may mislead: a job that an
    array's task submitted inherits that task's name, and a run that is here already may be one of before a requeue of
    which SLURM_RESTART_COUNT, lost on the way, did not tell."""
    claims_task = "_" in allocation.jobid
    if not claims_task and not os.path.exists(os.path.join(base, allocation.attempt)):
        return allocation, ()
    answer = asyncio.run(client.show_job(allocation.records[0]))
    if answer.outcome == "failed":
        return allocation, (f"that this is job {allocation.attempt} was not confirmed: {answer.problem}",)
    if claims_task and (answer.record is None or answer.record.jobid != allocation.raw):
        text = f"SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID are another job's: this is {allocation.raw}"
        return replace(allocation, jobid=allocation.raw), (text,)
    if answer.record is None or answer.record.restarts is None:
        return allocation, ()
    return replace(allocation, restarts=answer.record.restarts), ()


def _not_the_batch_process() -> tuple[str, ...]:
    """Slurm's early signal reaches only the batch script's own process: say so when that is not us."""
    if os.environ.get("ENVIRONMENT") != "BATCH" or "SLURM_JOB_ID" not in os.environ:
        return ()
    try:
        with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as file:
            parent = file.read().strip()
    except OSError:
        return ()
    if parent.startswith("slurmstepd"):
        return ()
    text = (
        f"allocctl is a child of {parent!r}, not the batch script's own process: Slurm's signals to the script do not "
        "reach it. Start it with `exec allocctl run ...` as the script's last line"
    )
    return (text,)
