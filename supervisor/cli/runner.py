"""What is printed must not command the runner of a CI.

A runner of GitHub Actions reads every line that a step prints, on stdout and stderr alike, and obeys *workflow
commands*: a line that begins, after blanks, with `::`, and a line that has `##[` anywhere. A line ends at CR or LF.
Where a job is asked for its last words, it could annotate, mask or silence the step that way; so could a node's name,
srun's words, a file's path. (The sources of the runner; it compares by the rules of a language, to which some
characters that cannot be seen are none: they are looked through here.)

So in a step all that is printed is quoted, in one place, whoever's words it is: one character of the command is written
as `\\u003a` or `\\u0023`. People see what was meant, and in a JSON document it stands for the same character. Our own
commands (`github.py`) are written past that. Nothing is changed on the way into a regular file, which no runner reads.

Each write is judged by itself, as if it began a line: no command may be written in pieces.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, TextIO, cast

_UNSEEN: Final = r"[^\w!-~\r\n]*"  # blanks, controls, marks, formats: nothing that a reader would call a character
_BEGINS: Final = re.compile(rf"((?:\A|(?<=[\r\n])){_UNSEEN}):(?={_UNSEEN}:)")
_ANYWHERE: Final = re.compile(rf"(#{_UNSEEN})#(?={_UNSEEN}\[)")


def quoted(text: str) -> str:
    """The text without a workflow command."""
    return _ANYWHERE.sub(r"\1\\u0023", _BEGINS.sub(r"\1\\u003a", text))


def quoted_bytes(data: bytes) -> bytes:
    """The same for UTF-8, or nearly: other bytes stay as they are."""
    return quoted(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")


class Quoted:
    """A stream of text that quotes what is written to it; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Raises OSError."""
        self.stream.write(quoted(text))
        return len(text)

    @property
    def buffer(self) -> QuotedBytes:
        """For those who write bytes."""
        return QuotedBytes(self.stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class QuotedBytes:
    """The same of bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Raises OSError."""
        self._stream.write(quoted_bytes(data))
        return len(data)


@contextmanager
def quoting(environ: Mapping[str, str]) -> Iterator[None]:
    """In a step, stdout and stderr are quoted while this is held."""
    before = sys.stdout, sys.stderr
    if environ.get("GITHUB_ACTIONS"):
        sys.stdout, sys.stderr = map(_quoting, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _quoting(stream: TextIO) -> TextIO:
    try:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return stream
    except (OSError, ValueError):
        pass  # not a file
    return cast("TextIO", Quoted(stream))


def unquoted(stream: TextIO | Quoted) -> TextIO:
    """The stream itself, for our own commands."""
    return stream.stream if isinstance(stream, Quoted) else stream


def put(stream: TextIO | Quoted, data: bytes) -> None:
    """Write past the stream's own buffer: a write that blocks for ever would hold its lock when Python ends. Raises
    OSError, and io.UnsupportedOperation for a stream without a descriptor."""
    descriptor = stream.fileno()
    if isinstance(stream, Quoted):
        data = quoted_bytes(data)
    while data:
        data = data[os.write(descriptor, data) :]
