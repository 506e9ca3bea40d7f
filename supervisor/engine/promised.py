"""The contracts' files when everything is over: whether each is still what a look has judged, and its checksum.

First they are compared, in one pass that reads nothing: each directory is listed once, however many of its files are
promised. A file that has the size and the time of change that it had for the look which made its checksum is taken for
the same. What is found in the place of any other is told to the machine (`Collected.differing`), which knows what it
means.

Then they are read: those that differ, for the same bytes may have been written once more; and those that no look has
read. Together no more than CHECKSUM_CAP bytes: a checksum that nobody asked for is not worth minutes.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection as Several
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.agent.copying import Copy, Limits, checksum, opened_file
from supervisor.contracts import places
from supervisor.contracts.fresh import fresh_status
from supervisor.contracts.walk import Match, Walk, Way, kind_of
from supervisor.core import events as ev
from supervisor.core.artifacts import instances
from supervisor.core.delivery import A_FILE, NOTHING, UNKNOWN
from supervisor.core.layout import Layout
from supervisor.core.state import RunState
from supervisor.core.substitution import literal

CHECKSUM_CAP: Final = 4 << 30
"""Bytes of contracts' files that are read at the end of a run."""
TOO_LARGE: Final = f"not read: at most {CHECKSUM_CAP} bytes of the contracts' files are read at the end"


@dataclass(frozen=True)
class Promised:
    """A contract's file as a look has seen it: `root` and a path below it, size in bytes, time of its last change in
    nanoseconds, and its checksum if the look has made one."""

    contract: str
    root: str
    path: str
    size: int = 0
    mtime_ns: int | None = None
    sha256: str | None = None

    @property
    def where(self) -> str:
        return os.path.join(self.root, self.path)


def promised_files(state: RunState, layout: Layout) -> list[Promised]:
    """The files of all contracts, as the last looks have seen them."""
    roots = {place.instance.contract_id: str(place.root) for place in places(instances(layout.plan), layout.values)}
    return [
        Promised(item.contract, roots[item.contract], fact.path, fact.size, fact.mtime_ns, fact.sha256)
        for item in state.contracts
        if item.finding is not None
        for fact in item.finding.files
    ]


@dataclass
class Collection:
    """What has been collected so far: facts and sentences, added one by one, so that a caller who cannot wait any
    longer has what was done until then."""

    files: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    differing: dict[Promised, dict[str, Any]] = field(default_factory=dict)

    def trouble(self, path: str, why: str) -> None:
        self.errors.append(f"collect: {path}: {why}")

    def differs(self, item: Promised, found: str, size: int = 0, sha256: str | None = None, problem: str = "") -> None:
        """What is there instead of what was judged; said again, it is corrected."""
        told = {"contract": item.contract, "path": item.path, "found": found}
        self.differing[item] = {**told, "size": size, "sha256": sha256, "problem": problem}

    def event(self) -> ev.Collected:
        """A copy: a thread that was given up may still be at work."""
        return ev.Collected(
            list(self.files), list(self.errors), list(self.compared), list(self.differing.copy().values())
        )


_Groups = dict[tuple[str, str], dict[str, list[Promised]]]
"""By root and directory, and by name there: a file may be promised by several contracts."""


def _grouped(promised: Iterable[Promised]) -> _Groups:
    groups: _Groups = {}
    for item in dict.fromkeys(promised):
        directory, _, name = item.path.rpartition("/")
        groups.setdefault((item.root, directory), {}).setdefault(name, []).append(item)
    return groups


def _below(walk: Walk, root: str, directory: str, run_dir: str) -> Iterator[Match]:
    """What there is of the names that the walk wants."""
    return walk.below(Path(root), run_dir, (*(literal(part) for part in directory.split("/") if part), "*"))


def compare(promised: Several[Promised], run_dir: str, done: Collection) -> list[Promised]:
    """Look at the files without reading any; those that have to be read are returned. Blocks."""
    groups, unread = _grouped(promised), list[Promised]()
    contracts = [{item.contract for items in group.values() for item in items} for group in groups.values()]
    way = Way()
    waiting = Counter(contract for each in contracts for contract in each)
    for ((root, directory), wanted), looked in zip(groups.items(), contracts, strict=True):
        walk = Walk(top=root, only=frozenset(wanted), way=way)
        for match in _below(walk, root, directory, run_dir):
            items, status = wanted.pop(match.name), _status(match)
            if not stat.S_ISREG(status.st_mode):
                _lost(items, kind_of(status), f"found {kind_of(status)}; expected a file", done)
                continue
            same = [item for item in items if (item.size, item.mtime_ns) == (status.st_size, status.st_mtime_ns)]
            for item in items:
                if item not in same and item.mtime_ns is not None:
                    done.differs(item, A_FILE, status.st_size)
            known = [item for item in same if item.sha256]
            done.files += [_fact(item.where, item.size, item.sha256) for item in known[:1]]
            unread += [item for item in items if item not in known]
        why = walk.problems[0] if walk.problems else "found nothing any more"
        for items in wanted.values():
            _lost(items, UNKNOWN if walk.blind else NOTHING, why, done)
        waiting.subtract(looked)
        done.compared += sorted(contract for contract in looked if not waiting[contract])
    return unread


def _status(match: Match) -> os.stat_result:
    """A plain file's status as it is now: the listing's may be an older one on a network file system."""
    try:
        with opened_file(match.name, match.directory) as (descriptor, _):
            return fresh_status(descriptor)
    except OSError:
        return match.status


def read(
    unread: Several[Promised], copies: Mapping[str, dict[str, Any]], run_dir: str, limits: Limits, done: Collection
) -> None:
    """Make the checksums of files, the differing ones first. `copies`: facts of what was copied just now, by source.
    Blocks."""
    left, way = CHECKSUM_CAP, Way()
    differing = [item for item in unread if item in done.differing]
    for part in (differing, [item for item in unread if item not in done.differing]):
        for (root, directory), wanted in _grouped(part).items():
            for match in _below(Walk(only=frozenset(wanted), way=way), root, directory, run_dir):
                items = wanted.pop(match.name)
                size = match.status.st_size
                copied = copies.get(items[0].where)
                if copied is None and size > left:
                    done.files.append({**_fact(items[0].where, size, None), "remark": TOO_LARGE})
                    _judge(items, size, None, TOO_LARGE, done)
                else:
                    left -= 0 if copied else size
                    _read(items, match, copied, limits, done)
            for items in wanted.values():
                _lost(items, NOTHING, "found nothing any more", done)


def _read(items: list[Promised], match: Match, copied: dict[str, Any] | None, limits: Limits, done: Collection) -> None:
    where = items[0].where
    try:
        found = Copy(copied["size"], copied["sha256"]) if copied else checksum(match.name, limits, match.directory)
    except OSError as error:
        why = str(error.strerror or error)
        done.trouble(where, why)
        _judge(items, match.status.st_size, None, why, done)
        return
    done.files.append(_fact(where, found.size, found.sha256))
    if found.remark:
        done.trouble(where, found.remark)
    _judge(items, found.size, found.sha256, found.remark, done)


def _judge(items: Iterable[Promised], size: int, sha256: str | None, problem: str, done: Collection) -> None:
    """What was found in the place of those that differ; the same bytes do not."""
    for item in items:
        if item in done.differing:
            done.differs(item, A_FILE, size, sha256, problem)
            if sha256 == item.sha256 is not None and not problem:
                del done.differing[item]


def _lost(items: Sequence[Promised], found: str, why: str, done: Collection) -> None:
    """There is no such file, or nobody knows."""
    done.trouble(items[0].where, why)
    for item in items:
        done.differs(item, found, problem=why)


def _fact(path: str, size: int, sha256: str | None) -> dict[str, Any]:
    """A file that was not copied."""
    return {"path": path, "source": path, "size": size, "sha256": sha256}
