"""The outcome file of a job, `slurm_job_<id>_outcome.txt`: the raw record that decided, or `<id>|UNVERIFIABLE|`, beside
each run and where a CI job looks for it. A whole array has one such line for each task. A job that is not over has none
yet, and an id that nobody knows, neither Slurm nor we, never gets one.

A record that decided is not overwritten by a doubt that came later, when accounting is away, say. It is where the file
is older than the job: ids come again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from supervisor.engine import receipts
from supervisor.loop.files import read_whole
from supervisor.runs.papers import Document, epoch, papers_of
from supervisor.runs.registry import submission_of

SIZE: Final = 1 << 20  # bytes: more is no record of an outcome
DOUBT: Final = "|UNVERIFIABLE|"
CLOCKS: Final = 300.0  # seconds by which the clocks of a file server and of this machine may differ


def has_outcome(standing: str, *, known: bool = True) -> bool:
    """Whether there is an outcome to write, by the standing of Slurm's truth; `known`: the job has left traces here."""
    return standing != "running" and (standing != "absent" or known)


def outcome_lines(jobid: str, documents: Sequence[Document]) -> str:
    """What the outcome file of a whole array says: a line for each task, a doubt only where its own file says so."""
    return "\n".join(map(_standing_line, documents)) or f"{jobid}{DOUBT}"


def _standing_line(document: Document) -> str:
    line = str(document["slurm"]["outcome_line"])
    return (_written_outcome(_workspace(), document["jobid"]) or line) if line.endswith(DOUBT) else line


def write_outcomes(run_dirs: Sequence[str], jobid: str, lines: str) -> list[str]:
    """The outcome file beside each run and where a CI job looks for it, unless it says so already or says more. Returns
    what could not be written."""
    trouble = []
    begun = _begun(jobid, run_dirs)
    for directory in (*run_dirs, *_elsewhere(jobid, run_dirs)):
        written = _written_outcome(directory, jobid, begun)
        if written is not None and (written == lines.strip() or _is_less(lines, written)):
            continue
        try:
            receipts.write_outcome([directory], jobid, lines)
        except OSError as error:
            what = error.strerror or error
            trouble.append(f"the outcome file could not be written in {os.path.abspath(directory)}: {what}")
    return trouble


def leave_workspace() -> None:
    """From now on this process works for no CI job, and where it stands is nobody's workspace: it is a daemon. The file
    of a job without a run then goes to the directory of its submission."""
    global _in_workspace
    _in_workspace = False


_in_workspace = True


def _elsewhere(jobid: str, run_dirs: Sequence[str]) -> list[str]:
    """Where the outcome file goes besides the runs."""
    if _in_workspace:
        return [_workspace()]
    submission = None if run_dirs else submission_of(jobid)
    return [os.path.dirname(submission.script)] if submission else []


def _workspace() -> str:
    return os.environ.get("GITHUB_WORKSPACE") or "."


def _is_less(lines: str, written: str) -> bool:
    """Whether records that decided would be overwritten by doubts."""
    doubts = [sum(line.endswith(DOUBT) for line in text.splitlines()) for text in (lines, written)]
    proven = [len(text.splitlines()) - count for text, count in zip((lines, written), doubts, strict=True)]
    return doubts[0] > 0 and proven[0] < proven[1]


def _written_outcome(directory: str, jobid: str, begun: float | None = None) -> str | None:
    """What the outcome file there says; None when there is none, or one from before the job began."""
    path = receipts.outcome_file(directory, jobid)
    try:
        if begun is not None and os.stat(path).st_mtime < begun - CLOCKS:
            return None
        return read_whole(path, SIZE).decode(errors="replace").strip()
    except OSError:
        return None


def _begun(jobid: str, run_dirs: Sequence[str]) -> float | None:
    """When the job was submitted or its first run began, in epoch seconds, as far as that is known."""
    if submission := submission_of(jobid):
        return submission.asked_at
    found = [epoch((papers_of(run_dir).opening or {}).get("utc")) for run_dir in run_dirs]
    return min((at for at in found if at is not None), default=None)
