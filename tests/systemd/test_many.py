"""Twenty allocations on the real cluster, and a daemon under the real user manager that is killed again and again."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.asking import ask, lines
from tests.cluster import Cluster
from tests.slurm.gate import Gate
from tests.slurm.jobs import ALLOCCTL, SERVE, Event, Jobs, alive, role, until
from tests.systemd.manager import LIMIT, Manager
from tests.systemd.service import SERVICE, Service

NAME = f"many-{os.getpid()}"


@dataclass
class Held:
    """One allocation: what it does when it is let go, and what must be said of its end. `failure` is a pattern."""

    gate: Gate
    roles: dict[str, Event]
    code: int
    failure: str
    jobid: str = ""  # of the job that it is adopted in
    key: str = ""
    run_dir: Path = Path()
    journal: bytes = b""  # as it was when the daemon was killed

    def request(self, number: int, jobs: Jobs, service: Service, base: Path) -> str:
        """Ask for it. Returns the key, which is the same one whenever it is asked for."""
        table = {"name": NAME, "nodes": len(self.roles)}
        plan = jobs.plan(self.roles, coordinator=len(self.roles) - 1, job=table, slurm={"time": "00:10:00"})
        body = {"plan": plan.read_text(), "cwd": str(jobs.directory), "directory": str(base)}
        what, more = ("adoptions", {"jobid": self.jobid}) if self.jobid else ("allocations", {"allocctl": ALLOCCTL})
        headers = {"Idempotency-Key": f"request-{number}"}
        return str(ask(service.path, "POST", f"/v1/{what}", {**body, **more}, headers=headers)["key"])

    def check(self, told: dict[str, Any]) -> None:
        """What is told of its end, and what its receipt and its journal say."""
        receipt = json.loads(Path(told["receipt"]).read_text())
        assert receipt["verdict"]["final"] is True, receipt
        for verdict in (told["verdict"], receipt["verdict"]):
            outcome = "failure" if self.code else "success"
            assert (verdict["outcome"], verdict["code"], verdict["origin"]) == (outcome, self.code, "native"), told
        assert re.fullmatch(self.failure, told["first_failure"] or ""), told
        journal = (self.run_dir / "journal.jsonl").read_bytes()
        assert journal.startswith(self.journal)
        events = [line for line in map(json.loads, journal.splitlines()) if "event" in line]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert sum(event["event"] == "RunOpened" for event in events) == 1

    @cached_property
    def engine(self) -> int:
        return int(json.loads(self.journal.partition(b"\n")[0])["pid"])


def alone(gate: Gate, code: int = 0) -> Held:
    failure = rf"rank 0 \(client\) on node\d ended with code {code}, the coordinator" if code else ""
    return Held(gate, {"client": role(0, gate.then(f"exit {code}"))}, code, failure)


def served(gate: Gate, code: int = 0, jobid: str = "") -> Held:
    """A client with its server."""
    failure = rf"rank 1 \(client\) on node\d ended with code {code}, the coordinator" if code else ""
    roles = {"server": role(0, SERVE), "client": role(1, gate.then(f"exit {code}"))}
    return Held(gate, roles, code, failure, jobid)


def crashing(gate: Gate) -> Held:
    """A server that dies under its client."""
    failure = r"rank 0 \(server\) on node\d was killed by signal 11, before the run could end"
    roles = {"server": role(0, gate.then("ulimit -c 0; kill -SEGV $$")), "client": role(1, SERVE)}
    return Held(gate, roles, 128 + signal.SIGSEGV, failure)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[list[Gate]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Gate(tmp_path / f"gate-{number}"))) for number in range(20)]


def test_twenty_allocations_live_through_the_death_of_the_daemon_again_and_again(
    systemd: Manager, cluster: Cluster, jobs: Jobs, tmp_path: Path, gates: list[Gate]
) -> None:
    """Twelve clients succeed, four exit with codes of their own, and three servers crash; one more run is adopted."""
    service, base = Service(systemd), tmp_path / "runs"
    guest = jobs.hold(2)
    held = [alone(gate, code) for gate, code in zip(gates[:11], [3, 4] + [0] * 9, strict=True)]
    held += [served(gate, code) for gate, code in zip(gates[11:16], [5, 6] + [0] * 3, strict=True)]
    held += [*map(crashing, gates[16:19]), served(gates[19], jobid=str(guest.jobid))]

    def told() -> dict[str, dict[str, Any]]:
        return {each["key"]: each for each in ask(service.path, "GET", "/v1/allocations")["allocations"]}

    def counted(state: str) -> int:
        return sum(each["state"] == state for each in told().values())

    def kill() -> None:
        pid = service.pid()
        os.kill(pid, signal.SIGKILL)
        service.wait_for_another(pid)

    service.drop_in("[Service]\nRestartSec=0\n")
    service.do("install", environ=jobs.env)
    assert systemd.show(SERVICE, "ActiveState") == "inactive"  # the first request starts it

    # Killed while it submits: what was answered is known, and nothing is submitted twice.
    answered = [one.request(number, jobs, service, base) for number, one in enumerate(held[:12])]
    kill()
    for number, one in enumerate(held):
        one.key = one.request(number, jobs, service, base)
    assert [one.key for one in held[:12]] == answered
    until(lambda: counted("running") == 20, "twenty that run", 2 * LIMIT)
    until(lambda: len(list(base.glob("*/up.*"))) == sum(len(one.roles) for one in held), "all ranks")

    # Killed while they run, and while they end.
    for one in held:
        one.run_dir = Path(told()[one.key]["run_dir"])
        one.journal = (one.run_dir / "journal.jsonl").read_bytes()
    kill()
    assert all(alive(one.engine) for one in held)
    for one in held[::2]:
        one.gate.open()
    until(lambda: counted("ended"), "the first end")
    for one in held[1::2]:
        one.gate.open()
    kill()
    until(lambda: counted("ended") == 20, "twenty ends", 2 * LIMIT)

    assert systemd.show(SERVICE, "NRestarts") == "3"
    for one in held:
        one.check(told()[one.key])
    assert whole(service, 20)
    argv = ["sacct", "--noheader", "--allocations", f"--name={NAME}", "--format=JobID"]
    submitted = [told()[one.key]["jobid"] for one in held if not one.jobid]
    assert sorted(cluster.run(argv).stdout.split()) == sorted(submitted)
    assert cluster.job(guest.jobid)["JobState"] == "RUNNING"
    assert service.health()["wrong"] == []


def whole(service: Service, count: int) -> bool:
    """Whether the events up to the last of so many ends are there, each once."""
    numbers: list[int] = []
    ended: set[str] = set()
    with closing(lines(service.path, "/v1/events?after=0", LIMIT)) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                numbers.append(event["seq"])
                if event["kind"] == "ended":
                    assert event["key"] not in ended
                    ended.add(event["key"])
                    if len(ended) == count:
                        break
    return numbers == list(range(1, len(numbers) + 1))
