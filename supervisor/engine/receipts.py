"""Receipts on the disk: the run's own, written when the engine ends; the sealed one, made once whoever comes first;
and the outcome file that CI jobs read."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from supervisor.core.layout import RECEIPT, RUN_RECEIPT

StrPath = str | os.PathLike[str]


def render(document: dict[str, Any]) -> bytes:
    """A receipt as its file's bytes."""
    text = json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)
    return text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate (a strange name) becomes JSON's escape


def write_run_receipt(run_dir: StrPath, document: dict[str, Any]) -> Path:
    """Write `receipt.run.json`, atomically. Raises OSError."""
    path = Path(run_dir, RUN_RECEIPT)
    replace(path, render(document))
    return path


def seal(run_dir: StrPath, document: dict[str, Any], name: str = RECEIPT) -> bool:
    """Create `receipt.json`, or one of another name, unless it exists: nothing terminal is overwritten. True when it is
    ours. Raises OSError."""
    path = Path(run_dir, name)
    temporary = _temporary(path, render(document))
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)
    return True


def outcome_file(directory: StrPath, jobid: str) -> Path:
    """Where the outcome of a job is written."""
    return Path(directory, f"slurm_job_{jobid}_outcome.txt")


def write_outcome(directories: list[StrPath], jobid: str, line: str) -> list[Path]:
    """`slurm_job_<id>_outcome.txt` with the raw record that decided, atomically, in each directory. Raises OSError."""
    written = []
    for directory in dict.fromkeys(os.path.abspath(directory) for directory in directories):
        path = outcome_file(directory, jobid)
        replace(path, line.rstrip("\n").encode() + b"\n")
        written.append(path)
    return written


def replace(path: Path, data: bytes) -> None:
    """Write a file, atomically: it is complete, or as it was. Raises OSError."""
    temporary = _temporary(path, data)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _temporary(path: Path, data: bytes) -> Path:
    """A complete, durable file beside `path`; nothing is left when that fails."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_directory(directory: Path) -> None:
    with suppress(OSError):  # not every file system can; the file itself is durable
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
