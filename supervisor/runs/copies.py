"""Copies of what a run left, for whoever keeps results elsewhere: receipts, journal, plan, outcome, logs, collected.

What lies in a run directory may have been put there by a job. Only regular files are copied, opened relative to their
directory and never through a link; directories are entered in the same way. A copy is complete or not there (written
under another name, then renamed), and an older copy of the same name is replaced. Trouble with one file is a sentence
and hinders no other.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WANTED: Final = re.compile(
    r"receipt(\.run)?\.json|journal\.jsonl|plan\.toml|slurm_job_[\w+]+_outcome\.txt|logs|collected|\.bench_done\.[\w.+]+"
)
"""Entries of a run directory that are copied."""

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_run(run_dir: str, target: str) -> list[str]:
    """Copy a run's files into `target/RUNID/`. Returns what could not be copied, in sentences."""
    trouble: list[str] = []
    name = os.path.basename(run_dir)
    try:
        with _open(run_dir, _DIRECTORY) as source:
            _copy_tree(source, os.path.join(target, name), name, trouble, WANTED)
    except OSError as error:
        trouble.append(f"{run_dir} could not be copied: {error.strerror or error}")
    return trouble


def copy_file(path: str, target: str) -> list[str]:
    """Copy one file into the directory `target`. Returns what went wrong, in sentences."""
    try:
        os.makedirs(target, exist_ok=True)
        with _open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as source:
            _copy_file(source, os.path.basename(path), target)
    except OSError as error:
        return [f"{path} could not be copied: {error.strerror or error}"]
    return []


def _copy_tree(source: int, target: str, shown: str, trouble: list[str], wanted: re.Pattern[str] | None) -> None:
    """Raises OSError when the directory cannot be listed or made."""
    os.makedirs(target, exist_ok=True)
    for name in sorted(os.listdir(source)):
        if wanted is not None and not wanted.fullmatch(name):
            continue
        where = f"{shown}/{name}"
        try:
            mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                with _open(name, _DIRECTORY, source) as inner:
                    _copy_tree(inner, os.path.join(target, name), where, trouble, None)
            elif stat.S_ISREG(mode):
                _copy_file(source, name, target)
            else:
                trouble.append(f"{where!a} was not copied: it is no regular file")
        except OSError as error:
            trouble.append(f"{where!a} could not be copied: {error.strerror or error}")


def _copy_file(source: int, name: str, target: str) -> None:
    """Raises OSError; nothing is left of a copy that failed."""
    temporary = os.path.join(target, f".{name}.{os.getpid()}")
    with _open(name, _FILE, source) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "it is no regular file")
        try:
            with open(os.open(temporary, _NEW, 0o644), "wb") as copy, open(descriptor, "rb", closefd=False) as file:
                shutil.copyfileobj(file, copy)
            os.replace(temporary, os.path.join(target, name))
        except OSError:
            if os.path.lexists(temporary):
                os.unlink(temporary)
            raise


@contextmanager
def _open(path: str, flags: int, directory: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
