"""Contracts on real steps: a zero of the coordinator waits for what the engines promised, a failure does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.jobs import SLEEP, UP, Event, Jobs, Run, await_files, role, sh, touch, until

RESULT: Event = {"name": "result", "path": "result.json", "format": "json"}
WRITE = 'printf %s "{\\"requests\\": 3}" >"$ALLOCD_RUN_DIR/.r" && mv "$ALLOCD_RUN_DIR/.r" "$ALLOCD_RUN_DIR/result.json"'
CLIENT = sh(f"{UP}; {await_files('up', 0)}; {touch('measured')}")


def engine(script: str = "") -> list[str]:
    """A worker that is up, runs the script, serves on, and ends normally when it is stopped."""
    return sh(f"trap '{touch('ended')}; exit 0' TERM; {UP}; {script or ':'}; {SLEEP}")


def two_ranks(jobs: Jobs, worker: list[str], client: list[str] = CLIENT, **tables: Any) -> Path:
    """A plan of an engine (rank 0) and a coordinator (rank 1) with the contract `result`."""
    roles = {"engine": role(0, worker), "client": role(1, client)}
    return jobs.plan(roles, coordinator=1, nodes=2, **{"artifacts": [RESULT], **tables})


def order(run: Run, *wanted: tuple[str, dict[str, Any]]) -> None:
    """Each of these lines is in the journal, the first of each kind after the first of the one before."""
    lines = run.lines()
    places = [lines.index(run.first(name, **fields)) for name, fields in wanted]
    assert places == sorted(places), [lines[place] for place in places]


def contract(run: Run, name: str = "result") -> Event:
    """A contract as the receipt tells it."""
    (found,) = (item for item in run.receipt()["artifacts"] if item["contract"] == name)
    return found  # type: ignore[no-any-return]


def test_engines_get_the_time_to_write_before_the_marker_says_0(jobs: Jobs) -> None:
    worker = engine(f"{await_files('measured', 1)}; sleep 6; {WRITE}")
    run = jobs.submit(two_ranks(jobs, worker), nodes=2)
    assert run.job_end()["JobState"] == "COMPLETED", str(run)
    order(
        run,
        ("RankEnded", {"rank": 1, "code": 0}),
        ("CheckArtifacts", {}),
        ("ArtifactSeen", {"answer": "valid"}),
        ("PublishMarker", {"code": 0}),
        ("MarkerPublished", {"code": 0}),
        ("StopRank", {"rank": 0, "reason": "completed"}),
        ("RankEnded", {"rank": 0, "code": 0}),
    )
    assert run.first("PublishMarker")["at"] - run.first("RankEnded", rank=1)["at"] > 5.5
    assert run.file("ended.0") is not None
    receipt = run.receipt()
    assert (receipt["verdict"]["outcome"], receipt["verdict"]["reason"]) == ("success", "completed")
    (fact,) = contract(run)["finding"]["files"]
    assert (fact["path"], fact["size"]) == ("result.json", 15)


@pytest.mark.parametrize(
    ("deadlines", "code", "reason", "why"),
    [
        ({"finalization": 1}, 65, "finalization", "artifacts"),
        ({"artifacts": 4}, 124, "deadline", "artifacts"),
    ],
    ids=["finalization window", "artifacts deadline"],
)
def test_a_result_that_never_comes(jobs: Jobs, deadlines: Event, code: int, reason: str, why: str) -> None:
    run = jobs.start(two_ranks(jobs, engine(), deadlines=deadlines), jobs.hold(nodes=2))
    assert run.wait() == code, str(run)
    verdict = run.receipt()["verdict"]
    assert (verdict["code"], verdict["origin"], verdict["reason"]) == (code, "allocd", why)
    assert f"artifact result is late ({reason})" in verdict["summary"]
    assert (contract(run)["state"], contract(run)["reason"]) == ("late", reason)
    assert run.file("ended.0") is not None
    assert run.first("MarkerPublished")["code"] == code
    run.wait_gone()


def test_a_failure_of_the_coordinator_waits_for_no_contract(jobs: Jobs) -> None:
    client = sh(f"{UP}; {await_files('up', 0)}; exit 9")
    run = jobs.start(two_ranks(jobs, engine(), client), jobs.hold(nodes=2))
    assert run.wait() == 9, str(run)
    assert run.first("StopRank", rank=0)["seq"] == run.first("RankEnded", rank=1)["seq"]
    assert run.events("CheckArtifacts") == []
    receipt = run.receipt()
    assert (receipt["verdict"]["code"], receipt["verdict"]["origin"]) == (9, "native")
    assert (contract(run)["state"], receipt["status"]["artifacts"]) == ("pending", "pending")
    assert [item["rank"] for item in receipt["consequences"]] == [0]
    assert run.file("ended.0") is not None


def test_without_a_coordinator_the_contracts_of_every_node_end_the_run(jobs: Jobs) -> None:
    """The last node's file is the test's to write, so that the others are seen to wait for it."""
    write = 'echo "{}" >"$ALLOCD_RUN_DIR/result_$ALLOCD_RANK.json"'
    script = engine(f'[ "$ALLOCD_RANK" = 2 ] || {write}')
    artifact = {"name": "result", "path": "result_{rank}.json", "per": "node", "format": "json"}
    plan = jobs.plan({"engine": role("0-2", script)}, nodes=3, run={"finish": "artifacts"}, artifacts=[artifact])
    run = jobs.start(plan, jobs.hold(nodes=3))
    run.wait_events("ArtifactSeen", 2, answer="valid")
    assert run.events("StopRank") == []
    (run.directory / "result_2.json").write_text("{}\n")
    assert run.wait() == 0, str(run)
    assert run.receipt()["verdict"]["outcome"] == "success"
    assert {item["contract"]: item["state"] for item in run.receipt()["artifacts"]} == {
        f"result@{rank}": "complete" for rank in range(3)
    }
    assert {line["reason"] for line in run.events("StopRank")} == {"completed"}
    assert all(run.file(f"ended.{rank}") is not None for rank in range(3))


def test_an_engine_that_ends_before_its_contract_is_done_is_a_failure(jobs: Jobs) -> None:
    plan = jobs.plan(
        {"engine": role("0-1", sh(f'{UP}; {await_files("up", 0, 1)}; [ "$ALLOCD_RANK" = 0 ] || exit 0; {SLEEP}'))},
        nodes=2,
        run={"finish": "artifacts"},
        artifacts=[RESULT],
    )
    run = jobs.start(plan, jobs.hold(nodes=2))
    assert run.wait() == 1, str(run)
    first = run.receipt()["first_failure"]
    assert (first["rank"], first["code"], first["what"]) == (1, 1, "exit")


def test_a_half_written_result_is_waited_for(jobs: Jobs) -> None:
    half = 'printf %s "{\\"requests\\": " >"$ALLOCD_RUN_DIR/result.json"'
    client = sh(f"{await_files('up', 0)}; until [ -s $ALLOCD_RUN_DIR/result.json ]; do sleep 0.02; done")
    run = jobs.start(two_ranks(jobs, engine(half), client), jobs.hold(nodes=2))
    run.first("CheckArtifacts")
    until(lambda: "no whole JSON document" in str(run.events("ArtifactSeen", answer="pending")), f"the half{run}")
    assert run.events("PublishMarker") == []
    with (run.directory / "result.json").open("a") as file:
        file.write("3}")
    assert run.wait() == 0, str(run)
    order(run, ("ArtifactSeen", {"answer": "pending"}), ("ArtifactSeen", {"answer": "valid"}), ("PublishMarker", {}))


def test_content_that_can_never_become_valid_ends_the_wait(jobs: Jobs) -> None:
    artifact = {**RESULT, "fields": {"requests": {"min": 100}}}
    client = sh(f"{await_files('up', 0)}; until [ -s $ALLOCD_RUN_DIR/result.json ]; do sleep 0.02; done")
    run = jobs.start(two_ranks(jobs, engine(WRITE), client, artifacts=[artifact]), jobs.hold(nodes=2))
    assert run.wait() == 65, str(run)
    verdict = run.receipt()["verdict"]
    assert (verdict["origin"], verdict["reason"]) == ("allocd", "artifacts")
    assert "artifact result is invalid" in verdict["summary"]
    assert "requests" in verdict["summary"] and "result.json" in verdict["summary"]
    assert run.first("MarkerPublished")["code"] == 65
    assert run.file("ended.0") is not None


def test_an_optional_result_that_does_not_come_is_told_and_judges_nothing(jobs: Jobs) -> None:
    artifact = {**RESULT, "required": False}
    plan = two_ranks(jobs, engine(), artifacts=[artifact], deadlines={"finalization": 1})
    run = jobs.start(plan, jobs.hold(nodes=2))
    assert run.wait() == 0, str(run)
    assert (contract(run)["state"], run.receipt()["verdict"]["outcome"]) == ("late", "success")


def test_a_worker_that_dies_while_its_result_is_awaited_is_the_failure(jobs: Jobs) -> None:
    """Failures pass the barrier: after a second look at the marker nobody waits for a window of two minutes."""
    worker = sh(f"{UP}; {await_files('measured', 1)}; {await_files('go', 0)}; exit 6")
    run = jobs.start(two_ranks(jobs, worker, marker={"recheck": 0.5}), jobs.hold(nodes=2))
    run.first("CheckArtifacts")
    (run.directory / "go.0").touch()
    assert run.wait() == 6, str(run)
    first = run.receipt()["first_failure"]
    assert (first["rank"], first["code"], first["seq"]) == (0, 6, run.first("RankEnded", rank=0)["seq"])
    assert run.first("PublishMarker")["code"] == 6


def test_results_that_exist_before_the_run_are_refused(jobs: Jobs) -> None:
    allocation = jobs.hold(nodes=2)
    results = jobs.directory / "results"
    results.mkdir()
    plan = two_ranks(jobs, engine(), artifacts=[{**RESULT, "root": str(results)}])
    for make in ("file", "dangling link"):
        if make == "file":
            (results / "result.json").write_text(json.dumps({"requests": 3}))
        else:
            (results / "result.json").unlink()
            (results / "result.json").symlink_to("nowhere")
        run = jobs.start(plan, allocation)
        assert run.wait() == 78, make
        said = (run.base / "engine.log").read_text()
        assert f"{results}/result.json" in said and "exist before the run" in said and "Traceback" not in said
        assert list(run.base.glob("*/journal.jsonl")) == []
    assert (results / "result.json").is_symlink()
    (results / "result.json").unlink()
    run = jobs.start(plan, allocation)
    run.first("CheckArtifacts")
    (results / "result.json").write_text(json.dumps({"requests": 3}))
    assert run.wait() == 0, str(run)
    until(lambda: run.jobs.cluster.job(allocation.jobid).get("JobState") == "RUNNING", "the allocation to live on")
