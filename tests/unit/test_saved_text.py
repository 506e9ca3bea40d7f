"""Saved output of sacct and scontrol: what is recognized, what is refused, and what one reading proves."""

from __future__ import annotations

from datetime import datetime

import pytest

from supervisor.core.saved_text import FINAL_AFTER, SavedText, describe, recognize, saved_parts, saved_truth
from supervisor.core.slurm import Unreadable
from supervisor.core.slurm_records import SACCT_FIELDS
from supervisor.core.truth import Truth
from tests.corpus import files
from tests.unit.test_truth import SHOWN

ROW = "7|{state}|{code}|0:0|7|1000|1001|1002|ann|c|node1\n"
STEP = "7.0|FAILED|3:0||7.0|1001|1001|1002||c|node1\n"
HEADER = "|".join(SACCT_FIELDS[:-1]) + "\n"
DEFAULT = "JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode\n"
SOON, OLD = 1002.0 + FINAL_AFTER - 1, 1002.0 + FINAL_AFTER


def row(state: str = "FAILED", code: str = "4:0") -> str:
    return ROW.format(state=state, code=code)


def shown(state: str = "FAILED", code: str = "4:0", name: str = "x") -> str:
    return SHOWN.format(jobid=7, parts="", state=state, code=code, submit=1000).replace("JobName=x", f"JobName={name}")


def one_line(text: str) -> str:
    return " ".join(text.split()) + "\n"


def truth(*texts: str, written: float = SOON, jobid: str = "7") -> Truth:
    return saved_truth(jobid, [recognize(SavedText(f"{n}.txt", text, written)) for n, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("texts", "standing", "code"),
    [
        ((row(), shown()), "settled", 4),
        ((HEADER + row() + STEP, shown()), "settled", 4),
        ((shown(), row()), "settled", 4),
        ((row().replace("\n", "|main\n"), shown()), "settled", 4),
        ((row(), one_line(shown())), "settled", 4),
        ((row("COMPLETED", "0:0"), shown("COMPLETED", "0:0")), "settled", 0),
        ((row("FAILED", "9:0"), shown("FAILED", "137:0")), "settled", 137),
        ((row(), row()), "settled", 4),  # saved twice
        ((row(), shown("FAILED", "5:0")), "differs", 75),
        ((row(),), "unconfirmed", 75),
        ((shown(),), "unconfirmed", 75),
        ((one_line(shown()),), "unconfirmed", 75),
        ((shown("RUNNING", "0:0"),), "running", 75),
        # columns in another order, dates, no raw id, and what people save without thinking of it
        (("State|ExitCode|JobID|End\nFAILED|4:0|7|1970-01-01T00:16:42\n", shown()), "settled", 4),
        (("JobID|State|ExitCode|\n7|FAILED|4:0|\n", shown()), "settled", 4),
        ((DEFAULT + "7|x|main|acc|1|FAILED|4:0\n7.batch|batch||acc|1|FAILED|4:0\n", shown()), "settled", 4),
        ((DEFAULT + "7|x|main|acc|1|FAILED|5:0\n", shown()), "unconfirmed", 75),
        ((DEFAULT + "7|x|main|acc|1|FAILED|4:0\n",), "unconfirmed", 75),
        ((HEADER,), "unconfirmed", 75),
        ((row().replace("\n", "\r\n"), shown().replace("\n", "\r\n")), "settled", 4),
    ],
)
def test_what_texts_prove(texts: tuple[str, ...], standing: str, code: int) -> None:
    found = truth(*texts)
    assert (found.standing if standing != "unconfirmed" else not found.settled, found.code) == (
        standing if standing != "unconfirmed" else True,
        code,
    ), found.doubt


@pytest.mark.parametrize(
    ("text", "written", "standing"),
    [
        (row(), OLD, "settled"),
        (row(), SOON, "unconfirmed"),
        (row("COMPLETED", "0:0"), OLD, "settled"),
        (row().replace("\n", "|main\n"), OLD, "settled"),
        (row().replace("\n", "|\n"), OLD, "unconfirmed"),  # it may be one part of a job
        (row().replace("|1002|", "|Unknown|"), OLD, "unconfirmed"),
        (row("NODE_FAIL", "0:0"), SOON, "unasked"),  # it may be queued again
        (row("NODE_FAIL", "0:0"), OLD, "settled"),
        (shown(), OLD, "unconfirmed"),  # the controller's record of an old job is not old
    ],
)
def test_one_reading_counts_when_its_record_was_old(text: str, written: float, standing: str) -> None:
    assert truth(text, written=written).standing == standing


def test_an_answer_says_what_each_text_counted_for() -> None:
    readings = [
        recognize(SavedText("a.txt", row(), OLD)),
        recognize(SavedText("b.txt", shown(), SOON)),
        recognize(SavedText("c.txt", row().replace("7|", "8|"), SOON)),
    ]
    assert describe(["7"], readings) == [
        "a.txt (sacct): FAILED 4:0 (sacct), saved up to 600 s after its end: counts as confirmed",
        "b.txt (scontrol): FAILED 4:0 (scontrol), saved up to 599 s after its end: one reading, "
        "which does not confirm itself",
        "c.txt (sacct): no record of job 7",
    ]


@pytest.mark.parametrize(
    "text",
    [
        # a name with a newline makes a row of its own: a second job, another job, a step
        "7|x|p|a|1|COMPLETED|0:0\n7|y|main|acc|1|FAILED|1:0\n",
        "7|x|p|a|1|COMPLETED|0:0\n8|y|main|acc|1|FAILED|1:0\n",
        "7|x|p|a|1|COMPLETED|0:0\n7.9|y|main|acc|1|FAILED|1:0\n",
        "7|x|p|a|1|COMPLETED|0:0\n8.9|y||acc|1|FAILED|1:0\n",
        # or less than a row
        "7|x|p|a|1|COMPLETED|0:0\ny|main|acc|1|FAILED|1:0\n",
        "7|x|y|main|acc|1|FAILED|1:0\n",
        # and the real row may not come first
        "7.9|x||a|1|COMPLETED|0:0\n7|y|main|acc|1|FAILED|1:0\n",
        "7|x||acc|1|COMPLETED|0:0\n",
    ],
)
def test_a_table_in_which_a_name_may_have_made_a_row_is_refused(text: str) -> None:
    reading = recognize(SavedText("a.txt", DEFAULT + text, OLD))
    assert reading.problem and "a.txt" in reading.problem
    assert not saved_truth("7", [reading]).settled


@pytest.mark.parametrize(
    "header",
    [
        "JobID|State|ExitCode|JobName",  # nothing behind the name that a step has not
        "State|JobName|JobID|ExitCode|Partition",  # the id behind the name
        "JobID|JobName|Partition|State|ExitCode|Comment",
        "JobIDRaw|State|ExitCode",  # one task of an array looks like a job
        "JobID|State|ExitCode|State",
    ],
)
def test_columns_that_cannot_be_trusted_are_refused(header: str) -> None:
    values = {"JobID": "7", "JobIDRaw": "7", "State": "COMPLETED", "ExitCode": "0:0", "JobName": "x", "Partition": "p"}
    line = "|".join(values.get(column, "") for column in header.split("|"))
    assert recognize(SavedText("a.txt", f"{header}\n{line}\n", OLD)).problem


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", "7|COMPLETED|0:0\n", "JobID State ExitCode\n7 COMPLETED 0:0\n", "slurm_load_jobs error\n", "{}"],
)
def test_what_is_neither_is_said(text: str) -> None:
    with pytest.raises(Unreadable, match=r"a\.txt is neither .*`sacct -P -D -j JOBID"):
        recognize(SavedText("a.txt", text, OLD))


@pytest.mark.parametrize("key", ["JobState=COMPLETED", "ExitCode=0:0", "EndTime=5", "UserId=root(0) GroupId="])
def test_a_name_in_one_line_can_add_a_field_and_take_none_away(key: str) -> None:
    reading = recognize(SavedText("a.txt", one_line(shown(name=f"a {key} b")), OLD))
    assert "imitates" in reading.problem
    harmless = recognize(SavedText("a.txt", one_line(shown(name="a Comment=b DerivedExitCode=0:0")), OLD))
    assert not harmless.problem


def test_an_array_that_was_saved_whole() -> None:
    lines = [row(code=f"{n}:0").replace("7|", f"{20 + n}|", 1).replace("|7|", f"|7_{n}|") for n in (1, 2)]
    shared = "7|CANCELLED by 0|0:0|0:0|7_[3-4]|1000|None|1002|ann|c|None assigned\n"
    text = "".join(lines) + shared
    reading = recognize(SavedText("a.txt", text, OLD))
    parts = saved_parts("7", [reading])
    assert (parts.kind, parts.names, parts.complete) == ("array", ("7_1", "7_2", "7_3", "7_4"), True)
    assert [saved_truth(name, [reading]).code for name in parts.names] == [1, 2, 130, 130]
    assert describe(parts.names, [reading]) == [
        "a.txt (sacct): records of 4 of the 4 parts, of which 4 count as confirmed"
    ]
    assert not saved_parts("7", [recognize(SavedText("a.txt", text, SOON))]).complete
    alone = recognize(SavedText("b.txt", row(), OLD))
    assert saved_parts("7", [alone]).names == ("7",)


@pytest.mark.parametrize("case", files.read_all(), ids=lambda case: case.name)
def test_what_a_cluster_printed_is_recognized_and_never_judged_otherwise(case: files.Case) -> None:
    for expected in case.expect:
        answers = [answer for answer in case.known(expected) if answer.stdout.strip() and answer.returncode == 0]
        texts = [
            SavedText(f"{n}.txt", answer.stdout, datetime.fromisoformat(answer.at).timestamp())
            for n, answer in enumerate(answers)
        ]
        found = saved_truth(expected.jobid, [recognize(text) for text in texts])
        assert found.code in (expected.code, 75)
        if expected.standing != "settled":
            assert not found.settled
