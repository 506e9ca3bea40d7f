"""Which run `allocctl run` would make in an allocation, where the variables alone could mislead: a scontrol that is a
script tells what the controller knows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.main import main

TASK = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
RECORD = """\
JobId={job} {array}JobName=x
   JobState=RUNNING
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
"""
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"

Planned = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Planned:
    """The run's id that a dry run in job 7 tells, with these variables and this scontrol."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "ALLOCD"))]:
        monkeypatch.delenv(name)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[job]\nname = "x"\nnodes = 1\n[coordinator]\nrank = 0\n[roles.client]\nranks = [0]\ncommand = ["true"]\n'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)

    def run_id(scontrol: str, **environ: str) -> str:
        asked = f'echo "$*" >>"{tmp_path}/asked"'
        for name, script in (("srun", "exit 1"), ("scontrol", f"{asked}\n{scontrol}")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        for name, text in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **environ}.items():
            monkeypatch.setenv(name, text)
        assert main(["run", "--dry-run", "--json", "--dir", "runs", "plan.toml"]) == 0
        document: dict[str, Any] = json.loads(capfd.readouterr().out)
        return os.path.basename(str(document["run_dir"]))

    return run_id


def told(job: int, restarts: int = 0, array: str = "") -> str:
    """A scontrol that prints a record."""
    return f"cat <<'E'\n{RECORD.format(job=job, restarts=restarts, array=array)}E"


def test_a_plain_first_run_asks_nobody(planned: Planned) -> None:
    assert planned(DOWN) == "7"
    assert planned(DOWN, SLURM_RESTART_COUNT="2") == "7.r2"
    assert not Path("asked").exists()


@pytest.mark.parametrize(
    ("scontrol", "expected"),
    [
        (told(7, array="ArrayJobId=5 ArrayTaskId=3 "), "5_3"),
        (told(7, restarts=1, array="ArrayJobId=5 ArrayTaskId=3 "), "5_3.r1"),
        (told(6, array="ArrayJobId=5 ArrayTaskId=3 "), "7"),
        (UNKNOWN, "7"),
        (DOWN, "5_3"),
    ],
    ids=["confirmed", "requeued", "another job is that task", "no such task lives", "nobody answers"],
)
def test_a_task_is_one_if_the_controller_does_not_deny_it(planned: Planned, scontrol: str, expected: str) -> None:
    assert planned(scontrol, **TASK) == expected
    assert Path("asked").read_text() == "show job 5_3\n"


@pytest.mark.parametrize(
    ("scontrol", "expected"),
    [(told(7, restarts=2), "7.r2"), (told(7), "7"), (DOWN, "7")],
    ids=["requeued", "a further run in the same attempt", "nobody answers"],
)
def test_a_run_that_is_there_may_be_of_an_earlier_attempt(planned: Planned, scontrol: str, expected: str) -> None:
    Path("runs/7").mkdir(parents=True)
    assert planned(scontrol) == expected
    assert Path("asked").read_text() == "show job 7\n"
