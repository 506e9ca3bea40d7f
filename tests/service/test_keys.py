"""allocd's keys as verbs take them: from the daemon, and from its books when no daemon answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.cli.asking import Refused
from supervisor.core import codes
from supervisor.service.shelf import all_on_shelf, on_shelf
from tests.fake_slurm import FakeSlurm
from tests.service.running import Running, until
from tests.service.test_verbs_and_daemon import Node, slurm
from tests.unit.test_follow import end_run, make_run

__all__ = ["slurm"]


@pytest.fixture
def left(tmp_path: Path, slurm: FakeSlurm) -> tuple[Node, str, str]:
    """A daemon has ended, and has left a job that runs and a plan in its queue: their keys."""
    with Running(tmp_path, slurm, "--limit=1") as daemon:
        node = Node(tmp_path, slurm, daemon)
        first, second = daemon.submit(), daemon.submit()
        daemon.until(first["key"], "pending")
    return node, first["key"], second["key"]


@pytest.mark.slow
def test_a_job_is_found_by_its_key_without_the_daemon(left: tuple[Node, str, str], slurm: FakeSlurm) -> None:
    node, key, _ = left
    (jobid,) = slurm.state()["jobs"]
    told = node.say("status", key)
    assert told.code == 0 and told.out.startswith(f"{jobid}  bench  submitted ")
    assert f"allocd held it as {key}: pending" in told.out and "allocctl service install" in told.out
    assert node.say("status", key, "--json").document["allocation"]["as_of"]
    run = make_run(node.base, jobid)
    journal = run / "journal.jsonl"
    journal.write_text(journal.read_text().replace("/run", str(run)))
    assert node.say("stop", key).code == 0
    assert node.say("stop", "--cancel", key).code == 0
    assert slurm.state()["cancelled"] == [["--batch", "--signal=TERM", jobid], [jobid]]
    for verb in ("wait", "verify"):
        said = node.say(verb, key, "--patience=0")
        assert said.code == codes.CANCELLED and jobid in said.out + said.err, (verb, said)
    for verb in ("explain", "receipt", "artifacts", "collect", "logs"):
        assert node.say(verb, key) == node.say(verb, str(run)), verb
    assert f"Run {jobid} " in node.say("explain", key).out


@pytest.mark.slow
def test_what_waits_in_the_queue_of_no_daemon_is_told_so(left: tuple[Node, str, str]) -> None:
    node, first, key = left
    told = node.say("status", key)
    assert told.code == 0 and told.out.startswith(f"{key}  bench\nqueued (as of ")
    for words in (["wait"], ["wait", "--json"], ["logs"], ["logs", "-f"], ["stop"], ["stop", "--cancel"], ["watch"],
                  ["receipt"], ["explain"], ["verify"], ["artifacts"], ["collect"]):  # fmt: skip
        said = node.say(*words, key)
        assert said.code == codes.UNREACHABLE, (words, said)
        assert f"{key} has no job yet: queued" in said.err and "allocctl service install" in said.err, (words, said)
        assert "`allocctl wait" not in said.err, words
    assert f"`allocctl wait {first}` follows it" in node.say("watch", first).err
    listed = node.say("list", "--json").document
    assert [item["key"] for item in listed["allocations"]] == [first, key] and not listed["held"]
    assert {item["state"] for item in listed["allocations"]} == {"pending", "queued"}
    unknown = node.say("wait", "a00000000")
    assert unknown.code == codes.UNREACHABLE and "no run 'a00000000'" in unknown.err


@pytest.mark.slow
def test_a_book_is_read_and_never_written(left: tuple[Node, str, str]) -> None:
    node, key, _ = left
    (book,) = node.top.glob(f"state/allocations/{key}/journal.jsonl")
    torn = book.read_bytes() + b'{"n": 99, "se'
    book.write_bytes(torn)
    book.chmod(0o400)
    told = on_shelf(node.env, key)
    assert told is not None and told.state == "pending" and book.read_bytes() == torn
    assert key in {item.key for item in all_on_shelf(node.env)}
    assert on_shelf(node.env, "../allocations") is None and on_shelf({"STATE_DIRECTORY": "/nowhere"}, key) is None


@pytest.mark.slow
def test_a_job_without_a_run_that_is_only_followed_cannot_be_stopped(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.put("9999", [(0, "RUNNING")])
    with Running(tmp_path, slurm) as daemon:
        node = Node(tmp_path, slurm, daemon)
        held = daemon.ask("POST", "/v1/follows", {"jobid": "9999"})
        with pytest.raises(Refused) as refused:
            daemon.ask("POST", f"/v1/allocations/{held['key']}/stop", {"how": "stop"})
        assert (refused.value.status, refused.value.problem["kind"]) == (409, "conflict")
        said = node.say("stop", "9999")
        assert said.code == codes.CONFIG and "job 9999 has no run that could end in order" in said.err
        run = make_run(tmp_path, "9999")
        end_run(run)
        registry = tmp_path / "registry/allocd/runs"
        registry.mkdir(parents=True, exist_ok=True)
        (registry / "9999").symlink_to(run)
        until(lambda: [event["kind"] for event in daemon.events()].count("run") == 2, "the run, and its end")
        assert node.say("stop", "9999").code == codes.CONFIG
        assert daemon.show(held["key"])["stopping"] is None
        slurm.end("9999", "COMPLETED")


@pytest.mark.slow
def test_nothing_is_said_of_a_job_that_nobody_knows(tmp_path: Path, slurm: FakeSlurm) -> None:
    node = Node(tmp_path, slurm)
    unknown = node.say("wait", "77", "--timeout=0.5")
    assert unknown.code == codes.INTERRUPTED
    assert "nothing is known of job 77: Slurm has not shown it" in unknown.err and "goes on" not in unknown.err
    jobid = node.say("submit", "-q", node.plan).out.strip()
    assert f"job {jobid} goes on" in node.say("wait", jobid, "--timeout=0.5").err


@pytest.mark.slow
def test_what_sbatch_refuses_is_refused_either_way(tmp_path: Path, slurm: FakeSlurm) -> None:
    sbatch = slurm.directory / "bin" / "sbatch"
    sbatch.unlink()
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    with Running(tmp_path, slurm) as daemon:
        node = Node(tmp_path, slurm, daemon)
        direct, through = node.say("submit", "--direct", node.plan), node.say("submit", node.plan)
        waited = node.say("submit", "--wait", node.plan)
        (first, _) = node.say("list", "--all", "--json").document["allocations"]
        again = node.say("wait", first["key"])
    for said in (direct, through, waited, again, node.say("wait", first["key"])):
        assert said.code == codes.CONFIG and "invalid partition specified" in said.err, said
