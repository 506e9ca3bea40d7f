"""Which allocation a process is in, as Slurm's variables tell it. Pure.

An allocation has several names, and Slurm's programs do not all take the same one (measured on Slurm 22.05):

* The **raw id** is SLURM_JOB_ID. srun takes no other, and accounting names steps by it. It says little to people: the
  last task of an array has the array's own id, so that `scontrol show job` and `squeue --steps` of it print every task.
* The **display id** is what everything else here uses: `123`, an array's task `123_4`, a heterogeneous job by its
  leader `123`.
* Each **component** of a heterogeneous job is a job with a raw id of its own. A step on component K is made in the
  leader's name (`srun --jobid=LEADER --het-group=K`), and inside it SLURM_JOB_ID is the leader's, too; but squeue,
  scancel and accounting know the step under the component's raw id. The controller is asked for component K as
  `LEADER+K`: the leader's id alone prints them all.

A script inherits the variables of the allocation from which it was submitted, where Slurm does not set them anew: a
plain job that an array's task submitted still has SLURM_ARRAY_JOB_ID. The variables of a heterogeneous job hold its raw
ids, by which a stranger's are told; of an array's only the controller can tell (see `attempt.array_task`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.core.attempt import NUMBER, attempt_id, display_id
from supervisor.core.slurm import HOW_TO_REACH, compress_hostlist, expand_hostlist

MAX_COMPONENTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the allocation that Slurm counts as a job: its raw id, and its nodes in Slurm's order."""

    jobid: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """`jobid` is the display id, `raw` SLURM_JOB_ID. There is one component, or those of a heterogeneous job in their
    order. `restarts` is how often the job has been requeued."""

    jobid: str
    raw: str
    restarts: int
    components: tuple[Component, ...]

    @property
    def heterogeneous(self) -> bool:
        """Whether the components are jobs of their own."""
        return len(self.components) > 1

    @property
    def attempt(self) -> str:
        """The id of the first run in this incarnation of the job."""
        return attempt_id(self.jobid, str(self.restarts))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all components, in their order."""
        return tuple(node for component in self.components for node in component.nodes)

    @property
    def records(self) -> tuple[str, ...]:
        """The ids by which the controller knows each component's record."""
        if not self.heterogeneous:
            return (self.jobid,)
        return tuple(f"{self.jobid}+{number}" for number in range(len(self.components)))


def allocation_from(environ: Mapping[str, str]) -> Allocation:
    """The allocation that the variables describe. Raises ValueError, with a sentence, when they describe none."""
    raw = environ.get("SLURM_JOB_ID", "")
    restarts = environ.get("SLURM_RESTART_COUNT") or "0"
    if not NUMBER.fullmatch(restarts):
        raise ValueError(f"SLURM_RESTART_COUNT cannot be read: expected a number, found {restarts!r}")
    components = tuple(Component(jobid, _nodes(environ, name)) for jobid, name in _parts(environ, raw))
    if not NUMBER.fullmatch(raw) or not all(component.nodes for component in components):
        raise ValueError("SLURM_JOB_ID is set, but this is no allocation (no SLURM_JOB_NODELIST)")
    return Allocation(display_id(environ) or raw, raw, int(restarts), components)


def _parts(environ: Mapping[str, str], raw: str) -> list[tuple[str, str]]:
    """The raw id of each component, and the variable that lists its nodes."""
    size = environ.get("SLURM_HET_SIZE", "")
    ours = environ.get("SLURM_JOB_ID_HET_GROUP_0") == raw  # else they are those of the job that submitted this one
    if not ours or not NUMBER.fullmatch(size) or not 1 < int(size) <= MAX_COMPONENTS:
        return [(raw, "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST")]
    ids = [environ.get(f"SLURM_JOB_ID_HET_GROUP_{number}", "") for number in range(int(size))]
    if not all(map(NUMBER.fullmatch, ids)):
        raise ValueError(f"SLURM_HET_SIZE is {size}, but not every SLURM_JOB_ID_HET_GROUP_N is a job's id")
    return [(jobid, f"SLURM_JOB_NODELIST_HET_GROUP_{number}") for number, jobid in enumerate(ids)]


def _nodes(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return expand_hostlist(environ.get(name, ""))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def variables_of(allocation: Allocation) -> dict[str, str]:
    """The variables by which `allocation_from`, srun and the ranks know an allocation, as Slurm sets them inside it."""
    nodes = [compress_hostlist(component.nodes) for component in allocation.components]
    found = {"SLURM_JOB_ID": allocation.raw, "SLURM_JOBID": allocation.raw, "SLURM_JOB_NODELIST": nodes[0]}
    array, _, task = allocation.jobid.partition("_")
    if task:
        found |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task}
    if allocation.restarts:
        found["SLURM_RESTART_COUNT"] = str(allocation.restarts)
    if allocation.heterogeneous:
        found["SLURM_HET_SIZE"] = str(len(nodes))
        for number, component in enumerate(allocation.components):
            found[f"SLURM_JOB_ID_HET_GROUP_{number}"] = component.jobid
            found[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"] = nodes[number]
    return found


def environment_in(allocation: Allocation, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun of somebody who is outside of the allocation, and may be in another one: the variables
    without any of Slurm's but those that tell how to reach the cluster, and this allocation's."""
    ours = {name: text for name, text in environ.items() if not name.startswith("SLURM_") or name in HOW_TO_REACH}
    return ours | variables_of(allocation)
