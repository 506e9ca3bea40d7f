"""What can be asked for: the tables of parameters and bodies, and how a request is read by them.

The tables are made of the same kinds as a plan's (`core/fields.py`): each reads a value strictly and knows its JSON
Schema, so that what the OpenAPI document says is what is refused. A reader never stops at the first error: all of them
are in the problem document, each with its place, what was found and what was expected. Unknown fields are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, Final, NamedTuple

from supervisor.core.fields import FLAG, WRONG, Field, Kind, List, Names, Reader, Rule, Table, choice, number
from supervisor.runs.growing import KINDS as LOG_KINDS
from supervisor.service.interface import STATES, AdoptRequest, SubmitRequest
from supervisor.service.problems import mistakes, refuse

BODY: Final = 1024 * 1024  # bytes
PAGE: Final = 1000  # allocations in one answer
LARGEST: Final = 2**53 - 1  # integers that every JSON reader keeps


class Words(Kind):
    """A string that a pattern fits as a whole, at most `most` characters. Lone surrogates, which no UTF-8 has, do not
    fit any."""

    def __init__(self, expected: str, pattern: str, most: int) -> None:
        self.pattern = re.compile(pattern)
        schema = {"type": "string", "minLength": 1, "maxLength": most, "pattern": f"^(?:{pattern})$"}
        super().__init__(f"{expected}, at most {most} characters", schema, self._read)
        self.most = most

    def _read(self, value: Any) -> Any:
        fits = isinstance(value, str) and 0 < len(value) <= self.most and self.pattern.fullmatch(value)
        return value if fits and _is_unicode(value) else WRONG


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_CLEAN: Final = r"[^\x00-\x1f\x7f-\x9f]"
PATH: Final = Words("an absolute path without control characters", rf"\/{_CLEAN}*", 4095)
KEY: Final = Words("a key, job id or run id", r"[A-Za-z0-9][A-Za-z0-9_.+\-]*", 128)
PLAN: Final = Words("the text of a plan without NUL", r"[^\x00]+", BODY)
NAME: Final = Words("a name", rf"{_CLEAN}+", 256)
JOBID: Final = Words("a job's id (123, 123_4 or 123+1)", r"[1-9][0-9]{0,9}(?:[_+][0-9]{1,7})?", 24)
CLUSTER: Final = Words("a cluster's name", r"[A-Za-z0-9_.\-]+", 128)
OPTION: Final = Words("an option of sbatch in one piece (--name=value)", rf"-{_CLEAN}+", 4095)
PROGRAM: Final = Words("the path or the name of a program", rf"{_CLEAN}+", 4095)
IDEMPOTENCY: Final = Words("visible characters of ASCII", r"[!-~]+", 128)
VALUE: Final = Kind(
    "a string without NUL",
    {"type": "string", "pattern": r"^[^\x00]*$"},
    lambda value: value if isinstance(value, str) and "\0" not in value and _is_unicode(value) else WRONG,
)
ENVIRON: Final = Names(r"[ -<>-~]+", "names of environment variables", VALUE)
OPTIONS: Final = List(OPTION, 0, "a list of options of sbatch")
SEQ: Final = number(0, LARGEST, "the number of an event", whole=True)


class Parameter(NamedTuple):
    """A parameter of a query or a header; `many`: it may be given several times, and is read as a tuple."""

    name: str
    kind: Kind
    doc: str
    default: Any = None
    many: bool = False
    where: str = "query"


def _rows(*rows: tuple[str, Kind, str] | tuple[str, Kind, str, Any]) -> Table:
    return Table(
        tuple(Field(name, Rule(kind, doc), (*more, MISSING)[0]) for name, kind, doc, *more in rows), "an object"
    )


SUBMIT: Final = _rows(
    ("plan", PLAN, "the plan's text (TOML)"),
    ("cwd", PATH, "where the relative paths of the plan start"),
    ("options", OPTIONS, "further options of sbatch", ()),
    ("directory", PATH, "where run directories are made (default: as the plan says)", None),
    ("cluster", CLUSTER, "the cluster, where there are several", None),
    ("allocctl", PROGRAM, "the allocctl that the job's script executes", None),
    ("environ", ENVIRON, "the caller's environment variables that sbatch may read", {}),
)
ADOPT: Final = _rows(
    ("plan", PLAN, "the plan's text (TOML)"),
    ("jobid", JOBID, "the allocation's job id"),
    ("cwd", PATH, "where the relative paths of the plan start"),
    ("directory", PATH, "where run directories are made (default: as the plan says)", None),
    ("environ", ENVIRON, "the caller's environment variables", {}),
)
FOLLOW: Final = _rows(
    ("jobid", JOBID, "the job's id"),
    ("cluster", CLUSTER, "its cluster, where there are several", None),
)
STOP: Final = _rows(
    ("how", choice("stop", "cancel"), "stop: an orderly end by its engine; cancel: scancel of a job submitted here"),
)

LIST: Final = (
    Parameter("state", choice(*STATES), "only those in this state", (), many=True),
    Parameter("name", NAME, "only those of plans with this name"),
    Parameter("limit", number(1, PAGE, "how many at most", whole=True), "how many at most", 100),
    Parameter("after", KEY, "the `next` of the answer before"),
)
EVENTS: Final = (
    Parameter(
        "after",
        SEQ,
        "the last event that is known already (default: tell all that are kept; `last_event` of /v1/health: only what "
        "comes). 410 when it is older than what is kept, or was never told here: the state it is of is gone",
    ),
    Parameter("Last-Event-ID", SEQ, "the same, as clients send that connect again; it counts", where="header"),
)
LOGS: Final = (
    Parameter("rank", number(0, 65_535, "a rank", whole=True), "only this rank's", (), many=True),
    Parameter("kind", choice(*LOG_KINDS), "only these", (), many=True),
    Parameter("follow", FLAG, "go on until the run is over", False),
    Parameter("tail", number(0, 100_000, "a number of lines", whole=True), "begin with the last lines of each log"),
    Parameter("format", choice("text", "jsonl"), "lines as they are, or a JSON object for each", "text"),
)
CREATE: Final = (
    Parameter(
        "Idempotency-Key", IDEMPOTENCY, "makes it safe to ask again: the same key, the same allocation", where="header"
    ),
)


def submit_request(body: Mapping[str, Any]) -> SubmitRequest:
    """Of a body that was read by SUBMIT."""
    return SubmitRequest(**body)


def adopt_request(body: Mapping[str, Any]) -> AdoptRequest:
    """Of a body that was read by ADOPT."""
    return AdoptRequest(**body)


# --- reading --------------------------------------------------------------------------------------------------------


def read_parameters(
    table: Sequence[Parameter], query: Iterable[tuple[str, str]], headers: Mapping[str, str]
) -> dict[str, Any]:
    """The parameters by name, defaults included. Raises Refusal (422) with all that is wrong."""
    reader = Reader()
    known = {item.name: item for item in table if item.where == "query"}
    given: dict[str, list[str]] = {}
    for name, text in query:
        if name not in known:
            reader.say(name, text, f"one of the parameters {', '.join(known)}" if known else "no parameters here")
        given.setdefault(name, []).append(text)
    for item in table:
        if item.where == "header" and item.name in headers:
            given[item.name] = [headers[item.name]]
    read = {item.name: _parameter(reader, item, given.get(item.name, [])) for item in table}
    _complain(reader, "the parameters are wrong")
    return read


def _parameter(reader: Reader, item: Parameter, texts: list[str]) -> Any:
    if not texts:
        return item.default
    if len(texts) > 1 and not item.many:
        return reader.say(item.name, texts[1], "to be given once")
    values = tuple(item.kind.read(reader, item.name, _meant(item.kind, text)) for text in texts)
    return values if item.many else values[0]


def _meant(kind: Kind, text: str) -> Any:
    """A parameter's text as the type that its kind wants; as it is where it is no such thing."""
    wanted = kind.schema.get("type")
    if wanted == "integer" and re.fullmatch(r"-?(0|[1-9][0-9]{0,15})", text, re.ASCII):
        return int(text)
    if wanted == "boolean":
        return {"true": True, "false": False}.get(text, text)
    return text


def read_body(table: Table, data: bytes) -> dict[str, Any]:
    """A body by its table, defaults included. Raises Refusal: 400 for what is no JSON, 422 for what does not fit."""
    value = _json(data)
    reader = Reader()
    read = table.read(reader, "", value)
    _complain(reader, "the body is wrong")
    assert isinstance(read, dict)  # noqa: S101 - a table without a shape reads a dict, or complains
    return read


def _json(data: bytes) -> Any:
    """JSON, strictly: UTF-8, no key twice, no number that is none, nothing too deep."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    def no_constant(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=no_constant)
    except RecursionError:
        raise refuse("malformed", "the body is no JSON that can be read: too deep") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are some
        raise refuse("malformed", f"the body is no JSON that can be read: {error}") from None


def _complain(reader: Reader, what: str) -> None:
    if reader.errors:
        first = reader.errors[0].text("").removeprefix(": ")
        raise refuse("invalid", f"{what}: {first}", errors=mistakes(reader.errors))
