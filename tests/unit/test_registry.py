"""Ids of runs: no two further runs have the same, and one that several have means none of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor.cli import list as listing
from supervisor.cli.main import main
from supervisor.core.plan import Plan
from supervisor.engine.prepare import Unfit, prepare
from supervisor.runs import registry
from supervisor.runs.sealing import is_adopted_run
from supervisor.runs.target import adopted_target, run_target
from tests.unit.test_prepare import plan_of


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ALLOCD_RUNS", raising=False)
    monkeypatch.delenv("ALLOCD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def begin(base: Path, plan: Plan | None = None, *, further: bool = True, attempt: str = "7") -> str:
    """A run in this directory; its id."""
    made = prepare(
        plan or plan_of(),
        "",
        str(base),
        attempt,
        "7",
        ("n1", "n2"),
        further=further,
        ids=registry,
    )
    for descriptor in made.held:
        os.close(descriptor)
    registry.register(made.layout.run_id, made.layout.run_dir)
    return made.layout.run_id


def test_further_runs_of_a_job_have_an_id_each_wherever_they_are(tmp_path: Path) -> None:
    bases = [tmp_path / name for name in ("A", "B", "A", "B")]
    assert [begin(base) for base in bases] == ["7.s1", "7.s2", "7.s3", "7.s4"]
    assert sorted(os.listdir(tmp_path / "A")) == ["7.s1", "7.s3"]
    assert begin(tmp_path / "C", further=False) == "7", "the job's own is called as the job"
    assert begin(tmp_path / "C", further=False) == "7.s5"


def test_a_run_that_came_to_nothing_gives_its_id_back(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    artifacts = [{"name": "x", "path": "old", "root": str(tmp_path)}]
    with pytest.raises(Unfit):
        begin(tmp_path / "A", plan_of(artifacts=artifacts))
    assert begin(tmp_path / "B") == "7.s1"


def test_a_home_that_cannot_be_written_refuses_no_run(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    assert [begin(tmp_path / "A"), begin(tmp_path / "B")] == ["7.s1", "7.s1"]


@pytest.mark.parametrize("words", [["stop"], ["wait"], ["verify", "--run"], ["status"], ["receipt"], ["logs"]])
def test_an_id_that_two_runs_have_means_neither(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for base in ("A", "B"):
        (tmp_path / base / "7.s4").mkdir(parents=True)
        (tmp_path / base / "7.s4/journal.jsonl").touch()
        registry.register("7.s4", str(tmp_path / base / "7.s4"))
    assert main([*words, "7.s4"]) == 78
    said = capsys.readouterr().err
    assert f"{tmp_path}/A/7.s4 or {tmp_path}/B/7.s4" in said


def test_whose_a_run_is_without_papers(tmp_path: Path) -> None:
    adopted = {name: is_adopted_run(str(tmp_path / name)) for name in ("7", "7.r1", "7.s1", "7.r2.s1", "7.s2")}
    assert adopted == {"7": False, "7.r1": False, "7.s1": True, "7.r2.s1": True, "7.s2": None}
    assert not run_target(str(tmp_path / "7")).alone
    for name in ("7.s1", "7.s2"):
        assert run_target(str(tmp_path / name)).adopted
        assert adopted_target(str(tmp_path / name), "7", "").adopted


@pytest.mark.parametrize(
    ("kind", "run_id", "name"),
    [
        ("adopted", "7.s2", "7.s2"),
        ("adopted", None, "a1"),
        ("submitted", "7.s2", "7"),
        ("followed", None, "7"),
        ("run", "7.s1", "7.s1"),
        ("run", "7.r1", "7"),
    ],
)
def test_a_list_names_what_can_be_stopped_by_that_name(kind: str, run_id: str | None, name: str) -> None:
    assert listing.name_of({"kind": kind, "run_id": run_id, "jobid": "7", "key": "a1"}) == name
