"""An allocation's logs as a stream: what is there, and what comes while the run lives.

Each look reads in a thread (`runs/growing.py`), and the next one comes when the reader has taken what the last one
found: a reader that is slow slows down its own looks alone. A job that is requeued goes on in another run directory:
its logs follow those of the attempt before. Of an array those of all tasks come as they grow.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from supervisor.loop.threads import in_thread
from supervisor.runs.growing import Lines, Logs
from supervisor.runs.papers import opening_of
from supervisor.service.interface import Allocation
from supervisor.service.problems import refuse

SHORTEST: Final = 0.2  # seconds between looks while something comes
LONGEST: Final = 2.0  # and while nothing does
SLOWER: Final = 1.5
LOOK_LIMIT: Final = 10.0  # seconds that one look may take
TAIL: Final = 1024 * 1024  # bytes of each log that are looked through for its last lines
PIECE: Final = 64 * 1024  # bytes that are sent at once, about


@dataclass(frozen=True)
class Wanted:
    """Which lines, and how they are written. `ranks` and `kinds`: empty means all."""

    ranks: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    follow: bool = False
    tail: int | None = None
    as_json: bool = False

    def fits(self, rank: int, kind: str) -> bool:
        """Whether a log is wanted."""
        return (not self.ranks or rank in self.ranks) and (not self.kinds or kind in self.kinds)

    @property
    def one(self) -> bool:
        """Whether there is one log at most: its lines are written as they are."""
        return len(set(self.ranks)) == len(set(self.kinds)) == 1


@dataclass
class _Run:
    """The logs of one run directory."""

    directory: str
    wanted: Wanted
    first: bool = True
    logs: Logs = field(init=False)

    def __post_init__(self) -> None:
        newest = None if self.wanted.tail is None else TAIL
        self.logs = Logs(self.directory, self.wanted.fits, newest=newest)

    def look(self, last: bool) -> list[Lines]:
        """In a thread. What has come; of the first look, when a tail is wanted, the last lines of each log."""
        found = self._look(last)
        if self.first and self.wanted.tail is not None:
            found = self._tail(found, last)
        self.first = False
        return found

    def _look(self, last: bool) -> list[Lines]:
        found = self.logs.look(last)
        return found + self.logs.last_lines() if last and not self.logs.more else found

    def _tail(self, found: list[Lines], last: bool) -> list[Lines]:
        lines: dict[str, deque[bytes]] = {}
        while True:
            for name, new in found:
                lines.setdefault(name, deque(maxlen=self.wanted.tail)).extend(new)
            if not self.logs.more:
                return [(name, list(kept)) for name, kept in lines.items()]
            found = self._look(last)

    def written(self, found: list[Lines]) -> Iterable[bytes]:
        """The lines as they are sent, in pieces."""
        piece = bytearray()
        for name, lines in found:
            for line in lines:
                piece += self._written(name, line)
                if len(piece) >= PIECE:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)

    def _written(self, name: str, line: bytes) -> bytes:
        if self.wanted.as_json:
            document = {"schema_version": 1, "run": os.path.basename(self.directory), "file": name}
            return json.dumps({**document, "text": line.decode(errors="replace")}).encode() + b"\n"
        if self.wanted.one:
            return line + b"\n"
        run_id = os.path.basename(self.directory)
        return os.fsencode(f"{run_id}/{name}: " if "_" in run_id else f"{name}: ") + line + b"\n"


def count_ranks(run_dir: str) -> int:
    """How many ranks a run has, by the first line of its journal; 0 when that cannot be told. Blocks."""
    opening, _ = opening_of(run_dir)
    return len(opening["nodes"]) if opening and isinstance(opening.get("nodes"), list) else 0


async def log_lines(
    find: Callable[[], Allocation], wanted: Wanted, closing: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """The lines. `find` gives the allocation as it is now; `closing`: end after one more look. Raises Refusal (507)
    when the directory cannot be read."""
    runs: dict[str, _Run] = {}  # by directory
    pause = SHORTEST
    while True:
        now, closes = find(), closing.is_set()
        over = now.state in ("damaged", "ended") or not wanted.follow
        directories = now.run_dirs or tuple(filter(None, [now.run_dir]))
        passed = [run for directory, run in runs.items() if directory not in directories]
        if not passed:  # what an attempt has left comes before the logs of the next one
            runs |= {directory: _Run(directory, wanted) for directory in directories if directory not in runs}
        came, looked = False, passed or list(runs.values())
        for run in looked:
            found = await _look(run, over or run in passed)
            came |= bool(found)
            for piece in run.written(found):
                yield piece
        if any(run.logs.more for run in looked):
            continue
        for run in passed:
            del runs[run.directory]
        if passed:
            continue
        if over or closes:
            return
        pause = SHORTEST if came else min(pause * SLOWER, LONGEST)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await closing.wait()


async def _look(run: _Run, last: bool) -> list[Lines]:
    try:
        return await in_thread(run.look, last, limit=LOOK_LIMIT)
    except OSError as error:  # TimeoutError is one
        raise refuse("storage", f"the logs in {run.directory} cannot be read: {error}") from error
