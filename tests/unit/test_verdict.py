"""Who outranks whom: the run's evidence beside Slurm's truth, as a table."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.state import Failure
from supervisor.core.steps import StepComparison
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide
from supervisor.core.verdict import (
    PRECEDENCE,
    REASONS,
    Evidence,
    Verdict,
    first_failure,
    judge_adopted,
    judge_parts,
    judge_run,
    judge_sealed,
    unproven,
)
from tests.unit.test_truth import LIVE_DOWN, NO_JOB, NO_ROW, book, live


def failed(
    what: str, code: int, *, seq: int = 10, rank: int | None = None, origin: str = "allocd", provisional: bool = False
) -> Failure:
    return Failure(seq, 1.0, rank, what, code, origin, f"{what} {code}", provisional)


def evidence(*failures: Failure, **fields: object) -> Evidence:
    return replace(Evidence(completed=not failures, failures=failures), **fields)  # type: ignore[arg-type]


EXIT = failed("exit", 3, rank=1, origin="native")
EXIT_137 = failed("exit", 137, rank=1, origin="native")
KILLED = failed("signal", 143, rank=1, origin="native", provisional=True)
LOST = failed("step_lost", 1, rank=1, provisional=True)
NO_HELLO = failed("no_hello", 124, rank=1)
NOTED = failed("marker", 4, rank=0, origin="native")
MARKER = failed("marker", 125)
INVALID = failed("artifact", 65)
LATE = failed("late", 124)
DEADLINE = failed("deadline", 124)
LIMIT = failed("time_limit", 124)
STOPPED = failed("stop", 143)
FAULT = failed("fault", 125)

DONE = evidence()
DOUBTED = evidence(doubts=("rank 1: something may be left",))
NOT_COLLECTED = evidence(not_collected=("no such file",))
ENGINE_LOST = evidence(completed=False, engine_lost=True)


def truth(state: str, code: str = "0:0", *, whole: str | None = None) -> Truth:
    """What Slurm's two books prove; `whole` is the controller's unfolded code where accounting folds it."""
    return decide("7", [book(state, code), live(state, whole or code)])


SUCCESS = truth("COMPLETED")
UNKNOWN = decide("7", [NO_ROW, LIVE_DOWN])
ABSENT = decide("7", [NO_ROW, NO_JOB, NO_ROW, NO_JOB])
STILL_RUNNING = decide("7", [book("RUNNING"), live("RUNNING")])


def essence(verdict: Verdict) -> tuple[str, int, str, str]:
    return verdict.outcome, verdict.code, verdict.origin, verdict.reason


# --- the run alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (DONE, ("success", 0, "native", "completed")),
        (DOUBTED, ("unverifiable", 75, "allocd", "unverifiable")),
        (NOT_COLLECTED, ("failure", 65, "allocd", "not_collected")),
        (ENGINE_LOST, ("unverifiable", 75, "allocd", "unverifiable")),
        (evidence(engine_lost=True), ("unverifiable", 75, "allocd", "unverifiable")),
        (evidence(completed=False), ("unverifiable", 75, "allocd", "unverifiable")),
        (evidence(EXIT), ("failure", 3, "native", "rank_failed")),
        (evidence(EXIT, engine_lost=True), ("failure", 3, "native", "rank_failed")),
        (evidence(EXIT, completed=True, not_collected=("x",)), ("failure", 3, "native", "rank_failed")),
        (evidence(KILLED), ("failure", 143, "native", "rank_failed")),
        (evidence(NO_HELLO), ("failure", 124, "allocd", "rank_failed")),
        (evidence(NOTED), ("failure", 4, "native", "rank_failed")),
        (evidence(MARKER), ("failure", 125, "allocd", "marker")),
        (evidence(INVALID), ("failure", 65, "allocd", "artifacts")),
        (evidence(LATE), ("failure", 124, "allocd", "artifacts")),
        (evidence(DEADLINE), ("failure", 124, "allocd", "deadline")),
        (evidence(LIMIT), ("failure", 124, "allocd", "time_limit")),
        (evidence(STOPPED), ("failure", 143, "allocd", "stop_requested")),
        (evidence(FAULT), ("failure", 125, "allocd", "fault")),
    ],
)
@pytest.mark.parametrize("final", [True, False])
def test_the_run_alone(seen: Evidence, expected: tuple[str, int, str, str], final: bool) -> None:
    verdict = judge_run(seen, final=final)
    assert essence(verdict) == expected
    assert verdict.final is final
    assert verdict.summary and verdict.because


def test_a_failure_is_only_observed_until_the_receipt_is_sealed() -> None:
    assert judge_run(evidence(EXIT), final=False).because[0].startswith("first observed: exit 3")
    assert judge_run(evidence(EXIT), final=True).because[0].startswith("first failure: exit 3")


RANKED = [EXIT, INVALID, MARKER, DEADLINE, FAULT]
"""One failure of each class, the first outranks the second and so on."""


@pytest.mark.parametrize(("higher", "lower"), list(itertools.combinations(RANKED, 2)))
def test_classes_outrank_the_order_of_events(higher: Failure, lower: Failure) -> None:
    later = replace(higher, seq=99)
    assert first_failure([lower, later]) == first_failure([later, lower]) == later


def test_within_a_class_the_lower_number_is_first() -> None:
    later = replace(EXIT, seq=11, rank=2, code=9)
    assert first_failure([later, EXIT]) == EXIT


def test_every_kind_of_failure_has_a_class_and_a_reason() -> None:
    assert set(PRECEDENCE.values()) == set(range(len(REASONS)))


# --- the run beside Slurm ----------------------------------------------------------------------------------------

NATIVE_3 = ("failure", 3, "native", "rank_failed")
UNVERIFIABLE = ("unverifiable", 75, "allocd", "unverifiable")

SLURM_ENDED_IT = [
    ("CANCELLED", "0:15", ("failure", 130, "slurm", "slurm_cancelled")),
    ("TIMEOUT", "0:15", ("failure", 124, "slurm", "slurm_timeout")),
    ("NODE_FAIL", "0:0", ("failure", 1, "slurm", "slurm_node_fail")),
    ("PREEMPTED", "0:15", ("failure", 1, "slurm", "slurm_preempted")),
    ("OUT_OF_MEMORY", "0:125", ("failure", 1, "slurm", "slurm_out_of_memory")),
]


@pytest.mark.parametrize(("state", "code", "expected"), SLURM_ENDED_IT)
@pytest.mark.parametrize(
    "seen",
    [evidence(KILLED), evidence(LOST), evidence(INVALID), evidence(LIMIT), evidence(STOPPED), evidence(FAULT), DONE],
    ids=["killed", "lost", "invalid", "time limit", "stopped", "fault", "success"],
)
def test_slurms_own_end_outranks_whatever_it_may_explain(
    seen: Evidence, state: str, code: str, expected: tuple[str, int, str, str]
) -> None:
    verdict = judge_sealed(seen, truth(state, code))
    assert essence(verdict) == expected
    for failure in seen.failures:
        assert failure.text in " ".join(verdict.because)


@pytest.mark.parametrize(("state", "code", "_"), SLURM_ENDED_IT)
@pytest.mark.parametrize("seen", [EXIT, NOTED, NO_HELLO], ids=["exit", "noted", "no hello"])
def test_a_rank_that_failed_by_itself_outranks_slurms_own_end(seen: Failure, state: str, code: str, _: object) -> None:
    verdict = judge_sealed(evidence(seen), truth(state, code))
    assert essence(verdict) == ("failure", seen.code, seen.origin, "rank_failed")


@pytest.mark.parametrize(
    ("seen", "told", "expected"),
    [
        # success: both must say so
        (DONE, SUCCESS, ("success", 0, "native", "completed")),
        (DONE, truth("FAILED", "7:0"), ("failure", 7, "slurm", "slurm_failed")),
        (DONE, truth("FAILED", "0:0", whole="128:0"), ("failure", 128, "slurm", "slurm_failed")),
        (DOUBTED, SUCCESS, UNVERIFIABLE),
        (NOT_COLLECTED, SUCCESS, ("failure", 65, "allocd", "not_collected")),
        (ENGINE_LOST, SUCCESS, UNVERIFIABLE),
        (evidence(engine_lost=True), SUCCESS, UNVERIFIABLE),
        (ENGINE_LOST, truth("FAILED", "7:0"), ("failure", 7, "slurm", "slurm_failed")),
        # a native failure, provisional or not, where Slurm ended nothing
        (evidence(EXIT), truth("FAILED", "3:0"), NATIVE_3),
        (evidence(EXIT), truth("FAILED", "1:0"), NATIVE_3),
        (evidence(EXIT), SUCCESS, NATIVE_3),
        (evidence(EXIT, engine_lost=True), SUCCESS, NATIVE_3),
        (evidence(KILLED), truth("FAILED", "15:0", whole="143:0"), ("failure", 143, "native", "rank_failed")),
        (evidence(KILLED), SUCCESS, ("failure", 143, "native", "rank_failed")),
        # what is not native: the run's own word where the job's code agrees, also folded, else Slurm's
        (evidence(INVALID), truth("FAILED", "65:0"), ("failure", 65, "allocd", "artifacts")),
        (evidence(INVALID), SUCCESS, ("failure", 65, "allocd", "artifacts")),
        (evidence(INVALID), truth("FAILED", "7:0"), ("failure", 7, "slurm", "slurm_failed")),
        (evidence(STOPPED), truth("FAILED", "15:0", whole="143:0"), ("failure", 143, "allocd", "stop_requested")),
        (evidence(STOPPED), truth("FAILED", "16:0"), ("failure", 16, "slurm", "slurm_failed")),
        (evidence(LIMIT), truth("FAILED", "124:0"), ("failure", 124, "allocd", "time_limit")),
        (DOUBTED, truth("FAILED", "75:0"), UNVERIFIABLE),
        (DOUBTED, truth("FAILED", "7:0"), ("failure", 7, "slurm", "slurm_failed")),
        # no run of ours: Slurm's record alone
        (None, SUCCESS, ("success", 0, "slurm", "completed")),
        (None, truth("FAILED", "9:0", whole="137:0"), ("failure", 137, "slurm", "slurm_failed")),
        (None, truth("CANCELLED by 1000", "0:15"), ("failure", 130, "slurm", "slurm_cancelled")),
    ],
)
def test_the_run_beside_slurms_record(seen: Evidence | None, told: Truth, expected: tuple[str, int, str, str]) -> None:
    verdict = judge_sealed(seen, told)
    assert essence(verdict) == expected
    assert verdict.final
    assert "Slurm's record of the allocation says" in " ".join((verdict.summary, *verdict.because))


@pytest.mark.parametrize("told", [UNKNOWN, ABSENT, STILL_RUNNING], ids=["unasked", "absent", "running"])
@pytest.mark.parametrize("seen", [DONE, evidence(EXIT), ENGINE_LOST, None], ids=["done", "exit", "lost", "no run"])
def test_without_a_settled_record_nothing_is_claimed(seen: Evidence | None, told: Truth) -> None:
    verdict = judge_sealed(seen, told)
    assert essence(verdict) == UNVERIFIABLE
    assert verdict.summary == told.doubt
    if seen is not None:
        assert "the run itself says" in verdict.because[1]


@pytest.mark.parametrize(
    ("seen", "told", "expected"),
    [
        (DONE, SUCCESS, UNVERIFIABLE),
        (DONE, truth("FAILED", "7:0"), ("failure", 7, "slurm", "slurm_failed")),
        (NOT_COLLECTED, SUCCESS, ("failure", 65, "allocd", "not_collected")),
        (evidence(EXIT), SUCCESS, NATIVE_3),
    ],
)
def test_a_record_of_a_step_that_contradicts_what_we_saw_denies_a_success_and_nothing_else(
    seen: Evidence, told: Truth, expected: tuple[str, int, str, str]
) -> None:
    verdict = judge_sealed(seen, told, ("step 7.1 ended with 0; accounting says FAILED 9:0",))
    assert essence(verdict) == expected
    assert verdict.final
    assert ("step 7.1" in verdict.summary) == (expected == UNVERIFIABLE)


def test_a_code_that_differs_from_the_jobs_is_told() -> None:
    assert "another than the first failure's 3" in " ".join(
        judge_sealed(evidence(EXIT), truth("FAILED", "1:0")).because
    )
    folded = judge_sealed(evidence(EXIT_137), truth("FAILED", "9:0", whole="137:0"))
    assert "another than" not in " ".join(folded.because)


ANY_FAILURE = st.builds(
    failed,
    what=st.sampled_from(sorted(PRECEDENCE)),
    code=st.sampled_from((1, 3, 65, 75, 124, 125, 130, 137, 143)),
    seq=st.integers(1, 50),
    origin=st.sampled_from(("native", "allocd")),
    provisional=st.booleans(),
)
ANY_EVIDENCE = st.builds(
    Evidence,
    completed=st.booleans(),
    failures=st.lists(ANY_FAILURE, max_size=3).map(tuple),
    doubts=st.sampled_from(((), ("a doubt",))),
    not_collected=st.sampled_from(((), ("a file",))),
    engine_lost=st.booleans(),
)
ANY_TRUTH = st.sampled_from(
    [
        SUCCESS,
        UNKNOWN,
        ABSENT,
        STILL_RUNNING,
        truth("FAILED", "3:0"),
        truth("FAILED", "0:0", whole="128:0"),
        *(truth(state, code) for state, code, _ in SLURM_ENDED_IT),
    ]
)


@given(ANY_EVIDENCE, ANY_TRUTH)
def test_a_success_needs_both(seen: Evidence, told: Truth) -> None:
    verdict = judge_sealed(seen, told)
    assert (verdict.code == 0) == (verdict.outcome == "success")
    clean = seen.completed and not (seen.failures or seen.doubts or seen.not_collected or seen.engine_lost)
    assert (verdict.outcome == "success") == (clean and told.succeeded)
    assert (verdict.outcome == "unverifiable") == (verdict.code == 75) or seen.failures


@given(ANY_EVIDENCE, ANY_TRUTH)
def test_the_order_in_a_receipt_decides_nothing(seen: Evidence, told: Truth) -> None:
    numbered = tuple(replace(failure, seq=seq) for seq, failure in enumerate(seen.failures))
    turned = replace(seen, failures=numbered[::-1])
    assert judge_sealed(turned, told) == judge_sealed(replace(seen, failures=numbered), told)


# --- several parts -----------------------------------------------------------------------------------------------

GOOD_PART = Verdict("success", 0, "slurm", "completed", "fine").as_dict()
BAD_PART = Verdict("failure", 7, "native", "rank_failed", "rank 1 ended with code 7").as_dict()
LATE_PART = Verdict("failure", 124, "slurm", "slurm_timeout", "TIMEOUT").as_dict()
OPEN_PART = Verdict("unverifiable", 75, "allocd", "unverifiable", "no record").as_dict()


@pytest.mark.parametrize(
    ("verdicts", "doubt", "outcome", "code", "summary"),
    [
        ([GOOD_PART, GOOD_PART], "", "success", 0, "2 of 2 tasks succeeded"),
        ([GOOD_PART, BAD_PART, LATE_PART], "", "failure", 7, "1 of 3 tasks succeeded; first failure 7_1: rank 1 ended"),
        ([LATE_PART, BAD_PART], "", "failure", 124, "0 of 2 tasks succeeded; first failure 7_0: TIMEOUT"),
        ([OPEN_PART, BAD_PART], "", "failure", 7, "first failure 7_1"),
        ([GOOD_PART, OPEN_PART], "", "unverifiable", 75, "1 of 2 tasks succeeded; unproven: 7_1: no record"),
        ([GOOD_PART], "there may be more", "unverifiable", 75, "unproven: there may be more"),
        ([GOOD_PART, BAD_PART], "there may be more", "failure", 7, "first failure 7_1"),
        ([], "", "unverifiable", 75, "no task is known"),
    ],
)
def test_an_array_is_as_good_as_its_first_task_that_failed(
    verdicts: list[dict[str, object]], doubt: str, outcome: str, code: int, summary: str
) -> None:
    found = judge_parts([(f"7_{number}", verdict) for number, verdict in enumerate(verdicts)], doubt)
    assert (found["outcome"], found["code"]) == (outcome, code)
    assert summary in found["summary"]
    assert found.keys() == GOOD_PART.keys()
    assert found["final"] is (not doubt)


def test_a_summary_names_a_few_of_many_failures() -> None:
    found = judge_parts([(f"7_{number}", BAD_PART) for number in range(100)])
    assert found["because"][-1] == "and 95 more tasks that are no success"


def test_a_doubt_lets_nothing_count_and_hides_nothing() -> None:
    found = unproven(Verdict("success", 0, "slurm", "completed", "fine", ("it ended well",)), "another job's record")
    assert (found.outcome, found.code, found.because) == ("unverifiable", 75, ("another job's record", "it ended well"))


# --- a run in somebody else's job ------------------------------------------------------------------------------------

AGREED = StepComparison()
LATE_ROW = StepComparison(unconfirmed=("accounting has no row of step 7.0",))
DENIED = StepComparison(contradictions=("step 7.0 ended with 0; accounting says FAILED 3:0",))
CANCELLED_JOB = truth("CANCELLED", "0:15")


@pytest.mark.parametrize("job", [STILL_RUNNING, SUCCESS, CANCELLED_JOB, truth("FAILED", "9:0"), ABSENT, UNKNOWN])
def test_however_the_job_ends_an_adopted_run_is_judged_by_its_steps(job: Truth) -> None:
    assert essence(judge_adopted(DONE, job, AGREED)) == ("success", 0, "native", "completed")
    assert judge_adopted(DONE, job, AGREED).final
    assert essence(judge_adopted(evidence(EXIT), job, DENIED)) == ("failure", 3, "native", "rank_failed")
    assert essence(judge_adopted(evidence(STOPPED), job, AGREED)) == ("failure", 143, "allocd", "stop_requested")
    assert essence(judge_adopted(ENGINE_LOST, job, AGREED)) == ("unverifiable", 75, "allocd", "unverifiable")


def test_a_success_that_accounting_denies_is_none_and_one_that_it_does_not_tell_of_is_not_final() -> None:
    denied, late = judge_adopted(DONE, SUCCESS, DENIED), judge_adopted(DONE, SUCCESS, LATE_ROW)
    assert (denied.outcome, denied.final) == ("unverifiable", True)
    assert (late.outcome, late.final, late.summary) == ("unverifiable", False, LATE_ROW.unconfirmed[0])


def test_an_end_that_slurm_may_have_made_waits_for_the_jobs_record() -> None:
    open_end = judge_adopted(evidence(KILLED), STILL_RUNNING, AGREED)
    assert (open_end.code, open_end.final) == (143, False)
    assert essence(judge_adopted(evidence(KILLED), CANCELLED_JOB, AGREED)) == (
        "failure",
        130,
        "slurm",
        "slurm_cancelled",
    )
    kept = judge_adopted(evidence(KILLED), SUCCESS, AGREED)
    assert (kept.code, kept.origin, kept.final) == (143, "native", True)
