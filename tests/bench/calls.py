"""What it costs Slurm to be asked how jobs are: the poller beside a launcher for each job, which asks every 10 s.

The hour is a simulated one, its count of calls exact. A round of the poller is measured on the cluster.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import time
from collections.abc import Callable
from functools import partial

from supervisor.core.truth import Truth
from supervisor.scheduler.client import SlurmClient
from supervisor.scheduler.poller import Poller
from tests.bench.stage import BenchError, Stage
from tests.bench.table import Row, Sample, interleaved, rows
from tests.scripted_slurm import Moment, Slurm

HOUR = 3600.0
PERIOD = 10.0  # of a launcher's poll
JOBS = 50


def calls(stage: Stage) -> list[Row]:
    """Calls per job-hour of jobs that come, wait, run and end within an hour, one in ten of them by a failure."""
    return [
        Row(
            f"calls of squeue, sacct and scontrol, {count} job{'s' if count > 1 else ''}",
            "per job-hour",
            [_per_job_hour(count, seed) for seed in range(stage.runs)],
            f"a squeue for each job every {PERIOD:g} s",
            [HOUR / PERIOD],
        )
        for count in (1, JOBS, 200)
    ]


def _per_job_hour(count: int, seed: int) -> float:
    """Every job is followed from its submission to its end. The first one lasts the whole hour."""
    chance = random.Random(seed)
    times = [sorted(chance.uniform(0, HOUR) for _ in range(3)) for _ in range(count)]
    times[0] = [0.0, times[0][1], HOUR]
    slurm = Slurm({str(number): _history(number, *moments) for number, moments in enumerate(times, 1)})
    poller = Poller(slurm, clock=lambda: slurm.now, sleep=slurm.sleep, jitter=chance.random)

    truths: list[Truth] = []

    async def hour() -> None:
        async def end(jobid: str) -> None:
            truths.append(await poller.follow(jobid).end())
            if len(truths) == count:
                polling.cancel()

        def begin(jobid: str) -> None:
            group.create_task(end(jobid))

        async with asyncio.TaskGroup() as group:
            polling = group.create_task(poller.run())
            for jobid, (submitted, *_) in slurm.jobs.items():
                slurm.at(submitted.at, partial(begin, jobid))
            await slurm.sleep(0.001)  # the first is submitted; from now on the poller moves the clock

    asyncio.run(hour())
    if doubts := [truth.doubt for truth in truths if not truth.settled]:
        raise BenchError(f"{len(doubts)} jobs without a truth: {doubts[0]}")
    return slurm.calls.total() / (sum(last - first for first, _, last in times) / HOUR)


def _history(number: int, submitted: float, started: float, ended: float) -> list[Moment]:
    last = Moment(ended, "COMPLETED") if number % 10 else Moment(ended, "FAILED", "7:0")
    return [Moment(submitted, "PENDING"), Moment(started, "RUNNING"), last]


def look(stage: Stage) -> list[Row]:
    """One squeue of the poller's for jobs that wait, beside one squeue for each of them."""
    env = {name: value for name, value in stage.env.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    argv = ["sbatch", "--parsable", "--begin=now+1hour", f"--array=0-{JOBS - 1}", "--wrap=true"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, env=env, cwd=stage.place())
    array = done.stdout.strip().partition(";")[0]
    ids = [f"{array}_{task}" for task in range(JOBS)]
    client = SlurmClient(environ=env)

    def taken(clock: Callable[[], float], *questions: list[str]) -> float:
        async def ask() -> None:
            for jobids in questions:
                if len((answer := await client.queue(jobids)).rows) != len(jobids):
                    raise BenchError(f"squeue does not show {jobids}: {answer.problem or answer.stdout}")

        begin = clock()
        asyncio.run(ask())
        return (clock() - begin) * 1e3

    table: list[Row] = []
    try:
        for what, clock in (("wall time", time.monotonic), ("processor time", _processor)):
            ways: dict[str, Sample] = {
                "allocd": lambda _, clock=clock: taken(clock, ids),  # type: ignore[misc]
                f"{JOBS} calls of squeue": lambda _, clock=clock: taken(clock, *([jobid] for jobid in ids)),  # type: ignore[misc]
            }
            table += rows(f"a look at {JOBS} jobs that wait, {what}", "ms", interleaved(stage.runs, ways))
    finally:
        subprocess.run(["scancel", array], check=True, env=env)
    return table


def _processor() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
