"""Somebody else's words, made fit to be shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """A line of somebody else's words, fit for a terminal: control characters are made visible."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
