"""`allocctl submit --wait` and `allocctl wait` on the real cluster, as people and CI jobs use them: what is told on the
way, and the exit code at the end, however the job ends and whatever becomes of Slurm meanwhile."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import ALLOCCTL, LIMIT, SERVE, SLEEP, UP, Jobs, Run, await_files, role, sh, until


class Waiting:
    """One `allocctl` that waits; what it prints goes to files."""

    def __init__(self, jobs: Jobs, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.place = jobs.directory / f"wait-{len(list(jobs.directory.glob('wait-*')))}"
        self.place.mkdir()
        with self.path("stdout").open("wb") as out, self.path("stderr").open("wb") as err:
            self.process = subprocess.Popen(
                [ALLOCCTL, *arguments],
                env={**jobs.env, **(env or {})},
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def path(self, name: str) -> Path:
        return self.place / name

    @property
    def stdout(self) -> str:
        return self.path("stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.path("stderr").read_text(errors="replace")

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1]

    @property
    def jobid(self) -> int:
        """The job's id, which is printed first."""
        return int(until(lambda: re.match(r"(\d+)\n", self.stdout), "the id", about=self)[1])  # type: ignore[index]

    def says(self, text: str, limit: float = LIMIT) -> None:
        """Wait until it has told something on stderr."""
        until(lambda: text in self.stderr, f"{text!r}", limit, about=self)

    def prints(self, text: str, limit: float = LIMIT) -> None:
        """Wait until it has printed something on stdout."""
        until(lambda: text in self.stdout, f"{text!r}", limit, about=self)

    def end(self, limit: float = LIMIT) -> int:
        """Its exit code."""
        until(lambda: self.process.poll() is not None, "its end", limit, about=self)
        assert "Traceback" not in self.stderr, self.stderr
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def base(self) -> Path:
        """Where run directories are made."""
        return self.place.parent / "runs"

    def __str__(self) -> str:
        return f"\n--- stdout:\n{self.stdout}\n--- stderr:\n{self.stderr}"


class Waits:
    """The waits of one test."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.all: list[Waiting] = []

    def start(self, *arguments: str, **more: Any) -> Waiting:
        """`allocctl`, with any verb."""
        self.all.append(Waiting(self.jobs, *arguments, **more))
        return self.all[-1]

    def wait(self, *arguments: str, **more: Any) -> Waiting:
        """`allocctl wait`."""
        return self.start("wait", *arguments, **more)

    def submit(self, plan: Path, *arguments: str, sbatch: tuple[str, ...] = (), **more: Any) -> Waiting:
        """`allocctl submit --wait`."""
        words = (
            "submit",
            "--wait",
            *arguments,
            "--dir",
            str(self.base),
            str(plan),
            *(("--", *sbatch) if sbatch else ()),
        )
        return self.start(*words, **more)

    @property
    def base(self) -> Path:
        return self.jobs.directory / "runs"

    def run_of(self, waiting: Waiting) -> Run:
        """The (only) run of what was submitted."""
        return Run(self.jobs, waiting.jobid, self.base)

    def close(self) -> None:
        for waiting in self.all:
            waiting.close()


@pytest.fixture
def waits(jobs: Jobs) -> Iterator[Waits]:
    it = Waits(jobs)
    yield it
    it.close()


def serving(jobs: Jobs, script: str, nodes: int = 2, **tables: Any) -> Path:
    """A plan of one worker that serves, and a coordinator that does `script` when the worker is up."""
    roles = {"server": role(0, SERVE), "client": role(1, sh(f"{await_files('up', 0)}; {script}"))}
    return jobs.plan(roles, coordinator=1, nodes=nodes, **tables)


def test_success_and_failure(jobs: Jobs, waits: Waits) -> None:
    """Two jobs at once: the story on stderr, the coordinator's log on stdout, the proven code."""
    good = waits.submit(serving(jobs, "echo one; sleep 1; echo two; echo three >&2"), "--collect", "results")
    bad = waits.submit(serving(jobs, "echo before; echo reason >&2; exit 7"))
    other = waits.wait(str(bad.jobid), "--json")
    assert good.end() == 0, good
    job = good.jobid
    lines = ["rank-1.client.out: one", "rank-1.client.out: two", "rank-1.client.err: three"]
    assert sorted(good.stdout.splitlines()) == sorted([str(job), *lines])
    assert re.search(rf"allocctl: {job}: (PENDING|CONFIGURING|RUNNING)", good.stderr), good
    assert f"allocctl: run {job} in {waits.base}/{job}" in good.stderr
    assert "rank 1 ended with code 0" in good.stderr
    assert re.fullmatch(rf"allocctl: {job}: success: .* \[exit 0, origin \w+\]", good.last_line), good
    receipt = json.loads((waits.base / f"{job}/receipt.json").read_text())
    assert receipt["verdict"]["final"] is True
    collected = good.path("results")
    assert (collected / f"{job}/receipt.json").read_bytes() == (waits.base / f"{job}/receipt.json").read_bytes()
    assert (collected / f"{job}/logs/rank-1.client.out").read_text() == "one\ntwo\n"
    assert (collected / f"slurm-{job}.out").exists()
    assert good.path(f"slurm_job_{job}_outcome.txt").read_text().startswith(f"{job}|COMPLETED|0:0|")

    assert bad.end() == 7, bad
    assert "first failure: rank 1 (client)" in bad.stderr
    assert "the end of logs/rank-1.client.err:\n    reason" in bad.stderr
    assert bad.last_line.endswith("[exit 7, origin native]"), bad
    assert other.end() == 7
    document = json.loads(other.stdout)
    assert document["kind"] == "sealed"
    assert document["verdict"]["code"] == 7
    assert document["jobid"] == str(bad.jobid)

    again = waits.wait(str(bad.jobid), "-q")
    assert again.end() == 7
    assert again.stdout == ""
    assert again.stderr.splitlines() == [bad.last_line]


# --- how jobs end ----------------------------------------------------------------------------------------------------


def alone(jobs: Jobs, script: str, **tables: Any) -> Path:
    """A plan of one rank."""
    return jobs.plan({"client": role(0, sh(script))}, coordinator=0, nodes=1, **tables)


SERVING = f"trap 'exit 0' TERM; {UP}; echo up; {SLEEP}"


@pytest.fixture(scope="module")
def fates(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Waiting]]:
    """Jobs that end in as many ways, all at the same time, with what happens to them; each test looks at one."""
    jobs = Jobs(cluster, tmp_path_factory.mktemp("fates"))
    waits = Waits(jobs)
    elsewhere = ("--exclude=node4",)
    twice = f"case $ALLOCD_RUN_DIR in *.r1) echo second; exit 5;; esac; echo first; {SERVING}"
    eighth = [*sh('task=${1#*_}; echo "task $task"; case $task in 2|5) exit $((10 + task));; esac'), "sh", "{jobid}"]
    found = {
        "cancelled": waits.submit(alone(jobs, SERVING), sbatch=elsewhere),
        "timeout": waits.submit(alone(jobs, f"{UP}; echo up; {SLEEP}"), sbatch=elsewhere),
        "node lost": waits.submit(serving(jobs, SERVING), sbatch=("--nodelist=node3,node4",)),
        "requeued": waits.submit(alone(jobs, twice, slurm={"requeue": True}), sbatch=elsewhere),
        "no allocctl": waits.submit(alone(jobs, "true"), "--allocctl", "/nowhere/allocctl", sbatch=elsewhere),
        "array": waits.submit(
            jobs.plan({"client": role(0, eighth)}, coordinator=0, nodes=1),
            sbatch=(*elsewhere, "--array=0-7"),
        ),
    }
    for name in ("cancelled", "timeout", "node lost", "requeued"):
        found[name].prints(": up\n")
    found["timeout"].says("Slurm's time limit is")  # it has read the one that is about to change
    for argv in (  # Slurm looks every 30 s: a look that fell before EndTime would send the early signal, and no more
        ["scancel", str(found["cancelled"].jobid)],
        ["scontrol", "update", f"JobId={found['timeout'].jobid}", "EndTime=now"],
        ["scontrol", "requeue", str(found["requeued"].jobid)],
    ):
        cluster.run(argv, check=True)
    cluster.kill_slurmd("node4")
    for waiting in found.values():
        waiting.end(120)
    yield found
    waits.close()
    jobs.close()


def test_cancelled_by_another_shell(fates: dict[str, Waiting]) -> None:
    it = fates["cancelled"]
    assert it.end() == 130, it
    assert "CANCELLED" in it.last_line and it.last_line.endswith("[exit 130, origin slurm]"), it


def test_the_time_limit(fates: dict[str, Waiting]) -> None:
    it = fates["timeout"]
    assert it.end() == 124, it
    assert "TIMEOUT" in it.last_line and it.last_line.endswith("[exit 124, origin slurm]"), it


def test_a_lost_node(fates: dict[str, Waiting]) -> None:
    it = fates["node lost"]
    assert it.end() == 1, it
    assert "NODE_FAIL" in it.last_line and it.last_line.endswith("[exit 1, origin slurm]"), it


def test_a_requeued_job(fates: dict[str, Waiting]) -> None:
    """The first attempt's end is not the job's; each attempt has its own directory and logs."""
    it = fates["requeued"]
    assert it.end() == 5, it
    assert it.last_line.endswith("[exit 5, origin native]")
    job = it.jobid
    assert f"{job}: Slurm has put the job into the queue again: attempt 2 follows" in it.stderr
    first, second = it.base / str(job), it.base / f"{job}.r1"
    assert [line for line in it.stdout.splitlines()[1:] if "client.out" in line] == [
        "rank-0.client.out: first",
        "rank-0.client.out: up",
        f"{job}.r1/rank-0.client.out: second",
    ]
    assert (first / "logs/rank-0.client.out").read_text() == "first\nup\n"
    assert (second / "logs/rank-0.client.out").read_text() == "second\n"
    assert (first / "receipt.run.json").exists() and not (first / "receipt.json").exists()
    assert json.loads((second / "receipt.json").read_text())["verdict"]["code"] == 5


def test_the_attempts_of_a_requeued_job(jobs: Jobs, waits: Waits) -> None:
    """Its id means the last one, whose code is the job's; the first is told as what it is, and judged as the job."""
    twice = f"case $ALLOCD_RUN_DIR in *.r1) exit 0;; esac; {SERVING}"
    it = waits.submit(alone(jobs, twice, slurm={"requeue": True}))
    it.prints(": up\n")
    jobs.cluster.run(["scontrol", "requeue", str(it.jobid)], check=True)
    assert it.end(90) == 0, it
    job, first = it.jobid, it.base / str(it.jobid)
    assert jobs.allocctl("status", str(job)).stdout.startswith(f"{job}.r1 ")
    for name in (f"{job}.r0", str(first)):
        told = jobs.allocctl("status", name).stdout
        assert told.startswith(f"{job} ") and f"an earlier attempt of job {job}: the last one is {job}.r1" in told
        assert "seals" not in told
    done = jobs.allocctl("verify", "--json", str(first))
    assert (done.returncode, json.loads(done.stdout)["run_id"]) == (0, f"{job}.r1")
    assert "is an earlier attempt" in done.stderr


def test_a_run_directory_that_is_moved_away(jobs: Jobs, waits: Waits) -> None:
    it = waits.submit(alone(jobs, f"{UP}; mv $ALLOCD_RUN_DIR {jobs.directory}/away; sleep 1; exit 7"))
    code = it.end(90)
    assert code not in (0, 75), it
    assert f"the run directory {it.base / str(it.jobid)} is gone" in it.stderr, it
    assert it.last_line.endswith(f"[exit {code}, origin slurm]"), it
    assert jobs.allocctl("verify", "--json", str(it.jobid)).returncode == code


def test_a_job_that_ends_before_it_made_a_log(fates: dict[str, Waiting]) -> None:
    it = fates["no allocctl"]
    assert it.end() == 78, it
    assert "ended before it made a run: Slurm says FAILED" in it.stderr, it
    assert "/nowhere/allocctl is not there on node" in it.stderr, it
    assert it.last_line.endswith("[exit 78, origin slurm]"), it


def test_a_job_without_a_run_is_told_and_has_a_receipt(jobs: Jobs, waits: Waits) -> None:
    it = waits.submit(alone(jobs, "true"), sbatch=("--hold",))
    it.says("PENDING (JobHeldUser)")
    job = str(it.jobid)
    assert "no run is known here" in jobs.allocctl("status", job).stdout
    assert jobs.allocctl("receipt", job).returncode == 75
    jobs.cluster.run(["scancel", job], check=True)
    assert it.end() == 130, it
    done = jobs.allocctl("receipt", job)
    assert (done.returncode, json.loads(done.stdout)["verdict"]["code"]) == (0, 130)
    assert "failure, exit code 130 (slurm)" in jobs.allocctl("explain", job).stdout


def test_an_array_with_failures(fates: dict[str, Waiting]) -> None:
    it = fates["array"]
    job = it.jobid
    assert it.end() == 12, it
    assert it.stdout == f"{job}\n", "logs are for those who ask for them"
    assert f"{job}_5: FAILED 15:0" in it.stderr
    assert "6 of 8 tasks succeeded" in it.last_line and f"{job}_2" in it.last_line, it
    assert it.last_line.endswith("[exit 12, origin native]")
    sealed = sorted(path.parent.name for path in it.base.glob(f"{job}_*/receipt.json"))
    assert sealed == [f"{job}_{task}" for task in range(8)]


# --- leaving ---------------------------------------------------------------------------------------------------------


def test_whoever_leaves_before_the_end(jobs: Jobs, waits: Waits, cluster: Cluster) -> None:
    """Jobs that are held, so that they would wait for ever: one leaves and says how to come back, one cancels first."""
    left, cancelled, late = (
        waits.submit(alone(jobs, "true"), *options, sbatch=("--hold",))
        for options in ((), ("--cancel-on-interrupt",), ("--timeout", "1.5", "--json"))
    )
    for waiting in (left, cancelled, late):
        waiting.says(f"{waiting.jobid if waiting is not late else ''}: PENDING (JobHeldUser)")
    left.process.send_signal(signal.SIGINT)
    cancelled.process.send_signal(signal.SIGTERM)
    assert left.end() == 79, left
    assert f"job {left.jobid} goes on: pick it up with `allocctl wait {left.jobid}`" in left.last_line
    assert left.last_line.endswith("[exit 79, origin allocd]")
    assert cluster.job(left.jobid)["JobState"] == "PENDING"
    assert cancelled.end() == 130, cancelled
    assert f"job {cancelled.jobid} is cancelled" in cancelled.stderr
    assert "the job ended before it made a run: Slurm says CANCELLED" in cancelled.stderr
    assert cancelled.last_line.endswith("[exit 130, origin slurm]")
    assert late.end() == 79, late
    assert json.loads(late.stdout)["exit"] == 79
    assert "goes on" in late.last_line

    again = waits.wait(str(left.jobid))
    again.says(f"{left.jobid}: PENDING (JobHeldUser)")
    cluster.run(["scontrol", "release", str(left.jobid)], check=True)
    assert again.end() == 0, again


def test_an_interrupt_while_sbatch_runs_cancels_the_job_too(jobs: Jobs, waits: Waits, cluster: Cluster) -> None:
    tools = jobs.directory / "bin"
    tools.mkdir()
    real = shutil.which("sbatch", path=jobs.env["PATH"])
    (tools / "sbatch").write_text(f'#!/bin/sh\n: >{tools}/asked\nsleep 1\nexec {real} "$@"\n')
    (tools / "sbatch").chmod(0o755)
    env = {"PATH": os.pathsep.join([str(tools), jobs.env["PATH"]])}
    it = waits.submit(alone(jobs, "true"), "--cancel-on-interrupt", "--json", sbatch=("--hold",), env=env)
    until((tools / "asked").exists, "sbatch", about=it)
    it.process.send_signal(signal.SIGINT)
    assert it.end() == 130, it
    document = json.loads(it.stdout)
    assert document["verdict"]["code"] == 130
    assert cluster.job(int(document["jobid"]))["JobState"] == "CANCELLED"


# --- Slurm in trouble ------------------------------------------------------------------------------------------------


def test_the_controller_is_killed_in_the_middle(jobs: Jobs, waits: Waits, cluster: Cluster) -> None:
    """While it is away the journal still tells, and nothing is concluded."""
    go = jobs.directory / "go"
    it = waits.submit(serving(jobs, f"echo up; until [ -e {go} ]; do sleep 0.1; done; echo done"))
    it.prints(": up\n")
    up, state = time.time(), cluster.directory / "state/job_state"
    # A controller that was killed before it had saved the job calls it CANCELLED when it is back.
    cluster.run(["scontrol", "update", f"JobId={it.jobid}", "Comment=changed"], check=True)
    until(lambda: state.stat().st_mtime > up, "the controller to save its state")
    cluster.kill_slurmctld()
    it.says("Slurm cannot be asked", 60)
    go.touch()
    it.prints(": done\n")
    it.says("rank 1 ended with code 0")
    assert it.process.poll() is None
    cluster.start_slurmctld()
    assert it.end(90) == 0, it
    assert "Slurm answers again" in it.stderr
    assert it.stderr.count("Slurm cannot be asked") <= 2, it


def test_accounting_is_down_from_start_to_end(jobs: Jobs, waits: Waits, cluster: Cluster) -> None:
    cluster.stop_slurmdbd()
    it = waits.submit(serving(jobs, "exit 7"))
    assert it.end() == 7, it
    assert "accounting could not be asked; the controller's record decides" in it.stderr


# --- where no events come --------------------------------------------------------------------------------------------


@pytest.fixture
def mirror(jobs: Jobs) -> Iterator[Path]:
    """The directory of all runs, as a client sees it that remembers missing names for 20 s and gets no events. It asks
    for a file's size when it is opened, as NFS does; of FUSE that is not to be had, so the size is forgotten soon."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    here, there = jobs.directory / "runs", jobs.directory / "mirror"
    here.mkdir()
    there.mkdir()
    cached = "negative_timeout=20,entry_timeout=20,attr_timeout=0.2"
    if subprocess.run(["bindfs", "-o", cached, here, there], check=False).returncode:
        pytest.skip("this user may not mount")
    yield there
    subprocess.run(["fusermount", "-u", there], check=True)


def test_everything_is_seen_where_no_events_come(jobs: Jobs, waits: Waits, cluster: Cluster, mirror: Path) -> None:
    """From before the run's directory is made to the receipt, which is sealed from there."""
    submitted = jobs.allocctl("submit", "--dir", str(waits.base), str(serving(jobs, LATER)), "--", "--hold")
    job = submitted.stdout.strip()
    assert not (mirror / "asked").exists()
    (waits.base / "asked").touch()
    assert not (mirror / "asked").exists(), "this mount forgets: the test shows nothing"
    state = {"XDG_STATE_HOME": str(jobs.directory / "other-state"), "ALLOCD_RUNS": str(mirror)}
    it = waits.wait(job, env=state)
    it.says("PENDING (JobHeldUser)")
    cluster.run(["scontrol", "release", job], check=True)
    it.says(f"allocctl: run {job} in {waits.base}/{job}")
    it.prints("rank-1.client.out: one\n")
    (waits.base / job / "go").touch()
    assert it.end() == 3, it
    assert it.stdout.splitlines() == [f"rank-1.client.out: {text}" for text in ("one", "two", "three")]
    assert json.loads((mirror / job / "receipt.json").read_text())["verdict"]["code"] == 3


LATER = "echo one; until [ -e $ALLOCD_RUN_DIR/go ]; do sleep 0.05; done; echo two; printf three; exit 3"


def test_a_heterogeneous_job(jobs: Jobs, waits: Waits) -> None:
    """One run on all components; it is judged by all of their records."""
    components = [{"nodes": 1}, {"nodes": 1}]
    it = waits.submit(serving(jobs, "echo one; exit 4", slurm={"components": components}))
    assert it.end() == 4, it
    job = it.jobid
    assert it.stdout.splitlines() == [str(job), "rank-1.client.out: one"]
    assert f"{job}+1: " in it.stderr
    sealed = json.loads((waits.base / f"{job}/receipt.json").read_text())
    assert [part["jobid"] for part in sealed["components"]] == [f"{job}+0", f"{job}+1"]


# --- logs ------------------------------------------------------------------------------------------------------------


def test_logs_of_a_job_that_has_no_run_yet(jobs: Jobs, waits: Waits, cluster: Cluster) -> None:
    """They are waited for, and followed until the job is over."""
    job = jobs.allocctl("submit", "--dir", str(waits.base), str(serving(jobs, LATER)), "--", "--hold").stdout.strip()
    it = waits.start("logs", "-f", job, "--rank", "1", "--kind", "out")
    it.says(f"{job}: PENDING (JobHeldUser)")
    cluster.run(["scontrol", "release", job], check=True)
    it.prints("rank-1.client.out: one\n")
    log = waits.base / job / "logs/rank-1.client.out"
    log.rename(log.with_suffix(".out.1"))
    (waits.base / job / "go").touch()
    assert it.end() == 0, it
    assert it.stdout.splitlines() == [f"rank-1.client.out: {text}" for text in ("one", "two", "three")]
