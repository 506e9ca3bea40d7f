"""Substitutions in a plan's strings: `{jobid}` and its like, `{{` and `}}` where a brace is meant.

A word that is not known is an error before anything starts, and never an empty string in a command.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Final

RUN_WORDS: Final = ("jobid", "run_dir", "logs", "nodes", "coordinator_node")
"""Substitutions known everywhere in a run; `coordinator_node` only in a plan that has a coordinator."""
RANK_WORDS: Final = ("rank", "node", "role")
"""Known only where one rank is meant: a role's command, env and cwd, an artifact with per = "node"."""
CONCURRENCY: Final = "concurrency"
"""Known only in the path of a sweep's results."""


class SubstitutionError(ValueError):
    """A string holds an unknown substitution or a brace that stands alone."""


_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{word}` by its value, `{{` by `{` and `}}` by `}`; a value is never read again.

    Raises SubstitutionError for a word without a value and for a lone brace.
    """

    def one(match: re.Match[str]) -> str:
        token, word = match[0], match[1]
        if token in ("{{", "}}"):
            return token[0]
        if word is None:
            raise SubstitutionError(f"a lone {token} in {show(text)}: write {token}{token}")
        if word not in values:
            raise SubstitutionError(f"{{{word}}} in {show(text)} is not known here")
        return values[word]

    return _BRACES.sub(one, text)


def literal(text: str) -> str:
    """The pattern of names (`*`, `?`, `[...]`) that matches this text only: what a value holds is no pattern."""
    return re.sub(r"([*?\[])", r"[\1]", text)


class _Noted(dict[str, str]):
    """Values that accept every word and remember which were asked for."""

    def __contains__(self, word: object) -> bool:
        return True

    def __missing__(self, word: str) -> str:
        self[word] = ""
        return ""


def words_in(text: str) -> tuple[str, ...]:
    """The substitution words that `text` uses, each once. Raises SubstitutionError for a lone brace."""
    noted = _Noted()
    substitute(text, noted)
    return tuple(noted)


def show(value: object) -> str:
    """A value as a message shows it: JSON-like, one line, short, free of control characters."""
    if isinstance(value, dict):
        return "a table" if value else "an empty table"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 72 else f"{text[:68]} ..."
