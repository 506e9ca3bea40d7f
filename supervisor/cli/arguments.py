"""Values of options that several verbs have."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from typing import Final

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
