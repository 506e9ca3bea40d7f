"""The cluster that other tests stand on: it works, it is alone, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import keeper
from tests.cluster import NODES, Cluster, ClusterError

_ROOT = Path(__file__).parents[2]

# Starts a cluster and an srun whose tasks each have a child that leaves the session; says where, and waits.
_OWNER = """
import subprocess, sys
from tests.cluster import Cluster
cluster = Cluster()
cluster.start()
jobs = cluster.directory / "jobs"
task = "setsid sleep 1000 & touch up.$SLURMD_NODENAME; wait"
subprocess.Popen(["srun", "--nodes=4", "sh", "-c", task], env=cluster.env, cwd=jobs)
cluster.wait_for(lambda: len(list(jobs.glob("up.*"))) == 4, "four tasks")
print(cluster.directory, cluster.keeper_pid, flush=True)
sys.stdin.read()
"""


def _wait_gone(directory: Path, pid: int, seconds: float = 70) -> None:
    """Returns when the keeper has ended; what it should have taken down is looked for by the caller."""
    with contextlib.suppress(ProcessLookupError):
        life = os.pidfd_open(pid)
        try:
            assert select.select([life], [], [], seconds)[0], f"the keeper of {directory} lives on"
        finally:
            os.close(life)


def test_a_job_on_four_nodes_is_recorded_as_completed(cluster: Cluster) -> None:
    job = cluster.sbatch("srun sh -c 'echo \"on $SLURMD_NODENAME\"'", "--nodes=4")
    record = cluster.wait_state(job, "COMPLETED")
    assert (record["ExitCode"], record["NodeList"]) == ("0:0", "node[1-4]")
    assert sorted(cluster.output(job).splitlines()) == [f"on {node}" for node in NODES]
    rows = (f"{job}", f"{job}.batch", f"{job}.0")
    completed = dict.fromkeys(rows, ("COMPLETED", "0:0"))
    cluster.wait_for(lambda: cluster.sacct(job) == completed, "accounting's rows")


def test_a_failing_job_keeps_its_exit_code(cluster: Cluster) -> None:
    job = cluster.sbatch("exit 7")
    assert cluster.wait_state(job, "FAILED")["ExitCode"] == "7:0"
    with pytest.raises(ClusterError, match=rf"(?s)job {job} is not COMPLETED after 0 s.*FAILED.*slurmctld.log"):
        cluster.wait_state(job, "COMPLETED", timeout=0)


def test_a_noisy_prolog_prints_into_the_task(cluster: Cluster) -> None:
    quiet = cluster.run(["srun", "echo", "task"], check=True).stdout
    (cluster.directory / "noisy").write_text("banner one\nbanner two\n")
    noisy = cluster.run(["srun", "echo", "task"], check=True).stdout
    assert (quiet, noisy) == ("task\n", "banner one\nbanner two\ntask\n")


def test_a_higher_partition_preempts_a_lower_one(cluster: Cluster) -> None:
    low = cluster.sbatch("sleep 1000", "--partition=low", "--nodes=4", "--exclusive")
    cluster.wait_state(low, "RUNNING")
    high = cluster.sbatch("true", "--partition=high", "--nodes=4", "--exclusive")
    cluster.wait_state(high, "COMPLETED")
    record = cluster.wait_state(low, {"PENDING", "RUNNING"})
    assert record["Restarts"] == "1"


def test_a_node_whose_slurmd_died_fails_its_job_and_comes_back(cluster: Cluster) -> None:
    job = cluster.sbatch("srun sh -c 'echo up; exec sleep 1000'", "--nodelist=node[1-2]", "--no-requeue")
    cluster.wait_for(lambda: cluster.output(job).count("up\n") == 2, "both tasks")
    cluster.kill_slurmd("node2")
    cluster.wait_state(job, "NODE_FAIL", timeout=60)
    cluster.start_slurmd("node2")
    assert cluster.run(["srun", "--nodelist=node2", "true"]).returncode == 0


def test_accounting_goes_and_comes_back(cluster: Cluster) -> None:
    cluster.stop_slurmdbd()
    job = cluster.sbatch("exit 3")
    cluster.wait_state(job, "FAILED")
    assert cluster.run(["sacct", f"--jobs={job}"]).returncode == 1
    cluster.start_slurmdbd()
    cluster.wait_for(lambda: cluster.sacct(job).get(f"{job}") == ("FAILED", "3:0"), "the late record", 60)


def test_jobs_outlive_a_restart_of_slurmctld(cluster: Cluster) -> None:
    flag = cluster.directory / "jobs" / "go"
    job = cluster.sbatch(f"until [ -e {flag} ]; do sleep 0.1; done")
    cluster.wait_state(job, "RUNNING")
    cluster.stop_slurmctld()
    assert cluster.run(["scontrol", "ping"], timeout=60).returncode != 0
    cluster.start_slurmctld()
    flag.touch()
    assert cluster.wait_state(job, "COMPLETED")["ExitCode"] == "0:0"


def test_a_second_cluster_runs_beside_the_first_and_leaves_nothing(cluster: Cluster) -> None:
    with Cluster(extra="# a second one") as other:
        assert other.directory != cluster.directory
        assert "# a second one" in (other.directory / "slurm.conf").read_text()
        for each in (cluster, other):
            shown = each.run(["srun", "sh", "-c", "echo $SLURM_CLUSTER_NAME"], check=True).stdout
            assert shown == f"{each.name}\n"
        other.sbatch("setsid sleep 1000 & sleep 1000")
        assert len(other.processes_with(str(other.directory))) >= 9
        pid = other.keeper_pid
        assert pid is not None
    assert not other.directory.exists()
    assert cluster.processes_with(str(other.directory)) == []
    assert not Path(f"/proc/{pid}").exists()
    assert cluster.run(["srun", "--nodes=4", "true"]).returncode == 0


def test_a_daemon_that_does_not_start_is_named_and_nothing_stays() -> None:
    broken = Cluster(extra="SelectType=select/nonsense")
    with pytest.raises(ClusterError, match=r"slurmctld ended with 1 (?s:.*)select/nonsense"):
        broken.start()
    assert not broken.directory.exists()
    assert keeper.processes_with(str(broken.directory)) == []
    assert broken.keeper_pid is None


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that has started a cluster, with a job and an srun, and that does not clean up."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _OWNER], cwd=_ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_nothing_stays_when_the_owner_is_killed(owner: subprocess.Popen[str], victim: str) -> None:
    assert owner.stdout is not None
    where, pid = owner.stdout.readline().split()
    directory, keeper_pid = Path(where), int(pid)
    sleepers = set(keeper.processes_with("sleep\0001000", ("cmdline",)))
    assert len(sleepers & keeper.descendants(keeper_pid)) == len(NODES)
    if victim == "owner":
        owner.kill()
    else:
        os.kill(keeper_pid, signal.SIGTERM)
    _wait_gone(directory, keeper_pid)
    assert not directory.exists()
    assert keeper.processes_with(where) == []


def test_the_daemons_go_with_a_killed_keeper() -> None:
    lone = Cluster()
    lone.start()
    pid = lone.keeper_pid
    assert pid is not None
    daemons = keeper.descendants(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while daemons & set(keeper.processes_with(str(lone.directory))):
        assert time.monotonic() < deadline
    with pytest.raises(ClusterError, match="ended with -9"):
        lone.stop()
    assert not lone.directory.exists()
