"""A list of checksums, as sha256sum writes it: `HASH  NAME` or `HASH *NAME` a line, with a backslash before a hash
whose name has escapes in it.

The names are data from a job. They are compared with the names of files that were found below the root, and never
opened: the directory in which sha256sum ran is not known, so an entry speaks of a file when the shorter of the two
paths is the end of the longer one. A file is right when one of the entries that speak of it has its checksum.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from supervisor.contracts.reading import Reading

_ENTRY: Final = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_ESCAPES: Final = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}

Entries = dict[str, list[tuple[tuple[str, ...], str]]]
"""Last component of a name -> the whole name in components, and its checksum."""


def parse(data: bytes) -> tuple[Entries, list[str]]:
    """The entries of a list, and what is wrong with its lines."""
    entries: Entries = defaultdict(list)
    problems = []
    for number, line in enumerate(data.decode(errors="surrogateescape").split("\n"), 1):
        match = _ENTRY.fullmatch(line.removesuffix("\r"))
        if match is not None:
            escaped, checksum, name = match.groups()
            if escaped:
                name = re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), name)
            parts = _parts(name)
            entries[parts[-1] if parts else ""].append((parts, checksum.lower()))
        elif line.strip():
            problems.append(f"line {number}: found no checksum; expected HASH  NAME")
    return entries, problems


def compare(entries: Entries, readings: Iterable[Reading], called: str) -> dict[str, str]:
    """By file: what is missing in a list that is `called` so, or is different there."""
    problems = {}
    for reading in readings:
        parts = _parts(reading.path)
        listed = [checksum for name, checksum in entries.get(parts[-1], ()) if _ends(name, parts)]
        if not listed:
            problems[reading.path] = f"found no entry in {called}; expected its sha256 there"
        elif reading.sha256 is None:
            problems[reading.path] = f"found {reading.size} bytes; expected a file small enough for a sha256"
        elif reading.sha256 not in listed:
            problems[reading.path] = f"found sha256 {reading.sha256}; expected {listed[0]} ({called})"
    return problems


def _parts(name: str) -> tuple[str, ...]:
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _ends(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    shorter = min(len(one), len(other))
    return one[-shorter:] == other[-shorter:]
