"""Ways to watch directories, each a process: `python -m tests.bench.watchers WAY DIRECTORY`. Says `ready` once it knows
what is there, then watches until it is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

PERIOD = 1.0  # seconds between rounds of those that look at every file


def asleep(_: Path) -> None:
    """Nothing: what the imports of ours take."""
    from supervisor.engine import watcher  # noqa: F401

    async def sleep() -> None:
        _ready()
        await asyncio.sleep(3600)

    asyncio.run(sleep())


def events(base: Path) -> None:
    """Ours, where events are believed."""
    _ours(base)


def polling(base: Path) -> None:
    """Ours, where they are not, after nothing has happened for long."""
    from supervisor.engine import watcher
    from supervisor.watch import polling
    from supervisor.watch.filesystems import FileSystem

    polling.FIRST = polling.LAST  # type: ignore[misc]
    with mock.patch.object(watcher, "file_system", return_value=FileSystem("nfs4", "/")):
        _ours(base)


def _ours(base: Path) -> None:
    from supervisor.engine.watcher import Watcher
    from supervisor.watch.polling import Target

    targets = [Target(str(base), path) for path in _directories(base)]
    seen: set[Target] = set()

    def visited(target: Target, _: bool) -> None:
        if len(seen) < len(targets):
            seen.add(target)
            if len(seen) == len(targets):
                _ready()

    async def watch() -> None:
        await Watcher([targets], visited, lambda *_: None).run()

    asyncio.run(watch())


def stat(base: Path) -> None:
    """Every file's size and time, again and again."""
    known: dict[str, tuple[int, int]] = {}
    while True:
        found = {}
        for directory in _directories(base):
            with os.scandir(directory) as entries:
                for entry in entries:
                    status = entry.stat()
                    found[entry.path] = (status.st_size, status.st_mtime_ns)
        if not known:
            _ready()
        known = found
        time.sleep(PERIOD)


def watchfiles(base: Path) -> None:
    """The library, polling as slowly as the one above."""
    from watchfiles import watch

    for index, _ in enumerate(
        watch(base, force_polling=True, poll_delay_ms=int(PERIOD * 1000), rust_timeout=1000, yield_on_timeout=True)
    ):
        if index == 0:
            _ready()


def _directories(base: Path) -> list[str]:
    return [entry.path for entry in os.scandir(base)]


def _ready() -> None:
    print("ready", flush=True)


WAYS: dict[str, Callable[[Path], None]] = {way.__name__: way for way in (asleep, events, polling, stat, watchfiles)}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Path(sys.argv[2]))
