"""Many jobs through one poller on a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from supervisor.core.answers import Answer
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide
from supervisor.scheduler.client import SlurmClient
from supervisor.scheduler.inquiry import Pace
from supervisor.scheduler.poller import Poller, Seen
from tests.slurm.jobs import Jobs

LIMIT = 90.0


def follow_all(
    poller: Poller, changed: Mapping[str, Callable[[Seen], object] | None], limit: float = LIMIT
) -> dict[str, Truth]:
    """The truths of all these jobs, followed at the same time."""

    async def run() -> dict[str, Truth]:
        async with asyncio.timeout(limit), asyncio.TaskGroup() as group:
            polling = group.create_task(poller.run())
            follows = [poller.follow(jobid, told) for jobid, told in changed.items()]
            truths = {follow.jobid: await follow.end() for follow in follows}
            polling.cancel()
        return truths

    return asyncio.run(run())


def test_fifty_jobs_at_once(jobs: Jobs) -> None:
    """All verdicts are right, and the questions are far fewer than the jobs."""
    cluster = jobs.cluster
    go = jobs.directory / "go"
    codes = {5: 3, 17: 137, 30: 7, 41: 128}
    expected = {}
    for number in range(44):
        code = codes.get(number, 0)
        expected[str(cluster.sbatch(f"until [ -e {go} ]; do sleep 0.2; done; exit {code}"))] = code
    array = cluster.sbatch("exit $((SLURM_ARRAY_TASK_ID % 2 * 9))", "--array=0-4")
    expected |= {f"{array}_{task}": task % 2 * 9 for task in range(5)}
    never = str(cluster.sbatch("exit 0", "--begin=now+1hour"))
    expected[never] = 130
    go.touch()
    client = SlurmClient(environ=cluster.env)
    poller = Poller(client)
    seen: list[Seen] = []
    cluster.run(["scancel", never], check=True)
    truths = follow_all(poller, {jobid: seen.append if jobid == never else None for jobid in expected})
    assert {jobid: truth.code for jobid, truth in truths.items()} == expected
    assert len(expected) == 50
    assert client.calls.keys() == {"squeue", "sacct", "scontrol"}
    assert sum(client.calls.values()) < len(expected), client.calls
    for jobid, truth in truths.items():
        again = decide(jobid, [Answer.from_dict(answer.to_dict()) for answer in truth.answers])
        assert (again.standing, again.code, again.record) == ("settled", truth.code, truth.record)
        assert all(answer.stdout.count("\n") < 40 for answer in truth.answers)
    assert {one.state for one in seen} == {"CANCELLED"}


def test_a_requeued_job_and_a_controller_that_is_gone_for_a_while(jobs: Jobs) -> None:
    cluster = jobs.cluster
    go = jobs.directory / "go"
    again = str(cluster.sbatch('[ "$SLURM_RESTART_COUNT" ] && exit 6; exec sleep 1000', "--requeue"))
    plain = str(cluster.sbatch(f"until [ -e {go} ]; do sleep 0.1; done; exit 4"))
    for jobid in (again, plain):
        cluster.wait_state(int(jobid), "RUNNING")
    client = SlurmClient(environ=cluster.env, deadline=1.0)
    poller = Poller(client, pace=Pace(away=2.0))
    told: dict[str, list[Seen]] = {again: [], plain: []}
    steps: list[str] = []

    def of_again(seen: Seen) -> None:
        told[again].append(seen)
        if not steps and seen.state == "RUNNING":
            steps.append("requeued")
            cluster.run(["scontrol", "requeue", again], check=True)
        elif steps == ["requeued"] and seen.restarts == 1 and seen.state == "PENDING":
            steps.append("stopped")
            cluster.stop_slurmctld()
            go.touch()

    def of_plain(seen: Seen) -> None:
        told[plain].append(seen)
        if seen.trouble and steps == ["requeued", "stopped"]:
            steps.append("started")
            cluster.start_slurmctld()

    truths = follow_all(poller, {again: of_again, plain: of_plain})
    assert steps == ["requeued", "stopped", "started"]
    assert (truths[plain].code, truths[again].code) == (4, 6)
    assert [seen.restarts for seen in told[again]][-1] == 1
    assert {seen.state for seen in told[plain]} <= {"RUNNING", "COMPLETING", "FAILED"}
    assert not told[plain][-1].trouble
    assert any("incarnations" in note for note in truths[again].notes)
