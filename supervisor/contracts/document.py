"""A JSON document that is being judged: values by their place, and what is wrong with them, in order.

A `Field` is a value and the way to it. It is asked for what it must be; when it is not, it says so with its place, and
the answer is None or False. Integers are integers: true is none, and neither is 1.0.
"""

from __future__ import annotations

import math
from typing import Any, Final

from supervisor.contracts.rules import ABSENT, shown
from supervisor.core.substitution import show


class Field:
    """A value of a document. The problems of all fields of a document are in one list."""

    __slots__ = ("_key", "_parent", "problems", "value")

    def __init__(self, value: Any, problems: list[str], parent: Field | None = None, key: str | int = "$") -> None:
        self.value: Final[Any] = value
        self.problems: Final = problems
        self._parent = parent
        self._key = key

    @property
    def place(self) -> str:
        """Where it is: `$.results[0].point`."""
        if self._parent is None:
            return str(self._key)
        return f"{self._parent.place}[{self._key}]" if isinstance(self._key, int) else self._parent._below(self._key)

    def _below(self, key: str) -> str:
        return f"{self.place}.{key}" if key.isidentifier() else f"{self.place}[{show(key)}]"

    def __getitem__(self, key: str) -> Field:
        value = self.value.get(key, ABSENT) if isinstance(self.value, dict) else ABSENT
        return Field(value, self.problems, self, key)

    def wrong(self, expected: str, found: str | None = None) -> None:
        """Say that this is not what it must be."""
        self.problems.append(f"{self.place}: found {found or shown(self.value)}; expected {expected}")

    @property
    def absent(self) -> bool:
        """Whether there is no such field; null is one."""
        return self.value is ABSENT

    def table(self) -> bool:
        """Whether it is an object, as it must be."""
        if not isinstance(self.value, dict):
            self.wrong("an object")
            return False
        return True

    def items(self) -> list[Field]:
        """What is in a list, as it must be."""
        if not isinstance(self.value, list):
            self.wrong("a list")
            return []
        return [Field(value, self.problems, self, i) for i, value in enumerate(self.value)]

    def equals(self, expected: str | int | bool | None, why: str = "") -> bool:
        """Whether it is this value, and of its type."""
        right = type(self.value) is type(expected) and bool(self.value == expected)
        if not right:
            self.wrong(show(expected) + why)
        return right

    def one_of(self, expected: tuple[str, ...]) -> str | None:
        """One of these words."""
        if isinstance(self.value, str) and self.value in expected:
            return self.value
        self.wrong(" or ".join(show(word) for word in expected))
        return None

    def text(self) -> str | None:
        """A string that is not empty."""
        if isinstance(self.value, str) and self.value:
            return self.value
        self.wrong("a string that is not empty")
        return None

    def whole(self, least: int, most: int | None = None) -> int | None:
        """An integer from `least` to `most`."""
        if type(self.value) is int and self.value >= least and (most is None or self.value <= most):
            return self.value
        self.wrong(f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}")
        return None

    def positive(self) -> int | float | None:
        """A finite number above 0."""
        value = self.value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
        self.wrong("a finite number above 0")
        return None

    def counts_up(self, size: int) -> bool:
        """Whether it is the list 0, 1, ... size-1."""
        right = (
            isinstance(self.value, list)
            and len(self.value) == size
            and all(type(value) is int and value == i for i, value in enumerate(self.value))
        )
        if not right:
            self.wrong(f"the list of the ranks 0 to {size - 1} in order", _listed(self.value))
        return right

    def file_name(self) -> str | None:
        """The last component of a path that somebody else wrote: a name to be compared, and never to be followed."""
        parts = self.value.split("/") if isinstance(self.value, str) else [""]
        if parts[-1] in ("", ".") or ".." in parts or not self.value.isprintable():
            self.wrong('the path of a file, without ".."')
            return None
        return parts[-1]


def _listed(value: Any) -> str | None:
    return show(value) if isinstance(value, list) else None
