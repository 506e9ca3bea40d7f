"""Collecting after the end: the files that the plan names, copied into the run directory, with checksums.

Runs in a thread, on whatever is there; every file that cannot be had is a sentence in `errors`, and none of them
changes how a rank ended. Only regular files are copied. A symbolic link that a job may have made is not followed,
neither the last part of a path nor one before it. Nothing already collected is overwritten by another file of the same
name.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import os
import stat
from pathlib import Path
from typing import Any, Final

from supervisor.core.layout import COLLECTED, Layout
from supervisor.core.substitution import substitute

_BLOCK: Final = 1024 * 1024


def collect(layout: Layout, contract_files: list[str], files: list[dict[str, Any]], errors: list[str]) -> None:
    """Copy what `collect.paths` names and checksum it, and the contracts' files where they are. Appends the facts
    (path, source, size in bytes, sha256) and the errors one by one, so that a caller who cannot wait any longer has
    what was done until then."""
    for name in dict.fromkeys(contract_files):
        _take(Path(name), None, files, errors)
    taken: set[Path] = set()
    for pattern in layout.plan.collect.paths:
        found, links = _matches(layout, pattern)
        errors += (f"collect: {link}: a symbolic link, not followed" for link in links)
        if not found and not links:
            errors.append(f"collect: nothing matches {pattern}")
        for path in (path for path in found if path not in taken):
            taken.add(path)
            _take(path, Path(layout.at(COLLECTED), _name_for(path, layout)), files, errors)


def _matches(layout: Layout, pattern: str) -> tuple[list[Path], list[Path]]:
    """The files that a pattern of the plan means, and the links, which a job may have made, that stood in the way: in
    what the wildcards match, and everywhere below the run directory. Links on the way to there are the site's."""
    values = {word: glob.escape(value) for word, value in layout.values(None).items()}
    whole = os.path.join(glob.escape(layout.run_dir), substitute(pattern, values))
    found, links = [], {}
    for path in map(Path, sorted(glob.glob(whole, recursive=True))):
        link = _first_link(path, _root(path, whole, layout))
        if link is not None:
            links[link] = True
        elif not path.is_dir() and not path.is_relative_to(layout.at(COLLECTED)):
            found.append(path)
    return found, list(links)


def _root(path: Path, pattern: str, layout: Layout) -> Path:
    """The run directory, or the part of a path elsewhere that the plan names literally."""
    if path.is_relative_to(layout.run_dir):
        return Path(layout.run_dir)
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts[:-1]))


def _first_link(path: Path, root: Path) -> Path | None:
    """The first symbolic link on the way from `root` to `path`, the last part included."""
    steps = itertools.accumulate(path.relative_to(root).parts, Path.joinpath, initial=root)
    return next((step for step in itertools.islice(steps, 1, None) if step.is_symlink()), None)


def _take(source: Path, target: Path | None, files: list[dict[str, Any]], errors: list[str]) -> None:
    try:
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
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "not a regular file")
        if target is None:
            return _digest(reader)
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, f"another file was collected as {target}")
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with open(temporary, "xb") as writer:
                facts = _digest(reader, writer)
                os.fchmod(writer.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
            os.rename(temporary, target)  # nobody but us makes names in there, and some file systems refuse links
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
