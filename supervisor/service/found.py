"""Books as they are found at the start: what is in them, what was torn, and what is damaged (`book.py` says when)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.core.events import Event, decode
from supervisor.core.kept_events import KINDS

BOOKS: Final = "allocations"
JOURNAL: Final = "journal.jsonl"

_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TOO_LARGE: Final = 1 << 53  # what every JSON reader keeps is below it


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a book, which is on the disk."""

    seq: int
    utc: str
    key: str
    event: Event


@dataclass
class Found:
    """A book as it was found, in the directory `path`. `cut`: bytes of a torn last line that were cut off. `damage`
    says why it cannot be read; `lines` are those before. `newest`: the highest number in it, also after the damage."""

    key: str
    path: str
    lines: list[Line] = field(default_factory=list)
    cut: int = 0
    damage: str = ""
    size: int = 0
    newest: int = 0

    def advice(self, damage: str) -> str:
        """What is wrong with it, and what to do."""
        return (
            f"its book is damaged ({damage}), and allocd does nothing for it (its job goes on): move {self.path} away "
            "to have allocd forget it"
        )


def read_book(key: str, directory: int, *, mend: bool = True) -> Found:
    """A book in an open directory; a torn last line is cut off, unless the reader only looks (`mend`). Raises
    nothing."""
    book = Found(key, os.readlink(f"/proc/self/fd/{directory}"))
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid():
            book.damage = f"it belongs to user {status.st_uid}"
            return book
        descriptor = os.open(JOURNAL, _FLAGS | (os.O_RDWR if mend else os.O_RDONLY), dir_fd=directory)
    except FileNotFoundError:
        return book
    except OSError as error:
        book.damage = f"{JOURNAL} cannot be opened: {error.strerror or error}"
        return book
    try:
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
        _parse(book, data)
        if mend and not book.damage and book.size < len(data):
            book.cut = len(data) - book.size
            os.ftruncate(descriptor, book.size)
            os.fsync(descriptor)
    except OSError as error:
        book.damage = f"{JOURNAL} cannot be read: {error.strerror or error}"
    finally:
        os.close(descriptor)
    return book


def _parse(book: Found, data: bytes) -> None:
    while book.size < len(data):
        end = data.find(b"\n", book.size)
        if end < 0:
            return  # torn
        try:
            book.lines.append(_line(book, data[book.size : end]))
        except (ValueError, KeyError, TypeError) as error:
            no_json = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
            last = end + 1 == len(data) or not data[book.size :].strip(b"\0\n")
            if not (no_json and last):  # a whole line that says what cannot be is no torn one
                book.damage = f"{JOURNAL}, line {len(book.lines) + 1}: {error}"
                book.newest = max([book.newest, *_numbers(data[book.size :])])
            return
        book.size = end + 1
        book.newest = book.lines[-1].seq


def _numbers(data: bytes) -> Iterator[int]:
    """The numbers of lines that cannot be understood otherwise: they were told, and must not be used again."""
    for line in data.split(b"\n"):
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            seq = json.loads(line)["seq"]
            if type(seq) is int and seq < _TOO_LARGE:
                yield seq


def _line(book: Found, text: bytes) -> Line:
    data: dict[str, Any] = json.loads(text)
    if not isinstance(data, dict):
        raise TypeError("no JSON object")
    n, seq = int(data["n"]), int(data["seq"])
    if n != len(book.lines) + 1:
        raise ValueError(f"line {n} stands in the place of line {len(book.lines) + 1}")
    if book.lines and seq <= book.lines[-1].seq:
        raise ValueError(f"number {seq} follows number {book.lines[-1].seq}")
    return Line(seq, str(data["utc"]), book.key, decode(data, KINDS))
