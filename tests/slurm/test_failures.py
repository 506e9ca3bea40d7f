"""The first failure: found at once, named, everybody else stopped because of it, and every log kept."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import SERVE, SLEEP, UP, Jobs, Run, alive, await_files, role, sh, touch

OTHERS = (0, 1, 3)
SLOW_TO_STOP = sh(f"trap 'sleep 0.5; {touch('ended')}; exit 0' TERM; echo rank $ALLOCD_RANK; {UP}; {SLEEP}")
"""A worker that needs half a second to end in order."""

DEATHS = {
    "exit 3": (sh("echo rank 2; exit 3"), 3, "exit"),
    "SIGSEGV": (sh("echo rank 2; kill -SEGV $$"), 139, "signal"),
    "no such command": (["/nowhere/engine"], 127, "not_started"),
}


def _times(run: Run, decisive: float) -> dict[int, float]:
    """When each of the others ended, in seconds after the failure."""
    return {rank: run.first("RankEnded", rank=rank)["at"] - decisive for rank in OTHERS}


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_at_once_stops_the_others_within_a_second(jobs: Jobs, death: str) -> None:
    """The third node's rank starts last, so that the others' handlers are there when it fails."""
    command, code, what = DEATHS[death]
    late = jobs.srun_wrapper(
        f'[ "$RANK" != 2 ] || until [ -e {jobs.directory}/go ]; do sleep 0.02; done; exec $SRUN "$@"'
    )
    plan = jobs.plan(
        {"worker": role("0-1,3", SLOW_TO_STOP), "bad": role(2, command)}, coordinator=0, run={"start": "each"}
    )
    run = jobs.start(plan, jobs.hold(), env=late)
    run.wait_file(*(f"up.{rank}" for rank in OTHERS))
    (jobs.directory / "go").touch()
    assert run.wait() == code, str(run)
    failed = run.first("RankRefused" if what == "not_started" else "RankEnded", rank=2)
    assert {line["seq"] for line in run.events("StopRank") if line["rank"] in OTHERS} == {failed["seq"]}
    times = _times(run, failed["at"])
    assert all(0.5 <= seconds < 1.5 for seconds in times.values()), times
    print(f"{death}: from the failure to the others' ends {max(times.values()) - 0.5:.3f} s and their 0.5 s")
    assert [run.file(f"ended.{rank}") for rank in OTHERS] == ["", "", ""], "a handler was not let finish"
    receipt = run.receipt()
    first = receipt["first_failure"]
    assert (first["rank"], first["code"], first["what"], first["provisional"]) == (2, code, what, False)
    assert [failure["rank"] for failure in receipt["failures"]] == [2]
    assert {(each["rank"], each["reason"]) for each in receipt["consequences"]} == {(r, "peer_failed") for r in OTHERS}
    assert [run.log(rank, "out") for rank in OTHERS] == [f"rank {rank}\n" for rank in OTHERS]
    assert run.log(2, "out") == ("" if what == "not_started" else "rank 2\n")
    assert run.processes() == []


def test_without_agents_the_first_failure_is_the_same(jobs: Jobs) -> None:
    bad = sh(f"echo rank 2; {await_files('up', *OTHERS)}; exit 3")
    roles = {"worker": role("0-1,3", SLOW_TO_STOP, agent="off"), "bad": role(2, bad, agent="off")}
    run = jobs.start(jobs.plan(roles, coordinator=0), jobs.hold())
    assert run.wait() == 3, str(run)
    receipt = run.receipt()
    assert (receipt["first_failure"]["rank"], receipt["first_failure"]["code"]) == (2, 3)
    assert {(each["rank"], each["reason"]) for each in receipt["consequences"]} == {(r, "peer_failed") for r in OTHERS}
    assert [run.file(f"ended.{rank}") for rank in OTHERS] == ["", "", ""], "a handler was not let finish"
    assert [run.log(rank, "out") for rank in range(4)] == [f"rank {rank}\n" for rank in range(4)]
    assert not [event["text"] for event in run.events("Noted") if "did not reach" in event["text"]]
    assert run.processes() == []


@pytest.mark.parametrize("after", ["", "exit 0"], ids=["exec", "a script that ends with 0"])
def test_no_rank_survives_an_engine_killed_by_sigkill(jobs: Jobs, after: str) -> None:
    """Not a child that left the session, nor a rank that ignores SIGTERM. The journal is whole, and nobody claims a
    success, even where Slurm does."""
    stubborn = sh(f"trap '' TERM; setsid sleep 1000 & sleep 1000 & {UP}; wait")
    run = jobs.submit(jobs.plan({"worker": role("0-3", stubborn)}, coordinator=0), after=after)
    run.wait_file(*(f"up.{rank}" for rank in range(4)))
    run.wait_events("RankStarted", 4)
    ranks = jobs.cluster.processes_with(f"ALLOCD_RUN_DIR={run.directory}\0")
    assert len(ranks) >= 12  # each a shell and two sleeps
    os.kill(run.engine, signal.SIGKILL)
    killed = time.monotonic()
    run.until(lambda: not any(map(alive, ranks)), "the ranks' end", limit=2.0)
    print(f"from the engine's SIGKILL to the end of the ranks: {time.monotonic() - killed:.3f} s")
    run.wait_gone()
    journal = run.journal()
    assert (journal.damage, journal.tail) == (None, False)
    assert sum(record.event.name == "RankStarted" for record in journal.records) == 4
    state, code = ("COMPLETED", 75) if after else ("FAILED", 137)
    assert run.job_end()["JobState"] == state
    verified = run.verify()
    assert verified.returncode == code, verified.stdout + verified.stderr
    sealed = run.receipt("receipt.json")
    assert sealed["run"]["engine_lost"] is True and sealed["run_sha256"] is None
    assert sealed["verdict"]["outcome"] == ("unverifiable" if after else "failure")


@pytest.mark.parametrize("bases", [1, 2], ids=["one directory", "two directories"])
def test_two_runs_in_one_allocation_do_not_touch_each_other(jobs: Jobs, bases: int) -> None:
    """The failing run's ranks have no agents: it stops them through Slurm, by the names of its steps."""
    allocation = jobs.hold()
    client = sh(f"{await_files('up', *OTHERS)}; until [ -e {jobs.directory}/other-is-over ]; do sleep 0.02; done")
    good = jobs.start(jobs.plan({"worker": role("0-1,3", SERVE), "client": role(2, client)}, coordinator=2), allocation)
    good.wait_file(*(f"up.{rank}" for rank in OTHERS))
    bad_client = sh(f"{await_files('up', *OTHERS)}; exit 3")
    roles = {"worker": role("0-1,3", SERVE, agent="off"), "client": role(2, bad_client, agent="off")}
    bad = jobs.start(jobs.plan(roles, coordinator=2), allocation, base=good.base if bases == 1 else None)
    assert bad.wait() == 3, str(bad)
    assert all(bad.file(f"ended.{rank}") is not None for rank in OTHERS)
    assert not good.events("RankEnded") and not good.events("AgentSignalled")
    (jobs.directory / "other-is-over").touch()
    assert good.wait() == 0, str(good)
    names = [{event["step_name"] for event in run.events("StepSpawned")} for run in (good, bad)]
    assert good.directory != bad.directory and not names[0] & names[1]
    codes = [(run.file(f".bench_done.{run.jobid}") or "").partition("\n")[0] for run in (good, bad)]
    assert codes == ["0", "3"]
    assert good.processes() == [] and bad.processes() == []


HOSTILE = {
    "SLURM_LABELIO": "1",
    "SLURM_STDOUTMODE": "/dev/null",
    "SLURM_STDERRMODE": "/dev/null",
    "SLURM_STDINMODE": "none",
    "SLURM_UNBUFFEREDIO": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x80",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_NTASKS": "9",
    "SLURM_NPROCS": "9",
    "SLURM_NTASKS_PER_NODE": "3",
    "SLURM_NTASKS_PER_CORE": "2",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_MEM_PER_CPU": "999999",
    "SLURM_DISTRIBUTION": "arbitrary",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_KILL_BAD_EXIT": "1",
    "SLURM_WAIT": "1",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_TIMELIMIT": "0:01",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "nowhere",
    "SLURM_STEP_NODELIST": "nowhere",
    "SLURM_CONSTRAINT": "nothing",
    "SLURM_HINT": "nomultithread",
    "SLURM_THREADS_PER_CORE": "64",
    "SLURM_REMOTE_CWD": "/nowhere",
    "SLURM_PROLOG": "/bin/false",
    "SLURM_TASK_PROLOG": "/bin/false",
    "SLURM_JOB_NAME": "a name|with a bar",
    "SLURM_DEBUG": "3",
}


def test_inherited_settings_and_a_noisy_prolog_change_nothing(jobs: Jobs, cluster: Cluster) -> None:
    noise = ["welcome to this site", '{"e": "ended", "code": 1}', "[1, 2]", "x" * 3000, "\x1b[1m\x07"]
    Path(cluster.directory, "noisy").write_text("".join(f"{line}\n" for line in noise))
    client = sh(f"echo measured; {await_files('up', *OTHERS)}")
    run = jobs.start(
        jobs.plan({"worker": role("0-1,3", SLOW_TO_STOP), "client": role(2, client)}, coordinator=2),
        jobs.hold(),
        env=HOSTILE,
    )
    assert run.wait() == 0, str(run)
    assert [run.log(rank, "out") for rank in range(4)] == ["rank 0\n", "rank 1\n", "measured\n", "rank 3\n"]
    foreign = [event for event in run.events("Noted") if event["rank"] is not None]
    assert {event["rank"] for event in foreign if "welcome to this site" in event["text"]} == {0, 1, 2, 3}
    receipt = run.receipt()
    assert receipt["failures"] == [] and receipt["doubts"] == []
