"""Somebody else's words, made fit to be shown."""

from __future__ import annotations


def block(text: str, indent: str = "    ") -> str:
    """Somebody's lines as one block: control characters are made visible, and the lines after the first indented."""
    return f"\n{indent}".join(map(printable, text.splitlines()))


def printable(text: str) -> str:
    """A line of somebody else's words, fit for a terminal: control characters are made visible."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
