"""Reading plan files: TOML on disk -> a checked Plan, or every error with its file, line and key.

The rules are `supervisor.core.plan`'s. Here is what needs a file: opening it, its encoding, TOML's own syntax, and
the line on which a key stands (Python's TOML reader keeps no positions for what it has read).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from supervisor.core import finalization
from supervisor.core.fields import PlanError, PlanErrors, join
from supervisor.core.plan import Plan, parse_plan

_TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'" + r"|#[^\n]*", re.DOTALL
)
_PART = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_PART}(?:\s*\.\s*{_PART})*)\s*\]")
_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load_plan(path: str | Path) -> Plan:
    """The plan in the TOML file `path`. Raises PlanErrors, also for a file that cannot be read or is not TOML."""
    return read_plan(path)[0]


def read_plan(path: str | Path) -> tuple[Plan, str]:
    """The plan in a file, with what the environment sets in it, and the file's text, read once: it may be a pipe, or
    change. Raises PlanErrors."""
    text = _text(path, str(path))
    return plan_of(text, str(path), os.environ), text


def plan_of(text: str, source: str, environ: Mapping[str, str]) -> Plan:
    """The plan that a text is, with what the environment sets in it; `source` names it in errors. Raises PlanErrors."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise PlanErrors([PlanError("", "lists or tables nested too deeply", "a plan")], source) from None
    except ValueError as error:  # TOMLDecodeError, and a number that is too long
        raise PlanErrors([_syntax_error(str(error), text)], source) from None
    try:
        plan, errors = parse_plan(data, source), []
    except PlanErrors as wrong:
        plan, errors = None, list(_with_lines(wrong.errors, text))
    errors += finalization.mistakes(plan, environ)
    if plan is None or errors:
        raise PlanErrors(errors, source) from None
    return finalization.with_window(plan, environ)


def _text(path: str | Path, source: str) -> str:
    try:
        data = Path(path).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise PlanErrors([PlanError("", error.strerror or str(error), "a plan that can be read")], source) from None
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):  # a NUL in the path
            raise PlanErrors([PlanError("", str(error), "the path of a plan")], source) from None
        line = data.count(b"\n", 0, error.start) + 1
        found = f"bytes that are no UTF-8 ({error.reason})"
        raise PlanErrors([PlanError("", found, "TOML in UTF-8", line)], source) from None


def _syntax_error(message: str, text: str) -> PlanError:
    """TOML's words, with the line as a number and the column in the text."""
    place = _SYNTAX_PLACE.search(message)
    if place is None:
        return PlanError("", message, "TOML")
    line, column = place.groups()
    words = message[: place.start()]
    if line is None:
        return PlanError("", f"the end of the file ({words})", "TOML", text.count("\n") + 1)
    return PlanError("", f"{words[:1].lower()}{words[1:]} at column {column}", "TOML", int(line))


def _with_lines(errors: list[PlanError], text: str) -> Iterator[PlanError]:
    """The errors in the order of their lines; one whose key is not in the file takes the line of its table."""
    lines = key_lines(text)

    def line_of(key_path: str) -> int | None:
        while key_path and key_path not in lines:
            key_path = re.sub(r"""(?:\[\d+\]|\.?(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"))$""", "", key_path)
        return lines.get(key_path)

    yield from sorted(
        (error._replace(line=line_of(error.key_path)) for error in errors), key=lambda error: error.line or 0
    )


def key_lines(text: str) -> dict[str, int]:
    """Key path -> line (1-based) where each table and key first stands in `text`, which is valid TOML.

    Keys inside inline tables are not looked at: they share their table's line.
    """
    lines: dict[str, int] = {}
    tables: dict[str, int] = {}  # [[name]] -> the number of its last one
    prefix, depth = "", 0
    for number, line in enumerate(_TOKENS.sub(_one_line, text).split("\n"), 1):
        if depth == 0 and (header := _HEADER.match(line)):
            *above, prefix = _paths("", header[2], tables)
            if header[1] == "[[":
                above.append(prefix)
                tables[prefix] = tables.get(prefix, -1) + 1
                prefix = f"{prefix}[{tables[prefix]}]"
            _note(lines, [*above, prefix], number)
            continue
        if depth == 0 and (key := _KEY.match(line)):
            _note(lines, _paths(prefix, key[1], {}), number)
        bare = _TOKENS.sub("", line)
        depth += sum(map(bare.count, "[{")) - sum(map(bare.count, "]}"))
    return lines


def _note(lines: dict[str, int], paths: Iterable[str], number: int) -> None:
    for path in paths:
        lines.setdefault(path, number)


def _one_line(token: re.Match[str]) -> str:
    """Comments go, and so does what spans lines (its line breaks stay): brackets in there are only text."""
    word = token[0]
    spans = word.startswith(('"""', "'''"))
    return "" if word.startswith("#") else "\n" * word.count("\n") if spans else word


def _paths(prefix: str, dotted: str, tables: dict[str, int]) -> Iterator[str]:
    """The key paths of each part of a dotted TOML key below `prefix`; a list of tables on the way means its last."""
    path = prefix
    for part in re.findall(_PART, dotted):
        if path in tables:
            path = f"{path}[{tables[path]}]"
        path = join(path, _unquoted(part))
        yield path


def _unquoted(part: str) -> str:
    if part[0] not in "\"'":
        return part
    return str(tomllib.loads(f"key = {part}")["key"])
