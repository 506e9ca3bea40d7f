"""Adopted allocations: at most one engine each, none that nobody follows, and nothing left of one that died; whatever
write the daemon dies at. Books, starts and run directories are real, engines and Slurm are not (tests/service)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from supervisor.runs import start as starts
from supervisor.service import adopting
from supervisor.service.book import put
from supervisor.service.following import Following
from supervisor.service.holder import Holder
from supervisor.service.interface import AdoptRequest, Allocation
from supervisor.service.spawn import NotSpawned
from tests.service.dying import dies_at, one_life
from tests.service.engines import Engines, at
from tests.service.held import PLAN, Site


@pytest.fixture(autouse=True)
def _soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("core.duties", "service.life"):
        monkeypatch.setattr(f"supervisor.{module}.PAUSES", (0.01,))
    monkeypatch.setattr("supervisor.service.holder.STOP_LIMIT", 0.05)
    for name in ("ALLOCD_RUNS", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def code(allocation: Allocation) -> int:
    assert allocation.verdict is not None
    return int(allocation.verdict["code"])


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not seen():  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0.005)


async def test_an_engine_is_stopped_in_order_and_nothing_is_left_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, engines = at(tmp_path, monkeypatch)
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("one"), None)
        running = await site.until(holder, held.key, "running")
        assert (running.run_id, running.jobid) == (engines.of("one").run_dir.name, "7")
        assert [path.name for path in kept_starts(site)] == [held.key]
        assert not (kept_starts(site)[0] / starts.PLAN).exists(), "its env may hold secrets"
        await holder.stop(held.key, "stop")
        end = await site.until(holder, held.key, "ended")
        assert code(end) == 143, end.verdict
        await until(lambda: not kept_starts(site))
    kept = site.state / "allocations" / held.key
    assert sorted(path.name for path in kept.iterdir()) == ["journal.jsonl", "plan.toml"]
    (site.top / "registry/allocd/starts" / held.key).mkdir()  # by a daemon that died at the end
    (kept / "request.json").touch()
    async with site.holder():
        await until(lambda: not kept_starts(site) and not (kept / "request.json").exists())


def kept_starts(site: Site) -> list[Path]:
    return list((site.top / "registry/allocd/starts").iterdir())


async def test_a_stop_before_the_engine_is_there_lets_none_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "START_LIMIT", 0.1)
    site, engines = at(tmp_path, monkeypatch)
    engines.slow = ["late"]
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("late"), None)
        await until(lambda: engines.asked["late"])
        await holder.stop(held.key, "stop")
        assert code(await site.until(holder, held.key, "ended")) == 130
        with pytest.raises((starts.Claimed, FileNotFoundError)):
            engines.claim("late")


async def test_a_stop_while_an_engine_is_on_its_way_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "START_LIMIT", 0.1)
    site, engines = at(tmp_path, monkeypatch)
    engines.slow = ["late"]
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("late"), None)
        await until(lambda: engines.asked["late"])
        engine = engines.claim("late")
        await holder.stop(held.key, "stop")
        await until(lambda: "has not opened its run" in str(holder.find(held.key).trouble))
    async with site.holder() as holder:
        assert holder.find(held.key).state == "submitting"
        engine.open()
        assert code(await site.until(holder, held.key, "ended")) == 143
    assert not engine.lives
    assert engines.asked["late"] == 1


async def test_a_daemon_that_is_started_anew_starts_no_engine_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, engines = at(tmp_path, monkeypatch)
    monkeypatch.setattr(adopting, "spawn", lambda *_, **__: engines.asked.update(["one"]))
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("one"), None)
        await until(lambda: engines.asked["one"])
        stopping = asyncio.create_task(holder.stop(held.key, "stop"))
        await stopping
    async with site.holder() as holder:
        assert code(await site.until(holder, held.key, "ended")) == 130
    assert engines.asked["one"] == 1


async def test_an_allocation_ends_when_nothing_of_a_dead_engine_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, engines = at(tmp_path, monkeypatch)
    slurm = engines.slurm
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("two"), None)
        await site.until(holder, held.key, "running")
        slurm.silent = 10**6
        engines.of("two").die()
        await until(lambda: "did not say which steps of job 7 are left" in str(holder.find(held.key).trouble))
        assert slurm.steps
        slurm.silent = 0
        end = await site.until(holder, held.key, "ended")
        assert (code(end), end.trouble, slurm.steps) == (75, None, {})


async def test_a_stop_waits_for_no_pause_between_two_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.service.life.PAUSES", (1000.0,))
    site, _ = at(tmp_path, monkeypatch)

    def spawn(*_: object, **__: object) -> NoReturn:
        raise NotSpawned("systemd-run ended with 1")

    monkeypatch.setattr(adopting, "spawn", spawn)
    async with site.holder() as holder:
        held = await holder.adopt(AdoptRequest(PLAN, "7", str(tmp_path)), None)
        await until(lambda: "systemd-run ended with 1" in str(holder.find(held.key).trouble))
        await holder.stop(held.key, "stop")
        assert code(await site.until(holder, held.key, "ended")) == 130


async def test_the_steps_of_a_run_that_cannot_be_judged_are_ended_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def attend(*_: object) -> NoReturn:
        await until(lambda: not engines.of("two").lives)
        raise ValueError("no time")

    monkeypatch.setattr(Following, "attend", attend)
    site, engines = at(tmp_path, monkeypatch)
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("two"), None)
        await site.until(holder, held.key, "running")
        engines.of("two").die()
        end = await site.until(holder, held.key, "ended")
        assert (code(end), engines.slurm.steps) == (75, {})
        assert "no time" in str(end.verdict)


# --- dying ------------------------------------------------------------------------------------------------------------


async def live_through(engines: Engines, site: Site, holder: Holder) -> None:
    """The script: a run that is stopped, one whose engine dies, and a stop of one that has no engine yet; an engine
    that has ended before anybody looks, and one that never opens a run."""
    keys = [(await holder.adopt(engines.request(name), name)).key for name in ("quick", "broken", "one", "two", "late")]
    *_, one, two, late = keys
    await site.until(holder, one, "running", "ending", "ended")
    await holder.stop(one, "stop")
    await site.until(holder, two, "running", "ending", "ended")
    engines.of("two").die()
    await until(lambda: engines.asked["late"] or holder.find(late).state == "ended")
    await holder.stop(late, "stop")
    for key in keys:
        await site.until(holder, key, "ended")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["before", "half", "after"])
async def test_a_daemon_that_dies_at_any_write_loses_no_engine(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "START_LIMIT", 0.3)
    for number in itertools.count(1):
        (tmp_path / f"{number}").mkdir()
        site, engines = at(tmp_path / f"{number}", monkeypatch)
        engines.slow = ["late"]
        script = partial(live_through, engines)
        if await one_life(site, dies_at(number, how), script):
            break
        assert await one_life(site, put, script), f"killed at write {number}"
        await check_the_end(site, engines, number)
    assert number > 20


async def check_the_end(site: Site, engines: Engines, number: int) -> None:
    where = f"killed at write {number}"
    assert sorted(engine.name for engine in engines.all) == ["broken", "one", "quick", "two"], where
    assert not any(engine.lives for engine in engines.all), where
    assert engines.slurm.steps == {}, where
    async with site.holder() as holder:
        ends = {held.name: code(held) for held in holder.allocations()}
        assert ends == {"quick": 143, "broken": 78, "one": 143, "two": 75, "late": 130}, where
        await until(lambda: not kept_starts(site))
    assert not list(site.state.rglob("request.json")), where
