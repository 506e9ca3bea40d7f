"""Whether a job is still the one that was submitted here. Ids come again; the path of the batch script does not, and
Slurm keeps it with the job. So it is looked up before anything is done to a job that would harm another's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from supervisor.core.settling import ids_in_queue, squeue_commands_argv
from supervisor.core.slurm import parse_job_id
from supervisor.scheduler.client import Printed

GONE: Final = "Slurm's queue has no job of yours with that id and this script any more: it is over"


class Asked(Protocol):
    """Who is asked."""

    async def run(self, argv: Sequence[str]) -> Printed:
        """Run one of Slurm's commands."""


async def strangers(client: Asked, jobs: Collection[str], script: str, cluster: str | None = None) -> dict[str, str]:
    """Those of these jobs (tasks, components) that nothing may be done to, each with a sentence that says why: they are
    not known to run the batch script at this path."""
    printed = await client.run(squeue_commands_argv(cluster))
    if printed.returncode != 0:
        why = printed.trouble or f"squeue ended with {printed.returncode}: {printed.stderr.strip()[-300:]}"
        return dict.fromkeys(jobs, why)
    ours = ids_in_queue(printed.stdout, script)
    return {job: GONE for job in jobs if str(parse_job_id(job).job) not in ours}
