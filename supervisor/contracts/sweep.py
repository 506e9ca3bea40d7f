"""The contract "sweep": what a benchmark measured, one result or more for each concurrency of a list.

The files' names hold the concurrency: `results_concurrency_{concurrency}_gpus_*.json`. It is read there as a whole
number, so that a file of 80 is none of 8, whatever stands beside the word. A result is one JSON object. It is *invalid*
when it was no success (the number at `successful` is not positive, or not there), when it names another
`max_concurrency` than its name does, or when it breaks a rule. While a concurrency has no result, or one that is not
whole, the answer is *pending*. Where a concurrency has two results, both must hold.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from supervisor.contracts import rules
from supervisor.contracts.content import Judge, Judged
from supervisor.contracts.places import Place
from supervisor.contracts.reading import Readers, Reading, wrong_first
from supervisor.contracts.walk import Pattern, Walk, pattern_of, plain
from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import Answer, FileFact, Finding
from supervisor.core.substitution import CONCURRENCY

_NUMBER = "\x01"  # stands for the concurrency in a pattern; no name holds it


def patterns(place: Place) -> tuple[Pattern, ...]:
    """What the results are called, by concurrency."""
    artifact = place.instance.artifact
    return tuple(
        pattern_of(artifact.path, {**place.values, CONCURRENCY: str(concurrency)})
        for concurrency in artifact.concurrencies
    )


class Sweep(Readers):
    """Looks at a sweep's results."""

    def look(self, place: Place) -> Finding:
        """See Examiner."""
        artifact, reader, walk = place.instance.artifact, self.reader(place), Walk(way=self.way)
        readings: list[Reading] = []
        missing: list[str] = []
        for concurrency, pattern in zip(artifact.concurrencies, patterns(place), strict=True):
            judge, named = _judge(artifact, concurrency), _named(artifact.path, place.values, concurrency)
            matches = walk.below(place.root, place.values["run_dir"], pattern)
            found = [reader.read(match, judge) for match in matches if named(match.path)]
            readings += found
            if not found:
                missing.append(f"{plain(pattern)}: found nothing; expected a result of concurrency {concurrency}")
        reader.forget({reading.path for reading in readings})
        problems = (*dict.fromkeys(walk.problems), *wrong_first(readings), *missing)
        answer: Answer = "pending" if problems else "valid"
        if any(reading.answer == "invalid" for reading in readings):
            answer = "invalid"
        said: dict[str, tuple[str, ...]] = {}  # a name may hold two concurrencies
        for reading in readings:
            said[reading.path] = said.get(reading.path, ()) + reading.problems
        files = {r.path: FileFact(r.path, r.size, r.sha256, "file", said[r.path], r.mtime_ns) for r in readings}
        return Finding(place.instance.contract_id, answer, problems, tuple(files.values()))


def result(document: Any, options: dict[str, Any]) -> Judged:
    """Judge: one result. Options: `concurrency`, `successful` (a dotted path), `fields` (see rules.document)."""
    if not isinstance(document, dict):
        return Judged((f"found {rules.shown(document)}; expected a JSON object",))
    problems = []
    path, named, told = options["successful"], options["concurrency"], document.get("max_concurrency")
    value = rules.lookup(document, path)
    if not rules.is_number(value):
        problems.append(f"{path}: found {rules.shown(value)}; expected the number of successful requests")
    elif value <= 0:
        problems.append(f"{path}: found {rules.shown(value)}, which is not a success; expected more than 0")
    if isinstance(told, int) and not isinstance(told, bool) and told != named:
        problems.append(f"max_concurrency: found {told}; expected {named}, as in the file's name")
    return Judged((*problems, *rules.document(document, options).problems))


def _judge(artifact: Artifact, concurrency: int) -> Judge:
    _, options = rules.judge_of(artifact.fields)
    options |= {"concurrency": concurrency, "successful": artifact.successful}
    return "supervisor.contracts.sweep:result", options


def _named(path: str, values: Mapping[str, str], concurrency: int) -> Callable[[str], bool]:
    """Whether a file that matches is one of this concurrency: the digits in its name are no part of a longer number."""
    number = f"(?<![0-9]){concurrency}(?![0-9])"
    parts = pattern_of(path, {**values, CONCURRENCY: _NUMBER})
    wanted = [re.compile(fnmatch.translate(part).replace(_NUMBER, number)) for part in parts if _NUMBER in part]

    def named(found: str) -> bool:
        names = found.split("/")
        return all(any(expression.match(name) for name in names) for expression in wanted)

    return named
