"""What people type about runs in somebody else's job: the names that lists and advice give mean these runs, and the
job's id means one only where there is but one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.runs import registry
from tests.service.desk import Desk
from tests.unit.test_follow import append, end_run, line, opening

VERDICT = {"outcome": "unverifiable", "code": 75, "origin": "allocd", "reason": "unverifiable", "summary": "it is gone"}


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Desk:
    """Nobody answers here."""
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("ALLOCD_RUNS", "ALLOCD_RUN_DIR", "SLURM_JOB_ID", "STATE_DIRECTORY", "ALLOCD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capfd)


@pytest.fixture
def desk(nobody: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with nobody.open() as desk:
        monkeypatch.setenv("ALLOCD_SOCKET", desk.path)
        yield desk


def guest(home: Path, run_id: str) -> Path:
    """A run in job 2, which goes on."""
    run_dir = home / run_id
    (run_dir / "logs").mkdir(parents=True)
    append(run_dir / "journal.jsonl", line(1, replace(opening(run_id, "2", str(run_dir)), adopted=True)))
    registry.register(run_id, str(run_dir))
    return run_dir


def test_a_run_is_listed_and_stopped_by_a_name_of_its_own(desk: Desk) -> None:
    desk.do(desk.world.put, "adopted", jobid="2", run_id="2.s5", run_dir="/gone/2.s5")
    assert desk.say("list", "-q").out == "2.s5\n"
    said = desk.say("stop", "2.s5")
    assert said.code == 0 and "`allocctl wait 2.s5` tells its end" in said.err


def test_one_whose_directory_is_gone_is_waited_for_in_vain(desk: Desk, tmp_path: Path) -> None:
    gone = f"{tmp_path}/2.s5"
    desk.do(desk.world.put, "adopted", jobid="2", run_id="2.s5", run_dir=gone)
    said = desk.say("wait", "2.s5")
    assert said.code == 75 and f"{gone} is not there" in said.err.splitlines()[-1], said
    desk.do(desk.world.change, "a1", state="ended", verdict=VERDICT)
    said = desk.say("wait", "2.s5")
    assert said.code == 75 and "it is gone" in said.err.splitlines()[-1], said


def test_without_a_daemon_a_job_of_several_runs_is_no_name_either(nobody: Desk, tmp_path: Path) -> None:
    runs = [guest(tmp_path / "A", f"2.s{number}") for number in (1, 2, 3)]
    said = nobody.say("stop", "2")
    assert said.code == 78 and f"several runs of yours: name one: {runs[0]} or {runs[1]} or {runs[2]}" in said.err, said
    assert nobody.say("list", "-q").out == "2.s1\n2.s2\n2.s3\n"
    for run in runs[:2]:
        end_run(run)
    assert "2.s3" in nobody.say("stop", "2").err
