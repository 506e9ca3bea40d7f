"""Files on the nodes' own disks, on the real cluster: fetched by the agents of ranks or by steps of their own, after
failures too, and when the job is cancelled. (All nodes are one host here: a name in the path tells each one's disk.)"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.jobs import UP, Event, Jobs, Run, await_files, role, sh, touch

CHILD = 'sleep 1000 & until read -r name <"/proc/$!/comm" && [ "$name" = sleep ]; do :; done'


def writer(disk: Path, then: str = "wait") -> list[str]:
    """A worker that writes on its node's own disk, and once more when it is told to end."""
    own = f"{disk}/$ALLOCD_NODE"
    last = f"echo last >{own}/last.txt; {touch('ended')}; exit 0"
    return sh(f"mkdir -p {own}; trap '{last}' TERM; echo $ALLOCD_RANK >{own}/rank.txt; {CHILD}; {UP}; {then}")


def plan(jobs: Jobs, disk: Path, client: list[str], *, workers: dict[str, Event] | None = None, **collect: Any) -> Path:
    return jobs.plan(
        {**(workers or {"worker": role("0-1,3", writer(disk))}), "client": role(2, client)},
        coordinator=2,
        collect={"nodes": [f"{disk}/{{node}}/*.txt"], **collect},
    )


def fetched(run: Run) -> dict[int, list[str]]:
    """The names of what was fetched from each rank's node, checked against the facts in the receipt."""
    found: dict[int, list[str]] = {}
    for fact in run.receipt()["collected"]["files"]:
        if "rank" in fact:
            content = Path(fact["path"]).read_bytes()
            assert (fact["size"], fact["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
            assert content == (b"last\n" if fact["path"].endswith("last.txt") else b"%d\n" % fact["rank"])
            found.setdefault(fact["rank"], []).append(Path(fact["path"]).name)
    return found


def errors(run: Run) -> list[str]:
    found: list[str] = run.receipt()["collected"]["errors"]
    return found


WHOLE = {rank: ["last.txt", "rank.txt"] for rank in (0, 1, 3)}


@pytest.mark.parametrize("code", [0, 7])
def test_agents_fetch_after_a_success_and_after_a_failure(jobs: Jobs, tmp_path: Path, code: int) -> None:
    run = jobs.submit(
        plan(jobs, tmp_path / "disk", sh(f"{await_files('up', 0, 1, 3)}; exit {code}"), bundle="evidence.tgz")
    )
    run.job_end()
    assert run.receipt()["verdict"]["code"] == code
    assert fetched(run) == WHOLE
    assert [text.partition(": nothing")[0] for text in errors(run)] == ["collect: rank 2 on node3"]
    assert (run.directory / "evidence.tgz").stat().st_size > 0
    assert run.ended_steps(4).keys() == {0, 1, 2, 3}  # no step was made for it
    assert run.processes() == []


def test_a_rank_without_an_agent_is_fetched_from_by_a_step(jobs: Jobs, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    direct = role(
        "0-1", writer(disk), agent="off", grace=30
    )  # its signal goes through scancel, on a machine that is busy
    workers = {"direct": direct, "worker": role(3, writer(disk))}
    run = jobs.submit(plan(jobs, disk, sh(await_files("up", 0, 1, 3)), workers=workers))
    run.job_end()
    assert run.receipt()["verdict"]["code"] == 0
    assert fetched(run) == WHOLE
    names = run.jobs.cluster.run(["sacct", "-nP", f"-j{run.jobid}", "-oJobName%200"]).stdout.split()
    assert sum(name.startswith("fetch-allocd-") for name in names) == 2
    verified = run.verify()
    assert verified.returncode == 0, verified.stdout + verified.stderr  # its steps contradict no rank's


def test_agents_fetch_when_the_job_is_cancelled(jobs: Jobs, tmp_path: Path) -> None:
    """Slurm's TERM comes to everybody, and its KILL after KillWait. No step can be made then: a rank without an agent
    is not fetched from, and the receipt says why. (TERM comes twice, from Slurm and from the agent: not every shell
    bears that while it writes its last words.)"""
    disk = tmp_path / "disk"
    workers = {"direct": role(0, writer(disk), agent="off"), "worker": role("1,3", writer(disk))}
    run = jobs.submit(plan(jobs, disk, sh(f"{await_files('up', 0, 1, 3)}; {UP}; sleep 1000"), workers=workers))
    run.wait_file("up.2")
    jobs.cluster.run(["scancel", str(run.jobid)], check=True)
    run.job_end()
    found = fetched(run)
    assert found.keys() == {1, 3} and all("rank.txt" in names for names in found.values())
    (text,) = (text for text in errors(run) if "rank 0" in text)
    assert text.startswith("collect: rank 0 on node1: not everything was fetched: its step ended with ")


def test_collecting_again_reaches_the_nodes_as_long_as_the_job_runs(jobs: Jobs, tmp_path: Path) -> None:
    disk, allocation = tmp_path / "disk", jobs.hold()
    client = sh(f"{await_files('up', 0, 1, 3)}; mkdir -p {disk}/$ALLOCD_NODE; echo 2 >{disk}/$ALLOCD_NODE/rank.txt")
    run = jobs.start(plan(jobs, disk, client), allocation)
    assert run.wait() == 0, str(run)
    assert errors(run) == []
    (disk / "node4/late.txt").write_text("late\n")
    done = jobs.allocctl("collect", str(run.directory), "--json")
    assert done.returncode == 0, done.stderr
    paths = [item["path"] for item in json.loads(done.stdout)["files"]]
    assert str(run.directory / f"collected/nodes/3{disk}/node4/late.txt") in paths

    jobs.cluster.run(["scancel", str(allocation.jobid)], check=True)
    run.job_end()
    done = jobs.allocctl("collect", str(run.directory), "--json")
    assert done.returncode == 0, done.stderr  # everything was fetched before, and nothing is missing
    assert [item["path"] for item in json.loads(done.stdout)["files"]] == paths
    (run.directory / "collected/nodes/3.jsonl").unlink()
    done = jobs.allocctl("collect", str(run.directory))
    assert done.returncode == 65
    assert f"rank 3 on node4: not everything was fetched: job {run.jobid} does not run" in done.stderr
