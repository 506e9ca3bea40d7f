"""The Slurm of tests/fake_slurm answers as the real one did: the corpus' jobs, told to it, are printed as they were."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.core.answers import Answer
from supervisor.core.slurm_records import JobRecord
from tests.corpus.files import Case, Said, read_all
from tests.fake_slurm import FakeSlurm
from tests.fake_slurm.commands import REASONS

CASES = {case.name: case for case in read_all()}
TOLD = [
    *(
        ("completed", 1),
        ("completed", 2),
        ("failed-7", 1),
        ("failed-137", 1),
        ("signal-kill", 1),
        ("timeout", 1),
        ("node-fail", 1),
    ),
    *(("cancelled-running", 1), ("cancelled-by-user", 1), ("cancelled-pending", 1), ("held", 1)),
]


def said_by(case: Case, moment: int, who: str) -> Said:
    return next(said for said in case.answers if said.moment == moment and said.who == who)


def ask(slurm: FakeSlurm, argv: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": slurm.path}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=False)


def record_of(said: Said, text: str) -> JobRecord:
    """All that is parsed of a scontrol's answer."""
    record = Answer.from_dict({**said.to_dict(), "stdout": text}).record
    assert record is not None
    return replace(record, raw="")


def tell(slurm: FakeSlurm, said: Said, by: str, **more: str) -> None:
    """Put the job of a scontrol's answer into the fake. `by`: who cancelled it, which only accounting tells."""
    record = record_of(said, said.stdout)
    fields = dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)
    submit, state = int(fields["SubmitTime"]), record.state.word
    history: list[tuple[float, str, str]] = [(submit, "PENDING", "0:0")]
    if fields["NodeList"]:
        history.append((int(fields["StartTime"]), "RUNNING", "0:0"))
    if record.terminal:
        history.append((int(fields["EndTime"]), f"{state}{by}", fields["ExitCode"]))
    user, _, uid = fields["UserId"].rstrip(")").partition("(")
    hours, minutes, _ = fields["TimeLimit"].split(":")
    slurm.put(
        said.jobid,
        history,
        user=user,
        uid=int(uid),
        nodes=fields["NodeList"] or "node1",
        limit=int(hours) * 60 + int(minutes),
        reason="None" if fields["Reason"] == REASONS.get(state) else fields["Reason"],
        cwd=fields["WorkDir"],
        **more,
    )
    slurm.set(now=history[-1][0] + 1)


@pytest.mark.parametrize(("name", "moment"), TOLD)
def test_what_it_prints_of_a_job_is_what_slurm_printed(name: str, moment: int, tmp_path: Path) -> None:
    case = CASES[name]
    shown, queue, book = (said_by(case, moment, who) for who in ("scontrol", "squeue", "sacct"))
    slurm = FakeSlurm(tmp_path / "slurm")
    tell(slurm, shown, by=book.stdout.split("|")[1].removeprefix("CANCELLED") if "by" in book.stdout else "")
    listed = ask(slurm, queue.argv)
    assert (listed.stdout, listed.returncode) == (queue.stdout, queue.returncode)
    assert ask(slurm, book.argv).stdout == book.stdout
    printed = ask(slurm, shown.argv)
    assert record_of(shown, printed.stdout) == record_of(shown, shown.stdout)
    assert [line.split("=")[0] for line in printed.stdout.split("\n")] == [
        line.split("=")[0] for line in shown.stdout.split("\n")
    ]


def test_tasks_of_an_array_are_told_of_as_slurm_told_of_them(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    case = CASES["array"]
    said = {(each.who, each.jobid): each for each in case.answers}
    for task in range(4):
        shown = said["scontrol", f"2_{task}"]
        tell(slurm, shown, by="", raw=shown.stdout.split()[0].removeprefix("JobId="))
    for (who, name), each in said.items():
        printed = ask(slurm, each.argv)
        assert printed.returncode == each.returncode == 0
        if who != "scontrol":
            assert sorted(printed.stdout.splitlines()) == sorted(each.stdout.splitlines())
            continue
        assert sorted(heads(printed.stdout)) == sorted(heads(each.stdout))
        if name != "2":
            assert record_of(each, printed.stdout) == record_of(each, each.stdout)


def heads(text: str) -> list[str]:
    """The first lines of scontrol's records."""
    return [line for line in text.splitlines() if line.startswith("JobId=")]


def test_an_array_is_made_and_ended_task_by_task(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n#SBATCH --array=0-1,5%2\n")
    assert ask(slurm, ("sbatch", str(script))).stdout == "101\n"
    assert {name: job["raw"] for name, job in slurm.state()["jobs"].items()} == {
        "101_0": "102",
        "101_1": "103",
        "101_5": "101",
    }
    ask(slurm, ("scancel", "101_1"))
    argv = ("squeue", "--jobs=101")
    states = [line.split("|")[1:3] for line in ask(slurm, argv).stdout.splitlines()]
    assert states == [["101_0", "RUNNING"], ["101_1", "CANCELLED"], ["101_5", "RUNNING"]]
    ask(slurm, ("scancel", "101"))
    assert {line.split("|")[2] for line in ask(slurm, argv).stdout.splitlines()} == {"CANCELLED"}


def test_unknown_jobs_and_dead_daemons_are_told_of_in_slurms_words(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    for said in CASES["unknown"].answers:
        printed = ask(slurm, said.argv)
        assert (printed.returncode, printed.stdout, printed.stderr) == (said.returncode, said.stdout, said.stderr)
    slurm.away(accounting=60)
    refused = next(said for said in CASES["accounting-down"].answers if said.who == "sacct" and said.returncode)
    printed = ask(slurm, refused.argv)
    assert (printed.returncode, printed.stderr) == (refused.returncode, refused.stderr)
