"""`allocctl artifacts`: directories as they stand, and runs that have ended or still wait."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.artifacts import exit_code
from supervisor.cli.main import main
from tests.artifacts.producer import Benchmark, write
from tests.faults.local import Local, role, sh

EIGHT = Benchmark(nodes=1, local=8)
TWO_NODES = Benchmark(nodes=2, local=4)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The verb, in this process: its exit code, and what it printed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def said(*words: str | Path) -> tuple[int, str, str]:
        code = main(["artifacts", *map(str, words)])
        found = capsys.readouterr()
        return code, found.out, found.err

    return said


def put(directory: Path, benchmark: Benchmark, *nodes: int, merged: bool = True, probe: bool = True) -> Path:
    directory.mkdir(exist_ok=True)
    for node in nodes or range(benchmark.nodes):
        for rank in benchmark.ranks(node):
            write(str(directory), benchmark.rank_name(rank), benchmark.rank(rank))
        if merged:
            write(str(directory), benchmark.merged_name(node), benchmark.merged(node))
        if probe:
            write(str(directory), benchmark.probe_name(node), benchmark.probe(node))
    return directory


def document(said: tuple[int, str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said[1])
    assert found["schema_version"] == 1
    assert found["exit"] == said[0]
    return found


# --- a directory -------------------------------------------------------------------------------------------------


def test_an_announced_probe_that_is_absent_is_finalizing(call: Callable[..., Any], tmp_path: Path) -> None:
    place = put(tmp_path / "d", EIGHT, probe=False)
    code, out, _ = call(place, "--contract", "fpm", "--ranks", "0-7")
    assert code == 10
    assert "fpm@0: finalizing" in out
    assert "bench_merged_worker_probe.json: found nothing; expected the probe" in out


def test_a_whole_directory_is_complete(call: Callable[..., Any], tmp_path: Path) -> None:
    found = document(call(put(tmp_path / "d", EIGHT), "--contract", "fpm", "--ranks", "0-7", "--json"))
    assert found["exit"] == 0
    [contract] = found["contracts"]
    assert contract["state"] == "complete"
    kinds = [file["kind"] for file in contract["files"]]
    assert sorted(kinds) == ["merged", "probe"] + ["rank"] * 8


def test_an_empty_directory_is_pending(call: Callable[..., Any], tmp_path: Path) -> None:
    code, out, _ = call(tmp_path, "--contract", "fpm", "--ranks", "0-1")
    assert (code, out.splitlines()[0]) == (10, "fpm@0: pending")
    assert "benchmark_results_dp1.json: found nothing" in out


@pytest.mark.parametrize(
    ("ranks", "states", "code"),
    [("0-7", ["complete", "finalizing"], 10), ("0-3", ["complete"], 0), ("4-7", ["finalizing"], 10)],
)
def test_nodes_are_judged_apart(
    call: Callable[..., Any], tmp_path: Path, ranks: str, states: list[str], code: int
) -> None:
    place = put(tmp_path / "d", TWO_NODES)
    (place / TWO_NODES.probe_name(1)).unlink()
    words = ("--ranks", ranks, "--ranks-per-node", "4", "--json")
    found = document(call(place, "--contract", "fpm", *words))
    assert [item["state"] for item in found["contracts"]] == states
    assert found["exit"] == code


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--run-id", "other"), '$.run_id: found "run-1"; expected "other"'),
        (("--grid-digest", "other"), "$.grid_digest"),
        (("--mode", "prefill"), "$.config.mode"),
        (("--nodes", "2"), "$.dp.size: found 8; expected 16"),
    ],
)
def test_pins_and_sizes_that_are_contradicted_are_invalid(
    call: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], word: str
) -> None:
    place = put(tmp_path / "d", EIGHT)
    code, out, _ = call(place, "--contract", "fpm", "--ranks", "0-7", *options)
    assert code == 65
    assert word in out


def test_nodes_that_contradict_each_other_are_both_told(call: Callable[..., Any], tmp_path: Path) -> None:
    place = put(tmp_path / "d", TWO_NODES, 0)
    put(place, Benchmark(nodes=2, local=4, run_id="run-2"), 1)
    words = ("--ranks", "0-7", "--ranks-per-node", "4", "--json")
    found = document(call(place, "--contract", "fpm", *words))
    assert [item["state"] for item in found["contracts"]] == ["invalid", "invalid"]
    assert found["exit"] == 65


def test_older_files_by_option_only(call: Callable[..., Any], tmp_path: Path) -> None:
    old = Benchmark(local=2, legacy=True, engine=False)
    place = put(tmp_path / "d", old, probe=False)
    assert call(place, "--contract", "fpm", "--ranks", "0-1")[0] == 65
    assert call(place, "--contract", "fpm", "--ranks", "0-1", "--legacy")[0] == 0


def test_the_base_is_found_by_the_names_that_are_there(call: Callable[..., Any], tmp_path: Path) -> None:
    place = put(tmp_path / "d", EIGHT)
    (place / "settings.json").write_text("{}")  # no other benchmark: nothing is numbered or merged under that name
    assert call(place, "--contract", "fpm", "--ranks", "0-7")[0] == 0
    put(place, Benchmark(local=2, base="second"))
    code, _, told = call(place, "--contract", "fpm", "--ranks", "0-7")
    assert code == 78
    assert "bench, second: name one with --base NAME.json" in told
    assert call(place, "--contract", "fpm", "--ranks", "0-1", "--base", "second.json")[0] == 0


def test_a_sweep(call: Callable[..., Any], tmp_path: Path) -> None:
    words = ("--contract", "sweep", "--path", "results_concurrency_{concurrency}_gpus_*.json")
    (tmp_path / "results_concurrency_1_gpus_8.json").write_text('{"completed": 10}')
    code, out, _ = call(tmp_path, *words, "--concurrencies", "1,16")
    assert code == 10
    assert "16" in out
    (tmp_path / "results_concurrency_16_gpus_8.json").write_text('{"completed": 160}')
    assert call(tmp_path, *words, "--concurrencies", "1,16")[0] == 0
    (tmp_path / "results_concurrency_16_gpus_8.json").write_text('{"completed": 0}')
    assert call(tmp_path, *words, "--concurrencies", "1,16")[0] == 65


PLAN = """
[job]
name = "j"
nodes = 1
[coordinator]
rank = 0
[roles.client]
ranks = 0
command = ["true"]
[[artifacts]]
name = "log"
path = "logs/*.log"
count = 2
[[artifacts]]
name = "extra"
path = "{what}"
required = false
"""


def test_the_contracts_of_a_plan(call: Callable[..., Any], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("{what}", "extra.txt"))
    logs = tmp_path / "d" / "logs"
    logs.mkdir(parents=True)
    (logs / "a.log").write_text("a")
    found = document(call(tmp_path / "d", "--plan", plan, "--json"))
    assert found["exit"] == 10
    (logs / "b.log").write_text("b")
    found = document(call(tmp_path / "d", "--plan", plan, "--json"))
    assert [(item["state"], item["required"]) for item in found["contracts"]] == [
        ("complete", True),
        ("pending", False),
    ]
    assert found["exit"] == 0  # what is not required judges nothing


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--contract", "fpm"), "--ranks 0-3"),
        (("--contract", "fpm", "--ranks", "3-1"), "not whole nodes' ranks"),
        (("--contract", "fpm", "--ranks", "0-6", "--ranks-per-node", "4"), "not whole nodes' ranks"),
        (("--contract", "fpm", "--ranks", "0-3", "--base", "a*.json"), "without wildcards"),
        (("--contract", "fpm", "--ranks", "0-3", "--base", "../x.json"), "found"),
        (("--contract", "fpm", "--ranks", "0-3", "--ranks-per-node", "0"), "not whole nodes' ranks"),
        (("--contract", "fpm", "--ranks", "0-3", "--ranks-per-node", "-2"), "not whole nodes' ranks"),
        (("--contract", "fpm", "--ranks", "0-3", "--nodes", "-3"), "--nodes -3"),
        (("--contract", "fpm", "--ranks", "0-3", "--nodes", "0"), "--nodes 0"),
        (("--contract", "fpm", "--ranks", "0-3", "--ranks-per-node", "2", "--nodes", "1"), "those of node 1"),
        (("--contract", "fpm", "--ranks", "0-3", "--concurrencies", "1"), "--concurrencies is for --contract sweep"),
        (("--contract", "sweep", "--ranks-per-node", "2"), "--ranks-per-node is for --contract fpm only"),
        (("--plan", "nowhere.toml", "--legacy"), "--legacy is for --contract fpm only"),
        (("--run-id", "x"), "--run-id is for --contract fpm only"),
        (("--contract", "sweep", "--path", "x"), "--concurrencies 1,8,64"),
        (("--contract", "sweep", "--path", "x", "--concurrencies", "1"), "{concurrency} in it"),
        (("--contract", "fpm", "--ranks", "0-3", "--plan", "p.toml"), "either --contract or --plan"),
        (("--plan", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_what_is_not_clear_is_said(call: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    code, out, err = call(tmp_path, *words)
    assert (code, out) == (78, "")
    assert told in err


@pytest.mark.parametrize("words", [(), ("--base", "b.json")])
def test_a_directory_that_cannot_be_listed(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    code, _, err = call(tmp_path, "--contract", "fpm", "--ranks", "0-3", *words)
    assert code == 78
    assert f"{tmp_path}: Permission denied" in err


def test_a_merged_file_of_some_ranks_is_a_hint(call: Callable[..., Any], tmp_path: Path) -> None:
    place = put(tmp_path / "d", TWO_NODES)
    code, out, _ = call(place, "--contract", "fpm", "--ranks", "0-7")
    assert code == 10
    assert "note: all --ranks were taken for one node's; of several nodes: --ranks-per-node N" in out
    assert "note:" not in call(place, "--contract", "fpm", "--ranks", "0-7", "--ranks-per-node", "4")[1]


def test_what_only_a_run_knows_is_refused(call: Callable[..., Any], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("{what}", "{jobid}.txt"))
    code, _, err = call(tmp_path, "--plan", plan)
    assert code == 78
    assert "{jobid}" in err and "nobody knows" in err


@pytest.mark.parametrize(
    ("script", "code", "word"),
    [
        ("exit 0", 0, "complete"),
        ("echo more to come; exit 10", 10, "more to come"),
        ("exit 20", 65, "invalid"),
        ("exit 3", 125, "ended with 3"),
    ],
)
def test_a_plans_checker_is_asked(call: Callable[..., Any], tmp_path: Path, script: str, code: int, word: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("{what}", "x").replace("count = 2", f'checker = ["sh", "-c", "{script}"]'))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("a")
    said, out, err = call(tmp_path, "--plan", plan)
    assert said == code
    assert word in out + err


def test_a_large_file_is_read_to_its_end(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look does not wait for it: the verb looks until nothing is being read any more."""
    monkeypatch.setattr("supervisor.contracts.reading.PATIENCE", 0.0)
    (tmp_path / "results_1.json").write_text(json.dumps({"completed": 5, "more": ["x" * 1000] * 1100}))
    words = ("--contract", "sweep", "--path", "results_{concurrency}.json", "--concurrencies", "1")
    assert call(tmp_path, *words)[0] == 0


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("complete", None)], 0),
        ([], 0),
        ([("complete", None), ("finalizing", None)], 10),
        ([("late", "finalization"), ("pending", None)], 65),
        ([("late", "finalization"), ("late", "deadline")], 124),
        ([("late", "deadline"), ("invalid", None)], 65),
    ],
)
def test_what_several_contracts_come_to(ends: list[tuple[str, str | None]], code: int) -> None:
    contracts = [{"state": state, "reason": reason, "required": True} for state, reason in ends]
    assert exit_code(contracts) == code
    assert exit_code([{**item, "required": False} for item in contracts]) == 0


@pytest.mark.slow  # a deadline is a second at least
@pytest.mark.parametrize(
    ("deadlines", "code", "state"),
    [
        ({"finalization": 1}, 65, "result: late (finalization)"),
        ({"artifacts": 1}, 124, "result: late (deadline)"),
    ],
)
def test_a_run_tells_why_it_was_late(
    call: Callable[..., Any], tmp_path: Path, deadlines: dict[str, int], code: int, state: str
) -> None:
    contract = {"name": "result", "path": "result.json", "format": "json"}
    with Local(tmp_path) as local:
        plan = local.plan({"client": role(0, sh("exit 0"))}, coordinator=0, artifacts=[contract], deadlines=deadlines)
        run = local.start(plan)
        assert run.wait() == code
        said, out, _ = call(run.directory)
        assert said == code
        assert state in out
        assert "result.json: found nothing; expected a file" in out
        assert document(call(run.directory, "--json"))["contracts"][0]["reason"] in state


def test_no_such_run(call: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = call(tmp_path)
    assert code == 69
    assert "--contract or --plan" in err
