"""The poller against a Slurm that is written down, in simulated time: see scripted_slurm.py."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection
from functools import partial

import pytest

from supervisor.core.answers import Answer
from supervisor.core.truth import Truth
from supervisor.scheduler.inquiry import Pace
from supervisor.scheduler.poller import Follow, Poller, Seen
from tests.scripted_slurm import Moment, Slurm, answer, job, span

PACE = Pace()
FOREVER = 1e9


class Stage:
    """A poller on that Slurm, what each follow was told, and when each ended."""

    def __init__(self, slurm: Slurm, pace: Pace = PACE) -> None:
        self.slurm = slurm
        self.poller = Poller(slurm, pace=pace, clock=lambda: slurm.now, sleep=slurm.sleep, jitter=lambda: 0.5)
        self.told: dict[str, list[tuple[float, Seen]]] = {}
        self.ended: dict[str, float] = {}
        self.follows: dict[str, Follow] = {}
        self._awaited = 0
        self._done = asyncio.Event()

    def follow(self, jobid: str) -> Follow:
        told = self.told.setdefault(jobid, [])
        self.follows[jobid] = self.poller.follow(jobid, lambda seen: told.append((self.slurm.now, seen)))
        return self.follows[jobid]

    async def run(self, until: float | None = None) -> dict[str, Truth]:
        """Follow all jobs of this Slurm to their ends, or until that time."""
        for jobid in self.slurm.jobs:
            if jobid not in self.follows:
                self.follow(jobid)
        self._awaited = len(self.follows)
        self._done.clear()
        if until is not None:
            self.slurm.at(until, self._done.set)
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            polling = group.create_task(self.poller.run())
            ends = [group.create_task(self._end(follow)) for follow in self.follows.values()]
            await self._done.wait()
            for task in (polling, *ends):
                task.cancel()
        return {jobid: follow.truth for jobid, follow in self.follows.items() if follow.truth is not None}

    async def _end(self, follow: Follow) -> None:
        await follow.end()
        self.ended[follow.jobid] = self.slurm.now
        if len(self.ended) == self._awaited:
            self._done.set()

    def states(self, jobid: str) -> list[str]:
        """The state words that the follower was told, repetitions left out."""
        words = [seen.state for _, seen in self.told[jobid]]
        return [word for word, _ in itertools.groupby(words) if word]


async def follow_all(slurm: Slurm, pace: Pace = PACE) -> tuple[dict[str, Truth], Stage]:
    stage = Stage(slurm, pace)
    return await stage.run(), stage


def gaps(times: list[float]) -> list[float]:
    return [late - early for early, late in itertools.pairwise(times)]


# --- jobs that live ---


async def test_the_interval_grows_while_nothing_happens_and_begins_anew_with_a_change() -> None:
    slurm = Slurm({"7": job((0, "PENDING"), (400, "RUNNING"))})
    stage = Stage(slurm)
    assert await stage.run(until=800) == {}
    times = slurm.times("squeue")
    assert Counter(name for _, name, _ in slurm.asked) == {"squeue": len(times)} == stage.slurm.calls
    quiet = gaps([at for at in times if at < 400])
    assert [round(gap, 1) for gap in quiet[:4]] == [1.0, 1.5, 2.3, 3.4] and max(quiet) < PACE.slow + 0.1
    seen_at = stage.told["7"][1][0]
    assert 400 <= seen_at <= 400 + PACE.slow + 0.1
    again = gaps([at for at in times if at >= seen_at - 0.01])
    assert [round(gap, 1) for gap in again[:3]] == [1.0, 1.5, 2.3]
    assert stage.states("7") == ["PENDING", "RUNNING"]


async def test_one_question_for_all_and_what_it_costs_does_not_grow_with_them() -> None:
    few, many = Slurm({"1": job((0, "RUNNING"))}), Slurm({str(n): job((0, "RUNNING")) for n in range(1, 101)})
    for slurm in (few, many):
        await Stage(slurm).run(until=3600)
    assert len(few.asked) == len(many.asked) < 3600 / PACE.slow + 12
    assert many.asked[-1][1:] == ("squeue", 100)


async def test_a_change_of_the_reason_or_the_restarts_is_one() -> None:
    waiting = [("Priority", 0), ("Resources", 0), ("Resources", 1)]
    moments = [Moment(50.0 * n, "PENDING", reason=why, restarts=again) for n, (why, again) in enumerate(waiting)]
    stage = Stage(Slurm({"7": moments}))
    await stage.run(until=150)
    assert [(seen.reason, seen.restarts) for _, seen in stage.told["7"]] == waiting


async def test_haste_asks_at_once_but_never_without_a_pause() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (300, "FAILED", "7:0"))})
    stage = Stage(slurm)
    stage.follow("7")
    for wink in range(100):
        slurm.at(300.01 + wink / 100, stage.poller.hasten)
    truths = await stage.run()
    assert truths["7"].code == 7 and stage.ended["7"] < 300.5
    assert min(gaps(slurm.times("squeue"))) >= PACE.closest - 1e-6


async def test_haste_while_a_question_is_on_its_way_is_not_lost() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"))})
    stage = Stage(slurm)
    stage.follow("7")
    slurm.at(200, lambda: slurm.at(slurm.times("squeue")[-1] + PACE.slow + 0.006 + 0.003, stage.poller.hasten))
    await stage.run(until=260)
    after = [at for at in slurm.times("squeue") if at > 200]
    assert gaps(after)[0] == pytest.approx(PACE.closest, abs=0.01)


async def test_a_new_follow_is_asked_about_at_once_and_an_idle_poller_asks_nothing() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (300.5, "COMPLETED"))})
    stage = Stage(slurm)
    stage.follow("7")
    slurm.at(200, lambda: slurm.jobs.update({"8": job((200, "PENDING"))}))
    slurm.at(200, lambda: stage.follow("8"))
    slurm.at(205, lambda: stage.follows["8"].close())
    assert "7" in await stage.run()
    assert stage.told["8"][0][0] == pytest.approx(200.0, abs=0.02)
    assert stage.follows["8"].truth is None
    asked = len(slurm.asked)
    await asyncio.wait_for(idle(stage), 5)
    assert len(slurm.asked) == asked


async def idle(stage: Stage) -> None:
    """Run a poller that follows nothing for some turns of the loop."""
    task = asyncio.create_task(stage.poller.run())
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- ends ---


async def test_doubts_that_began_at_different_times_are_examined_together() -> None:
    alone, together = Slurm({"1": []}), Slurm({"9": job((0, "RUNNING"))})
    await follow_all(alone)
    stage = Stage(together)

    def begin(jobid: str) -> None:
        together.jobs[jobid] = []
        stage.follow(jobid)

    for number in range(1, 6):
        together.at(number * 0.7, partial(begin, str(number)))
    truths = await stage.run(until=40)
    assert truths.keys() == set("12345") and {truth.standing for truth in truths.values()} == {"absent"}
    assert together.calls["sacct"] < 3 * alone.calls["sacct"]


async def test_a_success_that_squeue_and_accounting_tell_needs_no_scontrol() -> None:
    truths, stage = await follow_all(Slurm({"7": job((0, "RUNNING"), (10, "COMPLETED"))}))
    assert truths["7"].succeeded and truths["7"].source == "sacct"
    assert stage.slurm.calls["sacct"] == 2 and stage.slurm.calls["scontrol"] == 0
    assert truths["7"].notes == ()
    assert stage.states("7") == ["RUNNING", "COMPLETED"]


async def test_a_failure_has_its_whole_code_from_the_controller() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "FAILED", "137:0"))})
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 137 and stage.slurm.calls["scontrol"] >= 1
    assert stage.ended["7"] - 10 < 6  # an interval at that time


async def test_many_jobs_are_examined_together() -> None:
    codes = {str(n): n % 5 for n in range(1, 51)}
    jobs = {}
    for number, (jobid, code) in enumerate(codes.items()):
        end = Moment(20 + number / 50, "FAILED" if code else "COMPLETED", f"{code}:0")
        jobs[jobid] = job((0, "PENDING"), (number / 25, "RUNNING"), end)
    slurm = Slurm(jobs)
    truths, stage = await follow_all(slurm)
    assert {jobid: truth.code for jobid, truth in truths.items()} == codes
    calls = stage.slurm.calls
    assert calls["scontrol"] == sum(code != 0 for code in codes.values())
    assert calls["sacct"] <= 8 and calls["squeue"] <= 16


async def test_accounting_that_is_a_moment_late_is_waited_for_and_the_controller_left_in_peace() -> None:
    slurm = Slurm({str(n): job((0, "RUNNING"), (10, "COMPLETED")) for n in range(1, 41)})
    slurm.lag = 3.7  # squeue shows the end at 13.2
    truths, stage = await follow_all(slurm)
    assert all(truth.succeeded for truth in truths.values()) and len(truths) == 40
    assert stage.slurm.calls["scontrol"] == 0 and stage.slurm.calls["sacct"] <= 6
    assert max(stage.ended.values()) < 10 + slurm.lag + 1


async def test_late_accounting_is_waited_for_no_longer_than_it_takes() -> None:
    truths, stage = await follow_all(Slurm({"7": job((0, "RUNNING"), (10, "COMPLETED"))}, lag=20.0))
    assert truths["7"].succeeded and truths["7"].source == "scontrol"
    assert stage.ended["7"] < 16


async def test_the_tidying_up_is_followed_on() -> None:
    truths, stage = await follow_all(Slurm({"7": job((0, "RUNNING"), (10, "COMPLETING"), (25, "FAILED", "3:0"))}))
    assert truths["7"].code == 3 and stage.states("7") == ["RUNNING", "COMPLETING", "FAILED"]


async def test_a_requeued_job_is_followed_on_and_only_its_last_end_counts() -> None:
    again = [Moment(at, state, restarts=1) for at, state in ((10.5, "PENDING"), (60, "RUNNING"), (200, "COMPLETED"))]
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "NODE_FAIL"), *again)})
    truths, stage = await follow_all(slurm)
    assert truths["7"].succeeded and stage.ended["7"] > 200
    assert [seen.restarts for _, seen in stage.told["7"]][-1] == 1
    assert "RUNNING" in stage.states("7")[1:]


async def test_an_earlier_incarnations_end_is_history_also_when_the_controller_goes_away() -> None:
    """Accounting never hears of the second incarnation before its end: its row of the first is no answer."""
    again = [Moment(12, "RUNNING", restarts=1), Moment(900, "FAILED", "5:0", restarts=1)]
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "FAILED", "9:0"), *again)}, controller_away=span((100, 800)))
    slurm.lag = 0.1
    hidden = slurm.accounting

    async def late(jobids: Collection[str]) -> dict[str, Answer]:
        kept, slurm.jobs = slurm.jobs, {"7": [m for m in slurm.jobs["7"] if not m.restarts or m.over]}
        try:
            return await hidden(jobids)
        finally:
            slurm.jobs = kept

    slurm.accounting = late  # type: ignore[method-assign]
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 5 and stage.ended["7"] > 900


async def test_a_job_that_nobody_knows_is_absent_beside_others_that_live() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (100, "COMPLETED")), "99": []})
    truths, stage = await follow_all(slurm)
    assert truths["7"].succeeded and truths["99"].standing == "absent"
    assert PACE.absence <= stage.ended["99"] < PACE.patience


async def test_a_job_that_was_forgotten_is_in_accounting() -> None:
    truths, _ = await follow_all(Slurm({"7": job((-9000, "FAILED", "4:0"))}))
    assert (truths["7"].code, truths["7"].source) == (4, "sacct")


async def test_a_doubt_that_lasts_is_the_answer() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "COMPLETED"))}, lag=FOREVER)
    slurm.memory = 0.0  # forgotten at once
    slurm.jobs["7"].insert(0, Moment(-FOREVER, "RUNNING"))  # and accounting goes on saying RUNNING
    truths, stage = await follow_all(slurm)
    assert (truths["7"].standing, truths["7"].code) == ("unasked", 75)
    assert "accounting still says RUNNING" in str(truths["7"].doubt)
    assert 10 + PACE.patience <= stage.ended["7"] < 10 + PACE.patience + 15


async def test_a_whole_array_is_no_question_for_patience() -> None:
    slurm = Slurm({"7": []})

    async def accounting(jobids: Collection[str]) -> dict[str, Answer]:
        return {"7": answer("sacct", "7", "7|COMPLETED|0:0|0:0|7_3|1000|1001|1002|ann|c|node1\n")}

    slurm.accounting = accounting  # type: ignore[method-assign]
    truths, stage = await follow_all(slurm)
    assert truths["7"].standing == "several" and stage.ended["7"] < 1


# --- Slurm in trouble ---


async def test_a_controller_that_is_away_costs_one_question_a_round_and_ever_fewer() -> None:
    slurm = Slurm({str(n): job((0, "RUNNING"), (1500, "COMPLETED")) for n in range(1, 41)})
    slurm.controller_away = span((100, 1000))
    truths, stage = await follow_all(slurm)
    assert all(truth.succeeded for truth in truths.values()) and len(truths) == 40
    away = [(at, name) for at, name, _ in slurm.asked if 100 <= at < 1000]
    rounds = [at for at, name in away if name == "scontrol"]
    assert all(gap > 5 for gap in gaps(rounds))
    assert len(rounds) < 900 / PACE.away + 20
    assert max(gaps(rounds)) > 0.7 * PACE.away
    troubles = [seen.trouble for _, seen in stage.told["1"]]
    assert [bool(trouble) for trouble in troubles] == [False, True, False, False]
    assert "did not answer within 5 s" in troubles[1]


def troubles(stage: Stage, jobid: str) -> list[bool]:
    """Whether Slurm could be asked, as the follower was told; repetitions left out."""
    return [bad for bad, _ in itertools.groupby(bool(seen.trouble) for _, seen in stage.told[jobid])]


@pytest.mark.parametrize("state", ["COMPLETING", "RUNNING"])
async def test_an_accounting_that_is_away_makes_nobody_ask_more_often(state: str) -> None:
    ending = [Moment(10, state, restarts=1), Moment(610, "FAILED", "3:0", restarts=1)]
    slurm = Slurm({"7": job((0, "RUNNING"), *ending)}, accounting_away=span((0, 600)))
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 3
    asked = [at for at, _, _ in slurm.asked if 15 <= at < 600]
    assert len(asked) < 3 * (600 / PACE.slow + 10)
    assert troubles(stage, "7") in ([False, True, False], [False, True, False, True, False])


async def test_a_scontrol_that_is_away_while_squeue_shows_life_makes_nobody_ask_more_often() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), Moment(10, "RUNNING", restarts=1), Moment(600, "FAILED", "3:0", 1))})
    whole = slurm.show_job

    async def show_job(jobid: str) -> Answer:
        good = await whole(jobid)
        return answer("scontrol", jobid, stderr="Access denied", returncode=1) if slurm.now < 500 else good

    slurm.show_job = show_job  # type: ignore[method-assign]
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 3
    assert slurm.calls["scontrol"] < 500 / PACE.slow + 12 and len(slurm.asked) < 3 * (600 / PACE.slow + 16)
    assert troubles(stage, "7") == [False, True, False]


async def test_what_recovers_is_seen_by_one_squeue() -> None:
    slurm = Slurm({str(n): job((0, "RUNNING")) for n in range(1, 41)})
    slurm.controller_away = lambda at: at >= 100 and sum(asked >= 100 for asked in slurm.times("squeue")) < 5
    stage = Stage(slurm)
    await stage.run(until=500)
    first = [at for at in slurm.times("squeue") if at >= 100][5]
    assert {name for at, name, _ in slurm.asked if at >= first} == {"squeue"}
    assert not any(follow.seen.trouble for follow in stage.follows.values())


async def test_accounting_alone_settles_an_end_while_the_controller_is_away() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (200, "FAILED", "4:0")), "8": job((0, "RUNNING"), (200, "PREEMPTED"))})
    slurm.controller_away = span((100, 1000))
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 4 and stage.ended["7"] < 400
    assert truths["8"].settled and stage.ended["8"] > 1000  # it might have come back, and only the controller knows
    assert "the controller could not be asked about this end" in truths["7"].notes


async def test_waiting_for_the_first_question_is_no_doubt() -> None:
    """A job that is followed while the controller is away has ended and is forgotten when it is asked about at last."""
    slurm = Slurm({"1": job((0, "RUNNING"))}, controller_away=span((100, 1000)), memory=10.0)
    stage = Stage(slurm)
    slurm.at(950, lambda: stage.follow("7"))
    slurm.at(951, lambda: slurm.jobs.update({"7": job((951, "RUNNING"), (952, "COMPLETED"))}))
    await stage.run(until=1200)
    first = next(at for at in slurm.times("sacct") if at > 1000)
    assert first - 950 > PACE.patience
    truth = stage.follows["7"].truth
    assert truth is not None and truth.succeeded


async def test_an_outage_has_an_end() -> None:
    truths, stage = await follow_all(
        Slurm({"7": job((0, "PENDING"))}, controller_away=span((50, FOREVER)), lag=FOREVER)
    )
    assert (truths["7"].standing, truths["7"].code) == ("unasked", 75)
    assert 50 + PACE.outage - PACE.slow <= stage.ended["7"] < 50 + PACE.outage + 2 * PACE.away
    assert stage.slurm.calls["scontrol"] < 60


async def test_an_accounting_that_says_running_does_not_make_an_outage_endless() -> None:
    truths, stage = await follow_all(Slurm({"7": job((0, "RUNNING"))}, controller_away=span((50, FOREVER))))
    assert truths["7"].code == 75 and stage.ended["7"] < 50 + PACE.outage + 2 * PACE.away


async def test_silence_uses_up_no_patience() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (60, "FAILED", "4:0"))}, memory=1.0)
    slurm.accounting_away = span((0, 600))
    truths, stage = await follow_all(slurm)
    assert truths["7"].code == 4 and 600 < stage.ended["7"] < 600 + PACE.away + 10


async def test_without_accounting_the_controller_decides() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (60, "FAILED", "137:0"))}, accounting_away=span((0, FOREVER)))
    truths, stage = await follow_all(slurm)
    assert (truths["7"].code, truths["7"].source) == (137, "scontrol")
    assert stage.ended["7"] < 60 + PACE.slow + 2


async def test_where_accounting_is_switched_off_nobody_waits_for_it() -> None:
    slurm = Slurm({"7": job((-9000, "FAILED", "4:0"))})

    async def off(jobids: Collection[str]) -> dict[str, Answer]:
        slurm.now += 0.06
        words = "Slurm accounting storage is disabled"
        return {jobid: answer("sacct", jobid, stderr=words, returncode=1) for jobid in jobids}

    slurm.accounting = off  # type: ignore[method-assign]
    truths, stage = await follow_all(slurm)
    assert truths["7"].standing == "unasked" and stage.ended["7"] < PACE.patience + 10


async def test_where_squeue_alone_fails_the_controller_is_asked_by_scontrol() -> None:
    slurm = Slurm(
        {str(n): job((0, "RUNNING"), (300, "COMPLETED")) for n in range(1, 5)}, squeue_fails=span((0, FOREVER))
    )
    truths, stage = await follow_all(slurm)
    assert all(truth.succeeded for truth in truths.values()) and len(truths) == 4
    assert stage.slurm.calls["squeue"] < 20
    assert not any(seen.trouble for _, seen in stage.told["1"])


async def test_a_job_that_the_controller_fails_at_does_not_stand_before_the_others() -> None:
    slurm = Slurm({str(n): job((0, "RUNNING"), (20, "FAILED", "3:0")) for n in range(1, 6)}, lag=FOREVER)
    whole = slurm.show_job

    async def show_job(jobid: str) -> Answer:
        good = await whole(jobid)
        return answer("scontrol", "1", stderr="Access denied", returncode=1) if jobid == "1" else good

    slurm.show_job = show_job  # type: ignore[method-assign]
    truths, stage = await follow_all(slurm, Pace(outage=300))
    assert {j: truth.code for j, truth in truths.items()} == {"1": 75, **dict.fromkeys("2345", 3)}
    assert max(stage.ended[j] for j in "2345") < 60 and stage.slurm.calls["squeue"] < 60


# --- the loop ---


async def test_a_cancelled_loop_leaves_nothing_and_can_run_again() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (50, "FAILED", "4:0"))})
    stage = Stage(slurm)
    assert await stage.run(until=20) == {}
    assert len(asyncio.all_tasks()) == 1
    assert (await stage.run())["7"].code == 4


async def test_two_loops_at_the_same_time_are_refused() -> None:
    stage = Stage(Slurm({}))
    first = asyncio.create_task(stage.poller.run())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="runs already"):
        await stage.poller.run()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_truth_is_never_overwritten_and_any_number_may_wait_for_it() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "FAILED", "4:0"), Moment(30, "COMPLETED", restarts=1))})
    stage = Stage(slurm)
    follow = stage.follow("7")
    truth = (await stage.run())["7"]
    assert [await follow.end(), await follow.end()] == [truth, truth] and truth.code == 4
    stage.poller.hasten()
    await idle(stage)
    assert follow.truth is truth


async def test_the_same_job_can_be_followed_twice_and_left_once() -> None:
    slurm = Slurm({"7": job((0, "RUNNING"), (10, "FAILED", "4:0"))})
    stage = Stage(slurm)
    other = stage.poller.follow("7")
    slurm.at(5, other.close)
    assert (await stage.run())["7"].code == 4 and other.truth is None


async def test_a_malformed_id_is_refused() -> None:
    with pytest.raises(ValueError, match="no Slurm job id"):
        Poller(Slurm({})).follow("7;east")
