"""Kinds of fields: each reads a value of a plan strictly, says what is wrong with it, and knows its JSON Schema.

The plan's dataclasses (`plan.py`) are annotated with these. A kind never stops at the first error: it returns WRONG
after it has said what was found and what was expected, and reading goes on.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any, Final, Literal, NamedTuple

from supervisor.core.substitution import RANK_WORDS, RUN_WORDS, SubstitutionError, show, words_in

MAX_NODES: Final = 65_536

# Lists of words, kept as text: they read better.
SIGNALS: Final = tuple(
    """HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM PROF WINCH IO PWR
    SYS""".split()  # noqa: SIM905
)
"""Signals that a program can catch (signal(7)) and that may mean its end. Not KILL, not STOP."""

OWN_SRUN_OPTIONS: Final = tuple(
    """output error input open-mode label unbuffered pty multi-prog job-name nodes nodelist relative ntasks
    ntasks-per-node wait kill-on-bad-exit jobid het-group export export-file o e i l u J N w r n W K""".split()  # noqa: SIM905
)
"""Options of a step's srun that are the supervisor's: they place the step, name it, or carry its channel."""


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


def join(at: str, key: str) -> str:
    """The key path of `key` inside the table `at`; keys that TOML would quote are quoted."""
    name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
    return f"{at}.{name}" if at else name


def like(word: str, known: Iterable[str]) -> str:
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
            reader.errors.append(PlanError(at, f"{{{word}}}", f"{known}{like(word, self.words)} ({{{{ is a brace)"))
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
            hint = like(key, known) or f", one of {', '.join(known)}"
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
EVERYWHERE: Final = RUN_WORDS + RANK_WORDS

FLAG: Final = Kind("true or false", {"type": "boolean"}, lambda value: value if isinstance(value, bool) else WRONG)
SCALAR: Final = Kind(
    "a string, a finite number, true or false",
    {"type": ["string", "number", "boolean"]},
    lambda value: value if isinstance(value, str | bool) or _fits(value, None, None, False) else WRONG,
)
NAME: Final = Text("a name of letters, digits, _ and -", pattern="[A-Za-z0-9_-]+")
RANK: Final = number(0, MAX_NODES - 1, "a rank number", whole=True)
LIMIT: Final = number(1, 30 * 86_400)
ARGUMENT: Final = Text("a string without control characters", words=EVERYWHERE, lines=True, empty=True)
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
