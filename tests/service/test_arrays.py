"""Arrays that the service holds: what is asked of the whole reaches every task, what is asked of one task that task
alone. Books are real, Slurm is written down (tests/service/held.py)."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.core import events as run_events
from supervisor.core import kept_events as ev
from supervisor.core.kept import Kept
from supervisor.runs.sealing import Sealed
from supervisor.service.api import Api
from supervisor.service.book import put
from supervisor.service.following import undecided
from supervisor.service.found import JOURNAL
from supervisor.service.holder import Holder
from supervisor.service.interface import Allocation, Refusal, State
from supervisor.service.life import utc_now
from supervisor.service.logs import Wanted, log_lines
from supervisor.service.metrics import Metrics
from tests.service.dying import dies_at, one_life
from tests.service.held import PLAN, Site, site_in
from tests.unit.test_follow import append, end_run, make_run

ARRAY = PLAN + 'array = "0-2"\n'
RUNNING = (0.0, "RUNNING", "0:0")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr("supervisor.core.duties.PAUSES", (0.01,))
    site = site_in(tmp_path, monkeypatch)
    site.slurm.history, site.slurm.tasks = [RUNNING], 3
    return site


async def until(seen: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(10):
        while not seen():  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0.005)
    assert seen(), what


async def submitted(site: Site, holder: Holder, tasks: int = 3) -> Allocation:
    """An array of which so many tasks have begun."""
    held = await holder.submit(site.request(ARRAY), None)
    await until(lambda: len(state(holder, held).units) == 3, "Slurm shows the tasks")
    for task in range(tasks):
        began(site, f"101_{task}")
    await until(lambda: len(state(holder, held).runs) == tasks, "the runs are seen")
    return held


def began(site: Site, run_id: str) -> Path:
    run = make_run(site.top / "base", run_id, run_events.StepSpawned(1, 5, "s"))
    text = (run / JOURNAL).read_text()
    (run / JOURNAL).write_text(text.replace("1970-01-01T00:16:41Z", utc_now()).replace("/run", str(run)))
    return run


def state(holder: Holder, held: Allocation) -> Kept:
    return holder._lives[held.key].state


async def settled(holder: Holder, held: Allocation) -> None:
    """Nothing is left to be told or cancelled."""
    await until(lambda: not state(holder, held).to_stop and not state(holder, held).to_cancel, "it is taken")


async def test_a_stop_of_an_array_ends_every_task_in_order_and_each_once(site: Site) -> None:
    async with site.holder() as holder:
        held = await submitted(site, holder)
        end_run(site.top / "base" / "101_2")  # the one that was seen last
        await until(lambda: state(holder, held).runs["101_2"].over, "its end is seen")
        site.slurm.refuses_signal = {"101_0": "scancel did not answer within 5 s"}
        await holder.stop("101", "stop")
        await until(lambda: site.slurm.terminated.count("101_0") > 2, "one that was not told is told again")
        assert site.slurm.terminated.count("101_1") == 1, "a second signal would end it without any grace"
        assert holder.find("101").trouble == "scancel did not answer within 5 s"
        site.slurm.refuses_signal = {}
        await settled(holder, held)
    assert set(site.slurm.terminated) == {"101_0", "101_1"}
    count = len(site.slurm.terminated)
    async with site.holder() as holder:
        began(site, "101_1.r1")  # requeued
        await until(lambda: "101_1.r1" in state(holder, held).runs, "the next attempt is seen")
        await settled(holder, held)
    assert site.slurm.terminated[count:] == ["101_1"]
    assert not site.slurm.cancelled


async def test_a_task_that_begins_after_the_stop_is_stopped_as_well(site: Site) -> None:
    async with site.holder() as holder:
        held = await submitted(site, holder, 1)
        await holder.stop(held.key, "stop")
        await settled(holder, held)
        began(site, "101_2")
        await until(lambda: site.slurm.terminated == ["101_0", "101_2"], "the second one is told")


async def test_a_run_that_ends_at_once_keeps_no_later_one_from_being_stopped(site: Site) -> None:
    async with site.holder() as holder:
        held = await submitted(site, holder, 0)
        await holder.stop(held.key, "stop")
        life = holder._lives[held.key]
        life.hear(ev.RunSeen("101_0", "/gone"))
        life.hear(ev.RunOver("101_0"))
        await until(lambda: "stop" not in life._slots, "nobody is told")
        life.hear(ev.RunSeen("101_1", "/gone"))
        await until(lambda: site.slurm.terminated == ["101_1"], "the next one is told")


async def test_one_task_is_stopped_or_cancelled_by_its_name(site: Site) -> None:
    async with site.holder() as holder:
        held = await submitted(site, holder)
        task = await holder.stop("101_0", "stop")
        assert (task.key, task.run_id, task.stopping) == (held.key, "101_0", "stop")
        assert (holder.find("101_1").stopping, holder.find("101").stopping) == (None, None)
        await settled(holder, held)
        assert site.slurm.terminated == ["101_0"]
        await holder.stop("101_1", "cancel")
        await settled(holder, held)
        assert site.slurm.cancelled == ["101_1"]
        assert site.slurm.state("101_2", site.slurm.now).state == "RUNNING"  # type: ignore[union-attr]
        await holder.stop("101_0", "stop")
        await until(lambda: holder.find("101_1").state == "ending", "its end is seen")
        assert (holder.find("101_1").slurm, holder.find("101").state) == ("CANCELLED", "running")
        await holder.stop("101_1", "cancel")
        with pytest.raises(Refusal) as unknown:
            await holder.stop("101_7", "cancel")
        assert unknown.value.status == 404
        assert (site.slurm.terminated, site.slurm.cancelled) == (["101_0"], ["101_1"])
        await holder.stop(held.key, "cancel")
        assert (await site.until(holder, held.key, "ended")).verdict
    assert site.slurm.cancelled == ["101_1", "101"]


async def test_a_component_of_a_job_is_not_ended_by_itself(site: Site) -> None:
    site.slurm.tasks = 0
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await until(lambda: state(holder, held).units, "Slurm shows it")
        holder._lives[held.key].hear(ev.StateSeen("101+1", "RUNNING"))
        for how in ("stop", "cancel"):
            with pytest.raises(Refusal, match=r"101\+1 is a component of job 101") as refused:
                await holder.stop("101+1", how)
            assert refused.value.status == 409
    assert not site.slurm.cancelled


def count(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is judged from now on."""
    found: list[object] = []

    def judge(sealed: Sealed) -> str | None:
        found.append(sealed)
        return undecided(sealed)

    monkeypatch.setattr("supervisor.service.following.undecided", judge)
    return found


async def test_an_array_is_judged_when_the_last_of_its_engines_is_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.service.following.AGAIN", 0.05)
    async with site.holder() as holder:
        held = await submitted(site, holder, 1)
        run = site.top / "base" / "101_0"
        alive = [True]
        monkeypatch.setattr("supervisor.runs.saved.engine_lives", lambda *_: alive[0])
        for task in range(3):
            site.slurm.becomes(f"101_{task}", "COMPLETED")
        await until(lambda: "still lives" in str(holder.find("101").trouble), "that it still lives is told")
        judged = count(monkeypatch)
        await until(lambda: len(judged) >= 3, "it is judged again")
        assert holder.find("101").verdict is None
        assert sum("JobEnded" in line for line in site.seen) == 3, "nothing is told twice"
        alive[0] = False
        assert (await site.until(holder, held.key, "ended")).verdict
        assert (run / "receipt.json").exists()


async def test_the_logs_of_an_array_are_those_of_all_tasks_while_they_grow(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, run_id) for run_id in ("101_0", "101_1", "101_0.r1")]
    logs = [run / "logs" / "rank-1.client.out" for run in runs]
    for number, log in enumerate(logs):
        log.write_text(f"first of {number}\n")
    now = Allocation("a1", "submitted", "running", "x", "", "", jobid="101", run_dirs=(str(runs[0]),))

    def look(state: State, *current: int) -> None:
        nonlocal now
        now = replace(now, state=state, run_dirs=tuple(str(runs[number]) for number in current))

    lines = log_lines(lambda: now, Wanted(follow=True), asyncio.Event())
    assert await anext(lines) == b"101_0/rank-1.client.out: first of 0\n"
    look("running", 0, 1)
    assert await anext(lines) == b"101_1/rank-1.client.out: first of 1\n"
    append(logs[0], b"more\n")
    assert await anext(lines) == b"101_0/rank-1.client.out: more\n"
    append(logs[0], b"the end")
    look("running", 2, 1)  # task 0 was requeued
    assert await anext(lines) == b"101_0/rank-1.client.out: the end\n"
    assert await anext(lines) == b"101_0.r1/rank-1.client.out: first of 2\n"
    append(logs[1], b"last words")
    look("ended", 2, 1)
    assert [line async for line in lines] == [b"101_1/rank-1.client.out: last words\n"]


async def test_no_tasks_receipt_is_that_of_the_whole_array(site: Site) -> None:
    async with site.holder() as holder:
        held = await submitted(site, holder, 2)
        end_run(site.top / "base" / "101_1")
        api = Api(holder, Metrics(), pytest.fail)
        shown = [await _get(api, f"/v1/allocations/{name}/receipt") for name in (held.key, "101_0", "101_1")]
        assert [status for status, _ in shown] == [404, 404, 200]
        assert json.loads(shown[2][1])["run_id"] == "101_1"


async def _get(api: Api, path: str) -> tuple[int, bytes]:
    """The status and the body."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "client": ("", 0)}
    await api(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


# --- dying ------------------------------------------------------------------------------------------------------------


async def live_through(site: Site, holder: Holder) -> None:
    """The script: of an array one task is stopped, one is cancelled, then the whole is stopped. A task whose engine is
    told ends."""
    held = await holder.submit(site.request(ARRAY), "one")
    await until(lambda: holder.find(held.key).state == "ended" or len(state(holder, held).runs) == 3, "all is seen")
    await holder.stop("101_0", "stop")
    await holder.stop("101_1", "cancel")
    for task in ("101_0", "101_2"):
        await until(lambda: task in site.slurm.terminated, "the engine is told")  # noqa: B023
        if site.slurm.state(task, site.slurm.now).state == "RUNNING":  # type: ignore[union-attr]
            site.slurm.becomes(task, "FAILED", "15:0")
        if task == "101_0":
            await holder.stop("101", "stop")
    await site.until(holder, held.key, "ended")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["before", "half", "after"])
async def test_a_daemon_that_dies_at_any_write_tells_every_task(
    site: Site, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in itertools.count(1):
        (tmp_path / f"{number}").mkdir()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"{number}" / "registry"))
        site = Site(tmp_path / f"{number}", settings=replace(site.settings, patience=0.0))
        site.slurm.history, site.slurm.tasks = [RUNNING], 3
        for task in range(3):
            began(site, f"101_{task}")
        if await one_life(site, dies_at(number, how), live_through):
            break
        assert await one_life(site, put, live_through), f"killed at write {number}"
        where = f"killed at write {number}: {site.slurm.terminated} {site.slurm.cancelled}"
        assert set(site.slurm.terminated) == {"101_0", "101_2"} and len(site.slurm.terminated) <= 3, where
        assert set(site.slurm.cancelled) == {"101_1"}, where
        assert site.slurm.submitted == 1, where
        (book,) = (site.state / "allocations").glob(f"*/{JOURNAL}")
        assert book.read_text().count('"Sealed"') == 1, where
    assert number > 10
