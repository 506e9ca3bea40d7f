"""What a CI system is told of a run that ended, read out of its receipt: shared by the reports for people (github.py)
and for programs (junit.py).

Everything in a receipt that a job could choose (names, paths, words) is data here, and a log is opened only where logs
are: below `logs/` of the run's directory, by the name that the kernel itself gives to what was opened.
"""

from __future__ import annotations

import os
import stat
from typing import Any

from supervisor.cli.explain import tail
from supervisor.runs.papers import RECEIPT, RUN_RECEIPT, Unreadable, papers_of
from supervisor.runs.registry import job_receipt

Document = dict[str, Any]


def run_of(document: Document) -> Document | None:
    """The run receipt in a receipt of either kind; None for a job without a run of ours."""
    run: Document | None = document if document["kind"] == "run" else document["run"]
    return run


def name_of(document: Document) -> str:
    """The run's id, or the job's where there is no run."""
    return str(document["run_id"] or document["jobid"])


def receipt_of(document: Document) -> str:
    """The path of the receipt as it was saved, the sealed one before the run's own; "" when there is none."""
    run = run_of(document)
    kept = [] if run else [job_receipt(str(document["jobid"])) or ""]
    paths = [os.path.join(run["run_dir"], name) for name in _counting(run["run_dir"])] if run else kept
    return next((path for path in paths if os.path.isfile(path)), "")


def _counting(run_dir: str) -> list[str]:
    """The names of the run's receipts, without what is another run's."""
    try:
        strange = papers_of(run_dir).not_ours
    except Unreadable:
        strange = {}
    return [name for name in (RECEIPT, RUN_RECEIPT) if name not in strange]


def worst(documents: list[Document]) -> Document:
    """Whose verdict counts for several runs of a job: the first that is no success, else the first."""
    return next((document for document in documents if document["verdict"]["code"]), documents[0])


def log_tails(run: Document, rank: int | None) -> list[tuple[str, list[str]]]:
    """The last lines of a rank's logs, each with its path in the run directory; logs without lines are left out."""
    if rank is None:
        return []
    tails = []
    for path in run["ranks"][rank]["logs"].values():
        descriptor = open_log(run["run_dir"], path)
        if descriptor is not None and (lines := tail(descriptor)):
            tails.append((f"logs/{os.path.basename(path)}", lines))
    return tails


def open_log(run_dir: str, path: str) -> int | None:
    """A descriptor of a log, or None for what is no regular file below `logs/` of the run's directory: a link out of
    it, a pipe that would never answer, a path that somebody wrote into the receipt."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):  # ValueError: no path at all (a zero byte, a character that no file name has)
        return None
    opened = os.readlink(f"/proc/self/fd/{descriptor}")
    logs = os.path.join(os.path.realpath(run_dir), "logs", "")
    if stat.S_ISREG(os.fstat(descriptor).st_mode) and opened.startswith(logs):
        return descriptor
    os.close(descriptor)
    return None
