"""The OpenAPI 3.1 document, made of the tables by which requests are read and answered: it cannot say anything else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from supervisor import __version__
from supervisor.service.documents import SCHEMAS
from supervisor.service.problems import KINDS, MEDIA_TYPE
from supervisor.service.requests import KEY, Parameter

if TYPE_CHECKING:
    from supervisor.service.api import Operation

Schema = dict[str, Any]

_OF_ANY: Final = ("method", "timeout", "invalid", "fault", "unavailable")
_OF_BODIES: Final = ("malformed", "too_large", "media")

_SERVER_SENT: Final[Schema] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "its seq"},
        "event": {"type": "string", "description": "its kind"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/Event"},
        },
    },
}


def openapi(operations: Iterable[Operation]) -> Schema:
    """The document."""
    paths: dict[str, Schema] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": "allocd",
            "version": __version__,
            "description": "Slurm allocations that are submitted, adopted and followed; on a Unix socket.",
        },
        "servers": [{"url": "http://localhost"}],
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _operation(operation: Operation) -> Schema:
    parameters = [_parameter(item) for item in operation.parameters]
    if "{name}" in operation.path:
        parameters.insert(0, {"name": "name", "in": "path", "required": True, "schema": KEY.schema})
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {str(operation.status): _success(operation), **_problems(operation)},
    }
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": operation.body.schema}},
        }
    return described


def _parameter(item: Parameter) -> Schema:
    schema = {"type": "array", "items": item.kind.schema} if item.many else dict(item.kind.schema)
    if item.default is not None and not item.many:
        schema["default"] = item.default
    described = {"name": item.name, "in": item.where, "description": item.doc, "schema": schema}
    return described | ({"style": "form", "explode": True} if item.many else {})


def _success(operation: Operation) -> Schema:
    if operation.answer not in SCHEMAS:
        schema = _SERVER_SENT if operation.answer == "text/event-stream" else {"type": "string"}
        media = (operation.answer, *operation.or_else)
        return {"description": operation.summary, "content": {each: {"schema": schema} for each in media}}
    described: Schema = {
        "description": operation.summary,
        "content": {"application/json": {"schema": _ref(operation.answer)}},
    }
    if operation.status in (201, 202):
        described["headers"] = {"Location": {"schema": {"type": "string"}, "description": "the allocation's own path"}}
    return described


def _problems(operation: Operation) -> Schema:
    kinds = (*_OF_ANY, *operation.problems, *(_OF_BODIES if operation.body is not None else ()))
    by_status: dict[int, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        by_status.setdefault(KINDS[kind].status, []).append(kind)
    return {
        str(status): {
            "description": "; ".join(f"{KINDS[kind].title} ({kind})" for kind in named),
            "content": {MEDIA_TYPE: {"schema": _ref("Problem")}},
        }
        for status, named in sorted(by_status.items())
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
