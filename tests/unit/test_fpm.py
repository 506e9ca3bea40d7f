"""The contract "fpm": its laws, whatever the order in which files come, and the judges on documents of any kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervisor.contracts import Examiner, Place, examiner, fpm_content, preexisting
from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import Finding, Instance
from tests.artifacts import producer
from tests.artifacts.cases import BASES, place
from tests.artifacts.producer import Benchmark
from tests.mounts import two_mounts

B, M, P = "bench.json", "bench_merged.json", "bench_merged_worker_probe.json"
LEGACY = {"legacy": False}
RANK = {"rank": 0, "size": 1, "run_id": None, "grid_digest": None, "mode": None, **LEGACY}
JUDGES: tuple[tuple[str, Callable[..., Any], dict[str, Any]], ...] = (
    (B, fpm_content.rank, RANK),
    (M, fpm_content.merged, LEGACY),
    (P, fpm_content.probe, LEGACY),
)
NODES = {path.name: path.read_text() for path in sorted((BASES / "nodes").iterdir())}
"""Two nodes of two ranks each: eight files."""


@contextmanager
def looking(*places: Place) -> Iterator[Examiner]:
    found = examiner(places)
    yield found
    found.close()


def nodes(root: Path, count: int = 2, **keys: Any) -> list[Place]:
    return [place(root, node, count, ranks_per_node=2, **keys) for node in range(count)]


def at(root: Path, path: str, **values: str) -> Place:
    artifact = Artifact("fpm", path, contract="fpm", per="node", ranks_per_node=1)
    return Place(Instance("fpm@0", artifact, 0), root, {"run_dir": str(root), **values})


def put(root: Path, name: str, text: str) -> None:
    """Put a file in its place as producers do."""
    (root / f"{name}.tmp").write_text(text)
    (root / f"{name}.tmp").replace(root / name)


def said(finding: Finding) -> tuple[Any, ...]:
    """What a finding says, without the times of its files."""
    files = [(fact.path, fact.size, fact.sha256, fact.kind, fact.problems) for fact in finding.files]
    return finding.answer, finding.problems, finding.notes, files


def changed(text: str, **keys: Any) -> str:
    return json.dumps(json.loads(text) | keys)


# ------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("name", [B, M, P])
def test_any_prefix_of_a_valid_file_is_pending(tmp_path: Path, name: str) -> None:
    files = {path.name: path.read_text().strip() for path in (BASES / "one").iterdir()}
    for file, text in files.items():
        put(tmp_path, file, text)
    where = place(tmp_path)
    with looking(where) as eyes:

        @given(st.integers(0, len(files[name]) - 1))
        @settings(max_examples=60, deadline=None)
        def prefix(length: int) -> None:
            put(tmp_path, name, files[name][:length])
            finding = eyes.look(where)
            assert finding.answer == ("pending" if name == B else "ranks_complete")
            assert [problem.split(":")[0] for problem in finding.problems] == [name]

        prefix()
        put(tmp_path, name, files[name])
        assert eyes.look(where).answer == "valid"


ORDERS = st.lists(st.sampled_from(["look 0", "look 1"]), max_size=12).flatmap(
    lambda looks: st.permutations([*NODES, *looks])
)


def arrive(root: Path, files: dict[str, str], order: list[str]) -> tuple[list[Finding], list[Finding]]:
    """Let files arrive, with looks at either node in between: those looks, and what both nodes are at the end."""
    places = nodes(root)
    with looking(*places) as eyes:
        between = []
        for step in order:
            if step.startswith("look"):
                between.append(eyes.look(places[int(step[-1])]))
            else:
                put(root, step, files[step])
        for where in places:
            eyes.look(where)
        return between, [eyes.look(where) for where in places]


@given(ORDERS)
@settings(max_examples=40, deadline=None)
def test_any_order_of_arrival_ends_the_same(order: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        between, end = arrive(Path(root), NODES, order)
    assert [finding.answer for finding in end] == ["valid", "valid"]
    assert not any(finding.problems or finding.notes for finding in end)
    assert "invalid" not in {finding.answer for finding in between}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a sibling of this node": ("bench_dp1.json", {"run_id": "run-0"}, "bench_dp1.json"),
    "another node's": ("bench_dp3.json", {"grid_digest": "other"}, "bench_dp3.json"),
    "the lowest": ("bench.json", {"measurement_protocol": {"repeats": 3}}, "bench_dp1.json"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_rank_that_contradicts_another_is_wrong_in_any_order(what: str) -> None:
    name, keys, blamed = WRONG[what]
    files = {**NODES, name: changed(NODES[name], **keys)}
    ends: list[Any] = []

    @given(ORDERS)
    @settings(max_examples=15, deadline=None)
    def any_order(order: list[str]) -> None:
        with tempfile.TemporaryDirectory() as root:
            _, end = arrive(Path(root), files, order)
        ends.append([said(finding) for finding in end])
        assert ends[-1] == ends[0]

    any_order()
    assert {answer for answer, *_ in ends[0]} & {"invalid"}
    contradictions = [problem for _, problems, *_ in ends[0] for problem in problems]
    assert [problem for problem in contradictions if problem.startswith(f"{blamed}: ")]
    assert all("as in bench.json" in problem for problem in contradictions)


def test_nodes_that_contradict_each_other_both_say_so(tmp_path: Path) -> None:
    for name, text in NODES.items():
        put(tmp_path, name, changed(text, run_id="run-2") if name in ("bench_dp2.json", "bench_dp3.json") else text)
    first, second = nodes(tmp_path)
    with looking(first, second) as eyes:
        assert eyes.look(first).answer == "valid", "nobody has looked at the other node yet"
        finding = eyes.look(second)
        assert finding.answer == "invalid"
        assert finding.problems[0] == (
            'bench_dp2.json: $.run_id: found "run-2"; expected "run-1", as in bench.json of fpm@0'
        )
        finding = eyes.look(first)
        assert finding.answer == "invalid"
        assert finding.problems[0] == (
            'bench_dp2.json of fpm@1: $.run_id: found "run-2"; expected "run-1", as in bench.json'
        )


def test_a_contradiction_of_others_is_no_concern_of_a_node(tmp_path: Path) -> None:
    benchmark, other = Benchmark(nodes=3, points=1), Benchmark(nodes=3, points=1, run_id="run-2")
    for node in range(3):
        said_by = other if node == 1 else benchmark
        put(tmp_path, said_by.rank_name(node), json.dumps(said_by.rank(node)))
    places = [place(tmp_path, node, 3) for node in range(3)]
    with looking(*places) as eyes:
        for where in places:
            eyes.look(where)
        assert [eyes.look(where).answer for where in places] == ["invalid", "invalid", "ranks_complete"]


PINS: dict[str, Any] = {"run_id": "run-1", "grid_digest": "grid-decode-2", "mode": "decode"}


@given(st.sampled_from(sorted(PINS)), st.sampled_from(["bench.json", "bench_dp1.json"]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_rank_that_contradicts_a_pin_is_wrong_at_once(pin: str, name: str, alone: bool) -> None:
    pins = PINS | {pin: "agg" if pin == "mode" else "another"}
    with tempfile.TemporaryDirectory() as root:
        put(Path(root), name, NODES[name])
        if not alone:
            put(Path(root), M, NODES[M])
        first, second = nodes(Path(root), **pins)
        with looking(first, second) as eyes:
            finding = eyes.look(first)
    assert finding.answer == "invalid"
    assert [problem for problem in finding.problems if "pins it" in problem and problem.startswith(name)]


ELSEWHERE: dict[str, list[dict[str, Any]]] = {
    M: [
        {"run_id": "run-0"},
        {"grid_digest": "other"},
        {"config": {"mode": "agg"}},
        {"merged_output_path": "/x/old_merged.json", "worker_probe_path": "/x/old_merged_worker_probe.json"},
        {"rank_files": ["/results/bench.json", "/results/bench_dp9.json"]},
    ],
    P: [
        {"run_id": "run-0"},
        {"merged_output_path": "/x/old_merged.json"},
        {
            "rank_files": ["/x/bench.json", "/x/bench_dp9.json"],
            "ranks": {
                "0": {"rank_file": "/x/bench.json", "resolution": "worker_probe"},
                "9": {"rank_file": "/x/bench_dp9.json", "resolution": "worker_probe"},
            },
        },
    ],
}


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, all_keys in ELSEWHERE.items() for keys in all_keys])
def test_what_is_bound_elsewhere_does_not_count_and_can_be_replaced(
    tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    for file, text in NODES.items():
        put(tmp_path, file, changed(text, **keys) if file == name else text)
    first, second = nodes(tmp_path)
    with looking(first, second) as eyes:
        unbound = eyes.look(first)
        assert unbound.answer == "ranks_complete"
        assert unbound.problems and all(problem.startswith(f"{name}: $.") for problem in unbound.problems)
        assert all("bound elsewhere and does not count" in problem for problem in unbound.problems)
        assert eyes.look(second).answer == "valid", "the other node is no concern of it"
        put(tmp_path, name, NODES[name])
        bound = eyes.look(first)
    assert bound.answer == "valid"
    same = [fact for fact in unbound.files if fact.path != name]
    assert same == [fact for fact in bound.files if fact.path != name]
    assert not any(fact.problems for fact in same)


def test_an_old_probe_beside_a_new_merged_file(tmp_path: Path) -> None:
    """The probe of an earlier run with the same names: bound there, and waited for here."""
    old, new = Benchmark(run_id="run-0"), Benchmark(run_id="run-1")
    put(tmp_path, B, json.dumps(new.rank(0)))
    put(tmp_path, P, json.dumps(old.probe(0)))
    where = place(tmp_path)
    with looking(where) as eyes:
        put(tmp_path, M, json.dumps(old.merged(0)))
        assert eyes.look(where).answer == "ranks_complete"
        put(tmp_path, M, json.dumps(new.merged(0)))
        finding = eyes.look(where)
        assert finding.answer == "ranks_complete"
        assert finding.problems[0].startswith(f'{P}: $.run_id: found "run-0"; expected "run-1"')
        put(tmp_path, P, json.dumps(new.probe(0)))
        assert eyes.look(where).answer == "valid"


@pytest.mark.parametrize("name", [B, M, P])
def test_what_is_bound_elsewhere_is_found_replaced_through_a_client_that_remembers(tmp_path: Path, name: str) -> None:
    """Whichever of the files is of another run: attributes that are remembered for 20 s do not hide the right one. (A
    rank alone is never wrong, but the merged file beside it belongs elsewhere.)"""
    with two_mounts(tmp_path) as (here, there):
        files = {path.name: path.read_text() for path in (BASES / "one").iterdir()}
        for file, text in files.items():
            put(here, file, changed(text, run_id="run-0") if file == name else text)
        where = place(there)
        with looking(where) as eyes:
            assert eyes.look(where).answer == "ranks_complete"
            put(here, name, files[name])
            assert eyes.look(where).answer == "valid"


# ---------------------------------------------------------------------------------------------------- names and kinds


def test_kinds_and_checksums_are_told(tmp_path: Path) -> None:
    for name, text in NODES.items():
        put(tmp_path, name, text)
    first, second = nodes(tmp_path)
    with looking(first, second) as eyes:
        files = eyes.look(second).files
    assert [(fact.path, fact.kind, fact.size) for fact in files] == [
        (name, kind, (tmp_path / name).stat().st_size)
        for name, kind in (
            ("bench_dp2.json", "rank"),
            ("bench_dp2_merged.json", "merged"),
            ("bench_dp2_merged_worker_probe.json", "probe"),
            ("bench_dp3.json", "rank"),
        )
    ]
    assert all(fact.sha256 is not None for fact in files)


def test_names_follow_from_the_path_and_hold_no_patterns(tmp_path: Path) -> None:
    """A value that looks like a pattern is a name, and directories of the path may be missing for long."""
    where = place(tmp_path)
    artifact = type(where.instance.artifact)("fpm", "out/{node}/.b.json", contract="fpm", per="node", ranks_per_node=1)
    instance = type(where.instance)("fpm@0", artifact, 0)
    where = Place(instance, tmp_path, {"run_dir": str(tmp_path), "node": "n[1]*"})
    with looking(where) as eyes:
        assert eyes.look(where).problems[0] == (
            "out/n[1]*/.b.json: found nothing; expected data-parallel rank 0's file"
        )
        directory = tmp_path / "out" / "n[1]*"
        directory.mkdir(parents=True)
        benchmark = Benchmark(base=".b")
        put(directory, ".b.json", json.dumps(benchmark.rank(0)))
        put(directory, ".b_merged.json", json.dumps(benchmark.merged(0)))
        put(directory, ".b_merged_worker_probe.json", json.dumps(benchmark.probe(0)))
        finding = eyes.look(where)
    assert finding.answer == "valid", finding
    assert preexisting(where) == tuple(fact.path for fact in finding.files)


def test_only_the_nodes_own_files_are_in_the_way_before_the_run(tmp_path: Path) -> None:
    first, second = nodes(tmp_path)
    assert preexisting(first) == ()
    for name in ("bench_dp2.json", "bench_dp3_merged.json", "bench.json.tmp", "bench_merged_worker_probe.json.tmp"):
        (tmp_path / name).write_text("")
    assert preexisting(first) == ()
    (tmp_path / P).symlink_to("nowhere")
    assert preexisting(first) == (P,)
    assert preexisting(second) == ("bench_dp2.json",)


def test_a_directory_that_cannot_be_read_is_the_only_complaint(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the directory should be")
    where = at(tmp_path, "out/b.json")
    with looking(where) as eyes:
        finding = eyes.look(where)
    assert (finding.answer, finding.problems) == ("pending", ("out: found a file; expected a directory",))


def test_many_contradictions_are_told_in_few_sentences(tmp_path: Path) -> None:
    benchmark = Benchmark(local=44, points=1)
    for rank in range(44):
        put(tmp_path, benchmark.rank_name(rank), changed(json.dumps(benchmark.rank(rank)), run_id=f"run-{rank > 0}"))
    first, second = place(tmp_path, 0, 2, ranks_per_node=22), place(tmp_path, 1, 2, ranks_per_node=22)
    with looking(first, second) as eyes:
        eyes.look(second)
        finding = eyes.look(first)
    assert finding.answer == "invalid"
    assert max(len(fact.problems) for fact in finding.files) == 20


# -------------------------------------------------------------------------------------------------------- the judges

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.just(10**30) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places_in(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield way
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in steps:
        yield from places_in(inner, (*way, step))


@pytest.mark.parametrize(("name", "judge", "options"), JUDGES)
def test_a_judge_answers_whatever_the_document_is(
    name: str, judge: Callable[..., Any], options: dict[str, Any]
) -> None:
    text = (BASES / "one" / name).read_text()
    assert judge(json.loads(text), options).problems == ()
    ways = list(places_in(json.loads(text)))

    @given(st.sampled_from(ways), VALUES, st.booleans(), st.booleans())
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def any_value(way: tuple[str | int, ...], value: Any, gone: bool, legacy: bool) -> None:
        holder: Any = {"": json.loads(text)}
        steps: list[Any] = ["", *way]
        parent = holder
        for step in steps[:-1]:
            parent = parent[step]
        if gone and way:
            del parent[steps[-1]]
        else:
            parent[steps[-1]] = value
        said = judge(holder[""], {**options, "legacy": legacy})
        assert all(problem.startswith("$") and "; expected " in problem for problem in said.problems)
        assert json.loads(json.dumps(said.summary)) == said.summary

    any_value()


@given(VALUES)
@settings(deadline=None)
def test_a_judge_answers_any_document(document: Any) -> None:
    for _, judge, options in JUDGES:
        assert judge(document, options).problems


def test_what_is_too_deep_to_be_judged_is_wrong(tmp_path: Path) -> None:
    where = place(tmp_path)
    text = json.dumps(Benchmark().rank(0))[:-1] + ', "measurement_protocol": '
    answers = set[tuple[str, tuple[str, ...]]]()
    with looking(where) as eyes:
        for depth in range(900, 1000):
            put(tmp_path, B, f"{text}{'[' * depth}{']' * depth}}}")
            finding = eyes.look(where)
            answers.add((finding.answer, finding.problems[:-1]))
    deep = f"{B}: found lists or objects nested too deeply; expected less than a thousand levels"
    assert answers == {("ranks_complete", ()), ("invalid", (deep,))}


def test_a_measured_grid_of_many_ranks_is_valid() -> None:
    benchmark = Benchmark(nodes=3, local=5, points=7, mode="agg")
    options = {**RANK, "size": 15, "mode": "agg"}
    for rank in range(15):
        assert fpm_content.rank(benchmark.rank(rank), {**options, "rank": rank}).problems == ()
    for node in range(3):
        assert fpm_content.merged(benchmark.merged(node), LEGACY).problems == ()
        assert fpm_content.probe(benchmark.probe(node), LEGACY).problems == ()


# ------------------------------------------------------------------------------------------------------ the producer


def test_the_producer_writes_what_is_kept_as_data(tmp_path: Path) -> None:
    for node in ("0", "1"):
        command = [sys.executable, "-I", producer.__file__, "--base", str(tmp_path / "bench"), "--node", node]
        options = ["--nodes", "2", "--local", "2", "--order", "1,0", "--merged-first"]
        subprocess.run([*command, *options], check=True, timeout=60)
    assert sorted(os.listdir(tmp_path)) == sorted(NODES)
    for name, text in NODES.items():
        assert json.loads((tmp_path / name).read_text()) == json.loads(text)
