"""The heart of the service: what is accepted, what becomes of it, what is told; and that a daemon may die at any
moment. Books are real, Slurm is written down (tests/service/held.py)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from supervisor.core import events as run_events
from supervisor.core import kept_events as ev
from supervisor.core.submission import RECORD, Order
from supervisor.loop.threads import in_thread
from supervisor.runs.ordering import Terms
from supervisor.runs.papers import Unreadable
from supervisor.runs.plans import plan_of
from supervisor.scheduler.client import Printed, Queue
from supervisor.scheduler.submit import Stop, Submitted
from supervisor.service.book import REQUEST, put
from supervisor.service.following import Following
from supervisor.service.found import JOURNAL
from supervisor.service.holder import STOP_LIMIT, Holder
from supervisor.service.interface import AdoptRequest, Allocation, Event, Refusal, SubmitRequest
from supervisor.service.life import Life, utc_now
from supervisor.service.settings import Settings
from supervisor.service.starting import Starting
from supervisor.service.wishes import submission
from supervisor.service.world import Engines, NotStarted, World
from tests.fake_slurm import FakeSlurm
from tests.service.dying import Killed, dies_at, one_life
from tests.service.held import PLAN, Scene, Site, site_in
from tests.unit.test_follow import append, end_run, line, make_run

RUNNING = (0.0, "RUNNING", "0:0")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return site_in(tmp_path, monkeypatch)


async def told(holder: Holder, last: str = "ended", after: int | None = None) -> list[Event]:
    """What was told, to the first event of the kind."""
    found: list[Event] = []
    events = holder.events(after)
    async with asyncio.timeout(20):
        while not found or found[-1].kind != last:
            found.append(await anext(events))
    await events.aclose()
    return found


def code(allocation: Allocation) -> int:
    assert allocation.verdict is not None
    return int(allocation.verdict["code"])


# --- from the plan to the proven end ----------------------------------------------------------------------------------


async def test_a_plan_becomes_a_job_and_its_end_is_proven(site: Site) -> None:
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        assert held.name == "bench"
        assert (site.state / "allocations" / held.key / JOURNAL).exists()
        end = await site.until(holder, held.key, "ended")
        assert end.verdict is not None
        assert (end.jobid, code(end), end.verdict["origin"]) == ("101", 7, "slurm")
        assert end.receipt == str(site.submissions[0] / "receipt-101.json")
        assert holder.find("101").key == held.key
        kinds = [event.kind for event in await told(holder)]
        assert (kinds[0], kinds[-1]) == ("accepted", "ended")
        assert "submitted" in kinds
    assert not list(site.state.rglob("request.json")), "what it was asked with is not kept"
    assert b"sesame" not in b"".join(path.read_bytes() for path in site.state.rglob("*") if path.is_file())


async def test_a_jobs_id_is_the_jobs_own_and_not_that_of_an_adoption_in_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> NoReturn:
        raise NotStarted(78, "the plan wants more nodes")

    monkeypatch.setattr(Engines, "start", refused)
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        mine = await holder.submit(site.request(), None)
        await site.until(holder, mine.key, "pending", "running")
        guest = await holder.adopt(AdoptRequest(PLAN, "101", str(site.top), environ={}), None)
        await site.until(holder, guest.key, "ended")
        assert holder.find("101").key == mine.key
        assert (await holder.stop("101", "cancel")).key == mine.key
        assert code(await site.until(holder, mine.key, "ended")) == 130


async def test_a_plan_whose_working_directory_is_gone_when_it_is_its_turn_is_refused(site: Site) -> None:
    place = site.top / "place"
    place.mkdir()
    site.settings = Settings(patience=0.0, limit=1)
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        await site.until(holder, (await holder.submit(site.request(), None)).key, "running", "pending")
        waits = await holder.submit(replace(site.request(), cwd=str(place)), None)
        place.rmdir()
        await holder.stop("101", "cancel")
        end = await site.until(holder, waits.key, "ended")
    assert end.verdict is not None
    assert (end.verdict["code"], end.verdict["reason"], site.slurm.submitted) == (78, "refused", 1)
    assert f"{place}, where it was submitted, is gone" in end.verdict["summary"]


async def test_another_jobs_end_is_never_that_of_what_was_submitted(site: Site) -> None:
    site.slurm.history = [(0.0, "FAILED", "7:0")]
    site.slurm.shown = "/runs/submit-another/job.sh"
    async with site.holder() as holder:
        end = await site.until(holder, (await holder.submit(site.request(), None)).key, "ended")
    assert end.verdict is not None
    assert code(end) == 75
    assert "it runs /runs/submit-another/job.sh" in end.verdict["summary"]


async def test_every_mistake_of_a_plan_is_told_apart(site: Site) -> None:
    async with site.holder() as holder:
        with pytest.raises(Refusal) as refused:
            await holder.submit(site.request('[job]\nname = "x"\n'), None)
    errors = refused.value.more["errors"]
    assert len(errors) > 1
    assert all(error.keys() == {"at", "found", "expected"} for error in errors)


async def test_a_run_is_told_and_judged(site: Site) -> None:
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        run = make_run(site.top / "base", "101", run_events.StepSpawned(1, 5, "s"))
        journal = (run / JOURNAL).read_text()
        (run / JOURNAL).write_text(journal.replace("1970-01-01T00:16:41Z", utc_now()).replace("/run", str(run)))
        seen = await site.until(holder, held.key, "running")
        assert (seen.run_id, seen.ranks[1]["phase"]) == ("101", "spawned")
        append(run / JOURNAL, line(3, run_events.StepEnded(1, 3, "srun: refused")))
        site.slurm.becomes("101", "FAILED", "3:0")
        end = await site.until(holder, held.key, "ended")
        assert (end.receipt, code(end)) == (str(run / "receipt.json"), 3)
        assert end.first_failure
        records = [event.data["text"] for event in await told(holder) if event.kind == "record"]
        assert any("run 101 opened" in text for text in records)


async def test_what_a_run_writes_is_told_soon_however_rarely_runs_are_looked_at_closely(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.runs.rounds.CLOSELY", (1000.0, 0.0))
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        run = make_run(site.top / "base", "101")
        await site.until(holder, held.key, "running")
        for seq in (2, 3):
            append(run / JOURNAL, line(seq, run_events.TimeLimitKnown(9.0, "later")))
            async with asyncio.timeout(10):
                while holder._lives[held.key].state.runs["101"].told < seq:  # noqa: ASYNC110 - a record of no words
                    await asyncio.sleep(0.005)
        end_run(run)
        assert (await told(holder, "run"))[-1].kind == "run"


async def test_a_run_that_has_lost_its_opening_is_judged_all_the_same(site: Site) -> None:
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        run = make_run(site.top / "base", "101", run_events.Noted("the second line"))
        end_run(run)
        (run / JOURNAL).write_bytes((run / JOURNAL).read_bytes().partition(b"\n")[2])
        assert (await told(holder, "run"))[-1].data["run_id"] == "101"
        site.slurm.becomes("101", "FAILED", "3:0")
        end = await site.until(holder, held.key, "ended")
        assert (code(end), end.run_dir) == (3, str(run))


async def test_one_slow_file_or_lost_book_ends_nothing_else(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(self: Following) -> NoReturn:
        shutil.rmtree(site.state / "allocations" / self._life.key, ignore_errors=True)
        raise Unreadable("nobody can read it")

    hangs = threading.Event()
    monkeypatch.setattr("supervisor.service.life.PAUSES", (0.01,))
    monkeypatch.setattr("supervisor.service.life.FILES", 0.2)
    async with site.holder() as holder:
        with monkeypatch.context() as patch:
            patch.setattr(Following, "follow", follow)
            patch.setattr(Life, "_copy", lambda _: asyncio.Event().wait())
            lost = await holder.submit(site.request(), None)
            async with asyncio.timeout(10):
                while holder._lives[lost.key].state.verdict is None:  # noqa: ASYNC110 - told by nobody
                    await asyncio.sleep(0.005)
        with monkeypatch.context() as patch:
            patch.setattr(Starting, "forget_request", lambda _: hangs.wait(20))
            patch.setattr(Life, "_register", lambda _: None)
            slow = await holder.submit(site.request(), None)
            await site.until(holder, slow.key, "ended")
            async with asyncio.timeout(10):
                while slow.key in holder._tasks:  # noqa: ASYNC110 - until nobody waits for the file any more
                    await asyncio.sleep(0.005)
        assert code(await site.until(holder, (await holder.submit(site.request(), None)).key, "ended")) == 7
        hangs.set()


async def test_the_same_request_is_accepted_once(site: Site) -> None:
    async with site.holder() as holder:
        first, again = await asyncio.gather(*(holder.submit(site.request(), "mine") for _ in range(2)))
        assert first.key == again.key
        with pytest.raises(Refusal) as refused:
            await holder.submit(site.request(PLAN.replace("bench", "other")), "mine")
        assert refused.value.status == 409
        await site.until(holder, first.key, "ended")
    async with site.holder() as holder:
        assert (await holder.submit(site.request(), "mine")).key == first.key
    assert site.slurm.submitted == 1


async def test_what_cannot_be_is_refused_at_once(site: Site) -> None:
    async with site.holder() as holder:
        with pytest.raises(Refusal) as invalid:
            await holder.submit(site.request("[job]\nnodes = 0"), None)
        assert (invalid.value.status, invalid.value.kind) == (422, "invalid")
        with pytest.raises(Refusal) as unfit:
            await holder.submit(site.request(options=("--wrap=x",)), None)
        assert (unfit.value.status, unfit.value.kind) == (422, "unfit")
        with pytest.raises(Refusal) as unknown:
            holder.find("a0")
        assert unknown.value.status == 404
        assert not holder.allocations()


async def test_another_slurm_than_allocds_is_refused(site: Site) -> None:
    """Its job would be asked about, and cancelled, where its id is another job's."""
    plain = site.request()
    elsewhere = {**(plain.environ or {}), "SLURM_CONF": "/elsewhere/slurm.conf"}
    async with site.holder() as holder:
        for asking in (
            holder.submit(replace(plain, environ=elsewhere), None),
            holder.adopt(AdoptRequest(PLAN, "7", "/", environ=elsewhere), None),
        ):
            with pytest.raises(
                Refusal, match=r"SLURM_CONF is /elsewhere/slurm\.conf where this was asked for"
            ) as unfit:
                await asking
            assert (unfit.value.status, unfit.value.kind) == (422, "unfit")
        assert not holder.allocations()


async def test_a_refusal_by_slurm_is_an_end(site: Site) -> None:
    async def sbatch(_: str) -> Printed:
        return Printed(1, "", "sbatch: error: invalid partition specified: nowhere")

    site.slurm.sbatch = sbatch
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        end = await site.until(holder, held.key, "ended")
        assert (code(end), end.jobid) == (78, None)
        assert "nowhere" in str(end.verdict)


async def test_a_controller_that_is_away_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.core.duties.PAUSES", (0.01,))
    answers = iter(
        ["sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"] * 2
    )

    async def sbatch(script: str) -> Printed:
        said = next(answers, "")
        return Printed(1, "", said) if said else Printed(0, site.slurm.make(script))

    site.slurm.sbatch = sbatch
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        assert code(await site.until(holder, held.key, "ended")) == 7
        assert "connect failure" in str([event.data for event in await told(holder)])
    assert site.slurm.submitted == 1


@pytest.mark.parametrize("step", [1, -1])
async def test_what_ended_long_ago_is_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Long ago by the numbers of what was told: a clock may be set back."""
    clock = itertools.count(5000, step)
    monkeypatch.setattr("supervisor.service.life.utc_now", lambda: f"2026-01-02T03:04:05.{next(clock)}Z")
    monkeypatch.setattr("supervisor.service.holder.FORGET_PERIOD", 0.01)
    site.settings = replace(site.settings, keep=1)
    async with site.holder() as holder:
        keys = []
        for _ in range(3):
            keys.append((await holder.submit(site.request(), None)).key)
            await site.until(holder, keys[-1], "ended")
        async with asyncio.timeout(10):
            while len(holder.allocations()) > 1:  # noqa: ASYNC110 - nothing is told of what is forgotten
                await asyncio.sleep(0.005)
        last = (await told(holder))[-1].seq
    assert [path.name for path in (site.state / "allocations").iterdir()] == [keys[-1]]
    async with site.holder() as holder:
        await holder.submit(site.request(), None)
        assert (await told(holder, "accepted", last))[0].seq > last


async def test_a_file_system_that_is_away_lets_nothing_be_submitted_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("core.duties", "service.life"):
        monkeypatch.setattr(f"supervisor.{module}.PAUSES", (0.01,))

    async def sbatch(script: str) -> Printed:
        site.slurm.make(script)
        (site.top / "base").rename(site.top / "away")
        raise RuntimeError("the daemon dies here")

    site.slurm.sbatch = sbatch
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        async with asyncio.timeout(10):
            while "is its file system away" not in str(holder.find(held.key).trouble):  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.005)
        (site.top / "away").rename(site.top / "base")
        assert code(await site.until(holder, held.key, "ended")) == 7
    assert site.slurm.submitted == 1


async def test_a_place_that_cannot_be_made_is_an_end(site: Site) -> None:
    (site.top / "base").touch()
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        end = await site.until(holder, held.key, "ended")
        assert code(end) == 78
        assert "cannot be made" in str(end.verdict)


# --- admission --------------------------------------------------------------------------------------------------------


async def test_first_come_first_served(site: Site) -> None:
    site.settings = replace(site.settings, limit=1)
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        keys = [(await holder.submit(site.request(), str(number))).key for number in range(4)]
        await site.until(holder, keys[0], "pending")
        assert [holder.find(key).position for key in keys] == [None, 1, 2, 3]
        await holder.stop(keys[1], "cancel")
        assert (holder.find(keys[1]).state, code(holder.find(keys[1]))) == ("ended", 130)
        assert [holder.find(key).position for key in keys] == [None, None, 1, 2]
        site.slurm.jobs["999"] = []
        followed = await holder.follow("999", None)
        assert followed.state == "pending", "to be looked at takes no room"
        await holder.stop(keys[0], "cancel")
        await site.until(holder, keys[2], "pending")
        assert holder.find(keys[3]).position == 1
    assert site.slurm.cancelled == ["101"]


async def test_a_greater_limit_lets_more_in(site: Site) -> None:
    site.settings = replace(site.settings, limit=1)
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        keys = [(await holder.submit(site.request(), None)).key for _ in range(20)]
        poller = holder._world.cluster("").poller
        holder._world.take(Settings(limit=2000, patience=7.0, outage=70.0))
        holder.reload()
        assert (poller.pace.patience, poller.pace.outage) == (7.0, 70.0)
        for key in keys:
            await site.until(holder, key, "pending")
        assert holder.health()["allocations"]["pending"] == 20


# --- cancel and stop --------------------------------------------------------------------------------------------------


async def test_a_cancel_while_sbatch_runs_settles_both(site: Site) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def sbatch(script: str) -> Printed:
        asked.set()
        try:
            await answer.wait()
        except asyncio.CancelledError:
            site.slurm.make(script)  # the controller had it already
            raise
        raise AssertionError("nobody lets it answer")

    site.slurm.sbatch, site.slurm.history = sbatch, [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await asked.wait()
        await holder.stop(held.key, "cancel")
        end = await site.until(holder, held.key, "ended")
        assert (end.jobid, code(end)) == ("101", 130)
    assert site.slurm.cancelled == ["101"]


async def test_a_stop_that_comes_before_sbatch_runs_submits_nothing(site: Site) -> None:
    loop, holders = asyncio.get_running_loop(), list[Holder]()

    def ask() -> None:
        (life,) = holders[0]._lives.values()
        life.hear(ev.StopAsked("stop"))

    def write(descriptor: int, data: bytes) -> None:
        if b'"SubmissionBegun"' in data:
            loop.call_soon_threadsafe(ask)
        put(descriptor, data)

    async with site.holder(write) as holder:
        holders.append(holder)
        held = await holder.submit(site.request(), None)
        assert code(await site.until(holder, held.key, "ended")) == 130
    assert site.slurm.submitted == 0


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_what_was_to_be_stopped_is_not_submitted_once_more(
    site: Site, how: Literal["stop", "cancel"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.core.duties.PAUSES", (0.01,))
    asked, answer = asyncio.Event(), asyncio.Event()

    async def sbatch(script: str) -> Printed:
        asked.set()
        await answer.wait()
        said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
        return Printed(1, "", said)

    site.slurm.sbatch = sbatch
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await asked.wait()
        await holder.stop(held.key, how)
        answer.set()
        assert code(await site.until(holder, held.key, "ended")) == 130


class Doubts:
    """A Slurm that does not tell what became of a submission. `asked` is set when somebody wants to know."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def submit(self, order: Order, plan_text: str) -> Submitted:
        raise AssertionError("nothing is to be submitted")

    async def settle(self, directory: str) -> Submitted | None:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_the_end_does_not_wait_for_what_became_of_an_earlier_submission(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: bytes) -> None:
        put(descriptor, data)
        if b'"SubmissionBegun"' in data:
            raise Killed

    with suppress(ExceptionGroup):
        async with site.holder(write) as holder:
            await holder.submit(site.request(), None)
            await asyncio.wait([holder._book.failed])
    doubts = Doubts()
    monkeypatch.setattr(Scene, "submitter", lambda *_: doubts)
    async with site.holder() as holder:
        (held,) = holder.allocations()
        assert held.state == "submitting"
        await asyncio.wait_for(doubts.asked.wait(), 10)
        began = time.monotonic()
    assert time.monotonic() - began < STOP_LIMIT / 2


async def test_a_cancel_is_tried_until_it_is_taken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.core.duties.PAUSES", (0.01,))
    site.slurm.history, site.slurm.refuses_cancel = [RUNNING], "scancel: error: Unable to contact slurm controller"
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        await holder.stop(held.key, "cancel")
        async with asyncio.timeout(10):
            while len(site.slurm.cancelled) < 3:  # noqa: ASYNC110 - counted by the scripted client
                await asyncio.sleep(0.005)
        assert "Unable to contact" in str(holder.find(held.key).trouble)
        site.slurm.refuses_cancel = ""
        assert code(await site.until(holder, held.key, "ended")) == 130


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_another_job_that_has_the_id_by_now_is_left_alone(
    site: Site, how: Literal["cancel", "stop"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.core.duties.PAUSES", (0.01,))
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        run = make_run(site.top / "base", "101")
        await site.until(holder, held.key, "running")
        mine, site.slurm.scripts["101"] = site.slurm.scripts["101"], "/somebody/elses/job.sh"
        await holder.stop(held.key, how)
        async with asyncio.timeout(10):
            while "no job of yours with that id and this script" not in str(holder.find(held.key).trouble):  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.005)
        assert not site.slurm.cancelled + site.slurm.terminated
        site.slurm.scripts["101"] = mine
        async with asyncio.timeout(10):
            while not site.slurm.cancelled + site.slurm.terminated:  # noqa: ASYNC110 - counted by the scripted client
                await asyncio.sleep(0.005)
        end_run(run)


@pytest.mark.parametrize("asked", [True, False])
async def test_a_cancel_that_was_taken_and_had_no_effect_is_sent_again(
    site: Site, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    calls = itertools.count()
    cancel = site.slurm.cancel_job

    async def idle(jobid: str) -> str:
        return "" if next(calls) == 0 else await cancel(jobid)

    monkeypatch.setattr(site.slurm, "cancel_job", idle)
    monkeypatch.setattr("supervisor.core.duties.AGAIN", 60.0 if asked else 0.05)
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        await holder.stop(held.key, "cancel")
        async with asyncio.timeout(10):
            while asked and not holder._lives[held.key].state.cancels:  # noqa: ASYNC110 - until it is taken
                await asyncio.sleep(0.005)
        if asked:
            await holder.stop(held.key, "cancel")
        assert code(await site.until(holder, held.key, "ended")) == 130
    assert site.slurm.cancelled == ["101"]


async def test_only_what_was_submitted_here_is_cancelled(site: Site) -> None:
    site.slurm.jobs["7"] = site.slurm.jobs[site.slurm.make("x")]
    async with site.holder() as holder:
        held, *others = await asyncio.gather(*(holder.follow("7", None) for _ in range(3)))
        assert {other.key for other in others} == {held.key}, "who asks at the same time gets the same"
        with pytest.raises(Refusal) as refused:
            await holder.stop(held.key, "cancel")
        assert refused.value.status == 409
        assert (await holder.follow("7", None)).key == held.key
        assert code(await site.until(holder, held.key, "ended")) == 7
        assert (await holder.stop(held.key, "stop")).state == "ended"
    assert not site.slurm.cancelled


async def test_a_stop_goes_to_the_engine(site: Site) -> None:
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        assert (await holder.stop(held.key, "stop")).stopping == "stop"
        assert not site.slurm.terminated, "there is no engine yet"
        run = make_run(site.top / "base", "101")
        await site.until(holder, held.key, "running")
        await told(holder, "stopping")
        async with asyncio.timeout(10):
            while not site.slurm.terminated:  # noqa: ASYNC110 - counted by the scripted client
                await asyncio.sleep(0.005)
        end_run(run)
    assert site.slurm.terminated == ["101"]
    assert not site.slurm.cancelled


# --- storage ----------------------------------------------------------------------------------------------------------


class Disk:
    """A disk that can be full, and counts what is written."""

    def __init__(self) -> None:
        self.full = False

    def put(self, descriptor: int, data: bytes) -> None:
        if self.full:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(descriptor, data)


async def test_a_full_disk_refuses_what_is_new_and_loses_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.service.holder.WRITE_LIMIT", 0.5)  # the book may not have said yet that it is full
    disk = Disk()
    site.slurm.history = [RUNNING]
    async with site.holder(disk.put) as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        disk.full = True
        with pytest.raises(Refusal) as refused:
            await holder.submit(site.request(), None)
        assert (refused.value.status, refused.value.kind) == (507, "storage")
        with pytest.raises(Refusal) as unsaved:
            await holder.stop(held.key, "cancel")
        assert unsaved.value.status == 507
        async with asyncio.timeout(10):
            while holder.find(held.key).state != "ended":  # noqa: ASYNC110 - nothing is told while nothing is written
                await asyncio.sleep(0.005)
        assert site.slurm.cancelled == ["101"], "a stop waits for no disk"
        assert holder.health()["wrong"]
        before = len(site.seen)
        disk.full = False
        await told(holder)
        assert len(site.seen) > before
        async with asyncio.timeout(10):
            while holder.health()["wrong"]:  # noqa: ASYNC110 - told by a thread
                await asyncio.sleep(0.005)
        assert (await holder.submit(site.request(), None)).state
    async with site.holder() as holder:
        assert code(holder.find(held.key)) == 130
        assert not holder.notes


async def test_what_breaks_a_poller_is_told_until_it_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.service.holder.POLL_AGAIN", 0.01)
    site.slurm.history = [RUNNING]
    queue, broken = site.slurm.queue, True

    async def breaks(jobids: Collection[str]) -> Queue:
        if broken:
            raise KeyError("STATE")
        return await queue(jobids)

    monkeypatch.setattr(site.slurm, "queue", breaks)
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        async with asyncio.timeout(10):
            while not (wrong := holder.health()["wrong"]):  # noqa: ASYNC110 - told of when asked only
                await asyncio.sleep(0.005)
        assert wrong == ["Slurm's answers broke what reads them: KeyError: 'STATE'"]
        broken = False
        await site.until(holder, held.key, "running", "pending")
        async with asyncio.timeout(10):
            while holder.health()["wrong"]:  # noqa: ASYNC110 - told of when asked only
                await asyncio.sleep(0.005)


async def test_what_is_not_checked_when_the_service_ends_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks, goes_on = threading.Event(), threading.Event()

    def check(*_: object) -> NoReturn:
        checks.set()
        goes_on.wait(20)
        raise AssertionError("it was refused")

    monkeypatch.setattr("supervisor.service.holder.submission", check)
    async with site.holder() as holder:
        asking = asyncio.create_task(holder.submit(site.request(), None))
        assert await in_thread(checks.wait, 10, limit=20)
    with pytest.raises(Refusal) as refused:
        await asking
    assert (refused.value.status, refused.value.kind) == (503, "unavailable")
    goes_on.set()
    assert not site.seen


async def test_what_is_being_written_when_the_service_ends_is_accepted(site: Site) -> None:
    writes, goes_on = threading.Event(), threading.Event()

    def slow(descriptor: int, data: bytes) -> None:
        writes.set()
        goes_on.wait(20)
        put(descriptor, data)

    async with site.holder(slow) as holder:
        asking = asyncio.create_task(holder.submit(site.request(), "one"))
        assert await in_thread(writes.wait, 10, limit=20)
        holder.leave()
        asyncio.get_running_loop().call_later(0.05, goes_on.set)
    key = (await asking).key
    async with site.holder() as holder:
        assert code(await site.until(holder, key, "ended")) == 7
    assert site.slurm.submitted == 1


@pytest.mark.parametrize("name", ["receipt.json", "receipt.run.json", JOURNAL])
async def test_nobody_waits_for_papers_that_are_no_files(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("supervisor.service.life.PAUSES", (0.01,))
    site.slurm.history = [RUNNING]
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "pending")
        run = make_run(site.top / "base", "101")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        site.slurm.becomes("101", "FAILED", "3:0")
        end = await site.until(holder, held.key, "ended")
        assert (code(end), end.verdict and end.verdict["outcome"]) == (75, "unverifiable")
        assert f"{name} is not a receipt: not a regular file" in str(end.verdict) or name == JOURNAL
        assert "not a regular file" in str([event.data for event in await told(holder) if event.kind == "trouble"])


async def test_a_dead_file_system_holds_up_its_own_submission_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, answers, lockf = threading.Event(), threading.Event(), fcntl.lockf

    def hang(descriptor: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/.lock") and not hangs.is_set():
            hangs.set()
            answers.wait(20)
        lockf(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", hang)
    monkeypatch.setattr("supervisor.scheduler.directories.FILES", 0.5)
    async with site.holder() as holder:
        stuck = await holder.submit(site.request(), None)
        assert await in_thread(hangs.wait, 10, limit=20)
        other = await holder.submit(site.request(), None)
        assert code(await site.until(holder, other.key, "ended")) == 7
        async with asyncio.timeout(10):
            while not (trouble := holder.find(stuck.key).trouble):  # noqa: ASYNC110 - its own end
                await asyncio.sleep(0.005)
        assert "is its file system away?" in trouble and holder.find(stuck.key).state == "submitting"
    answers.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "work"]:
        await in_thread(thread.join, 10, limit=20)
    assert (site.slurm.submitted, len(site.submissions)) == (1, 1)


async def test_a_damaged_book_stops_its_allocation_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site.holder() as holder:
        keys = [(await holder.submit(site.request(), given)).key for given in ("one", "two")]
        for key in keys:
            await site.until(holder, key, "ended")
    book = site.state / "allocations" / keys[0] / JOURNAL
    lines = book.read_bytes().splitlines(keepends=True)
    book.write_bytes(b"".join([*lines[:2], b"#" + lines[2], *lines[3:]]))
    before = book.read_bytes()
    async with site.holder() as holder:
        damaged = holder.find(keys[0])
        assert damaged.state == "damaged"
        assert "line 3" in str(damaged.trouble) and f"move {book.parent} away" in str(damaged.trouble)
        assert holder.health()["wrong"] == [f"{keys[0]}: {damaged.trouble}"]
        assert holder.health()["allocations"]["damaged"] == 1
        assert (await holder.submit(site.request(), "one")).key == keys[0], "nothing is submitted twice"
        assert code(holder.find(keys[1])) == 7
        with pytest.raises(Refusal):
            await holder.stop(keys[0], "cancel")
        assert code(await site.until(holder, (await holder.submit(site.request(), None)).key, "ended")) == 7
    assert book.read_bytes() == before
    monkeypatch.setattr("supervisor.service.holder.FORGET_PERIOD", 0.01)
    site.settings = replace(site.settings, keep=1)
    async with site.holder() as holder:
        async with asyncio.timeout(10):
            while keys[1] in {item.key for item in holder.allocations()}:  # noqa: ASYNC110 - see below
                await asyncio.sleep(0.005)
        assert keys[0] in {item.key for item in holder.allocations()}, "it is nobody's but a person's to remove"
        book.parent.rename(site.top / "damaged")
        async with asyncio.timeout(10):
            while len(holder.allocations()) > 1:  # noqa: ASYNC110 - nothing is told of what is forgotten
                await asyncio.sleep(0.005)
        assert holder.health()["wrong"] == []


@pytest.mark.parametrize("tail", [b'{"n": 99, "se', b"\0" * 40, b"\0" * 20 + b"\n", b"{torn}\n"])
async def test_a_torn_last_line_is_cut_off(site: Site, tail: bytes) -> None:
    async with site.holder() as holder:
        held = await holder.submit(site.request(), None)
        await site.until(holder, held.key, "ended")
    book = site.state / "allocations" / held.key / JOURNAL
    before = book.read_bytes()
    book.write_bytes(before + tail)
    async with site.holder() as holder:
        assert holder.notes == [f"{held.key}: a torn last line of {len(tail)} bytes was cut off"]
        assert holder.find(held.key).state == "ended"
    assert book.read_bytes() == before


# --- dying ------------------------------------------------------------------------------------------------------------


async def live_through(site: Site, holder: Holder) -> None:
    """The script: three plans for two places, of which the second is cancelled; all come to their end."""
    keys = [(await holder.submit(site.request(), name)).key for name in ("one", "two", "three")]
    await site.until(holder, keys[1], "pending", "running", "ending", "ended")
    await holder.stop(keys[1], "cancel")
    for key in keys:
        await site.until(holder, key, "ended")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["before", "half", "after"])
async def test_a_daemon_that_dies_at_any_write_comes_to_the_same_end(
    site: Site, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("core.duties", "service.life"):
        monkeypatch.setattr(f"supervisor.{module}.PAUSES", (0.01,))
    points = 0
    for number in itertools.count(1):
        (tmp_path / f"{number}").mkdir()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / f"{number}" / "registry"))
        site = Site(tmp_path / f"{number}", settings=Settings(limit=2, patience=0.0))
        if await one_life(site, dies_at(number, how), live_through):
            break
        points += 1
        assert await one_life(site, put, live_through), f"killed at write {number}"
        check_the_end(site, number)
    assert points > 10


def check_the_end(site: Site, number: int) -> None:
    """Three jobs, of which one was cancelled; each number was told of one event."""
    where = f"killed at write {number}"
    books = {path.parent.name: path.read_text() for path in (site.state / "allocations").glob(f"*/{JOURNAL}")}
    assert len(books) == 3, where
    assert site.slurm.submitted == 3, where
    assert len(set(site.slurm.cancelled)) == 1, where
    records = [path / RECORD for path in site.submissions if (path / RECORD).exists()]  # none: sbatch was not run
    ends = [json.loads(path.read_text())["state"] for path in records]
    assert Counter(ends)["submitted"] == 3, where
    codes = []
    for text in books.values():
        verdicts = [item["verdict"]["code"] for item in map(json.loads, text.splitlines()) if item["event"] == "Sealed"]
        assert len(verdicts) == 1, where
        codes += verdicts
    assert sorted(codes) == [7, 7, 130], where
    numbers = Counter(text.split()[0] for text in set(site.seen))
    assert set(numbers.values()) == {1}, where


async def test_what_a_submission_asks_of_slurm_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.path)
    environ = {"PATH": slurm.path}
    request = SubmitRequest(PLAN, str(tmp_path), directory="base", allocctl="/nodes/allocctl", environ=environ)
    asked = json.loads(submission(request, {}).files[REQUEST])
    terms = Terms(**{**asked, "options": tuple(asked["options"])})
    world = World(Settings())

    async def submit() -> Submitted:
        return await world.submitter(environ, Stop()).submit(terms.order(plan_of(PLAN, "plan", environ)), PLAN)

    assert (await submit()).submission.state == "submitted"
    assert (world.calls(), world.errors()) == ({"sbatch": 1, "scontrol": 1}, {})
    sbatch = tmp_path / "slurm" / "bin" / "sbatch"
    sbatch.unlink()
    sbatch.write_text("#!/bin/sh\necho sbatch: error: no >&2\nexit 1\n")
    sbatch.chmod(0o755)
    assert (await submit()).submission.state == "refused"
    assert world.errors()["sbatch"] == world.calls()["sbatch"] - 1 == 1
