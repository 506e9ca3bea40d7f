"""Errors as problem documents (RFC 9457): one table of kinds, and one way to write them.

A program relies on `kind` (and on the status, which follows from it); `title` is the kind in words, `detail` is for
people. Nothing of a traceback goes to a client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from supervisor.core.fields import PlanError
from supervisor.service.interface import Refusal

MEDIA_TYPE: Final = "application/problem+json"
AGAIN: Final = 1  # seconds after which one who is refused for want of room may ask again


class Kind(NamedTuple):
    """One kind of error: its usual status (who answers may give another), and its title."""

    status: int
    title: str


KINDS: Final[dict[str, Kind]] = {
    "malformed": Kind(400, "The request cannot be read"),
    "not_found": Kind(404, "There is no such thing here"),
    "method": Kind(405, "That method is not known here"),
    "timeout": Kind(408, "The request did not come in within its time"),
    "conflict": Kind(409, "That contradicts what is there already"),
    "gone": Kind(410, "That is no longer kept"),
    "too_large": Kind(413, "The request is too large"),
    "media": Kind(415, "The body must be JSON"),
    "invalid": Kind(422, "The request says something that cannot be"),
    "unfit": Kind(422, "The plan does not fit"),
    "busy": Kind(429, "There is no room for that now"),
    "fault": Kind(500, "A fault of allocd itself"),
    "unsupported": Kind(501, "Whoever answers here cannot do that"),
    "unavailable": Kind(503, "What is needed for that does not answer"),
    "storage": Kind(507, "It cannot be saved or read"),
}


def mistakes(errors: Iterable[PlanError]) -> list[dict[str, str]]:
    """What is wrong with a request or its plan, each mistake by itself, for the member `errors`."""
    return [{"at": error.key_path, "found": error.found, "expected": error.expected} for error in errors]


def document(kind: str, detail: str, instance: str, status: int | None = None, **more: Any) -> dict[str, Any]:
    """The problem document; `instance` is the path that was asked for."""
    known = KINDS[kind]
    return {
        "type": f"urn:allocd:problem:{kind}",
        "title": known.title,
        "status": status or known.status,
        "detail": detail,
        "instance": instance,
        "kind": kind,
        **more,
    }


def of_refusal(refusal: Refusal, instance: str) -> dict[str, Any]:
    """A refusal's document. A kind that is not in the table is a fault of whoever raised it, and shows as one."""
    kind = refusal.kind if refusal.kind in KINDS else "fault"
    fixed = {"type", "title", "status", "detail", "instance", "kind"}
    more = {key: value for key, value in refusal.more.items() if key not in fixed}
    return document(kind, refusal.text, instance, refusal.status, **more)


def encoded(problem: dict[str, Any]) -> bytes:
    """As bytes; whatever a path may hold can be written (a lone surrogate as its escape)."""
    return json.dumps(problem, separators=(",", ":")).encode() + b"\n"


def refuse(kind: str, detail: str, **more: Any) -> Refusal:
    """A refusal with its kind's usual status."""
    return Refusal(KINDS[kind].status, kind, detail, **more)
