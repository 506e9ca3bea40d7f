"""What befalls a daemon in a year, before a Slurm that is a file: it works on, nothing is lost, it tells, it recovers.

Everything here is real but the cluster: processes, sockets, files, and the time that passes. Daemons of Slurm are away
for some seconds and not for minutes: the outages are longer than the deadline of a command, so each question fails more
than once, and that is what an outage is to whoever asks. How long doubts and outages are borne is tested with a
simulated clock (test_holder.py, tests/unit/test_poller.py).
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.asking import Refused
from supervisor.core import codes
from supervisor.core import events as ev
from tests.fake_slurm import FakeSlurm
from tests.mounts import fill, small_disk
from tests.service.running import ALLOCCTL, Running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FAILS = ((0, "PENDING"), (0.5, "RUNNING"), (2, "FAILED", "7:0"))
LIVES = ((0, "RUNNING"),)


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", history=LIVES)


def failed_by_7(found: dict[str, Any]) -> bool:
    verdict = found["verdict"]
    return (verdict["code"], verdict["origin"]) == (7, "slurm")


def whole(events: list[dict[str, Any]]) -> bool:
    """Whether no event is missing, and none is told twice."""
    return [event["seq"] for event in events] == list(range(1, len(events) + 1))


# --- Slurm away -------------------------------------------------------------------------------------------------------


def test_a_controller_that_is_away_is_told_of_and_what_ends_meanwhile_is_judged_right(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    with Running(tmp_path, slurm) as daemon:
        ends, lives = (daemon.submit()["key"] for _ in range(2))
        jobid = until(lambda: daemon.show(ends)["slurm"] and daemon.show(ends)["jobid"], "Slurm shows it")
        until(lambda: daemon.show(lives)["slurm"], "Slurm shows the other")
        slurm.away(controller=14)
        slurm.end(jobid, "FAILED", "7:0")
        slurm.become(FAILS)
        late = daemon.submit()["key"]  # sbatch does not reach anybody
        told = until(lambda: daemon.show(lives)["trouble"], "that Slurm is away is told")
        assert "Slurm cannot be asked" in told
        assert daemon.show(ends)["verdict"] is None or failed_by_7(daemon.show(ends))
        assert failed_by_7(daemon.until(ends, "ended"))
        assert failed_by_7(daemon.until(late, "ended", 120))
        until(lambda: not daemon.show(lives)["trouble"], "that Slurm is back is told")
        assert daemon.show(lives)["state"] != "ended"
        assert len(slurm.state()["jobs"]) == 3
        assert whole(daemon.events())


def test_an_end_that_nobody_remembers_is_proven_when_accounting_is_back(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", history=LIVES, memory=2)
    with Running(tmp_path, slurm) as daemon:
        key = daemon.submit()["key"]
        jobid = until(lambda: daemon.show(key)["slurm"] and daemon.show(key)["jobid"], "Slurm shows it")
        slurm.away(controller=8, accounting=20)
        slurm.end(jobid, "FAILED", "7:0")
        until(lambda: "sacct" in (daemon.show(key)["trouble"] or ""), "it is told that sacct is away")
        assert daemon.show(key)["verdict"] is None
        assert failed_by_7(daemon.until(key, "ended"))


def test_the_controllers_record_is_enough_where_accounting_does_not_come_back(slurm: FakeSlurm, tmp_path: Path) -> None:
    with Running(tmp_path, slurm) as daemon:
        slurm.away(accounting=3600)
        slurm.become(FAILS)
        assert failed_by_7(daemon.until(daemon.submit()["key"], "ended"))


# --- the clock --------------------------------------------------------------------------------------------------------


SHIFTED = """
import datetime, os, sys, time

clock, real = os.environ["CLOCK"], time.time

def now():
    with open(clock) as file:
        return real() + float(file.read())

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(now(), tz)

time.time, datetime.datetime = now, Shifted

from supervisor.service.main import main

sys.exit(main())
"""
"""The daemon with a wall clock that a file sets. Its children see the time as it is."""


@pytest.mark.parametrize("step", ["+3600", "-3600"])
def test_a_clock_that_is_set_an_hour_off_ends_nothing_and_delays_nothing(
    step: str, slurm: FakeSlurm, tmp_path: Path
) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    env = {"CLOCK": str(clock)}
    with Running(tmp_path, slurm, env=env, start=("-c", SHIFTED)) as daemon:
        lives, ends = (daemon.submit()["key"] for _ in range(2))
        jobid = until(lambda: daemon.show(ends)["slurm"] and daemon.show(ends)["jobid"], "Slurm shows it")
        before = daemon.show(lives)["changed"]
        clock.with_suffix(".new").write_text(step)
        clock.with_suffix(".new").rename(clock)  # whole at any time
        slurm.end(jobid, "FAILED", "7:0")
        assert failed_by_7(daemon.until(ends, "ended"))
        slurm.become(FAILS)
        after = daemon.submit()
        assert (after["created"] > before) == (step == "+3600")  # the clock was set, as far as the daemon can see
        judged = daemon.until(after["key"], "ended")
        assert failed_by_7(judged), json.dumps(judged)  # though Slurm says, by its clock, that it is an hour older
        assert daemon.show(lives)["state"] != "ended"
        assert whole(daemon.events())
    with Running(tmp_path, slurm, env=env, start=("-c", SHIFTED)) as daemon:  # times that go back are no damage
        assert daemon.health()["wrong"] == []
        assert daemon.show(lives)["state"] != "ended"


# --- readers that do not read -----------------------------------------------------------------------------------------

READERS = 200
LINES = 1000


def test_two_hundred_readers_that_do_not_read_hold_up_nobody(slurm: FakeSlurm, tmp_path: Path) -> None:
    with Running(tmp_path, slurm) as daemon, ExitStack() as stack:
        key = daemon.submit()["key"]
        jobid = until(lambda: daemon.show(key)["jobid"], "its job is there")
        for _ in range(READERS):
            reader = stack.enter_context(socket.socket(socket.AF_UNIX))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(daemon.path)
            reader.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        before = resident(daemon.process.pid)
        write_journal(daemon.base / jobid, jobid, LINES)
        slurm.become(FAILS)
        others = [daemon.submit()["key"] for _ in range(10)]
        assert all(failed_by_7(daemon.until(other, "ended")) for other in others)
        until(lambda: daemon.last_event() > LINES, "the whole journal is told")
        events = daemon.events()
        assert whole(events)
        assert sum(event["kind"] == "record" for event in events) == LINES
        told = sum(len(json.dumps(event)) for event in events) / 2**20
        assert resident(daemon.process.pid) - before < READERS * told / 2  # no reader has a queue of its own


def resident(pid: int) -> float:
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(found["VmRSS"].split()[0]) / 1024


def write_journal(run_dir: Path, jobid: str, count: int) -> None:
    """A run that says much."""
    plan = {
        "job": {"name": "x", "nodes": 1},
        "roles": {"all": {"ranks": [0], "command": ["true"]}},
        "coordinator": {"rank": 0},
    }
    opened = ev.RunOpened(jobid, jobid, str(run_dir), f"{run_dir}/m", ["node1"], "slurm", "elsewhere", 1, plan)
    events = [opened, *(ev.Noted(f"note {number} {'x' * 200}") for number in range(count - 1))]
    run_dir.mkdir()
    with (run_dir / "journal.jsonl").open("w") as file:
        for seq, event in enumerate(events, 1):
            line = {"seq": seq, "utc": "2026-01-01T00:00:00.000Z", "at": float(seq), **ev.encode(event)}
            file.write(json.dumps(line) + "\n")


# --- a damaged book ---------------------------------------------------------------------------------------------------


def test_who_waits_for_what_a_damaged_book_holds_is_told_what_to_do(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.become(FAILS)
    with Running(tmp_path, slurm, "--patience=0") as daemon:
        held = daemon.until(daemon.submit()["key"], "ended")
    key, jobid = held["key"], held["jobid"]
    (book,) = tmp_path.glob("state/allocations/*/journal.jsonl")
    lines = book.read_bytes().splitlines(keepends=True)
    book.write_bytes(b"".join([*lines[:-2], b"#" + lines[-2], lines[-1]]))
    advice = f"move {book.parent} away"

    def say(*words: str) -> tuple[int, str]:
        environ = {**daemon.env, "ALLOCD_SOCKET": daemon.path}
        done = subprocess.run(
            [ALLOCCTL, *words], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr

    with Running(tmp_path, slurm, "--patience=0") as daemon:
        for words in (("wait", key), ("wait", "-q", key), ("watch", key), ("watch", "--since=0", jobid)):
            code, told = say(*words)
            assert code == codes.UNVERIFIABLE and advice in told, (words, told)
        code, told = say("wait", jobid, "--patience=0")
        assert code == 7, told  # the disk and Slurm know
        assert key in say("list", "--state=damaged")[1]
        assert "damaged" in say("status", key)[1]
        assert advice in say("logs", "-f", key)[1]
    code, told = say("wait", key)
    assert code == codes.UNVERIFIABLE and advice in told  # nobody answers


# --- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small") as place:
        yield place


def test_on_a_full_disk_allocations_go_on_and_everything_is_in_the_books_when_there_is_room(
    slurm: FakeSlurm, small: Path, tmp_path: Path
) -> None:
    with Running(tmp_path, slurm, state=small) as daemon:
        key = daemon.submit()["key"]
        jobid = until(lambda: daemon.show(key)["slurm"] and daemon.show(key)["jobid"], "Slurm shows it")
        fill(small / "ballast")
        write_journal(daemon.base / jobid, jobid, 50)  # more than what is left of the book's last page
        until(lambda: daemon.show(key)["run_id"], "its run is seen")
        slurm.end(jobid, "FAILED", "7:0")
        assert daemon.until(key, "ended")["verdict"]["code"]  # known, though not on the disk
        until(lambda: daemon.health()["wrong"], "health tells of the disk")
        with pytest.raises(Refused) as refused:
            daemon.submit()
        assert refused.value.status == 507
        (small / "ballast").unlink()
        until(lambda: not daemon.health()["wrong"], "health tells that there is room again")
        slurm.become(FAILS)
        assert failed_by_7(daemon.until(daemon.submit()["key"], "ended"))
        events = daemon.events()
        assert whole(events)
        kept = [event["kind"] for event in events if event["key"] == key]
        assert (kept.count("record"), kept[-1]) == (50, "ended")
        ended = daemon.show(key)
    with Running(tmp_path, slurm, state=small) as daemon:
        assert daemon.show(key)["verdict"] == ended["verdict"]
        assert daemon.health()["wrong"] == []
