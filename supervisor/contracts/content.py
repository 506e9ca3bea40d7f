"""What one file holds: read whole, as strict JSON, and judged. Standard library only, for it also runs in a process of
its own (see reader).

* Strictness about JSON (no NaN, no key twice, no number that is none) is judged only when the parse has come to its
  end, so that a prefix of a right file is never wrong: it is not whole.
* In JSON lines each line that is not empty is a document. One that its newline ends says what it says; the last one
  may still grow when it has none. A zero byte is a place that was not written yet.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from supervisor.core.substitution import show

Judge = tuple[str, dict[str, Any]]
"""Who says whether a document is right: "package.module:function", and options that JSON can carry. The function takes
the document and the options, and returns Judged."""

NOT_WHOLE: Final = "found no whole JSON document; expected one"
CHANGING: Final = "found a file that is being written; expected it to stay as it is"
TOO_DEEP: Final = "found lists or objects nested too deeply; expected less than a thousand levels"
DIGITS_CAP: Final = 4000
"""Digits of a whole number; Python refuses to read more than 4,300."""
PROBLEMS_CAP: Final = 20
"""Problems of one file that are told."""
_BLOCK: Final = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of a whole document."""

    problems: tuple[str, ...] = ()  # "place: found X; expected Y"
    summary: dict[str, Any] = field(default_factory=dict)  # small, and what JSON can carry


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds that was read whole. The summary of JSON lines is their number, `{"lines": 3}`."""

    sha256: str
    problems: tuple[str, ...]
    summary: dict[str, Any]


class NotWhole(Exception):
    """The text ends too early, or is no JSON (yet)."""


class Changing(Exception):
    """The file is not of the size that it had."""


def examine(file: io.FileIO, size: int, judge: Judge, lines: bool) -> Content:
    """A file of `size` bytes, read from its beginning and judged: one document, or one a line. Raises NotWhole,
    Changing, OSError."""
    digest = hashlib.sha256()
    said = _judged_lines(file, size, judge, digest.update) if lines else judged(whole(file, size, digest.update), judge)
    told = said.problems[:PROBLEMS_CAP]
    if len(told) < len(said.problems):
        told += ("found more problems; only the first are told",)
    return Content(digest.hexdigest(), told, said.summary)


def looks_cut(first: bytes, last: bytes) -> bool:
    """Whether the first and the last bytes of a file show that it is no whole list or object: what is large and still
    grows need not be read for that. False when they do not tell."""
    first, last = first.lstrip(), last.rstrip()
    return bool(first and last) and {b"{": b"}", b"[": b"]"}.get(first[:1], last[-1:]) != last[-1:]


def whole(file: io.FileIO, size: int, update: Callable[[memoryview], None]) -> bytearray:
    """All of a file, in one piece of memory, hashed on the way. Raises Changing."""
    data, at = bytearray(size), 0
    with memoryview(data) as view:
        while at < size and (read := file.readinto(view[at : at + _BLOCK])):
            update(view[at : at + read])
            at += read
    if at < size or file.read(1):
        raise Changing(CHANGING)
    return data


def _judged_lines(file: io.FileIO, size: int, judge: Judge, update: Callable[[bytes], None]) -> Judged:
    problems: list[str] = []
    read = lines = 0
    buffered = io.BufferedReader(file, _BLOCK)
    try:
        for number, line in enumerate(buffered, 1):
            update(line)
            read += len(line)
            if read > size:
                break
            if line.strip():
                lines += 1
                said = _line(line, number, judge)
                problems += said if len(problems) <= PROBLEMS_CAP else ()
    finally:
        buffered.detach()  # else it would close the file
    if read != size:
        raise Changing(CHANGING)
    return Judged(tuple(problems), {"lines": lines})


def _line(line: bytes, number: int, judge: Judge) -> list[str]:
    try:
        said = judged(line, judge)
    except NotWhole:
        if not line.endswith(b"\n") or b"\0" in line:
            raise NotWhole(f"line {number}: {NOT_WHOLE}") from None
        return [f"line {number}: found no JSON; expected a JSON object or list"]
    return [f"line {number}: {problem}" for problem in said.problems]


def judged(data: bytes | bytearray, judge: Judge) -> Judged:
    """A document, and what the judge says of it. Raises NotWhole."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise NotWhole(NOT_WHOLE) from None
    del data  # the caller has let go of it too: what is large is held once
    document, flaws = parse(text)
    if not flaws and not isinstance(document, dict | list):
        flaws = [f"found {shown(document)}; expected a JSON object or list"]
    return Judged(tuple(flaws)) if flaws else _function(judge[0])(document, judge[1])


def parse(text: str) -> tuple[Any, list[str]]:
    """A JSON document, and what is not strict in it. Raises NotWhole."""
    flaws: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    flaws.append(f"found the key {show(key)} twice in one object; expected it once")
                seen.add(key)
        return found

    def constant(word: str) -> float:
        flaws.append(f"found {word}; expected JSON, which has finite numbers only")
        return 0.0

    def real(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(show(text))

    def whole(text: str) -> int:
        return int(text) if len(text) <= DIGITS_CAP else int(constant(f"a number of {len(text)} digits"))

    try:
        document = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=whole)
    except RecursionError:
        return None, [TOO_DEEP]
    except ValueError:  # where it broke off is another place at each look
        raise NotWhole(NOT_WHOLE) from None
    return document, flaws


def shown(value: Any) -> str:
    """A JSON value as a message shows it."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else show(value)


def _function(name: str) -> Callable[[Any, dict[str, Any]], Judged]:
    module, _, function = name.partition(":")
    found: Callable[[Any, dict[str, Any]], Judged] = getattr(import_module(module), function)
    return found
