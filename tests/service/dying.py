"""Daemons that die at a write, and what they live through before."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any

from supervisor.service.book import put
from supervisor.service.holder import Holder
from supervisor.service.interface import Refusal
from tests.service.held import Site


class Killed(Exception):
    """The daemon dies here."""


def dies_at(number: int, how: str) -> Callable[[int, bytes], None]:
    """Writes, and dies at that write (from 1): before it, after half of it, or after it."""
    count = itertools.count(1)

    def write(descriptor: int, data: bytes) -> None:
        if next(count) != number:
            put(descriptor, data)
            return
        if how != "before":
            os.write(descriptor, data if how == "after" else data[: len(data) // 2])
        raise Killed

    return write


async def one_life(
    site: Site, write: Callable[[int, bytes], None], live_through: Callable[[Site, Holder], Coroutine[Any, Any, None]]
) -> bool:
    """A daemon's life with a script, whatever was done of it before; whether it came to its end alive."""
    alive = True
    try:
        async with site.holder(write) as holder:
            script = asyncio.create_task(live_through(site, holder))
            dead = asyncio.ensure_future(asyncio.shield(holder._book.failed))
            await asyncio.wait([script, dead], return_when=asyncio.FIRST_COMPLETED)
            script.cancel()
            await asyncio.wait([script])
            dead.cancel()
            if not script.cancelled():
                script.result()
            elif not holder._book.failed.done():
                raise AssertionError("neither dead nor done")
    except* (Killed, Refusal, StopAsyncIteration):
        alive = False
    return alive
