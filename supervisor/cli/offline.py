"""`allocctl verify --from-files FILE... JOBID`: judge an old job by what somebody saved of sacct and scontrol.

Slurm is not asked, nothing is sealed, and no outcome file is written unless `--outcome` asks for it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from supervisor.core.saved_text import Reading, SavedText
    from supervisor.runs.sealing import Sealed

MAX_TEXT: Final = 16 * 1024 * 1024  # bytes of one text


def judge_files(paths: list[str], job: str, write_outcome: bool) -> Sealed:
    """The documents of a job, or of each task of an array, by these texts (`-`: standard input). Raises OSError,
    ValueError (an id that is none, a text that is neither sacct's nor scontrol's)."""
    from supervisor.core.parts import parse_target
    from supervisor.core.saved_text import describe, recognize, saved_parts

    target = parse_target(job)
    readings = [recognize(text) for text in _read_each_once(paths)]
    parts = saved_parts(target.jobid, readings)
    if target.tasks is not None:
        names, doubt = tuple(f"{target.jobid}_{task}" for task in target.tasks), ""
    else:
        names, doubt = parts.names, parts.why
    if parts.kind == "array" or target.tasks is not None:
        sealed = _array(target.jobid, names, doubt, readings)
    else:
        sealed = _job(target.jobid, names, doubt, readings)
    sealed.document["evidence"] = describe(names, readings)
    if write_outcome:
        _write_outcomes(target.jobid, sealed)
    return sealed


def _read_each_once(paths: list[str]) -> list[SavedText]:
    """The texts. One file given twice is one reading: it is refused, for two readings would confirm each other."""
    seen: dict[tuple[int, int], str] = {}
    texts = []
    for path in paths:
        text, place = _read(path)
        if place is not None and place in seen:
            raise ValueError(f"{path} is {seen[place]}: one file given twice is no second reading")
        if place is not None:
            seen[place] = path
        texts.append(text)
    return texts


def _read(path: str) -> tuple[SavedText, tuple[int, int] | None]:
    from supervisor.core.saved_text import SavedText

    if path == "-":
        data, written, place = sys.stdin.buffer.read(MAX_TEXT + 1), time.time(), None
    else:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            data, written, place = file.read(MAX_TEXT + 1), status.st_mtime, (status.st_dev, status.st_ino)
    if len(data) > MAX_TEXT:
        raise ValueError(f"{path} is longer than {MAX_TEXT} bytes")
    return SavedText(path, data.decode("utf-8", "backslashreplace"), min(written, time.time())), place


def _job(jobid: str, names: tuple[str, ...], doubt: str, readings: list[Reading]) -> Sealed:
    from supervisor import versions
    from supervisor.core.receipt import sealed_receipt
    from supervisor.core.saved_text import saved_truth
    from supervisor.runs.sealing import Sealed

    truths = [saved_truth(name, readings) for name in names]
    doubts = (doubt,) if doubt and len(names) > 1 else ()
    return Sealed([sealed_receipt(None, None, jobid, truths, versions=versions(), doubts=doubts)])


def _array(jobid: str, names: tuple[str, ...], doubt: str, readings: list[Reading]) -> Sealed:
    from supervisor.runs.sealing import whole_array

    return whole_array(jobid, {name: _job(name, (name,), "", readings) for name in names}, doubt)


def _write_outcomes(jobid: str, sealed: Sealed) -> None:
    from supervisor.runs.outcomes import outcome_lines, write_outcomes

    for document in sealed.documents if sealed.whole else ():
        sealed.trouble += write_outcomes([], document["jobid"], document["slurm"]["outcome_line"])
    sealed.trouble += write_outcomes([], jobid, outcome_lines(jobid, sealed.documents))


def from_files(arguments: list[str], job: str | None, write_outcome: bool) -> Sealed:
    """`--from-files` takes every word behind it: where no id stands before it, the last one is the id. Raises as
    `judge_files`."""
    paths, job = (arguments, job) if job else (arguments[:-1], arguments[-1])
    if not paths:
        raise ValueError("--from-files: name the files, and the job's id behind them")
    return judge_files(paths, job, write_outcome)
