"""A daemon on a real cluster while Slurm's own daemons are away for as long as that happens: what is lost, how soon it
answers meanwhile, what it costs.

slurmctld for a minute and slurmdbd for ten, twice at the same time: on one cluster they hang (SIGSTOP), so whoever
connects waits; on another one they are killed, and started again. Allocations end before their eyes, are submitted, and
go on. The suite's tests do the same with outages of seconds; this takes thirteen minutes, and is measured when it is
asked for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from supervisor.cli.asking import lines
from tests.bench.stage import BenchError, Stage
from tests.bench.table import Row
from tests.cluster import Cluster
from tests.service.host import Host
from tests.slurm.gate import Gate
from tests.slurm.jobs import ALLOCCTL, SERVE, Event, Jobs, role, until

AWAY = {"slurmctld": 60.0, "slurmdbd": 600.0}
PATIENT = 300.0  # seconds for anything that follows an outage
SAVED = 10.0
"""Seconds after which the controller has saved what was submitted; what a kill takes from it before is lost to all."""
PERIOD = 0.5  # between questions


def outages(stage: Stage) -> list[Row]:
    """The rows."""
    if missing := Cluster.missing():
        return [Row("outages", skipped=missing)]
    with ThreadPoolExecutor(2) as pool:
        each = list(pool.map(lambda how: _cluster(stage, how), HOW))
    return [row for found in each for row in found]


def hang(cluster: Cluster, name: str) -> Callable[[], object]:
    """SIGSTOP. Returns what ends it."""
    pid = int((cluster.directory / "run" / f"{name}.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def die(cluster: Cluster, name: str) -> Callable[[], object]:
    """SIGKILL. Returns what starts it again."""
    cluster.kill_daemon(name)
    return {"slurmctld": cluster.start_slurmctld, "slurmdbd": cluster.start_slurmdbd}[name]


HOW = {"hangs": hang, "is killed": die}


@dataclass
class Planned:
    """An allocation: what it does, when it is let go, and the code that is right."""

    name: str
    when: str  # "meanwhile", "after"
    code: int
    gate: Gate
    roles: dict[str, Event]
    late: bool = False  # submitted while the daemon is away
    key: str = ""

    def plan(self, jobs: Jobs) -> str:
        table = {"name": self.name, "nodes": len(self.roles)}
        limit = {"time": "01:00:00"}
        return jobs.plan(self.roles, coordinator=len(self.roles) - 1, job=table, slurm=limit).read_text()


@dataclass
class Measured:
    """What one outage was like."""

    list_ms: list[float] = field(default_factory=list)
    troubled: set[str] = field(default_factory=set)
    processor: float = 0.0  # seconds a second
    told: float = 0.0  # seconds from its end until all is told
    lost: list[str] = field(default_factory=list)


def _planned(top: Path, word: str, stack: ExitStack) -> list[Planned]:
    """Allocations of one and of two ranks, which end while it is away and after that, well and otherwise."""

    def one(name: str, when: str, code: int, last: str = "", *, late: bool = False) -> Planned:
        gate = stack.enter_context(closing(Gate(top / f"gate-{word}-{name}")))
        if last:  # the server crashes
            roles = {"server": role(0, gate.then(last)), "client": role(1, SERVE)}
        else:
            roles = {"server": role(0, SERVE), "client": role(1, gate.then(f"exit {code}"))}
        return Planned(f"{word}-{name}", when, code, gate, roles, late)

    return [
        one("ends-0", "meanwhile", 0),
        one("ends-7", "meanwhile", 7),
        one("crashes", "meanwhile", 139, "ulimit -c 0; kill -SEGV $$"),
        one("ends-0-later", "after", 0),
        one("ends-5-later", "after", 5),
        one("submitted-meanwhile", "after", 0, late=True),
    ]


def _cluster(stage: Stage, how: str) -> list[Row]:
    """Both outages on one cluster."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        _patient(cluster)
        jobs = Jobs(cluster, stage.place())
        stack.callback(jobs.close)
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="o-"))
        environ = {**jobs.env, "XDG_RUNTIME_DIR": runtime, "XDG_CONFIG_HOME": str(jobs.directory / "config")}
        host = Host(jobs.directory, environ, Path(runtime, "allocd/ctl.sock"))
        host.start("--log-level=error")  # nobody reads what it logs
        stack.callback(host.end, signal.SIGKILL)
        rows = []
        for name, seconds in AWAY.items():
            planned = _planned(jobs.directory, name, stack)
            found = _outage(cluster, jobs, host, planned, partial(HOW[how], cluster, name), seconds)
            rows += _rows(f"{name} {how} for {seconds:g} s", found)
            _say(f"{name} {how} for {seconds:g} s", planned, host, found)
        return rows


def _patient(cluster: Cluster) -> None:
    """A controller that hung for a minute must not take its nodes for dead: as on other clusters, not after 10 s."""
    conf = cluster.directory / "slurm.conf"
    conf.write_text(conf.read_text().replace("SlurmdTimeout=10\n", "SlurmdTimeout=300\n"))
    cluster.run(["scontrol", "reconfigure"], check=True)


def _outage(
    cluster: Cluster,
    jobs: Jobs,
    host: Host,
    planned: Sequence[Planned],
    away: Callable[[], Callable[[], object]],
    seconds: float,
) -> Measured:
    found = Measured()
    for one in planned:
        if not one.late:
            one.key = host.submit(one.name, one.plan(jobs), ALLOCCTL)
    for one in planned:
        if not one.late:
            host.until(one.key, "running")
            run = Path(host.get(one.key)["run_dir"])
            until(lambda run=run: len(list(run.glob("up.*"))) == 2, f"the ranks of {one.name}")  # type: ignore[misc]
    time.sleep(SAVED)
    back = away()
    begin, used = time.monotonic(), _processor(host)
    for one in planned:
        if one.when == "meanwhile":
            one.gate.open()
        if one.late:
            one.key = host.submit(one.name, one.plan(jobs), ALLOCCTL)
    while (now := time.monotonic()) < begin + seconds:
        listed = host.ask("GET", "/v1/allocations?limit=1000")["allocations"]
        found.list_ms.append((time.monotonic() - now) * 1e3)
        found.troubled |= {each["trouble"] for each in listed if each["trouble"]}
        time.sleep(PERIOD)
    found.processor = (_processor(host) - used) / (time.monotonic() - begin)
    back()
    begin = time.monotonic()
    for one in planned:
        if one.when == "after":
            one.gate.open()
    deadline = begin + PATIENT
    while any(host.get(one.key)["state"] != "ended" for one in planned) and time.monotonic() < deadline:
        time.sleep(PERIOD)
    found.told = time.monotonic() - begin
    found.lost = [*_wrong(planned, host), *_submitted_twice(planned, cluster), *_untold(host)]
    return found


def _wrong(planned: Sequence[Planned], host: Host) -> list[str]:
    """Allocations whose end is not told as it was, with a receipt that says the same."""
    wrong = []
    for one in planned:
        end = host.get(one.key)
        verdict = end["verdict"] or {}
        receipt = json.loads(Path(end["receipt"]).read_text())["verdict"] if end["receipt"] else {}
        told = [(each.get("code"), each.get("origin")) for each in (verdict, receipt)]
        if told != [(one.code, "native")] * 2 or not receipt.get("final"):
            wrong.append(f"{one.name}: {end['state']}, {verdict.get('summary')}, {end['trouble']}, receipt {receipt}")
    return wrong


def _submitted_twice(planned: Sequence[Planned], cluster: Cluster) -> list[str]:
    """Names of which accounting, as soon as it knows of all jobs, has another number than one."""
    names = ",".join(one.name for one in planned)
    argv = ["sacct", "--noheader", "--allocations", "--parsable2", f"--name={names}", "--format=JobName"]

    def rows() -> list[str]:
        found = cluster.run(argv).stdout.split()
        return found if set(found) == {one.name for one in planned} else []

    found = until(rows, "accounting to know of all jobs", PATIENT)
    return [f"{one.name} was submitted {found.count(one.name)} times" for one in planned if found.count(one.name) != 1]


def _untold(host: Host) -> list[str]:
    """Events that a reader from the beginning does not get, or gets twice."""
    held = host.ask("GET", "/v1/allocations?limit=1000")["allocations"]
    ended, numbers = 0, []
    with closing(lines(str(host.socket), "/v1/events?after=0", PATIENT)) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                numbers.append(event["seq"])
                ended += event["kind"] == "ended"
                if ended == len(held):
                    break
    return [] if numbers == list(range(1, len(numbers) + 1)) else ["events are missing, or were told twice"]


def _processor(host: Host) -> float:
    """Processor seconds of the daemon and of the commands of Slurm's that it has run."""
    if host.process is None:
        raise BenchError("the daemon does not run")
    fields = Path(f"/proc/{host.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _rows(name: str, found: Measured) -> list[Row]:
    return [
        Row(f"{name}: lost", "", [len(found.lost)]),
        Row(f"{name}: a list meanwhile", "ms", found.list_ms),
        Row(f"{name}: processor meanwhile", "ms per s", [found.processor * 1e3]),
        Row(f"{name}: from its return until all is told", "s", [found.told]),
    ]


_SAYING = threading.Lock()


def _say(name: str, planned: Sequence[Planned], host: Host, found: Measured) -> None:
    """Each verdict, and what was said meanwhile."""
    with _SAYING:
        print(f"{name}:")
        for one in planned:
            end: dict[str, Any] = host.get(one.key)
            verdict = end["verdict"] or {"outcome": end["state"], "code": "none", "origin": "none"}
            print(f"  {one.name}: {verdict['outcome']}, {verdict['code']} ({verdict['origin']})", end="")
            print(f"; {end['first_failure']}" if end["first_failure"] else "")
        print(*(f"  meanwhile: {text}\n" for text in sorted(found.troubled)), sep="", end="")
        print(*(f"  LOST: {text}\n" for text in found.lost), sep="", end="")
        sys.stdout.flush()
