"""What Slurm's answers prove about one job, or the doubt that is left; `two_books.py` derives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from supervisor.core import codes
from supervisor.core.answers import Answer
from supervisor.core.slurm import ExitCode, Source
from supervisor.core.slurm_records import JobRecord, StepRecord

Standing = Literal["settled", "running", "unconfirmed", "differs", "absent", "unasked", "elsewhere", "several"]


@dataclass(frozen=True, slots=True)
class Truth:
    """What Slurm's answers prove about a job.

    `record` is the record that decides, or, for a doubt, the last one seen. `native` is the job's own exit
    code, unfolded where the controller still knew it; None when the state has no code of its own. `doubt`
    says why nothing is proven; it is None exactly when `standing` is "settled". `steps` are those of the
    latest incarnation in accounting.
    """

    jobid: str
    standing: Standing
    record: JobRecord | None
    native: ExitCode | None
    doubt: str | None
    notes: tuple[str, ...]
    steps: tuple[StepRecord, ...]
    answers: tuple[Answer, ...]

    @property
    def source(self) -> Source | None:
        """Which book `record` is from."""
        return self.record.source if self.record else None

    @property
    def settled(self) -> bool:
        """Whether a record decides."""
        return self.standing == "settled"

    @property
    def succeeded(self) -> bool:
        """Proven success: COMPLETED and 0:0. False is no proof of failure; see `settled`."""
        return self.settled and self.code == codes.OK

    @property
    def code(self) -> int:
        """The exit code that this stands for: 0, the native code, the state's code, or 75 for a doubt."""
        if not self.settled or self.record is None:
            return codes.UNVERIFIABLE
        if self.record.state.code is not None:
            return self.record.state.code
        if self.record.state.word == "COMPLETED":
            return codes.OK
        # FAILED with 0:0 is a code that was folded away, or no code at all: a failure without a code.
        native = self.native.shell if self.native else 0
        return native if 0 < native <= 255 else codes.FAILED

    @property
    def outcome_line(self) -> str:
        """The line of `slurm_job_<id>_outcome.txt`: the raw record that decided or `<id>|UNVERIFIABLE|`."""
        return self.record.raw if self.settled and self.record else f"{self.jobid}|UNVERIFIABLE|"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for receipts. `decide(jobid, [Answer.from_dict(a) for a in data["answers"]])` derives it
        again.
        """
        return {
            "jobid": self.jobid,
            "standing": self.standing,
            "state": self.record.state_text if self.record else None,
            "source": self.source,
            "exit_code": str(self.native) if self.native else None,
            "raw": self.record.raw if self.record else None,
            "outcome_line": self.outcome_line,
            "code": self.code,
            "doubt": self.doubt,
            "notes": list(self.notes),
            "answers": [answer.to_dict() for answer in self.answers],
        }


def deciding(truths: Sequence[Truth]) -> Truth:
    """The truth that decides about a job of several components: the first doubt; else the first end that Slurm itself
    made (TIMEOUT, NODE_FAIL, ...), for its neighbours' failures may follow from it; else the first that is no success;
    else the first."""
    for decides in (
        lambda truth: not truth.settled,
        lambda truth: truth.record is not None and truth.record.state.code is not None,
        lambda truth: not truth.succeeded,
    ):
        if found := next(filter(decides, truths), None):
            return found
    return truths[0]


def restarts_of(truth: Truth) -> int | None:
    """How often the job had been started anew when it ended, as far as Slurm's answers tell."""
    told = [answer.record.restarts for answer in truth.answers if answer.record and answer.record.restarts is not None]
    rows = [answer.incarnations - 1 for answer in truth.answers if answer.source == "sacct" and answer.incarnations]
    return told[-1] if told else rows[-1] if rows else None
