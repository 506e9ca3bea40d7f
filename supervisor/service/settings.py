"""The daemon's settings: flags over environment over file over default.

    allocd --limit 20            ALLOCD_LIMIT=20            $XDG_CONFIG_HOME/allocd/allocd.toml:  limit = 20

All that is wrong is told at once, each error with its place. A reload (SIGHUP) reads the file again; settings with
which something cannot be done any more, or that are wrong, change nothing then. `patience` and `outage` count for
allocations that are followed from then on; `log_level` and `log_format` from the next start.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Final


class SettingsErrors(Exception):
    """Everything that is wrong, a sentence a line."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`limit`: allocations that are submitted or run at a time, the others wait in the queue. `collect`: the directory
    into which receipts, journals and logs of ended runs are copied ("": nowhere). `patience`: seconds to examine a
    doubt about a job's end; `outage`: seconds to wait for a Slurm that is away. `keep`: allocations that have ended and
    are still told of."""

    limit: int = 100
    collect: str = ""
    patience: float = 30.0
    outage: float = 86_400.0
    keep: int = 10_000
    log_level: str = "info"
    log_format: str = "auto"


BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "limit": (1, 100_000),
    "patience": (0, 3600),
    "outage": (0, 2_592_000),
    "keep": (1, 1_000_000),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("auto", "json", "console"),
}
HELP: Final[Mapping[str, str]] = {
    "limit": "allocations that are submitted or run at a time",
    "collect": "directory for copies of receipts, journals and logs of ended runs",
    "patience": "seconds to examine a doubt about a job's end",
    "outage": "seconds to wait for a Slurm that is away",
    "keep": "ended allocations that are still told of",
    "log_level": "what is logged",
    "log_format": "how: json, console, or what fits",
}
_TYPES: Final[Mapping[str, type[Any]]] = {item.name: type(item.default) for item in fields(Settings)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting; one that is not typed stays None."""
    for item in fields(Settings):
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, help=f"{HELP[item.name]} (default: {item.default!r})", metavar="X")


def config_path(environ: Mapping[str, str]) -> str:
    """The file that is read where none is named."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return os.path.join(base, "allocd", "allocd.toml")


def read_settings(
    environ: Mapping[str, str], flags: Mapping[str, str | None] | None = None, path: str | None = None
) -> Settings:
    """The settings in force. `path`: a file that must be there. Raises SettingsErrors."""
    errors: list[str] = []
    values: dict[str, Any] = {}
    where = path or config_path(environ)
    for name, value in _from_file(where, path is not None, errors).items():
        if name not in _TYPES:
            close = get_close_matches(name, _TYPES, n=1)
            errors.append(f"{where}: {name}: no such setting{f': did you mean {close[0]}?' if close else ''}")
        else:
            _take(values, name, value, f"{where}: {name}", errors)
    for name in _TYPES:
        if (text := environ.get(f"ALLOCD_{name.upper()}")) is not None:
            _take(values, name, _read(name, text), f"environment: ALLOCD_{name.upper()}", errors)
        if (text := (flags or {}).get(name)) is not None:
            _take(values, name, _read(name, text), f"--{name.replace('_', '-')}", errors)
    if errors:
        raise SettingsErrors("\n".join(errors))
    return replace(Settings(), **values)


def _from_file(path: str, must: bool, errors: list[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        if must:
            errors.append(f"{path}: no such file")
    except OSError as error:
        errors.append(f"{path}: {error.strerror or error}")
    except ValueError as error:  # TOMLDecodeError, and bytes that are no UTF-8
        errors.append(f"{path}: {error}")
    return {}


def _read(name: str, text: str) -> Any:
    """The value that a text stands for; the text itself where it stands for none."""
    try:
        return text if _TYPES[name] is str else _TYPES[name](text)
    except ValueError:
        return text


def _take(values: dict[str, Any], name: str, value: Any, where: str, errors: list[str]) -> None:
    kind = _TYPES[name]
    if kind is float and type(value) is int:
        value = float(value)
    if wrong := _wrong(name, kind, value):
        errors.append(f"{where}: found {value!r}; expected {wrong}")
    else:
        values[name] = value


def _wrong(name: str, kind: type[Any], value: Any) -> str:
    """What is expected in the place of the value; "" if it may be so."""
    if name in CHOICES:
        return "" if value in CHOICES[name] else f"one of {', '.join(CHOICES[name])}"
    if name in BOUNDS:
        least, most = BOUNDS[name]
        right = type(value) is kind and least <= value <= most
        return "" if right else f"{'an integer' if kind is int else 'a number'}, {least}..{most}"
    right = type(value) is str and (not value or os.path.isabs(value)) and value.isprintable()
    return "" if right else "an absolute path"
