"""A daemon that holds a thousand allocations of sixteen ranks: what it takes, and how soon it tells.

Slurm is the file of tests/fake_slurm. The journals are an engine's: one run of the plan on this machine writes the
first, and the others are it under another job's name. They grow by what engines write of ranks that fall silent and
answer again. All runs are asked at a pace that follows their number whether they have grown (`runs/rounds.py`): half of
its pause is the median time from a line to its event.

Submissions are bound by sbatch itself (the program of tests/fake_slurm takes 30 ms of a processor) and by the eleven
times that one is synced to the disk, not by the daemon, whose own share is a row.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from supervisor.cli.asking import lines
from tests.bench.stage import ALLOCCTL, BenchError, Stage
from tests.bench.table import Row
from tests.fake_slurm import FakeSlurm
from tests.service.running import Running, plan, until

ALLOCATIONS = 1000
RANKS = 16
SETTLE = 60.0  # seconds until intervals have grown to their longest
MEASURED = 20.0
GROWTH = 20  # lines a second, of all journals together
PATIENT = 600.0  # seconds for anything that a thousand allocations do together


def service(stage: Stage) -> list[Row]:
    """The rows."""
    top = stage.place()
    slurm = FakeSlurm(top / "slurm", history=[(0, "RUNNING")])
    limit = f"--limit={ALLOCATIONS}"
    many = f"service: {ALLOCATIONS} allocations of {RANKS} ranks"
    with Running(top, slurm, limit) as daemon:
        empty = _resident(daemon.process.pid)
        template = _journal(stage)
        begin, before = time.monotonic(), _used(daemon, of_children=False)
        keys = [daemon.submit(plan(RANKS))["key"] for _ in range(ALLOCATIONS)]
        until(lambda: all(job["jobid"] for job in _list(daemon)), "all are submitted", PATIENT)
        submitted = ALLOCATIONS / (time.monotonic() - begin)
        submitting = (_used(daemon, of_children=False) - before) / ALLOCATIONS
        journals = [Growing(daemon.base, job["jobid"], template) for job in _list(daemon)]
        begin = time.monotonic()
        until(lambda: all(job["run_id"] for job in _list(daemon)), "all runs are seen", PATIENT)
        found = time.monotonic() - begin
        until(lambda: len(daemon.show(keys[-1])["ranks"]) == RANKS, "the last one's ranks are known")
        time.sleep(SETTLE)
        idle = _processor(daemon, MEASURED)
        asked = [_milliseconds(lambda: _list(daemon)) for _ in range(stage.runs)]
        page = [_milliseconds(lambda: daemon.ask("GET", "/v1/allocations")) for _ in range(stage.runs)]
        with _told(daemon) as told:
            busy = _processor(daemon, MEASURED, lambda: _grow(journals))
            wrote = {line: at for journal in journals for line, at in journal.grown.items()}
            until(lambda: told.keys() >= wrote.keys(), "everything that was written is told", PATIENT)
        resident, late = _resident(daemon.process.pid), _lag(daemon)
        begin = time.monotonic()
    end, begin = time.monotonic() - begin, time.monotonic()
    with Running(top, slurm, limit) as daemon:
        again = time.monotonic() - begin
        for key in keys:
            until(lambda key=key: daemon.show(key)["ranks"], "all ranks are known again", PATIENT)  # type: ignore[misc]
        known, started = time.monotonic() - begin, _used(daemon)
        restarted, late_again = _resident(daemon.process.pid), _lag(daemon)
    return [
        Row("service: without allocations, resident", "MB", [empty]),
        Row(f"{many}, resident", "MB", [resident]),
        Row(f"{many}, resident after a start", "MB", [restarted]),
        Row(f"{many}, nothing happens, processor", "ms per s", [idle * 1e3]),
        Row(f"{many}, {GROWTH} lines a second, processor", "ms per s", [busy * 1e3]),
        Row("service: from a journal's line to its event", "s", [told[line] - at for line, at in wrote.items()]),
        Row(f"service: a list of {ALLOCATIONS}", "ms", asked),
        Row(f"service: a page of 100 of {ALLOCATIONS}", "ms", page),
        Row("service: the event loop's lag, 99 of 100 below", "ms", [late * 1e3]),
        Row(f"service: the same in a start with {ALLOCATIONS} allocations", "ms", [late_again * 1e3]),
        Row("service: submitted, one after another", "per s", [submitted]),
        Row("service: a submission, processor without sbatch", "ms", [submitting * 1e3]),
        Row(f"service: {ALLOCATIONS} runs that appear at once are told", "s", [found]),
        Row(f"service: a graceful end with {ALLOCATIONS} allocations", "s", [end]),
        Row(f"service: a start with {ALLOCATIONS} allocations, until it answers", "s", [again]),
        Row(f"service: a start with {ALLOCATIONS} allocations, until all ranks are known", "s", [known]),
        Row(f"service: a start with {ALLOCATIONS} allocations, processor", "s", [started]),
    ]


class Growing:
    """One job's journal. `grown`: what was added, by run and number, and when (CLOCK_MONOTONIC)."""

    def __init__(self, base: Path, jobid: str, template: list[dict[str, Any]]) -> None:
        directory = base / jobid
        directory.mkdir(parents=True)
        opened = {"run_id": jobid, "jobid": jobid, "run_dir": str(directory), "launcher": "slurm", "host": "elsewhere"}
        made = [{**template[0], **opened}, *template[1:]]
        self._jobid, self._path = jobid, directory / "journal.jsonl"
        self._seq = max(line["seq"] for line in made)
        self._path.write_text("".join(json.dumps(line) + "\n" for line in made))
        self.grown: dict[tuple[str, int], float] = {}

    def grow(self) -> None:
        """One more line."""
        self._seq += 1
        silent = len(self.grown) % 2 == 0
        event: dict[str, Any] = {"event": "RankSilent", "seconds": 15.0} if silent else {"event": "RankHeard"}
        line = {"seq": self._seq, "utc": "2026-01-01T00:00:00.000Z", "at": time.monotonic(), **event, "rank": 3}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.grown[self._jobid, self._seq] = time.monotonic()


def _journal(stage: Stage) -> list[dict[str, Any]]:
    """What an engine has written when all ranks run."""
    top = stage.place()
    (top / "plan.toml").write_text(plan(RANKS))
    argv = [ALLOCCTL, "run", "--dir", str(top / "runs"), str(top / "plan.toml")]
    with (top / "log").open("w") as log:
        engine = subprocess.Popen(argv, env=dict(stage.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def written() -> list[dict[str, Any]] | None:
        if engine.poll() is not None:
            raise BenchError(f"the engine ended with {engine.returncode}: {(top / 'log').read_text()[-1000:]}")
        journal = next((top / "runs").glob("*/journal.jsonl"), None)
        data = journal.read_bytes() if journal else b""
        found = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return found if sum(line.get("event") == "RankStarted" for line in found) == RANKS else None

    with engine:
        try:
            return until(written, "an engine's journal")
        finally:
            engine.send_signal(signal.SIGTERM)


def _grow(journals: list[Growing]) -> None:
    """Lines at a steady pace, to journals that are far from each other, until the time is over."""
    begin = time.monotonic()
    for number in range(int(GROWTH * MEASURED)):
        journals[number * 7 % len(journals)].grow()
        time.sleep(max(0.0, begin + (number + 1) / GROWTH - time.monotonic()))


@contextmanager
def _told(daemon: Running) -> Iterator[dict[tuple[str, int], float]]:
    """When each record of a run was told, as a reader of all events gets them."""
    told: dict[tuple[str, int], float] = {}
    leaving = threading.Event()

    def read() -> None:
        target = f"/v1/events?after={daemon.last_event()}"
        with closing(lines(daemon.path, target, PATIENT)) as stream:
            for line in stream:
                if leaving.is_set():
                    return
                if line.startswith(b"data: ") and b'"record"' in line:
                    data = json.loads(line.removeprefix(b"data: "))["data"]
                    told[data["run_id"], data["line"]] = time.monotonic()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield told
    finally:
        leaving.set()
        reader.join()  # a heartbeat comes every few seconds


def _list(daemon: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.ask("GET", f"/v1/allocations?limit={ALLOCATIONS}")["allocations"]
    return found


def _milliseconds(what: Callable[[], object]) -> float:
    begin = time.monotonic()
    what()
    return (time.monotonic() - begin) * 1e3


def _processor(daemon: Running, seconds: float, what: Callable[[], object] | None = None) -> float:
    """Processor seconds a second of the daemon, the commands of Slurm's that it ran included, while `what` is done."""

    begin, before = time.monotonic(), _used(daemon)
    if what is None:
        time.sleep(seconds)
    else:
        what()
    return (_used(daemon) - before) / (time.monotonic() - begin)


def _used(daemon: Running, *, of_children: bool = True) -> float:
    """Processor seconds so far."""
    fields = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if of_children else 13])) / os.sysconf("SC_CLK_TCK")


def _lag(daemon: Running) -> float:
    """Seconds by which the event loop was late at most in 99 of 100 looks at it: the bound of a bucket."""
    counts: dict[float, float] = {}
    with closing(lines(daemon.path, "/metrics", PATIENT)) as metrics:
        for line in map(bytes.decode, metrics):
            if line.startswith("allocd_event_loop_lag_seconds_bucket"):
                labels, _, count = line.rpartition(" ")
                counts[float(labels.partition('le="')[2].partition('"')[0])] = float(count)
    return min(bound for bound, count in counts.items() if count >= 0.99 * max(counts.values()))


def _resident(pid: int) -> float:
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return math.ceil(int(found["VmRSS"].split()[0]) / 1024)
