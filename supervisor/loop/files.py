"""Files that somebody else may have put there, read so that nobody is held up by them.

What lies in a run directory may be a job's doing. Nothing but a regular file is read: a symbolic link is not followed,
a FIFO is not waited for, a device not opened; and nobody's memory is filled. A file system that is gone still holds the
thread that asks it: see `threads.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Final

_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@contextmanager
def opened(path: str | os.PathLike[str], *, directory: int | None = None) -> Iterator[BufferedReader]:
    """A regular file to read; a relative path begins at `directory`. Blocks. Raises OSError."""
    try:
        descriptor = os.open(path, _FLAGS, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, not followed", os.fspath(path)) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_whole(path: str | os.PathLike[str], most: int, *, start: int = 0, directory: int | None = None) -> bytes:
    """All of a regular file, from byte `start` on. Blocks. Raises OSError, which names the file; also for more than
    `most` bytes."""
    with opened(path, directory=directory) as file:
        file.seek(start)
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", os.fspath(path))
    return data
