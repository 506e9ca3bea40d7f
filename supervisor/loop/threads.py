"""Blocking work beside the loop, with a deadline that holds even when the work never returns.

A file system that is gone blocks a thread for ever. Such a thread is left behind (it is a daemon: it does not hold the
process at its end) and its caller goes on, which is why a pool is not used: a pool's threads are joined at exit.

Who tries again and again leaves one behind each time. So a call may name its place, and where `MOST` calls hang that
nobody waits for any more, another one would hang, too: it is not begun.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

MOST: Final = 4

_left: dict[str, set[object]] = {}  # by place: calls that hang, and that nobody waits for
_turn = threading.Lock()


async def in_thread(function: Callable[..., T], *args: Any, limit: float, place: str = "") -> T:
    """`function(*args)` in a thread of its own, for at most `limit` seconds. Raises TimeoutError past them, which says
    so, and at once where `MOST` calls of the same `place` hang; OSError when no thread can be made, else whatever the
    function raises."""
    if place and len(_left.get(place, ())) >= MOST:
        raise TimeoutError(f"no answer to {MOST} calls before")
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    over = threading.Event()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T allows it

    def work() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 - handed to the caller as it is
            failed = error
        with _turn:
            over.set()
            if place in _left:
                _left[place].discard(over)
                if not _left[place]:
                    del _left[place]
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, failed)

    try:
        threading.Thread(target=work, name=getattr(function, "__name__", "work"), daemon=True).start()
    except RuntimeError as error:  # the user's limit of processes
        raise OSError(errno.EAGAIN, str(error)) from None
    try:
        async with asyncio.timeout(limit) as timeout:
            return await future
    except TimeoutError:
        if timeout.expired():
            raise TimeoutError(f"no answer within {limit:g} s") from None
        raise
    finally:
        with _turn:
            if place and not over.is_set():
                _left.setdefault(place, set()).add(over)
