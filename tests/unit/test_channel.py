"""The engine's side of the channel: what it sends fits, what is foreign is told apart."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import events as ev
from supervisor.engine import channel

documents = st.dictionaries(st.text(max_size=30), st.text(max_size=1500), max_size=3)


@given(documents)
def test_a_specification_arrives_whole_in_lines_that_fit(document: dict[str, str]) -> None:
    sent = channel.specification("n0", document).splitlines(keepends=True)
    assert all(len(line) <= channel.LINE_LIMIT for line in sent)
    parts = [json.loads(line) for line in sent]
    assert json.loads("".join(part["part"] for part in parts)) == document
    assert [part["more"] for part in parts] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Welcome to node7",
        b"0: {}",
        b"{",
        b"[]",
        b'{"e":"hello"}',
        b'{"n":"another","e":"ended","code":0,"signal":null}',
        b'{"n":"n0","e":3}',
        b'{"n":"n0"}',
        b"\xff\xfe",
    ],
)
def test_foreign_lines_are_no_reports(line: bytes) -> None:
    assert channel.report("n0", line) is None


def test_reports_become_events() -> None:
    report = channel.report("n0", b'{"n":"n0","e":"ended","code":null,"signal":11,"core":true}')
    assert report is not None
    assert channel.EVENTS[report["e"]](2, report) == ev.RankEnded(2, None, 11, True)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"e":"swept"}', b'{"e":"swept","killed":"1","left":0}', b"banner"])
def test_only_a_whole_answer_of_a_search_counts(line: bytes) -> None:
    assert channel.swept(line) is None
    assert channel.swept(b'{"e":"swept","killed":2,"left":0}') == {"e": "swept", "killed": 2, "left": 0}
