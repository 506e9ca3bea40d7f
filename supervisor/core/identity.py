"""Is this the same job? Slurm's ids come again, and a record that was found by its id alone may tell of a stranger.

What is known of a job besides its id is `Known`: from the record of its submission (when it was asked for, by whom,
under which name), from the opening of its run (the cluster, the user, when). A record is compared with it:

* The **cluster** and the **user** must be the same where both are known.
* The **time of submission** must fit. A record from before we asked for the job tells of an earlier job: ours is not in
  the books yet, and nothing may be concluded for it. A record from long after is of a later job, unless this one was
  started anew: a requeue gives a new time of submission.
  By whose clock? By Slurm's, where the controller has shown the job with the script of our submission, whose path no
  other job has; else by that of the machine that submitted, which may have been wrong.
* The **script** that the controller shows must be that of the submission: a job that runs another one is another job,
  however well the times fit. (sbatch may have told a wrong id.)
* The **run** must have been opened while the job of the record lived.
* The **name** decides nothing: users rename jobs. A difference is told.

Clocks differ, so every time has `SLACK`; ids come again after weeks, so that is little. Nodes tell nothing: both books
were seen with a shrunken list while a job's nodes were given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final

from supervisor.core.slurm_records import JobRecord

SLACK: Final = 3600.0
"""Seconds by which what is known may lie outside of the record's times."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a job besides its id; "" and None where nothing is. Times are seconds since the epoch, `script`
    is the path of a submission's batch script."""

    cluster: str = ""
    user: str = ""
    name: str = ""
    asked: float | None = None
    answered: float | None = None
    opened: float | None = None
    script: str = ""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Known:
        """Read again what `dataclasses.asdict` gave. Raises `ValueError` for data of another shape."""
        if not isinstance(data, Mapping):
            raise ValueError(f"not what is known of a job: {data!r}")
        cluster, user, name, script = (data.get(key) or "" for key in ("cluster", "user", "name", "script"))
        asked, answered, opened = (data.get(key) for key in ("asked", "answered", "opened"))
        texts = all(isinstance(text, str) for text in (cluster, user, name, script))
        if not texts or not all(type(at) in (int, float, NoneType) for at in (asked, answered, opened)):
            raise ValueError(f"not what is known of a job: {dict(data)!r}")
        return Known(cluster, user, name, asked, answered, opened, script)


NOTHING: Final = Known()


@dataclass(frozen=True, slots=True)
class Stranger:
    """Why a record is of another job with the same id. `earlier`: not of one that got the id after ours, so
    that nothing may be concluded: ours is not in the books yet, or has another id."""

    why: str
    earlier: bool = False


def by_slurms_clock(known: Known, records: Iterable[JobRecord]) -> Known:
    """The same, with the time at which our job was submitted as Slurm tells it, if one of the records shows our script.
    After a requeue that is the time of the latest one."""
    times = [record.submit for record in records if known.script and record.command == known.script]
    told = [at for at in times if at is not None]
    return replace(known, asked=min(told), answered=max(told)) if told else known


def runs_another_script(known: Known, records: Iterable[JobRecord]) -> Stranger | None:
    """Why the job of these records is not the one that we know: it runs another batch script."""
    shown = [record.command for record in records if record.command]
    if not known.script or not shown or known.script in shown:
        return None
    return Stranger(f"it runs {shown[-1]}, and what was submitted is {known.script}", earlier=True)


def not_of_this_job(record: JobRecord, known: Known, *, requeued: bool = False) -> Stranger | None:
    """Why the record is not of the job that we know; None: it may well be. `requeued`: the job was started anew."""
    submit = record.submit
    if submit is not None and known.asked is not None and submit < known.asked - SLACK:
        return Stranger("the job of the record was submitted before this one was asked for", earlier=True)
    if known.cluster and record.cluster and known.cluster != record.cluster:
        return Stranger(f"it was on cluster {known.cluster}, the record is of {record.cluster}")
    if known.user and record.user and known.user != record.user:
        return Stranger(f"it was of user {known.user}, the record is of {record.user}")
    if submit is not None and known.answered is not None and submit > known.answered + SLACK and not requeued:
        return Stranger("the job of the record was submitted long after it")
    if known.opened is not None and record.start is not None and known.opened < record.start - SLACK:
        return Stranger("it was opened before the job of the record began")
    if known.opened is not None and record.end is not None and known.opened > record.end + SLACK:
        return Stranger("it was opened after the job of the record had ended")
    return None


def renamed(record: JobRecord, known: Known) -> str | None:
    """A sentence when the job bears another name than the one under which it was submitted."""
    if not known.name or not record.name or record.name == known.name:
        return None
    return f"the job was submitted as {known.name!r}, and Slurm calls it {record.name!r}: names can be changed"
