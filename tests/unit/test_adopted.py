"""The last word about an adopted run: sealed when the records of its steps are there, and not before."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from supervisor.core import events as ev
from supervisor.core.answers import Answer
from supervisor.engine import receipts
from supervisor.runs.adopted import settle
from supervisor.scheduler.client import Queue
from supervisor.scheduler.inquiry import Pace
from tests.unit.test_receipt import adopted, completed, with_steps
from tests.unit.test_run import TERM, Run

DONE = ["COMPLETED|0:0"] * 3
RUNNING = ["RUNNING|0:0"] * 3


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is asked again at once."""
    monkeypatch.setattr("supervisor.runs.adopted.USUAL", Pace(first=0.01))


class Slurm:
    """A job's state and its steps, round by round; the last round stays."""

    def __init__(self, *rounds: tuple[str, Sequence[str]]) -> None:
        self.rounds = [with_steps(state, steps).answers for state, steps in rounds]
        self.asked = 0

    async def sacct(self, jobid: str) -> Answer:
        self.asked += 1
        return self.rounds[min(self.asked, len(self.rounds)) - 1][0]

    async def show_job(self, jobid: str) -> Answer:
        return self.rounds[min(self.asked, len(self.rounds)) - 1][1]

    async def queue(self, jobids: Collection[str]) -> Queue:
        raise AssertionError("the job has no parts")

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        raise AssertionError("the job has no parts")


def left(directory: Path, run: Run) -> str:
    """The directory of a run whose engine has written its receipt."""
    run_dir = directory / "7"
    run_dir.mkdir()
    receipts.write_run_receipt(run_dir, {**adopted(run), "run_dir": str(run_dir), "started": "1970-01-01T00:16:50Z"})
    return str(run_dir)


def killed() -> Run:
    """Rank 1 is killed by a SIGTERM that nobody here sent."""
    run = Run().start()
    run.take(ev.RankEnded(1, None, TERM), after=2.0)
    run.wind_up()
    return run


async def test_rows_that_come_late_are_waited_for(tmp_path: Path) -> None:
    slurm = Slurm(("RUNNING", []), ("RUNNING", RUNNING), ("RUNNING", RUNNING), ("RUNNING", DONE))
    sealed = await settle(slurm, left(tmp_path, completed()), 20.0)
    assert (sealed.document["verdict"]["outcome"], sealed.trouble, slurm.asked) == ("success", [], 4)
    assert json.loads((tmp_path / "7/receipt.json").read_text()) == sealed.document
    again = await settle(Slurm(("CANCELLED", DONE)), str(tmp_path / "7"), 0.0)
    assert (again.before, again.document) == (True, sealed.document)


async def test_an_accounting_that_is_away_is_borne_as_long_as_it_may_be(tmp_path: Path) -> None:
    slurm = Slurm(("RUNNING", RUNNING), ("RUNNING", DONE))
    now, back, run_dir = 0.0, 600.0, left(tmp_path, completed())

    async def sacct(jobid: str) -> Answer:
        slurm.asked = 0 if now < back else 2
        answer = await Slurm.sacct(slurm, jobid)
        return answer if now >= back else replace(answer, outcome="failed", problem="Connection refused", record=None)

    async def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds + 0.001  # as any clock: what is left ends

    pauses: list[float] = []
    slurm.sacct = sacct  # type: ignore[method-assign]
    asked = partial(settle, slurm, run_dir, 20.0, clock=lambda: now, sleep=sleep)
    early = await asked(outage=500.0)
    assert early.document["verdict"]["final"] is False
    assert now == pytest.approx(500.0, abs=0.1)
    assert max(pauses) == 60.0 and len(pauses) < 30, "one in trouble is asked seldom"
    now = 0.0
    assert (await asked()).document["verdict"]["final"] is False
    assert now == pytest.approx(20.0, abs=0.1)
    now = 0.0
    assert (await asked(outage=3600.0)).document["verdict"]["outcome"] == "success"
    assert back <= now < back + 61


async def test_without_them_nothing_is_sealed(tmp_path: Path) -> None:
    sealed = await settle(Slurm(("RUNNING", RUNNING)), left(tmp_path, completed()), 0.0)
    verdict = sealed.document["verdict"]
    assert (verdict["code"], verdict["final"]) == (75, False)
    assert "accounting's row of step 7.0 is not finished" in verdict["summary"]
    assert not (tmp_path / "7/receipt.json").exists()


@pytest.mark.parametrize(("state", "code"), [("CANCELLED", 130), ("COMPLETED", 143)])
async def test_an_end_that_slurm_may_have_made_waits_for_the_job(tmp_path: Path, state: str, code: int) -> None:
    run_dir = left(tmp_path, killed())
    early = await settle(Slurm(("RUNNING", DONE)), run_dir, 0.0)
    assert (early.document["verdict"]["code"], early.document["verdict"]["final"]) == (143, False)
    assert not (tmp_path / "7/receipt.json").exists()
    late = await settle(Slurm(("RUNNING", DONE), (state, DONE)), run_dir, 20.0)
    assert (late.document["verdict"]["code"], late.document["verdict"]["final"]) == (code, True)


async def test_an_id_that_came_again_seals_nothing(tmp_path: Path) -> None:
    run_dir = left(tmp_path, completed())
    path = tmp_path / "7/receipt.run.json"
    path.write_text(path.read_text().replace("1970-01-01T00:16:50Z", "1969-01-01T00:00:00Z"))
    sealed = await settle(Slurm(("RUNNING", DONE)), run_dir, 0.0)
    assert sealed.document["verdict"]["outcome"] == "unverifiable"
    assert "as another job's by now" in sealed.document["doubts"][0]
    assert not (tmp_path / "7/receipt.json").exists()
