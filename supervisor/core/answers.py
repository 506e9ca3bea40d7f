"""One question put to Slurm and what came of it: the evidence from which `two_books.py` decides.

A query has three outcomes: a **record**, **absent** (a valid answer without the job) and **failed** (could
not ask, or the answer cannot be trusted). They are told apart here, from the return code and the printed text
alone:

- sacct ends with 0 and prints nothing for a job that it does not know; scontrol ends with 1 and says "Invalid
  job id specified". Everything else that is no record is a failure to ask, and says nothing about the job.
- An `Answer` keeps what was printed, and `from_dict` reads that text again and trusts nothing that was
  concluded from it, so a saved receipt can be judged anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from supervisor.core.slurm import Source
from supervisor.core.slurm_records import JobRecord, StepRecord, parse_sacct, parse_scontrol

Outcome = Literal["record", "absent", "failed"]

SAVED: Final = "saved"
LONG_OVER: Final = "long over"
"""In place of a command line, words for a text that nobody asked for now."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One query and what came of it. `at` is UTC in ISO 8601; `returncode` is None when the command did not
    end itself.

    `trouble` is the caller's word on why the command could not be asked ("" if it could); `problem` says why
    the outcome is "failed", whoever noticed. `record` and `steps` are read from `stdout`.
    """

    source: Source
    jobid: str
    argv: tuple[str, ...]
    at: str
    returncode: int | None
    stdout: str
    stderr: str
    trouble: str
    outcome: Outcome
    problem: str
    record: JobRecord | None = None
    steps: tuple[StepRecord, ...] = ()
    incarnations: int = 0

    @property
    def long_over(self) -> bool:
        """Whether this is a saved text whose record had ended long before it was written: see `saved_text.py`."""
        return self.argv[:1] == (SAVED,) and self.argv[-1] == LONG_OVER

    def to_dict(self) -> dict[str, Any]:
        """What was asked and printed, as plain data for a receipt; `outcome` and `problem` are for readers
        only.
        """
        return {
            "source": self.source,
            "jobid": self.jobid,
            "argv": list(self.argv),
            "at": self.at,
            "returncode": self.returncode,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "trouble": self.trouble,
            "outcome": self.outcome,
            "problem": self.problem,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Answer:
        """The answer read again from what was printed. Raises `ValueError` for data of another shape."""
        try:
            source, returncode = data["source"], data["returncode"]
            if source not in ("sacct", "scontrol") or not (returncode is None or type(returncode) is int):
                raise ValueError(f"no answer of Slurm's: source {source!r}, returncode {returncode!r}")
            texts = {key: data[key] for key in ("jobid", "at", "stdout", "stderr", "trouble")}
            argv = tuple(data["argv"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no answer of Slurm's: {error!r}") from None
        if not all(isinstance(text, str) for text in (*texts.values(), *argv)):
            raise ValueError("no answer of Slurm's: texts expected")
        return read_answer(source=source, argv=argv, returncode=returncode, **texts)


def read_answer(
    *,
    source: Source,
    jobid: str,
    argv: Sequence[str],
    at: str,
    returncode: int | None,
    stdout: str,
    stderr: str,
    trouble: str = "",
) -> Answer:
    """Judge one query. `trouble` is why the command could not be asked: not found, its deadline passed, too
    much text.
    """
    outcome: Outcome = "failed"
    record: JobRecord | None = None
    steps: tuple[StepRecord, ...] = ()
    incarnations = 0
    problem = trouble
    try:
        if trouble:
            pass
        elif source == "scontrol" and says_unknown_job(returncode, stderr, stdout):
            outcome = "absent"
        elif returncode != 0:
            problem = f"{source} ended with {returncode}: {_last_line(stderr)}"
        elif source == "scontrol":
            record, outcome, incarnations = parse_scontrol(stdout, jobid), "record", 1
        else:
            known = parse_sacct(stdout, jobid)
            record, steps, incarnations = known.record, known.steps, known.incarnations
            # An empty answer means that the job is not known, but not beside a complaint.
            if record is None and _COMPLAINT.search(stderr):
                problem = f"sacct printed no record and complained: {_last_line(stderr)}"
            else:
                outcome = "record" if record else "absent"
    except ValueError as error:
        problem = str(error)
    return Answer(
        source=source,
        jobid=jobid,
        argv=tuple(argv),
        at=at,
        returncode=returncode,
        stdout=stdout,
        stderr=stderr,
        trouble=trouble,
        outcome=outcome,
        problem=problem,
        record=record,
        steps=steps,
        incarnations=incarnations,
    )


_COMPLAINT: Final = re.compile(r"\b(?:error|fatal)\b", re.IGNORECASE)


def says_unknown_job(returncode: int | None, stderr: str, stdout: str = "") -> bool:
    """Whether the controller answered that it does not know the job, the one refusal that is an answer.

    Of an array that it knows, scontrol says so of a task on stdout: `Job 7_3 not found` (22.05).
    """
    if not returncode:
        return False
    return "Invalid job id specified" in stderr or bool(re.fullmatch(r"Job \d+[_+]\d+ not found", stdout.strip()))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no message"
