"""Contracts of every kind of plain files in real runs: a sweep, an evaluation, and programs that judge."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults.local import SERVE, UP, Local, Run, await_files, role, sh, touch

ROOT = Path(__file__).parents[2]
RESULT: dict[str, Any] = {"name": "result", "path": "r.json", "format": "json"}


def client(script: str) -> dict[str, Any]:
    """Roles: a worker, and a coordinator that runs a piece of shell when the worker is up."""
    return {"worker": role(0, SERVE), "client": role(1, sh(f"{await_files('up', 0)}; cd $ALLOCD_RUN_DIR; {script}"))}


def verdict(run: Run) -> tuple[str, int, str]:
    found = run.receipt()["verdict"]
    return found["outcome"], found["code"], found["reason"]


def states(run: Run) -> dict[str, str]:
    return {item["contract"]: item["state"] for item in run.receipt()["artifacts"]}


@pytest.mark.slow
def test_the_sweep_that_is_shown(local: Local) -> None:
    (local.directory / "config").symlink_to(ROOT / "config")
    run = local.run(ROOT / "config/plans/sweep.toml")
    assert run.code == 0, run
    assert set(states(run).values()) == {"complete"}
    points = next(item for item in run.receipt()["artifacts"] if item["contract"] == "points")
    names = [f"results/results_concurrency_{number}_gpus_0.json" for number in (1, 4, 16)]
    assert [fact["path"] for fact in points["finding"]["files"]] == sorted(names)


def test_a_sweep_without_a_success_is_none(local: Local) -> None:
    put = """for c in 1 8; do echo "{\\"completed\\": $((8 - c))}" > r_conc$c.json; done"""
    sweep = {"name": "sweep", "contract": "sweep", "path": "*_conc{concurrency}.json", "concurrencies": [1, 8]}
    run = local.run(local.plan(client(put), coordinator=1, artifacts=[sweep]))
    assert (run.code, states(run)) == (65, {"sweep": "invalid"})
    (item,) = run.receipt()["artifacts"]
    problem = "r_conc8.json: completed: found 0, which is not a success; expected more than 0"
    assert problem in item["finding"]["problems"]  # a look may fall between the two files, and miss the first


@pytest.mark.slow
def test_a_program_that_waits_holds_the_run_until_it_is_ready(local: Local) -> None:
    """The file that it waits for is none of the contract's: nothing but its pause makes it ask again."""
    late = sh(f"trap 'exit 0' TERM; {UP}; {await_files('done', 1)}; : > $ALLOCD_RUN_DIR/ready; sleep 1000 & wait")
    roles = {
        "worker": role(0, late),
        "client": role(1, sh(f"{await_files('up', 0)}; echo [] > $ALLOCD_RUN_DIR/r.json; {touch('done')}")),
    }
    checker = ["sh", "-c", "test -f ready && exit; echo not ready; exit 10"]
    run = local.run(local.plan(roles, coordinator=1, artifacts=[{**RESULT, "checker": checker}]))
    assert (run.code, states(run)) == (0, {"result": "complete"})


@pytest.mark.slow
def test_a_program_that_takes_its_time_holds_no_deadline(local: Local) -> None:
    artifact = {**RESULT, "checker": ["sleep", "1000"], "checker_timeout": 3600}
    deadlines = {"finalization": 1}
    run = local.run(local.plan(client("echo [] > r.json"), coordinator=1, artifacts=[artifact], deadlines=deadlines))
    assert (run.code, states(run)) == (65, {"result": "late"})
    assert "checker sleep: found it still at work" in run.receipt()["verdict"]["summary"]


def test_a_program_that_finds_something_wrong(local: Local) -> None:
    checker = ["sh", "-c", 'echo "$ALLOCD_FILES of $ALLOCD_CONTRACT is wrong"; exit 20']
    plan = local.plan(client("echo [] > r.json"), coordinator=1, artifacts=[{**RESULT, "checker": checker}])
    run = local.run(plan)
    assert (run.code, states(run)) == (65, {"result": "invalid"})
    (item,) = run.receipt()["artifacts"]
    assert item["finding"]["problems"] == ["checker sh: r.json of result is wrong"]


@pytest.mark.parametrize("checker", [["sh", "-c", "exit 1"], ["no-such-program"]])
def test_a_program_that_breaks_is_a_fault(local: Local, checker: list[str]) -> None:
    plan = local.plan(client("echo [] > r.json"), coordinator=1, artifacts=[{**RESULT, "checker": checker}])
    run = local.run(plan)
    assert run.code == 125, run
    fault = run.first("CheckerFault")["text"]
    assert fault.startswith(f"checker {checker[0]}: ")
    assert f"failure: artifact result could not be judged: {fault} [exit 125" in run.last_line


@pytest.mark.slow
def test_a_large_result_does_not_hold_the_engine(local: Local) -> None:
    """Four megabytes are judged in a process of its own, which is gone when the run is."""
    large = "head -c 4000000 /dev/zero | tr '\\0' x"
    script = f"""{{ printf '["'; {large}; printf '"]'; }} > r.tmp && mv r.tmp r.json"""
    run = local.run(local.plan(client(script), coordinator=1, artifacts=[{**RESULT, "size_min": 4_000_000}]))
    assert (run.code, states(run)) == (0, {"result": "complete"})
    assert os.path.getsize(run.directory / "r.json") == 4_000_004


@pytest.mark.parametrize("required", [True, False])
def test_files_that_are_rewritten_after_they_were_judged(local: Local, required: bool) -> None:
    """By a worker on its way out, when everything promised was there and the coordinator had ended well."""
    spoil = "cd $ALLOCD_RUN_DIR; echo [1] >r.json"
    worker = sh(f"trap '{spoil}; exit 0' TERM; {UP}; sleep 1000 & wait")
    roles = {**client("echo [] > r.json"), "worker": role(0, worker)}
    run = local.run(local.plan(roles, coordinator=1, artifacts=[{**RESULT, "required": required}]))
    assert states(run) == {"result": "complete"}
    old, new = (hashlib.sha256(text).hexdigest() for text in (b"[]\n", b"[1]\n"))
    text = (
        "artifact result changed after it was judged: r.json: found 4 bytes with sha256 "
        f"{new}, written since; expected 3 bytes with sha256 {old}"
    )
    if required:
        assert run.code == 65
        assert run.receipt()["verdict"]["reason"] == "artifacts"
        assert run.receipt()["verdict"]["summary"] == text
        assert run.receipt()["status"]["artifacts"] == "failed"
    else:
        assert run.code == 0
        assert text in run.receipt()["notes"]
    again = local.allocctl("verify", "--replay", str(run.directory / "receipt.run.json"))
    assert again.returncode == run.code, again


def test_a_program_that_removes_what_it_judges(local: Local) -> None:
    checker = ["sh", "-c", "rm r.json"]
    run = local.run(local.plan(client("echo [] > r.json"), coordinator=1, artifacts=[{**RESULT, "checker": checker}]))
    assert (run.code, states(run)) == (65, {"result": "complete"})
    assert "r.json: found nothing; expected 3 bytes with sha256 " in run.receipt()["verdict"]["summary"]


def test_a_worker_that_writes_the_same_bytes_once_more(local: Local) -> None:
    worker = sh(f"trap 'cd $ALLOCD_RUN_DIR; echo [] >r.tmp; mv r.tmp r.json; exit 0' TERM; {UP}; sleep 1000 & wait")
    roles = {**client("echo [] > r.json"), "worker": role(0, worker)}
    run = local.run(local.plan(roles, coordinator=1, artifacts=[RESULT]))
    assert run.code == 0
