"""What to wait for: from a name that a person types to the ids that Slurm is asked about and the places to look at.

A job is known by its display id. What belongs to it is told by the record of its submission, where `allocctl submit`
made one; a job that somebody else submitted is looked for in the registry of runs, `$ALLOCD_RUNS` and `runs/` here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from supervisor.core.attempt import display_id
from supervisor.core.parts import Parts, parse_target
from supervisor.core.submission import Submission
from supervisor.runs.registry import Asked, NoSuchRun, find_run, job_in, registry, submission_of
from supervisor.runs.sealing import is_adopted_run, job_of


@dataclass(frozen=True, slots=True)
class Target:
    """A job, or a run that is followed by itself (`alone`): on this machine, or adopted, in somebody else's job.

    `units` are what is judged, each with the ids that Slurm is asked about: a job by itself, each task of an array by
    itself, a heterogeneous job by its components. `directories` are runs that are known already, `places` where others
    may appear. `asked` is how the job was submitted. `output` is the batch script's, `%A` and `%a` or `%j` in
    it. `start` is where the start of an adopted run's engine is kept (`runs/start.py`), if that is known.
    """

    jobid: str
    units: dict[str, tuple[str, ...]]
    cluster: str | None = None
    places: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    asked: Asked | None = None
    output: str | None = None
    start: str = ""

    @property
    def alone(self) -> bool:
        """Whether it is a run whose end is no job's."""
        return not self.units

    @property
    def adopted(self) -> bool:
        """Whether it is a run in somebody else's job."""
        return self.alone and self.jobid[0].isdecimal()

    @property
    def array(self) -> bool:
        """Whether it is a whole array."""
        return bool(self.units) and self.jobid not in self.units

    @property
    def shown(self) -> str:
        """The job (or the run) as `allocctl wait` takes it."""
        if self.alone:
            return os.path.basename(self.directories[0])
        return f"-M {self.cluster} {self.jobid}" if self.cluster else self.jobid

    def output_of(self, unit: str) -> str | None:
        """The file that a unit's batch script writes into."""
        if self.output is None:
            return None
        job, _, task = unit.partition("_")
        directory, name = os.path.split(self.output)
        return os.path.join(directory, name.replace("%A", job).replace("%a", task).replace("%j", job))

    def of_parts(self, parts: Parts) -> Target:
        """The same job, when it has turned out to have parts."""
        if parts.kind == "array":
            return replace(self, units={name: (name,) for name in parts.names})
        return replace(self, units={self.jobid: parts.names})


def find_target(name: str | None, cluster: str | None = None) -> Target:
    """What `name` means: a job's id, a run's id or a run directory (default: the job that we are in). Raises NoSuchRun,
    Unreadable."""
    wanted = name or display_id(os.environ)
    if not wanted:
        raise NoSuchRun("which job? Name its id")
    try:
        asked = parse_target(wanted)
    except ValueError:
        directory = find_run(wanted)
    else:
        target = job_target(asked.jobid, cluster or asked.cluster)
        if asked.tasks is not None:
            tasks = (f"{asked.jobid}_{task}" for task in asked.tasks)
            target = replace(target, units={task: (task,) for task in tasks})
        return target
    run = run_target(directory)
    return run if run.alone else job_target(run.jobid, cluster, directory)


def run_target(directory: str) -> Target:
    """One run, and the job that it is in, if it is known to be the job's own. Raises Unreadable."""
    jobid = job_of(directory)
    in_job = jobid[0].isdecimal() and is_adopted_run(directory) is False
    return Target(jobid, {jobid: (jobid,)} if in_job else {}, directories=(directory,))


def adopted_target(directory: str, jobid: str, start: str) -> Target:
    """A run that is known to be in somebody else's job, whether its directory can be read or not."""
    jobid = job_in(os.path.basename(directory)) or jobid
    return Target(jobid, {}, directories=(directory,), start=start)


def job_target(jobid: str, cluster: str | None = None, directory: str | None = None) -> Target:
    """A job by its display id; a run `directory` of it tells where others of its runs are."""
    beside = (os.path.dirname(directory),) if directory else ()
    usual = (registry(), *filter(None, [os.environ.get("ALLOCD_RUNS")]), "runs")
    submission = submission_of(jobid)
    if submission is None:
        return Target(jobid, {jobid: (jobid,)}, cluster, beside or usual)
    target = submitted_target(submission, jobid)
    places = tuple(dict.fromkeys((*target.places, *beside)))
    return replace(target, cluster=cluster or target.cluster, places=places)


def submitted_target(submission: Submission, jobid: str) -> Target:
    """A job that was submitted here, or a part of it (`123_4`)."""
    return Target(
        jobid,
        _units(jobid, submission),
        submission.cluster,
        (submission.base,),
        asked=Asked(submission.asked_at, submission.plan),
        output=submission.output,
    )


def _units(jobid: str, submission: Submission) -> dict[str, tuple[str, ...]]:
    if jobid == submission.jobid and submission.tasks is not None:
        return {f"{jobid}_{task}": (f"{jobid}_{task}",) for task in submission.tasks}
    if jobid == submission.jobid and submission.components is not None:
        return {jobid: tuple(f"{jobid}+{number}" for number in range(submission.components))}
    return {jobid: (jobid,)}
