"""Whose record is this? Ids come again."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from supervisor.core.identity import (
    NOTHING,
    SLACK,
    Known,
    by_slurms_clock,
    not_of_this_job,
    renamed,
    runs_another_script,
)
from supervisor.core.slurm_records import JobRecord
from tests.unit.test_truth import book, live

DAY = 86_400.0
T = 1_700_000_000


def record(submit: int = T, cluster: str = "east", user: str = "ann", start: str = "", end: str = "") -> JobRecord:
    line = f"7|COMPLETED|0:0|0:0|7|{submit}|{start or submit + 1}|{end or submit + 2}|{user}|{cluster}|node1\n"
    answer = book("COMPLETED")
    found = type(answer).from_dict({**answer.to_dict(), "stdout": line}).record
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("known", "told", "requeued", "why", "earlier"),
    [
        (NOTHING, {}, False, None, False),
        # who and where
        (Known(cluster="east"), {}, False, None, False),
        (Known(cluster="west"), {}, False, "was on cluster west, the record is of east", False),
        (Known(cluster="west"), {"cluster": ""}, False, None, False),
        (Known(user="ann"), {}, False, None, False),
        (Known(user="bob"), {}, False, "was of user bob, the record is of ann", False),
        (Known(user="bob"), {"user": ""}, False, None, False),
        (Known(name="x"), {}, False, None, False),
        # when it was asked for
        (Known(asked=T - 1.0, answered=T + 1.0), {}, False, None, False),
        (Known(asked=T + SLACK - 1), {}, False, None, False),
        (Known(asked=T + DAY, answered=T + DAY), {}, False, "submitted before this one was asked for", True),
        (Known(asked=T + DAY, answered=T + DAY), {}, True, "submitted before this one was asked for", True),
        (Known(asked=T + DAY, cluster="west"), {}, False, "submitted before this one was asked for", True),
        (Known(asked=T - DAY, answered=T - DAY), {}, False, "submitted long after it", False),
        (Known(asked=T - DAY, answered=T - DAY), {}, True, None, False),  # started anew: another time of submission
        (Known(asked=T - DAY), {}, False, None, False),  # an answer that never came tells no latest time
        # when its run was opened
        (Known(opened=T + 1.0), {}, False, None, False),
        (Known(opened=T + DAY), {}, False, "opened after the job of the record had ended", False),
        (Known(opened=T - DAY), {}, False, "opened before the job of the record began", False),
        (Known(opened=T + DAY), {"end": "Unknown"}, False, None, False),
        (Known(opened=T - DAY), {"start": "Unknown"}, False, None, False),
    ],
)
def test_the_table(known: Known, told: dict[str, Any], requeued: bool, why: str | None, earlier: bool) -> None:
    found = not_of_this_job(record(**told), known, requeued=requeued)
    if why is None:
        assert found is None
    else:
        assert found is not None and why in found.why
        assert found.earlier is earlier


def test_by_slurms_clock_where_the_controller_shows_our_script() -> None:
    shown = live("RUNNING").record
    assert shown is not None and shown.submit is not None
    shown = replace(shown, command="/runs/submit-a1/job.sh")
    wrong = float(shown.submit or 0) + DAY
    ours = Known(asked=wrong, answered=wrong, script=shown.command)
    assert not_of_this_job(shown, ours) is not None
    right = by_slurms_clock(ours, [record(), shown])
    assert (right.asked, right.answered) == (shown.submit, shown.submit)
    assert not_of_this_job(shown, right) is None
    for known, records in [
        (replace(ours, script="/elsewhere/job.sh"), [shown]),
        (replace(ours, script=""), [replace(shown, command="")]),
        (ours, [record()]),
        (ours, []),
    ]:
        assert by_slurms_clock(known, records) == known


def test_a_job_that_runs_another_script_is_another_one() -> None:
    shown = live("COMPLETED").record
    assert shown is not None
    ours, other = (replace(shown, command=f"/runs/submit-{token}/job.sh") for token in "ab")
    known = Known(script=ours.command)
    found = runs_another_script(known, [record(), other])
    assert found is not None and found.earlier
    assert found.why == f"it runs {other.command}, and what was submitted is {ours.command}"
    for records in ([], [record()], [ours], [other, ours]):
        assert runs_another_script(known, records) is None
    assert runs_another_script(NOTHING, [other]) is None


def test_a_name_is_told_and_decides_nothing() -> None:
    shown = live("COMPLETED").record
    assert shown is not None and shown.name == "x"
    assert "submitted as 'y', and Slurm calls it 'x'" in (renamed(shown, Known(name="y")) or "")
    assert not_of_this_job(shown, Known(name="y")) is None
    assert renamed(shown, Known(name="x")) is renamed(shown, NOTHING) is renamed(record(), Known(name="y")) is None


def test_what_is_known_comes_back_as_it_was_saved() -> None:
    for known in (NOTHING, Known("east", "ann", "x", 1.0, 2, 3.5)):
        assert Known.from_dict(asdict(known)) == known
    assert Known.from_dict({}) == NOTHING


@pytest.mark.parametrize("data", [None, [], "x", {"user": 3}, {"asked": "x"}, {"opened": True}, {"answered": [1]}])
def test_what_is_not_known_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        Known.from_dict(data)
