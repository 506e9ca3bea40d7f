"""The contract "files": files that match a pattern, are whole, and hold what the plan's rules ask for.

The answer is *pending* while something is missing, refused, unreadable, empty, half-written or too small, has too few
lines, or is not (yet) what the list of checksums says: all of these may still change. It is *invalid* when a file that
was read whole breaks a rule, or is too large.

Files that are not JSON are read (for their sha256) only when nothing else is missing any more; so is the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from supervisor.contracts import checksums
from supervisor.contracts.places import Place
from supervisor.contracts.reading import Reader, Readers, Reading, wrong_first
from supervisor.contracts.rules import judge_of
from supervisor.contracts.walk import Match, Pattern, Walk, pattern_of, plain
from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import Answer, FileFact, Finding
from supervisor.core.substitution import literal


def patterns(place: Place) -> tuple[Pattern, ...]:
    """What the contract's files are called; the list of checksums comes last."""
    artifact = place.instance.artifact
    paths = (artifact.path,) if artifact.checksums is None else (artifact.path, literal(artifact.checksums))
    return tuple(pattern_of(path, place.values) for path in paths)


class Files(Readers):
    """Looks at plain files."""

    def look(self, place: Place) -> Finding:
        """Look once at everything that the contract names. Raises OSError, ValueError or KeyError for faults of ours
        only, which are no answer about the artifact."""
        finding = self._look(place, last=False)
        if finding.answer == "valid" and (place.instance.artifact.format == "any" or place.instance.artifact.checksums):
            finding = self._look(place, last=True)
        seen = {fact.path: bool(fact.problems) for fact in finding.files}
        self.reader(place).forget(seen, [path for path, wrong in seen.items() if wrong])
        return finding

    def _look(self, place: Place, last: bool) -> Finding:
        artifact, reader, walk = place.instance.artifact, self.reader(place), Walk(way=self.way)
        pattern, *lists = patterns(place)
        apart = {plain(each) for each in lists}
        matches = walk.below(place.root, place.values["run_dir"], pattern)
        readings = [_reading(match, artifact, reader, last) for match in matches if match.path not in apart]
        counted = len(readings) >= artifact.count or walk.problems
        facts: list[FileFact] = []
        problems: list[str] = []
        for each in lists if last else ():
            found = walk.below(place.root, place.values["run_dir"], each)
            readings, list_facts, missing = _listed(found, reader, readings, plain(each))
            facts += list_facts
            problems += missing
        facts[:0] = (FileFact(r.path, r.size, r.sha256, problems=r.problems, mtime_ns=r.mtime_ns) for r in readings)
        if not counted:
            what = "a file" if artifact.count == 1 else f"at least {artifact.count} files"
            problems.insert(0, f"{plain(pattern)}: found {len(readings) or 'nothing'}; expected {what}")
        problems = [*walk.problems, *wrong_first(readings), *problems]
        answer: Answer = "pending" if problems else "valid"
        if any(reading.answer == "invalid" for reading in readings):
            answer = "invalid"
        return Finding(place.instance.contract_id, answer, tuple(problems), tuple(facts))


def _reading(match: Match, artifact: Artifact, reader: Reader, last: bool) -> Reading:
    """What one file says, by all the rules that speak of one file."""
    if artifact.format == "any":
        reading = reader.read(match, None) if last else reader.peek(match)
    else:
        reading = reader.read(match, judge_of(artifact.fields), artifact.format == "jsonl")
    if reading.answer == "pending":
        return reading
    size, lines = reading.size, (reading.summary or {}).get("lines", 0)
    if artifact.size_max is not None and size > artifact.size_max:
        problem = f"{match.path}: found {size} bytes; expected {artifact.size_max} or fewer"
        return replace(reading, answer="invalid", problems=(*reading.problems, problem))
    missing = []
    if size == 0 and artifact.non_empty:
        missing.append("found an empty file; expected content")
    if size < artifact.size_min:
        missing.append(f"found {size} bytes; expected {artifact.size_min} or more")
    if lines < artifact.lines_min and reading.summary:
        missing.append(f"found {lines} lines; expected {artifact.lines_min} or more")
    for what in missing if reading.answer == "valid" else ():
        reading = _with(reading, what)
    return reading


def _listed(
    found: Iterable[Match], reader: Reader, readings: list[Reading], called: str
) -> tuple[list[Reading], list[FileFact], list[str]]:
    """The readings by a list of checksums, the list itself, and what is wrong with it."""
    facts, problems = list[FileFact](), list[str]()
    for match in found:
        listing, data = reader.text(match)
        entries, flaws = checksums.parse(data)
        told = (*listing.problems, *(f"{called}: {flaw}" for flaw in flaws))
        facts.append(FileFact(match.path, listing.size, listing.sha256, "checksums", told, listing.mtime_ns))
        problems += told
        wrong = {} if listing.problems else checksums.compare(entries, readings, called)
        readings = [_with(each, wrong[each.path]) if each.path in wrong else each for each in readings]
    return readings, facts, problems if facts else [f"{called}: found nothing; expected a list of checksums"]


def _with(reading: Reading, what: str) -> Reading:
    """What one file says, and something that may still change."""
    answer = "pending" if reading.answer == "valid" else reading.answer
    return replace(reading, answer=answer, problems=(*reading.problems, f"{reading.path}: {what}"))
