"""The contract "fpm" against a table of small self-benchmarks that are kept as data (tests/artifacts)."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.contracts import examiner
from tests.artifacts.cases import BASES, CASES, Case


@pytest.mark.parametrize("name", CASES)
def test_what_it_amounts_to(tmp_path: Path, name: str) -> None:
    case = Case.load(name)
    case.put(tmp_path)
    place = case.place(tmp_path)
    looking = examiner([place])
    finding = looking.look(place)
    assert (finding.answer, len(finding.problems), len(finding.notes)) == (
        case.answer,
        len(case.problems),
        len(case.notes),
    ), (finding.problems, finding.notes)
    for found, expected in zip(finding.problems + finding.notes, [*case.problems, *case.notes], strict=True):
        assert found.startswith(expected), finding
    assert looking.look(place) == finding, "a second look says otherwise"
    looking.close()


def test_every_answer_and_every_set_of_files_is_in_the_table() -> None:
    cases = [Case.load(name) for name in CASES]
    assert {case.answer for case in cases} == {"pending", "ranks_complete", "valid", "invalid"}
    assert {case.base for case in cases} == {base.name for base in BASES.iterdir()}
    assert all(case.problems for case in cases if case.answer != "valid")
