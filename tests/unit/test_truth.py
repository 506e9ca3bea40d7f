"""From answers to a truth or a doubt: every row of the table, and what may never happen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import codes
from supervisor.core.answers import Answer, read_answer
from supervisor.core.slurm import ExitCode, Source, parse_state
from supervisor.core.slurm_records import StepRecord
from supervisor.core.steps import StepComparison, compare_steps
from supervisor.core.truth import Truth, deciding, restarts_of
from supervisor.core.two_books import decide

SHOWN = """\
JobId={jobid} {parts}JobName=x
   UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:00:01 TimeLimit=UNLIMITED TimeMin=N/A
   SubmitTime={submit} EligibleTime={submit}
   StartTime=1001 EndTime=1002 Deadline=N/A
   NodeList=node1
"""


def asked(source: Source, stdout: str = "", stderr: str = "", returncode: int | None = 0, trouble: str = "") -> Answer:
    return read_answer(
        source=source,
        jobid="7",
        argv=[source, "7"],
        at="2026-11-30T20:28:38.000+00:00",
        returncode=returncode,
        stdout=stdout,
        stderr=stderr,
        trouble=trouble,
    )


def book(
    state: str, code: str = "0:0", *, submit: int = 1000, end: str = "1002", derived: str = "0:0", display: str = "7"
) -> Answer:
    return asked("sacct", f"7|{state}|{code}|{derived}|{display}|{submit}|1001|{end}|ann|c|node1\n")


def live(state: str, code: str = "0:0", *, submit: int = 1000) -> Answer:
    return asked("scontrol", SHOWN.format(jobid=7, parts="", state=state, code=code, submit=submit))


NO_ROW = asked("sacct")
NO_JOB = asked("scontrol", stderr="slurm_load_jobs error: Invalid job id specified\n", returncode=1)
BOOK_DOWN = asked("sacct", stderr="sacct: error: Sending PersistInit msg: Connection refused\n", returncode=1)
LIVE_DOWN = asked("scontrol", returncode=None, trouble="scontrol did not answer within 5 s")


def settled(truth: Truth) -> tuple[str, int, str | None]:
    return truth.standing, truth.code, truth.source


# --- answers ---


def test_the_three_outcomes() -> None:
    assert book("RUNNING").outcome == live("RUNNING").outcome == "record"
    assert NO_ROW.outcome == NO_JOB.outcome == "absent"
    assert BOOK_DOWN.outcome == LIVE_DOWN.outcome == "failed"
    assert "Connection refused" in BOOK_DOWN.problem and "5 s" in LIVE_DOWN.problem


@pytest.mark.parametrize(
    "answer",
    [
        asked("scontrol", stderr="slurm_load_jobs error: Unable to contact slurm controller", returncode=1),
        asked("scontrol", returncode=-9),
        asked("scontrol", returncode=0),
        asked("scontrol", "No jobs in the system\n"),
        asked("sacct", stderr="slurm_load_jobs error: Invalid job id specified", returncode=1),
        asked("sacct", stderr="sacct: error: slurmdbd: Getting response to message type"),
        asked("sacct", "garbage\n"),
        asked("sacct", trouble="sacct cannot be started"),
        asked("sacct", returncode=None, trouble="sacct printed more than 4 bytes"),
    ],
)
def test_whatever_is_neither_record_nor_absence_is_a_failure_to_ask(answer: Answer) -> None:
    assert answer.outcome == "failed" and answer.problem and answer.record is None


def test_a_warning_beside_a_record_does_not_spoil_it() -> None:
    text = "7|COMPLETED|0:0|0:0|7|1000|1001|1002|ann|c|node1\n"
    assert asked("sacct", text, stderr="sacct: error: a plugin is missing\n").outcome == "record"


# --- the table ---


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # both ended
        ([book("COMPLETED"), live("COMPLETED")], ("settled", 0, "sacct")),
        ([book("FAILED", "4:0"), live("FAILED", "4:0")], ("settled", 4, "sacct")),
        ([book("FAILED", "9:0"), live("FAILED", "137:0")], ("settled", 137, "sacct")),
        ([book("FAILED", "0:0"), live("FAILED", "128:0")], ("settled", 128, "sacct")),
        ([book("FAILED", "0:11"), live("FAILED", "0:11")], ("settled", 139, "sacct")),
        ([book("CANCELLED by 0", "0:0"), live("CANCELLED", "0:15")], ("settled", 130, "sacct")),
        ([book("TIMEOUT", "0:0"), live("TIMEOUT", "0:15")], ("settled", 124, "sacct")),
        ([book("NODE_FAIL", "0:0"), live("NODE_FAIL", "1:0")], ("settled", 1, "sacct")),
        ([book("OUT_OF_MEMORY", "0:125"), live("OUT_OF_MEMORY", "0:125")], ("settled", 1, "sacct")),
        ([book("COMPLETED"), live("FAILED", "4:0")], ("differs", 75, "sacct")),
        ([book("FAILED", "5:0"), live("FAILED", "4:0")], ("differs", 75, "sacct")),
        # accounting ended, the controller has forgotten
        ([book("COMPLETED"), NO_JOB], ("unconfirmed", 75, "sacct")),
        ([book("COMPLETED"), NO_JOB, book("COMPLETED")], ("settled", 0, "sacct")),
        ([book("FAILED", "4:0"), NO_JOB, book("FAILED", "4:0")], ("settled", 4, "sacct")),
        ([book("FAILED", "0:0"), NO_JOB, book("FAILED", "0:0")], ("settled", 1, "sacct")),
        ([book("PREEMPTED"), NO_JOB, book("PREEMPTED")], ("settled", 1, "sacct")),
        # the controller told the end and has forgotten it since
        ([BOOK_DOWN, live("FAILED", "4:0"), live("FAILED", "4:0"), NO_JOB, BOOK_DOWN], ("settled", 4, "scontrol")),
        ([BOOK_DOWN, live("FAILED", "4:0"), NO_JOB, BOOK_DOWN, NO_JOB], ("unconfirmed", 75, "scontrol")),
        ([book("RUNNING", end="Unknown"), *[live("FAILED", "4:0")] * 2, NO_JOB], ("settled", 4, "scontrol")),
        ([NO_ROW, *[live("FAILED", "4:0")] * 2, NO_ROW, NO_JOB], ("settled", 4, "scontrol")),
        ([BOOK_DOWN, *[live("FAILED", "4:0")] * 2, live("RUNNING"), NO_JOB], ("unasked", 75, None)),
        # accounting ended, the controller is down
        ([book("COMPLETED"), LIVE_DOWN, book("COMPLETED"), LIVE_DOWN], ("settled", 0, "sacct")),
        ([book("PREEMPTED"), LIVE_DOWN, book("PREEMPTED"), LIVE_DOWN], ("unasked", 75, "sacct")),
        ([book("NODE_FAIL"), LIVE_DOWN, book("NODE_FAIL"), LIVE_DOWN], ("unasked", 75, "sacct")),
        # accounting ended, the controller says alive
        ([book("NODE_FAIL"), live("PENDING", submit=2000)], ("running", 75, "scontrol")),
        ([book("COMPLETED"), live("RUNNING")], ("differs", 75, "scontrol")),
        ([book("COMPLETED"), live("COMPLETING")], ("unconfirmed", 75, "sacct")),
        ([book("COMPLETED"), live("COMPLETING"), book("COMPLETED")], ("settled", 0, "sacct")),
        ([book("PREEMPTED"), live("COMPLETING"), book("PREEMPTED"), live("COMPLETING")], ("running", 75, "scontrol")),
        ([live("RUNNING"), book("COMPLETED"), LIVE_DOWN, book("COMPLETED")], ("settled", 0, "sacct")),
        ([live("RUNNING"), book("PREEMPTED"), LIVE_DOWN, book("PREEMPTED")], ("unasked", 75, "sacct")),
        # accounting late, stale, or down; the controller knows
        ([book("RUNNING", end="Unknown"), live("FAILED", "4:0")], ("unconfirmed", 75, "scontrol")),
        ([book("RUNNING", end="Unknown"), live("FAILED", "4:0"), live("FAILED", "4:0")], ("settled", 4, "scontrol")),
        ([NO_ROW, live("COMPLETED"), NO_ROW, live("COMPLETED")], ("settled", 0, "scontrol")),
        ([BOOK_DOWN, live("COMPLETED"), BOOK_DOWN, live("COMPLETED")], ("settled", 0, "scontrol")),
        ([book("FAILED", end="Unknown"), live("FAILED", "4:0"), live("FAILED", "4:0")], ("settled", 4, "scontrol")),
        ([book("COMPLETED"), live("FAILED", "4:0", submit=2000)], ("unconfirmed", 75, "scontrol")),
        ([book("COMPLETED", submit=2000), live("COMPLETED")], ("differs", 75, "sacct")),
        # still going
        ([book("RUNNING", end="Unknown"), live("RUNNING")], ("running", 75, "scontrol")),
        ([NO_ROW, live("PENDING")], ("running", 75, "scontrol")),
        ([BOOK_DOWN, live("CONFIGURING")], ("running", 75, "scontrol")),
        ([book("RUNNING", end="Unknown"), LIVE_DOWN], ("running", 75, "sacct")),
        ([book("REQUEUED"), live("PENDING", submit=2000)], ("running", 75, "scontrol")),
        ([live("RUNNING"), LIVE_DOWN, BOOK_DOWN], ("unasked", 75, "scontrol")),
        ([live("RUNNING"), LIVE_DOWN, book("RUNNING", end="Unknown")], ("running", 75, "sacct")),
        ([NO_ROW, live("SLEEPWALKING")], ("running", 75, "scontrol")),
        # gone, or never there
        ([book("RUNNING", end="Unknown"), NO_JOB], ("unasked", 75, "sacct")),
        ([book("COMPLETED", end="Unknown"), NO_JOB] * 2, ("unasked", 75, "sacct")),
        ([NO_ROW, NO_JOB], ("unconfirmed", 75, None)),
        ([NO_ROW, NO_JOB] * 2, ("absent", 75, None)),
        ([NO_ROW, LIVE_DOWN] * 3, ("unasked", 75, None)),
        ([BOOK_DOWN, NO_JOB] * 3, ("unasked", 75, None)),
        ([BOOK_DOWN, LIVE_DOWN] * 3, ("unasked", 75, None)),
        ([], ("unasked", 75, None)),
        # another cluster's job, and jobs of several parts
        ([book("REVOKED"), NO_JOB, book("REVOKED")], ("elsewhere", 75, "sacct")),
        ([book("COMPLETED", display="7_2"), NO_JOB] * 2, ("several", 75, "sacct")),
        ([book("COMPLETED", display="7+0"), NO_JOB] * 2, ("several", 75, "sacct")),
        ([book("COMPLETED", display="5_2"), NO_JOB] * 2, ("settled", 0, "sacct")),
        # readings that change
        ([book("COMPLETED"), NO_JOB, book("FAILED", "4:0")], ("differs", 75, "sacct")),
        ([book("COMPLETED"), NO_JOB, book("FAILED", "4:0"), book("FAILED", "4:0")], ("settled", 4, "sacct")),
        ([book("FAILED", "0:0"), live("FAILED", "4:0"), book("FAILED", "4:0")], ("settled", 4, "sacct")),
        ([book("COMPLETED", "1:0"), live("COMPLETED", "1:0")], ("differs", 75, "sacct")),
    ],
)
def test_the_table(answers: list[Answer], expected: tuple[str, int, str | None]) -> None:
    truth = decide("7", answers)
    assert settled(truth) == expected
    assert (truth.doubt is None) == (truth.standing == "settled")
    assert truth.succeeded == (expected[:2] == ("settled", 0))


def test_a_doubt_says_why() -> None:
    assert "still in state RUNNING" in str(decide("7", [NO_ROW, live("RUNNING")]).doubt)
    assert "SLEEPWALKING" in str(decide("7", [NO_ROW, live("SLEEPWALKING")]).doubt)
    assert "Connection refused" in str(decide("7", [BOOK_DOWN, LIVE_DOWN]).doubt)
    assert "could not be asked since" in str(decide("7", [live("RUNNING"), LIVE_DOWN, BOOK_DOWN]).doubt)
    differs = str(decide("7", [book("COMPLETED"), live("FAILED", "4:0")]).doubt)
    assert "COMPLETED 0:0 (sacct)" in differs and "FAILED 4:0 (scontrol)" in differs


def test_notes_tell_the_derivation() -> None:
    failed = decide("7", [book("FAILED", "9:0", derived="3:0"), NO_JOB, book("FAILED", "9:0", derived="3:0")])
    assert any("137" in note for note in failed.notes) and any("3:0" in note for note in failed.notes)
    stale = decide("7", [book("RUNNING", end="Unknown"), live("COMPLETED"), live("COMPLETED")])
    assert any("stale" in note and "RUNNING" in note for note in stale.notes)
    both = asked("sacct", book("NODE_FAIL").stdout + book("COMPLETED", submit=2000).stdout)
    twice = decide("7", [both, NO_JOB, both])
    assert twice.succeeded and any("2 incarnations" in note for note in twice.notes)


def test_native_codes_come_whole_from_the_controller() -> None:
    assert decide("7", [book("FAILED", "9:0"), live("FAILED", "137:0")]).native == ExitCode(137, 0)
    assert decide("7", [book("FAILED", "9:0"), NO_JOB, book("FAILED", "9:0")]).native == ExitCode(9, 0)
    assert decide("7", [book("TIMEOUT"), live("TIMEOUT")]).native is None


def test_the_outcome_line_is_the_raw_record_or_says_unverifiable() -> None:
    truth = decide("7", [book("FAILED", "4:0"), live("FAILED", "4:0")])
    assert truth.outcome_line.startswith("7|FAILED|4:0|")
    controller = decide("7", [NO_ROW, live("COMPLETED"), live("COMPLETED")])
    assert "JobState=COMPLETED" in controller.outcome_line and "ExitCode=0:0" in controller.outcome_line
    assert decide("7", [book("COMPLETED"), LIVE_DOWN]).outcome_line == "7|UNVERIFIABLE|"


# --- what may never happen ---

POOL = [
    *(book("COMPLETED"), book("COMPLETED", submit=2000), book("COMPLETED", end="Unknown"), book("COMPLETED", "1:0")),
    *(book("FAILED", "4:0"), book("FAILED", "0:0"), book("RUNNING", end="Unknown"), book("CANCELLED by 0")),
    *(book("PREEMPTED"), book("REQUEUED"), NO_ROW, BOOK_DOWN, live("COMPLETED"), live("COMPLETED", submit=2000)),
    *(live("FAILED", "4:0"), live("RUNNING"), live("PENDING", submit=2000), live("COMPLETING"), NO_JOB, LIVE_DOWN),
    *(live("FAILED", "128:0"), live("ODD"), book("ODD"), book("REVOKED")),
]


def proves_success(answer: Answer) -> bool:
    record = answer.record
    return record is not None and record.terminal and record.state.word == "COMPLETED" and record.exit.zero


def behind(answer: Answer, truth: Truth) -> bool:
    """Whether the other book than the one that decides tells of an earlier incarnation."""
    assert answer.record is not None and truth.record is not None
    one, other = answer.record.submit, truth.record.submit
    return answer.source != truth.source and one is not None and other is not None and one < other


def test_a_row_of_an_earlier_incarnation_keeps_nobody_from_confirming_the_latest() -> None:
    old = book("FAILED", "4:0", submit=1000)
    truth = decide("7", [old, live("COMPLETED", submit=2000)] * 2)
    assert (truth.succeeded, truth.source) == (True, "scontrol")
    assert "earlier incarnation" in truth.notes[0]


@given(st.lists(st.sampled_from(POOL), max_size=8))
def test_success_needs_two_agreeing_records_and_no_later_denial(answers: list[Answer]) -> None:
    truth = decide("7", answers)
    if not truth.succeeded:
        return
    ends = [a for a in answers if a.record is not None and a.record.terminal and not behind(a, truth)]
    assert len(ends) >= 2 and all(proves_success(a) for a in ends[-2:])
    assert len({a.record.submit for a in ends[-2:] if a.record}) == 1


@given(st.lists(st.sampled_from(POOL), max_size=8))
def test_saved_evidence_gives_the_same_truth(answers: list[Answer]) -> None:
    truth = decide("7", answers)
    saved: dict[str, Any] = json.loads(json.dumps(truth.to_dict()))
    again = decide("7", [Answer.from_dict(answer) for answer in saved["answers"]])
    assert again == truth
    assert again.to_dict() == saved


@given(st.lists(st.sampled_from(POOL), max_size=6), st.integers(0, 6))
def test_a_failed_query_never_turns_a_settled_truth(answers: list[Answer], place: int) -> None:
    truth = decide("7", answers)
    if truth.settled:
        for failed in (BOOK_DOWN, LIVE_DOWN):
            longer = decide("7", [*answers[:place], failed, *answers[place:]])
            assert (longer.standing, longer.code) == (truth.standing, truth.code)


def test_a_saved_conclusion_is_not_believed() -> None:
    data = book("FAILED", "4:0").to_dict()
    data["outcome"] = "absent"
    answer = Answer.from_dict(data)
    assert answer.outcome == "record" and answer.record is not None


@pytest.mark.parametrize(
    "change",
    [
        {"source": "rumour"},
        {"returncode": "0"},
        {"returncode": True},
        {"stdout": None},
        {"argv": [1]},
        {"argv": None},
        {"stderr": ...},
    ],
)
def test_data_of_another_shape_is_no_answer(change: dict[str, Any]) -> None:
    data = {**book("COMPLETED").to_dict(), **change}
    if ... in data.values():
        del data["stderr"]
    with pytest.raises(ValueError, match="no answer of Slurm"):
        Answer.from_dict(data)


# --- steps ---


def step(name: str, state: str, code: int | None, signal: int = 0, end: float | None = 1002.0) -> StepRecord:
    exit = None if code is None else ExitCode(code, signal)
    return StepRecord(name, parse_state(state), state, exit, 1001.0, end, ("node1",), "")


def test_steps_that_accounting_tells_otherwise() -> None:
    steps = [
        step("7.0", "COMPLETED", 0),
        step("7.1", "FAILED", 9),
        step("7.2", "CANCELLED by 0", 0, 9),
        step("7.3", "COMPLETED", 0),
        step("7.4", "FAILED", 7),
        step("7.5", "RUNNING", 0, end=None),
        step("7.6", "CANCELLED", 0, 10),
        step("7.8", "FAILED", 0),
    ]
    agreeing = {"7.0": 0, "7.1": 137, "7.2": 137, "7.8": 128}
    assert compare_steps(steps, agreeing) == StepComparison()
    found = compare_steps(steps, {**agreeing, "7.3": 128, "7.4": 0, "7.5": 0, "7.6": 0, "7.7": 0})
    assert [sentence.split("7.")[1][0] for sentence in found.contradictions] == ["3", "4", "6"]
    assert [sentence.split("7.")[1][0] for sentence in found.unconfirmed] == ["5", "7"]
    assert "not finished" in found.unconfirmed[0] and "no row" in found.unconfirmed[1]


def test_a_step_without_a_code_confirms_nothing_and_still_denies_a_success() -> None:
    steps = [step("7.0", "CANCELLED", None), step("7.1", "CANCELLED", None), step("7.2", "COMPLETED", None)]
    found = compare_steps(steps, {"7.0": 137, "7.1": 0, "7.2": 0})
    assert [sentence.split(" ")[1] for sentence in found.contradictions] == ["7.1"]
    assert ["7.0" in found.unconfirmed[0], "7.2" in found.unconfirmed[1]] == [True, True]
    assert "CANCELLED without a code" in found.contradictions[0]


def test_codes_are_those_of_the_interface() -> None:
    assert (codes.CANCELLED, codes.DEADLINE, codes.UNVERIFIABLE) == (130, 124, 75)


# --- steps without a known id ---


def numbered(number: int, state: str = "COMPLETED", code: str = "0:0", end: str = "1002") -> StepRecord:
    job = "7|COMPLETED|0:0|0:0|7|1000|1001|1002|ann|c|node1"
    return asked("sacct", f"{job}\n7.{number}|{state}|{code}||7.{number}|1|1|{end}||c|node1\n").steps[0]


@pytest.mark.parametrize(
    ("steps", "seen", "unnamed", "contradicts", "unconfirmed"),
    [
        ([numbered(0), numbered(1)], {}, [0, 0], False, False),
        ([numbered(0), numbered(1, "FAILED", "3:0")], {}, [0, 3], False, False),
        ([numbered(0), numbered(1, "FAILED", "3:0")], {}, [0, 0], True, False),
        ([numbered(0), numbered(1)], {"7.0": 0}, [0], False, False),
        ([numbered(0), numbered(1, "FAILED", "3:0")], {"7.0": 0}, [0], True, False),
        # a step of somebody else's can hide it, and cannot make it
        ([numbered(0), numbered(1, "FAILED", "3:0"), numbered(2)], {}, [0, 0], False, False),
        # accounting is late
        ([numbered(0)], {}, [0, 0], False, True),
        ([numbered(0), numbered(1, "RUNNING", "0:0", "Unknown")], {}, [0, 0], False, True),
        ([], {}, [0], False, True),
        # nothing to confirm
        ([], {}, [], False, False),
        ([numbered(0, "FAILED", "3:0")], {}, [3, 137], False, False),
    ],
)
def test_steps_without_a_known_id_are_counted(
    steps: list[StepRecord], seen: dict[str, int], unnamed: list[int], contradicts: bool, unconfirmed: bool
) -> None:
    found = compare_steps(steps, seen, unnamed)
    assert (bool(found.contradictions), bool(found.unconfirmed)) == (contradicts, unconfirmed)


# --- several components, several incarnations ---


def told(state: str, code: str = "0:0") -> Truth:
    return decide("7", [book(state, code), live(state, code)])


GOOD, BAD, LATE, LIVES = told("COMPLETED"), told("FAILED", "3:0"), told("TIMEOUT"), decide("7", [live("RUNNING")])


@pytest.mark.parametrize(
    ("truths", "place"),
    [
        ([GOOD], 0),
        ([GOOD, GOOD], 0),
        ([GOOD, BAD], 1),
        ([BAD, GOOD], 0),
        ([BAD, told("FAILED", "4:0")], 0),
        ([BAD, LATE], 1),  # the failure may follow from the time limit
        ([LATE, told("CANCELLED")], 0),
        ([GOOD, BAD, LIVES], 2),
    ],
)
def test_which_component_decides(truths: list[Truth], place: int) -> None:
    assert deciding(truths) is truths[place]


def test_how_often_a_job_was_started_anew() -> None:
    assert restarts_of(decide("7", [])) is None
    assert restarts_of(told("COMPLETED")) == 0
    twice = asked("sacct", book("NODE_FAIL", submit=900).stdout + book("COMPLETED").stdout)
    assert restarts_of(decide("7", [twice, NO_JOB])) == 1


# --- tasks that never began ---


def shared(state: str, end: str = "1002") -> Answer:
    answer = asked("sacct", f"7|{state}|0:0|0:0|7_[1-4%2]|1000|None|{end}|ann|c|None assigned\n")
    return Answer.from_dict({**answer.to_dict(), "jobid": "7_3"})


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([shared("CANCELLED by 0"), NO_JOB] * 2, ("settled", 130)),
        ([shared("PENDING", "Unknown"), NO_JOB] * 2, ("unasked", 75)),  # cancelled alone, and nobody says so
        ([shared("PENDING", "Unknown")], ("running", 75)),
        # the row is older than the task's beginning, and its own row is late
        ([shared("CANCELLED by 0"), LIVE_DOWN] * 2, ("unasked", 75)),
    ],
)
def test_a_row_that_stands_for_several_tasks(answers: list[Answer], expected: tuple[str, int]) -> None:
    truth = decide("7_3", answers)
    assert (truth.standing, truth.code) == expected
    if truth.settled:
        assert "all tasks that never began (7_[1-4%2])" in " ".join(truth.notes)
        assert truth.outcome_line.startswith("7|CANCELLED by 0|")


# --- a row that is not complete ---


def young(state: str = "COMPLETED", code: str = "0:0") -> Answer:
    """What accounting shows for some seconds of a job whose end it has, and not the beginning."""
    return asked("sacct", f"7|{state}|{code}|0:0|7|1000|1001|1002|ann|c|node1|\n")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        # It may be the last task of an array: the controller would tell.
        ([young(), NO_JOB] * 3, ("unconfirmed", 75)),
        ([young(), LIVE_DOWN] * 3, ("unconfirmed", 75)),
        ([young()] * 3, ("unconfirmed", 75)),
        ([young(), live("COMPLETED")], ("settled", 0)),
        ([young("FAILED", "9:0"), live("FAILED", "137:0")], ("settled", 137)),
        ([young(), book("COMPLETED"), NO_JOB], ("settled", 0)),
    ],
)
def test_a_young_row_counts_beside_the_controllers_word_only(answers: list[Answer], expected: tuple[str, int]) -> None:
    truth = decide("7", answers)
    assert (truth.standing, truth.code) == expected
