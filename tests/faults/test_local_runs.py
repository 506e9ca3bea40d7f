"""Runs from their start to their receipt, on this machine: every way in which a run ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.local import CHILD, SERVE, STUBBORN, UP, Local, Run, await_files, py, role, sh, touch

WORKERS = {"worker": role("0,1", SERVE)}
RESULT = 'mkdir -p "$ALLOCD_RUN_DIR/results"; printf \'{"requests": {"failed": 0, "completed": 5}}\' '
RESULT += '>"$ALLOCD_RUN_DIR/results/new"; mv "$ALLOCD_RUN_DIR/results/new" "$ALLOCD_RUN_DIR/results/result.json"'
CONTRACT = {
    "name": "result",
    "path": "results/result.json",
    "format": "json",
    "fields": {"requests.failed": {"equals": 0}, "requests.completed": {"min": 1}},
}


def verdict(run: Run) -> tuple[str, int, str, str]:
    """Outcome, code, origin and reason, which the exit code and the last line must agree with."""
    code = run.wait()
    found = run.receipt()["verdict"]
    assert code == found["code"], run
    assert f"[exit {found['code']}, origin {found['origin']}]" in run.last_line
    assert run.is_whole()
    return found["outcome"], found["code"], found["origin"], found["reason"]


def marker(run: Run) -> str:
    """The marker's first line."""
    return Path(run.receipt()["marker"]["path"]).read_text().split("\n")[0]


def after(run: Run, name: str, *earlier: str, **wanted: int) -> None:
    """Events in their order."""
    numbers = [run.first(each)["seq"] for each in earlier] + [run.first(name, **wanted)["seq"]]
    assert numbers == sorted(numbers), run


# --- successes -----------------------------------------------------------------------------------------------------


def test_a_success_waits_for_its_contract_and_ends_the_workers_normally(local: Local) -> None:
    """The result comes from a worker, after the coordinator's zero: nobody is stopped before it is there."""
    late = sh(f"trap '{touch('ended')}; exit 0' TERM; {CHILD}; {UP}; {await_files('done', 2)}; {RESULT}; wait")
    plan = local.plan(
        {
            "writer": role(0, late),
            "worker": role(1, SERVE),
            "client": role(2, sh(f"{await_files('up', 0, 1)}; {touch('done')}")),
        },
        coordinator=2,
        artifacts=[CONTRACT],
    )
    run = local.run(plan, "--json")
    assert verdict(run) == ("success", 0, "native", "completed")
    receipt = run.receipt()
    assert json.loads(run.stdout) == receipt
    assert marker(run) == "0"
    assert run.file("ended.0") == run.file("ended.1") == ""
    (contract,) = receipt["artifacts"]
    assert contract["state"] == "complete"
    content = (run.directory / "results/result.json").read_bytes()
    assert contract["finding"]["files"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    published = run.first("MarkerPublished")["seq"]
    assert all(published <= run.first("StopRank", rank=rank)["seq"] for rank in (0, 1))
    assert receipt["consequences"] == []
    assert {rank["returncode"] for rank in receipt["ranks"]} == {0}


@pytest.mark.slow
def test_sixty_four_ranks(local: Local) -> None:
    plan = local.plan(
        {"worker": role("0-62", SERVE), "client": role(63, sh(await_files("up", *range(63))))}, coordinator=63, nodes=64
    )
    run = local.run(plan)
    assert verdict(run)[:2] == ("success", 0)
    assert len(list(run.directory.glob("ended.*"))) == 63
    assert run.receipt()["doubts"] == []


@pytest.mark.slow
def test_a_worker_that_may_finish_and_one_that_is_not_critical(local: Local) -> None:
    heard = [f"""grep -q '"RankEnded".*"rank": *{rank},' "$ALLOCD_RUN_DIR/journal.jsonl\"""" for rank in (0, 1)]
    plan = local.plan(
        {
            "finisher": role(0, sh("exit 0"), may_finish=True),
            "helper": role(1, sh("exit 3"), critical=False),
            "client": role(2, sh(f"until {' && '.join(heard)}; do sleep 0.05; done")),
        },
        coordinator=2,
    )
    run = local.run(plan)
    assert verdict(run)[:2] == ("success", 0)
    assert any("not critical: rank 1" in text for text in run.receipt()["notes"])


@pytest.mark.slow
def test_files_alone_can_end_a_run(local: Local) -> None:
    plan = local.plan(
        {"collector": role(0, sh(f"{RESULT}; exec sleep 1000")), "worker": role(1, SERVE)},
        run={"finish": "artifacts"},
        artifacts=[CONTRACT],
    )
    run = local.run(plan)
    assert verdict(run) == ("success", 0, "native", "completed")
    assert marker(run) == "0"


@pytest.mark.slow
def test_a_coordinator_may_publish_itself_and_outlive_its_word(local: Local) -> None:
    """A worker that reads the 0 and leaves before the coordinator does is no failure."""
    published = '. "$ALLOCD_SH"; allocd_marker_publish 0'
    plan = local.plan(
        {
            "worker": role(0, sh('. "$ALLOCD_SH"; allocd_marker_wait')),
            "client": role(1, sh(f"{published}; {await_files('let-go', 1)}")),
        },
        coordinator=1,
        marker={"by": "coordinator"},
    )
    run = local.start(plan)
    assert run.first("RankEnded", rank=0)["code"] == 0
    (run.directory / "let-go.1").touch()
    assert verdict(run)[:2] == ("success", 0)
    assert run.receipt()["marker"]["outcome"] == "already"


# --- failures ------------------------------------------------------------------------------------------------------


def test_the_coordinators_code_is_the_runs(local: Local) -> None:
    run = local.run(local.plan({**WORKERS, "client": role(2, sh(f"{await_files('up', 0, 1)}; exit 7"))}, coordinator=2))
    assert verdict(run) == ("failure", 7, "native", "rank_failed")
    receipt = run.receipt()
    assert receipt["first_failure"]["rank"] == 2
    assert [fallen["rank"] for fallen in receipt["consequences"]] == [0, 1]
    assert marker(run) == "7"
    assert run.file("ended.0") == run.file("ended.1") == ""
    assert {rank["returncode"] for rank in receipt["ranks"]} == {7}


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        pytest.param("exit 9", 9, "ended with code 9", id="code", marks=pytest.mark.slow),
        pytest.param("exit 0", 1, "code 0", id="zero-too-early", marks=pytest.mark.slow),
        pytest.param("kill -SEGV $$", 139, "signal 11", id="signal", marks=pytest.mark.slow),
        pytest.param("exec /nonexistent", 127, "code 127", id="shell-127", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_the_first_failure(local: Local, end: str, code: int, text: str) -> None:
    plan = local.plan(
        {"doomed": role(0, sh(f"{await_files('up', 1, 2)}; {end}")), "worker": role("1,2", SERVE)}, coordinator=2
    )
    run = local.run(plan)
    assert verdict(run) == ("failure", code, "native", "rank_failed")
    failure = run.receipt()["first_failure"]
    assert failure["rank"] == 0
    assert text in failure["text"]
    assert [fallen["rank"] for fallen in run.receipt()["consequences"]] == [1, 2]
    assert run.file("ended.1") == run.file("ended.2") == ""


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["on", "off"])
def test_a_command_that_is_not_there(local: Local, agent: str) -> None:
    plan = local.plan({"lost": role(0, ["/nonexistent/engine"], agent=agent), "worker": role(1, SERVE)}, coordinator=1)
    run = local.run(plan)
    assert verdict(run)[0] == "failure"
    assert "No such file or directory" in run.receipt()["first_failure"]["text"]
    assert run.receipt()["first_failure"]["rank"] == 0
    assert run.code == (127 if agent == "on" else 1)


@pytest.mark.slow
def test_a_part_that_was_noted_as_failed_is_the_runs_code(local: Local) -> None:
    sweep = sh('. "$ALLOCD_SH"; for part in 0 5 0 6; do (exit $part) || allocd_marker_note $?; done; exit 0')
    run = local.run(local.plan({**WORKERS, "client": role(2, sweep)}, coordinator=2))
    assert verdict(run) == ("failure", 5, "native", "rank_failed")
    assert marker(run) == "5"


@pytest.mark.slow
def test_a_published_zero_does_not_hide_the_coordinators_own_end(local: Local) -> None:
    liar = sh('. "$ALLOCD_SH"; allocd_marker_publish 0; exit 4')
    run = local.run(local.plan({"client": role(0, liar)}, coordinator=0, marker={"by": "coordinator"}))
    assert verdict(run)[:2] == ("failure", 4)


@pytest.mark.slow
def test_a_contract_that_is_broken(local: Local) -> None:
    bad = 'mkdir -p "$ALLOCD_RUN_DIR/results"; echo \'{"requests": {"failed": 2, "completed": 5}}\' '
    plan = local.plan(
        {**WORKERS, "client": role(2, sh(f'{bad} >"$ALLOCD_RUN_DIR/results/result.json"'))},
        coordinator=2,
        artifacts=[CONTRACT],
    )
    run = local.run(plan)
    assert verdict(run) == ("failure", 65, "allocd", "artifacts")
    assert "requests.failed: found 2; expected 0" in run.last_line


@pytest.mark.slow
def test_a_contract_that_nobody_keeps(local: Local) -> None:
    plan = local.plan(
        {**WORKERS, "client": role(2, sh(":"))}, coordinator=2, artifacts=[CONTRACT], deadlines={"finalization": 1}
    )
    run = local.run(plan)
    assert verdict(run) == ("failure", 65, "allocd", "artifacts")
    assert run.receipt()["artifacts"][0]["reason"] == "finalization"
    assert run.receipt()["status"] == {"native": "ok", "artifacts": "failed", "checker": "ok", "collection": "ok"}


@pytest.mark.slow
def test_the_deadline_of_a_run(local: Local) -> None:
    """The coordinator is stopped before the workers: its last measurement still sees living servers."""
    run = local.run(local.plan(WORKERS, coordinator=1, deadlines={"run": 1}))
    assert verdict(run) == ("failure", 124, "allocd", "deadline")
    assert run.first("RankEnded", rank=1)["seq"] < run.first("StopRank", rank=0)["seq"]


@pytest.mark.slow
def test_a_plan_may_come_through_a_pipe(local: Local) -> None:
    """It is read once."""
    plan = local.plan({"client": role(0, sh("exit 7"))}, coordinator=0)
    run = local.run(Path("/dev/stdin"), before=("sh", "-c", f'cat {plan} | "$@"', "sh"))
    assert verdict(run)[:2] == ("failure", 7)
    assert run.file("plan.toml") == plan.read_text()


# --- stops ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_the_coordinator_and_then_the_workers(local: Local, number: signal.Signals, code: int) -> None:
    run = local.start(local.plan({"worker": role("0,2", SERVE), "client": role(1, SERVE)}, coordinator=1))
    run.wait_file("up.0", "up.1", "up.2")
    run.signal(number)
    assert verdict(run) == ("failure", code, "allocd", "stop_requested")
    assert f"SIG{number.name.removeprefix('SIG')}" in run.last_line
    assert all(run.file(f"ended.{rank}") == "" for rank in range(3))
    end = run.first("RankEnded", rank=1)["seq"]
    assert all(end < run.first("StopRank", rank=rank)["seq"] for rank in (0, 2))
    assert marker(run) == str(code)
    assert [fallen["rank"] for fallen in run.receipt()["consequences"]] == [0, 1, 2]
    assert run.processes() == []


@pytest.mark.parametrize("agent", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_second_signal_kills_what_does_not_go(local: Local, agent: str) -> None:
    plan = local.plan({"stubborn": role("0,1", STUBBORN, grace=300, agent=agent)}, coordinator=0)
    run = local.start(plan)
    run.wait_file("up.0", "up.1")
    run.signal(signal.SIGTERM)
    run.first("StopRank", rank=0)
    run.signal(signal.SIGTERM)
    assert verdict(run) == ("failure", 143, "allocd", "stop_requested")
    assert {rank["end"]["signal"] for rank in run.receipt()["ranks"]} == {9}
    assert run.processes() == []


@pytest.mark.slow
def test_a_signal_before_anything_runs_starts_nothing(local: Local) -> None:
    """The agents never say hello: the stop comes while they are waited for."""
    dumb = local.directory / "python"
    dumb.write_text("#!/bin/sh\nexec sleep 1000\n")
    dumb.chmod(0o755)
    plan = local.plan({"worker": role("0,1", SERVE)}, coordinator=0, job={"name": "x", "nodes": 2, "python": str(dumb)})
    run = local.start(plan)
    run.first("StepSpawned", rank=1)
    run.signal(signal.SIGTERM)
    assert verdict(run) == ("failure", 143, "allocd", "stop_requested")
    assert run.events("RankStarted") == []
    assert run.processes() == []


@pytest.mark.slow
def test_nohup_is_respected(local: Local) -> None:
    """A program that was started with SIGHUP ignored is meant to outlive its terminal."""
    run = local.start(local.plan({"client": role(0, SERVE)}, coordinator=0), before=("nohup",))
    run.wait_file("up.0")
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGTERM)
    assert verdict(run)[:2] == ("failure", 143)
    assert [event["signal"] for event in run.events("StopRequested")] == ["TERM"]


# --- without an agent ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_without_an_agent(local: Local) -> None:
    """Their ends, their logs, their stop and their working directory are the same."""
    elsewhere = local.directory / "elsewhere"
    elsewhere.mkdir()
    server = sh(f"pwd; echo words >&2; trap '{touch('ended')}; exit 0' TERM; {CHILD}; {UP}; wait")
    plan = local.plan(
        {
            "worker": role(0, server, agent="off", cwd=str(elsewhere), env={"ROLE": "{role}"}),
            "client": role(1, sh(f"{await_files('up', 0)}; exit 5"), agent="off"),
        },
        coordinator=1,
    )
    run = local.run(plan)
    assert verdict(run) == ("failure", 5, "native", "rank_failed")
    assert run.log(0, "out").read_text() == f"{elsewhere}\n"
    assert run.log(0, "err").read_text() == "words\n"
    assert run.file("ended.0") == ""


@pytest.mark.slow
def test_what_a_rank_without_an_agent_leaves_behind_is_found(local: Local) -> None:
    """Its child has a session of its own and outlives it: the search by tag ends it."""
    script = sh("setsid sleep 1000 & exit 6")
    run = local.run(local.plan({"client": role(0, script, agent="off")}, coordinator=0))
    assert verdict(run)[:2] == ("failure", 6)
    assert run.first("Swept", rank=0)["killed"] == 1


# --- output --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["on", "off"])
def test_output_is_kept_to_the_last_byte(local: Local, agent: str) -> None:
    """Binary, fast, without a last newline, and cut off by a stop in the middle of a block."""
    flood = py(
        "import os, signal, sys\n"
        "block = bytes(range(256)) * 256\n"
        "for _ in range(320): os.write(1, block)\n"
        "signal.signal(15, lambda *_: (os.write(1, b'last'), os._exit(0)))\n"
        "open(os.environ['ALLOCD_RUN_DIR'] + '/up.0', 'w').close()\n"
        "while True: signal.pause()\n"
    )
    plan = local.plan(
        {"flood": role(0, flood, agent=agent), "client": role(1, sh(f"{await_files('up', 0)}; exit 3"))}, coordinator=1
    )
    run = local.run(plan)
    assert run.code == 3
    found = hashlib.sha256(run.log(0, "out").read_bytes()).hexdigest()
    assert found == hashlib.sha256(bytes(range(256)) * 256 * 320 + b"last").hexdigest()


@pytest.mark.slow
def test_a_rank_may_close_its_output_and_run_on(local: Local) -> None:
    closer = sh(f"exec >&- 2>&- <&-; {await_files('up', 1)}; exit 8")
    run = local.run(local.plan({"client": role(0, closer), "worker": role(1, SERVE)}, coordinator=0))
    assert verdict(run) == ("failure", 8, "native", "rank_failed")


# --- collecting ----------------------------------------------------------------------------------------------------


def files_of(run: Run) -> dict[str, str]:
    """What was collected: source below the run directory -> sha256 of the copy, which must be the receipt's."""
    found = {}
    for item in run.receipt()["collected"]["files"]:
        data = Path(item["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == item["sha256"]
        assert len(data) == item["size"]
        found[os.path.relpath(item["source"], run.directory)] = item["path"]
    return found


@pytest.mark.slow
def test_collecting(local: Local) -> None:
    """Copies with checksums; a file that two patterns name is taken once, links are not followed."""
    outside = local.directory / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text("{}")
    script = f'cd "$ALLOCD_RUN_DIR"; mkdir out; echo one >out/a.json; echo two >out/b.json; ln -s {outside} out/away; '
    script += f"ln -s {outside}/secret.json out/c.json"
    plan = local.plan(
        {"client": role(0, sh(script))},
        coordinator=0,
        collect={"paths": ["out/*.json", "out/a.json", "out/away/*", str(outside / "secret.json")]},
    )
    run = local.run(plan)
    assert verdict(run)[:2] == ("success", 0)
    found = files_of(run)
    assert set(found) == {"out/a.json", "out/b.json", os.path.relpath(outside / "secret.json", run.directory)}
    assert (run.directory / "collected/out/a.json").read_text() == "one\n"
    errors = run.receipt()["collected"]["errors"]
    assert len(errors) == 2, errors
    assert all("link" in error for error in errors)
    assert run.receipt()["status"]["collection"] == "failed"


@pytest.mark.slow
def test_a_required_file_that_is_not_collected(local: Local) -> None:
    plan = local.plan({"client": role(0, sh(":"))}, coordinator=0, collect={"paths": ["out/*.json"], "required": True})
    run = local.run(plan)
    assert verdict(run) == ("failure", 65, "allocd", "not_collected")
    assert "out/*.json" in run.last_line
