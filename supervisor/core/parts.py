"""The parts of a job: the tasks of an array, the components of a heterogeneous job, and how people name them.

One id can name many records. `12` is an array, its tasks are `12_1`, `12_2`, ...; or a heterogeneous job, its
components are `12+0`, `12+1`, .... Each part is a job with a raw id of its own, and with an end of its own:

* A **task** is judged by itself: it has its runs, its receipt, its exit code.
* The **components** are judged together: one batch script ran on all of them.

Which parts there are nobody knows alone. Accounting has a row for each part that began, but late. Tasks that have not
begun share one row (`12_[3-5%2]`), which goes stale: it was seen with tasks that ran, and with tasks that had been
cancelled. A task's own row is therefore believed before a shared one. The controller lists each task (squeue), but
forgets. Tasks that were cancelled while they waited leave no trace at all, in either book, once the rest of the array
has run. So the parts are all that any of these names: both books, and the record of the submission, where the array was
asked for. Without the controller's answer and without that record the list may lack something, and is not `complete`.

Slurm writes tasks as `1-5,7`, `1-9:2` (every second), `1-9%3` (three at a time).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from supervisor.core.slurm import parse_job_id

MAX_TASKS: Final = 100_000
"""More tasks than that are refused: Slurm's MaxArraySize is 1,001 unless a site raises it."""

_SPAN: Final = re.compile(r"(?P<low>\d{1,9})(?:-(?P<high>\d{1,9})(?::(?P<step>\d{1,9}))?)?")
_TASKS: Final = re.compile(r"(?P<open>\[)?(?P<spans>[\d,:-]+)(?:%\d+)?(?(open)\])")


def expand_tasks(text: str) -> tuple[int, ...]:
    """The numbers in `1-5,7`, `1-9:2%3` or `[3-5%2]`, ascending, each once. Raises `ValueError`."""
    found = _TASKS.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} names no tasks: expected such as 1-5,7 or 1-9:2%3")
    tasks: set[int] = set()
    for part in found["spans"].split(","):
        span = _SPAN.fullmatch(part)
        if not span:
            raise ValueError(f"{text!r} names no tasks: {part!r} is no range")
        low, high, step = int(span["low"]), int(span["high"] or span["low"]), int(span["step"] or 1)
        if high < low or step < 1 or (high - low) // step >= MAX_TASKS:
            raise ValueError(f"{text!r} names no tasks, or more than {MAX_TASKS}: {part!r}")
        tasks.update(range(low, high + 1, step))
    if len(tasks) > MAX_TASKS:
        raise ValueError(f"{text!r} names more than {MAX_TASKS} tasks")
    return tuple(sorted(tasks))


def compress_tasks(tasks: Iterable[int]) -> str:
    """The shortest of Slurm's ways to write these numbers without steps: `1-3,7`."""
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


@lru_cache(maxsize=64)
def shared_tasks(display: str) -> tuple[int, tuple[int, ...]] | None:
    """The array and the tasks that a shared row stands for (`12_[3-5%2]`); None for every other id."""
    array, mark, tasks = display.partition("_[")
    if not mark or not array.isdecimal():
        return None
    try:
        return int(array), expand_tasks(f"[{tasks}")
    except ValueError:
        return None


# --- what people type ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """What `123`, `123_4`, `123_[1-9%2]`, `123+1` or `123.0` names, each perhaps with `;cluster`.

    `jobid` is the job, task or component; `tasks` are those that were asked for of a whole array.
    """

    jobid: str
    cluster: str | None = None
    tasks: tuple[int, ...] | None = None


def parse_target(text: str) -> Target:
    """Read a job's id as people type it. Raises `ValueError` for anything else."""
    jobid, mark, cluster = text.partition(";")
    if mark and not re.fullmatch(r"[\w.-]+", cluster):
        raise ValueError(f"{text!r}: {cluster!r} is no cluster's name")
    if shared := shared_tasks(jobid):
        return Target(str(parse_job_id(str(shared[0])).job), cluster or None, shared[1])
    return Target(parse_job_id(jobid).allocation, cluster or None)


# --- which parts there are -------------------------------------------------------------------------------------------

Kind = Literal["single", "array", "het"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the job `jobid`, by their display ids in their order; of a single job, itself.

    `complete` is False when there may be parts of which nobody told, and `why` says so in a sentence.
    """

    jobid: str
    kind: Kind
    names: tuple[str, ...]
    complete: bool = True
    why: str = ""


def parts_of(
    jobid: str,
    booked: Sequence[str] | None,
    queued: Collection[str] | None,
    *,
    tasks: Sequence[int] | None = None,
    components: int | None = None,
) -> Parts:
    """The parts of a job that is called by its plain id.

    `booked` are the display ids of accounting's rows for it, `queued` those that squeue lists (None: could not be
    asked). `tasks` and `components` are what was asked for when it was submitted, where that is known.
    """
    named = {*(booked or ()), *(queued or ())}
    numbers = _numbers(jobid, named, "+")
    if components or numbers:
        count = max([components or 0, *(number + 1 for number in numbers)])
        return Parts(
            jobid, "het", tuple(f"{jobid}+{number}" for number in range(count)), *_told(booked, queued, components)
        )
    numbers = _numbers(jobid, named, "_") | set(tasks or ())
    if unread := next((name for name in named if name.startswith(f"{jobid}_[") and not shared_tasks(name)), None):
        names = tuple(f"{jobid}_{task}" for task in sorted(numbers))
        return Parts(jobid, "array", names, False, f"Slurm lists tasks in a way that cannot be read: {unread[:200]}")
    if not numbers:
        return Parts(jobid, "single", (jobid,))
    return Parts(jobid, "array", tuple(f"{jobid}_{task}" for task in sorted(numbers)), *_told(booked, queued, tasks))


def _numbers(jobid: str, named: Iterable[str], mark: str) -> set[int]:
    """The tasks (mark `_`) or components (`+`) of the job among these display ids, shared rows included."""
    found: set[int] = set()
    for display in named:
        if (shared := shared_tasks(display)) and mark == "_":
            found |= set(shared[1]) if str(shared[0]) == jobid else set()
        elif display.startswith(f"{jobid}{mark}") and (number := display[len(jobid) + 1 :]).isdecimal():
            found.add(int(number))
    return found


def _told(booked: object, queued: object, asked: object) -> tuple[bool, str]:
    if asked:
        return True, ""
    if queued is None:
        return False, "the controller could not be asked which parts the job has: there may be more"
    if booked is None:
        return False, "accounting could not be asked which parts the job has: the controller forgets those that ended"
    return True, ""


def part_numbers(text: str) -> tuple[int, int]:
    """What to sort ids of parts by: the job, then the task or component."""
    job = parse_job_id(text)
    return job.job, next((number for number in (job.task, job.offset) if number is not None), -1)
