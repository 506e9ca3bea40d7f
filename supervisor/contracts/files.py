"""The contract "files": files that match a pattern, are whole, and hold what the plan's rules ask for.

The answer is *pending* while something is missing, refused, unreadable, empty or half-written: all of these may
still change. It is *invalid* when a file that was read whole breaks a rule.

Files that are not JSON are read (for their sha256) only when nothing else is missing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from supervisor.contracts.places import Place
from supervisor.contracts.reading import Reader, Reading
from supervisor.contracts.rules import judge_of
from supervisor.contracts.walk import Match, Pattern, Walk, pattern_of, plain
from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import Answer, FileFact, Finding


def patterns(place: Place) -> tuple[Pattern, ...]:
    """What the contract's files are called."""
    return (pattern_of(place.instance.artifact.path, place.values),)


class Files:
    """Looks at plain files. One Reader for each place."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._readers = {place.instance.contract_id: Reader() for place in places}

    def look(self, place: Place) -> Finding:
        """Look once at everything that the contract names. Raises OSError, ValueError or KeyError for faults of ours
        only, which are no answer about the artifact."""
        finding = self._look(place, read=False)
        if finding.answer == "valid" and place.instance.artifact.format == "any":
            return self._look(place, read=True)
        return finding

    def close(self) -> None:
        """End what is still at work."""
        for reader in self._readers.values():
            reader.close()

    def _look(self, place: Place, read: bool) -> Finding:
        artifact, reader, walk = place.instance.artifact, self._readers[place.instance.contract_id], Walk()
        (pattern,) = patterns(place)
        found = walk.below(place.root, place.values["run_dir"], pattern)
        readings = [_reading(match, artifact, reader, read) for match in found]
        reader.forget({reading.path for reading in readings})
        problems = [*walk.problems, *(problem for reading in readings for problem in reading.problems)]
        if len(readings) < artifact.count and not walk.problems:
            what = "a file" if artifact.count == 1 else f"at least {artifact.count} files"
            problems.append(f"{plain(pattern)}: found {len(readings) or 'nothing'}; expected {what}")
        answer: Answer = "pending" if problems else "valid"
        if any(reading.answer == "invalid" for reading in readings):
            answer = "invalid"
        facts = tuple(FileFact(r.path, r.size, r.sha256, problems=r.problems) for r in readings)
        return Finding(place.instance.contract_id, answer, tuple(problems), facts)


def _reading(match: Match, artifact: Artifact, reader: Reader, read: bool) -> Reading:
    if artifact.format != "any":
        return reader.read(match, judge_of(artifact.fields))
    reading = reader.read(match, None) if read else reader.peek(match)
    if reading.answer == "valid" and reading.size == 0 and artifact.non_empty:
        return replace(reading, answer="pending", problems=(f"{match.path}: found an empty file; expected content",))
    return reading
