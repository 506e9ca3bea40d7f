"""The plan: what a job is made of, and every rule that a plan must obey.

A plan arrives as plain data (a parsed TOML file) and leaves as frozen dataclasses, or as a list of everything that is
wrong with it. There is one source of truth: each field of the dataclasses below is annotated with a `Rule` (its kind
with bounds, what it is for, and its place in the file when that differs). From these annotations come

* the reader (`parse_plan`), which walks the data and the annotations side by side and never stops at the first error,
* the messages, which always say where, what was found and what was expected, and suggest a key for an unknown one,
* the JSON Schema (`schema`), for editors and other programs.

What no single field can know (ranks without a gap, a coordinator that exists, two nodes that would write the same file)
is in `CROSS_RULES` at the end, a list of functions over the values that could be read: a rule that needs a value which is
itself wrong keeps quiet, so that one mistake is told once.

Strings may hold substitutions, `{jobid}` and its like, written `{{` and `}}` where a brace is meant. A word that is not
in the list is an error here, before anything starts, and never an empty string in a command.

Types are strict: `true` is not 1, 1.5 is no number of nodes, and a duration is a finite number of seconds.
No I/O happens here: reading files is the caller's business.
"""

# No `from __future__ import annotations`: the rules live in the annotations and are read from them.
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, NamedTuple

RUN_WORDS: Final = ("jobid", "run_dir", "logs", "nodes", "coordinator_node")
"""Substitutions known everywhere in a run; `coordinator_node` only in a plan that has a coordinator."""
RANK_WORDS: Final = ("rank", "node", "role")
"""Substitutions known only where one rank is meant: a role's command, env and cwd, an artifact with per = "node"."""

MAX_NODES: Final = 65_536
DAY: Final = 86_400.0

SIGNALS: Final = tuple(
    "HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM PROF WINCH IO PWR SYS".split()
)
"""Signals that a program can catch and that end it (or are given that meaning by it). Not KILL, not STOP."""


# ---------------------------------------------------------------------------------------------------------- errors


class PlanError(NamedTuple):
    """One thing that is wrong with a plan."""

    key_path: str  # "roles.decode.grace", "artifacts[0].path"; "" for the file as a whole
    found: str
    expected: str
    line: int | None = None  # 1-based line in the file, where the caller knows it

    def text(self, source: str) -> str:
        """`file:line: key.path: found ...; expected ...`, without the parts that are not known."""
        where = f"{source}:{self.line}" if self.line else source
        return ": ".join(filter(None, (where, self.key_path, f"found {self.found}; expected {self.expected}")))


class PlanErrors(Exception):
    """All the errors of one plan, in the order of the file's sections; `str()` gives a line for each."""

    def __init__(self, errors: list[PlanError], source: str) -> None:
        super().__init__(errors, source)
        self.errors = errors
        self.source = source

    def __str__(self) -> str:
        return "\n".join(error.text(self.source) for error in self.errors)


class SubstitutionError(ValueError):
    """A string holds an unknown substitution or a brace that stands alone."""


# --------------------------------------------------------------------------------------------------- substitutions

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{word}` by its value, `{{` by `{` and `}}` by `}`; a value is never read again.

    Raises SubstitutionError for a word without a value and for a lone brace.
    """

    def one(match: re.Match[str]) -> str:
        token, word = match[0], match[1]
        if token in ("{{", "}}"):
            return token[0]
        if word is None:
            raise SubstitutionError(f"a lone {token} in {show(text)}: write {token}{token}")
        if word not in values:
            raise SubstitutionError(f"{{{word}}} in {show(text)} is not known here")
        return values[word]

    return _BRACES.sub(one, text)


class _Noted(dict[str, str]):
    """Values that accept every word and remember which were asked for."""

    def __contains__(self, word: object) -> bool:
        return True

    def __missing__(self, word: str) -> str:
        self[word] = ""
        return ""


def words_in(text: str) -> tuple[str, ...]:
    """The substitution words that `text` uses, each once. Raises SubstitutionError for a lone brace."""
    noted = _Noted()
    substitute(text, noted)
    return tuple(noted)


# ----------------------------------------------------------------------------------------------------------- kinds


def show(value: object) -> str:
    """A value as a message shows it: JSON-like, one line, short, free of control characters."""
    if isinstance(value, dict):
        return "a table" if value else "an empty table"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 72 else f"{text[:68]} ..."


def join(at: str, key: str) -> str:
    """The key path of `key` inside the table `at`; keys that TOML would quote are quoted."""
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
    return f"{at}.{name}" if at else name


class _Wrong:
    """The type of WRONG: what a reader returns after it has said what is wrong."""


WRONG: Final = _Wrong()


class Reader:
    """One pass over a plan: the errors found, and each substitution word with the place that uses it."""

    def __init__(self) -> None:
        self.errors: list[PlanError] = []
        self.uses: list[tuple[str, str]] = []

    def say(self, at: str, value: object, expected: str) -> Any:
        self.errors.append(PlanError(at, show(value), expected))
        return WRONG


class Kind:
    """What a value may be: `read` returns it (normalised) or WRONG, `expected` and `schema` describe it."""

    expected = ""

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        raise NotImplementedError

    def schema(self) -> dict[str, Any]:
        raise NotImplementedError


class Flag(Kind):
    expected = "true or false"

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        return value if isinstance(value, bool) else reader.say(at, value, self.expected)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Number(Kind):
    """A finite number low..high; whole ones only when `whole`. Booleans are no numbers."""

    def __init__(self, low: float | None, high: float | None, what: str = "a number of seconds", whole: bool = False):
        self.low, self.high, self.whole = low, high, whole
        bounds = "" if low is None else f", {low:g} or more" if high is None else f", {low:g}..{high:g}"
        self.expected = what + bounds

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        right = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        if not right or not math.isfinite(value):
            return reader.say(at, value, self.expected)
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            return reader.say(at, value, self.expected)
        return value if self.whole else float(value)

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.low, "maximum": self.high}
        return {
            "type": "integer" if self.whole else "number",
            **{k: v for k, v in bounds.items() if v is not None},
        }


class Choice(Kind):
    """One of a few words; `prefix` is dropped from the value first (SIGTERM is TERM)."""

    def __init__(self, *words: str, prefix: str = "") -> None:
        self.words, self.prefix = words, prefix
        self.expected = " or ".join(map(show, words)) if len(words) < 4 else "one of " + ", ".join(words)

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        word = value.removeprefix(self.prefix) if isinstance(value, str) else None
        return word if word in self.words else reader.say(at, value, self.expected)

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.words, *(self.prefix + word for word in self.words if self.prefix)]}


class Text(Kind):
    """A printable string. `words`: the substitutions it may use (None: braces are plain characters).

    `lines` lets newlines and tabs through (scripts as an argument), `empty` the empty string.
    """

    def __init__(
        self,
        expected: str = "a non-empty string without control characters",
        *,
        pattern: str | None = None,
        words: tuple[str, ...] | None = None,
        lines: bool = False,
        empty: bool = False,
    ) -> None:
        self.expected, self.pattern, self.words, self.lines, self.empty = expected, pattern, words, lines, empty

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, str) or not (value or self.empty):
            return reader.say(at, value, self.expected)
        plain = value.translate({9: " ", 10: " "}) if self.lines else value
        if not plain.isprintable() or (self.pattern and not re.fullmatch(self.pattern, value)):
            return reader.say(at, value, self.expected)
        return value if self.words is None else self._words(reader, at, value, self.words)

    def _words(self, reader: Reader, at: str, value: str, known: tuple[str, ...]) -> Any:
        try:
            used = words_in(value)
        except SubstitutionError as error:
            return reader.say(at, value, f"substitutions in pairs of braces ({error})")
        reader.uses += [(at, word) for word in used]
        strange = [word for word in used if word not in known]
        if not strange:
            return value
        listed = " ".join(f"{{{word}}}" for word in known)
        return reader.say(at, f"{{{strange[0]}}}", f"{listed}{_like(strange[0], known)}; {{{{ stands for a brace")

    def schema(self) -> dict[str, Any]:
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", **({} if self.empty else {"minLength": 1}), **pattern}


class Path(Text):
    """A path that climbs nowhere: no `..`, no empty component.

    `anchor`: "relative" to something that the field's description names; "absolute", which `{run_dir}` and `{logs}`
    are; or "any" of both.
    """

    def __init__(self, anchor: Literal["relative", "absolute", "any"], words: tuple[str, ...] | None = None) -> None:
        start = {
            "relative": "a relative path",
            "absolute": "an absolute path (or one that starts with {run_dir} or {logs})",
            "any": "a path",
        }
        self.anchor = anchor
        super().__init__(f"{start[anchor]} without .., empty parts or control characters", words=words)

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        text = super().read(reader, at, value)
        if text is WRONG:
            return WRONG
        absolute = re.match(r"/|\{(run_dir|logs)\}(/|$)", text) is not None
        inner = text[1:] if text.startswith("/") else text
        climbs = any(part in ("", ".", "..") for part in inner.split("/")) and text not in ("/", ".")
        later = self.anchor == "relative" and re.search(r"\{(run_dir|logs)\}", text)
        if climbs or later or self.anchor == ("relative" if absolute else "absolute"):
            return reader.say(at, text, self.expected)
        return text


class List(Kind):
    """A list of one kind, as a tuple; at least `least` long; the first one non-empty when it is a command."""

    def __init__(self, item: Kind, least: int = 0, what: str = "a list", command: bool = False) -> None:
        self.item, self.least, self.command, self.expected = item, least, command, what

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) < self.least:
            return reader.say(at, value, self.expected)
        if self.command and value[0] == "":
            return reader.say(f"{at}[0]", value[0], "the name of a program")
        items = tuple(self.item.read(reader, f"{at}[{i}]", each) for i, each in enumerate(value))
        return WRONG if WRONG in items else items

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(), **({"minItems": self.least} if self.least else {})}


class Names(Kind):
    """A table whose keys the plan chooses and whose values are of one kind, as a dict."""

    def __init__(self, key: str, what: str, item: Kind, least: int = 0, reserved: tuple[str, ...] = ()) -> None:
        self.key, self.what, self.item, self.least, self.reserved = key, what, item, least, reserved
        self.expected = f"a table with {what} as keys"

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) < self.least:
            return reader.say(at, value, self.expected)
        read: dict[str, Any] = {}
        for key, each in value.items():
            here = join(at, str(key))
            if not isinstance(key, str) or not re.fullmatch(self.key, key) or not key.isprintable():
                reader.say(here, key, self.what)
            elif key.startswith(self.reserved) and self.reserved:
                reader.say(here, key, f"a name that does not start with {' or '.join(self.reserved)}")
            else:
                read[key] = self.item.read(reader, here, each)
        return read

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^(?:{self.key})$"},
            "additionalProperties": self.item.schema(),
            **({"minProperties": self.least} if self.least else {}),
        }


class Nodes(Kind):
    """How many nodes (the scheduler chooses which), or their names."""

    expected = f"a number of nodes, 1..{MAX_NODES}, or a list of different node names"
    name = r"[A-Za-z0-9][A-Za-z0-9._-]*"

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            return Number(1, MAX_NODES, self.expected, whole=True).read(reader, at, value)
        item = Text("the name of a node (letters, digits, . _ -)", pattern=self.name)
        names = List(item).read(reader, at, value)
        if names is WRONG:
            return WRONG
        twice = sorted({name for name in names if names.count(name) > 1})
        return reader.say(at, twice[0], "each node once") if twice else names

    def schema(self) -> dict[str, Any]:
        names = {"type": "array", "items": {"type": "string", "pattern": f"^{self.name}$"}, "minItems": 1}
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_NODES}, {**names, "uniqueItems": True}]}


class Ranks(Kind):
    """Rank numbers: one (`3`), a list (`[0, 1]`) or ranges (`"0-1,3"`), as a sorted tuple."""

    expected = 'rank numbers: one (3 is rank 3), a list ([0, 1]) or ranges ("0-1,3")'
    ranges = r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*"

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        one = Number(0, MAX_NODES - 1, "a rank number", whole=True)
        if isinstance(value, str):
            ranks = self._ranges(value)
        elif isinstance(value, list | tuple):
            ranks = list(value)
        else:
            ranks = [value] if isinstance(value, int) else []
        if not ranks:
            return reader.say(at, value, self.expected)
        if WRONG in [one.read(reader, at, rank) for rank in ranks]:
            return WRONG
        twice = [rank for rank, next_one in zip(sorted(ranks), sorted(ranks)[1:], strict=False) if rank == next_one]
        return reader.say(at, f"rank {twice[0]} twice", "each rank once") if twice else tuple(sorted(ranks))

    def _ranges(self, text: str) -> list[int]:
        if not re.fullmatch(self.ranges, text):
            return []
        ranks: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            if int(last or first) < int(first):
                return []
            ranks += range(int(first), int(last or first) + 1)
        return ranks

    def schema(self) -> dict[str, Any]:
        one = {"type": "integer", "minimum": 0, "maximum": MAX_NODES - 1}
        many = {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}
        return {"anyOf": [one, many, {"type": "string", "pattern": f"^{self.ranges}$"}]}


class Scalar(Kind):
    """What a JSON field can be compared with."""

    expected = "a string, a finite number, true or false"

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        right = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        return value if right else reader.say(at, value, self.expected)

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number", "boolean"]}


class Rule(NamedTuple):
    """The annotation of a field: what its value may be, what it is for, and where it stands in the file.

    `at`: "section.key", or "section" for a whole table; without it the field stands under its own name.
    `key`: the value is not written in the table, it is the key of the table (a role's name).
    """

    kind: Kind
    doc: str
    at: str = ""
    key: bool = False


class Field(NamedTuple):
    name: str
    rule: Rule
    default: Any  # MISSING: the field must be given


def rules_of(shape: type) -> tuple[Field, ...]:
    """The table of fields of one of the dataclasses below, read from its annotations."""

    def default(item: Any) -> Any:
        return item.default if item.default_factory is MISSING else item.default_factory()

    return tuple(
        Field(item.name, item.type.__metadata__[0], default(item))
        for item in fields(shape)
        if not item.type.__metadata__[0].key
    )


def _like(word: str, known: tuple[str, ...]) -> str:
    """`; did you mean x?`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


class Table(Kind):
    """A table with known keys. Read as a dict of what could be read, defaults included; or, given a `shape`, as that
    dataclass (then WRONG if anything in it is)."""

    def __init__(self, table: tuple[Field, ...], what: str = "a table", shape: type | None = None) -> None:
        self.table, self.expected, self.shape = table, what, shape

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return reader.say(at, value, self.expected)
        errors = len(reader.errors)
        known = tuple(item.name for item in self.table)
        for key in value:
            if key not in known:
                hint = _like(str(key), known) or f", one of {', '.join(known)}"
                reader.errors.append(PlanError(join(at, str(key)), "an unknown key", f"a known key{hint}"))
        read = {item.name: self._field(reader, join(at, item.name), item, value) for item in self.table}
        if self.shape is None:
            return read
        return WRONG if len(reader.errors) > errors else self.shape(**read)

    def _field(self, reader: Reader, at: str, item: Field, value: dict[str, Any]) -> Any:
        if item.name in value:
            return item.rule.kind.read(reader, at, value[item.name])
        if item.default is not MISSING:
            return item.default
        reader.errors.append(PlanError(at, "nothing", item.rule.kind.expected))
        return WRONG

    def schema(self) -> dict[str, Any]:
        properties = {item.name: {"description": item.rule.doc, **item.rule.kind.schema()} for item in self.table}
        for item in self.table:
            if isinstance(item.default, bool | int | float | str):
                properties[item.name]["default"] = item.default
        needed = [item.name for item in self.table if item.default is MISSING]
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **({"required": needed} if needed else {}),
        }


class Coordinator(Kind):
    """`rank = N`, or `role = "x"` for a role with exactly one rank: read as the number or the name."""

    table = (
        Field("rank", Rule(Number(0, MAX_NODES - 1, "a rank number", whole=True), "the coordinator's rank"), None),
        Field("role", Rule(Text("the name of a role"), "or the coordinator's role, which has exactly one rank"), None),
    )
    expected = 'a table with either rank = N or role = "NAME"'

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        table = Table(self.table, self.expected).read(reader, at, value)
        if table is WRONG or WRONG in table.values():
            return WRONG
        given = [each for each in table.values() if each is not None]
        return given[0] if len(given) == 1 else reader.say(at, value, self.expected)

    def schema(self) -> dict[str, Any]:
        return {**Table(self.table).schema(), "minProperties": 1, "maxProperties": 1}


# ----------------------------------------------------------------------------------------------------- dataclasses

NAME: Final = r"[A-Za-z0-9_-]+"
_name = Text("a name of letters, digits, _ and -", pattern=NAME)
_everywhere = RUN_WORDS + RANK_WORDS
_limit = Number(1, 30 * DAY)


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that run the same command; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(_name, "the key of the role's table", key=True)]
    ranks: Annotated[tuple[int, ...], Rule(Ranks(), "the role's ranks, sorted; one rank a node")]
    command: Annotated[
        tuple[str, ...],
        Rule(
            List(
                Text("a string without control characters", words=_everywhere, lines=True, empty=True),
                1,
                "a list of strings, the program first",
                command=True,
            ),
            "the program and its arguments; no shell reads it",
        ),
    ]
    env: Annotated[
        dict[str, str],
        Rule(
            Names(
                r"[A-Za-z_][A-Za-z0-9_]*",
                "names of environment variables",
                Text("a string without control characters", words=_everywhere, lines=True, empty=True),
                reserved=("ALLOCD_", "SLURM_"),
            ),
            "variables set for the command",
        ),
    ] = field(default_factory=dict)
    cwd: Annotated[str | None, Rule(Path("absolute", _everywhere), "working directory; default: the engine's")] = None
    stop_signal: Annotated[
        str, Rule(Choice(*SIGNALS, prefix="SIG"), "the signal that asks the ranks to end, without SIG")
    ] = "TERM"
    grace: Annotated[float, Rule(Number(0, 3600), "seconds between the stop signal and KILL")] = 30.0
    critical: Annotated[bool, Rule(Flag(), "a failure of these ranks fails the run")] = True
    may_finish: Annotated[bool, Rule(Flag(), "these ranks may end with 0 before the run may end")] = False
    agent: Annotated[
        Literal["on", "off"], Rule(Choice("on", "off"), "off: srun starts the command itself, without an agent")
    ] = "on"
    srun_options: Annotated[
        tuple[str, ...],
        Rule(
            List(Text("an option that starts with -", pattern="-.+", words=RUN_WORDS)),
            "further options of the step's srun, each with its value: --name=value",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What one field of a JSON file must be; the rules that are given must all hold."""

    exists: Annotated[bool | None, Rule(Flag(), "false: the field must not be there; else it must")] = None
    equals: Annotated[str | int | float | bool | None, Rule(Scalar(), "the value, of the same type")] = None
    min: Annotated[float | None, Rule(Number(None, None, "a finite number"), "a number at least this big")] = None
    max: Annotated[float | None, Rule(Number(None, None, "a finite number"), "a number at most this big")] = None
    length_min: Annotated[
        int | None, Rule(Number(0, None, "a whole number", whole=True), "least length of a list, table or string")
    ] = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files that the run must produce, and what they must contain: one contract for the run, or one for each node."""

    name: Annotated[str, Rule(_name, "the contract's name")]
    path: Annotated[
        str,
        Rule(Path("relative", _everywhere), "file below the root; *, ? and [] match inside a name, ** directories"),
    ]
    root: Annotated[str, Rule(Path("absolute", _everywhere), "directory that no part of the path leaves")] = "{run_dir}"
    per: Annotated[Literal["run", "node"], Rule(Choice("run", "node"), "one contract for the run, or one a node")] = (
        "run"
    )
    roles: Annotated[
        tuple[str, ...], Rule(List(_name, 1, "a list of roles"), 'per = "node": the roles whose nodes; default: all')
    ] = ()
    count: Annotated[
        int, Rule(Number(1, 1_000_000, "a number of files", whole=True), "how many files must match, at least")
    ] = 1
    non_empty: Annotated[bool, Rule(Flag(), "an empty file does not count")] = True
    format: Annotated[Literal["any", "json"], Rule(Choice("any", "json"), "json: one JSON object or list")] = "any"
    fields: Annotated[
        dict[str, FieldRule],
        Rule(
            Names(
                r"[^.].*",
                'dotted paths in quotes ("a.b.0.c")',
                Table(rules_of(FieldRule), "a table with exists, equals, min, max or length_min", FieldRule),
            ),
            "rules for fields of the JSON file, by dotted path; numbers are list positions",
        ),
    ] = field(default_factory=dict)
    required: Annotated[bool, Rule(Flag(), "the run is no success without it")] = True


@dataclass(frozen=True, slots=True)
class Marker:
    """The coordinator's exit-code file."""

    path: Annotated[str, Rule(Path("absolute", RUN_WORDS), "where the marker is")] = "{run_dir}/.bench_done.{jobid}"
    by: Annotated[
        Literal["supervisor", "coordinator"], Rule(Choice("supervisor", "coordinator"), "who publishes it")
    ] = "supervisor"
    recheck: Annotated[float, Rule(Number(0, 60), "seconds of a second look after an engine's death")] = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; None is no limit."""

    hello: Annotated[float, Rule(Number(1, 3600), "from a step's start to its agent's hello")] = 60.0
    run: Annotated[float | None, Rule(_limit, "from the run's start to its end")] = None
    artifacts: Annotated[float | None, Rule(_limit, "from the run's start until every contract is decided")] = None
    finalization: Annotated[float, Rule(Number(1, 3600), "the finalization window of a node")] = 120.0
    collect: Annotated[float, Rule(Number(1, 14_400), "collecting files after the end")] = 60.0
    silence: Annotated[float, Rule(Number(10, 3600), "an agent that is silent this long is lost")] = 60.0
    journal: Annotated[float, Rule(Number(1, 300), "writing the journal; past it the run goes on in memory")] = 5.0


@dataclass(frozen=True, slots=True)
class Collect:
    """Files copied to {run_dir}/collected when the run ends."""

    paths: Annotated[
        tuple[str, ...],
        Rule(List(Path("any", RUN_WORDS), 0, "a list of paths"), "patterns; relative ones start at the run directory"),
    ] = ()
    required: Annotated[bool, Rule(Flag(), "the run is no success if a file cannot be collected")] = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked plan. Ranks are 0..size-1 without a gap; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(Text(), "the job's name", at="job.name")]
    nodes: Annotated[int | tuple[str, ...], Rule(Nodes(), "number of nodes, or their names", at="job.nodes")]
    roles: Annotated[
        tuple[Role, ...],
        Rule(Names(NAME, "names of letters, digits, _ and -", Table(rules_of(Role)), 1), "the roles", at="roles"),
    ]
    base: Annotated[str, Rule(Path("any"), "where run directories are made", at="run.dir")] = "runs"
    finish: Annotated[
        Literal["coordinator", "artifacts"],
        Rule(Choice("coordinator", "artifacts"), "what ends the run when nothing fails", at="run.finish"),
    ] = "coordinator"
    start: Annotated[
        Literal["together", "each"],
        Rule(Choice("together", "each"), "start commands when every agent is there, or each at once", at="run.start"),
    ] = "together"
    coordinator: Annotated[int | None, Rule(Coordinator(), "the coordinator's rank", at="coordinator")] = None
    marker: Annotated[Marker, Rule(Table(rules_of(Marker), shape=Marker), "the marker", at="marker")] = Marker()
    artifacts: Annotated[
        tuple[Artifact, ...],
        Rule(List(Table(rules_of(Artifact)), 0, "a list of tables, [[artifacts]]"), "the contracts", at="artifacts"),
    ] = ()
    deadlines: Annotated[
        Deadlines, Rule(Table(rules_of(Deadlines), shape=Deadlines), "limits in seconds", at="deadlines")
    ] = Deadlines()
    collect: Annotated[Collect, Rule(Table(rules_of(Collect), shape=Collect), "what is copied", at="collect")] = (
        Collect()
    )
    python: Annotated[
        str | None,
        Rule(Text("the path or name of a Python interpreter"), "runs the agents; default: ours", at="job.python"),
    ] = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, sorted."""
        return tuple(sorted(rank for role in self.roles for rank in role.ranks))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(role.ranks) for role in self.roles)

    def role_of(self, rank: int) -> Role:
        """The role of `rank`. Raises KeyError when the plan has no such rank."""
        for role in self.roles:
            if rank in role.ranks:
                return role
        raise KeyError(rank)


# ----------------------------------------------------------------------------------------------------- cross rules

Draft = dict[str, Any]
"""What could be read of a plan, by the plan's field names; WRONG where nothing could."""


def _ranks(draft: Draft) -> dict[str, tuple[int, ...]] | None:
    """Each role's ranks; None when those of any role could not be read."""
    if draft["roles"] is WRONG:
        return None
    ranks = {name: WRONG if role is WRONG else role["ranks"] for name, role in draft["roles"].items()}
    return None if WRONG in ranks.values() or not ranks else ranks


def _ranks_fit(draft: Draft) -> Iterator[PlanError]:
    """Ranks are 0..n-1 without overlap or gap, and no more than there are nodes."""
    roles = _ranks(draft)
    if roles is None:
        return
    owner: dict[int, str] = {}
    for name, ranks in roles.items():
        for rank in ranks:
            if owner.setdefault(rank, name) != name:
                taken = f"rank {rank}, which belongs to role {owner[rank]}"
                yield PlanError(f"{join('roles', name)}.ranks", taken, "each rank in one role")
    missing = sorted(set(range(max(owner) + 1)) - set(owner))
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield PlanError("roles", f"no role for rank {listed}", f"ranks 0..{max(owner)} without a gap")
    nodes = draft["nodes"]
    if nodes is not WRONG:
        count = nodes if isinstance(nodes, int) else len(nodes)
        if len(owner) > count:
            yield PlanError("job.nodes", f"{count} for {len(owner)} ranks", "at least one node for each rank")


def _coordinator_exists(draft: Draft) -> Iterator[PlanError]:
    """The coordinator is a rank of the plan, a critical one; only finish = "artifacts" does without."""
    who, roles = draft["coordinator"], _ranks(draft)
    if who is None:
        if draft["finish"] == "coordinator":
            yield PlanError("coordinator", "nothing", 'a [coordinator] table, or run.finish = "artifacts"')
        marker = draft["marker"]
        if isinstance(marker, Marker) and marker.by == "coordinator":
            yield PlanError("marker.by", '"coordinator" in a plan without one', "a [coordinator] table")
        return
    if who is WRONG or roles is None:
        return
    if isinstance(who, str):
        if who not in roles:
            yield PlanError("coordinator.role", show(who), f"a role of the plan{_like(who, tuple(roles))}")
        elif len(roles[who]) != 1:
            yield PlanError("coordinator.role", f"{len(roles[who])} ranks in role {who}", "exactly one; else give rank")
    elif not any(who in ranks for ranks in roles.values()):
        yield PlanError("coordinator.rank", str(who), "a rank of one of the roles")
    for name, ranks in roles.items():
        if (name == who or who in ranks) and draft["roles"][name]["critical"] is False:
            yield PlanError(f"{join('roles', name)}.critical", "false", "true: the coordinator is in this role")


def _artifacts_agree(draft: Draft) -> Iterator[PlanError]:
    """Names are unique, roles exist, and no two nodes would write the same file."""
    artifacts = draft["artifacts"]
    if artifacts == () and draft["finish"] == "artifacts":
        yield PlanError("run.finish", '"artifacts" in a plan without any', "at least one [[artifacts]] table")
    seen: dict[Any, int] = {}
    for i, artifact in enumerate(() if artifacts is WRONG else artifacts):
        name = artifact["name"]
        if name is not WRONG and seen.setdefault(name, i) != i:
            yield PlanError(f"artifacts[{i}].name", f"{name} again", f"another name than artifacts[{seen[name]}]")
        for rule in (_one_artifact, _artifact_nodes):
            for key, found, expected in rule(artifact, draft):
                yield PlanError(f"artifacts[{i}].{key}", found, expected)


def _one_artifact(artifact: Draft, draft: Draft) -> Iterator[tuple[str, str, str]]:
    rules, path, count = artifact["fields"], artifact["path"], artifact["count"]
    if rules and artifact["format"] == "any":
        yield "fields", 'format = "any"', 'format = "json" for rules about fields'
    if isinstance(path, str) and isinstance(count, int) and count > 1 and not re.search(r"[*?\[]", path):
        yield "count", str(count), "1, for the path names one file; or a pattern in the path"
    for key, rule in rules.items() if isinstance(rules, dict) else ():
        here = join("fields", key)
        if rule == FieldRule():
            yield here, "no rule", "exists, equals, min, max or length_min"
        elif isinstance(rule, FieldRule) and rule.exists is False and rule != FieldRule(exists=False):
            yield here, "exists = false beside other rules", "exists = false alone"
        elif isinstance(rule, FieldRule) and rule.min is not None and rule.max is not None and rule.min > rule.max:
            yield here, f"min {rule.min:g} above max {rule.max:g}", "min at most max"


def _artifact_nodes(artifact: Draft, draft: Draft) -> Iterator[tuple[str, str, str]]:
    wanted, ranks = artifact["roles"], _ranks(draft)
    if artifact["per"] is WRONG or wanted is WRONG or ranks is None:
        return
    if artifact["per"] == "run":
        if wanted:
            yield "roles", 'roles with per = "run"', 'per = "node", or no roles'
        return
    for name in wanted:
        if name not in ranks:
            yield "roles", show(name), f"a role of the plan{_like(name, tuple(ranks))}"
    text = f"{artifact['root']}/{artifact['path']}"
    nodes = sum(len(ranks.get(name, ())) for name in set(wanted or ranks))
    if nodes > 1 and WRONG not in (artifact["root"], artifact["path"]) and not re.search(r"\{(rank|node)\}", text):
        yield "path", f"the same path for {nodes} nodes", "{rank} or {node} in the path or the root"


CROSS_RULES: Final[tuple[Callable[[Draft], Iterator[PlanError]], ...]] = (
    _ranks_fit,
    _coordinator_exists,
    _artifacts_agree,
)


def _words_known(draft: Draft, uses: list[tuple[str, str]]) -> Iterator[PlanError]:
    """No word without a value: the coordinator's node without a coordinator, a rank where none is meant."""
    for at, word in uses:
        if word == "coordinator_node" and draft["coordinator"] is None:
            yield PlanError(at, "{coordinator_node} in a plan without a coordinator", "a [coordinator] table")
        match = re.match(r"artifacts\[(\d+)\]", at)
        if match and word in RANK_WORDS and draft["artifacts"] is not WRONG:
            if draft["artifacts"][int(match[1])]["per"] == "run":
                yield PlanError(at, f'{{{word}}} with per = "run"', 'per = "node"')


# --------------------------------------------------------------------------------------------------------- reading


def _sections() -> Table:
    """The file's sections, from the places (`at`) of the plan's fields."""
    sections: dict[str, list[Field]] = {}
    for item in rules_of(Plan):
        section, _, key = item.rule.at.partition(".")
        sections.setdefault(section, []).append(item._replace(name=key))
    return Table(
        tuple(
            Field(name, Rule(Table(tuple(items)), f"the section [{name}]"), {}) if items[0].name else
            Field(name, items[0].rule, items[0].default)
            for name, items in sections.items()
        ),
        "a table of sections",
    )


def parse_plan(data: Any, source: str) -> Plan:
    """The plan in `data` (plain dicts and lists, as a TOML reader gives them); `source` names it in messages.

    Raises PlanErrors with every error that was found.
    """
    reader, table = Reader(), _sections()
    if isinstance(data, dict):
        data = {item.name: {} for item in table.table if item.default == {}} | data
    read = table.read(reader, "", data)
    if read is WRONG:
        raise PlanErrors(reader.errors, source)
    draft: Draft = {}
    for item in rules_of(Plan):
        section, _, key = item.rule.at.partition(".")
        draft[item.name] = read[section] if not key or read[section] is WRONG else read[section][key]
    for rule in CROSS_RULES:
        reader.errors += rule(draft)
    reader.errors += _words_known(draft, reader.uses)
    if reader.errors:
        raise PlanErrors(reader.errors, source)
    return _built(draft)


def _built(draft: Draft) -> Plan:
    who, roles = draft["coordinator"], draft["roles"]
    draft["coordinator"] = roles[who]["ranks"][0] if isinstance(who, str) else who
    draft["roles"] = tuple(Role(name=name, **role) for name, role in roles.items())
    draft["artifacts"] = tuple(Artifact(**artifact) for artifact in draft["artifacts"])
    return Plan(**draft)


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a plan file: what the fields' own rules say, without the cross rules."""
    table = _sections()
    needed = [item.name for item in table.table if "required" in item.rule.kind.schema() or item.default is MISSING]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "allocd plan",
        **table.schema(),
        "required": needed,
    }


def values_for(
    plan: Plan, *, jobid: str, run_dir: str, logs: str, nodes: tuple[str, ...], rank: int | None
) -> dict[str, str]:
    """The values for `substitute`: those of the run, and those of `rank` unless it is None.

    `nodes` are the run's nodes in rank order: rank r runs on nodes[r]. Raises ValueError when there are fewer nodes
    than ranks, KeyError for a rank that the plan does not have.
    """
    if len(nodes) < plan.size:
        raise ValueError(f"{len(nodes)} nodes for {plan.size} ranks")
    values = {"jobid": jobid, "run_dir": run_dir, "logs": logs, "nodes": ",".join(nodes)}
    if plan.coordinator is not None:
        values["coordinator_node"] = nodes[plan.coordinator]
    if rank is not None:
        values |= {"role": plan.role_of(rank).name, "rank": str(rank), "node": nodes[rank]}
    return values
