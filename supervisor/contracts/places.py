"""Where a contract's files are (its root, and the values that the plan's words stand for there), and who looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from supervisor.contracts.walk import Pattern, Walk, Way
from supervisor.core.artifacts import Finding, Instance
from supervisor.core.substitution import substitute


@dataclass(frozen=True, slots=True)
class Place:
    """One contract on the disk. `values`: the substitutions of the instance's rank, or of the run; `run_dir` is among
    them, inside which nothing is believed to be what it was."""

    instance: Instance
    root: Path  # absolute
    values: Mapping[str, str]


class Examiner(Protocol):
    """Looks at the places of one artifact, and remembers the files that it has judged. It may be called from different
    threads, one at a time."""

    def look(self, place: Place) -> Finding:
        """Look once at everything that the contract names. Raises OSError, ValueError or KeyError for faults of ours
        only, and CheckerBroke, which are no answer about the artifact."""

    def again(self, place: Place) -> float | None:
        """Seconds after which another look may say something else although no directory changes; None: no such."""

    def progress(self) -> object:
        """Equal to what it was before when nothing more has been read since, be it only a part of a file."""

    def close(self) -> None:
        """End what is still at work."""


def places(instances: Iterable[Instance], values: Callable[[int | None], Mapping[str, str]]) -> tuple[Place, ...]:
    """The places of contracts; `values` tells the substitutions of a rank, or of the run (None)."""
    found = []
    for instance in instances:
        known = values(instance.rank)
        found.append(Place(instance, Path(substitute(instance.artifact.root, known)), known))
    return tuple(found)


def existing(place: Place, patterns: Iterable[Pattern], way: Way) -> tuple[str, ...]:
    """What is there: files of any kind, links (dangling ones too), links and files in the place of a directory, as
    paths relative to the root; and, as `path: reason`, what keeps us from knowing."""
    walk = Walk(top=".", way=way)
    found = {match.path for pattern in patterns for match in walk.below(place.root, place.values["run_dir"], pattern)}
    return (*sorted(found), *dict.fromkeys(walk.problems))
