"""What is answered, as JSON documents, and their schemas, which are read from the same dataclasses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from supervisor.service.interface import Allocation, Document, Event
from supervisor.service.problems import KINDS

SCHEMA_VERSION: Final = 1
VERSION: Final[Document] = {"schema_version": SCHEMA_VERSION}

Schema = dict[str, Any]

_ALLOCATION: Final = tuple(item.name for item in fields(Allocation))
_EVENT: Final = tuple(item.name for item in fields(Event))
_AT_LENGTH: Final = frozenset({"ranks", "run_dirs"})  # only where one allocation is asked for: a thousand have many
_JSON: Final[dict[Any, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    dict: {"type": "object"},
}


def brief(allocation: Allocation) -> Document:
    """An allocation among others."""
    return {name: getattr(allocation, name) for name in _ALLOCATION if name not in _AT_LENGTH}


def whole(allocation: Allocation) -> Document:
    """One allocation by itself."""
    return {**VERSION, **brief(allocation), "ranks": list(allocation.ranks), "run_dirs": list(allocation.run_dirs)}


def event(happened: Event) -> Document:
    """An event."""
    return {**VERSION, **{name: getattr(happened, name) for name in _EVENT}}


def server_sent(happened: Event) -> bytes:
    """An event as server-sent events have it (HTML, section 9.2): its number, by which a client goes on later, its kind
    and its document in one line."""
    return f"id: {happened.seq}\nevent: {happened.kind}\ndata: {encode(event(happened)).decode()}\n\n".encode()


def encode(document: Document) -> bytes:
    """In ASCII: a lone surrogate (a byte of a file's name that is no UTF-8) is its escape, and a newline is one too."""
    return json.dumps(document, separators=(",", ":")).encode()


# --- schemas --------------------------------------------------------------------------------------------------------


def _schema(hint: Any) -> Schema:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _schema(arguments[0])}
    return _JSON[origin or hint]


def _of(shape: type, *without: str) -> dict[str, Schema]:
    return {name: _schema(hint) for name, hint in get_type_hints(shape).items() if name not in without}


def _object(properties: dict[str, Schema], required: Sequence[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


def _versioned(properties: dict[str, Schema]) -> Schema:
    return _object({"schema_version": {"const": SCHEMA_VERSION}, **properties})


SCHEMAS: Final[dict[str, Schema]] = {
    "Allocation": _versioned(_of(Allocation)),
    "Allocations": _versioned(
        {
            "allocations": {"type": "array", "items": _object(_of(Allocation, *_AT_LENGTH))},
            "total": {"type": "integer", "description": "how many there are that fit, on all pages"},
            "next": {"type": ["string", "null"], "description": "`after` of the next page; null when this is the last"},
        }
    ),
    "Event": _versioned(_of(Event)),
    "Health": _versioned({"last_event": {"type": "integer", "description": "its number; 0 when there was none yet"}}),
    "Object": {"type": "object"},
    "Problem": _object(
        {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "instance": {"type": "string"},
            "kind": {"enum": list(KINDS)},
            "errors": {
                "type": "array",
                "items": _object(
                    {"at": {"type": "string"}, "found": {"type": "string"}, "expected": {"type": "string"}}
                ),
            },
        },
        ["type", "title", "status", "detail", "instance", "kind"],
    ),
}
"""By name; the OpenAPI document has them as components."""
