"""The archive of a run: a tar.gz of its marker, its logs and what was collected.

What is still written when it is made, or judges the run (journal and receipts), is not in it; nor is the plan, the
values of whose `env` may be secrets. Members are named RUNID/PATH, so that archives of several runs can be unpacked in
one place. Files are found and opened as everywhere, see `agent/copying.py`; one that cannot be had is left out,
and said.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, Final, cast

from supervisor.agent.copying import BLOCK, Limits, Match, made, opened_file, search, written
from supervisor.core.layout import COLLECTED

MEMBERS: Final[tuple[tuple[str, ...], ...]] = (
    (".bench_done.*",),
    ("logs", "**"),
    (COLLECTED, "**"),
)
LEVEL: Final = 1
"""Of compression: logs shrink to a tenth by the fastest, and the time at a job's end is short."""


def bundle(run_dir: str, path: str, limits: Limits, trouble: Callable[[str, str], None]) -> dict[str, Any]:
    """Make the archive at `path`, complete or not at all. Returns its facts; tells `trouble` of a file that is not in
    it. Raises OSError, past the limits too: they hold for what goes in. Blocks."""
    directory, name = os.path.split(os.path.abspath(path))
    with (
        made(directory, []) as place,
        written(place, name, 0o644) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        sink = _Hashing(file)
        with (
            gzip.GzipFile("", "wb", LEVEL, cast("IO[bytes]", sink)) as packed,
            tarfile.TarFile(mode="w", fileobj=packed, copybufsize=BLOCK) as archive,
        ):
            _fill(archive, run_dir, limits, trouble)
    path = os.path.join(directory, name)
    return {"path": path, "source": path, "size": sink.size, "sha256": sink.digest.hexdigest()}


def _fill(archive: tarfile.TarFile, run_dir: str, limits: Limits, trouble: Callable[[str, str], None]) -> None:
    base = os.path.dirname(run_dir)
    for parts in MEMBERS:
        for match in search(run_dir, list(parts), hidden=True):
            if match.problem:
                trouble(match.path, f"not in the archive: {match.problem}")
            else:
                _add(archive, match, os.path.relpath(match.path, base), limits, trouble)


def _add(
    archive: tarfile.TarFile, match: Match, name: str, limits: Limits, trouble: Callable[[str, str], None]
) -> None:
    """Raises OSError when the archive cannot be written, or the time is over."""
    limits.check()
    with ExitStack() as stack:
        try:
            descriptor, status = stack.enter_context(opened_file(match.name, match.directory))
            limits.check(status.st_size)
        except OSError as error:
            trouble(match.path, f"not in the archive: {error.strerror}")
            return
        limits.left -= status.st_size
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = status.st_size, status.st_mtime, stat.S_IMODE(status.st_mode) & 0o777
        content = _Exactly(descriptor, limits)
        archive.addfile(member, cast("IO[bytes]", content))
        if content.problem:
            trouble(match.path, f"damaged in the archive: {content.problem}")


class _Exactly:
    """A file that gives as many bytes as it is asked for, as an archive's member must, whatever happens to it."""

    def __init__(self, descriptor: int, limits: Limits) -> None:
        self._descriptor, self._limits = descriptor, limits
        self.problem = ""

    def read(self, size: int) -> bytes:
        """Zeros for what is not there any more. Raises OSError past the limits."""
        self._limits.check()
        data = b""
        while len(data) < size and not self.problem:
            try:
                block = os.read(self._descriptor, size - len(data))
            except OSError as error:
                block, self.problem = b"", str(error.strerror)
            if not block:
                self.problem = self.problem or "it became shorter while it was read"
            data += block
        return data.ljust(size, b"\0")


class _Hashing:
    """A file to write, with the size and the checksum of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest, self.size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()
