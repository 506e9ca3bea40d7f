"""The real daemon in a process of its own, with small programs in the place of Slurm's commands: it is killed at any
moment and started again, and what was accepted comes to its end, once."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor import __version__
from tests.service.host import ALLOCD, LIMIT, Host
from tests.service.running import until

FAKE = """#!/usr/bin/python3 -S
# Slurm with jobs that run for {seconds} s and fail with 7. A job is a file: jobs/ID holds its script and when it began.
import os, sys, time
top, user, name = {top!r}, {user!r}, os.path.basename(sys.argv[0])
def jobs():
    for job in sorted(os.listdir(top + "/jobs"), key=int):
        yield job, open(top + "/jobs/" + job).read(), os.stat(top + "/jobs/" + job).st_mtime
def over(begun): return time.time() - begun > {seconds}
if name == "sbatch":
    number = 100
    while True:
        number += 1
        try:
            fd = os.open(top + "/jobs/" + str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            break
        except FileExistsError:
            pass
    os.write(fd, sys.argv[-1].encode())
    open(top + "/submitted-in", "w").write(os.getcwd())
    print(number)
elif name == "squeue":
    form = " ".join(sys.argv)
    if "%o" in form:
        for job, script, begun in jobs():  # those that have ended as well: the controller remembers them for a while
            print(job + "|" + script)
    else:
        for job, script, begun in jobs():
            state = "FAILED" if over(begun) else "RUNNING"
            print("|".join([job, job, state, str(int(begun)), "N/A", "N/A", "1000", "0", "None", ""]))
elif name == "sacct":
    if "SubmitLine" not in " ".join(sys.argv):
        for job, script, begun in jobs():
            state, code, end = ("FAILED", "7:0", str(int(begun) + 1)) if over(begun) else ("RUNNING", "0:0", "Unknown")
            row = [job, state, code, "0:0", job, str(int(begun)), str(int(begun)), end, user, "c", "node1"]
            print("|".join(row))
else:
    sys.stderr.write("slurm_load_jobs error: Invalid job id specified\\n")
    sys.exit(1)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "run").mkdir(mode=0o700)
    program = FAKE.format(top=str(tmp_path), user=getpass.getuser(), seconds=1.0)
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel"):
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "PYTHONPATH": os.getcwd(),
    }
    made = Host(tmp_path, environ, tmp_path / "run" / "allocd" / "ctl.sock")
    yield made
    if made.process is not None:
        made.end(signal.SIGKILL)


@pytest.mark.slow
def test_it_holds_allocations_and_ends_in_order(host: Host) -> None:
    host.start("--log-level", "info")
    key = host.submit("one")
    [held] = host.until_all_ended(1)
    assert (held["key"], held["jobid"], held["verdict"]["code"]) == (key, "101", 7)
    other = subprocess.run(ALLOCD, env=host.environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert other.returncode == 69
    assert f"is held by an allocd already: process {host.process and host.process.pid} on" in other.stderr
    (host.top / "config" / "allocd").mkdir(parents=True)
    (host.top / "config" / "allocd" / "allocd.toml").write_text("limit = 3")
    assert host.process is not None
    host.process.send_signal(signal.SIGHUP)
    until(lambda: host.ask("GET", "/v1/health")["limit"] == 3, "its settings are read again")
    code, said = host.end()
    assert code == 0, said
    outcome = "slurm_job_101_outcome.txt"
    assert [path.parent.parent.name for path in host.top.rglob(outcome)] == ["base"], "a daemon has no workspace"
    assert [json.loads(line)["event"] for line in said.splitlines()][-1] == "ended"
    host.start()
    assert host.get(key)["verdict"]["code"] == 7


@pytest.mark.slow
def test_it_answers_while_its_settings_are_read_and_reads_them_once_more_if_asked_meanwhile(host: Host) -> None:
    host.start()
    assert host.process is not None
    path = host.top / "config" / "allocd" / "allocd.toml"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # a file system that takes its time
    host.process.send_signal(signal.SIGHUP)
    with path.open("w") as file:  # until it is being read
        assert host.ask("GET", "/v1/health")["limit"] == 100
        host.process.send_signal(signal.SIGHUP)
        path.with_suffix(".new").write_text("limit = 4")
        path.with_suffix(".new").rename(path)
        file.write("limit = 3")
    until(lambda: host.ask("GET", "/v1/health")["limit"] == 4, "the second is not lost")
    assert host.end()[0] == 0


@pytest.mark.slow
def test_where_it_was_started_may_be_removed(host: Host) -> None:
    place = host.top / "place"
    place.mkdir()
    (place / "own.toml").write_text("limit = 3")
    host.words = ("env", f"--chdir={place}")
    host.start("--config", "own.toml")
    assert host.process is not None and os.readlink(f"/proc/{host.process.pid}/cwd") == "/"
    shutil.rmtree(place)
    host.submit("one")
    assert host.until_all_ended(1)[0]["verdict"]["code"] == 7
    assert (host.top / "submitted-in").read_text() == str(host.top), "where the one was who submitted"
    place.mkdir()
    (place / "own.toml").write_text("limit = 4")
    host.process.send_signal(signal.SIGHUP)
    until(lambda: host.ask("GET", "/v1/health")["limit"] == 4, "a path that was relative still means the same file")


@pytest.mark.slow
def test_a_full_disk_below_its_log_ends_nothing(host: Host) -> None:
    host.words = ("sh", "-c", 'exec "$@" 2>/dev/full', "sh")
    host.start()
    for number in range(8):
        host.submit(f"{number}")
    assert [held["verdict"]["code"] for held in host.until_all_ended(8)] == [7] * 8
    said = [*host.words, *ALLOCD]
    assert subprocess.run(said, env=host.environ, timeout=LIMIT, check=False).returncode == 69, "nor changes its code"
    assert host.end()[0] == 0


@pytest.mark.slow
def test_killed_at_any_moment_it_loses_nothing(host: Host) -> None:
    keys = {}
    for number in range(8):
        host.start()
        keys[f"{number}"] = host.submit(f"{number}")
        time.sleep(number * 0.02)  # another moment each time; none is the one that matters
        host.end(signal.SIGKILL)
    host.start()
    held = host.until_all_ended(8)
    assert {each["key"] for each in held} == set(keys.values())
    assert all(host.submit(given) == key for given, key in keys.items()), "known by their idempotency keys"
    scripts = Counter(path.read_text() for path in (host.top / "jobs").iterdir())
    assert set(scripts.values()) == {1}, "no script was submitted twice"
    known = {each["jobid"] for each in held}
    assert known == {path.name for path in (host.top / "jobs").iterdir()}, "no job that nobody follows"
    assert [each["verdict"]["code"] for each in held] == [7] * 8


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--limit", "0"], 78, "--limit: found 0; expected an integer, 1..100000"),
        (["--config", "/nowhere"], 78, "/nowhere: no such file"),
        (["--limitt", "3"], 78, "unrecognized arguments: --limitt 3 (`allocd --help` tells what there is)"),
        (["--version"], 0, f"allocd {__version__}"),
    ],
)
def test_what_it_says_before_it_starts(host: Host, words: list[str], code: int, text: str) -> None:
    done = subprocess.run(
        [*ALLOCD, *words], env=host.environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == code
    assert text in done.stdout + done.stderr


@pytest.mark.slow
def test_a_link_in_place_of_the_state_directory_is_refused(host: Host) -> None:
    hosts = host.top / "state" / "allocd" / "hosts"
    hosts.mkdir(parents=True)
    (hosts / socket.gethostname()).symlink_to("/tmp")
    done = subprocess.run(ALLOCD, env=host.environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 78
    assert "is a symbolic link" in done.stderr
