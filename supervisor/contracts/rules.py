"""A plan's rules for the fields of a JSON document."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from supervisor.contracts import content
from supervisor.contracts.content import Judge, Judged
from supervisor.core.artifact_table import FieldRule


class _Absent:
    """The type of ABSENT: no such field (null is one)."""


ABSENT: Final = _Absent()


def judge_of(fields: Mapping[str, FieldRule]) -> Judge:
    """The judge that applies these rules."""
    return "supervisor.contracts.rules:document", {"fields": {path: asdict(rule) for path, rule in fields.items()}}


def document(found: Any, options: dict[str, Any]) -> Judged:
    """Judge: `options["fields"]` holds a rule for each dotted path."""
    rules = {path: FieldRule(**rule) for path, rule in options["fields"].items()}
    return Judged(tuple(problem for path, rule in rules.items() for problem in problems(found, path, rule)))


def problems(found: Any, path: str, rule: FieldRule) -> list[str]:
    """What the value at `path` breaks."""
    value = lookup(found, path)
    if rule.exists is False:
        return [] if value is ABSENT else [f"{path}: found {shown(value)}; expected no such field"]
    wanted = [
        (words.format(shown(limit)), holds(value, limit))
        for name, words, holds in FIELD_RULES
        if (limit := getattr(rule, name)) is not None
    ]
    return [f"{path}: found {shown(value)}; expected {words}" for words, holds in wanted if not holds]


def lookup(found: Any, path: str) -> Any:
    """The value at a dotted path (`\\.` is a dot in a name, a number a place in a list), or ABSENT."""
    value = found
    for part in re.split(r"(?<!\\)\.", path):
        key = part.replace("\\.", ".")
        if isinstance(value, dict):
            value = value.get(key, ABSENT)
        elif isinstance(value, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(value):
            value = value[int(key)]
        else:
            return ABSENT
    return value


def shown(value: Any) -> str:
    """A value, or ABSENT, as a message shows it."""
    return "nothing" if value is ABSENT else content.shown(value)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number: true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(value: Any, wanted: Any) -> bool:
    """Equal, and of the same kind: true is not 1, but 1.0 is."""
    alike = type(value) is type(wanted) or (is_number(value) and is_number(wanted))
    return alike and bool(value == wanted)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, str | list | dict) else None


FIELD_RULES: Final[tuple[tuple[str, str, Callable[[Any, Any], bool]], ...]] = (
    ("exists", "a value", lambda value, limit: value is not ABSENT),
    ("equals", "{}", _same),
    ("min", "a number, {} or more", lambda value, limit: is_number(value) and value >= limit),
    ("max", "a number, {} or less", lambda value, limit: is_number(value) and value <= limit),
    ("length_min", "a length of {} or more", lambda value, limit: (n := _length(value)) is not None and n >= limit),
    ("length_max", "a length of {} or less", lambda value, limit: (n := _length(value)) is not None and n <= limit),
)
"""Field of FieldRule, what it expects in words, and whether a value (or ABSENT) obeys its limit."""
