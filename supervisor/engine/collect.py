"""Collecting after the end: the files that the plan names, copied into the run directory, with checksums.

Runs in a thread, on whatever is there; every file that cannot be had is a sentence in `errors`, and none of them
changes how a rank ended. Only regular files are copied, symbolic links are not followed, and nothing already collected
is overwritten by another file of the same name.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any, Final

from supervisor.core.layout import COLLECTED, Layout
from supervisor.core.plan import substitute

_BLOCK: Final = 1024 * 1024


def collect(layout: Layout, contract_files: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Copy what `collect.paths` names and checksum it, and the contracts' files where they are. Returns the facts
    (path, size in bytes, sha256) and the errors."""
    files: list[dict[str, Any]] = []
    errors: list[str] = []
    for name in dict.fromkeys(contract_files):
        _take(Path(name), None, layout, files, errors)
    for pattern in layout.plan.collect.paths:
        wanted = substitute(pattern, layout.values(None))
        matches = sorted(glob.glob(os.path.join(layout.run_dir, wanted), recursive=True))
        found = [Path(match) for match in matches if not os.path.isdir(match)]
        if not found:
            errors.append(f"collect: nothing matches {wanted}")
        for path in found:
            _take(path, Path(layout.at(COLLECTED)), layout, files, errors)
    return files, errors


def _take(source: Path, into: Path | None, layout: Layout, files: list[dict[str, Any]], errors: list[str]) -> None:
    try:
        target = None if into is None else into / _name_for(source, layout)
        facts = _copy(source, target)
    except OSError as error:
        errors.append(f"collect: {source}: {error.strerror or error}")
    else:
        files.append({"path": str(target or source), "source": str(source), **facts})


def _name_for(source: Path, layout: Layout) -> Path:
    """Where a collected file goes: its path below the run directory, or its whole path without the root."""
    try:
        return source.relative_to(layout.run_dir)
    except ValueError:
        return Path(*source.absolute().parts[1:])


def _copy(source: Path, target: Path | None) -> dict[str, Any]:
    """Read a file once: its size and checksum, and a copy at `target`. Raises OSError."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as reader:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(None, "not a regular file")
        if target is None:
            return _digest(reader)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(temporary, "xb") as writer:
                facts = _digest(reader, writer)
            shutil.copymode(source, temporary, follow_symlinks=False)
            os.link(temporary, target, follow_symlinks=False)
        finally:
            temporary.unlink(missing_ok=True)
        return facts


def _digest(reader: Any, writer: Any = None) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    while block := reader.read(_BLOCK):
        digest.update(block)
        size += len(block)
        if writer is not None:
            writer.write(block)
    return {"size": size, "sha256": digest.hexdigest()}
