"""How a run ends when the coordinator says so: workers end normally, and the verdict is the coordinator's code."""

from __future__ import annotations

from tests.slurm.jobs import SERVE, UP, Jobs, await_files, role, sh


def test_the_coordinator_ends_with_0_and_everybody_ends_normally(jobs: Jobs) -> None:
    client = sh(f"{UP}; {await_files('up', 0, 1, 2, 3)}")
    run = jobs.submit(jobs.plan({"worker": role("0-1,3", SERVE), "client": role(2, client)}, coordinator=2))
    record = run.job_end()
    assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0"), str(run)
    assert run.receipt()["verdict"]["outcome"] == "success"
    assert all(run.file(f"ended.{rank}") is not None for rank in (0, 1, 3))
    assert run.ended_steps(4) == dict.fromkeys(range(4), ("COMPLETED", "0:0"))
    assert run.processes() == []
    verified = run.verify()
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert run.receipt("receipt.json")["verdict"]["outcome"] == "success"
