"""Somebody who answers beside a test that types commands: the world of `world.py` in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.main import main
from tests.said import Said
from tests.service.world import World, served

LIMIT = 20.0


class Desk:
    """The thread, and who answers in it. `begin` is done to its world before anybody can ask."""

    def __init__(
        self, directory: Path, capfd: pytest.CaptureFixture[str], begin: Callable[[World], object] = lambda world: None
    ) -> None:
        self._directory, self._capfd, self._begin = directory, capfd, begin
        self._up, self._down = threading.Event(), asyncio.Event()
        self.path = ""

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.world = World()
        self._begin(self.world)
        async with served(self.world, self._directory) as (_, self.path):
            self._up.set()
            await self._down.wait()

    @contextmanager
    def open(self) -> Iterator[Desk]:
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="desk")
        thread.start()
        assert self._up.wait(LIMIT)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._down.set)
            thread.join(LIMIT)

    def do(self, what: Callable[..., Any], *args: Any, **more: Any) -> None:
        """Have a method of the world called there."""

        async def call() -> None:
            done = what(*args, **more)
            if isinstance(done, Coroutine):
                await done

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(LIMIT)

    def say(self, *words: str | Path) -> Said:
        """Type a command."""
        self._capfd.readouterr()
        code = main(list(map(str, words)))
        printed = self._capfd.readouterr()
        return Said(code, printed.out, printed.err)
