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
SHORT: Final = 6
"""Characters of a number that is kept once, however often it is there: a short one is many times in a large list, and
an object for each would take six times the memory of its text."""
_KEPT_CAP: Final = 1 << 17  # numbers
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
    judging, update = Judging(judge), digest.update
    said = _lines(file, size, judging, update) if lines else judging.say(whole(file, size, update))
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


def _lines(file: io.FileIO, size: int, judging: Judging, update: Callable[[bytes], None]) -> Judged:
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
                said = _line(line, number, judging)
                problems += said if len(problems) <= PROBLEMS_CAP else ()
    finally:
        buffered.detach()  # else it would close the file
    if read != size:
        raise Changing(CHANGING)
    return Judged(tuple(problems), {"lines": lines})


def _line(line: bytes, number: int, judging: Judging) -> list[str]:
    try:
        said = judging.say(line)
    except NotWhole:
        if not line.endswith(b"\n") or b"\0" in line:
            raise NotWhole(f"line {number}: {NOT_WHOLE}") from None
        return [f"line {number}: found no JSON; expected a JSON object or list"]
    return [f"line {number}: {problem}" for problem in said.problems]


class Judging:
    """Parses documents strictly, and has them judged."""

    def __init__(self, judge: Judge) -> None:
        name, self._options = judge
        module, _, function = name.partition(":")
        self._judge: Callable[[Any, dict[str, Any]], Judged] = getattr(import_module(module), function)
        self._flaws: list[str] = []
        self._reals: dict[str, float] = {}
        self._wholes: dict[str, int] = {}
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object,
            parse_constant=self._constant,
            parse_float=self._real,
            parse_int=self._whole,
        )

    def say(self, data: bytes | bytearray) -> Judged:
        """A document, and what the judge says of it. Raises NotWhole."""
        self._flaws = []
        try:
            text = data.decode()
            del data  # the caller has let go of it too: what is large is held once
            document = self._decoder.decode(text)
        except RecursionError:
            return Judged((TOO_DEEP,))
        except ValueError:  # no UTF-8 or no JSON; where it broke off is another place at each look
            raise NotWhole(NOT_WHOLE) from None
        if not self._flaws and not isinstance(document, dict | list):
            return Judged((f"found {shown(document)}; expected a JSON object or list",))
        try:
            return Judged(tuple(self._flaws)) if self._flaws else self._judge(document, self._options)
        except RecursionError:  # as deep as can be read may be too deep to be judged
            return Judged((TOO_DEEP,))

    def _object(self, items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    self._flaws.append(f"found the key {show(key)} twice in one object; expected it once")
                seen.add(key)
        return found

    def _constant(self, word: str) -> float:
        self._flaws.append(f"found {word}; expected JSON, which has finite numbers only")
        return 0.0

    def _real(self, text: str) -> float:
        value = self._reals.get(text)
        if value is None:
            value = float(text)
            if len(text) <= SHORT and len(self._reals) < _KEPT_CAP:
                self._reals[text] = value
        return value if math.isfinite(value) else self._constant(show(text))

    def _whole(self, text: str) -> int:
        value = self._wholes.get(text)
        if value is None:
            if len(text) > DIGITS_CAP:
                return int(self._constant(f"a number of {len(text)} digits"))
            value = int(text)
            if len(text) <= SHORT and len(self._wholes) < _KEPT_CAP:
                self._wholes[text] = value
        return value


def shown(value: Any) -> str:
    """A JSON value as a message shows it."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object" if isinstance(value, dict) else show(value)
