"""The contract "fpm": the files of a self-benchmark on one node, and what binds them (`fpm_content` tells what each
holds).

`path` names data-parallel rank 0's file, and the other names follow from it. Only these exact names are looked for, in
a listing: whatever else lies there, a temporary file, another node's ranks, is nobody's. A probe, whose name fits the
rank files' pattern too, is never taken for a measurement.

    pending           a rank of this node is missing, or its file is not whole yet
    ranks_complete    every rank of this node is valid; the merged file, or the probe that it announces, is missing, not
                      whole, or bound elsewhere
    valid             every rank, the merged file, and the probe if it announces one
    invalid           a file holds what can never be right, or contradicts a rank

A rank that contradicts another one is wrong at once. Which of the two is wrong nobody knows, so all are compared with
the lowest rank that is there, of any node, and the message names both. Nodes are compared with what the other nodes'
last looks have seen.

A merged file or a probe that belongs to another run, grid, mode, path or set of ranks is *bound elsewhere*: it does not
count, whatever else it holds, and the right one may still replace it. One that is bound here and says otherwise than
the ranks is wrong. So what is wrong in such a file is no answer before a rank tells what it should be bound to.

A probe that the merged file does not announce (older producers) is nothing to wait for: it is noted. What a probe has
seen is noted too, unless all is well, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from supervisor.contracts import fpm_content
from supervisor.contracts.content import PROBLEMS_CAP, Judge
from supervisor.contracts.places import Place
from supervisor.contracts.reading import Readers, Reading
from supervisor.contracts.walk import Pattern, Walk, pattern_of, plain
from supervisor.core.artifacts import ASIDE, Answer, FileFact, Finding
from supervisor.core.substitution import literal, show
from supervisor.core.text import printable

_JUDGES: Final = "supervisor.contracts.fpm_content:"
_IDENTITY: Final = ("$.run_id", "$.grid_digest", "$.config.mode")
"""What a merged file is bound to, of what it says like a rank."""
_CONTENT: Final = ("$.status", "$.iteration_groups", "$.measurement_protocol")
"""What it must say as the ranks do when it is bound to them."""
_ELSEWHERE: Final = "; it is bound elsewhere and does not count"
_TEXT_CAP: Final = 400
"""Characters of a probe's resolution that are noted."""


class _Rank(NamedTuple):
    """A valid rank's file."""

    contract: str
    path: str
    agree: Mapping[str, Any]  # place -> what all ranks must agree in

    def told(self, by: str) -> str:
        """Its file as the contract `by` calls it."""
        return self.path if by == self.contract else f"{self.path} of {self.contract}"


class _Names:
    """The files of a node, as paths relative to the root."""

    def __init__(self, place: Place) -> None:
        artifact, pattern = place.instance.artifact, pattern_of(place.instance.artifact.path, place.values)
        local = artifact.ranks_per_node or 1
        first = place.instance.node * local
        self.directory: Final[Pattern] = pattern[:-1]
        self.stem: Final = plain(pattern).removesuffix(".json")
        self.ranks: Final = {number: self._rank(number) for number in range(first, first + local)}
        self.merged: Final = self.ranks[first].removesuffix(".json") + fpm_content.MERGED_SUFFIX
        self.probe: Final = fpm_content.probe_name(self.merged)

    def _rank(self, number: int) -> str:
        return f"{self.stem}_dp{number}.json" if number else f"{self.stem}.json"

    def judges(self, place: Place) -> dict[str, tuple[str, Judge]]:
        """Each file's kind, and who judges it."""
        artifact, nodes = place.instance.artifact, place.instance.nodes
        pins = {"run_id": artifact.run_id, "grid_digest": artifact.grid_digest, "mode": artifact.mode}
        legacy = {"legacy": artifact.legacy}
        size = len(self.ranks) * nodes or None
        found: dict[str, tuple[str, Judge]] = {
            path: ("rank", (f"{_JUDGES}rank", {"rank": number, "size": size, **pins, **legacy}))
            for number, path in self.ranks.items()
        }
        found[self.merged] = ("merged", (f"{_JUDGES}merged", legacy))
        found[self.probe] = ("probe", (f"{_JUDGES}probe", legacy))
        return found


def patterns(place: Place) -> tuple[Pattern, ...]:
    """What the node's files are called."""
    names = _Names(place)
    paths = (*names.ranks.values(), names.merged, names.probe)
    return tuple((*names.directory, literal(_name(path))) for path in paths)


class Fpm(Readers):
    """Looks at the nodes of a self-benchmark. `Instance.nodes` times `ranks_per_node` is the number of all
    data-parallel ranks; with 0 nodes it is not known, and not judged."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(places)
        self._ranks: dict[str, dict[int, _Rank]] = {}  # contract -> what its last look has seen

    def look(self, place: Place) -> Finding:
        """Look once at the node's files. Raises OSError, ValueError or KeyError for faults of ours only, which are no
        answer about the artifact."""
        contract, names = place.instance.contract_id, _Names(place)
        judges, reader = names.judges(place), self.reader(place)
        walk = Walk(only=frozenset(_name(path) for path in judges), way=self.way)
        found = walk.below(place.root, place.values["run_dir"], (*names.directory, "*"))
        readings = {match.path: reader.read(match, judges[match.path][1]) for match in found}
        self._ranks[contract] = {
            number: _Rank(contract, path, agree)
            for number, path in names.ranks.items()
            if (agree := _summary(readings.get(path)).get("agree")) is not None
        }
        look = _Look(names, readings, self._ranks[contract], complain=not walk.problems)
        look.ranks()
        look.siblings(contract, {number: rank for seen in self._ranks.values() for number, rank in seen.items()})
        look.merged()
        look.probe()
        facts = tuple(
            FileFact(
                path,
                reading.size,
                reading.sha256,
                ASIDE if path in look.aside else judges[path][0],
                tuple(look.problems.get(path, ())),
                reading.mtime_ns,
            )
            for path, reading in sorted(readings.items())
        )
        # One that belongs elsewhere will be replaced; or those that it was compared with, which may be older.
        reader.forget(readings, readings if look.elsewhere else [fact.path for fact in facts if fact.problems])
        still = {path for path in look.problems if path not in readings or readings[path].answer == "pending"}
        still |= look.elsewhere
        paths = sorted(look.problems, key=lambda path: path in still)  # what is wrong comes first
        problems = (*walk.problems, *(problem for path in paths for problem in look.problems[path]))
        return Finding(contract, look.answer(), problems, facts, tuple(look.notes))


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _summary(reading: Reading | None) -> Mapping[str, Any]:
    """What a valid file says; nothing otherwise."""
    return reading.summary or {} if reading is not None and reading.answer == "valid" else {}


@dataclass(slots=True)
class _Look:
    """What one look has come to."""

    names: _Names
    readings: Mapping[str, Reading]
    own: Mapping[int, _Rank]  # the valid ranks of this node
    complain: bool  # of what is missing
    problems: dict[str, list[str]] = field(default_factory=dict)  # by path
    notes: list[str] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)  # files that may be another run's: what they hold is no answer
    wrong: bool = False  # something can never be right
    whole: bool = False  # merged file and probe are what they must be
    aside: set[str] = field(default_factory=set)  # files that do not count, whatever becomes of them
    bound: Mapping[str, Any] | None = None  # what the merged file says, when it is bound here

    def answer(self) -> Answer:
        """What it all amounts to."""
        wrong = {path for path, reading in self.readings.items() if reading.answer == "invalid"}
        if self.wrong or wrong - self.elsewhere:
            return "invalid"
        if len(self.own) < len(self.names.ranks):
            return "pending"
        return "valid" if self.whole else "ranks_complete"

    def ranks(self) -> None:
        """Each rank on its own."""
        for number, path in self.names.ranks.items():
            self._seen(path, f"data-parallel rank {number}'s file")
            reading = self.readings.get(path)
            said = (reading.summary or {}) if reading is not None else {}
            if said.get("agree", {}).get("$.status") == "partial":
                points, completed = (said["agree"][f"$.coverage.{key}_points"] for key in ("expected", "completed"))
                stopped = show(said["stop_reason"])
                self.notes.append(f"{path}: $.status: partial, {completed} of {points} points, stop_reason {stopped}")

    def siblings(self, contract: str, everyone: Mapping[int, _Rank]) -> None:
        """Ranks of all nodes against the lowest one, as far as one of the two is this node's."""
        lowest = everyone[min(everyone)] if everyone else None
        for number, other in sorted(everyone.items()):
            if lowest is None or other is lowest or (number not in self.own and lowest.contract != contract):
                continue
            here = other if other.contract == contract else lowest
            for place in lowest.agree:
                found, expected = other.agree.get(place), lowest.agree[place]
                if found != expected:
                    self._wrong(
                        here.path,
                        f"{other.told(contract)}: {place}: found {_shown(found)}; "
                        f"expected {_shown(expected)}, as in {lowest.told(contract)}",
                    )

    def merged(self) -> None:
        """The merged file, against the lowest rank of the node."""
        path = self.names.merged
        reading = self.readings.get(path)
        self._seen(path, "the merged file of the node's ranks")
        if not self.own:
            self.elsewhere.add(path)
            return
        rank = self.own[min(self.own)]
        as_in, size = f", as in {rank.path}", rank.agree["$.dp.size"]
        said = _summary(reading)
        if not said:
            known = ((reading.summary or {}) if reading is not None else {}).get("agree", {})
            told = [(place, known.get(place), rank.agree[place], as_in) for place in _IDENTITY]
            self._foreign(path, [each for each in told if each[1] is not None])  # as far as it says
            return
        agree = said["agree"]
        where = [(place, agree[place], rank.agree[place], as_in) for place in _IDENTITY]
        if size is not None:
            where.append(("$.dp.global_size", agree["$.dp.global_size"], size, f"{as_in} $.dp.size"))
        where += [
            ("$.dp.source_ranks", said["source_ranks"], list(self.names.ranks), ""),
            ("$.rank_files", said["rank_files"], [_name(name) for name in self.names.ranks.values()], ""),
            ("$.merged_output_path", said["path"], _name(path), ""),
        ]
        if self._foreign(path, where):
            return
        self.bound, size = said, agree["$.dp.global_size"]
        what = [(place, agree[place], rank.agree[place], as_in) for place in _CONTENT]
        what += [
            (place, agree[place], rank.agree[place] * size, f", {size} times what {rank.path} has")
            for place in ("$.coverage.expected_points", "$.coverage.completed_points")
        ]
        self.wrong |= self._differs(path, what)

    def probe(self) -> None:
        """The probe, against the merged file if that is bound here."""
        path, merged = self.names.probe, self.names.merged
        reading = self.readings.get(path)
        if self.bound is None:
            if reading is not None:
                self._seen(path)
                self._foreign_probe(path, reading)
            return
        if self.bound["probe"] is None:
            self.whole = True
            if reading is not None:
                self.aside.add(path)
                if reading.answer == "invalid":
                    self._seen(path)
                self.notes.append(f"{path}: found a probe that {merged} does not announce; it does not count")
            return
        self._seen(path, f"the probe that {merged} announces")
        said = _summary(reading)
        if reading is not None and not said:
            self._foreign_probe(path, reading)
        as_in = f", as in {merged}"
        where = [
            ("$.run_id", said.get("run_id"), self.bound["agree"]["$.run_id"], as_in),
            ("$.merged_output_path", said.get("path"), self.bound["path"], as_in),
            ("$.rank_files", said.get("rank_files"), self.bound["rank_files"], as_in),
            ("$.ranks", said.get("ranks"), self.bound["source_ranks"], f", the source_ranks of {merged}"),
        ]
        if said and not self._foreign(path, where):
            self.whole = True
            self.notes += _resolutions(path, said)

    def _foreign_probe(self, path: str, reading: Reading) -> None:
        if not self.own:
            self.elsewhere.add(path)
            return
        rank = self.own[min(self.own)]
        told = (reading.summary or {}).get("run_id")
        if told is not None:
            self._foreign(path, [("$.run_id", told, rank.agree["$.run_id"], f", as in {rank.path}")])

    def _foreign(self, path: str, identity: Sequence[tuple[str, Any, Any, str]]) -> bool:
        """Whether a file belongs elsewhere."""
        foreign = self._differs(path, identity, _ELSEWHERE)
        if foreign:
            self.elsewhere.add(path)
        return foreign

    def _seen(self, path: str, what: str = "") -> None:
        """What the file itself says, or that it is missing."""
        reading = self.readings.get(path)
        if reading is not None:
            self.problems.setdefault(path, []).extend(reading.problems)
        elif self.complain:
            self.problems.setdefault(path, []).append(f"{path}: found nothing; expected {what}")

    def _differs(self, path: str, pairs: Sequence[tuple[str, Any, Any, str]], then: str = "") -> bool:
        """Whether one of (place, found, expected, why) differs, which is told."""
        told = [
            f"{path}: {place}: found {_shown(found)}; expected {_shown(expected)}{why}{then}"
            for place, found, expected, why in pairs
            if found != expected
        ]
        self.problems.setdefault(path, []).extend(told)
        return bool(told)

    def _wrong(self, path: str, problem: str) -> None:
        self.wrong = True
        told = self.problems.setdefault(path, [])
        if len(told) < PROBLEMS_CAP:
            told.append(problem)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"content of SHA-256 {value['sha256'][:12]}..."
    return "nothing" if value is None else show(value)


def _resolutions(path: str, said: Mapping[str, Any]) -> Iterator[str]:
    """What a probe has seen other than that all is well."""
    told = [("$.merged", said["merged"])]
    told += ((f"$.ranks {show(ranks)}", text) for text, ranks in sorted(said["resolutions"].items()))
    told = [(place, text) for place, text in told if text != "worker_probe"]
    for place, text in told[:PROBLEMS_CAP]:
        yield f"{path}: {place}: resolution {printable(text[:_TEXT_CAP])}"
    if len(told) > PROBLEMS_CAP:
        yield f"{path}: {len(told) - PROBLEMS_CAP} more resolutions"
