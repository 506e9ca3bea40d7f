"""The run's journal: `journal.jsonl`, append-only, one JSON object a line. Everything else is a view of it.

Two kinds of lines share the file, in the order in which things were:

    {"seq": 7, "utc": "...Z", "at": 1234.5, "event": "RankEnded", ...}      what happened (numbered without gaps)
    {"seq": 7, "utc": "...Z", "at": 1234.5, "command": "StopRank", ...}     what event 7 made the machine ask for

The state is the fold of the events; commands are for people and for finding what was under way.

Writing is a thread's work: `append` only queues. `durable` waits until all that was queued is on the disk (fsync), for
at most `limit` seconds. When the disk is full or does not answer, the run goes on in memory: lines are kept and tried
again, `trouble` says so, and so does the receipt. A partial write is finished before anything else is written, so a
line is never torn by a later one.

A reader takes a torn or zero-filled tail for "not yet": after a crash, or while the writer is in the middle of a line,
the last line is no evidence of damage. Anything else that cannot be read is damage, and reading stops there.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.core.events import Record, UnknownEvent, decode
from supervisor.loop.files import read_whole

SIZE: Final = 1 << 30  # bytes that are read at once: more is no journal of ours
RETRY_AFTER: Final = 1.0  # seconds until lines that could not be written are tried again
_MODE: Final = 0o644


class Journal:
    """The writer. One per run; used from one event loop."""

    def __init__(self, path: str, limit: float, on_trouble: Callable[[str], None]) -> None:
        """Creates the file (it must not exist yet). `on_trouble` is called in the loop when writing first fails. Raises
        OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, _MODE)
        self._limit = limit
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._queue: list[bytes] = []
        self._appended = 0
        self._written = 0
        self._closing = self._finished = False
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.trouble: str | None = None
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def append(self, line: dict[str, Any]) -> None:
        """Queue a line. Never blocks, never fails."""
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        data = text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate (a strange name) becomes JSON's escape
        with self._wake:
            self._queue.append(data)
            self._appended += 1
            self._wake.notify()

    async def durable(self) -> bool:
        """Wait until all that was appended is on the disk; False when it is not, and the run goes on in memory."""
        if self.trouble is not None:
            return False
        if self._written >= self._appended:
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._appended, future))
        try:
            async with asyncio.timeout(self._limit):
                await future
        except TimeoutError:
            self._report(f"the journal could not be written within {self._limit:g} s")
        return self.trouble is None

    async def close(self) -> bool:
        """Write what is left, for at most the limit. True when every line is on the disk."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        deadline = self._loop.time() + self._limit
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not self._finished:
                    future: asyncio.Future[None] = self._loop.create_future()
                    self._waiting.append((self._appended + 1, future))
                    await future
        if self._finished:
            self._thread.join(self._limit)  # it has said its last word
        return self._finished and self._written >= self._appended

    # --- the thread ----------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        pending, lines = b"", 0
        failed = unsynced = False
        while True:
            with self._wake:
                if not self._queue and not (pending and failed):
                    if self._closing:
                        break
                    self._wake.wait()
                elif failed:
                    self._wake.wait(RETRY_AFTER)
                taken, self._queue = self._queue, []
                closing = self._closing
            pending += b"".join(taken)
            lines += len(taken)
            if not pending:
                continue
            pending, error = self._write(pending)
            failed = error is not None
            unsynced |= failed and not pending  # written, but nobody knows what of it is on the disk
            if failed:
                self._call(self._report, f"the journal cannot be written: {error}")
                if closing:
                    break
            elif not unsynced:
                self._call(self._progress, lines)
        os.close(self._descriptor)
        self._call(self._through)

    def _write(self, data: bytes) -> tuple[bytes, OSError | None]:
        """Write and sync; what is left when that fails."""
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            return data, error
        return b"", None

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # --- in the loop ---------------------------------------------------------------------------------------------

    def _progress(self, written: int) -> None:
        self._written = written
        still = []
        for count, future in self._waiting:
            if count <= written and not future.done():
                future.set_result(None)
            elif not future.done():
                still.append((count, future))
        self._waiting = still

    def _report(self, text: str) -> None:
        if self.trouble is None:
            self.trouble = text
            self._release()
            self._on_trouble(text)

    def _through(self) -> None:
        self._finished = True
        self._release()

    def _release(self) -> None:
        """Nobody need wait any longer: writing has failed, or the thread is through."""
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()


@dataclass(frozen=True)
class JournalRead:
    """What a journal holds: its records, its command lines, the bytes that were understood (where a follower goes on),
    and what is wrong with the rest: `tail` an unfinished last line, `damage` anything else. `more`: as many records as
    were asked for were read, and the rest was not looked at."""

    records: list[Record] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0
    tail: bool = False
    damage: str | None = None
    more: bool = False


def read_journal(path: str | Path, start: int = 0, seq: int = 0, most: int | None = None) -> JournalRead:
    """Read a journal from byte `start`, whose last record so far had number `seq`; at most so many records. Raises
    OSError."""
    data = read_whole(path, SIZE, start=start)
    records: list[Record] = []
    commands: list[dict[str, Any]] = []
    position = 0
    while position < len(data):
        if len(records) == most:
            return JournalRead(records, commands, start + position, more=True)
        newline = data.find(b"\n", position)
        if newline < 0:
            return JournalRead(records, commands, start + position, tail=True)
        try:
            item = _parse(data[position:newline])
        except (ValueError, KeyError, TypeError) as error:
            if newline + 1 >= len(data) or not data[position:].strip(b"\0\n"):
                return JournalRead(records, commands, start + position, tail=True)
            where = f"line {len(records) + len(commands) + 1} (byte {start + position})"
            return JournalRead(records, commands, start + position, damage=f"{where}: {error}")
        if isinstance(item, dict):
            commands.append(item)
        elif item.seq != seq + len(records) + 1:
            text = f"record {item.seq} follows record {seq + len(records)}"
            return JournalRead(records, commands, start + position, damage=text)
        else:
            records.append(item)
        position = newline + 1
    return JournalRead(records, commands, start + position)


def _parse(line: bytes) -> Record | dict[str, Any]:
    data = json.loads(line)
    if not isinstance(data, dict):
        raise TypeError("not a JSON object")
    if "command" in data:
        return data
    return Record(int(data["seq"]), float(data["at"]), str(data["utc"]), decode(data))


__all__ = ["Journal", "JournalRead", "UnknownEvent", "read_journal"]
