"""Waiting for a job: what is told on the way, what is proven at the end, and how one leaves. Slurm is written down here
(see tests/slurm/test_submit_wait.py for the real one), run directories are real."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.main import main
from supervisor.cli.telling import StoryTeller, verdict_lines
from supervisor.core import events as ev
from supervisor.core.submission import Submission
from supervisor.runs.follow import LOGS, Follower, LogLines
from supervisor.runs.registry import Asked, NoSuchRun, register_job
from supervisor.runs.saved import Unreadable
from supervisor.runs.sealing import Sealed
from supervisor.runs.target import Target, find_target, submitted_target
from supervisor.runs.waiting import Wait, sealed_before
from supervisor.scheduler.inquiry import Pace
from supervisor.scheduler.parts import list_parts
from supervisor.scheduler.poller import Poller
from tests.faults.local import ALLOCCTL, LIMIT, SERVE, Local, await_files, role, sh
from tests.scripted_slurm import Moment, Slurm, job
from tests.unit.test_follow import append, line, make_run

PACE = Pace(patience=30.0, outage=300.0)


class Scripted(Slurm):
    """Its clock runs fast, in hundredths of real seconds; jobs change when a test says so."""

    def __init__(self, jobs: dict[str, list[Moment]]) -> None:
        super().__init__(jobs)
        self.refuses_cancel = ""
        self.cancelled: list[str] = []

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.01)
        await super().sleep(seconds)

    def becomes(self, jobid: str, state: str, code: str = "0:0", **more: Any) -> None:
        """From now on the job is in that state."""
        self.jobs[jobid].append(Moment(self.now, state, code, **more))

    async def cancel_job(self, jobid: str) -> str:
        self.cancelled.append(jobid)
        if not self.refuses_cancel:
            self.becomes(jobid, "CANCELLED")
        return self.refuses_cancel

    async def sacct(self, jobid: str) -> Any:
        return (await self.accounting([jobid]))[jobid]

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        return tuple(self.jobs)


@dataclass
class Printed:
    """In the place of the printer."""

    lines: list[str] = field(default_factory=list)

    def print(self, line: str) -> None:
        self.lines.append(line)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def times(self, text: str) -> int:
        return sum(text in line for line in self.lines)


class Bench:
    """A wait in a directory of its own."""

    def __init__(self, base: Path, jobs: dict[str, list[Moment]], target: Target | None = None, **options: Any) -> None:
        self.base = base
        self.slurm = Scripted(jobs)
        self.printed = Printed()
        self.logs: list[str] = []
        first = next(iter(jobs))
        self.target = target or Target(first, {first: (first,)}, places=(str(base),))
        self.teller = StoryTeller(self.target, self.printed)  # type: ignore[arg-type]
        self.teller.lines = options.pop("lines", self._lines)  # type: ignore[method-assign]
        follower = Follower(self.target.jobid, self.target.places, LOGS["all"], tasks=True)
        self.poller = Poller(self.slurm, pace=PACE, clock=lambda: self.slurm.now, sleep=self.slurm.sleep)
        self.wait = Wait(
            self.target,
            follower,
            self.teller,
            parts=lambda jobid: list_parts(self.slurm, jobid),
            poller=self.poller,
            client=self.slurm,
            patience=0.0,
            **options,
        )

    def _lines(self, lines: LogLines) -> None:
        self.logs += [f"{lines.run_id} {lines.log} {text.decode()}" for text in lines.lines]

    async def says(self, text: str) -> None:
        async with asyncio.timeout(20):
            while not self.printed.has(text):  # noqa: ASYNC110 - looked for as a person would
                await asyncio.sleep(0.005)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs are made. No other is registered, and outcome files go to a directory of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("ALLOCD_RUNS", "GITHUB_WORKSPACE", "GITHUB_ACTIONS", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "base").mkdir()
    return tmp_path / "base"


async def verdict(bench: Bench, limit: float = 20.0) -> dict[str, Any]:
    async with asyncio.timeout(limit):
        sealed = await bench.wait.run()
    assert sealed is not None
    document: dict[str, Any] = sealed.document["verdict"]
    return document


# --- to the end ------------------------------------------------------------------------------------------------------


async def test_states_are_told_as_they_change(base: Path) -> None:
    waiting = Moment(0, "PENDING", reason="Resources")
    bench = Bench(
        base, {"7": job(waiting, replace(waiting, at=50, reason="Priority"), (90, "RUNNING"), (500, "FAILED", "7:0"))}
    )
    end = await verdict(bench)
    assert (end["code"], end["origin"]) == (7, "slurm")
    states = [text for text in bench.printed.lines if text.startswith("allocctl: 7: ")]
    assert states == [
        f"allocctl: 7: {text}" for text in ("PENDING (Resources)", "PENDING (Priority)", "RUNNING", "FAILED")
    ]
    assert (base.parent / "work/slurm_job_7_outcome.txt").read_text().startswith("7|FAILED|7:0|")


async def test_a_run_is_told_to_its_end_and_sealed(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(verdict(bench))
        run = make_run(base, "7", ev.StepSpawned(1, 5, "s"))
        await bench.says(f"allocctl: run 7 in {'/run'}")
        append(run / "journal.jsonl", line(3, ev.StepEnded(1, 3, "srun: refused\x1b[31m\nby the node")))
        await bench.says("first failure")
        bench.slurm.becomes("7", "FAILED", "3:0")
        (run / "logs/rank-0.server.out").write_text("last words without a newline")
        end = await ending
    assert bench.printed.times("first failure") == 1
    assert not bench.printed.has("\x1b"), "somebody else's words are made fit for a terminal"
    assert bench.logs == ["7 rank-0.server.out last words without a newline"]
    assert end["outcome"] == "failure"
    assert json.loads((run / "receipt.json").read_text())["verdict"] == end


async def test_a_receipt_hurries_the_poller(base: Path) -> None:
    """Slurm would be asked once a minute; when the run is over it is asked at once, and a few times."""
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    bench.slurm.lag = 0.0
    slow = Poller(bench.slurm, pace=Pace(fast=60.0, slow=60.0, closest=0.02))
    run = make_run(base, "7")
    wait = Wait(
        bench.target,
        Follower("7", [str(base)], LOGS["none"]),
        bench.teller,
        parts=lambda jobid: list_parts(bench.slurm, jobid),
        poller=slow,
        client=bench.slurm,
    )
    waiting = asyncio.create_task(wait.run())
    await bench.says("run 7 in")
    before = bench.slurm.calls["squeue"]
    (run / "receipt.run.json").write_text("no receipt")
    async with asyncio.timeout(10):
        while bench.slurm.calls["squeue"] < before + 2:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(0.01)
    bench.slurm.becomes("7", "COMPLETED")
    with pytest.raises(Unreadable, match=r"receipt\.run\.json"):
        await asyncio.wait_for(waiting, 10)


async def test_a_requeued_job_goes_on(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(verdict(bench))
        first = make_run(base, "7")
        await bench.says("run 7 in")
        await bench.says("7: RUNNING")  # or nobody has seen the attempt before
        bench.slurm.becomes("7", "PENDING", restarts=1, reason="BeginTime")
        await bench.says("attempt 2 follows")
        bench.slurm.becomes("7", "RUNNING", restarts=1)
        second = make_run(base, "7.r1")
        await bench.says("run 7.r1 in")
        bench.slurm.becomes("7", "FAILED", "5:0", restarts=1)
        await ending
    assert not (first / "receipt.json").exists()
    assert (second / "receipt.json").exists()


async def test_trouble_is_told_once_and_its_end(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"), (180, "COMPLETED"))})
    bench.slurm.controller_away = lambda at: 20 <= at < 200
    bench.slurm.accounting_away = lambda at: at < 200
    assert (await verdict(bench))["code"] == 0
    assert bench.printed.times("Slurm cannot be asked") == 1
    assert bench.printed.times("Slurm answers again") == 1
    assert bench.printed.times("RUNNING") == 1


async def test_nobody_answers(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    bench.slurm.controller_away = bench.slurm.accounting_away = lambda at: True
    end = await verdict(bench)
    assert (end["code"], end["outcome"]) == (75, "unverifiable")
    assert bench.slurm.now > PACE.outage


async def test_a_job_that_nobody_knows(base: Path) -> None:
    bench = Bench(base, {"7": []})
    assert (await verdict(bench))["code"] == 75
    assert bench.slurm.now < 60


async def test_a_job_that_ended_before_it_made_a_run(base: Path) -> None:
    output = base / "slurm-7.out"
    output.write_text("sh: allocctl: not found\n")
    target = Target("7", {"7": ("7",)}, places=(str(base),), output=str(base / "slurm-%j.out"))
    waiting = Moment(0, "PENDING", reason="Priority")
    bench = Bench(base, {"7": job(waiting, (5, "RUNNING"), Moment(9, "FAILED", "127:0", reason="Boom"))}, target)
    async with asyncio.timeout(20):
        sealed = await bench.wait.run()
    assert sealed is not None
    lines = list(verdict_lines(sealed.documents, bench.target, bench.teller.reasons))
    assert "  the job ended before it made a run: Slurm says FAILED (Boom)" in lines
    assert lines[-2:] == [f"  the end of {output}:", "    sh: allocctl: not found"]


# --- several parts ---------------------------------------------------------------------------------------------------


def tasks(*codes: str) -> dict[str, list[Moment]]:
    """The tasks of array 7, by the exit codes that they come to."""
    ends = {code: "COMPLETED" if code == "0:0" else "FAILED" for code in codes}
    return {f"7_{task}": job((0, "RUNNING"), (50, ends[code], code)) for task, code in enumerate(codes)}


async def test_an_array_is_counted_and_judged_as_a_whole(base: Path) -> None:
    for task in range(3):
        make_run(base, f"7_{task}")
    jobs = tasks("0:0", "3:0", "4:0")
    bench = Bench(base, jobs, Target("7", {name: (name,) for name in jobs}, places=(str(base),)))
    async with asyncio.timeout(20):
        sealed = await bench.wait.run()
    assert sealed is not None
    assert bench.printed.has("allocctl: 7: 3 RUNNING")
    assert bench.printed.has("allocctl: 7_1: FAILED 3:0")
    assert sealed.document["jobid"] == "7"
    assert len(sealed.documents) == 3
    assert all((base / name / "receipt.json").exists() for name in jobs)


async def test_a_task_that_was_cancelled_before_it_began_leaves_no_record(base: Path) -> None:
    jobs = {"7_0": job((0, "RUNNING"), (50, "COMPLETED")), "7_1": job((0, "PENDING"))}
    bench = Bench(base, jobs, Target("7", {name: (name,) for name in jobs}, places=(str(base),)))
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(verdict(bench))
        await bench.says("PENDING")
        bench.slurm.jobs["7_1"].clear()
        end = await ending
    assert end["code"] == 75
    assert "task 7_1 was seen PENDING and vanished from the array: cancelled before it began, or never made" in str(end)


async def test_an_array_that_nobody_told_of(base: Path) -> None:
    """An id of a whole array, of a job that somebody else submitted."""
    bench = Bench(base, {"7": [], **tasks("0:0", "3:0")})
    show, queue = bench.slurm.show_job, bench.slurm.queue

    async def show_job(jobid: str) -> Any:
        one = await show("7_0" if jobid == "7" else jobid)
        return replace(one, jobid=jobid, stdout=one.stdout.replace("JobId=7_0", "JobId=8 ArrayJobId=7 ArrayTaskId=0"))

    async def all_of(jobids: Any) -> Any:
        return await queue(["7_0", "7_1"] if list(jobids) == ["7"] else jobids)

    bench.slurm.show_job, bench.slurm.queue = show_job, all_of  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        sealed = await bench.wait.run()
    assert sealed is not None
    assert [document["jobid"] for document in sealed.documents] == ["7_0", "7_1"]
    assert bench.printed.has("allocctl: 7: 2 RUNNING") or bench.printed.has("allocctl: 7: 1 COMPLETED, 1 FAILED")
    assert bench.teller.array


# --- leaving ---------------------------------------------------------------------------------------------------------


async def left(bench: Bench, **more: Any) -> Sealed | None:
    async with asyncio.timeout(20):
        return await bench.wait.run(**more)


async def test_an_interrupt_leaves_and_touches_nothing(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(left(bench))
        await bench.says("RUNNING")
        bench.wait.interrupt()
        assert await leaving is None
    assert bench.slurm.cancelled == []


async def test_a_timeout_leaves(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    assert await left(bench, timeout=0.1) is None
    assert bench.slurm.cancelled == []


async def test_an_interrupt_that_cancels(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scancel is tried until Slurm takes it; the verdict is Slurm's."""
    monkeypatch.setattr("supervisor.runs.waiting.CANCEL_AGAIN", 0.01)
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    bench.slurm.refuses_cancel = "scancel did not answer within 5 s"
    async with asyncio.TaskGroup() as group:
        ending = group.create_task(verdict(bench))
        await bench.says("RUNNING")
        bench.wait.interrupt()
        await bench.says("could not be cancelled yet: scancel did not answer within 5 s")
        bench.slurm.refuses_cancel = ""
        end = await ending
    assert (end["code"], end["origin"]) == (130, "slurm")
    assert bench.teller.was_cancelled
    assert len(bench.slurm.cancelled) >= 2
    assert bench.printed.times("could not be cancelled yet") == 1


async def test_an_interrupt_that_came_before(base: Path) -> None:
    """While the job was being submitted, say."""
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    bench.wait.interrupt()
    assert (await verdict(bench))["code"] == 130
    assert bench.slurm.cancelled == ["7"]


async def test_a_cancel_that_was_taken_and_had_no_effect_is_sent_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.runs.waiting.CANCEL_ANEW", 0.01)
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    cancel, calls = bench.slurm.cancel_job, itertools.count()

    async def idle(jobid: str) -> str:
        return "" if next(calls) == 0 else await cancel(jobid)

    monkeypatch.setattr(bench.slurm, "cancel_job", idle)
    bench.wait.interrupt()
    assert (await verdict(bench))["code"] == 130
    assert bench.teller.was_cancelled


async def test_a_cancel_is_sent_again_only_while_the_job_is_known_to_live(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm is away from the end on, so the wait goes on; the id may be another job's before it is back."""
    monkeypatch.setattr("supervisor.runs.waiting.CANCEL_ANEW", 0.03)
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    sent: list[float] = []

    async def second_has_an_effect(jobid: str) -> str:
        sent.append(bench.slurm.now)
        if len(sent) == 2:
            end = bench.slurm.now
            bench.slurm.becomes(jobid, "CANCELLED")
            bench.slurm.accounting_away = bench.slurm.controller_away = lambda at: at < end + 250
        return ""

    monkeypatch.setattr(bench.slurm, "cancel_job", second_has_an_effect)
    bench.wait.interrupt()
    assert (await verdict(bench))["code"] == 130
    assert bench.slurm.now >= sent[1] + 250
    assert max(sent) < sent[1] + 50, "not while Slurm is away"


async def test_a_second_interrupt_leaves(base: Path) -> None:
    bench = Bench(base, {"7": job((0, "RUNNING"))}, cancel=True)
    bench.slurm.refuses_cancel = "no"
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(left(bench))
        await bench.says("RUNNING")
        bench.wait.interrupt()
        await bench.says("could not be cancelled")
        bench.wait.interrupt()
        assert await leaving is None
    assert not bench.teller.was_cancelled


async def test_a_wait_that_is_cancelled_from_outside_leaves_nothing(base: Path) -> None:
    make_run(base, "7")
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    waiting = asyncio.create_task(bench.wait.run())
    await bench.says("run 7 in")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_breaks_is_raised_as_it_is(base: Path) -> None:
    """A run whose journal has lost its beginning cannot be sealed."""
    run = make_run(base, "7")
    bench = Bench(base, {"7": job((0, "RUNNING"))})
    waiting = asyncio.create_task(bench.wait.run())
    await bench.says("run 7 in")
    (run / "journal.jsonl").write_text("garbage\n")
    bench.slurm.becomes("7", "COMPLETED")
    with pytest.raises(Unreadable, match="does not begin with the opening"):
        await asyncio.wait_for(waiting, 20)


async def test_a_reader_that_does_not_read_holds_no_verdict_up(base: Path) -> None:
    """The verdict is the job's, and the loss is told."""
    run = make_run(base, "7")
    (run / "logs/rank-0.server.out").write_text("1\n")
    reads = threading.Event()
    jobs = {"7": job((0, "RUNNING"), (50, "FAILED", "7:0"))}
    bench = Bench(base, jobs, drain=0.1, lines=lambda _lines: reads.wait(20))
    try:
        await verdict(bench)
    finally:
        reads.set()
    assert bench.printed.has("not all lines that the run has written could be told: nobody reads them")


# --- what is sealed already ------------------------------------------------------------------------------------------


async def test_what_is_sealed_is_answered_at_once(base: Path) -> None:
    make_run(base, "7")
    bench = Bench(base, {"7": job((0, "RUNNING"), (50, "FAILED", "7:0"))})
    end = await verdict(bench)
    away = Scripted({"7": []})
    away.controller_away = away.accounting_away = lambda at: True
    before = await sealed_before(bench.target, away)
    assert before is not None
    assert before.document["verdict"] == end
    assert away.now < 60, "though nobody can be asked"
    told = Bench(base, {"7": job((0, "FAILED", "7:0"))})
    assert await verdict(told) == end
    assert told.printed.lines == [], "what is history is not told again"
    again = Scripted({"7": job((0, "RUNNING"))})
    again.jobs["7"][0] = Moment(0, "RUNNING", restarts=1)
    assert await sealed_before(bench.target, again) is None, "it was started anew"
    later = replace(bench.target, asked=Asked(os.stat(base / "7/journal.jsonl").st_mtime + 1000, "/plan.toml"))
    assert await sealed_before(later, away) is None, "a job with the same id that was submitted later"


# --- what is meant ---------------------------------------------------------------------------------------------------


def submission(base: Path, **more: Any) -> Submission:
    record = Submission(
        token="t",
        state="submitted",
        jobid="7",
        cluster=None,
        user="ann",
        uid=1,
        name="x",
        asked="2026-01-01T00:00:00Z",
        answered=None,
        argv=("sbatch",),
        base=str(base),
        plan="p",
        script="s",
        output=f"{base}/submit-t/slurm-%A_%a.out",
        tasks=None,
        components=None,
    )
    record = replace(record, **more)
    directory = base / "submit-t"
    directory.mkdir(exist_ok=True)
    (directory / "submission.json").write_text(json.dumps(record.to_dict()))
    register_job("7", str(directory))
    return record


def test_a_job_that_nobody_here_submitted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCD_RUNS", "/somewhere")
    target = find_target("7;c2")
    assert (target.jobid, target.cluster, target.units) == ("7", "c2", {"7": ("7",)})
    assert target.places[1:] == ("/somewhere", "runs")
    assert target.shown == "-M c2 7"
    assert find_target("7;c2", "c3").cluster == "c3"


def test_a_submission_tells_what_belongs_to_the_job(base: Path) -> None:
    submission(base, tasks=(0, 5))
    target = find_target("7")
    assert target.units == {"7_0": ("7_0",), "7_5": ("7_5",)}
    assert target.array
    assert target.places == (str(base),)
    assert target.asked is not None and target.asked.at == 1767225600.0
    assert target.output_of("7_5") == f"{base}/submit-t/slurm-7_5.out"
    assert find_target("7_5").units == {"7_5": ("7_5",)}
    assert find_target("7_[0-1]").units == {"7_0": ("7_0",), "7_1": ("7_1",)}
    record = submission(base, components=2, cluster="c2", output=f"{base}/submit-t/slurm-%j.out")
    target = find_target("7")
    assert target == submitted_target(record, "7")
    assert (target.units, target.cluster, target.array) == ({"7": ("7+0", "7+1")}, "c2", False)
    assert target.output_of("7") == f"{base}/submit-t/slurm-7.out"


def test_a_submission_that_came_to_nothing_tells_nothing(base: Path) -> None:
    submission(base, state="unknown")
    assert find_target("7").asked is None


def test_the_logs_of_a_job_without_a_run_are_what_its_script_printed(
    base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    submission(base, output=f"{base}/submit-t/slurm-%j.out")
    assert main(["logs", "7"]) == 69
    assert f"job 7 has no run, and there is no output of its batch script ({base}/submit-t/slurm-7.out" in (
        capfd.readouterr().err
    )
    (base / "submit-t/slurm-7.out").write_text("allocctl: not found\n")
    assert main(["logs", "7"]) == 0
    assert capfd.readouterr().out == "slurm-7.out: allocctl: not found\n"
    submission(base, tasks=(0, 5))
    assert main(["logs", "7"]) == 69
    assert "7 is an array: name one of its tasks" in capfd.readouterr().err


def test_runs_and_their_directories(base: Path) -> None:
    run = make_run(base, "7.r1")
    target = find_target(str(run))
    assert (target.jobid, target.places) == ("7", (str(base),))
    (base / "local-1").mkdir()
    opening = ev.RunOpened("local-1", "local-1", "/x", "/x/m", ["a"], "local", "h", 1, {})
    (base / "local-1/journal.jsonl").write_bytes(line(1, opening))
    target = find_target(str(base / "local-1"))
    assert target.alone and not target.adopted
    assert target.directories == (str(base / "local-1"),)


def test_nothing_is_meant(base: Path) -> None:
    with pytest.raises(NoSuchRun, match="which job"):
        find_target(None)
    with pytest.raises(NoSuchRun, match="no run 'x'"):
        find_target("x")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    with Local(tmp_path) as it:
        yield it


def client(local: Local, script: str) -> Path:
    roles = {"server": role(0, SERVE), "client": role(1, sh(f"{await_files('up', 0)}; {script}"))}
    return local.plan(roles, coordinator=1, nodes=2)


@pytest.mark.slow
def test_a_run_without_slurm_is_followed_to_its_receipt(local: Local) -> None:
    run = local.start(client(local, "echo one; until [ -e $ALLOCD_RUN_DIR/go ]; do sleep 0.05; done; echo two; exit 7"))
    argv = [ALLOCCTL, "wait", str(run.directory), "--collect", str(local.directory / "there")]
    with subprocess.Popen(argv, env=local.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"rank-1.client.out: one\n"
        (run.directory / "go").touch()
        out, err = process.communicate(timeout=LIMIT)
    assert (out, process.returncode) == (b"rank-1.client.out: two\n", 7)
    assert b"rank 1 ended with code 7" in err
    assert err.splitlines()[-1].endswith(b"[exit 7, origin native]")
    assert (local.directory / "there" / run.directory.name / "receipt.run.json").exists()
    quiet = local.allocctl("wait", "-q", str(run.directory))
    assert (quiet.returncode, quiet.stdout, len(quiet.stderr.splitlines())) == (7, "", 1)
    document = json.loads(local.allocctl("wait", "--json", str(run.directory)).stdout)
    assert document == run.receipt()


@pytest.mark.slow
def test_in_a_step_of_github_actions(local: Local) -> None:
    """What the job prints is no command to the runner, what we report is; a document on stdout stays one."""
    run = local.start(client(local, "echo '::error::forged'; echo '##[error]forged'; exit 7"))
    assert run.wait() == 7
    outputs = local.directory / "outputs"
    env = {**local.env, "GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(outputs)}
    done = local.allocctl("wait", str(run.directory), env=env)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["rank-1.client.out: ::error::forged", "rank-1.client.out: #\\u0023[error]forged"]
    assert "    \\u003a:error::forged" in done.stderr.splitlines()
    assert [line.split()[0] for line in lines if line.lstrip().startswith("::")] == ["::error"]
    assert lines[-1].startswith("::error ")
    assert "exit_code<<" in outputs.read_text()
    done = local.allocctl("wait", "--json", str(run.directory), env=env)
    assert json.loads(done.stdout) == run.receipt()
    assert "::error " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_the_run_alone(local: Local, number: signal.Signals) -> None:
    run = local.start(client(local, "echo up; sleep 1000"))
    with subprocess.Popen([ALLOCCTL, "wait", str(run.directory)], env=local.env, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"rank-1.client.out: up\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 79
    assert err.splitlines()[-1].endswith(b"[exit 79, origin allocd]")
    assert b"the run goes on: pick it up with `allocctl wait" in err
    assert run.process.poll() is None
    run.signal(signal.SIGTERM)
    run.wait()


@pytest.mark.slow
def test_an_engine_that_is_gone_is_noticed(local: Local) -> None:
    run = local.start(client(local, "echo up; sleep 1000"))
    run.first("RankStarted", rank=1)
    with subprocess.Popen([ALLOCCTL, "wait", str(run.directory)], env=local.env, stdout=-1, stderr=-1) as process:
        run.process.kill()
        run.process.wait()
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 75
    assert b"its engine is gone, and has left no receipt" in err


def test_no_such_run(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wait", "nothing", "--json"]) == 69
    out, err = capsys.readouterr()
    assert "no run 'nothing'" in err
    assert json.loads(out)["exit"] == 69


@pytest.mark.parametrize("words", [["--timeout", "-1"], ["--logs", "some"], ["--patience", "x"], ["-q", "--json"]])
def test_wrong_words(base: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["wait", "7", *words]) == 78
    assert "usage" in capsys.readouterr().err


def test_without_slurm_nothing_is_waited_for(
    base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No command of Slurm's is there, and none will come."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["wait", "7"]) == 75
    err = capfd.readouterr().err.splitlines()
    assert "cannot be started" in err[-1]
    assert err[-1].endswith("[exit 75, origin allocd]")
