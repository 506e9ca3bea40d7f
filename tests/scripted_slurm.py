"""A Slurm that is written down: jobs with their histories, two books that can be away or late, and a clock that only
sleeping and asking move. It is a client for the poller, and answers in the words of the real commands.

    slurm = Slurm({"7": job((0, "RUNNING"), (300, "FAILED", "7:0"))}, controller_away=span((100, 200)))
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from supervisor.core.answers import Answer, read_answer
from supervisor.core.slurm import Source
from supervisor.core.slurm_queue import parse_squeue_jobs
from supervisor.core.slurm_records import share_sacct
from supervisor.scheduler.client import Queue

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
SHOWN = """\
JobId={job} JobName=x
   UserId={user}(1000) GroupId=ann(1000) MCS_label=N/A
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   SubmitTime={submit} EligibleTime={submit}
   StartTime={start} EndTime={end} Deadline=N/A
   NodeList=node1
   Command={command}
"""


@dataclass(frozen=True)
class Moment:
    """A job from `at` on. A requeued one has another submit time and one more restart."""

    at: float
    state: str
    code: str = "0:0"
    restarts: int = 0
    reason: str = "None"

    @property
    def over(self) -> bool:
        return self.state in ENDED


def job(*moments: tuple[float, str] | tuple[float, str, str] | Moment) -> list[Moment]:
    return [moment if isinstance(moment, Moment) else Moment(*moment) for moment in moments]


def span(*spans: tuple[float, float]) -> Callable[[float], bool]:
    """Whether a time lies in one of the spans."""
    return lambda at: any(begin <= at < end for begin, end in spans)


NEVER = span()


@dataclass
class Slurm:
    """A client of the poller's. Asking costs time, and a controller that is away costs the whole deadline."""

    jobs: dict[str, list[Moment]]
    controller_away: Callable[[float], bool] = NEVER
    accounting_away: Callable[[float], bool] = NEVER
    squeue_fails: Callable[[float], bool] = NEVER
    lag: float = 0.1  # of accounting
    memory: float = 300.0  # MinJobAge
    now: float = 0.0
    user: str = "ann"
    epoch: int = 1000  # of the jobs' submission, in epoch seconds
    shown: str = "(null)"  # the batch script that scontrol shows
    calls: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[float, str, int]] = field(default_factory=list)
    events: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _flying: int = 0

    def at(self, moment: float, call: Callable[[], object]) -> None:
        """Call something at a time of the simulation."""
        heapq.heappush(self.events, (moment, next(self._numbers), call))

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        await self._until(self.now + seconds)

    async def _until(self, end: float) -> None:
        while self.events and self.events[0][0] <= end:
            moment, _, call = heapq.heappop(self.events)
            self.now = max(self.now, moment)
            call()
            for _ in range(5):  # whoever is woken by it has its turn
                await asyncio.sleep(0)
        self.now = max(self.now, end)

    async def _ask(self, command: str, count: int, away: bool) -> None:
        assert self._flying == 0, "two questions at the same time"
        self._flying += 1
        self.calls[command] += 1
        self.errors[command] += away
        self.asked.append((self.now, command, count))
        cost = 5.0 if away else {"squeue": 0.006, "scontrol": 0.006, "sacct": 0.06}[command]
        await self._until(self.now + cost)
        self._flying -= 1

    def state(self, jobid: str, at: float) -> Moment | None:
        """Where a job is in its history, as the controller remembers it."""
        past = [moment for moment in self.jobs.get(jobid, []) if moment.at <= at]
        return None if not past or (past[-1].over and at - past[-1].at > self.memory) else past[-1]

    async def queue(self, jobids: Collection[str]) -> Queue:
        away = self.controller_away(self.now)
        await self._ask("squeue", len(jobids), away)
        if away or self.squeue_fails(self.now):
            return Queue(("squeue",), "then", None, problem="squeue did not answer within 5 s")
        states = {jobid: self.state(jobid, self.now) for jobid in jobids}
        text = "".join(
            f"{raw(j)}|{j}|{m.state}|{self.epoch + m.restarts}|N/A|N/A|1000|{m.restarts}|{m.reason}|\n"
            for j, m in states.items()
            if m
        )
        return Queue(("squeue",), "then", 0, text, rows={row.display: row for row in parse_squeue_jobs(text)})

    async def accounting(self, jobids: Collection[str]) -> dict[str, Answer]:
        away = self.accounting_away(self.now)
        await self._ask("sacct", len(jobids), away=False)
        if away:
            return {jobid: answer("sacct", jobid, stderr="Connection refused", returncode=1) for jobid in jobids}
        shares = share_sacct("".join(self._rows(jobid) for jobid in jobids), jobids)
        return {jobid: answer("sacct", jobid, text) for jobid, text in shares.items()}

    def _rows(self, jobid: str) -> str:
        """Accounting's rows: an incarnation each, as it was `lag` seconds ago."""
        last = {m.restarts: m for m in self.jobs[jobid] if m.at <= self.now - self.lag}
        ends = {True: f"{self.epoch + 2}", False: "Unknown"}
        return "".join(
            f"{raw(jobid)}|{m.state}|{m.code}|0:0|{jobid}|{self.epoch + m.restarts}|{self.epoch + 1}|{ends[m.over]}|"
            f"{self.user}|c|node1\n"
            for m in last.values()
        )

    async def show_job(self, jobid: str) -> Answer:
        away = self.controller_away(self.now)
        await self._ask("scontrol", 1, away)
        if away:
            return answer("scontrol", jobid, returncode=None, trouble="scontrol did not answer within 5 s")
        moment = self.state(jobid, self.now)
        if moment is None:
            return answer("scontrol", jobid, stderr="slurm_load_jobs error: Invalid job id specified", returncode=1)
        return answer(
            "scontrol",
            jobid,
            SHOWN.format(
                job=jobid,
                state=moment.state,
                restarts=moment.restarts,
                code=moment.code,
                user=self.user,
                submit=self.epoch + moment.restarts,
                start=self.epoch + 1,
                end=self.epoch + 2,
                command=self.shown,
            ),
        )

    def times(self, command: str) -> list[float]:
        """When that was asked."""
        return [at for at, name, _ in self.asked if name == command]


def raw(jobid: str) -> str:
    """The raw id of a task: 7_2 has 702."""
    job, mark, task = jobid.partition("_")
    return f"{job}{int(task):02}" if mark else job


def answer(
    source: Source, jobid: str, stdout: str = "", stderr: str = "", returncode: int | None = 0, trouble: str = ""
) -> Answer:
    argv = [source, jobid]
    return read_answer(
        source=source,
        jobid=jobid,
        argv=argv,
        at="",
        returncode=returncode,
        stdout=stdout,
        stderr=stderr,
        trouble=trouble,
    )
