"""The heart of the service: what is accepted, what becomes of it, and what is told. Books are real, Slurm is written
down (tests/service/held.py)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from supervisor.service.book import JOURNAL
from tests.service.held import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "registry"))
    for name in ("ALLOCD_RUNS", "GITHUB_WORKSPACE", "GITHUB_ACTIONS", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return Site(tmp_path)


async def told(holder: Holder, last: str = "ended") -> list[Event]:
    """What was told, to the first event of the kind."""
    found: list[Event] = []
    events = holder.events(None)
    async with asyncio.timeout(20):
        while not found or found[-1].kind != last:
            found.append(await anext(events))
    await events.aclose()
    return found


async def test_a_plan_becomes_a_job_and_its_end_is_proven(site: Site) -> None:
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        assert held.name == "bench"
        assert (site.state / "allocations" / held.key / JOURNAL).exists()
        end = await site.until(holder, held.key, "ended")
        assert end.verdict is not None
        assert (end.jobid, end.verdict["code"], end.verdict["origin"]) == ("101", 7, "slurm")
        assert end.receipt is not None and json.loads(Path(end.receipt).read_text())["jobid"] == "101"
        assert holder.find("101").key == held.key
        kinds = [event.kind for event in await told(holder)]
        assert (kinds[0], kinds[-1]) == ("accepted", "ended")
        assert "submitted" in kinds
    assert not list(site.state.rglob("request.json")), "what it was asked with is not kept"
