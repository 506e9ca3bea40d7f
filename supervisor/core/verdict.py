"""Evidence -> verdict. Evidence first, verdict after; the same evidence always gives the same verdict.

Three judgements are made, with one precedence (the PRECEDENCE table and `first_failure`):

* `judge_run`: what the run alone shows, when the engine ends. Inside a job this is "first observed": Slurm has not said
  yet how the job ended.
* `judge_sealed`: the run together with Slurm's record of the allocation, when the job is over. Without a run (any job)
  the record alone; with a run whose engine left no receipt, never a success.
* `judge_adopted`: a run in a job that somebody else made, together with Slurm's records of its own steps. How such a
  job ends is its owner's business: its batch script may go on for days, `salloc --no-shell` is released by scancel, and
  neither makes a failure of a run that is over. So accounting's rows of the steps take the place of the job's record: a
  success is proven when they all agree with what the engine saw, and until they are there it is first observed. A
  native failure needs no confirmation. Only an end that Slurm may have made itself (a provisional one) waits for the
  job's record, which alone tells whether the job was cancelled under the run.

Who outranks whom, first to last:

1. Slurm's CANCELLED, TIMEOUT, PREEMPTED, NODE_FAIL, OUT_OF_MEMORY, ... over *provisional* ends: Slurm signals ranks
   too, and a rank that it killed did not fail by itself.
2. The first native failure of a critical rank. Its consequences are not even candidates: the machine drops them.
3. Any other terminal state of Slurm: a success that Slurm denies is none.
4. The artifact contract, then the marker protocol, then deadlines and requests to stop, then our own fault.
5. Nothing failed: a success, if nothing is in doubt. A doubt makes it unverifiable, which is neither success nor
failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from supervisor.core import codes
from supervisor.core.slurm import agrees
from supervisor.core.state import Failure, RunState
from supervisor.core.steps import StepComparison
from supervisor.core.truth import Truth

NATIVE, ARTIFACT, MARKER, DEADLINE, FAULT = range(5)

PRECEDENCE: Final[Mapping[str, int]] = {
    "exit": NATIVE,
    "signal": NATIVE,
    "not_started": NATIVE,
    "no_hello": NATIVE,
    "step_lost": NATIVE,
    "rank_lost": NATIVE,
    "marker": MARKER,
    "artifact": ARTIFACT,
    "late": ARTIFACT,
    "deadline": DEADLINE,
    "time_limit": DEADLINE,
    "stop": DEADLINE,
    "fault": FAULT,
}
"""Which class a failure belongs to; within a class the lower sequence number counts. A code that the coordinator
published or noted is the coordinator's own word, and native."""

REASONS: Final = ("rank_failed", "artifacts", "marker", "deadline", "fault")
"""The verdict's reason by class, except that `time_limit` and `stop_requested` say so themselves."""


@dataclass(frozen=True)
class Evidence:
    """What a run left to be judged. `engine_lost`: it was folded from a journal whose engine wrote no receipt, and
    `last_word` tells where that ends."""

    completed: bool
    failures: tuple[Failure, ...] = ()
    doubts: tuple[str, ...] = ()
    not_collected: tuple[str, ...] = ()
    engine_lost: bool = False
    last_word: str = ""

    @property
    def loss(self) -> str:
        """What became of the engine, in a sentence; "" where it wrote its receipt."""
        ends = f", and its journal ends at {self.last_word}" if self.last_word else ""
        return f"the engine was lost: it left no run receipt{ends}" if self.engine_lost else ""


@dataclass(frozen=True)
class Verdict:
    """`outcome` is success, failure or unverifiable; `code` the exit code; `origin` whose word the code is
    (native, slurm, allocd); `final` is false while Slurm has not said how the job ended."""

    outcome: str
    code: int
    origin: str
    reason: str
    summary: str
    because: tuple[str, ...] = ()
    final: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "because": list(self.because)}


def evidence_of(state: RunState, *, engine_lost: bool = False, last_word: str = "") -> Evidence:
    """The evidence that a run's state holds."""
    errors = state.collected.errors if state.collected else ()
    required = state.plan is not None and state.plan.collect.required
    return Evidence(
        completed=state.decision is not None and state.decision.reason == "completed",
        failures=state.failures,
        doubts=state.doubts,
        not_collected=tuple(errors) if required else (),
        engine_lost=engine_lost,
        last_word=last_word,
    )


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The failure that decides: the best class, then the lowest sequence number."""
    return min(failures, key=lambda failure: (class_of(failure), failure.seq), default=None)


def class_of(failure: Failure) -> int:
    """The failure's class: the lower outranks the higher."""
    return NATIVE if failure.origin == "native" else PRECEDENCE[failure.what]


def judge_run(evidence: Evidence, *, final: bool) -> Verdict:
    """What the run alone shows. `final` is true where no Slurm will have a say (the local launcher)."""
    failure = first_failure(evidence.failures)
    if failure is not None:
        return _failed(failure, final)
    if evidence.engine_lost or not evidence.completed:
        why = evidence.loss or "the run was not completed"
        return _unverifiable(why, (why,), final)
    if evidence.doubts:
        return _unverifiable(evidence.doubts[0], evidence.doubts, final)
    if evidence.not_collected:
        text = f"the run completed, but a required file was not collected: {evidence.not_collected[0]}"
        return Verdict("failure", codes.ARTIFACTS, "allocd", "not_collected", text, evidence.not_collected, final)
    text = "the work is done, every contract is complete, and nothing is in doubt"
    return Verdict("success", codes.OK, "native", "completed", text, (text,), final)


def _failed(failure: Failure, final: bool, more: tuple[str, ...] = ()) -> Verdict:
    reason = {"time_limit": "time_limit", "stop": "stop_requested"}.get(failure.what, REASONS[class_of(failure)])
    first = f"{'first failure' if final else 'first observed'}: {failure.text} (journal line {failure.seq})"
    return Verdict("failure", failure.code, failure.origin, reason, failure.text, (first, *more), final)


def _unverifiable(summary: str, because: tuple[str, ...], final: bool) -> Verdict:
    return Verdict("unverifiable", codes.UNVERIFIABLE, "allocd", "unverifiable", summary, because, final)


def judge_sealed(evidence: Evidence | None, truth: Truth, contradictions: tuple[str, ...] = ()) -> Verdict:
    """The run (None: a job that allocd did not run) and what Slurm's records prove about the allocation. A success
    needs agreement: `contradictions`, Slurm's records of our own steps against what we saw, leave it unproven."""
    run = None if evidence is None else judge_run(evidence, final=True)
    if not truth.settled:
        return _without_record(run, truth)
    failure = None if evidence is None else first_failure(evidence.failures)
    if run is None or failure is None:
        verdict = _run_or_record(run, truth, evidence)
        denied = verdict.outcome == "success" and contradictions
        return _unverifiable(contradictions[0], (*verdict.because, *contradictions), True) if denied else verdict
    native = class_of(failure) == NATIVE
    if explains_ends(truth) and (failure.provisional or not native):
        return _by_slurm(truth, f"first observed, and explained by that: {failure.text}")
    if native:
        lost = (evidence.loss,) if evidence and evidence.engine_lost else ()
        return _failed(failure, True, (_record_of(truth), *_comparison(failure.code, truth), *lost))
    return _run_or_record(run, truth, evidence)


def _run_or_record(run: Verdict | None, truth: Truth, evidence: Evidence | None) -> Verdict:
    """No rank failed by itself: the run's own word counts where Slurm's record does not deny it."""
    if run is None:
        return _by_slurm(truth)
    if truth.succeeded or (run.outcome != "success" and confirms(truth, run.code)):
        return replace(run, because=(*run.because, _record_of(truth)))
    if evidence is not None and evidence.engine_lost:
        verdict = _by_slurm(truth, evidence.loss)
        return replace(verdict, summary=f"{verdict.summary}; {evidence.loss}")
    return _by_slurm(truth, f"the run itself says {run.outcome} ({run.code}), which Slurm's record denies")


WAITS: Final = "whether Slurm ended it so is told by the job's record, when the job is over"


def judge_adopted(evidence: Evidence, truth: Truth, steps: StepComparison) -> Verdict:
    """A run in somebody else's job, what is known of that job, and accounting's rows of the run's steps beside what the
    engine saw. Not `final` while the records that it takes are not there."""
    failure = first_failure(evidence.failures)
    if failure is not None and failure.provisional:
        if truth.settled and explains_ends(truth):
            return _by_slurm(truth, f"first observed, and explained by that: {failure.text}")
        return _failed(failure, truth.settled, () if truth.settled else (WAITS,))
    verdict = judge_run(evidence, final=True)
    if verdict.outcome != "success":
        return verdict
    if steps.contradictions:
        return _unverifiable(steps.contradictions[0], (*verdict.because, *steps.contradictions), True)
    if steps.unconfirmed:
        return _unverifiable(steps.unconfirmed[0], (*verdict.because, *steps.unconfirmed), False)
    return replace(verdict, because=(*verdict.because, "Slurm's records of the run's own steps agree"))


def explains_ends(truth: Truth) -> bool:
    """Whether the job's state is one in which Slurm itself ended the ranks (CANCELLED, TIMEOUT, NODE_FAIL, ...)."""
    return truth.record is not None and truth.record.state.code is not None


def confirms(truth: Truth, code: int) -> bool:
    """Whether the job's own exit code can be `code` (sacct folds codes of 128 and more). A state in which Slurm ended
    the job has no such code."""
    return truth.native is not None and truth.source is not None and agrees(code, truth.native, truth.source)


def _without_record(run: Verdict | None, truth: Truth) -> Verdict:
    """No claim without Slurm's record; what the run saw is told beside."""
    doubt = truth.doubt or "Slurm has no record of the job"
    more = () if run is None else (f"the run itself says: {run.outcome} ({run.code}): {run.summary}",)
    return _unverifiable(doubt, (doubt, *more), True)


def _by_slurm(truth: Truth, *more: str) -> Verdict:
    record = _record_of(truth)
    if truth.succeeded:
        return Verdict("success", codes.OK, "slurm", "completed", record, (record, *more), True)
    word = truth.record.state.word.lower() if truth.record else "unknown"
    outcome = "unverifiable" if truth.code == codes.UNVERIFIABLE else "failure"
    return Verdict(outcome, truth.code, "slurm", f"slurm_{word}", record, (record, *more), True)


def _record_of(truth: Truth) -> str:
    state = truth.record.state_text if truth.record else "nothing"
    return f"Slurm's record of the allocation says {state} {truth.native or ''}".rstrip() + f" ({truth.source})"


def _comparison(code: int, truth: Truth) -> tuple[str, ...]:
    if confirms(truth, code):
        return ()
    return (f"the job's own exit code is another than the first failure's {code}",)


def unproven(verdict: Verdict, why: str) -> Verdict:
    """The same evidence with a doubt that lets nothing of it count."""
    return _unverifiable(why, (why, *verdict.because), verdict.final)


# --- several parts -----------------------------------------------------------------------------------------------

TOLD: Final = 5  # failed parts that a summary's reasons name


def count_outcomes(outcomes: Iterable[str]) -> dict[str, int]:
    """How many parts ended in each way."""
    found = list(outcomes)
    return {"parts": len(found), **{word: found.count(word) for word in ("success", "failure", "unverifiable")}}


def judge_parts(parts: Sequence[tuple[str, Mapping[str, Any]]], doubt: str = "") -> Mapping[str, Any]:
    """The verdict over an array: that of the first task that failed; a doubt counts only when none did.

    `parts` are the tasks' ids and verdicts (as in receipts), in the order of their numbers. `doubt` says why there may
    be tasks that are not among them.
    """
    failed = [(name, verdict) for name, verdict in parts if verdict["outcome"] == "failure"]
    doubtful = [(name, verdict) for name, verdict in parts if verdict["outcome"] == "unverifiable"]
    counts = count_outcomes(verdict["outcome"] for _, verdict in parts)
    summary = f"{counts['success']} of {len(parts)} tasks succeeded"
    because = [f"{name}: {verdict['code']} ({verdict['origin']}): {verdict['summary']}" for name, verdict in failed]
    because += [f"{name}: unverifiable: {verdict['summary']}" for name, verdict in doubtful]
    if len(because) > TOLD:
        because = [*because[:TOLD], f"and {len(because) - TOLD} more tasks that are no success"]
    because += [doubt] if doubt else []
    base = {"final": all(verdict["final"] for _, verdict in parts) and not doubt}
    if failed:
        name, worst = failed[0]
        summary += f"; first failure {name}: {worst['summary']}"
        return {**worst, **base, "summary": summary, "because": [summary, *because]}
    if doubtful or doubt or not parts:
        why = f"{doubtful[0][0]}: {doubtful[0][1]['summary']}" if doubtful else doubt or "no task is known"
        return {**_unverifiable(f"{summary}; unproven: {why}", tuple(because), True).as_dict(), **base}
    return {**parts[0][1], **base, "summary": summary, "because": [summary]}
