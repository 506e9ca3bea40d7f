"""Steps of the srun launcher: the ids and the component in their command lines, and how a step without an agent is
found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.core.allocation import Allocation, Component
from supervisor.core.answers import Answer, read_answer
from supervisor.core.layout import Layout
from supervisor.core.plan import parse_plan
from supervisor.engine.time_limit import SlurmClock
from supervisor.launch.base import NoStep
from supervisor.launch.srun import SrunLauncher
from supervisor.scheduler.client import SlurmClient

PLAIN = Allocation("7", "7", 0, (Component("7", ("n1", "n2")),))
TASK = Allocation("5_3", "7", 0, (Component("7", ("n1", "n2")),))
HET = Allocation("7", "7", 0, (Component("7", ("n1",)), Component("8", ("n2",))))


class Slurm(SlurmClient):
    """Knows steps by job and name, and the end of each job; remembers what was asked."""

    def __init__(self, steps: dict[str, dict[str, str]] | None = None, ends: dict[str, str] | None = None) -> None:
        super().__init__(environ={})
        self.steps, self.ends = steps, ends or {}
        self.signalled: list[tuple[str, str]] = []
        self.word = "RUNNING"

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        return None if self.steps is None else self.steps.get(jobid, {})

    async def signal_step(self, step: str, signame: str) -> bool:
        self.signalled.append((step, signame))
        return step != "deaf.0"

    async def show_job(self, jobid: str) -> Answer:
        text = ""
        if jobid in self.ends:
            head = f"JobId=7 HetJobId=7 HetJobOffset={jobid[-1]} JobName=x\n   JobState={self.word}\n   ExitCode=0:0\n"
            text = f"{head}   StartTime=1 EndTime={self.ends[jobid]}\n"
        return read_answer(
            source="scontrol",
            jobid=jobid,
            argv=["scontrol"],
            at="2025-01-01T00:00:00+00:00",
            returncode=0 if text else 1,
            stdout=text,
            stderr="" if text else "slurm_load_jobs error: Invalid job id specified",
            trouble="",
        )


def layout_of(allocation: Allocation, agent: str = "on") -> Layout:
    """A run with a rank on each of two nodes."""
    roles = {"all": {"ranks": [0, 1], "command": ["serve"], "agent": agent}}
    data: dict[str, Any] = {"job": {"name": "x", "nodes": 2}, "coordinator": {"rank": 0}, "roles": roles}
    return Layout(parse_plan(data, "plan.toml"), allocation.attempt, allocation.jobid, "/r", ("n1", "n2"), "0" * 16)


def launcher_of(allocation: Allocation, slurm: Slurm | None = None) -> SrunLauncher:
    return SrunLauncher(slurm or Slurm(), allocation, "srun", {"SLURM_JOB_ID": allocation.raw})


def named(argv: tuple[str, ...], *options: str) -> list[str]:
    """The options of these names in a command line."""
    return [word for word in argv if word.partition("=")[0] in options]


@pytest.mark.parametrize("agent", ["on", "off"])
@pytest.mark.parametrize("allocation", [PLAIN, TASK])
def test_srun_gets_the_raw_id(allocation: Allocation, agent: str) -> None:
    layout = layout_of(allocation, agent)
    for rank in (0, 1):
        command = launcher_of(allocation).step(layout, rank)
        assert named(command.argv, "--jobid", "--het-group") == ["--jobid=7"]
        assert named(command.argv, "--job-name") == [f"--job-name=allocd-{allocation.jobid}-00000000-r{rank}"]
        assert command.env.get("ALLOCD_STEP_JOB", "7") == "7"


@pytest.mark.parametrize("agent", ["on", "off"])
def test_a_step_on_a_component_is_started_in_the_leaders_name(agent: str) -> None:
    layout, launcher = layout_of(HET, agent), launcher_of(HET)
    for rank in (0, 1):
        expected = ["--jobid=7", f"--het-group={rank}"]
        for command in (launcher.step(layout, rank), launcher.sweep(layout, rank)):
            assert named(command.argv, "--jobid", "--het-group") == expected


def test_an_agent_on_a_component_is_told_the_components_own_id() -> None:
    steps = [launcher_of(HET).step(layout_of(HET), rank).env["ALLOCD_STEP_JOB"] for rank in (0, 1)]
    assert steps == ["7", "8"]


@pytest.mark.parametrize(
    ("allocation", "job", "step"),
    [(PLAIN, "7", "7.1"), (TASK, "5_3", "5_3.1"), (HET, "8", "8.1")],
    ids=["plain", "task", "component"],
)
def test_a_step_is_looked_for_under_the_id_that_squeue_lists_it_by(allocation: Allocation, job: str, step: str) -> None:
    layout = layout_of(allocation, "off")
    slurm = Slurm({job: {layout.step_name(1): step}})
    assert asyncio.run(launcher_of(allocation, slurm).signal(layout, 1, 1, "TERM")) is None
    assert slurm.signalled == [(step, "TERM")]


def test_signals_that_do_not_reach_a_step() -> None:
    layout = layout_of(PLAIN, "off")
    with pytest.raises(NoStep):
        asyncio.run(launcher_of(PLAIN, Slurm({})).signal(layout, 0, 1, "TERM"))
    assert asyncio.run(launcher_of(PLAIN, Slurm(None)).signal(layout, 0, 1, "TERM")) == (
        "Slurm did not say which steps run"
    )
    deaf = Slurm({"7": {layout.step_name(0): "deaf.0"}})
    assert asyncio.run(launcher_of(PLAIN, deaf).signal(layout, 0, 1, "TERM")) == "scancel --signal=TERM deaf.0 failed"


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({"7+0": "900", "7+1": "800"}, 800.0),
        ({"7+0": "700", "7+1": "Unknown"}, 700.0),
        ({"7+1": "800"}, 800.0),
        ({}, None),
    ],
)
def test_the_first_limit_of_the_components_counts(ends: dict[str, str], first: float | None) -> None:
    assert asyncio.run(SlurmClock(Slurm(ends=ends), HET.records).end_time()) == first


@pytest.mark.parametrize("word", ["COMPLETING", "CANCELLED", "TIMEOUT"])
def test_when_a_job_has_ended_is_no_limit(word: str) -> None:
    slurm = Slurm(ends={"7+0": "900", "7+1": "800"})
    slurm.word = word
    assert asyncio.run(SlurmClock(slurm, HET.records).end_time()) is None
