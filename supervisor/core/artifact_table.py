"""A plan's `[[artifacts]]` tables: the files that a run must produce, and what they must hold.

Each table is a contract, of one of three kinds:

    contract = "files"    files that match a pattern, and rules about their number, size, format and content
    contract = "fpm"      what a self-benchmarking engine writes: a file for each data-parallel rank, one that merges
                          those of a node, and a probe; `path` is rank 0's file, the other names follow from it
    contract = "sweep"    a benchmark's results, one for each concurrency; `path` holds {concurrency}

A key that means nothing to a table's kind is an error there, as long as it does not merely repeat its default.
"""

# No `from __future__ import annotations`: the rules live in the annotations and are read from them.
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, Final, Literal

from supervisor.core.fields import (
    EVERYWHERE,
    FLAG,
    NAME,
    SCALAR,
    WRONG,
    Command,
    Draft,
    List,
    Names,
    PlanError,
    Rule,
    Table,
    Text,
    choice,
    climbless,
    join,
    like,
    number,
    rules_of,
)
from supervisor.core.substitution import CONCURRENCY, RANK_WORDS, show, words_in

MAX_SIZE: Final = 1 << 50  # bytes
MAX_LOCAL_RANKS: Final = 4096


_FINITE: Final = number(None, None, "a finite number")
_SIZE: Final = number(0, MAX_SIZE, "a number of bytes", whole=True)
_CONCURRENCY: Final = number(1, 10_000_000, "a whole number", whole=True)


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What one field of a JSON file must be; all the rules that are given must hold."""

    exists: Annotated[bool | None, Rule(FLAG, "false: the field must not be there; else it must")] = None
    equals: Annotated[str | int | float | bool | None, Rule(SCALAR, "the value; true is not 1, 1.0 is")] = None
    min: Annotated[float | None, Rule(_FINITE, "a number, at least this")] = None
    max: Annotated[float | None, Rule(_FINITE, "a number, at most this")] = None
    length_min: Annotated[
        int | None, Rule(number(0, None, "a whole number", True), "least length of a list, table or string")
    ] = None
    length_max: Annotated[
        int | None, Rule(number(0, None, "a whole number", True), "greatest length of a list, table or string")
    ] = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files that the run must produce, and what they must contain: a contract of the run, or of each node."""

    name: Annotated[str, Rule(NAME, "the contract's name")]
    path: Annotated[
        str,
        Rule(
            climbless("relative", (*EVERYWHERE, CONCURRENCY)),
            "file below the root; * ? [] match inside a name, ** any directories",
        ),
    ]
    root: Annotated[str, Rule(climbless("absolute", EVERYWHERE), "directory that no path leaves")] = "{run_dir}"
    contract: Annotated[
        Literal["files", "fpm", "sweep"],
        Rule(choice("files", "fpm", "sweep"), "what kind of files: any, self-benchmark results, a sweep's results"),
    ] = "files"
    per: Annotated[
        Literal["run", "node"], Rule(choice("run", "node"), "one contract a run, or one a node (fpm: always)")
    ] = "run"
    roles: Annotated[
        tuple[str, ...],
        Rule(
            List(NAME, 1, "a list of roles"),
            'per = "node": whose nodes; default: all (fpm: all but the coordinator)',
        ),
    ] = ()
    required: Annotated[bool, Rule(FLAG, "the run is no success without it")] = True
    checker: Annotated[
        tuple[str, ...],
        Rule(Command(), "a program that judges what the rules let through: 0 ready, 10 wait, 20 invalid"),
    ] = ()
    checker_timeout: Annotated[float, Rule(number(1, 3600), "seconds that the checker may take")] = 60.0

    # contract = "files"
    count: Annotated[
        int, Rule(number(1, 1_000_000, "a number of files", whole=True), "at least so many files match")
    ] = 1
    non_empty: Annotated[bool, Rule(FLAG, "an empty file does not count")] = True
    format: Annotated[
        Literal["any", "json", "jsonl"],
        Rule(choice("any", "json", "jsonl"), "json: one JSON object or list; jsonl: one a line"),
    ] = "any"
    fields: Annotated[
        dict[str, FieldRule],
        Rule(
            Names(
                r".+",
                'dotted paths in quotes ("a.b.0.c")',
                Table(
                    rules_of(FieldRule), "a table with exists, equals, min, max, length_min or length_max", FieldRule
                ),
            ),
            "rules for JSON fields, by dotted path; a number is a place in a list, \\. a dot in a name",
        ),
    ] = field(default_factory=dict)
    lines_min: Annotated[
        int, Rule(number(0, 1_000_000_000, "a number of lines", whole=True), 'format = "jsonl": at least so many')
    ] = 0
    size_min: Annotated[int, Rule(_SIZE, "bytes: a smaller file does not count")] = 0
    size_max: Annotated[int | None, Rule(_SIZE, "bytes: a larger file is invalid")] = None
    checksums: Annotated[
        str | None,
        Rule(
            climbless("relative", EVERYWHERE),
            "a file below the root that lists every file with its SHA-256, as sha256sum writes it",
        ),
    ] = None

    # contract = "fpm"
    ranks_per_node: Annotated[
        int | None,
        Rule(number(1, MAX_LOCAL_RANKS, "a number of ranks", whole=True), "data-parallel ranks of each node"),
    ] = None
    legacy: Annotated[bool, Rule(FLAG, "accept the older, minimal rank files too")] = False
    run_id: Annotated[str | None, Rule(Text(), "the only run_id that counts")] = None
    grid_digest: Annotated[str | None, Rule(Text(), "the only grid_digest that counts")] = None
    mode: Annotated[
        Literal["prefill", "decode", "agg"] | None,
        Rule(choice("prefill", "decode", "agg"), "the only config.mode that counts"),
    ] = None

    # contract = "sweep"
    concurrencies: Annotated[
        tuple[int, ...], Rule(List(_CONCURRENCY, 1, "a list of concurrencies"), "each must have its result")
    ] = ()
    successful: Annotated[
        str, Rule(Text(), "dotted path of the number of successful requests, which must be positive")
    ] = "completed"

    @property
    def per_node(self) -> bool:
        """Whether each node has a contract of its own."""
        return self.per == "node" or self.contract == "fpm"


_OF_KIND: Final = {
    "files": ("count", "non_empty", "format", "lines_min", "size_min", "size_max", "checksums"),
    "fpm": ("ranks_per_node", "legacy", "run_id", "grid_digest", "mode"),
    "sweep": ("concurrencies", "successful"),
}
"""Keys that mean something to one kind of contract only."""
_DEFAULTS: Final = {item.name: item.default for item in fields(Artifact)}
_WILDCARDS: Final = re.compile(r"[*?\[]")
_NODE_WORDS: Final = {"rank", "node"}

Ranks = dict[str, tuple[int, ...]]
"""Each role's ranks."""
Told = tuple[str, str, str]
"""Key, what was found, what was expected."""


def artifacts_agree(draft: Draft, ranks: Ranks | None) -> Iterator[PlanError]:
    """Names are unique, roles exist, keys belong to their kind, and no two nodes would write the same file. `ranks` is
    None when those of any role could not be read."""
    artifacts = draft["artifacts"]
    if artifacts == () and draft["finish"] == "artifacts":
        yield PlanError("run.finish", '"artifacts" in a plan without any', "at least one [[artifacts]] table")
    seen: dict[str, int] = {}
    for i, artifact in enumerate(() if artifacts is WRONG else artifacts):
        name = artifact["name"]
        if name is not WRONG and seen.setdefault(name, i) != i:
            yield PlanError(f"artifacts[{i}].name", f"{name} again", f"another name than artifacts[{seen[name]}]")
        for key, found, expected in (*_keys(artifact), *_contents(artifact), *_places(artifact, ranks)):
            yield PlanError(f"artifacts[{i}].{key}", found, expected)
        for j, other in enumerate(artifacts[:i]):
            if _same_files(artifact, other, ranks):
                yield PlanError(f"artifacts[{i}].path", f"the path of artifacts[{j}]", "self-benchmarks apart")


def _keys(artifact: Draft) -> Iterator[Told]:
    """Keys of another kind of contract, and those that this kind cannot do without."""
    kind, path = artifact["contract"], artifact["path"]
    if kind is WRONG:
        return
    for other, keys in _OF_KIND.items():
        for key in keys if other != kind else ():
            if artifact[key] is not WRONG and artifact[key] != _DEFAULTS[key]:
                yield key, f'{show(artifact[key])} with contract = "{kind}"', f'contract = "{other}"'
    if kind == "fpm" and artifact["fields"]:
        yield "fields", 'fields with contract = "fpm"', 'contract = "files", or no fields'
    if kind == "fpm" and artifact["ranks_per_node"] is None:
        yield "ranks_per_node", "nothing", "the number of data-parallel ranks on each node"
    if kind == "fpm" and isinstance(path, str) and (_WILDCARDS.search(path) or not path.endswith(".json")):
        yield "path", show(path), "the path of data-parallel rank 0's file, NAME.json, without wildcards"
    if kind == "sweep":
        yield from _sweep(artifact["concurrencies"], path)


def _sweep(concurrencies: object, path: object) -> Iterator[Told]:
    if concurrencies == ():
        yield "concurrencies", "nothing", "the list of concurrencies whose results must come"
    elif isinstance(concurrencies, tuple) and len(set(concurrencies)) < len(concurrencies):
        yield "concurrencies", show(list(concurrencies)), "each concurrency once"
    if isinstance(path, str) and CONCURRENCY not in words_in(path):
        yield "path", show(path), f"{{{CONCURRENCY}}} in it, where the results' names hold the concurrency"


def _contents(artifact: Draft) -> Iterator[Told]:
    """Rules for fields that can be applied and met; a count that the pattern can reach; sizes in order."""
    rules, pattern, count = artifact["fields"], artifact["path"], artifact["count"]
    if rules and artifact["format"] == "any" and artifact["contract"] == "files":
        yield "fields", 'format = "any"', 'format = "json" or "jsonl" for rules about fields'
    if artifact["lines_min"] not in (0, WRONG) and artifact["format"] in ("any", "json"):
        yield "lines_min", f'format = "{artifact["format"]}"', 'format = "jsonl" for a number of lines'
    if isinstance(pattern, str) and isinstance(count, int) and count > 1 and not _WILDCARDS.search(pattern):
        yield "count", str(count), "1, for the path names one file; or a pattern in the path"
    least, most = artifact["size_min"], artifact["size_max"]
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield "size_max", f"size_max {most} below size_min {least}", "size_max at least size_min"
    for key, rule in rules.items() if isinstance(rules, dict) else ():
        if isinstance(rule, FieldRule):
            yield from _field(join("fields", key), rule)


def _field(key: str, rule: FieldRule) -> Iterator[Told]:
    if rule == FieldRule():
        yield key, "no rule", "exists, equals, min, max, length_min or length_max"
    if rule.exists is False and rule != FieldRule(exists=False):
        yield key, "exists = false beside other rules", "exists = false alone"
    if rule.min is not None and rule.max is not None and rule.min > rule.max:
        yield key, f"min {rule.min} above max {rule.max}", "min at most max"
    yield from _equal(key, rule)
    length = rule.length_min is not None or rule.length_max is not None
    if length and (rule.min is not None or rule.max is not None):
        yield key, "a length and a number", "min and max, or length_min and length_max: numbers have no length"
    if rule.length_min is not None and rule.length_max is not None and rule.length_min > rule.length_max:
        yield key, f"length_min {rule.length_min} above length_max {rule.length_max}", "length_min at most length_max"


def _equal(key: str, rule: FieldRule) -> Iterator[Told]:
    """A value that the other rules forbid."""
    value = rule.equals
    if value is None:
        return
    size: float | None = None if isinstance(value, bool | str) else value
    length = len(value) if isinstance(value, str) else None
    for word, limit, measure in (
        ("min", rule.min, size),
        ("max", rule.max, size),
        ("length_min", rule.length_min, length),
        ("length_max", rule.length_max, length),
    ):
        if limit is not None and (measure is None or (measure < limit if word.endswith("min") else measure > limit)):
            yield key, f"equals {show(value)} with {word} {limit:g}", "equals alone"


def _places(artifact: Draft, ranks: Ranks | None) -> Iterator[Told]:
    """Roles that exist, and a place of its own for each node's file (data-parallel ranks name theirs)."""
    wanted, fpm = artifact["roles"], artifact["contract"] == "fpm"
    if artifact["per"] == "run" and not fpm and wanted:
        yield "roles", 'roles with per = "run"', 'per = "node", or no roles'
    if not of_node(artifact) or wanted is WRONG or ranks is None:
        return
    for name in wanted:
        if name not in ranks:
            yield "roles", show(name), f"a role of the plan{like(name, ranks)}"
    nodes = sum(len(ranks.get(name, ())) for name in set(wanted or ranks))
    places = (artifact["root"], artifact["path"])
    if nodes > 1 and not fpm and WRONG not in places and not _NODE_WORDS.intersection(words_in("/".join(places))):
        yield "path", f"the same path for {nodes} nodes", "{rank} or {node} in the path or the root"


def _same_files(one: Draft, other: Draft, ranks: Ranks | None) -> bool:
    """Whether two self-benchmarks would write the same files: each counts its data-parallel ranks from 0."""
    places, roles = [(each["root"], each["path"]) for each in (one, other)], [each["roles"] for each in (one, other)]
    fpm = one["contract"] == other["contract"] == "fpm"
    if not fpm or places[0] != places[1] or WRONG in (*places[0], *roles) or ranks is None:
        return False
    shared = set(roles[0] or ranks).intersection(roles[1] or ranks)
    return bool(shared) or not set(RANK_WORDS).intersection(words_in("/".join(places[0])))


def of_node(artifact: Draft) -> bool:
    """Whether a contract that is being read is one of each node."""
    return bool(artifact["per"] == "node" or artifact["contract"] == "fpm")


def words_have_values(artifacts: tuple[Draft, ...], at: str, word: str) -> Iterator[PlanError]:
    """A use (`at`, `word`) of a substitution in the artifacts' tables: a rank where no rank is meant, a concurrency
    outside of a sweep's path."""
    place = re.match(r"artifacts\[(\d+)\]\.(\w+)", at)
    if place is None:
        return
    artifact = artifacts[int(place[1])]
    if word in RANK_WORDS and not of_node(artifact):
        yield PlanError(at, f'{{{word}}} with per = "run"', 'per = "node"')
    if word == CONCURRENCY and artifact["contract"] in ("files", "fpm"):
        yield PlanError(at, f'{{{word}}} with contract = "{artifact["contract"]}"', 'contract = "sweep"')
