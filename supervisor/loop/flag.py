"""An event for one loop that weighs nothing: asyncio's own holds a queue of 0.7 KB for those who wait, and whoever
follows a thousand jobs has a dozen of them for each."""

from __future__ import annotations

import asyncio


class Flag:
    """As `asyncio.Event`."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it: whoever waits goes on."""
        self._is_set = True
        waiting, self._waiting = self._waiting, ()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def clear(self) -> None:
        """Take it back: whoever comes to wait from now on waits."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until it is set; not at all if it is."""
        if self._is_set:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting += (future,)
        try:
            await future
        finally:
            self._waiting = tuple(each for each in self._waiting if each is not future)
