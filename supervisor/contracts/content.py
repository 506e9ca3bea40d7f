"""What one file holds: strict JSON, whole, and judged. Standard library only, for it also runs in a process of its own.

Strictness about JSON (no NaN, no key twice, no number that is none) is judged only when the parse has come to its end,
so that a prefix of a right file is never wrong: it is not whole.
"""

from __future__ import annotations

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
TOO_DEEP: Final = "found lists or objects nested too deeply; expected less than a thousand levels"
DIGITS_CAP: Final = 4000
"""Digits of a whole number; Python refuses to read more than 4,300."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of a whole document."""

    problems: tuple[str, ...] = ()  # "place: found X; expected Y"
    summary: dict[str, Any] = field(default_factory=dict)  # small, and what JSON can carry


class NotWhole(Exception):
    """The text ends too early, or is no JSON (yet)."""


def judged(data: bytes, judge: Judge) -> Judged:
    """A document, and what the judge says of it. Raises NotWhole."""
    document, flaws = parse(data)
    if not flaws and not isinstance(document, dict | list):
        flaws = [f"found {shown(document)}; expected a JSON object or list"]
    return Judged(tuple(flaws)) if flaws else _function(judge[0])(document, judge[1])


def parse(data: bytes) -> tuple[Any, list[str]]:
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
        document = json.loads(
            data.decode(), object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=whole
        )
    except RecursionError:
        return None, [TOO_DEEP]
    except ValueError:  # JSONDecodeError and UnicodeDecodeError; where it broke off is another place at each look
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
