"""Finding runs: by id, by path, or the one of this allocation. Light: quick verbs use it.

A run is known by its directory. Where that is, is remembered in `$XDG_STATE_HOME/allocd/runs/ID`, a symbolic link made
when the run is opened; without one, `ID` is looked for in `$ALLOCD_RUNS` and in `runs/` here. Runs of one job in
several directories may have the same plain id: `ID` is the one that was opened last, and `ID@...`, a link for each,
keeps them all. An id of a further run, `ID.sM`, belongs to whoever has made its link first (`take`), so that no two
runs have it; where that could not be, the id is ambiguous, and means none of them. A job that was submitted by
`allocctl submit` has a link `$XDG_STATE_HOME/allocd/jobs/JOBID` to the directory of its submission.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from supervisor.core.text import printable

if TYPE_CHECKING:
    from supervisor.core.submission import Submission

JOURNAL = "journal.jsonl"
RUN_ID = re.compile(r"(?P<job>\d+(?:[_+]\d+)?|local-[\w-]+)(?:\.r\d+)?(?P<further>\.s\d+)?")


class NoSuchRun(Exception):
    """There is no such run here; the message says where it was looked for."""


class Ambiguous(NoSuchRun):
    """Several runs have this id; the message names their directories."""


class Asked(NamedTuple):
    """When a job was asked for, in epoch seconds by the clock of that machine, and the plan's copy that it runs."""

    at: float
    plan: str


def registry() -> str:
    """The directory of the links to run directories."""
    return os.path.join(state_home(os.environ), "allocd", "runs")


def state_home(environ: Mapping[str, str]) -> str:
    """Where the user wants to have the state of programs. A path that does not begin at the root does not count (XDG
    Base Directory Specification)."""
    given = environ.get("XDG_STATE_HOME") or ""
    if os.path.isabs(given):
        return given
    return os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local", "state")


def submission_of(jobid: str) -> Submission | None:
    """The record of the submission of a job, or of the job that it is a part of; None when there is none that can be
    read: it only adds to what Slurm says."""
    from supervisor.scheduler.record import read_record

    whole = re.split("[_+]", jobid)[0]
    try:
        submission = read_record(os.path.join(os.path.dirname(registry()), "jobs", whole))
    except (OSError, ValueError):
        return None
    return submission if (submission.state, submission.jobid) == ("submitted", whole) else None


def job_receipt(jobid: str) -> str | None:
    """Where the receipt of a job that left no run is kept: in the directory of its submission."""
    submission = submission_of(jobid)
    return os.path.join(os.path.dirname(submission.script), f"receipt-{jobid}.json") if submission else None


def take(run_id: str, run_dir: str) -> bool:
    """Take the id for this run alone, in whatever directories runs are made and on whatever host that shares the
    registry. False when another one has, or had, it. Best effort as below: what cannot be told is no refusal."""
    with suppress(OSError):
        os.makedirs(registry(), mode=0o700, exist_ok=True)
    try:
        os.symlink(run_dir, os.path.join(registry(), run_id))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def give_back(run_id: str, run_dir: str) -> None:
    """Let go of an id that was taken for a run which was not opened after all."""
    link = os.path.join(registry(), run_id)
    with suppress(OSError):
        if os.readlink(link) == run_dir:
            os.unlink(link)


def register(run_id: str, run_dir: str) -> None:
    """Remember where a run is. Best effort: a run does not fail because a home directory is full."""
    for name in (run_id, f"{run_id}@{zlib.crc32(os.fsencode(run_dir)):08x}"):
        _link(registry(), name, run_dir)


def register_job(jobid: str, directory: str) -> None:
    """Remember where a job's submission is, in `jobs/JOBID` beside the runs' links; best effort as well. Ids are a
    cluster's own and come again: the record in the directory tells which job is meant."""
    _link(os.path.join(os.path.dirname(registry()), "jobs"), jobid, directory)


def _link(place: str, name: str, target: str) -> None:
    with suppress(OSError):
        os.makedirs(place, mode=0o700, exist_ok=True)
        link = os.path.join(place, name)
        temporary = f"{link}.{os.getpid()}"
        os.symlink(target, temporary)
        os.replace(temporary, link)


def default_run() -> str:
    """The run that is meant when none is named: this rank's, or this allocation's attempt. Raises NoSuchRun."""
    from supervisor.core.marker import attempt_from

    run = os.environ.get("ALLOCD_RUN_DIR") or attempt_from(dict(os.environ))
    if not run:
        raise NoSuchRun("which run? Name an id or a run directory (outside of an allocation there is no default)")
    return run


def find_run(name: str | None) -> str:
    """The run directory that `name` means. The plain id of a job means its last attempt, `JOBID.r0` the first; that of
    a component its job, for one run is on all of them. Raises NoSuchRun."""
    given = name or default_run()
    given = job_of_component(given) or given
    refuse_ambiguous(given)
    places = [given] if os.sep in given or given in (".", "..") else []
    wanted = given if places else given.replace(".r0", "")
    if not places:
        bases = [os.environ.get("ALLOCD_RUNS"), "runs", "."]
        places = [os.path.join(registry(), wanted), *(os.path.join(base, wanted) for base in bases if base)]
    last = runs_of_job(wanted) if name == wanted and wanted.replace("_", "").isdecimal() else []
    for place in places:
        if os.path.exists(os.path.join(place, JOURNAL)):
            found = os.path.realpath(place)
            return next(iter(later_runs(found) if last else ()), found)
    if last:
        return last[0]
    if re.fullmatch(r"-\d+|0+", wanted):
        raise NoSuchRun(f"{wanted!r} is no job's id: those are whole numbers from 1 on")
    looked = ", ".join(map(printable, places))
    raise NoSuchRun(f"no run {wanted!r}: there is no {JOURNAL} in {looked}: name its run directory")


def refuse_ambiguous(run_id: str) -> None:
    """Raises Ambiguous for the id of a further run that several runs have: of old ones, and of those that were made
    where no id could be taken."""
    if not is_further(run_id):
        return
    found: set[str] = set()
    with suppress(OSError):
        for name in os.listdir(registry()):
            path = os.path.join(registry(), name)
            if name.startswith(f"{run_id}@") and os.path.exists(os.path.join(path, JOURNAL)):
                found.add(os.path.realpath(path))
    if len(found) > 1:
        raise Ambiguous(f"several runs have the id {run_id}: name a run's directory: {' or '.join(sorted(found))}")


def is_further(run_id: str) -> bool:
    """Whether the id is that of a further run in an allocation: one in somebody else's job always has such an id."""
    named = RUN_ID.fullmatch(run_id)
    return named is not None and named["further"] is not None


def is_guests(run_id: str) -> bool:
    """Whether the id alone tells that the run is in somebody else's job: the further runs of the job's own are counted
    from 2 on."""
    return is_further(run_id) and run_id.endswith(".s1")


def job_of_component(name: str) -> str | None:
    """The job that has this component (`123` of `123+1`); None for any other name."""
    found = re.fullmatch(r"([1-9]\d*)\+\d+", name)
    return found[1] if found else None


def later_runs(run_dir: str) -> list[str]:
    """The runs of the last attempt of a run's job; [] when the run is of that one itself. An attempt that was written
    last before the run was is of another job: ids come again."""
    run_id = os.path.basename(run_dir)
    last = [
        path
        for path in runs_of_job(run_id.split(".")[0], os.path.dirname(run_dir))
        if attempt_of(os.path.basename(path)) > attempt_of(run_id)
    ]
    return [path for path in last if _written_at(path) >= _written_at(run_dir)]


def _written_at(run_dir: str) -> float:
    try:
        return os.stat(os.path.join(run_dir, JOURNAL)).st_mtime
    except OSError:
        return 0.0


def runs_of_job(jobid: str, base: str | None = None) -> list[str]:
    """The directories of a job's runs, of its last attempt only: `JOBID` or `JOBID.rN`, each with `.sM`. `base`: where
    else they may be, as the job's submission tells."""
    found: dict[str, str] = {}  # directory -> the run's id
    for place in (registry(), os.environ.get("ALLOCD_RUNS"), "runs", base):
        with suppress(OSError):
            for name in os.listdir(place or os.devnull):
                run_id, path = name.partition("@")[0], os.path.join(place or "", name)
                mine = name.startswith(jobid) and job_in(run_id) == jobid  # thousands of names may be there
                if mine and os.path.exists(os.path.join(path, JOURNAL)):
                    found.setdefault(os.path.realpath(path), run_id)
    last = max(map(attempt_of, found.values()), default=0)
    return sorted(path for path, run_id in found.items() if attempt_of(run_id) == last)


def gone_runs(jobid: str, since: float) -> list[str]:
    """The directories of a job's runs that were registered since that epoch second, and are not there any more. A
    run that is known to be in somebody else's job is none of them."""
    gone = []
    with suppress(OSError):
        for name in os.listdir(registry()):
            link = os.path.join(registry(), name)
            mine = job_in(name) == jobid and not is_guests(name)
            if mine and os.lstat(link).st_mtime >= since and not os.path.isdir(link):
                gone.append(os.readlink(link))
    return gone


def job_in(run_id: str) -> str | None:
    """The job in a run's id; None for what is none: a copy that somebody has named `7.old`."""
    found = RUN_ID.fullmatch(run_id)
    return found["job"] if found else None


def attempt_of(run_id: str) -> int:
    """How often the job had been requeued when this run began."""
    part = next((part for part in run_id.split(".")[1:] if part.startswith("r")), "r0")
    return int(part[1:]) if part[1:].isdecimal() else 0
