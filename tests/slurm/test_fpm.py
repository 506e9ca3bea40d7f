"""Self-benchmarks on two real nodes of four data-parallel ranks each: every order in which their files can come, what
never comes, and what is told of it. All runs share an allocation and go on at the same time; each test looks at one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import Event, Jobs, Run, role, sh

PRODUCER = str(Path(__file__).parents[1] / "artifacts" / "producer.py")
FPM: Event = {"name": "fpm", "contract": "fpm", "path": "out/bench.json", "ranks_per_node": 4, "roles": ["engine"]}
WINDOW = 4  # seconds of the finalization window, where a run is to outlast it
RANK_FILES = [
    ["out/bench.json", *(f"out/bench_dp{n}.json" for n in (1, 2, 3))],
    [f"out/bench_dp{n}.json" for n in range(4, 8)],
]
MERGED = ["out/bench_merged.json", "out/bench_dp4_merged.json"]


def engine(*options: str, node: str = "{rank}") -> list[str]:
    """A node's engine: writes its files, then serves until it is stopped."""
    shape = ["--node", node, "--nodes", "2", "--local", "4", "--points", "3", "--stay"]
    return [sys.executable, "-S", PRODUCER, "--base", "{run_dir}/out/bench.json", *shape, *options]


def benchmark(jobs: Jobs, *options: str, other: list[str] | None = None, **tables: Any) -> Path:
    """A plan of two engines that ends when the contract does; `other`: what the second node runs instead."""
    roles = {"engine": role("0-1", engine(*options))}
    contract = {**FPM, **tables.pop("contract", {})}
    if other is not None:
        roles = {"engine": role(0, engine(*options)), "second": role(1, other, **tables.pop("second", {}))}
        contract["roles"] = ["engine", "second"]
    return jobs.plan(roles, nodes=2, run={"finish": "artifacts"}, artifacts=[contract], **tables)


@pytest.fixture(scope="module")
def runs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """The runs by name; all have ended."""
    jobs = Jobs(cluster, tmp_path_factory.mktemp("fpm"))
    closing: dict[str, Any] = {"deadlines": {"finalization": WINDOW}}
    coordinated = jobs.plan(
        {"engine": role("0-1", engine("--delay", "0.3")), "client": role(2, sh("exit 0"))},
        coordinator=2,
        nodes=3,
        artifacts=[FPM],
    )
    plans = {
        "dp0 first": benchmark(jobs, "--delay", "0.1"),
        "dp1 first": benchmark(jobs, "--delay", "0.1", "--order", "1,0,3,2"),
        "merged first": benchmark(jobs, "--merged-first", "--delay", "0.1"),
        "no probe": benchmark(jobs, "--no-probe", **closing),
        "deadline": benchmark(jobs, "--no-probe", deadlines={"finalization": 60, "artifacts": 2 * WINDOW}),
        "foreign probe": benchmark(jobs, "--foreign-probe", "1"),
        "merged late": benchmark(jobs, "--merged-delay", "1000", **closing),
        "slow node": benchmark(jobs, other=engine("--delay", "1.5"), **closing),
        "legacy": benchmark(jobs, "--legacy", contract={"legacy": True}),
        "legacy refused": benchmark(jobs, "--legacy"),
        "partial probe": benchmark(jobs, "--resolution", "worker_probe_partial"),
        "partial ranks": benchmark(jobs, "--partial"),
        "older": benchmark(jobs, "--no-engine"),
        "lost engine": benchmark(jobs, other=sh("exit 3"), second={"critical": False}, **closing),
        "another benchmark": benchmark(jobs, other=engine("--run-id", "run-2")),
        "coordinated": coordinated,
    }
    allocation = jobs.hold(3)
    found = {name: jobs.start(plan, allocation) for name, plan in plans.items()}
    for run in found.values():
        run.wait(100)
    yield found
    jobs.close()


def code(run: Run) -> int:
    assert run.process is not None
    return int(run.process.returncode)


def contracts(run: Run) -> list[Event]:
    """The contract of each node, as the receipt tells it."""
    found: list[Event] = run.receipt()["artifacts"]
    return found


def states(run: Run) -> list[tuple[str, str | None]]:
    return [(item["state"], item["reason"]) for item in contracts(run)]


def seen(item: Event, kind: str) -> list[str]:
    """The files of a kind that a contract's last look has found right."""
    return [file["path"] for file in item["finding"]["files"] if file["kind"] == kind and not file["problems"]]


def at(run: Run, name: str, **wanted: Any) -> float:
    return float(run.first(name, **wanted)["at"])


@pytest.mark.parametrize(
    "name", ["dp0 first", "dp1 first", "merged first", "foreign probe", "slow node", "partial probe"]
)
def test_every_order_ends_the_same(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert code(run) == 0, run
    assert states(run) == [("complete", None)] * 2
    for node, item in enumerate(contracts(run)):
        assert sorted(seen(item, "rank")) == sorted(RANK_FILES[node])
        assert seen(item, "merged") == [MERGED[node]]
        assert seen(item, "probe") == [MERGED[node].replace(".json", "_worker_probe.json")]
        assert all(len(file["sha256"]) == 64 for file in item["finding"]["files"])


def test_engines_are_stopped_only_when_every_node_is_complete(runs: dict[str, Run]) -> None:
    """The slow node writes its files after the other's window would have closed: each node has its own."""
    run = runs["slow node"]
    complete = [at(run, "ArtifactSeen", contract=f"fpm@{rank}", answer="valid") for rank in (0, 1)]
    assert complete[1] - complete[0] > WINDOW
    stops = [event["at"] for event in run.events("StopRank")]
    assert len(stops) == 2
    assert min(stops) >= max(complete)


def test_a_coordinators_zero_waits_for_every_nodes_files(runs: dict[str, Run]) -> None:
    run = runs["coordinated"]
    assert code(run) == 0, run
    assert at(run, "RankEnded", rank=2) < at(run, "ArtifactSeen", contract="fpm@0", answer="valid")
    assert min(event["at"] for event in run.events("StopRank")) >= at(run, "PublishMarker")


@pytest.mark.parametrize(
    ("name", "exit_code", "reason"),
    [("no probe", 65, "finalization"), ("deadline", 124, "deadline"), ("merged late", 65, "finalization")],
)
def test_what_does_not_come_is_late_and_the_measured_ranks_stay(
    runs: dict[str, Run], name: str, exit_code: int, reason: str
) -> None:
    run = runs[name]
    assert code(run) == exit_code, run
    assert states(run) == [("late", reason)] * 2
    missing = "_merged.json" if name == "merged late" else "_merged_worker_probe.json"
    for node, item in enumerate(contracts(run)):
        assert sorted(seen(item, "rank")) == sorted(RANK_FILES[node])
        assert [problem for problem in item["finding"]["problems"] if missing in problem], item
    summary = run.receipt()["verdict"]["summary"]
    assert missing in summary and reason in summary


def test_a_window_opens_with_the_last_rank_and_closes_once(runs: dict[str, Run]) -> None:
    run = runs["no probe"]
    opened = at(run, "ArtifactSeen", contract="fpm@0", answer="ranks_complete")
    closed = at(run, "TimerFired", timer="finalization:fpm@0")
    assert closed - opened >= WINDOW - 0.001
    assert len(run.events("TimerFired", timer="finalization:fpm@0")) == 1


def test_a_probe_of_another_run_does_not_count_and_may_be_replaced(runs: dict[str, Run]) -> None:
    run = runs["foreign probe"]
    told = [problem for event in run.events("ArtifactSeen", answer="ranks_complete") for problem in event["problems"]]
    assert [problem for problem in told if "of-another-run" in problem and "run-1" in problem], told


def test_what_a_probe_observed_is_told_and_judges_nothing(runs: dict[str, Run]) -> None:
    notes = [note for item in contracts(runs["partial probe"]) for note in item["finding"]["notes"]]
    assert [note for note in notes if "worker_probe_partial" in note]


@pytest.mark.parametrize("name", ["legacy", "older"])
def test_older_producers_announce_no_probe(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert code(run) == 0, run
    assert states(run) == [("complete", None)] * 2
    assert [seen(item, "probe") for item in contracts(run)] == [[], []]


@pytest.mark.parametrize(
    ("name", "word"), [("legacy refused", "legacy"), ("partial ranks", "partial"), ("another benchmark", "run-2")]
)
def test_what_can_never_become_right_is_invalid_at_once(runs: dict[str, Run], name: str, word: str) -> None:
    run = runs[name]
    assert code(run) == 65, run
    assert "invalid" in {state for state, _ in states(run)}
    told = " ".join(problem for item in contracts(run) for problem in item["finding"]["problems"])
    assert word in told
    assert run.receipt()["verdict"]["reason"] == "artifacts"


def test_a_node_that_failed_does_not_hold_the_others(runs: dict[str, Run]) -> None:
    """Its rank is not critical, so the run goes on; nobody is left who could write its files."""
    run = runs["lost engine"]
    assert code(run) == 65, run
    assert states(run) == [("complete", None), ("late", "finalization")]
    assert at(run, "StopRank", rank=0) - at(run, "TreeGone", rank=1) < 3 * WINDOW
