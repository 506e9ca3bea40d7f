"""Rounds over what many follow: who stirs is looked at, and a file system that does not answer holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from supervisor.loop.flag import Flag
from supervisor.runs.rounds import AT_ONCE, Rounds

LIMIT = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.runs.rounds.PAUSE", (0.01, 0.0, 0.0))


@dataclass(eq=False)
class Run:
    """`answers`: what its next looks see."""

    place: str
    answers: list[bool | Exception] = field(default_factory=list)
    asked: int = 0
    hangs: threading.Event | None = None
    woken: asyncio.Queue[int] = field(default_factory=asyncio.Queue)

    def stirs(self) -> bool:
        self.asked += 1
        if self.hangs is not None:
            self.hangs.wait(LIMIT)
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wake(self) -> None:
        self.woken.put_nowait(self.asked)


async def seen(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not what():  # noqa: ASYNC110 - nobody tells of a round in which nothing stirred
            await asyncio.sleep(0.005)


async def test_who_stirs_is_woken_and_once_more_in_the_next_round() -> None:
    rounds, quiet, one = Rounds(), Run("/a"), Run("/a", [False, True, False, False, False])
    with rounds.among(quiet, quiet.wake), rounds.among(one, one.wake):
        assert rounds.count == 2
        going = asyncio.create_task(rounds.run())
        await seen(lambda: one.asked > 6)
        going.cancel()
    assert [one.woken.get_nowait() for _ in range(one.woken.qsize())] == [2, 3]
    assert quiet.woken.empty()
    assert rounds.count == 0


async def test_a_place_that_does_not_answer_holds_one_thread_and_nobody_else() -> None:
    rounds, release = Rounds(), threading.Event()
    dead, well = Run("/dead", [True], hangs=release), Run("/well", [True])
    with rounds.among(dead, dead.wake), rounds.among(well, well.wake):
        going = asyncio.create_task(rounds.run())
        await asyncio.wait_for(well.woken.get(), LIMIT)
        await seen(lambda: well.asked > 5)
        assert dead.asked == 1
        release.set()
        await asyncio.wait_for(dead.woken.get(), LIMIT)
        going.cancel()


async def test_a_fault_is_for_the_close_look_to_tell() -> None:
    rounds, broken, well = Rounds(), Run("/a", [RuntimeError("broken")]), Run("/a", [False, False, True])
    with rounds.among(broken, broken.wake), rounds.among(well, well.wake):
        going = asyncio.create_task(rounds.run())
        assert await asyncio.wait_for(broken.woken.get(), LIMIT) == 1
        assert await asyncio.wait_for(well.woken.get(), LIMIT) == 3
        going.cancel()


async def test_close_looks_at_one_place_take_turns() -> None:
    rounds, held, most, leave = Rounds(), 0, 0, Flag()

    async def look(place: str) -> None:
        nonlocal held, most
        async with rounds.turns(place):
            held += 1
            most = max(most, held)
            await leave.wait()
            held -= 1

    async with asyncio.TaskGroup() as group:
        for place in ("/a", "/b") * (3 * AT_ONCE):
            group.create_task(look(place))
        await seen(lambda: held == 2 * AT_ONCE)
        leave.set()
    assert most == 2 * AT_ONCE


async def test_a_flag_is_an_event() -> None:
    flag = Flag()
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(flag.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        flag.set()
        flag.clear()
        await asyncio.wait(waiting[1:], timeout=LIMIT)
        assert [task.done() and not task.cancelled() for task in waiting[1:]] == [True, True]
    assert not flag.is_set()
    flag.set()
    await flag.wait()
    assert flag.is_set()
