"""Adopted runs whose papers cannot be seen: away, gone, or those of a run that somebody has moved. Their job never
judges them. And names that mean several of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor.runs import start as starts
from supervisor.service import adopting
from supervisor.service.interface import Refusal
from supervisor.service.settings import Settings
from tests.scripted_slurm import Moment
from tests.service.engines import JOB, Engines, at
from tests.service.held import Site
from tests.service.test_adoptions import code, until


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Site, Engines]:
    monkeypatch.setattr("supervisor.runs.sight.AGAIN", 0.01)
    monkeypatch.setattr("supervisor.runs.sight.REST", 0.01)
    for name in ("ALLOCD_RUNS", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return at(tmp_path, monkeypatch)


async def test_a_run_whose_directory_is_gone_is_not_judged_by_its_job(scene: tuple[Site, Engines]) -> None:
    site, engines = scene
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("one"), None)
        await site.until(holder, held.key, "running")
        engine = engines.of("one")
        engine.run_dir.rename(site.top / "elsewhere")
        await until(lambda: "its engine, process" in str(holder.find(held.key).trouble))
        assert "is not there" in str(holder.find(held.key).trouble)
        engine.die()
        engines.slurm.jobs[JOB] = [Moment(0.0, "COMPLETED")]
        end = await site.until(holder, held.key, "ended")
        assert code(end) == 75 and f"{engine.run_dir} is not there" in str(end.verdict), end.verdict


@pytest.mark.parametrize("gone", ["the directory", "the journal"])
async def test_nor_after_a_restart_of_the_daemon(gone: str, scene: tuple[Site, Engines]) -> None:
    site, engines = scene
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("one"), None)
        await site.until(holder, held.key, "running")
    run_dir = engines.of("one").run_dir
    if gone == "the directory":
        run_dir.rename(site.top / "elsewhere")
    else:
        (run_dir / "journal.jsonl").write_text("junk\n")
    engines.of("one").die()
    engines.slurm.jobs[JOB] = [Moment(0.0, "COMPLETED")]
    async with site.holder() as holder:
        assert code(await site.until(holder, held.key, "ended")) == 75


async def test_a_file_system_that_is_away_is_waited_for(scene: tuple[Site, Engines]) -> None:
    site, engines = scene
    site.settings = Settings(patience=0.0, outage=1000.0)
    async with site.holder() as holder:
        held = await holder.adopt(engines.request("one"), None)
        await site.until(holder, held.key, "running")
    engine = engines.of("one")
    engine.stop()
    engines.base.rename(site.top / "away")
    async with site.holder() as holder:
        await until(lambda: "it is waited for, 1000 s at most" in str(holder.find(held.key).trouble))
        (site.top / "away").rename(engines.base)
        assert code(await site.until(holder, held.key, "ended")) == 143


async def test_an_engine_is_stopped_by_its_claim_where_its_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr("signal.pidfd_send_signal", lambda _, number: sent.append(number))
    gone, place = str(tmp_path / "7.s1"), tmp_path / "start"
    with pytest.raises(Refusal, match=r"nothing tells which process it is: .*7\.s1"):
        adopting.stop(gone, str(place))
    place.mkdir()
    assert adopting.alive(gone, str(place)) is False and not adopting.stop(gone, str(place))
    descriptor = starts.claim(str(place))
    try:
        assert adopting.alive(gone, str(place)) and adopting.stop(gone, str(place))
    finally:
        os.close(descriptor)
    assert not adopting.stop(gone, str(place))
    assert sent == [15]


@pytest.mark.parametrize("host", ["elsewhere", ""])
async def test_a_claim_that_another_host_shares_names_no_process_here(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock shows on both where $HOME is shared; its number is that of another process here."""
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: pytest.fail("a stranger was signalled"))
    descriptor = starts.claim(str(tmp_path))
    (tmp_path / starts.CLAIM).write_text(f"{os.getpid()} {host}\n")
    try:
        assert adopting.alive("/gone/7.s1", str(tmp_path)) is None
        with pytest.raises(Refusal, match=f"its engine is on {host or 'another host'}: stop it there"):
            adopting.stop("/gone/7.s1", str(tmp_path))
    finally:
        os.close(descriptor)


async def test_the_job_of_several_runs_is_no_name_to_stop_one_by(scene: tuple[Site, Engines]) -> None:
    site, engines = scene
    async with site.holder() as holder:
        keys = [(await holder.adopt(engines.request(name), name)).key for name in ("one", "two", "quick")]
        for key in keys[:2]:
            await site.until(holder, key, "running")
        await site.until(holder, keys[2], "ended")
        with pytest.raises(Refusal, match=rf"several runs of yours.*{keys[0]} \(run 7.*{keys[1]} \(run 7") as refused:
            await holder.stop(JOB, "stop")
        assert keys[2] not in refused.value.text, "it has ended"
        await holder.stop(keys[1], "stop")
        await site.until(holder, keys[1], "ended")
        assert (await holder.stop(JOB, "stop")).key == keys[0]
        await site.until(holder, keys[0], "ended")
