"""allocctl's verbs with somebody who answers on the socket, and with nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import asking
from supervisor.cli.accepted import hand_over
from supervisor.cli.daemon import Absent, Daemon
from supervisor.cli.interrupts import Interrupts
from supervisor.core import codes
from supervisor.core.events import Event
from supervisor.service.interface import AdoptRequest, Allocation
from supervisor.service.place import OWNER, Owner
from tests.service.desk import Desk
from tests.service.running import ALLOCCTL, until
from tests.service.world import World
from tests.unit.test_follow import end_run, make_run

EVENTS = {kind.__name__ for kind in Event.__subclasses__()}
PLAN = """[job]
name = "b"
nodes = 1
[roles.all]
ranks = "0"
command = ["sh", "-c", "exit 3"]
[coordinator]
rank = 0
"""
ENDED = {"outcome": "failure", "code": 7, "origin": "native", "reason": "native", "summary": "rank 0 ended with 7"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("ALLOCD_RUNS", "ALLOCD_RUN_DIR", "SLURM_JOB_ID", "STATE_DIRECTORY", "ALLOCD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("supervisor.cli.daemon.PAUSE", 0.02)
    monkeypatch.setattr("supervisor.service.stream.LAST_WORDS", 0.05)
    return tmp_path


@pytest.fixture
def desk(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    with Desk(home, capfd).open() as desk:
        monkeypatch.setenv("ALLOCD_SOCKET", desk.path)
        yield desk


@pytest.fixture
def nobody(home: Path, capfd: pytest.CaptureFixture[str]) -> Desk:
    """Nobody answers here."""
    return Desk(home, capfd)


# --- list -------------------------------------------------------------------------------------------------------------


def test_list(desk: Desk) -> None:
    desk.do(desk.world.put, slurm="RUNNING", run_id="1001")
    desk.do(desk.world.put, state="queued", jobid=None, position=1, name="second\x1b[2J")
    desk.do(desk.world.put, state="ended", verdict=ENDED)
    said = desk.say("list")
    assert said.code == 0
    assert said.out.splitlines() == [
        "KEY  JOB   STATE    SLURM    NAME           RUN",
        "a1   1001  running  RUNNING  bench          1001",
        "a2   -     queued   -        second\\x1b[2J  -     number 1 in the queue",
    ]
    assert "failure (7)" in desk.say("list", "--all").out
    assert desk.say("list", "-q", "--all").out.split() == ["1001", "a2", "1003"]
    found = desk.say("list", "--state", "ended", "--json").document
    assert [item["key"] for item in found["allocations"]] == ["a3"] and found["held"]
    assert "nothing is held that has not ended" in desk.say("list", "--name", "other").err


def test_a_line_of_the_list_has_room_for_so_many_words(desk: Desk) -> None:
    desk.do(desk.world.put, state="submitting", jobid=None, trouble="\0" * 1000)
    (_, line) = desk.say("list").out.splitlines()
    assert line.endswith("\\x00\\...") and len(line) < 300


def test_list_reads_all_pages(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.cli.daemon.PAGE", 2)
    for _ in range(5):
        desk.do(desk.world.put)
    assert len(desk.say("list", "-q").out.split()) == 5


def test_runs_are_listed_in_the_order_of_their_numbers(nobody: Desk, home: Path) -> None:
    registry = home / "state/allocd/runs"
    registry.mkdir(parents=True)
    ids = ["9", "9.r2", "9.r10", "10", "10_2", "10_11", "local-1"]
    for run_id in ids:
        (registry / run_id).symlink_to(make_run(home / "runs", run_id))
    assert [item["key"] for item in nobody.say("list", "--json").document["allocations"]] == ids


def test_list_without_a_daemon(nobody: Desk, home: Path) -> None:
    path = home / "plan.toml"
    path.write_text(PLAN)
    assert nobody.say("run", "--local", "-q", path).code == 3
    said = nobody.say("list", "--all", "--json")
    assert said.code == 0 and "allocctl service install" in said.err
    (found,) = said.document["allocations"]
    assert (found["state"], found["verdict"]["code"], said.document["held"]) == ("ended", 3, False)
    assert nobody.say("list").out == ""


def test_list_tells_of_what_the_daemon_does_not_hold(desk: Desk, home: Path) -> None:
    registry = home / "state/allocd/runs"
    registry.mkdir(parents=True)
    desk.do(desk.world.put, run_id="1001")
    desk.do(desk.world.put, state="ended", verdict=ENDED)  # 1002: whatever is left of its run
    for run_id in ("1001", "1002", "7.s2", "local-1"):
        (registry / run_id).symlink_to(make_run(home / "runs", run_id))
    found = desk.say("list", "--json").document["allocations"]
    assert [(item["key"], item["kind"]) for item in found] == [
        ("a1", "submitted"),
        ("7.s2", "run"),
        ("local-1", "run"),
    ]
    assert len(desk.say("list", "--json", "--socket", desk.path).document["allocations"]) == 1


def test_bytes_that_are_no_text_are_only_a_name(desk: Desk) -> None:
    odd = os.fsdecode(b"\xff\x1b\n")
    assert desk.say("list", "--name", os.fsdecode(b"\xff")).code == codes.OK
    assert desk.say("list", "--name", odd).code == codes.CONFIG
    for words in (["watch", odd], ["status", odd], ["stop", odd], ["wait", odd], ["logs", odd], ["receipt", odd]):
        said = desk.say(*words)
        assert said.code in (codes.UNREACHABLE, codes.CONFIG), said
        assert "Traceback" not in said.err and "\x1b" not in said.err and len(said.err.splitlines()) == 1, said
    assert "no\\x1b[2J.toml" in desk.say("submit", "no\x1b[2J.toml").err


def test_an_empty_word_is_not_one_that_was_left_out(desk: Desk) -> None:
    desk.do(desk.world.put)
    for words in (["list", "--socket", ""], ["submit", "p.toml", "--socket="], ["stop", ""], ["watch", ""]):
        said = desk.say(*words)
        assert said.code == codes.UNREACHABLE and "is empty" in said.err and not said.out, said
    assert desk.world.allocations()[0].stopping is None


def test_a_daemon_that_is_installed_is_to_be_started(nobody: Desk, home: Path) -> None:
    assert "`allocctl service install`" in nobody.say("list").err
    units = home / "config/systemd/user"
    units.mkdir(parents=True)
    (units / "allocd.socket").touch()
    assert "start it with `systemctl --user start allocd.socket`" in nobody.say("list").err


def test_who_was_named_must_answer(nobody: Desk, home: Path) -> None:
    for words in (["list"], ["status", "a1"], ["watch"], ["stop", "a1"]):
        said = nobody.say(*words, "--socket", home / "none.sock")
        assert said.code == codes.UNREACHABLE and "none.sock" in said.err, words


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_of_what_has_no_job_yet(desk: Desk) -> None:
    desk.do(desk.world.put, state="queued", jobid=None, position=3, trouble="the controller is away")
    said = desk.say("status", "a1")
    assert said.out.splitlines() == ["a1  bench", "queued, number 3 in the queue", "  the controller is away"]
    assert desk.say("status", "a1", "--json").document["allocation"]["position"] == 3


def test_status_of_a_run_tells_both(desk: Desk, home: Path) -> None:
    path = home / "plan.toml"
    path.write_text(
        '[job]\nname = "b"\nnodes = 1\n[roles.all]\nranks = "0"\ncommand = ["true"]\n[coordinator]\nrank = 0\n'
    )
    ran = desk.say("run", "--local", "--json", path).document
    desk.do(desk.world.put, run_id=ran["run_id"], run_dir=ran["run_dir"], slurm="COMPLETING", stopping="stop")
    for name in ("a1", "1001", ran["run_id"]):
        said = desk.say("status", name)
        assert said.out.startswith(f"{ran['run_id']}  b") and said.code == 0
        assert "allocd holds it as a1: running, COMPLETING, told to stop" in said.out
    assert "allocd" not in desk.say("status", ran["run_dir"]).out


def test_status_goes_on_when_a_daemon_was_killed(home: Path, nobody: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = home / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(dead))
    monkeypatch.setenv("ALLOCD_SOCKET", str(dead))
    said = nobody.say("status", "4711")
    assert said.code == codes.UNREACHABLE and "no run '4711'" in said.err and "dead.sock" not in said.err


def test_another_login_node_is_named(nobody: Desk, home: Path) -> None:
    place = home / "state/allocd/hosts/login7"
    place.mkdir(parents=True)
    (place / OWNER).write_text(json.dumps(asdict(Owner("login7", "boot", 1, 1, "2026-01-02T03:04:05Z"))))
    for words in (["status", "4711"], ["stop", "4711"], ["watch"], ["list"]):
        assert "login7 (since 2026-01-02T03:04:05Z): ask there" in nobody.say(*words).err, words


@pytest.mark.slow
def test_verbs_that_work_on_the_disk_take_a_key(desk: Desk, talked: dict[str, str]) -> None:
    desk.do(desk.world.put, "served", state="ended", verdict=ENDED, **talked)
    for verb in ("receipt", "explain", "verify", "artifacts", "collect"):
        by_key, by_path = desk.say(verb, "a1"), desk.say(verb, talked["run_dir"])
        assert by_key.code == 0 and (verb, by_key.out) == (verb, by_path.out), by_key
    desk.do(desk.world.put, state="queued", jobid=None)
    assert "a2 has no job yet: queued" in desk.say("receipt", "a1", "a2").err
    assert desk.say("receipt", "nothing").code == codes.UNREACHABLE


@pytest.mark.slow
def test_an_array_is_told_by_its_tasks(desk: Desk, talked: dict[str, str]) -> None:
    """That one of them was seen last makes it no better than the others."""
    desk.do(desk.world.put, jobid="4711", run_id="4711_3", run_dir=talked["run_dir"])
    assert desk.say("status", "a1").out.startswith("a1 (job 4711, run 4711_3)  bench\nrunning")


# --- stop -------------------------------------------------------------------------------------------------------------


def test_stop_and_cancel(desk: Desk) -> None:
    desk.do(desk.world.put)
    said = desk.say("stop", "1001")
    assert (said.code, said.out) == (0, "")
    assert "a1 (job 1001): it ends in order as soon as its run has begun" in said.err
    desk.do(desk.world.change, "a1", run_id="1001", stopping=None)
    assert "a1 (job 1001): it is told to end in order" in desk.say("stop", "1001").err
    assert "a1 (job 1001): it was asked to end before, and its engine is told once" in desk.say("stop", "1001").err
    assert "its job is being cancelled;" in desk.say("stop", "--cancel", "1001").err
    assert "its job is being cancelled, and scancel is sent again" in desk.say("stop", "--cancel", "1001").err
    assert "it is being cancelled already, and nothing more is done" in desk.say("stop", "1001").err
    assert desk.say("stop", "--cancel", "a1", "--json").document["allocation"]["stopping"] == "cancel"
    desk.do(desk.world.put, state="ended", verdict=ENDED)
    assert "has ended already: failure, exit code 7" in desk.say("stop", "a2").err


@pytest.mark.slow
def test_a_component_means_its_job_but_is_not_stopped(nobody: Desk, home: Path) -> None:
    run = make_run(home / "runs", "4711")
    (run / "logs" / "rank-1.client.out").write_text("hello\n")
    end_run(run)
    assert nobody.say("logs", "4711+1").out == "rank-1.client.out: hello\n"
    assert nobody.say("receipt", "--path", "4711+1").out == f"{run}/receipt.run.json\n"
    for words in ([], ["--cancel"]):
        refused = nobody.say("stop", *words, "4711+1")
        assert refused.code == codes.CONFIG and "4711+1 is a component of job 4711" in refused.err


def test_stop_without_a_daemon_signals_the_engine(nobody: Desk, home: Path) -> None:
    path = home / "plan.toml"
    path.write_text(
        '[job]\nname = "b"\nnodes = 1\n[roles.all]\nranks = "0"\ncommand = ["sleep", "60"]\n[coordinator]\nrank = 0\n'
    )
    argv = [sys.executable, "-m", "supervisor.cli.main", "run", "--local", "--json", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stderr is not None
        for line in engine.stderr:
            if "started" in line:
                break
        (run,) = (home / "runs").glob("local-*")
        said = nobody.say("stop", run.name)
        assert said.code == 0 and "was sent SIGTERM" in said.err
        engine.communicate(timeout=30)
    assert engine.returncode == codes.STOPPED
    assert "has ended already" in nobody.say("stop", run.name).err
    refused = nobody.say("stop", "--cancel", run.name)
    assert refused.code == codes.CONFIG and "has no job" in refused.err


# --- watch ------------------------------------------------------------------------------------------------------------


def test_watch_needs_a_daemon(nobody: Desk) -> None:
    said = nobody.say("watch", "4711")
    assert said.code == codes.UNREACHABLE
    assert "allocctl service install" in said.err and "allocctl wait 4711" in said.err


def test_watch_one_to_its_end(desk: Desk) -> None:
    for _ in range(2):
        desk.do(desk.world.put)
    desk.do(desk.world.tell, "a1", "state", state="pending", slurm="PENDING")
    desk.do(desk.world.tell, "a2", "state", state="running", slurm="RUNNING")
    desk.do(desk.world.tell, "a1", "ended", state="ended", verdict=ENDED)
    said = desk.say("watch", "a1", "--since", "0")
    assert said.code == 0
    assert [line.split(maxsplit=2)[2] for line in said.out.splitlines()] == [
        "state       PENDING",
        "ended       failure, exit code 7 (native): rank 0 ended with 7",
    ]
    assert said.err == "allocctl: a1 (job 1001): running\n"  # how it stands, at once
    assert desk.say("watch", "a1", "--json", "--since", "0").err == ""
    seen = [json.loads(line) for line in desk.say("watch", "a1", "--since", "1", "--json").out.splitlines()]
    assert [event["seq"] for event in seen] == [3]


def test_events_go_on_after_a_daemon_was_away(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    first, second = Desk(home, capfd), Desk(home, capfd)
    with first.open():
        first.do(first.world.put)
        first.do(first.world.tell, "a1", "state")
        events = Daemon(first.path).events("a1")
        seen += [event["seq"] for event in [next(events)] if event]
    with second.open():
        second.do(second.world.put)
        for _ in range(3):
            second.do(second.world.tell, "a1", "state")
        seen += [event["seq"] for event in [next(events), next(events)] if event]
        events.close()
    assert seen == [1, 2, 3]


def test_watch_begins_now_and_tells_a_number_that_never_was(desk: Desk) -> None:
    for _ in range(2):
        desk.do(desk.world.put)
    for key in ("a1", "a2"):
        desk.do(desk.world.tell, key, "state", state="running")
    desk.do(desk.world.change, "a2", state="ended")
    assert desk.say("watch", "a2", "--json").out == ""
    desk.do(desk.world.tell, "a1", "ended", verdict=ENDED)
    desk.do(desk.world.change, "a1", state="ended")
    said = desk.say("watch", "a1", "--since", "41", "--json")
    assert "the last event here is 3, and 41 is none of these" in said.err
    assert [json.loads(line)["seq"] for line in said.out.splitlines()] == [1, 3]


@pytest.mark.slow
def test_watch_waits_for_a_daemon_that_goes_away_before_anything_has_happened(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = (Desk(home, capfd, lambda world: world.put()) for _ in range(2))
    with first.open():
        argv = [sys.executable, "-m", "supervisor.cli.main", "watch", "a1", "--socket", first.path]
        verb = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: first.world.waiting, "a reader of its events")
    with second.open():
        until(lambda: second.world.waiting, "the same reader")
        second.do(second.world.tell, "a1", "ended", state="ended", verdict=ENDED)
        out, said = verb.communicate(timeout=30)
    assert (verb.returncode, said) == (0, "allocctl: a1 (job 1001): running\n") and "failure, exit code 7" in out


def test_watch_tells_no_records_that_have_no_sentence(desk: Desk) -> None:
    desk.do(desk.world.put)
    desk.do(desk.world.tell, "a1", "record", record="StepSpawned", text="")
    desk.do(desk.world.tell, "a1", "record", record="RankStarted", text="rank 0 started (pid 7)")
    desk.do(desk.world.tell, "a1", "ended", verdict=ENDED)
    said = desk.say("watch", "a1", "--since", "0")
    assert [line.split(maxsplit=2)[2][:6] for line in said.out.splitlines()] == ["record", "ended "]
    assert len(desk.say("watch", "a1", "--since", "0", "--json").out.splitlines()) == 3


def test_a_run_that_answers_no_more_is_told_so(nobody: Desk, home: Path) -> None:
    run = home / "run"
    run.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home / "left.sock"))
    (run / "ctl.path").write_text(f"{home / 'left.sock'}\n")
    said = nobody.say("watch", run)
    assert said.code == codes.UNREACHABLE and f"`allocctl status {run}` tells how it is" in said.err


# --- logs, adopt, submit ----------------------------------------------------------------------------------------------


LINES = ["rank-0.all.err: two", "rank-0.all.out: one"]
TALKS = '[job]\nname = "b"\nnodes = 1\n[roles.all]\nranks = "0"\ncommand = ["sh", "-c", "echo one; echo two >&2"]\n'


@pytest.fixture
def talked(home: Path) -> dict[str, str]:
    """A run that is over."""
    path = home / "plan.toml"
    path.write_text(f"{TALKS}[coordinator]\nrank = 0\n")
    argv = [sys.executable, "-m", "supervisor.cli.main", "run", "--local", "--json", str(path)]
    ran = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return {"run_id": ran["run_id"], "run_dir": ran["run_dir"]}


@pytest.mark.slow
def test_logs(desk: Desk, talked: dict[str, str]) -> None:
    desk.do(desk.world.put, state="ended", verdict=ENDED, **talked)
    for words in (["a1", "-f"], ["1001+1", "-f"], ["1001"], ["a1"], [talked["run_dir"]]):
        said = desk.say("logs", *words, "--kind", "out", "--kind", "err")
        assert (said.code, sorted(line.split("/")[-1] for line in said.out.splitlines())) == (0, LINES), words
    assert json.loads(desk.say("logs", "a1", "-f", "--kind", "out", "--json").out)["text"] == "one"
    desk.do(desk.world.put, state="ended", verdict=ENDED, jobid=None)
    assert "a2 has no run: failure, exit code 7" in desk.say("logs", "-f", "a2").err


@pytest.mark.slow
def test_logs_go_on_without_the_daemon(
    home: Path, capfd: pytest.CaptureFixture[str], talked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(home, capfd)
    with desk.open():
        desk.do(desk.world.put, "adopted", **talked)
        argv = [sys.executable, "-m", "supervisor.cli.main", "logs", "-f", "a1", "--kind=out", "--socket", desk.path]
        verb = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert verb.stdout is not None
        first = verb.stdout.readline()
        with Path(talked["run_dir"], "logs/rank-0.all.out").open("a") as file:
            file.write("three\n")
    rest, said = verb.communicate(timeout=30)
    lines = [line.split("/")[-1] for line in (first + rest).splitlines()]
    assert (verb.returncode, lines) == (0, ["rank-0.all.out: one", "rank-0.all.out: three"])
    assert "the files are followed from here" in said


@pytest.mark.slow
def test_logs_wait_for_a_daemon_that_is_started_anew(
    home: Path, capfd: pytest.CaptureFixture[str], talked: dict[str, str]
) -> None:
    first = Desk(home, capfd, lambda world: world.put(state="queued", jobid=None))
    second = Desk(home, capfd, lambda world: world.put("adopted", state="ended", verdict=ENDED, **talked))
    with first.open():
        argv = [sys.executable, "-m", "supervisor.cli.main", "logs", "-f", "a1", "--kind=out", "--socket", first.path]
        verb = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: b'allocd_streams{kind="all"} 1.0' in first.world.metrics(), "a reader of its logs")
    with second.open():
        out, said = verb.communicate(timeout=30)
    assert verb.returncode == 0, said
    assert [line.split("/")[-1] for line in out.splitlines()] == ["rank-0.all.out: one"]


def test_logs_of_a_rank_that_is_not_there(desk: Desk) -> None:
    desk.do(desk.world.put, run_id="1001", ranks=({"rank": 0},))
    said = desk.say("logs", "-f", "a1", "--rank", "9")
    assert said.code == codes.UNREACHABLE and "a1 has no rank 9: it has 1, from 0 on" in said.err


@pytest.mark.slow
def test_adopt(desk: Desk, home: Path, talked: dict[str, str]) -> None:
    world, asked = desk.world, []

    async def adopt(request: AdoptRequest, key: str | None) -> Allocation:
        asked.append(request)
        made = await World.adopt(world, request, key)
        world.change(made.key, state="running", **talked)
        await world.tell(made.key, "started", state="running")
        return made

    world.adopt = adopt  # type: ignore[method-assign]
    said = desk.say("adopt", "--detach", "4711", "plan.toml", "--dir", "there")
    assert (said.code, said.out) == (0, f"{talked['run_id']}\n")
    assert f"{talked['run_dir']}: allocd holds it as a1" in said.err
    assert (asked[0].jobid, asked[0].directory) == ("4711", str(home / "there"))
    followed = desk.say("adopt", "4711", "plan.toml")
    assert followed.code == 0 and "success" in followed.err.splitlines()[-1]


@pytest.mark.slow
def test_no_verb_succeeds_that_could_not_say_it(desk: Desk, home: Path, talked: dict[str, str]) -> None:
    """/dev/full takes nothing. What a verb is called for is on stdout, and a success of which nobody heard is none."""
    desk.do(desk.world.put, "adopted", state="ended", verdict=ENDED, **talked)
    desk.do(desk.world.put, state="queued", jobid=None)
    run, plan = talked["run_dir"], str(home / "plan.toml")
    verbs = [
        ["list", "--all"], ["list", "-q"], ["list", "--json"], ["watch", "a1", "--since=0", "--json"],
        ["status", "a1"], ["status", "a2"], ["status", run, "--json"], ["stop", "a2", "--json"],
        ["wait", run, "--json"], ["logs", run], ["logs", "-f", "a1"],
        ["verify", run], ["verify", run, "--json"], ["explain", run], ["receipt", run], ["receipt", run, "--path"],
        ["receipt", run, "--junit=-"], ["artifacts", run], ["collect", run, "--json"], ["check", plan],
        ["check", "--schema"], ["submit", "--dry-run", plan], ["submit", plan], ["run", "--local", "--dry-run", plan],
        ["service", "status"], ["service", "status", "--json"], ["marker", "--help"], ["--version"],
    ]  # fmt: skip
    desk.do(desk.world.tell, "a1", "ended", verdict=ENDED)
    main = [sys.executable, "-m", "supervisor.cli.main"]
    with ThreadPoolExecutor(2) as pool, open("/dev/full", "w") as full:
        pipe = subprocess.PIPE

        def call(words: list[str]) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*main, *words], stdout=full, stderr=pipe, text=True, timeout=60)

        for done in pool.map(call, verbs):
            assert done.returncode not in (0, codes.FAULT) and "No space left on device" in done.stderr, done


def test_an_answer_that_was_lost_is_asked_for_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = asking.ask, iter([True, False])

    def ask(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        if args[1] == "POST" and next(lost):
            raise asking.NobodyAnswers("it went away before it had answered")
        return found

    monkeypatch.setattr(asking, "ask", ask)
    body = {"plan": "x", "cwd": "/", "cluster": None}
    held = hand_over(Daemon(desk.path), "/v1/allocations", body, Interrupts())
    assert held["key"] == "a1"
    monkeypatch.undo()
    assert [item.key for item in desk.world.allocations()] == ["a1"]


@contextmanager
def silence(path: str, greets: bool, then: Callable[[], object]) -> Iterator[None]:
    """Somebody who says how it is (if it `greets`), and nothing more; `then` is called when it has been asked."""

    def listen() -> None:
        for greeting in (True, False) if greets else (False,):
            way = listening.accept()[0]
            ways.append(way)
            way.recv(65536)
            if greeting:
                way.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"pid": 1, "since": ""}')
        then()

    ways: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.settimeout(10)
        listening.bind(path)
        listening.listen()
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            for way in ways:
                way.close()


@pytest.mark.parametrize("greets", [False, True])
@pytest.mark.parametrize("verb", ["submit", "adopt"])
def test_who_hangs_is_left_at_once(
    nobody: Desk, home: Path, short: str, verb: str, greets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = home / "plan.toml"
    plan.write_text(PLAN + "[slurm]\n")
    (home / "sbatch").symlink_to("/bin/true")
    monkeypatch.setenv("ALLOCCTL", ALLOCCTL)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    words: list[str | Path] = [verb, "--socket", f"{short}/s", *(["7"] if verb == "adopt" else []), plan]
    with silence(f"{short}/s", greets, lambda: os.kill(os.getpid(), signal.SIGINT)):
        begun = time.monotonic()
        said = nobody.say(*words)
        assert time.monotonic() - begun < 4
    assert said.code == codes.CANCELLED, said
    assert ("may have accepted it" if greets else "was not asked for anything") in said.err


def test_who_does_not_answer_is_not_asked_for_anything(
    nobody: Desk, home: Path, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.cli.daemon.AWAY", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/s")
        listening.listen()

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(Absent, match="--direct"):
                hand_over(Daemon(f"{short}/s"), "/v1/allocations", {"plan": "x"}, Interrupts())
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def short() -> Iterator[str]:
    """A directory that a socket's path fits into: 107 bytes are all that Linux takes."""
    with tempfile.TemporaryDirectory(prefix="s-") as directory:
        yield directory


@pytest.mark.slow
def test_a_run_that_answers_for_itself(nobody: Desk, home: Path, short: str) -> None:
    path = home / "plan.toml"
    path.write_text(f"{TALKS.replace('echo one', 'sleep 60')}[coordinator]\nrank = 0\n")
    argv = [sys.executable, "-m", "supervisor.cli.main", "run", "--local", "--serve", str(path)]
    env = {**os.environ, "XDG_RUNTIME_DIR": short}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as engine:
        assert engine.stderr is not None
        for line in engine.stderr:
            assert "not served" not in line
            if "answers on" in line:
                break
        (run,) = (home / "runs").glob("local-*")
        until((run / "ctl.path").exists, "where it answers")
        server = (run / "ctl.path").read_text().strip()
        argv = [sys.executable, "-m", "supervisor.cli.main", "watch", str(run), "--since=0"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            assert "run local-" in watcher.stdout.readline()
            assert nobody.say("list", "-q", "--socket", server).out == f"{run.name}\n"
            last = asking.ask(server, "GET", "/v1/health")["last_event"]
            with pytest.raises(asking.Refused) as never:
                asking.ask(server, "GET", f"/v1/events?after={last + 1000}")
            assert never.value.status == 410
            assert nobody.say("stop", run.name, "--socket", server).code == 0
            *lines, last = watcher.communicate(timeout=30)[0].splitlines()
            assert not [line for line in lines if line.split()[-1] in EVENTS]
        assert watcher.returncode == 0 and "ended       failure, exit code 143" in last
        engine.communicate(timeout=30)
    assert engine.returncode == codes.STOPPED
    gone = nobody.say("watch", run)
    assert gone.code == codes.UNREACHABLE and "does not answer for itself" in gone.err
