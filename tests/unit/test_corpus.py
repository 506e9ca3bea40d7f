"""The corpus of real records: from what Slurm printed to what was true of the job. See tests/corpus/files.py."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from _pytest.mark import ParameterSet

from supervisor.core.answers import read_answer
from supervisor.core.slurm import STATES
from supervisor.core.slurm_queue import parse_squeue_jobs
from supervisor.core.truth import Standing
from supervisor.core.two_books import decide
from tests.corpus import files
from tests.corpus.files import Case, Expectation, Said

CASES = files.read_all()


def expectations() -> list[ParameterSet]:
    """One parameter for each; those that are open must fail, so that whoever meets them notices."""
    return [
        pytest.param(
            case,
            expected,
            id=f"{case.name}:{expected.jobid}@{expected.since}-{expected.upto}",
            marks=[pytest.mark.xfail(reason=expected.open)] if expected.open else [],
        )
        for case in CASES
        for expected in case.expect
    ]


@pytest.mark.parametrize(("case", "expected"), expectations())
def test_what_was_printed_is_judged_by_what_was_true(case: Case, expected: Expectation) -> None:
    truth = decide(expected.jobid, case.known(expected))
    state = truth.record.state_text if truth.record else ""
    assert (truth.standing, state, truth.code, truth.outcome_line) == (
        expected.standing,
        expected.state,
        expected.code,
        expected.outcome,
    )
    assert (truth.doubt is None) == (expected.standing == "settled") and expected.doubt in (truth.doubt or "")


@pytest.mark.parametrize(("case", "expected"), expectations())
def test_a_question_that_fails_afterwards_takes_nothing_back(case: Case, expected: Expectation) -> None:
    known = case.known(expected)
    late = [
        read_answer(
            source=source,
            jobid=expected.jobid,
            argv=(),
            at="",
            returncode=None,
            stdout="",
            stderr="",
            trouble="did not answer",
        )
        for source in files.SOURCES
    ]
    before, after = decide(expected.jobid, known), decide(expected.jobid, [*known, *late])
    assert (after.code, after.outcome_line) == (before.code, before.outcome_line)
    assert after.settled == before.settled


def queues() -> list[ParameterSet]:
    """Every answer of squeue that is expected to show something."""
    return [
        pytest.param(said, id=f"{case.name}:{said.moment}") for case in CASES for said in case.queues() if said.queue
    ]


@pytest.mark.parametrize("said", queues())
def test_squeue_shows_the_states_that_were_there(said: Said) -> None:
    rows = parse_squeue_jobs(said.stdout)
    assert {row.display: row.state.word for row in rows} == said.queue
    assert all(row.submit for row in rows)


def test_the_corpus_is_whole() -> None:
    """A case that lost its answers or its expectations proves nothing and would pass."""
    words = {
        answer.record.state.word for case in CASES for e in case.expect for answer in case.known(e) if answer.record
    }
    settled = {e.state.split()[0] for case in CASES for e in case.expect if e.standing == "settled"}
    assert settled >= {state.word for state in STATES if state.terminal} - {"REVOKED"}
    assert words >= {"REVOKED", "COMPLETING", "REQUEUED", "SUSPENDED", "SPECIAL_EXIT", "PENDING", "RUNNING"}
    assert {e.standing for case in CASES for e in case.expect} == set(get_args(Standing))
    for case in CASES:
        assert case.what and case.expect and case.made in ("real", "text"), case.name
        assert all(case.known(expected) for expected in case.expect), case.name
        there = {path.name for path in (files.HERE / case.name).iterdir()}
        assert there == {"case.toml", *map(files.file_name, case.answers)}, case.name


def test_nothing_in_the_corpus_tells_of_the_machine_that_made_it() -> None:
    for path in (path for case in CASES for path in (files.HERE / case.name).iterdir()):
        text = path.read_bytes().decode()
        assert not re.search(r"/(?:tmp|home|root|work)\b|slurm-\w{8}", text), path
