"""The batch script template, as it is, on the real cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.slurm.jobs import ALLOCCTL, Jobs, role, sh

TEMPLATE = Path(__file__).parents[2] / "deploy" / "allocd.sbatch"


def submit(jobs: Jobs, *arguments: str, allocctl: str = ALLOCCTL) -> tuple[dict[str, str], str]:
    """Submit the template itself; the job's end, and what it printed."""
    output = jobs.directory / "output-%j"
    done = jobs.cluster.run(
        ["sbatch", "--parsable", "--nodes=2", "--time=5", f"--output={output}", str(TEMPLATE), *arguments],
        env={"ALLOCCTL": allocctl, "XDG_STATE_HOME": jobs.env["XDG_STATE_HOME"]},
        check=True,
    )
    jobid = int(done.stdout)
    end = jobs.cluster.wait_state(jobid, ("COMPLETED", "FAILED"))
    return end, Path(str(output).replace("%j", str(jobid))).read_text()


def test_the_template_runs_a_plan_and_has_its_exit_code(jobs: Jobs) -> None:
    base = jobs.directory / "runs of the template"
    for code in (0, 7):
        plan = jobs.plan(
            {"worker": role(0, sh("sleep 1000")), "client": role(1, sh(f"exit {code}"))}, coordinator=1, nodes=2
        )
        end, words = submit(jobs, str(plan), "--dir", str(base))
        assert (end["JobState"], end["ExitCode"]) == ("FAILED" if code else "COMPLETED", f"{code}:0"), words
        (journal,) = base.glob(f"{end['JobId']}/journal.jsonl")
        assert "not the batch script's own process" not in journal.read_text()


def test_the_template_says_what_is_missing(jobs: Jobs) -> None:
    end, words = submit(jobs)
    assert end["ExitCode"] == "78:0"
    assert "usage: sbatch" in words
    end, words = submit(jobs, "plan.toml", allocctl="/nowhere/allocctl")
    assert end["ExitCode"] == "78:0"
    assert "set ALLOCCTL to its absolute path" in words


def test_the_template_is_sound_shell() -> None:
    subprocess.run(["bash", "-n", str(TEMPLATE)], check=True)
