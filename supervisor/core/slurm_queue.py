"""What squeue is asked: how many jobs do, in one question, and which steps of a job live.

squeue follows what lives. It shows a job that has ended for MinJobAge, which is no proof of how it ended (see
`two_books.py`); a job that it does not show has ended, was forgotten, or never was. As in `slurm_records.py`, nothing
of a job is asked for that is a user's text, and a line of another shape spoils the whole answer. A step is known by its
name alone, which is such a text: it comes last, and decides nothing about a job.

Measured with 22.05: times are epochs here too with `SLURM_TIME_FORMAT=%s`; `--clusters` costs 90 ms, for it asks the
database where the cluster is (and fails without it); without a header it prints no line that names the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from supervisor.core.slurm import State, Unreadable, parse_state, parse_time

_QUEUE_FIELDS: Final = (
    "JobID",
    "JobArrayID",
    "State",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "UserID",
    "RestartCnt",
    "Reason",
)
"""Nothing here is a user's text. The reason is Slurm's; it may hold a sentence, so it is the last."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A job, an array's task or a heterogeneous job's component as squeue shows it: good for following, no proof of an
    end. `jobid` is the raw id, `display` the id with task or component; times are seconds since the epoch; `reason` is
    why it waits or how it failed, "" for none.
    """

    jobid: str
    display: str
    state: State
    submit: float | None
    start: float | None
    end: float | None
    uid: int | None
    restarts: int | None
    reason: str


def squeue_jobs_argv(jobids: Iterable[str], cluster: str | None = None) -> list[str]:
    """The query for many jobs, those included that ended less than MinJobAge ago, each task in a line of its own.

    A field with a suffix and no width is printed whole (`JobID:|`). Of several ids those that the controller does not
    know are left out; one alone is refused ("Invalid job id specified"). Any component stands for its whole
    heterogeneous job (22.05).
    """
    return [
        "squeue",
        *([f"--clusters={cluster}"] if cluster else []),
        "--noheader",
        "--array",
        "--states=all",
        "--jobs=" + ",".join(jobids),
        "--Format=" + ",".join(f"{field}:|" for field in _QUEUE_FIELDS),
    ]


def parse_squeue_jobs(text: str) -> tuple[QueueRow, ...]:
    """Read the answer to `squeue_jobs_argv`; raises `Unreadable` when a line of it has another shape."""
    lines = [line for line in text.split("\n") if line.strip() and not re.fullmatch(r"CLUSTER: [\w.-]+", line.strip())]
    return tuple(map(_queue_row, lines))


def _queue_row(line: str) -> QueueRow:
    fields = line.rstrip().split("|", len(_QUEUE_FIELDS) - 1)
    if len(fields) != len(_QUEUE_FIELDS) or not fields[0].isdecimal() or not fields[-1].endswith("|"):
        raise Unreadable(f"squeue printed a line of another shape than asked for: {line[:200]!r}")
    row = dict(zip(_QUEUE_FIELDS, fields, strict=True))
    reason = row["Reason"].removesuffix("|")
    uid, restarts = (int(row[key]) if row[key].isdecimal() else None for key in ("UserID", "RestartCnt"))
    return QueueRow(
        jobid=row["JobID"],
        display=row["JobArrayID"],
        state=parse_state(row["State"]),
        submit=parse_time(row["SubmitTime"]),
        start=parse_time(row["StartTime"]),
        end=parse_time(row["EndTime"]),
        uid=uid,
        restarts=restarts,
        reason="" if reason == "None" else reason,
    )


# --- steps --------------------------------------------------------------------------------------------------


def squeue_steps_argv(jobid: str, cluster: str | None = None) -> list[str]:
    """The query for a job's living steps: the id first, for a step's name is free text."""
    return [
        "squeue",
        *([f"--clusters={cluster}"] if cluster else []),
        "--steps",
        "--noheader",
        f"--jobs={jobid}",
        "--format=%i|%j",
    ]


def parse_squeue_steps(text: str) -> dict[str, str]:
    """Step ids by step name. A name that two steps bear is left out: which one is meant cannot be known."""
    ids: dict[str, list[str]] = {}
    for line in text.split("\n"):
        step, mark, name = line.partition("|")
        if mark and re.fullmatch(r"\d+(?:[_+]\d+)?\.\w+", step.strip()):
            ids.setdefault(name, []).append(step.strip())
    return {name: found[0] for name, found in ids.items() if len(found) == 1}
