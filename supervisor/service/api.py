"""The HTTP API: which operations there are (OPERATIONS, one table), and how each is answered.

A request goes through one place (`Api._answer`): its body is read, bounded, then its parameters and body by their
tables (`requests.py`), then the operation asks who answers (`interface.Answering`). Whatever goes wrong on the way
becomes a problem document there, and is counted. The OpenAPI document is made of the same table (`openapi.py`).
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from supervisor.core.fields import Table
from supervisor.loop.files import read_whole
from supervisor.loop.threads import in_thread
from supervisor.runs.papers import RUN_RECEIPT, SIZE
from supervisor.service import documents, metrics, problems, requests
from supervisor.service.interface import Allocation, Answering, Document, Refusal
from supervisor.service.logs import Wanted, count_ranks, log_lines
from supervisor.service.openapi import openapi
from supervisor.service.problems import refuse
from supervisor.service.requests import Parameter
from supervisor.service.stream import Pieces, Streams, send_stream

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain; charset=utf-8"
JSON_LINES: Final = "application/jsonl"
READ_LIMIT: Final = 10.0  # seconds for a file
RETRY: Final = b"retry: 1000\n\n"  # milliseconds after which a client that lost its stream asks again
HEARTBEAT: Final = b": still here\n\n"


@dataclass
class Asked:
    """A request that was read: the allocation that its path names, its parameters, its body."""

    request: Request
    name: str
    parameters: Mapping[str, Any]
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str | None:
        """The caller's idempotency key."""
        key = self.parameters["Idempotency-Key"]
        return None if key is None else str(key)


Handler = Callable[["Api", Asked], Awaitable[ASGIApp]]


class Operation(NamedTuple):
    """One row of the table. `answer`: a schema's name (documents.SCHEMAS), or a media type for what is no JSON.
    `problems`: kinds, besides those that any request can meet."""

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    answer: str
    status: int = 200
    parameters: tuple[Parameter, ...] = ()
    body: Table | None = None
    problems: tuple[str, ...] = ()
    or_else: tuple[str, ...] = ()  # other media types of the answer


class Api:
    """The ASGI application over one who answers. `fault` is told the traceback of what broke here."""

    def __init__(self, answering: Answering, meter: metrics.Metrics, fault: Callable[[str], None]) -> None:
        self.answering = answering
        self.streams = Streams()
        self.meter = meter
        self.fault = fault
        meter.gauge("allocd_streams", "Streams that are open.", "kind", lambda: {"all": self.streams.count})
        paths: dict[str, dict[str, Operation]] = {}
        for operation in OPERATIONS:
            paths.setdefault(operation.path, {})[operation.method] = operation
        routes = [Route(path, _Resource(self, path, operations)) for path, operations in paths.items()]
        self._router = Router(routes, redirect_slashes=False, default=_Resource(self, "other", {}))

    @cached_property
    def openapi(self) -> bytes:
        """The OpenAPI document."""
        return documents.encode(openapi(OPERATIONS)) + b"\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Only HTTP comes here: the server knows neither web sockets nor a lifespan."""
        await self._router(scope, receive, send)


class _Resource:
    """Everything that can be done with one path; "other" is every path that is not known."""

    def __init__(self, api: Api, path: str, operations: Mapping[str, Operation]) -> None:
        self._api, self._path, self._operations = api, path, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        sender = _Sender(request, send)
        try:
            response = await self._response(request, sender)
            await response(scope, receive, sender)
        except ClientDisconnect:
            return
        except Refusal as refusal:
            await self._complain(problems.of_refusal(refusal, _path(request)), sender)
        except Exception:  # noqa: BLE001 - told to whoever runs this, and not to the client
            self._api.fault(traceback.format_exc())
            text = "it is in the log of whoever answers here"
            await self._complain(problems.document("fault", text, _path(request)), sender)
        finally:
            if sender.status:
                self._api.meter.asked(self._path, request.method, sender.status)

    async def _response(self, request: Request, sender: _Sender) -> ASGIApp:
        operation = self._operations.get("GET" if request.method == "HEAD" else request.method)
        if not self._operations:
            raise refuse("not_found", f"there is nothing at {_path(request)}: see /openapi.json")
        if operation is None:
            allowed = sorted({*self._operations, *(("HEAD",) if "GET" in self._operations else ())})
            raise refuse("method", f"{request.method} is not known here, but {', '.join(allowed)}", allow=allowed)
        body = b""
        if operation.body is not None:
            _check_media(request)
            body = await _body(request)
            sender.body_read = True
        name = str(request.path_params.get("name", ""))
        if "{name}" in self._path and requests.KEY.convert(name) != name:
            raise refuse("not_found", "there is no allocation of such a name: it is no key, job id or run id")
        read = requests.read_parameters(operation.parameters, request.query_params.multi_items(), request.headers)
        asked = Asked(request, name, read)
        if operation.body is not None:
            asked.body = requests.read_body(operation.body, body)
        return await operation.handler(self._api, asked)

    async def _complain(self, problem: dict[str, Any], sender: _Sender) -> None:
        if sender.status:  # an answer has begun: that it breaks off is all that can be told (the server closes it)
            return
        headers = {}
        if "allow" in problem:
            headers["allow"] = ", ".join(problem["allow"])
        if "retry_after" in problem:
            headers["retry-after"] = str(problem["retry_after"])
        response = Response(problems.encoded(problem), problem["status"], headers, problems.MEDIA_TYPE)
        await response(sender.request.scope, sender.request.receive, sender)


class _Sender:
    """Sends an answer, and knows its status (0: none yet). A request whose body nobody has read leaves a connection on
    which the next request cannot be found: it is closed."""

    def __init__(self, request: Request, send: Send) -> None:
        self.request = request
        self.status = 0
        self.body_read = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = self.request.headers
            has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
            if has_body and not self.body_read:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await self._send(message)


def _path(request: Request) -> str:
    """What was asked for, as a reference (Starlette's `url` would believe the Host header as well)."""
    return quote(request.scope["path"])


def _check_media(request: Request) -> None:
    media, _, parameter = request.headers.get("content-type", "").partition(";")
    charset = parameter.strip().lower().replace('"', "")
    if media.strip().lower() != JSON or charset not in ("", "charset=utf-8"):
        raise refuse("media", f"the body must be {JSON} in UTF-8, and Content-Type must say so")


async def _body(request: Request) -> bytes:
    """The body. Raises Refusal (413) as soon as it is too large, ClientDisconnect."""
    too_large = refuse("too_large", f"the body has more than {requests.BODY} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > requests.BODY):
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > requests.BODY:
            raise too_large
    return bytes(body)


# --- the operations ---------------------------------------------------------------------------------------------------


def _json(document: Document, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(documents.encode(document) + b"\n", status, headers, JSON)


def _accepted(allocation: Allocation, status: int) -> Response:
    return _json(documents.whole(allocation), status, {"location": f"/v1/allocations/{allocation.key}"})


async def _list(api: Api, asked: Asked) -> Response:
    given = asked.parameters
    found = [
        item
        for item in api.answering.allocations()
        if (not given["state"] or item.state in given["state"]) and given["name"] in (None, item.name)
    ]
    start = _start(api, found, given["after"])
    page = found[start : start + given["limit"]]
    following = page[-1].key if page and start + len(page) < len(found) else None
    headers = {}
    if following is not None:
        query = [pair for pair in asked.request.query_params.multi_items() if pair[0] != "after"]
        headers["link"] = f'</v1/allocations?{urlencode([*query, ("after", following)])}>; rel="next"'
    document = {"allocations": list(map(documents.brief, page)), "total": len(found), "next": following}
    return _json({**documents.VERSION, **document}, 200, headers)


def _start(api: Api, found: list[Allocation], after: str | None) -> int:
    """Where a page begins. The allocation that the one before ended with may fit the filter no more: the place is that
    among all of them."""
    if after is None:
        return 0
    order = {item.key: place for place, item in enumerate(api.answering.allocations())}
    if after not in order:
        raise refuse("not_found", f"after: there is no allocation {after}: use `next` of the page before, unchanged")
    return sum(order[item.key] <= order[after] for item in found)


async def _show(api: Api, asked: Asked) -> Response:
    return _json(documents.whole(api.answering.find(asked.name)))


async def _submit(api: Api, asked: Asked) -> Response:
    return _accepted(await api.answering.submit(requests.submit_request(asked.body), asked.key), 201)


async def _adopt(api: Api, asked: Asked) -> Response:
    return _accepted(await api.answering.adopt(requests.adopt_request(asked.body), asked.key), 201)


async def _follow(api: Api, asked: Asked) -> Response:
    return _accepted(await api.answering.follow(asked.body["jobid"], asked.body["cluster"]), 201)


async def _stop(api: Api, asked: Asked) -> Response:
    return _accepted(await api.answering.stop(asked.name, asked.body["how"]), 202)


async def _events(api: Api, asked: Asked) -> ASGIApp:
    key = api.answering.find(asked.name).key if asked.name else None
    last, after = asked.parameters["Last-Event-ID"], asked.parameters["after"]
    events = api.answering.events(after if last is None else last, key)

    async def pieces() -> Pieces:
        yield RETRY
        async for happened in events:
            yield documents.server_sent(happened)

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with api.streams.place(tuple(scope["client"] or ())):
                await send_stream(scope, receive, send, pieces(), api.streams, EVENTS, HEARTBEAT)
        finally:
            await events.aclose()

    return stream


async def _logs(api: Api, asked: Asked) -> ASGIApp:
    given = asked.parameters
    as_json = given["format"] == "jsonl"
    await _check_ranks(api.answering.find(asked.name), given["rank"])
    wanted = Wanted(given["rank"], given["kind"], given["follow"], given["tail"], as_json)
    lines = log_lines(lambda: api.answering.find(asked.name), wanted, api.streams.closing)

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        with api.streams.place(tuple(scope["client"] or ())):
            await send_stream(scope, receive, send, lines, api.streams, JSON_LINES if as_json else TEXT)

    return stream


async def _check_ranks(allocation: Allocation, asked: Sequence[int]) -> None:
    """Raises Refusal (404) for a rank that the run does not have. Before there is a run nobody is refused."""
    count = len(allocation.ranks)
    if asked and not count and allocation.run_dir:
        with suppress(OSError):  # it is read again for its logs, and then it is told
            count = await in_thread(count_ranks, allocation.run_dir, limit=READ_LIMIT)
    if asked and count and max(asked) >= count:
        raise refuse("not_found", f"{allocation.key} has no rank {max(asked)}: it has {count}, from 0 on")


async def _receipt(api: Api, asked: Asked) -> Response:
    """The sealed receipt, else the run's own, byte by byte: its checksum is that of the file."""
    allocation = api.answering.find(asked.name)
    run_dir = allocation.run_dir if len(allocation.run_dirs) <= 1 else None  # no task's receipt is the array's
    paths = [allocation.receipt, run_dir and os.path.join(run_dir, RUN_RECEIPT)]
    for path in filter(None, paths):
        try:
            return Response(await in_thread(_read, path, limit=READ_LIMIT), media_type=JSON)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise refuse("storage", f"the receipt {path} cannot be read: {error}") from error
    raise refuse("not_found", f"{asked.name} has no receipt yet: it is {allocation.state}")


def _read(path: str) -> bytes:
    """In a thread. Raises OSError, and ValueError for what is no receipt."""
    data = read_whole(path, SIZE)
    json.loads(data)
    return data


async def _health(api: Api, _: Asked) -> Response:
    return _json({**documents.VERSION, **api.answering.health()})


async def _metrics(api: Api, _: Asked) -> Response:
    return Response(api.answering.metrics(), media_type=metrics.MEDIA_TYPE)


async def _openapi(api: Api, _: Asked) -> Response:
    return Response(api.openapi, media_type=JSON)


_ALLOCATIONS: Final = "/v1/allocations"
_ONE: Final = "/v1/allocations/{name}"
_NEW: Final = ("conflict", "unfit", "busy", "unsupported", "unavailable", "storage")

OPERATIONS: Final = (
    Operation("GET", _ALLOCATIONS, "list", "Allocations, in the order in which they were accepted", _list,
              "Allocations", parameters=requests.LIST, problems=("not_found",)),
    Operation("POST", _ALLOCATIONS, "submit", "Submit a plan", _submit, "Allocation", 201, requests.CREATE,
              requests.SUBMIT, _NEW),
    Operation("POST", "/v1/adoptions", "adopt", "Run a plan's steps in an allocation that exists", _adopt, "Allocation",
              201, requests.CREATE, requests.ADOPT, ("not_found", *_NEW)),
    Operation("POST", "/v1/follows", "follow", "Follow, verify and collect a job that runs already, or has ended",
              _follow, "Allocation", 201, (), requests.FOLLOW, ("not_found", *_NEW)),
    Operation("GET", _ONE, "show", "One allocation, with its ranks", _show, "Allocation", problems=("not_found",)),
    Operation("POST", f"{_ONE}/stop", "stop", "Ask for its end", _stop, "Allocation", 202, (), requests.STOP,
              ("not_found", "conflict", "unsupported", "unavailable", "storage")),
    Operation("GET", f"{_ONE}/events", "eventsOf", "Its events, as they come", _events, EVENTS,
              parameters=requests.EVENTS, problems=("not_found", "gone", "busy")),
    Operation("GET", f"{_ONE}/logs", "logs", "Lines of its logs", _logs, TEXT, parameters=requests.LOGS,
              problems=("not_found", "busy", "storage"), or_else=(JSON_LINES,)),
    Operation("GET", f"{_ONE}/receipt", "receipt", "Its receipt, as it is on the disk", _receipt, "Object",
              problems=("not_found", "storage")),
    Operation("GET", "/v1/events", "events", "The events of all allocations, as they come", _events, EVENTS,
              parameters=requests.EVENTS, problems=("gone", "busy")),
    Operation("GET", "/v1/health", "health", "How whoever answers is", _health, "Health"),
    Operation("GET", "/metrics", "metrics", "Metrics for Prometheus", _metrics, metrics.MEDIA_TYPE),
    Operation("GET", "/openapi.json", "openapi", "This document", _openapi, "Object"),
)  # fmt: skip
