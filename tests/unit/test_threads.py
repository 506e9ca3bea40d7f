"""Blocking work beside the loop: what it returns or raises, and a deadline that holds when it never comes back."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from supervisor.loop.threads import MOST, in_thread

LIMIT = 10.0


async def test_a_result_and_an_error_come_back() -> None:
    assert await in_thread(divmod, 7, 2, limit=LIMIT) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0, limit=LIMIT)
    with pytest.raises(TimeoutError, match="its own"):
        await in_thread(_late, limit=LIMIT)
    with pytest.raises(KeyboardInterrupt):  # whatever it is
        await in_thread(_interrupted, limit=LIMIT)


def _late() -> None:
    raise TimeoutError("its own")


def _interrupted() -> None:
    raise KeyboardInterrupt


async def test_the_loop_goes_on_meanwhile() -> None:
    turn = threading.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    assert await in_thread(turn.wait, LIMIT, limit=LIMIT)


async def test_work_that_does_not_end_is_left_behind() -> None:
    release, ended = threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(LIMIT)
        ended.set()

    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    with pytest.raises(TimeoutError, match=r"^no answer within 0.01 s$"):
        await in_thread(hang, limit=0.01)
    (thread,) = (each for each in threading.enumerate() if each.name == "hang")
    assert thread.daemon  # it does not hold the process at its end
    release.set()  # its answer, when it comes after all, is nobody's
    assert await in_thread(ended.wait, LIMIT, limit=LIMIT)
    thread.join(LIMIT)
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_place_that_is_gone_holds_few_threads_however_often_it_is_tried() -> None:
    release, begun = threading.Event(), list[None]()

    def hang() -> str:
        begun.append(None)
        release.wait(LIMIT)
        return "here"

    for _ in range(MOST):
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            await in_thread(hang, limit=0.01, place="there")
    with pytest.raises(TimeoutError, match=r"^no answer to 4 calls before$"):
        await in_thread(hang, limit=LIMIT, place="there")
    assert len(begun) == MOST
    assert await in_thread(divmod, 7, 2, limit=LIMIT, place="elsewhere") == (3, 1)
    assert await in_thread(divmod, 7, 2, limit=LIMIT) == (3, 1)
    release.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "hang"]:
        thread.join(LIMIT)
    assert await in_thread(hang, limit=LIMIT, place="there") == "here"


async def test_no_thread_to_be_had_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        await in_thread(divmod, 7, 2, limit=LIMIT)


async def test_the_caller_may_be_cancelled() -> None:
    release = threading.Event()
    task = asyncio.create_task(in_thread(release.wait, LIMIT, limit=LIMIT))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()


def test_an_answer_after_the_loops_end_is_dropped() -> None:
    release, late = threading.Event(), threading.Event()

    def slow() -> None:
        release.wait(LIMIT)
        late.set()

    with pytest.raises(TimeoutError):
        asyncio.run(in_thread(slow, limit=0.01))
    release.set()
    assert late.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while any(thread.name == "slow" for thread in threading.enumerate()):  # it ends without an error of its own
        assert time.monotonic() < deadline
        time.sleep(0.001)
