"""The id of a job and of its attempt, as Slurm's variables tell them. Pure, and light: quick verbs need it.

The same rules are in supervisor/agent/marker.sh; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

NUMBER: Final = re.compile(r"[0-9]{1,18}")


def array_task(environ: Mapping[str, str]) -> str | None:
    """The array's task that the variables claim this to be (`123_4`), or None.

    A job that was submitted by such a task inherits the claim. It is none if the controller's record of that task has
    another raw id than SLURM_JOB_ID; the variables alone do not tell.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if NUMBER.fullmatch(array) and NUMBER.fullmatch(task) else None


def display_id(environ: Mapping[str, str]) -> str | None:
    """The id by which a job is called everywhere here: `123`, an array's task `123_4`, a heterogeneous job by its
    leader. None outside of any job.

    The raw id would not do: the last task of an array has the array's own.
    """
    raw = environ.get("SLURM_JOB_ID")
    return (array_task(environ) or raw) if raw else None


def attempt_id(jobid: str, restarts: str) -> str:
    """The id of a job's attempt: `JOBID`, then `JOBID.rN` after N requeues."""
    return jobid if restarts in ("", "0") else f"{jobid}.r{restarts}"
