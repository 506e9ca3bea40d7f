"""The contract "sweep": which files are a concurrency's results, and when they are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.contracts import Place, directories, examiner, preexisting
from supervisor.core.artifact_table import Artifact, FieldRule
from supervisor.core.artifacts import Finding, Instance

PATH = "results_concurrency_{concurrency}_gpus_*.json"


def place(root: Path, path: str = PATH, concurrencies: tuple[int, ...] = (8,), **rules: Any) -> Place:
    artifact = Artifact("sweep", path, contract="sweep", concurrencies=concurrencies, **rules)
    return Place(Instance("sweep", artifact, None), root, {"run_dir": str(root), "jobid": "7"})


def look(where: Place) -> Finding:
    return examiner([where]).look(where)


def put(root: Path, name: str, completed: object = 10, **more: object) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"completed": completed, **more}))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (PATH, ["results_concurrency_{}_gpus_8.json", "results_concurrency_{}_gpus_8_ctx_4_gen_4.json"]),
        ("*_c{concurrency}_gpus_*.json", ["isl8_c{}_gpus_64_ctx_8_gen_56.json"]),
        ("*_conc{concurrency}.json", ["result_8_conc{}.json"]),
        ("results_concurrency_{concurrency}*.json", ["results_concurrency_{}_gpus_8.json"]),
        ("*{concurrency}*", ["r{}"]),
        ("c{concurrency}/*_c{concurrency}.json", ["c{0}/r_c{0}.json"]),
        ("**/*_c{concurrency}.json", ["a/b/r_c{}.json", "r_c{}.json"]),
        ("**/c{concurrency}/**/r.json", ["c{}/r.json", "a/c{}/b/r.json"]),
        ("c{concurrency}/**/r.json", ["c{}/a/b/r.json", "c{}/r.json"]),
    ],
)
def test_the_names_of_results(tmp_path: Path, path: str, names: list[str]) -> None:
    where = place(tmp_path, path, (8, 64))
    for concurrency in (6, 64, 80, 648, 18):
        for name in names:
            put(tmp_path, name.format(concurrency), max_concurrency=concurrency)
    finding = look(where)
    assert finding.answer == "pending"
    assert [problem.split(";")[1] for problem in finding.problems] == [" expected a result of concurrency 8"]
    for name in names:
        put(tmp_path, name.format(8), max_concurrency=8)
    finding = look(where)
    assert (finding.answer, finding.problems) == ("valid", ())
    assert sorted(fact.path for fact in finding.files) == sorted(n.format(c) for n in names for c in (8, 64))
    assert all(fact.sha256 for fact in finding.files)


def test_a_missing_result_is_told(tmp_path: Path) -> None:
    finding = look(place(tmp_path, concurrencies=(8, 16)))
    assert (finding.answer, finding.problems) == (
        "pending",
        (
            "results_concurrency_8_gpus_*.json: found nothing; expected a result of concurrency 8",
            "results_concurrency_16_gpus_*.json: found nothing; expected a result of concurrency 16",
        ),
    )


NAME = "results_concurrency_8_gpus_8.json"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"completed": 1}, None),
        ({"completed": 0.5, "max_concurrency": 8}, None),
        ({"completed": 1, "max_concurrency": None}, None),
        ({"completed": 1, "max_concurrency": "16"}, None),
        ({"completed": 1, "max_concurrency": 16}, "max_concurrency: found 16; expected 8, as in the file's name"),
        ({"completed": 0}, "completed: found 0, which is not a success; expected more than 0"),
        ({"completed": -1}, "completed: found -1, which is not a success; expected more than 0"),
        ({}, "completed: found nothing; expected the number of successful requests"),
        ({"completed": True}, "completed: found true; expected the number of successful requests"),
        ({"completed": "10"}, 'completed: found "10"; expected the number of successful requests'),
        ({"completed": [1]}, "completed: found a list of 1; expected the number of successful requests"),
        ([{"completed": 1}], "found a list of 1; expected a JSON object"),
        ({"completed": 1, "failed": 2}, "failed: found 2; expected 0"),
    ],
)
def test_what_a_result_must_hold(tmp_path: Path, document: Any, problem: str | None) -> None:
    (tmp_path / NAME).write_text(json.dumps(document))
    rules = {"failed": FieldRule(equals=0)} if isinstance(document, dict) and "failed" in document else {}
    finding = look(place(tmp_path, fields=rules))
    assert finding.problems == (() if problem is None else (f"{NAME}: {problem}",))
    assert finding.answer == ("valid" if problem is None else "invalid")


def test_success_is_where_the_plan_says(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"requests": {"ok": 3}}')
    assert look(place(tmp_path, successful="requests.ok")).answer == "valid"
    assert look(place(tmp_path, successful="requests.done")).answer == "invalid"


def test_two_results_of_one_concurrency_must_both_hold(tmp_path: Path) -> None:
    put(tmp_path, "results_concurrency_8_gpus_1.json")
    put(tmp_path, "results_concurrency_8_gpus_2.json", 0)
    finding = look(place(tmp_path))
    assert finding.answer == "invalid"
    assert [problem.split(":")[0] for problem in finding.problems] == ["results_concurrency_8_gpus_2.json"]
    (tmp_path / "results_concurrency_8_gpus_2.json").write_text('{"completed": ')
    assert look(place(tmp_path)).answer == "pending"


def test_a_name_with_two_concurrencies_is_one_file(tmp_path: Path) -> None:
    put(tmp_path, "r_1_8.json", max_concurrency=8)
    finding = look(place(tmp_path, "*_{concurrency}*.json", (1, 8)))
    assert [(fact.path, len(fact.problems)) for fact in finding.files] == [("r_1_8.json", 1)]
    assert finding.answer == "invalid"


def test_one_that_is_wrong_does_not_wait_for_the_others(tmp_path: Path) -> None:
    put(tmp_path, NAME, 0)
    finding = look(place(tmp_path, concurrencies=(4, 8)))
    assert (finding.answer, len(finding.problems)) == ("invalid", 2)


def test_links_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "real.json")
    (tmp_path / NAME).symlink_to("real.json")
    finding = look(place(tmp_path))
    assert (finding.answer, finding.problems) == (
        "pending",
        (f"{NAME}: found a symbolic link; expected a plain file",),
    )


def test_what_is_there_before_and_what_is_watched(tmp_path: Path) -> None:
    where = place(tmp_path, "out/c{concurrency}/*_{jobid}.json", (8, 16))
    put(tmp_path, "out/c16/x_7.json")
    put(tmp_path, "out/c4/x_7.json")
    assert preexisting(where) == ("out/c16/x_7.json",)
    assert list(directories(where)) == [tmp_path / "out/c8", tmp_path / "out/c16"]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations([1, 2, 16, 21]))
def test_any_order_of_arrival_ends_the_same(tmp_path_factory: pytest.TempPathFactory, order: list[int]) -> None:
    root = tmp_path_factory.mktemp("r")
    where = place(root, "*_conc{concurrency}.json", (1, 2, 16, 21))
    examined = examiner([where])
    for concurrency in order:
        assert examined.look(where).answer == "pending"
        (root / f"r_conc{concurrency}.json").write_text('{"completed"')
        assert examined.look(where).answer == "pending"
        put(root, f"r_conc{concurrency}.json", max_concurrency=concurrency)
    finding = examined.look(where)
    assert (finding.answer, finding.problems) == ("valid", ())
    assert [fact.path for fact in finding.files] == [f"r_conc{number}.json" for number in (1, 2, 16, 21)]
