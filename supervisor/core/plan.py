"""The plan: what a job is made of, and every rule that a plan must obey.

A plan arrives as plain data (a parsed TOML file) and leaves as frozen dataclasses, or as a list of everything
that is wrong with it. There is one source of truth: each field of the dataclasses below is annotated with a
`Rule` (its kind with bounds, what it is for, and its place in the file when that differs). From these come

* the reader (`parse_plan`), which walks data and annotations side by side and never stops at the first error,
* the messages, which say where, what was found and what was expected, and suggest a key for an unknown one,
* the JSON Schema (`schema`), for editors and other programs.

What no single field can know (ranks without a gap, a coordinator that exists, two nodes that would write the
same file) is in `CROSS_RULES`, functions over the values that could be read: a rule that needs a value which
is itself wrong keeps quiet, so that one mistake is told once.

Strings may hold substitutions, `{jobid}` and its like, and `{{` and `}}` where a brace is meant. A word that
is not in the list is an error here, before anything starts, and never an empty string in a command.

Types are strict: `true` is not 1, 1.5 is no number of nodes, and a duration is a finite number of seconds.
No I/O happens here: reading files is the caller's business.
"""

# No `from __future__ import annotations`: the rules live in the annotations and are read from them.
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, NamedTuple

RUN_WORDS: Final = ("jobid", "run_dir", "logs", "nodes", "coordinator_node")
"""Substitutions known everywhere in a run; `coordinator_node` only in a plan that has a coordinator."""
RANK_WORDS: Final = ("rank", "node", "role")
"""Known only where one rank is meant: a role's command, env and cwd, an artifact with per = "node"."""

MAX_NODES: Final = 65_536

# Lists of words, kept as text: they read better.
SIGNALS: Final = tuple(
    """HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM PROF WINCH IO PWR
    SYS""".split()  # noqa: SIM905
)
"""Signals that a program can catch (signal(7)) and that may mean its end. Not KILL, not STOP."""

OWN_SRUN_OPTIONS: Final = tuple(
    """output error input open-mode label unbuffered pty multi-prog job-name nodes nodelist relative ntasks
    ntasks-per-node wait kill-on-bad-exit jobid export export-file o e i l u J N w r n W K""".split()  # noqa: SIM905
)
"""Options of a step's srun that are the supervisor's: they place the step, name it, or carry its channel."""


# ----------------------------------------------------------------------------------------------------- errors


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


# ---------------------------------------------------------------------------------------------- substitutions

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


# ------------------------------------------------------------------------------------------------------ kinds


def show(value: object) -> str:
    """A value as a message shows it: JSON-like, one line, short, free of control characters."""
    if isinstance(value, dict):
        return "a table" if value else "an empty table"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 72 else f"{text[:68]} ..."


def join(at: str, key: str) -> str:
    """The key path of `key` inside the table `at`; keys that TOML would quote are quoted."""
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
    return f"{at}.{name}" if at else name


def _like(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?`, or nothing when no known word is near."""
    import difflib  # only a wrong plan needs it

    near = difflib.get_close_matches(word, known, 1, 0.6)
    return f"; did you mean {near[0]}?" if near else ""


class _Wrong:
    """The type of WRONG: what a reader returns after it has said what is wrong."""


WRONG: Final = _Wrong()
Draft = dict[str, Any]
"""Values that could be read, by field name; WRONG where one could not."""
Schema = dict[str, Any]


class Reader:
    """One pass over a plan: the errors found, and each substitution word with the place that uses it."""

    def __init__(self) -> None:
        self.errors: list[PlanError] = []
        self.uses: list[tuple[str, str]] = []

    def say(self, at: str, value: object, expected: str) -> Any:
        self.errors.append(PlanError(at, show(value), expected))
        return WRONG


class Kind:
    """What a value may be. `convert` returns it (normalised) or WRONG; `schema` tells programs the same."""

    def __init__(self, expected: str, schema: Schema, convert: Callable[[Any], Any] = lambda value: value) -> None:
        self.expected, self.schema, self.convert = expected, schema, convert

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        """The value, or WRONG once `reader` knows why not."""
        read = self.convert(value)
        return reader.say(at, value, self.expected) if read is WRONG else read


def _fits(value: Any, low: float | None, high: float | None, whole: bool) -> bool:
    """A finite number within the bounds (None: no bound). Booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    low, high = (-1e300 if low is None else low), (1e300 if high is None else high)
    return low <= value <= high  # false for nan, and for infinity


def number(low: float | None, high: float | None, what: str = "a number of seconds", whole: bool = False) -> Kind:
    """A finite number low..high (None: no bound); `whole`: an integer. It is not converted."""
    text = ["" if bound is None else f"{bound:.0f}" if bound == int(bound) else str(bound) for bound in (low, high)]
    expected = what + (f", {'..'.join(text)}" if text[1] else f", {text[0]} or more" if text[0] else "")
    schema: Schema = {"type": "integer" if whole else "number"}
    schema |= {} if low is None else {"minimum": low}
    schema |= {} if high is None else {"maximum": high}
    return Kind(expected, schema, lambda value: value if _fits(value, low, high, whole) else WRONG)


def choice(*words: str, prefix: str = "") -> Kind:
    """One of a few words; `prefix` is dropped from the value first (SIGTERM is TERM)."""

    def convert(value: Any) -> Any:
        word = value.removeprefix(prefix) if isinstance(value, str) else value
        return word if isinstance(word, str) and word in words else WRONG

    expected = " or ".join(map(show, words)) if len(words) < 4 else f"one of {', '.join(words)}"
    return Kind(expected, {"enum": [*words, *(prefix + word for word in words if prefix)]}, convert)


class Text(Kind):
    """A printable string. `words`: the substitutions that it may use (None: braces are plain characters).

    `lines` lets newlines and tabs through (a script as an argument), `empty` the empty string.
    """

    def __init__(
        self,
        expected: str = "a non-empty string without control characters",
        *,
        pattern: str = ".*",
        words: tuple[str, ...] | None = None,
        lines: bool = False,
        empty: bool = False,
    ) -> None:
        def convert(value: Any) -> Any:
            if not isinstance(value, str) or not (value or empty):
                return WRONG
            plain = value.translate({9: " ", 10: " "}) if lines else value
            return value if plain.isprintable() and re.fullmatch(pattern, plain) else WRONG

        schema = {"type": "string"} | ({} if empty else {"minLength": 1})
        super().__init__(expected, schema if pattern == ".*" else {**schema, "pattern": f"^(?:{pattern})$"}, convert)
        self.words, self.pattern = words, pattern

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        text = super().read(reader, at, value)
        if text is WRONG or self.words is None:
            return text
        try:
            used = words_in(text)
        except SubstitutionError as error:
            return reader.say(at, value, f"braces in pairs ({error})")
        reader.uses += [(at, word) for word in used]
        for word in (word for word in used if word not in self.words):
            known = " ".join(f"{{{each}}}" for each in self.words) or "no substitution"
            reader.errors.append(PlanError(at, f"{{{word}}}", f"{known}{_like(word, self.words)} ({{{{ is a brace)"))
        return text


_CLIMBS = r"(?!.*(?:^|/)\.{1,2}(?:/|$))(?!.+//)(?!.+/$)"
_PATHS: Final = {
    "relative": ("a relative path", _CLIMBS + r"(?!/).*"),
    "absolute": (
        "an absolute path, or one that starts with {run_dir} or {logs},",
        _CLIMBS + r"(/|\{(run_dir|logs)\}).*",
    ),
    "any": ("a path", _CLIMBS + ".*"),
}


def climbless(anchor: Literal["relative", "absolute", "any"], words: tuple[str, ...]) -> Text:
    """A path that climbs nowhere: no `.` or `..`, no empty part. `{run_dir}` and `{logs}` are absolute."""
    start, pattern = _PATHS[anchor]
    known = tuple(word for word in words if anchor != "relative" or word not in ("run_dir", "logs"))
    return Text(f"{start} without . or .., empty parts or control characters", pattern=pattern, words=known)


class List(Kind):
    """A list of one kind, as a tuple, at least `least` long."""

    def __init__(self, item: Kind, least: int = 0, what: str = "a list") -> None:
        self.item, self.least = item, least
        super().__init__(what, {"type": "array", "items": item.schema} | ({"minItems": least} if least else {}))

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) < self.least:
            return reader.say(at, value, self.expected)
        items = tuple(self.item.read(reader, f"{at}[{i}]", each) for i, each in enumerate(value))
        return WRONG if WRONG in items else items


class Names(Kind):
    """A table whose keys the plan chooses (`key`, a pattern) and whose values are of one kind, as a dict."""

    def __init__(self, key: str, what: str, item: Kind, least: int = 0) -> None:
        self.key, self.what, self.item, self.least = key, what, item, least
        schema: Schema = {"type": "object", "propertyNames": {"pattern": f"^(?:{key})$"}}
        schema |= {"additionalProperties": item.schema} | ({"minProperties": least} if least else {})
        super().__init__(f"a table with {what} as keys", schema)

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, dict) or len(value) < self.least:
            return reader.say(at, value, self.expected)
        strange = [key for key in value if not (key.isprintable() and re.fullmatch(self.key, key))]
        for key in strange:
            reader.say(join(at, key), key, self.what)
        read = {key: self.item.read(reader, join(at, key), each) for key, each in value.items() if key not in strange}
        return WRONG if strange else read


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
    """One row of a table of rules; `default` is MISSING when the field must be given."""

    name: str
    rule: Rule
    default: Any


def rules_of(shape: Any) -> tuple[Field, ...]:
    """The table of fields of one of the dataclasses below, read from its annotations."""

    def row(item: Any) -> Field:
        default = item.default if item.default_factory is MISSING else item.default_factory()
        return Field(item.name, item.type.__metadata__[0], default)

    return tuple(each for each in map(row, fields(shape)) if not each.rule.key)


class Table(Kind):
    """A table with known keys. Read as a dict of what could be read, defaults included; or, given a `shape`,
    as that dataclass (then WRONG if anything in it is)."""

    def __init__(
        self, table: tuple[Field, ...], what: str = "a table", shape: Callable[..., Any] | None = None
    ) -> None:
        self.table, self.shape = table, shape
        keys = {item.name: {"description": item.rule.doc, **item.rule.kind.schema} for item in table}
        for item in table:
            if isinstance(item.default, bool | int | float | str):
                keys[item.name]["default"] = item.default
        needed = [item.name for item in table if item.default is MISSING]
        schema: Schema = {"type": "object", "properties": keys, "additionalProperties": False}
        super().__init__(what, schema | ({"required": needed} if needed else {}))

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return reader.say(at, value, self.expected)
        errors = len(reader.errors)
        known = [item.name for item in self.table]
        for key in (str(key) for key in value if key not in known):
            hint = _like(key, known) or f", one of {', '.join(known)}"
            reader.errors.append(PlanError(join(at, key), "an unknown key", f"a known key{hint}"))
        read = {item.name: self._field(reader, join(at, item.name), item, value) for item in self.table}
        if self.shape is None:
            return read
        return WRONG if len(reader.errors) > errors else self.shape(**read)

    def _field(self, reader: Reader, at: str, item: Field, value: Draft) -> Any:
        if item.name in value:
            return item.rule.kind.read(reader, at, value[item.name])
        if item.default is MISSING:
            reader.errors.append(PlanError(at, "nothing", item.rule.kind.expected))
            return WRONG
        return item.default


class Command(List):
    """A list of strings whose first names a program."""

    def __init__(self) -> None:
        super().__init__(ARGUMENT, 1, "a list of strings, the program first")

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and value and value[0] == "":
            return reader.say(f"{at}[0]", "", "the name of a program")
        return super().read(reader, at, value)


class Coordinator(Table):
    """`rank = N`, or `role = "x"` for a role with exactly one rank: read as the number or the name."""

    def __init__(self) -> None:
        rank, role = (
            Rule(RANK, "the coordinator's rank"),
            Rule(NAME, "or its role, which has exactly one rank"),
        )
        what = 'a table with either rank = N or role = "NAME"'
        super().__init__((Field("rank", rank, None), Field("role", role, None)), what)
        self.schema |= {"minProperties": 1, "maxProperties": 1}

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        table = super().read(reader, at, value)
        if table is WRONG or WRONG in table.values():
            return WRONG
        given = [each for each in table.values() if each is not None]
        return given[0] if len(given) == 1 else reader.say(at, value, self.expected)


def _nodes(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value if _fits(value, 1, MAX_NODES, True) else WRONG
    names = [name for name in value if isinstance(name, str) and re.fullmatch(_NODE, name)]
    return tuple(names) if value and len(set(names)) == len(value) else WRONG


def _rank_numbers(value: Any) -> Any:
    ranks: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        parts = [part.partition("-") for part in value.split(",")] if re.fullmatch(_RANGES, value) else []
        ranks = [rank for first, _, last in parts for rank in range(int(first), int(last or first) + 1)]
    right = bool(ranks) and all(_fits(rank, 0, MAX_NODES - 1, True) for rank in ranks)
    return tuple(sorted(ranks)) if right and len(set(ranks)) == len(ranks) else WRONG


_NODE: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RANGES: Final = r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*"
_EVERYWHERE: Final = RUN_WORDS + RANK_WORDS

FLAG: Final = Kind("true or false", {"type": "boolean"}, lambda value: value if isinstance(value, bool) else WRONG)
SCALAR: Final = Kind(
    "a string, a finite number, true or false",
    {"type": ["string", "number", "boolean"]},
    lambda value: value if isinstance(value, str | bool) or _fits(value, None, None, False) else WRONG,
)
NAME: Final = Text("a name of letters, digits, _ and -", pattern="[A-Za-z0-9_-]+")
RANK: Final = number(0, MAX_NODES - 1, "a rank number", whole=True)
LIMIT: Final = number(1, 30 * 86_400)
ARGUMENT: Final = Text("a string without control characters", words=_EVERYWHERE, lines=True, empty=True)
ENV: Final = Names(
    r"(?!ALLOCD_|SLURM_)[A-Za-z_][A-Za-z0-9_]*",
    "names of environment variables (ALLOCD_ and SLURM_ are taken)",
    ARGUMENT,
)
NODES: Final = Kind(
    f"a number of nodes, 1..{MAX_NODES}, or a list of different node names",
    {
        "anyOf": [
            {"type": "integer", "minimum": 1, "maximum": MAX_NODES},
            {
                "type": "array",
                "items": {"type": "string", "pattern": f"^{_NODE}$"},
                "minItems": 1,
                "uniqueItems": True,
            },
        ]
    },
    _nodes,
)
RANKS: Final = Kind(
    'different rank numbers: one (3 is rank 3), a list ([0, 1]) or ranges ("0-1,3")',
    {
        "anyOf": [
            RANK.schema,
            {"type": "array", "items": RANK.schema, "minItems": 1, "uniqueItems": True},
            {"type": "string", "pattern": f"^{_RANGES}$"},
        ]
    },
    _rank_numbers,
)
DIRECTORY: Final = Text(
    "a directory (no substitutions; ~ and $ are not expanded in a plan)", pattern=r"[^~$].*", words=()
)
SRUN_OPTION: Final = Text(
    "an option in one piece (--name=value) that the supervisor does not set itself",
    pattern=f"-(?!-?(?:{'|'.join(OWN_SRUN_OPTIONS)})(?:=|$)).+",
    words=RUN_WORDS,
)


# ------------------------------------------------------------------------------------------------ dataclasses


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that run the same command; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(NAME, "the key of the role's table", key=True)]
    ranks: Annotated[tuple[int, ...], Rule(RANKS, "the role's ranks, sorted; one rank a node")]
    command: Annotated[tuple[str, ...], Rule(Command(), "the program and its arguments; no shell reads them")]
    env: Annotated[dict[str, str], Rule(ENV, "variables set for the command")] = field(default_factory=dict)
    cwd: Annotated[
        str | None,
        Rule(climbless("absolute", _EVERYWHERE), "working directory; default: where the run was started"),
    ] = None
    stop_signal: Annotated[str, Rule(choice(*SIGNALS, prefix="SIG"), "asks the ranks to end; read without SIG")] = (
        "TERM"
    )
    grace: Annotated[float, Rule(number(0, 3600), "seconds from the stop signal to KILL")] = 30.0
    critical: Annotated[bool, Rule(FLAG, "a failure of these ranks fails the run")] = True
    may_finish: Annotated[bool, Rule(FLAG, "these ranks may end with 0 before the run may end")] = False
    agent: Annotated[
        Literal["on", "off"],
        Rule(choice("on", "off"), "off: srun starts the command itself, without an agent"),
    ] = "on"
    srun_options: Annotated[tuple[str, ...], Rule(List(SRUN_OPTION), "further options of the step's srun")] = ()


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What one field of a JSON file must be; all the rules that are given must hold."""

    exists: Annotated[bool | None, Rule(FLAG, "false: the field must not be there; else it must")] = None
    equals: Annotated[str | int | float | bool | None, Rule(SCALAR, "the value; true is not 1, 1.0 is")] = None
    min: Annotated[float | None, Rule(number(None, None, "a finite number"), "a number, at least this")] = None
    max: Annotated[float | None, Rule(number(None, None, "a finite number"), "a number, at most this")] = None
    length_min: Annotated[
        int | None, Rule(number(0, None, "a whole number", True), "least length of a list, table or string")
    ] = None


@dataclass(frozen=True, slots=True)
class Artifact:
    """Files that the run must produce, and what they must contain: a contract of the run, or of each node."""

    name: Annotated[str, Rule(NAME, "the contract's name")]
    path: Annotated[
        str,
        Rule(
            climbless("relative", _EVERYWHERE),
            "file below the root; * ? [] match inside a name, ** any directories",
        ),
    ]
    root: Annotated[str, Rule(climbless("absolute", _EVERYWHERE), "directory that no path leaves")] = "{run_dir}"
    per: Annotated[Literal["run", "node"], Rule(choice("run", "node"), "one contract a run, or one a node")] = "run"
    roles: Annotated[
        tuple[str, ...],
        Rule(List(NAME, 1, "a list of roles"), 'per = "node": the roles whose nodes; default: all'),
    ] = ()
    count: Annotated[
        int, Rule(number(1, 1_000_000, "a number of files", whole=True), "at least so many files match")
    ] = 1
    non_empty: Annotated[bool, Rule(FLAG, "an empty file does not count")] = True
    format: Annotated[Literal["any", "json"], Rule(choice("any", "json"), "json: one JSON object or list")] = "any"
    fields: Annotated[
        dict[str, FieldRule],
        Rule(
            Names(
                r".+",
                'dotted paths in quotes ("a.b.0.c")',
                Table(rules_of(FieldRule), "a table with exists, equals, min, max or length_min", FieldRule),
            ),
            "rules for JSON fields, by dotted path; a number is a place in a list, \\. a dot in a name",
        ),
    ] = field(default_factory=dict)
    required: Annotated[bool, Rule(FLAG, "the run is no success without it")] = True


@dataclass(frozen=True, slots=True)
class Marker:
    """The coordinator's exit-code file."""

    path: Annotated[str, Rule(climbless("absolute", RUN_WORDS), "where it is")] = "{run_dir}/.bench_done.{jobid}"
    by: Annotated[
        Literal["supervisor", "coordinator"], Rule(choice("supervisor", "coordinator"), "who publishes it")
    ] = "supervisor"
    recheck: Annotated[float, Rule(number(0, 60), "seconds of the second look after an engine's death")] = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; None is no limit."""

    hello: Annotated[float, Rule(number(1, 3600), "from a step's start to its agent's hello")] = 60.0
    run: Annotated[float | None, Rule(LIMIT, "from the run's start to its end")] = None
    artifacts: Annotated[float | None, Rule(LIMIT, "from the run's start until every contract is decided")] = None
    finalization: Annotated[float, Rule(number(1, 3600), "the finalization window of a node")] = 120.0
    collect: Annotated[float, Rule(number(1, 14_400), "collecting files after the end")] = 60.0
    silence: Annotated[float, Rule(number(10, 3600), "an agent that is silent this long is lost")] = 60.0
    journal: Annotated[float, Rule(number(1, 300), "writing the journal; past it the run goes on in memory")] = 5.0


@dataclass(frozen=True, slots=True)
class Collect:
    """Files copied to {run_dir}/collected when the run ends."""

    paths: Annotated[
        tuple[str, ...],
        Rule(
            List(climbless("any", RUN_WORDS), 0, "a list of paths"),
            "patterns; relative ones start at the run directory",
        ),
    ] = ()
    required: Annotated[bool, Rule(FLAG, "the run is no success if a file cannot be collected")] = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked plan. Ranks are 0..size-1 without a gap; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(Text(), "the job's name", "job.name")]
    nodes: Annotated[int | tuple[str, ...], Rule(NODES, "how many nodes, or their names", "job.nodes")]
    roles: Annotated[
        tuple[Role, ...],
        Rule(Names(NAME.pattern, NAME.expected, Table(rules_of(Role)), 1), "the roles", "roles"),
    ]
    base: Annotated[str, Rule(DIRECTORY, "where run directories are made", "run.dir")] = "runs"
    finish: Annotated[
        Literal["coordinator", "artifacts"],
        Rule(choice("coordinator", "artifacts"), "what ends the run when nothing fails", "run.finish"),
    ] = "coordinator"
    start: Annotated[
        Literal["together", "each"],
        Rule(
            choice("together", "each"),
            "commands start when every agent is there, or each at once",
            "run.start",
        ),
    ] = "together"
    coordinator: Annotated[int | None, Rule(Coordinator(), "the rank whose end ends the run", "coordinator")] = None
    marker: Annotated[
        Marker, Rule(Table(rules_of(Marker), shape=Marker), "the coordinator's exit-code file", "marker")
    ] = Marker()
    artifacts: Annotated[
        tuple[Artifact, ...],
        Rule(
            List(Table(rules_of(Artifact)), 0, "a list of tables, [[artifacts]]"),
            "the contracts",
            "artifacts",
        ),
    ] = ()
    deadlines: Annotated[
        Deadlines, Rule(Table(rules_of(Deadlines), shape=Deadlines), "limits in seconds", "deadlines")
    ] = Deadlines()
    collect: Annotated[
        Collect, Rule(Table(rules_of(Collect), shape=Collect), "what is copied at the end", "collect")
    ] = Collect()
    python: Annotated[
        str | None, Rule(Text(), "the agents' Python on the nodes; default: the engine's", "job.python")
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


# ------------------------------------------------------------------------------------------------ cross rules

Uses = list[tuple[str, str]]
"""Key path and substitution word, for each use of one."""


def _ranks(draft: Draft) -> dict[str, tuple[int, ...]] | None:
    """Each role's ranks; None when those of any role could not be read."""
    if draft["roles"] is WRONG:
        return None
    ranks = {name: WRONG if role is WRONG else role["ranks"] for name, role in draft["roles"].items()}
    return None if WRONG in ranks.values() or not ranks else ranks


def _ranks_fit(draft: Draft, uses: Uses) -> Iterator[PlanError]:
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


def _coordinator_exists(draft: Draft, uses: Uses) -> Iterator[PlanError]:
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
            yield PlanError("coordinator.role", show(who), f"a role of the plan{_like(who, roles)}")
        elif len(roles[who]) != 1:
            yield PlanError("coordinator.role", f"{len(roles[who])} ranks in role {who}", "exactly one; else give rank")
    elif not any(who in ranks for ranks in roles.values()):
        yield PlanError("coordinator.rank", str(who), "a rank of one of the roles")
    for name, ranks in roles.items():
        if (name == who or who in ranks) and draft["roles"][name]["critical"] is False:
            yield PlanError(f"{join('roles', name)}.critical", "false", "true: the coordinator is in this role")


def _artifacts_agree(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    """Names are unique, roles exist, fields have rules, and no two nodes would write the same file."""
    artifacts = draft["artifacts"]
    if artifacts == () and draft["finish"] == "artifacts":
        yield PlanError("run.finish", '"artifacts" in a plan without any', "at least one [[artifacts]] table")
    seen: dict[str, int] = {}
    for i, artifact in enumerate(() if artifacts is WRONG else artifacts):
        name = artifact["name"]
        if name is not WRONG and seen.setdefault(name, i) != i:
            yield PlanError(f"artifacts[{i}].name", f"{name} again", f"another name than artifacts[{seen[name]}]")
        for key, found, expected in (*_contents(artifact), *_places(artifact, _ranks(draft))):
            yield PlanError(f"artifacts[{i}].{key}", found, expected)


def _contents(artifact: Draft) -> Iterator[tuple[str, str, str]]:
    """Rules for fields that can be applied and met; a count that the pattern can reach."""
    rules, pattern, count = artifact["fields"], artifact["path"], artifact["count"]
    if rules and artifact["format"] == "any":
        yield "fields", 'format = "any"', 'format = "json" for rules about fields'
    if isinstance(pattern, str) and isinstance(count, int) and count > 1 and not re.search(r"[*?\[]", pattern):
        yield "count", str(count), "1, for the path names one file; or a pattern in the path"
    for key, rule in rules.items() if isinstance(rules, dict) else ():
        if not isinstance(rule, FieldRule):
            continue
        if rule == FieldRule():
            yield join("fields", key), "no rule", "exists, equals, min, max or length_min"
        if rule.exists is False and rule != FieldRule(exists=False):
            yield join("fields", key), "exists = false beside other rules", "exists = false alone"
        if rule.min is not None and rule.max is not None and rule.min > rule.max:
            yield join("fields", key), f"min {rule.min} above max {rule.max}", "min at most max"


def _places(artifact: Draft, ranks: dict[str, tuple[int, ...]] | None) -> Iterator[tuple[str, str, str]]:
    """Roles that exist, and a place of its own for each node's file."""
    per, wanted = artifact["per"], artifact["roles"]
    if per == "run" and wanted:
        yield "roles", 'roles with per = "run"', 'per = "node", or no roles'
    if per != "node" or wanted is WRONG or ranks is None:
        return
    for name in wanted:
        if name not in ranks:
            yield "roles", show(name), f"a role of the plan{_like(name, ranks)}"
    nodes = sum(len(ranks.get(name, ())) for name in set(wanted or ranks))
    places = (artifact["root"], artifact["path"])
    if nodes > 1 and WRONG not in places and not {"rank", "node"}.intersection(words_in("/".join(places))):
        yield "path", f"the same path for {nodes} nodes", "{rank} or {node} in the path or the root"


def _words_known(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    """No word without a value: the coordinator's node without a coordinator, a rank where none is meant."""
    artifacts = draft["artifacts"]
    for at, word in uses:
        if word == "coordinator_node" and draft["coordinator"] is None:
            yield PlanError(at, "{coordinator_node} in a plan without a coordinator", "a [coordinator] table")
        place = re.match(r"artifacts\[(\d+)\]", at)
        if place and word in RANK_WORDS and artifacts is not WRONG and artifacts[int(place[1])]["per"] == "run":
            yield PlanError(at, f'{{{word}}} with per = "run"', 'per = "node"')


CROSS_RULES: Final = (_ranks_fit, _coordinator_exists, _artifacts_agree, _words_known)


# ---------------------------------------------------------------------------------------------------- reading


def _sections() -> Table:
    """The file as a table of tables, from the places (`at`) of the plan's fields."""
    sections: dict[str, list[Field]] = {}
    for item in rules_of(Plan):
        name, _, key = item.rule.at.partition(".")
        sections.setdefault(name, []).append(item._replace(name=key))
    return Table(tuple(_section(name, items) for name, items in sections.items()), "a table of tables")


def _section(name: str, items: list[Field]) -> Field:
    if not items[0].name:  # the plan's field is the whole table
        return items[0]._replace(name=name)
    needed = [item.name for item in items if item.default is MISSING]
    table = Table(tuple(items), f"a table with {' and '.join(needed)}" if needed else "a table")
    return Field(name, Rule(table, f"the table [{name}]"), MISSING if needed else table.read(Reader(), name, {}))


def parse_plan(data: Any, source: str) -> Plan:
    """The plan in `data` (plain dicts and lists, as a TOML reader gives them); `source` names it in messages.

    Raises PlanErrors with every error that was found.
    """
    reader = Reader()
    read = _sections().read(reader, "", data)
    if read is not WRONG:
        draft: Draft = {}
        for item in rules_of(Plan):
            section, _, key = item.rule.at.partition(".")
            draft[item.name] = read[section][key] if key and read[section] is not WRONG else read[section]
        for rule in CROSS_RULES:
            reader.errors += rule(draft, reader.uses)
    if reader.errors:
        raise PlanErrors(reader.errors, source)
    return _built(draft)


def _built(draft: Draft) -> Plan:
    who, roles = draft["coordinator"], draft["roles"]
    draft["coordinator"] = roles[who]["ranks"][0] if isinstance(who, str) else who
    draft["roles"] = tuple(Role(name=name, **role) for name, role in roles.items())
    draft["artifacts"] = tuple(Artifact(**artifact) for artifact in draft["artifacts"])
    return Plan(**draft)


def schema() -> Schema:
    """JSON Schema (2020-12) of a plan file: what the fields' own rules say, without the cross rules."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "allocd plan"}
    return head | _sections().schema


def values_for(
    plan: Plan, *, jobid: str, run_dir: str, logs: str, nodes: tuple[str, ...], rank: int | None
) -> dict[str, str]:
    """The values for `substitute`: those of the run, and those of `rank` unless it is None.

    `nodes` are the run's nodes in rank order: rank r runs on nodes[r]. Raises ValueError when there are fewer
    nodes than ranks, KeyError for a rank that the plan does not have.
    """
    if len(nodes) < plan.size:
        raise ValueError(f"{len(nodes)} nodes for {plan.size} ranks")
    values = {"jobid": jobid, "run_dir": run_dir, "logs": logs, "nodes": ",".join(nodes)}
    if plan.coordinator is not None:
        values["coordinator_node"] = nodes[plan.coordinator]
    if rank is not None:
        values |= {"role": plan.role_of(rank).name, "rank": str(rank), "node": nodes[rank]}
    return values
