"""Slurm's time limit: the engine begins to stop while there is time to end in order, whoever tells it of the time.

Slurm's shortest limit is a minute, and its clock for limits and early signals ticks every 30 s: so all jobs of this
module are submitted at its start and run at the same time, and each test looks at one of them when all have ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import SERVE, SLEEP, UP, Event, Jobs, Run, role, sh, until

MODULE_LIMIT = 90.0  # seconds for any of it: a minute and a tick
MINUTE = "--time=1"


@dataclass
class Ended:
    """A job of this module after its end: its record at the end, and what `allocctl verify` said then."""

    run: Run
    record: dict[str, str]
    verified: Event
    code: int

    @property
    def end_at(self) -> float:
        """The EndTime that Slurm told the engine first, on the journal's clock."""
        return float(self.run.first("TimeLimitKnown")["end_at"])

    @property
    def decided(self) -> Event:
        """The first order to stop."""
        return self.run.first("StopRank")


class Submitted:
    """All jobs of the module, by name."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.runs: dict[str, Run] = {}

    def plan(self, collect: float, client: list[str] = SERVE, **tables: object) -> Path:
        """Two ranks with a shutdown budget of 6 s (two graces) and the seconds for collection."""
        roles = {"worker": role(0, SERVE, grace=3), "client": role(1, client, grace=3)}
        return self.jobs.plan(roles, coordinator=1, nodes=2, deadlines={"collect": collect}, **tables)

    def submit(self, name: str, plan: Path, *options: str, nodes: int = 2, after: str = "") -> None:
        self.runs[name] = self.jobs.submit(plan, *options, nodes=nodes, after=after)


def submit_all(jobs: Jobs) -> dict[str, Run]:
    all_jobs = Submitted(jobs)
    all_jobs.submit("own clock", all_jobs.plan(collect=20), MINUTE)
    all_jobs.submit("USR1", all_jobs.plan(collect=1), MINUTE, "--signal=B:USR1@20")
    all_jobs.submit("TERM", all_jobs.plan(collect=1), MINUTE, "--signal=B:TERM@20")
    all_jobs.submit("long budget", all_jobs.plan(collect=3600), MINUTE)
    extended = sh(f"{UP}; until [ -e $ALLOCD_RUN_DIR/go ]; do sleep 0.1; done")
    all_jobs.submit("extended", all_jobs.plan(collect=20, client=extended), MINUTE)
    worker = sh(f"{UP}; {SLEEP}")  # dies of TERM
    four = jobs.plan({"worker": role("0,1,3", worker), "client": role(2, worker)}, coordinator=2)
    all_jobs.submit("killed", four, "--time=10", nodes=4)
    all_jobs.submit("no exec", all_jobs.plan(collect=20), MINUTE, after="exit $?")
    return all_jobs.runs


@pytest.fixture(scope="module")
def ended(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    jobs = Jobs(cluster, tmp_path_factory.mktemp("limits"))
    runs = submit_all(jobs)
    for run in runs.values():
        run.first("TimeLimitKnown")
    for name, limit in (("extended", "TimeLimit=10"), ("killed", "EndTime=now+5")):
        cluster.run(["scontrol", "update", f"JobId={runs[name].jobid}", limit], check=True)
    # The engine of the job with more time asks Slurm once more when the old limit is near, and goes on.
    runs["extended"].wait_events("TimeLimitKnown", 2, limit=MODULE_LIMIT)
    until(lambda: runs["own clock"].events("StopRank"), "the others' time limit", MODULE_LIMIT)
    (runs["extended"].directory / "go").touch()
    found = {}
    for name, run in runs.items():
        record = run.job_end(limit=MODULE_LIMIT)
        done = run.verify("--json", "--wait")
        found[name] = Ended(run, record, json.loads(done.stdout), done.returncode)
    yield found
    jobs.close()


def in_time(job: Ended, budget: float) -> None:
    """The stop began `budget` seconds before the limit, in order, and the job ended by itself with 124."""
    left = job.end_at - job.decided["at"]
    assert budget - 2.0 < left <= budget + 0.5, str(job.run)
    assert job.decided["reason"] == "time_limit"
    ended_with_124(job)


def ended_with_124(job: Ended) -> None:
    assert (job.record["JobState"], job.record["ExitCode"]) == ("FAILED", "124:0"), str(job.run)
    verdict = job.run.receipt()["verdict"]
    assert (verdict["code"], verdict["reason"], verdict["origin"]) == (124, "time_limit", "allocd")
    assert (job.code, job.verified["verdict"]["reason"]) == (124, "time_limit")
    assert job.run.file("ended.0") is not None and job.run.file("ended.1") is not None
    coordinator, worker = (job.run.first("RankEnded", rank=rank)["seq"] for rank in (1, 0))
    assert coordinator < job.run.first("StopRank", rank=0)["seq"] < worker
    assert job.run.processes() == []


def test_the_stop_begins_at_the_end_time_minus_the_budget(ended: dict[str, Ended]) -> None:
    in_time(ended["own clock"], 26)


def test_a_budget_longer_than_the_job_is_cut_to_half_of_it(ended: dict[str, Ended]) -> None:
    job = ended["long budget"]
    assert "more than half of the time that is left" in " ".join(job.run.receipt()["notes"])
    known = job.run.first("TimeLimitKnown")
    in_time(job, (known["end_at"] - known["at"]) / 2)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_slurms_early_signal_begins_the_stop(ended: dict[str, Ended], name: str) -> None:
    """It comes up to 30 s before the time that was asked for, and earlier than the engine's own clock."""
    job = ended[name]
    asked = job.run.first("StopRequested")
    assert asked["signal"] == name
    assert job.decided["seq"] == asked["seq"]
    assert job.end_at - asked["at"] > 10
    ended_with_124(job)


def test_a_script_that_does_not_exec_is_warned_and_ends_in_time(ended: dict[str, Ended]) -> None:
    job = ended["no exec"]
    (warning,) = (line for line in job.run.events("Noted") if "not the batch script's own process" in line["text"])
    assert "exec allocctl run" in warning["text"] and warning["seq"] < job.decided["seq"]
    in_time(job, 26)


def test_more_time_is_noticed_before_the_stop_begins(ended: dict[str, Ended]) -> None:
    job = ended["extended"]
    first, second = job.run.events("TimeLimitKnown")[:2]
    assert second["end_at"] - first["end_at"] == pytest.approx(540, abs=3)
    assert (job.record["JobState"], job.code) == ("COMPLETED", 0), str(job.run)
    assert job.run.receipt()["verdict"]["outcome"] == "success"


def test_a_job_that_slurm_kills_at_its_limit_timed_out_and_no_rank_failed(ended: dict[str, Ended]) -> None:
    """Its limit was cut behind the engine's back: Slurm's TERM comes first, to ranks and engine alike."""
    job = ended["killed"]
    assert job.record["JobState"] == "TIMEOUT", str(job.run)
    verdict = job.verified["verdict"]
    assert (job.code, verdict["origin"], verdict["reason"]) == (124, "slurm", "slurm_timeout")
    assert "TIMEOUT" in verdict["summary"] and "rank" not in verdict["summary"]
    assert all(failure["provisional"] or failure["what"] == "stop" for failure in job.verified["run"]["failures"])
    job.run.wait_gone()
