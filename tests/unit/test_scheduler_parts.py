"""Asking about whole jobs: which parts there are, and how each ended, in few calls and in simulated time."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest

from supervisor.core.parts import Parts
from supervisor.core.slurm_queue import parse_squeue_jobs
from supervisor.core.truth import Truth
from supervisor.scheduler.client import Queue
from supervisor.scheduler.parts import list_parts, verify_parts
from supervisor.scheduler.poller import Poller, Seen
from tests.scripted_slurm import Slurm, job, span

QUEUED = "{raw}|{display}|RUNNING|1000|N/A|N/A|1000|0|None|\n"


class Lister:
    """A client that lists parts: accounting's ids, and squeue's rows."""

    def __init__(self, booked: tuple[str, ...] | None, queued: tuple[str, ...] | None) -> None:
        self.booked, self.queued = booked, queued

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        assert jobid == "12"
        return self.booked

    async def queue(self, jobids: Collection[str]) -> Queue:
        assert list(jobids) == ["12"]
        if self.queued is None:
            return Queue(("squeue",), "then", None, problem="squeue did not answer within 5 s")
        text = "".join(QUEUED.format(raw=20 + n, display=display) for n, display in enumerate(self.queued))
        return Queue(("squeue",), "then", 0, text, rows={row.display: row for row in parse_squeue_jobs(text)})


@pytest.mark.parametrize(
    ("booked", "queued", "names", "complete"),
    [
        (("12_1", "12_[3-4]"), ("12_2",), ("12_1", "12_2", "12_3", "12_4"), True),
        (("12_1", "12_[3-4]"), (), ("12_1", "12_3", "12_4"), True),
        (("12_1",), None, ("12_1",), False),
        (None, ("12_1",), ("12_1",), False),
    ],
)
async def test_the_parts_are_listed_by_both_books(
    booked: tuple[str, ...] | None, queued: tuple[str, ...] | None, names: tuple[str, ...], complete: bool
) -> None:
    parts = await list_parts(Lister(booked, queued), "12")
    assert (parts.kind, parts.names, parts.complete) == ("array", names, complete)


async def test_what_was_asked_for_is_believed_where_nobody_answers() -> None:
    assert await list_parts(Lister(None, None), "12", tasks=[1, 2]) == Parts("12", "array", ("12_1", "12_2"))
    assert await list_parts(Lister(None, None), "12", components=2) == Parts("12", "het", ("12+0", "12+1"))


async def judge(
    slurm: Slurm, wait: bool = True, patience: float = 30.0, told: list[tuple[str, Seen]] | None = None
) -> dict[str, Truth]:
    make = partial(Poller, clock=lambda: slurm.now, sleep=slurm.sleep, jitter=lambda: 0.5)
    heard = [] if told is None else told
    listen = lambda name, seen: heard.append((name, seen))  # noqa: E731
    return await verify_parts(slurm, list(slurm.jobs), wait, patience, told=listen, make=make)


async def test_many_parts_cost_few_calls() -> None:
    parts = {str(n): job((0, "FAILED", "7:0") if n in (3, 7) else (0, "COMPLETED")) for n in range(1, 101)}
    slurm = Slurm(parts, now=10.0)
    truths = await judge(slurm)
    assert list(truths) == list(parts)
    assert {name: truth.code for name, truth in truths.items() if truth.code} == {"3": 7, "7": 7}
    assert all(truth.settled for truth in truths.values())
    assert slurm.calls["squeue"] == 1 and slurm.calls["sacct"] <= 3 and slurm.calls["scontrol"] <= 6


async def test_parts_that_live_are_told_as_that_unless_one_waits() -> None:
    parts = {"1": job((0, "COMPLETED")), "2": job((0, "RUNNING"), (500, "FAILED", "4:0")), "3": job((0, "PENDING"))}
    truths = await judge(Slurm(parts, now=10.0), wait=False)
    assert [truth.standing for truth in truths.values()] == ["settled", "running", "running"]
    parts["3"] = job((0, "PENDING"), (300, "RUNNING"), (400, "COMPLETED"))
    slurm = Slurm(parts, now=10.0)
    assert [truth.code for truth in (await judge(slurm)).values()] == [0, 4, 0]
    assert slurm.now < 600


async def test_without_slurm_there_is_an_answer_when_the_patience_is_used_up() -> None:
    slurm = Slurm({"1": job((0, "COMPLETED")), "2": job((0, "COMPLETED"))}, span((0, 1e9)), span((0, 1e9)), now=10.0)
    told: list[tuple[str, Seen]] = []
    truths = await judge(slurm, wait=False, patience=20.0, told=told)
    assert {truth.standing for truth in truths.values()} == {"unasked"}
    assert 20 <= slurm.now - 10.0 < 120
    assert {name for name, seen in told if "did not answer" in seen.trouble} == {"1", "2"}


async def test_no_parts_are_no_question() -> None:
    slurm = Slurm({})
    assert await judge(slurm) == {}
    assert not slurm.calls
