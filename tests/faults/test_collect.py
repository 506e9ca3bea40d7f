"""Collecting at a run's end: files on the nodes' own disks, fetched by the ranks' agents or by steps of their own, the
archive, and all of it whatever way the run ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.faults.local import CHILD, STUBBORN, UP, Event, Local, Run, await_files, role, sh, touch


def writer(disk: Path, then: str = "wait") -> list[str]:
    """A worker that writes on its node's own disk, and once more when it is told to end."""
    own = f"{disk}/$ALLOCD_NODE"
    last = f"echo last >{own}/last.txt; {touch('ended')}; exit 0"
    return sh(f"mkdir -p {own}; trap '{last}' TERM; echo $ALLOCD_RANK >{own}/rank.txt; {CHILD}; {UP}; {then}")


def plan(local: Local, disk: Path, client: list[str], *, worker: Event | None = None, **collect: Any) -> Path:
    return local.plan(
        {"worker": worker or role("0,1", writer(disk)), "client": role(2, client)},
        coordinator=2,
        collect={"nodes": [f"{disk}/{{node}}/*.txt"], **collect},
    )


def fetched(run: Run) -> dict[str, bytes]:
    """What is there, by rank and name; the receipt's facts must say the same."""
    receipt = run.receipt()
    found = {}
    for fact in receipt["collected"]["files"]:
        if "rank" in fact:
            path = Path(fact["path"])
            content = path.read_bytes()
            assert path.is_relative_to(run.directory / f"collected/nodes/{fact['rank']}")
            assert (fact["size"], fact["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
            found[f"{fact['rank']}/{path.name}"] = content
    return found


def errors(run: Run) -> list[str]:
    found: list[str] = run.receipt()["collected"]["errors"]
    return found


WHOLE = {"0/rank.txt": b"0\n", "0/last.txt": b"last\n", "1/rank.txt": b"1\n", "1/last.txt": b"last\n"}


@pytest.mark.parametrize(
    "end", ["success", *(pytest.param(end, marks=pytest.mark.slow) for end in ("failure", "stop"))]
)
def test_agents_fetch_from_their_nodes_however_the_run_ends(local: Local, tmp_path: Path, end: str) -> None:
    """What a rank writes while it is stopped is among it. The client's node has nothing: that is told, and changes no
    verdict."""
    disk = tmp_path / "disk"
    then = {"success": "true", "failure": "exit 7", "stop": f"{UP}; sleep 1000"}[end]
    run = local.start(plan(local, disk, sh(f"{await_files('up', 0, 1)}; {then}")))
    if end == "stop":
        run.wait_file("up.2")
        run.signal(signal.SIGTERM)
    assert run.code == {"success": 0, "failure": 7, "stop": 143}[end], run
    assert fetched(run) == WHOLE
    (error,) = errors(run)
    assert error == f"collect: rank 2 on 127.0.0.3: nothing matches {disk}/127.0.0.3/*.txt"
    assert run.receipt()["status"]["collection"] == "failed"
    assert run.receipt()["doubts"] == []


def test_a_required_file_that_is_not_there_denies_a_success(local: Local, tmp_path: Path) -> None:
    run = local.run(plan(local, tmp_path / "disk", sh(await_files("up", 0, 1)), required=True))
    assert run.code == 65, run
    assert run.receipt()["verdict"]["reason"] == "not_collected"


@pytest.mark.slow
def test_a_rank_without_an_agent_and_one_whose_agent_is_lost_are_fetched_from_by_steps(
    local: Local, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    roles = {
        "direct": role(0, writer(disk), agent="off"),
        "worker": role(1, writer(disk)),
        "client": role(2, sh(f"{await_files('up', 0, 1)}; {UP}; sleep 1000")),
    }
    patterns = {"nodes": [f"{disk}/{{node}}/rank.txt"]}
    run = local.start(local.plan(roles, coordinator=2, collect=patterns))
    run.wait_file("up.2")
    os.kill(run.first("Hello", rank=1)["pid"], signal.SIGKILL)
    assert run.code != 0
    assert fetched(run) == {"0/rank.txt": b"0\n", "1/rank.txt": b"1\n"}
    assert errors(run) == [f"collect: rank 2 on 127.0.0.3: nothing matches {disk}/127.0.0.3/rank.txt"]


@pytest.mark.slow
def test_a_rank_that_never_ran_is_not_fetched_from(local: Local, tmp_path: Path) -> None:
    """What lies on its node is not this run's."""
    old = tmp_path / "disk/127.0.0.1/old.txt"
    old.parent.mkdir(parents=True)
    old.write_text("another run's")
    missing = role("0,1", ["/does/not/exist"])
    run = local.run(plan(local, tmp_path / "disk", sh("sleep 1000"), worker=missing))
    assert run.code == 127, run
    assert fetched(run) == {}
    assert "collect: rank 0 on 127.0.0.1: not everything was fetched: it was never started" in errors(run)


@pytest.mark.slow
def test_what_a_rank_can_put_in_the_way_is_told_and_hinders_no_other_file(local: Local, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (tmp_path / "secret").write_text("secret")
    own = f"{disk}/$ALLOCD_NODE"
    tricks = f"ln -s {tmp_path}/secret {own}/link.txt; mkfifo {own}/fifo.txt; head -c 3000 /dev/zero >{own}/big.txt"
    run = local.run(
        plan(
            local,
            disk,
            sh(await_files("tricked", 0, 1)),
            worker=role("0,1", writer(disk, f"{tricks}; {touch('tricked')}; wait")),
            size_max=8000,
        )
    )
    assert run.code == 0, run
    assert fetched(run) == WHOLE
    found = errors(run)
    for rank in (0, 1):
        where = f"collect: rank {rank} on 127.0.0.{rank + 1}: {disk}/127.0.0.{rank + 1}"
        assert f"{where}/link.txt: a symbolic link, not followed" in found
        assert f"{where}/fifo.txt: not a regular file" in found
        assert any(text.startswith(f"{where}/big.txt: 3000 bytes, but only ") for text in found)


def unpacked(path: Path) -> dict[str, bytes]:
    """The files of an archive by their names in it."""
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


@pytest.mark.slow
def test_the_archive_holds_marker_logs_and_what_was_collected(local: Local, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    client = sh(f"{await_files('up', 0, 1)}; echo words; echo result >$ALLOCD_RUN_DIR/result.txt; exit 7")
    run = local.run(plan(local, disk, client, paths=["result.txt"], bundle="evidence.tar.gz"))
    assert run.code == 7
    path = run.directory / "evidence.tar.gz"
    (fact,) = (item for item in run.receipt()["collected"]["files"] if item["path"] == str(path))
    assert (fact["size"], fact["sha256"]) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    held = unpacked(path)
    names = {name.removeprefix(f"{run.directory.name}/") for name in held}
    assert {"logs/rank-2.client.out", "collected/result.txt", "collected/nodes/0.jsonl"} <= names
    assert f"collected/nodes/1{disk}/127.0.0.2/last.txt" in names
    assert not names & {"plan.toml", "journal.jsonl", "receipt.run.json"}
    assert held[f"{run.directory.name}/logs/rank-2.client.out"] == b"words\n"


@pytest.mark.slow
def test_no_secret_leaves_the_plan(local: Local, tmp_path: Path) -> None:
    """The values of env are in no file of the run but the plan's copy, which is its owner's alone, and in no copy."""
    secret = "s3cr3t-of-the-plan"
    roles = {
        name: {**role(rank, sh('[ -n "$TOKEN" ]')), "env": {"TOKEN": secret}, "agent": agent, "may_finish": True}
        for rank, (name, agent) in enumerate({"a": "on", "b": "off"}.items())
    }
    run = local.run(local.plan(roles, coordinator=0, nodes=2, collect={"paths": ["**"], "bundle": "evidence.tar.gz"}))
    assert run.code == 0, run
    done = local.allocctl("wait", "-q", "--collect", str(tmp_path / "there"), str(run.directory))
    assert done.returncode == 0
    archived = unpacked(run.directory / "evidence.tar.gz")
    assert archived
    assert not [name for name, content in archived.items() if secret.encode() in content]
    copies = [path for place in (run.directory, tmp_path / "there") for path in place.rglob("*") if path.is_file()]
    assert {"journal.jsonl", "receipt.run.json", "rank-1.b.out"} <= {path.name for path in copies}
    assert [path for path in copies if secret.encode() in path.read_bytes()] == [run.directory / "plan.toml"]
    assert (run.directory / "plan.toml").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_second_stop_request_still_lets_agents_fetch(local: Local, tmp_path: Path) -> None:
    """It takes the ranks' grace, not the evidence."""
    disk = tmp_path / "disk"
    own = f"{disk}/$ALLOCD_NODE"
    stubborn = sh(f"mkdir -p {own}; echo $ALLOCD_RANK >{own}/rank.txt; {STUBBORN[-1]}")
    run = local.start(
        plan(local, disk, sh(f"{await_files('up', 0, 1)}; {UP}; sleep 1000"), worker=role("0,1", stubborn))
    )
    run.wait_file("up.2")
    run.signal(signal.SIGTERM)
    run.first("StopRank", rank=1)
    run.signal(signal.SIGTERM)
    assert run.code == 143
    assert fetched(run) == {"0/rank.txt": b"0\n", "1/rank.txt": b"1\n"}


def test_a_contracts_file_is_told_with_the_checksum_that_its_judge_made(local: Local) -> None:
    """What the look knows of it (size, time, sha256) is what it is now, so that nobody reads it a second time."""
    client = sh("echo '{}' >$ALLOCD_RUN_DIR/result.json")
    contract = {"name": "result", "path": "result.json", "format": "json"}
    run = local.run(local.plan({"client": role(0, client)}, coordinator=0, nodes=1, artifacts=[contract]))
    assert run.code == 0
    path = run.directory / "result.json"
    ((seen,),) = (item["finding"]["files"] for item in run.receipt()["artifacts"])
    (fact,) = run.receipt()["collected"]["files"]
    assert (seen["size"], seen["mtime_ns"]) == (path.stat().st_size, path.stat().st_mtime_ns)
    assert fact == {"path": str(path), "source": str(path), "size": 3, "sha256": seen["sha256"]}


# --- again, later --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_collecting_again_replaces_copies_and_leaves_the_receipt(local: Local, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    client = sh(f"{await_files('up', 0, 1)}; mkdir -p {disk}/127.0.0.3; echo 2 >{disk}/127.0.0.3/rank.txt; echo 1 >log")
    data = {"worker": role("0,1", writer(disk)), "client": role(2, client, cwd=str(tmp_path))}
    collected = {"nodes": [f"{disk}/{{node}}/*.txt"], "paths": [f"{tmp_path}/log"], "bundle": "evidence.tgz"}
    run = local.run(local.plan(data, coordinator=2, collect=collected))
    assert run.code == 0
    assert errors(run) == []
    receipt = (run.directory / "receipt.run.json").read_bytes()
    bundled = (run.directory / "evidence.tgz").read_bytes()

    (tmp_path / "log").write_text("2\n")
    (disk / "127.0.0.1/late.txt").write_text("late\n")
    done = local.allocctl(
        "collect", str(run.directory), "--json", "--to", "copies", "--bundle", "archives/again.tar.gz"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["errors"] == []
    assert document == json.loads((run.directory / "collected/collected.json").read_text())
    paths = {os.path.relpath(item["path"], run.directory / "collected"): item for item in document["files"]}
    assert paths[f"{tmp_path}/log".lstrip("/")]["sha256"] == hashlib.sha256(b"2\n").hexdigest()
    assert f"nodes/0{disk}/127.0.0.1/late.txt" in paths
    copies = tmp_path / "copies" / run.directory.name
    assert (copies / f"collected/{tmp_path}/log").read_text() == "2\n"
    with tarfile.open(tmp_path / "archives/again.tar.gz") as archive:
        assert f"{run.directory.name}/collected{tmp_path}/log" in archive.getnames()
    assert (run.directory / "receipt.run.json").read_bytes() == receipt
    assert (run.directory / "evidence.tgz").read_bytes() == bundled

    (tmp_path / "log").unlink()
    done = local.allocctl("collect", str(run.directory))
    assert done.returncode == 65
    assert f"allocctl: collect: nothing matches {tmp_path}/log" in done.stderr.splitlines()
    assert f"the facts are in {run.directory}/collected/collected.json" in done.stderr
    assert f"  {run.directory}/collected/nodes/0{disk}/127.0.0.1/late.txt\n" in done.stdout


@pytest.mark.slow
def test_collecting_again_writes_through_no_link(local: Local, tmp_path: Path) -> None:
    """A job may have put anything into its run directory."""
    run = local.run(local.plan({"client": role(0, sh("exit 0"))}, coordinator=0, nodes=1))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.directory / "collected").symlink_to(elsewhere)
    done = local.allocctl("collect", str(run.directory))
    assert done.returncode == 65
    assert "the facts could not be written" in done.stderr
    assert "the facts are in" not in done.stderr
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_collected_again(local: Local, tmp_path: Path) -> None:
    assert local.allocctl("collect", "no-such-run").returncode == 69
    assert local.allocctl("collect", "--to").returncode == 78
    run = local.start(plan(local, tmp_path / "disk", sh(f"{UP}; sleep 1000")))
    run.wait_file("up.2")
    done = local.allocctl("collect", str(run.directory))
    assert done.returncode == 78
    assert "is not over: its engine collects when it ends" in done.stderr
    assert not (run.directory / "collected").exists()
    run.signal(signal.SIGTERM)
    assert run.code == 143
