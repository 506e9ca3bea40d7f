"""What a name means that allocd has given: one way for all verbs.

    someone answers      whoever answers on the socket knows it by its key, its job's id or a run's (`daemon.holder`)
    nobody answers       a key is looked for in the books of this host (`service/shelf.py`): true as of their last line

What is held is a job as a whole: a task of an array, or a component, that is named by itself is the disk's and Slurm's.

Most verbs work on what lies on the disk, and ask only about what the disk does not know: a key (`on_disk`). It stands
for the allocation's run, else for its job.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING, Any

from supervisor.runs.registry import JOURNAL, RUN_ID, NoSuchRun, refuse_ambiguous

if TYPE_CHECKING:
    from supervisor.cli.daemon import Daemon, Document


def may_be_held(args: argparse.Namespace, name: str | None) -> bool:
    """Whether allocd is to be asked about what is named: a run that is named by its directory is on the disk."""
    return bool(args.socket or (name and os.sep not in name))


def find_held(
    args: argparse.Namespace, name: str | None, *, parts: bool = False
) -> tuple[Daemon | None, Document] | None:
    """Who holds the allocation with that name, and how it is. Where nobody answers it is as its book tells: nobody, and
    a document whose `as_of` says when that was written. None where there is none, and for a part of its job unless
    `parts`. Raises Absent (a NoSuchRun) when one who was named does not answer, and Ambiguous."""
    if not may_be_held(args, name):
        return None
    if name and not args.socket:
        refuse_ambiguous(name)
    from supervisor.cli.daemon import holder

    if (found := holder(args, name)) is not None:
        return found if parts or not part_in(found[1], name) else None
    if args.socket or not _may_be_key(name):
        return None
    from supervisor.service.shelf import on_shelf

    told = on_shelf(os.environ, str(name))
    return (None, as_written(told)) if told else None


def part_in(held: Document, name: str | None) -> str | None:
    """The task or the component of an allocation's job that a name means, a run's id among them; None for the whole."""
    unit = (name or "").partition(".")[0]
    return unit if re.match(rf"{held['jobid']}[_+]\d", unit) and held["kind"] != "served" else None


def as_written(told: Any) -> Document:
    """An allocation that a book tells of, as a document."""
    from supervisor.service.documents import whole

    return {**whole(told), "as_of": told.changed}


def on_disk(args: argparse.Namespace, name: str | None, *, job: bool = False) -> str | None:
    """The name by which the disk knows what allocd's key means (see `disk_name`); any other name is left as it is.
    Raises NoSuchRun for an allocation that has neither run nor job."""
    if not (args.socket or _may_be_key(name)):
        return name
    found = find_held(args, name)
    if found is None or found[1]["key"] != name:
        return name
    return disk_name(found[1], job=job)


def disk_name(held: Document, *, job: bool = False) -> str:
    """The directory of an allocation's run where it is seen from here, else the job's id; `job`: the job, unless it is
    somebody else's. Raises NoSuchRun where there is neither."""
    if held["kind"] in ("adopted", "served"):
        name = held["run_dir"]
    else:
        cluster = f";{held['cluster']}" if job and held["cluster"] else ""
        name = (None if job else held_directory(held, held["key"])) or (held["jobid"] and f"{held['jobid']}{cluster}")
    if not name:
        raise no_job(held)
    return str(name)


def held_directory(held: Document | None, name: str | None) -> str | None:
    """The run directory that is meant where the whole allocation is named, if it is seen from here. Of an array each
    task has one, and none is the allocation's."""
    if held is None or name not in (held["key"], held["jobid"]) or f"{held['run_id']}".startswith(f"{held['jobid']}_"):
        return None
    directory: str | None = held["run_dir"]
    return directory if directory and os.path.exists(os.path.join(directory, JOURNAL)) else None


def no_job(held: Document) -> NoSuchRun:
    """That there is nothing to look at, and what can be done."""
    from supervisor.cli.daemon import names_of, standing

    if held["state"] == "ended":
        return NoSuchRun(f"{names_of(held)} never became a job: {standing(held)}{written(held)}")
    trouble = f"; {held['trouble']}" if held["trouble"] else ""
    return NoSuchRun(f"{names_of(held)} has no job yet: {standing(held)}{trouble}{written(held)}")


def written(held: Document) -> str:
    """Of an allocation as its book tells, that it is so; nothing of what changes no more."""
    if not held.get("as_of") or held["state"] == "ended":
        return ""
    from supervisor.cli.daemon import advice

    return f" (as of {held['as_of']}, when allocd wrote that; none answers here now: {advice()})"


def _may_be_key(name: str | None) -> bool:
    """Not what is a job's or run's id, or a path."""
    return bool(name and os.sep not in name and not name[0].isdecimal() and not RUN_ID.fullmatch(name))
