"""Which parts a job has, and how tasks are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.parts import (
    Parts,
    Target,
    compress_tasks,
    expand_tasks,
    parse_target,
    part_numbers,
    parts_of,
    shared_tasks,
)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("4", (4,)),
        ("1-3", (1, 2, 3)),
        ("1-9:2", (1, 3, 5, 7, 9)),
        ("1-9:3%3", (1, 4, 7)),
        ("0,7,2-3", (0, 2, 3, 7)),
        ("[3-5%2]", (3, 4, 5)),
        ("1-3,2-4", (1, 2, 3, 4)),
        ("5-5", (5,)),
    ],
)
def test_tasks_are_expanded(text: str, tasks: tuple[int, ...]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "1-", "-3", "1,,2", "1-9:0", "1:2", "1%", "1-3%x", "1,3,5,...", "0-100000", "1 2", "1\n"]
)
def test_what_is_no_list_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no tasks"):
        expand_tasks(text)


def test_more_tasks_than_are_reasonable_are_refused_in_all() -> None:
    with pytest.raises(ValueError, match="more than"):
        expand_tasks("0-99999,200000-299999")


@given(st.sets(st.integers(0, 2000), min_size=1))
def test_compressed_tasks_expand_to_themselves(tasks: set[int]) -> None:
    assert expand_tasks(compress_tasks(tasks)) == tuple(sorted(tasks))


@pytest.mark.parametrize(
    ("display", "found"),
    [
        ("12_[3-5%2]", (12, (3, 4, 5))),
        ("12_3", None),
        ("12+1", None),
        ("12", None),
        ("x_[1]", None),
        ("12_[1,...]", None),
    ],
)
def test_a_row_for_several_tasks(display: str, found: object) -> None:
    assert shared_tasks(display) == found


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("123", Target("123")),
        ("123_4", Target("123_4")),
        ("123+1", Target("123+1")),
        ("123.0", Target("123")),
        ("123_4.batch", Target("123_4")),
        ("123;east", Target("123", "east")),
        ("123_[1-3%2]", Target("123", None, (1, 2, 3))),
        ("123_[1-9:4];east-2", Target("123", "east-2", (1, 5, 9))),
    ],
)
def test_what_people_type(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["", "0", "x", "123;", "123;a b", "123;../x", "123_[1", "0_[1]", "123_[]", "-1"])
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_target(text)


@pytest.mark.parametrize(
    ("booked", "queued", "asked", "expected"),
    [
        # accounting has the tasks that began, and one row for those that did not
        (["12_1", "12_[2-4%2]"], [], {}, Parts("12", "array", ("12_1", "12_2", "12_3", "12_4"))),
        # the row that stands for several is stale, and lists one twice; a late row is at the controller
        (["12_1", "12_[1-2]"], ["12_3"], {}, Parts("12", "array", ("12_1", "12_2", "12_3"))),
        # tasks that were cancelled while they waited left no trace, but were asked for
        (["12_1"], [], {"tasks": [1, 2]}, Parts("12", "array", ("12_1", "12_2"))),
        (None, None, {"tasks": [10, 9]}, Parts("12", "array", ("12_9", "12_10"))),
        (["12+0", "12+1"], [], {}, Parts("12", "het", ("12+0", "12+1"))),
        # accounting shows the leader alone for a while
        (["12"], ["12+0", "12+1"], {}, Parts("12", "het", ("12+0", "12+1"))),
        (["12+2"], [], {}, Parts("12", "het", ("12+0", "12+1", "12+2"))),
        (["12"], [], {"components": 2}, Parts("12", "het", ("12+0", "12+1"))),
        (["12"], ["12"], {}, Parts("12", "single", ("12",))),
        ([], [], {}, Parts("12", "single", ("12",))),
        # rows of others prove nothing
        (["1_2", "123_4", "13+1", "12_x"], [], {}, Parts("12", "single", ("12",))),
    ],
)
def test_the_parts_are_all_that_anybody_names(
    booked: list[str] | None, queued: list[str] | None, asked: dict[str, object], expected: Parts
) -> None:
    assert parts_of("12", booked, queued, **asked) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("booked", "queued", "why"),
    [
        (["12_1"], None, "the controller could not be asked"),
        (None, ["12_1"], "accounting could not be asked"),
        (["12+0", "12+1"], None, "the controller could not be asked"),
        (["12_1", "12_[3,5,...]"], [], "cannot be read: 12_[3,5,...]"),
    ],
)
def test_a_list_that_may_lack_something_says_so(booked: list[str] | None, queued: list[str] | None, why: str) -> None:
    parts = parts_of("12", booked, queued)
    assert not parts.complete and why in parts.why


def test_parts_are_sorted_by_their_numbers() -> None:
    assert sorted(["12_10", "12_9", "12", "3+1"], key=part_numbers) == ["3+1", "12", "12_9", "12_10"]
