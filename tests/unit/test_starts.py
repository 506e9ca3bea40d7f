"""Engines that are started and left: one a start, and what became of it; units, sessions, lingering, leftovers."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from supervisor.cli.main import main
from supervisor.core.slurm import parse_state
from supervisor.core.slurm_queue import QueueRow
from supervisor.runs import start as starts
from supervisor.scheduler.client import Queue
from supervisor.service import adopting, spawn
from supervisor.service.interface import AdoptRequest, Refusal

PLAN = '[job]\nname = "x"\nnodes = 1\n[coordinator]\nrank = 0\n[roles.one]\nranks = [0]\ncommand = ["true"]\n'


def opened(directory: Path, pid: int = 1, **more: object) -> Path:
    """A run that was opened."""
    run_dir = directory / "7.s1"
    run_dir.mkdir()
    opening = {"event": "RunOpened", "run_id": "7.s1", "jobid": "7", "host": os.uname().nodename, "pid": pid, **more}
    (run_dir / "journal.jsonl").write_text(json.dumps({"seq": 1, "unit": "", **opening}) + "\n")
    return run_dir


# --- a start ---------------------------------------------------------------------------------------------------------


def test_what_became_of_a_start(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert starts.progress(place) == "nothing"
    claimed = starts.claim(place)
    try:
        assert starts.progress(place) == "claimed"
        run_dir = tmp_path / "7.s1"
        starts.announce(place, str(run_dir))
        assert starts.progress(place) == "claimed"  # announced, and not opened
        opened(tmp_path)
        assert (starts.progress(place), starts.run_of(place)) == ("run", str(run_dir))
    finally:
        os.close(claimed)
    assert starts.progress(place) == "run"


def test_there_is_one_engine_a_start_also_when_it_is_gone(tmp_path: Path) -> None:
    claimed = starts.claim(str(tmp_path))
    with pytest.raises(starts.Claimed, match="was started for this before"):
        starts.claim(str(tmp_path))
    os.close(claimed)
    assert starts.progress(str(tmp_path)) == "failed"
    with pytest.raises(starts.Claimed):
        starts.claim(str(tmp_path))


def test_an_engine_that_died_while_it_claimed_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / starts.CLAIM).touch()
    assert starts.progress(str(tmp_path)) == "nothing"
    os.close(starts.claim(str(tmp_path)))


def test_the_last_words_are_the_logs_last_line(tmp_path: Path) -> None:
    assert starts.last_words(str(tmp_path)) == ""
    (tmp_path / starts.LOG).write_text("allocctl: one\nallocctl: no such job\n")
    assert starts.last_words(str(tmp_path)) == "no such job"


# --- spawning --------------------------------------------------------------------------------------------------------


def test_a_program_in_a_session_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    program = "import os; print(os.getsid(0), os.getcwd(), os.environ.get('ALLOCD_UNIT'), os.environ['X'])"
    environ = {"X": "a $HOME", "ALLOCD_UNIT": "another's"}
    argv = [sys.executable, "-I", "-S", "-c", program]
    unit = spawn.spawn(argv, unit="u", log=str(log), cwd=str(tmp_path), environ=environ, stop_limit=1)
    deadline = time.monotonic() + 20
    while len(lines := log.read_text().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (unit, lines[0]) == ("", "before")
    session, told = lines[1].split(" ", 1)
    assert int(session) != os.getsid(0)
    assert told == f"{tmp_path} None a $HOME"


@pytest.fixture
def manager(tmp_path: Path) -> dict[str, str]:
    """An environment with a user manager whose systemd-run tells how it was called, and fails when told to."""
    (tmp_path / "run/systemd").mkdir(parents=True)
    (tmp_path / "run/systemd/private").touch()
    program = tmp_path / "systemd-run"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/called\n[ -z "$FAIL" ] || {{ echo "$FAIL" >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(tmp_path / "run")}


def test_a_program_in_a_unit_of_its_own(tmp_path: Path, manager: dict[str, str]) -> None:
    environ = {**manager, "SECRET": "s", "BASH_FUNC_f%%": "() { :; }", "BELL": "\a", "LINES2": "a\nb"}
    argv = ["/bin/allocctl", "run", "--dir=/a $b"]
    unit = spawn.spawn(argv, unit="u.service", log="/l", cwd="/w", environ=environ, stop_limit=90.4)
    called = (tmp_path / "called").read_text().splitlines()
    assert unit == "u.service"
    assert called[called.index("--") + 1 :] == ["/bin/allocctl", "run", "--dir=/a $$b"]
    wanted = ["--user", "--collect", "--unit=u.service", "--working-directory=/w", "--property=KillMode=process"]
    wanted += ["--property=TimeoutStopSec=90", "--property=StandardOutput=append:/l", "--setenv=ALLOCD_UNIT=u.service"]
    assert set(wanted) <= set(called)
    assert {"--setenv=SECRET", "--setenv=LINES2", "--setenv=PATH"} <= set(called)
    assert not [word for word in called if "BASH_FUNC" in word or "BELL" in word]


def test_a_unit_that_cannot_be_started_says_why(manager: dict[str, str]) -> None:
    with pytest.raises(spawn.NotSpawned, match="systemd-run ended with 1: Unit u was already loaded"):
        spawn.spawn(
            ["/x"],
            unit="u",
            log="/l",
            cwd="/",
            environ={**manager, "FAIL": "Unit u was already loaded"},
            stop_limit=1,
        )


def test_a_manager_that_is_gone_is_done_without(tmp_path: Path, manager: dict[str, str]) -> None:
    environ = {**manager, "FAIL": "Failed to connect to bus: Connection refused"}
    log = tmp_path / "log"
    argv = ["/bin/echo", "hello"]
    assert spawn.spawn(argv, unit="u", log=str(log), cwd="/", environ=environ, stop_limit=1) == ""
    deadline = time.monotonic() + 20
    while log.read_text() != "hello\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log.read_text() == "hello\n"


def test_lingering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "BOOTED", str(tmp_path / "no systemd"))
    assert spawn.ends_at_logout() is None
    monkeypatch.setattr(spawn, "BOOTED", str(tmp_path))
    monkeypatch.setattr(spawn, "LINGER", str(tmp_path / "linger"))
    why = spawn.ends_at_logout()
    assert why is not None and "loginctl enable-linger" in why
    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / getpass.getuser()).touch()
    assert spawn.ends_at_logout() is None


# --- adopting --------------------------------------------------------------------------------------------------------


def request(tmp_path: Path, plan: str = PLAN) -> AdoptRequest:
    return AdoptRequest(plan, "7", str(tmp_path), "runs", dict(os.environ))


def start(tmp_path: Path, *, wanted: bool = True) -> adopting.Started:
    return asyncio.run(adopting.start(request(tmp_path), "k", str(tmp_path / "start"), wanted=wanted))


def test_a_user_without_a_name_does_not_linger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "BOOTED", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert "lingering is off for 2147483641" in (spawn.ends_at_logout() or "")


def test_without_lingering_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopting, "ends_at_logout", lambda: "lingering is off")
    with pytest.raises(Refusal, match=r"lingering is off; or let it run here.*--foreground"):
        start(tmp_path)
    assert starts.progress(str(tmp_path / "start")) == "nothing"


def test_a_plan_with_errors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as refused:
        asyncio.run(adopting.start(request(tmp_path, "[job]\n"), "k", str(tmp_path / "start")))
    assert (refused.value.status, refused.value.kind) == (422, "invalid")


def test_the_same_start_again_finds_the_run_that_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "start"
    place.mkdir()
    os.close(starts.claim(str(place)))
    run_dir = opened(tmp_path, pid=5, unit="u.service")
    starts.announce(str(place), str(run_dir))
    monkeypatch.setattr(adopting, "spawn", lambda *_, **__: pytest.fail("started again"))
    found = start(tmp_path)
    assert (found.run_dir, found.run_id, found.pid, found.unit) == (str(run_dir), "7.s1", 5, "u.service")


def test_the_plan_of_a_start_is_nobodys_to_read_and_gone_when_the_engine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []

    def spawn(argv: list[str], **_: object) -> str:
        assert Path(argv[-1]).read_text() == PLAN
        modes.append(Path(argv[-1]).stat().st_mode & 0o777)
        os.close(starts.claim(str(tmp_path / "start")))
        starts.announce(str(tmp_path / "start"), str(opened(tmp_path)))
        return ""

    monkeypatch.setattr(adopting, "spawn", spawn)
    assert (start(tmp_path).run_id, modes) == ("7.s1", [0o600])
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == ["claim", "run"]


def test_a_start_that_nobody_wants_any_more_is_withdrawn_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "spawn", lambda *_, **__: pytest.fail("started"))
    for wanted in (False, False, True):  # the last one: a stop that was forgotten by a daemon that died
        with pytest.raises(Refusal, match="stopped before its engine was there") as refused:
            start(tmp_path, wanted=wanted)
        assert refused.value.more["exit"] == 130
    with pytest.raises(starts.Claimed):
        starts.claim(str(tmp_path / "start"))


def test_an_engine_that_is_on_its_way_when_nobody_wants_it_any_more_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "start"
    place.mkdir()
    claimed = starts.claim(str(place))
    monkeypatch.setattr(adopting, "START_LIMIT", 0.1)
    with pytest.raises(Refusal) as late:
        start(tmp_path, wanted=False)
    assert late.value.status == 503, "it may open its run at any moment: nobody gives it up"
    starts.announce(str(place), str(opened(tmp_path)))
    assert start(tmp_path, wanted=False).run_id == "7.s1"
    os.close(claimed)


def test_an_engine_that_ended_before_its_run_says_why(tmp_path: Path) -> None:
    place = tmp_path / "start"
    place.mkdir()
    os.close(starts.claim(str(place)))
    (place / starts.LOG).write_text("allocctl: Slurm does not know a job 7\n")
    with pytest.raises(Refusal, match=r"^Slurm does not know a job 7$"):
        start(tmp_path)


def test_a_stop_reaches_the_engine_of_the_run_and_nobody_else(tmp_path: Path) -> None:
    run_dir = opened(tmp_path, pid=os.getpid())  # this process does not hold the directory open
    assert adopting.alive(str(run_dir)) is False
    assert adopting.stop(str(run_dir)) is False
    (run_dir / "journal.jsonl").write_text((run_dir / "journal.jsonl").read_text().replace(os.uname().nodename, "far"))
    assert adopting.alive(str(run_dir)) is None
    with pytest.raises(Refusal, match="is on far: stop it there"):
        adopting.stop(str(run_dir))


def test_a_stop_is_a_sigterm(tmp_path: Path) -> None:
    run_dir = opened(tmp_path, pid=0)
    held = os.open(run_dir, os.O_RDONLY)
    process = subprocess.Popen(["sleep", "1000"], pass_fds=[held])
    os.close(held)
    journal = run_dir / "journal.jsonl"
    journal.write_text(journal.read_text().replace('"pid": 0', f'"pid": {process.pid}'))
    assert adopting.stop(str(run_dir)) is True
    assert process.wait(20) == -15


# --- left-over steps -------------------------------------------------------------------------------------------------

OURS = "allocd-7.s1-ab12-"


@dataclass
class Slurm:
    """A job's steps; those in `deaf` do not end by SIGTERM, those in `stuck` not at all."""

    steps: dict[str, str]
    deaf: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    away: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)

    async def queue(self, jobids: Collection[str]) -> Queue:
        row = QueueRow("7", "7", parse_state("RUNNING"), None, None, None, 0, 0, "")
        return Queue(("squeue",), "", 0, problem="away" if self.away else "", rows={"7": row})

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        return dict(self.steps)

    async def signal_step(self, step: str, signame: str) -> bool:
        return self._end(signame, step, (*self.deaf, *self.stuck))

    async def cancel_step(self, step: str) -> bool:
        return self._end("KILL", step, self.stuck)

    def _end(self, how: str, step: str, deaf: Collection[str]) -> bool:
        self.asked.append((how, step))
        self.steps = {name: known for name, known in self.steps.items() if known != step or step in deaf}
        return True


def leftovers(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    monkeypatch.setattr(adopting, "STEP_PAUSE", 0.01)
    monkeypatch.setattr(adopting, "GONE_LIMIT", 0.05)
    run_dir = opened(tmp_path, pid=2**22 + 1, steps=OURS)
    return asyncio.run(adopting.stop_leftovers(slurm, str(run_dir), grace=0.05))


def test_only_the_runs_own_steps_are_ended_first_kindly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"allocd-7.s1-ff00-r0": "7.8", f"{OURS}r0x": "7.9", "x" + OURS + "r0": "7.10", "bash": "7.11"}
    slurm = Slurm({f"{OURS}r0": "7.0", f"{OURS}r12": "7.1", f"sweep-{OURS}r0": "7.2", **others}, deaf=("7.1",))
    assert leftovers(tmp_path, slurm, monkeypatch) == (["7.0", "7.1", "7.2"], "")
    assert sorted(slurm.asked) == [("KILL", "7.1"), ("TERM", "7.0"), ("TERM", "7.1"), ("TERM", "7.2")]
    assert slurm.steps == others


def test_what_does_not_end_or_cannot_be_asked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm({f"{OURS}r0": "7.0"}, stuck=("7.0",))
    ended, trouble = leftovers(tmp_path, slurm, monkeypatch)
    assert (ended, trouble) == (["7.0"], "steps 7.0 were told to end, and are still there")


def test_without_an_answer_of_slurms_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm({f"{OURS}r0": "7.0"}, away=True)
    ended, trouble = leftovers(tmp_path, slurm, monkeypatch)
    assert (ended, slurm.asked) == ([], [])
    assert "did not say which steps of job 7 are left" in trouble


def test_the_steps_of_a_run_that_may_live_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm({f"{OURS}r0": "7.0"})
    monkeypatch.setattr(adopting, "alive", lambda _: None)
    assert leftovers(tmp_path, slurm, monkeypatch) == ([], "")
    assert slurm.asked == []


# --- allocctl adopt --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["4711+1", "4711_3", "47 11", "+1", "../4711"])
def test_adopt_takes_every_id_of_slurms_and_nothing_else(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(adopting, "ends_at_logout", lambda: "lingering is off")
    (tmp_path / "plan.toml").write_text(PLAN)
    assert main(["adopt", "--direct", job, str(tmp_path / "plan.toml")]) == 78
    refused = "is no Slurm job id" if not job.startswith("4711") else "lingering is off"
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(("code", "left"), [(3, 0), (79, 1)])
def test_adopt_leaves_nothing_of_a_start_whose_run_it_has_followed_to_the_end(
    code: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("supervisor.cli.wait.wait_for", lambda *_: code)
    monkeypatch.setattr("supervisor.cli.adopt._clean_up", lambda started: None)

    def spawn(argv: list[str], *, environ: dict[str, str], **_: object) -> str:
        os.close(starts.claim(environ[starts.VARIABLE]))
        starts.announce(environ[starts.VARIABLE], str(opened(tmp_path)))
        return ""

    monkeypatch.setattr(adopting, "spawn", spawn)
    (tmp_path / "plan.toml").write_text(PLAN)
    assert main(["adopt", "--direct", "-q", "7", str(tmp_path / "plan.toml")]) == code
    assert len(list((tmp_path / "state/allocd/starts").iterdir())) == left
