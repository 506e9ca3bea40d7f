"""What an artifact must contain. Each kind of contract looks at the disk and answers with a Finding; it decides
nothing.

A look blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from supervisor.contracts import files, fpm, sweep
from supervisor.contracts.checker import Checked, CheckerBroke
from supervisor.contracts.places import Examiner, Place, existing, places
from supervisor.contracts.reading import SOON
from supervisor.contracts.walk import DEPTH_CAP, Pattern, Way, literal_part

__all__ = ["SOON", "CheckerBroke", "Examiner", "Place", "Way", "directories", "examiner", "places", "preexisting"]


_KINDS: Final[Mapping[str, tuple[Callable[[Sequence[Place]], Examiner], Callable[[Place], tuple[Pattern, ...]]]]] = {
    "files": (files.Files, files.patterns),
    "fpm": (fpm.Fpm, fpm.patterns),
    "sweep": (sweep.Sweep, sweep.patterns),
}
"""Kind of contract -> who looks, and what its files are called."""


def examiner(places: Sequence[Place]) -> Examiner:
    """Who looks at the places of ONE artifact, which are all given: nodes may be compared."""
    artifact = places[0].instance.artifact
    kind, _ = _KINDS[artifact.contract]
    return Checked(kind(places)) if artifact.checker else kind(places)


def preexisting(place: Place, way: Way | None = None) -> tuple[str, ...]:
    """What is there before the run where outputs would be: paths relative to the root, and as `path: reason` what keeps
    us from knowing. Empty when nothing is in the way. `way`: one for all places that are asked for."""
    return existing(place, _patterns(place), way or Way())


def directories(place: Place) -> dict[Path, int]:
    """The directories to watch, the deepest ones that the contract names without a wildcard, and how many levels of
    directories below each its files may be in."""
    found: dict[Path, int] = {}
    for pattern in _patterns(place):
        literal = literal_part(pattern)
        depth = DEPTH_CAP if "**" in pattern else len(pattern) - 1 - len(literal)
        directory = place.root.joinpath(*literal)
        found[directory] = max(depth, found.get(directory, 0))
    return found


def _patterns(place: Place) -> tuple[Pattern, ...]:
    _, patterns = _KINDS[place.instance.artifact.contract]
    return patterns(place)
