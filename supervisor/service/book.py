"""The service's books: one directory for each allocation, and in it everything that happened to it.

    allocations/KEY/journal.jsonl    append-only, one JSON object a line, on the disk before anybody is told of it
    allocations/KEY/plan.toml        the plan as it was accepted (0600: its env may hold secrets)
    allocations/KEY/request.json     how it was asked for, the caller's environment included (0600); gone once submitted

    {"n": 3, "seq": 41, "utc": "...Z", "event": "StateSeen", ...}

`n` counts the lines of this book without a gap, `seq` those of all books: it grows by one, and no number is used twice.
A line gets its numbers when it is written, so that one that cannot be written uses up none.

**Writing** is the work of one thread. What comes while it writes is written together, each file with one fsync. A new
allocation is written or refused. What happens to one that exists is kept in memory, in its order, when the disk is full
or fails (ENOSPC, EDQUOT, EIO), and written when there is space again; `trouble` says so meanwhile, and also when the
file system says that it has no room for another book; until one can be written on trial. A book that cannot be written
for a reason of its own (somebody has removed it, or cut it short) loses its own lines only. Whatever a failed write has
left of a line is cut off before the next one.

**Reading** happens once, at the start. A last line that is torn or zero-filled was never told to anybody: it is cut off
and reported. Anything else that cannot be read is damage: nobody knows what was there, so the book is left as it is.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from supervisor.core.events import Event, encode
from supervisor.core.kept_events import Accepted
from supervisor.loop.files import read_whole
from supervisor.service.found import BOOKS, JOURNAL, Found, Line, read_book
from supervisor.service.place import OPEN_DIRECTORY, own_directory

PLAN: Final = "plan.toml"
REQUEST: Final = "request.json"

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of the storage as a whole, which may be over later."""
RETRY: Final = 1.0  # seconds until what could not be written is tried again
LOOK: Final = 10.0  # seconds between looks at how much room there is, where nothing is written
ROOM: Final = 1 << 16  # bytes that a book should have
SIZE: Final = 1 << 26  # bytes: no request has more
TRIAL: Final = "trial"  # the key of one that is written on trial: what is left of it nobody was told of

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def put(descriptor: int, data: bytes) -> None:
    """Write and sync. Raises OSError."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


# --- the writer -------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """Something to be written. `files` make it a new book."""

    key: str
    utc: str
    event: Event
    done: asyncio.Future[Line]
    files: Mapping[str, str] | None = None


class Book:
    """All books of a state directory. Made and used in one event loop; `told` is called there for each line, in the
    order of their numbers, when it is on the disk. `ill` is called when `trouble` has changed."""

    def __init__(
        self,
        directory: int,
        *,
        told: Callable[[Line], object],
        ill: Callable[[str], object] = lambda text: None,
        put: Callable[[int, bytes], None] = put,
        retry: float = RETRY,
    ) -> None:
        """`directory` is the state directory's descriptor. Raises Unusable (of the place's)."""
        self._books = own_directory(directory, BOOKS)
        self._where = os.readlink(f"/proc/self/fd/{self._books}")
        self._told, self._ill, self._put, self._retry = told, ill, put, retry
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()  # only ever an error: the writer is dead
        self.trouble = ""
        self._seq = 0
        self._count: dict[str, int] = {}
        self._size: dict[str, int] = {}
        self._wake = threading.Condition()
        self._queue: list[_Entry] = []
        self._waiting: set[asyncio.Future[Line]] = set()
        self._closing = False
        self._thread: threading.Thread | None = None

    def replay(self) -> list[Found]:
        """Read all books, in the order in which they were begun, and go on from there. Blocks; before `start`. Raises
        OSError."""
        found = [book for key in sorted(os.listdir(self._books)) if (book := self._read(key)) is not None]
        for book in found:
            self._seq = max(self._seq, book.newest)
            self._count[book.key], self._size[book.key] = len(book.lines), book.size
        return sorted(found, key=lambda book: book.lines[0].seq if book.lines else 0)

    def _read(self, key: str) -> Found | None:
        """One book; None for one that nobody was ever told of, which is removed."""
        try:
            directory = os.open(key, OPEN_DIRECTORY, dir_fd=self._books)
        except OSError as error:
            return Found(key, f"{self._where}/{key}", damage=f"it cannot be opened: {error.strerror or error}")
        try:
            book = read_book(key, directory)
        finally:
            os.close(directory)
        if book.lines or book.damage:
            return book
        self._remove(key)
        return None

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._work, name="book", daemon=True)
        self._thread.start()

    def create(self, key: str, files: Mapping[str, str], utc: str, event: Accepted) -> asyncio.Future[Line]:
        """Begin a book with these files and its first line. The future raises OSError when it cannot be written; then
        nothing is left of it."""
        return self._add(_Entry(key, utc, event, self._loop.create_future(), files))

    def append(self, key: str, utc: str, event: Event) -> asyncio.Future[Line]:
        """Add a line to a book. The future is done when it is on the disk, however long that takes; it raises OSError
        when this book cannot be written any more."""
        return self._add(_Entry(key, utc, event, self._loop.create_future()))

    def _add(self, entry: _Entry) -> asyncio.Future[Line]:
        entry.done.add_done_callback(_heard)
        if self.failed.done():
            entry.done.set_exception(OSError(errno.EIO, "nobody writes the books any more"))
            return entry.done
        self._waiting.add(entry.done)
        entry.done.add_done_callback(self._waiting.discard)
        with self._wake:
            self._queue.append(entry)
            self._wake.notify()
        return entry.done

    async def close(self, limit: float) -> bool:
        """Write what is left, for at most `limit` seconds; whether all of it is on the disk."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        thread, end = self._thread, self._loop.time() + limit
        while thread and thread.is_alive() and self._loop.time() < end:  # noqa: ASYNC110 - a thread tells no event
            await asyncio.sleep(0.01)
        if thread and thread.is_alive():
            return False  # it holds its descriptors: a dead file system
        self.failed.cancel()
        os.close(self._books)
        await asyncio.sleep(0)  # what it has said last
        return not self._queue

    def remove_file(self, key: str, name: str) -> None:
        """Remove a file of a book that is no longer needed. Blocks; for any thread. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(f"{key}/{name}", dir_fd=self._books)

    def read_file(self, key: str, name: str) -> str:
        """A file of a book. Blocks; for any thread. Raises OSError, and ValueError for what is no text."""
        return read_whole(f"{key}/{name}", SIZE, directory=self._books).decode()

    def is_gone(self, key: str) -> bool:
        """Whether somebody has taken a book away: then it is forgotten. Blocks; for any thread. Raises OSError."""
        try:
            os.stat(key, dir_fd=self._books, follow_symlinks=False)
        except FileNotFoundError:
            self._let_go(key)
            return True
        return False

    def forget(self, key: str) -> None:
        """Remove a book that has come to its end; it must not be the one with the newest line, or numbers would be used
        twice. Blocks; for any thread."""
        self._remove(key)
        self._let_go(key)

    def _let_go(self, key: str) -> None:
        self._count.pop(key, None)
        self._size.pop(key, None)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        left: dict[str, list[_Entry]] = {}
        pause = 0.0
        try:
            while True:
                with self._wake:
                    if not self._queue and not self._closing:
                        self._wake.wait(pause)
                    taken, self._queue = self._queue, []
                    closing = self._closing
                full = self._create([entry for entry in taken if entry.files is not None], bool(left))
                for entry in taken:
                    if entry.files is None:
                        left.setdefault(entry.key, []).append(entry)
                full = self._append(left) or full
                full = full or self._look()
                self._say(f"the books in {self._where} cannot be written: {full}" if full else "")
                if closing and (left or not self._queue):
                    break
                pause = self._retry if full else LOOK
        except BaseException as error:  # noqa: BLE001 - whoever runs the service must know
            self._call(self._fail, error)
        self._queue += [entry for entries in left.values() for entry in entries]

    def _look(self) -> str:
        """What is wrong with the storage, or "". When something was, only what can be written proves anything."""
        try:
            room = os.statvfs(self._books)
            if room.f_blocks and room.f_bavail * room.f_frsize < ROOM:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.trouble:
                self._remove(TRIAL)
                self._make(TRIAL, {PLAN: " " * ROOM}, b"")
                self._remove(TRIAL)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _create(self, new: Iterable[_Entry], full: bool) -> str:
        """Begin new books, unless older lines wait for space. What is wrong with the storage, or ""."""
        said = ""
        for entry in new:
            try:
                if full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data = self._line(entry, 1, self._seq + 1)
                self._make(entry.key, entry.files or {}, data)
            except OSError as error:
                said = (error.strerror or str(error)) if error.errno in FULL and not full else said
                self._call(self._refuse, [entry], error)
            else:
                self._count[entry.key], self._size[entry.key] = 0, 0
                self._wrote([entry], len(data))
        return said

    def _make(self, key: str, files: Mapping[str, str], line: bytes) -> None:
        os.mkdir(key, 0o700, dir_fd=self._books)
        try:
            self._fill(key, files, line)
            os.fsync(self._books)
        except OSError:
            self._remove(key)
            with suppress(OSError):
                os.fsync(self._books)  # what was refused must not be there after a crash
            raise

    def _fill(self, key: str, files: Mapping[str, str], line: bytes) -> None:
        directory = os.open(key, OPEN_DIRECTORY, dir_fd=self._books)
        try:
            for name, data in [*((name, text.encode()) for name, text in files.items()), (JOURNAL, line)]:
                descriptor = os.open(name, _NEW, 0o600, dir_fd=directory)
                try:
                    (self._put if name == JOURNAL else put)(descriptor, data)
                finally:
                    os.close(descriptor)
            os.fsync(directory)
        finally:
            os.close(directory)

    def _append(self, left: dict[str, list[_Entry]]) -> str:
        """Write the lines, book by book; what is on the disk is taken out. What is wrong with the storage, or ""."""
        for key in list(left):
            entries = left[key]
            first = self._count.get(key, 0) + 1
            lines = [self._line(entry, first + i, self._seq + 1 + i) for i, entry in enumerate(entries)]
            try:
                self._extend(key, b"".join(lines))
            except OSError as error:
                if error.errno in FULL:
                    return error.strerror or str(error)
                self._call(self._refuse, entries, error)
            else:
                self._wrote(entries, sum(map(len, lines)))
            del left[key]
        return ""

    def _extend(self, key: str, data: bytes) -> None:
        """Add to a journal, cutting off what an earlier failure left. Raises OSError, also when lines are missing from
        it."""
        descriptor = os.open(f"{key}/{JOURNAL}", _APPEND, dir_fd=self._books)
        try:
            found, known = os.fstat(descriptor).st_size, self._size.get(key, 0)
            if found < known:
                raise OSError(errno.EUCLEAN, f"{JOURNAL} has {found} bytes, and had {known}")
            if found > known:
                os.ftruncate(descriptor, known)
            self._put(descriptor, data)
        finally:
            os.close(descriptor)

    def _line(self, entry: _Entry, n: int, seq: int) -> bytes:
        line = {"n": n, "seq": seq, "utc": entry.utc, **encode(entry.event)}
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode(errors="backslashreplace") + b"\n"

    def _wrote(self, entries: list[_Entry], size: int) -> None:
        lines = []
        for entry in entries:
            self._seq += 1
            lines.append(Line(self._seq, entry.utc, entry.key, entry.event))
        key = entries[0].key
        self._count[key] += len(entries)
        self._size[key] += size
        self._call(self._deliver, entries, lines)

    def _remove(self, key: str) -> None:
        shutil.rmtree(key, ignore_errors=True, dir_fd=self._books)

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._call(self._ill, trouble)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _deliver(self, entries: list[_Entry], lines: list[Line]) -> None:
        for entry, line in zip(entries, lines, strict=True):
            if not entry.done.done():
                entry.done.set_result(line)
        for line in lines:
            try:
                self._told(line)
            except Exception as error:  # noqa: BLE001 - the lines are on the disk, and the others are to be told, too
                context = {"message": f"line {line.seq} of the books could not be told", "exception": error}
                self._loop.call_exception_handler(context)

    def _refuse(self, entries: list[_Entry], error: OSError) -> None:
        for entry in entries:
            if not entry.done.done():
                entry.done.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(OSError(errno.EIO, "nobody writes the books any more"))


def _heard(future: asyncio.Future[Line]) -> None:
    """Whether somebody waits or not, an error of a line is no news to asyncio."""
    if not future.cancelled():
        future.exception()
