"""Values of options that several verbs have."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from supervisor.runs.registry import JOURNAL

PATIENCE: Final = 30.0
"""Seconds that a doubt (accounting late, controller away, an engine that still writes) is examined before it is the
answer."""


def seconds(text: str) -> float:
    """A finite number of seconds, not below 0. Raises ArgumentTypeError."""
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text!r}")


def add_socket(parser: argparse._ActionsContainer) -> None:
    """Who is asked: see `daemon.py`."""
    parser.add_argument("--socket", metavar="PATH", help="ask who answers there (default: $ALLOCD_SOCKET, else allocd)")


def held_directory(held: Mapping[str, Any] | None, name: str | None) -> str | None:
    """The run directory that is meant where the whole allocation is named, if it is seen from here."""
    if held is None or name not in (held["key"], held["jobid"]):
        return None
    directory: str | None = held["run_dir"]
    return directory if directory and os.path.exists(os.path.join(directory, JOURNAL)) else None


def may_be_held(args: argparse.Namespace, name: str | None) -> bool:
    """Whether allocd is to be asked about what is named: a run that is named by its directory is on the disk."""
    return bool(args.socket or (name and os.sep not in name))
