"""The server: uvicorn's HTTP/1.1 on a socket that we made, with the limits that it does not have.

Every connection is a `Connection`, a protocol of uvicorn's (h11), which adds:

    before anything is read     the peer's uid is asked of the kernel; a stranger's connection is cut without a word
    too many connections        503, and closed
    a request that comes slowly from its first byte (or from the connection's begin) to its end it has 10 s; then 408
    line and headers            16 KiB, else 400; the body's limit is the API's (`api.py`)
    a reader that does not read the buffer is bounded: while it is full, the answer waits; after 30 s without room for
                                anything more the connection is cut

uvicorn's own loop wakes ten times a second to look at a flag and to write the date: here it waits for an event, and
answers carry no date. It takes no signals: whoever runs this does. Its end waits for what is under way, not for ticks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from typing import Any, Final

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from supervisor.service import problems
from supervisor.service.api import Api
from supervisor.service.sockets import Listener, peer_of

CONNECTIONS: Final = 512
HEAD: Final = 16 * 1024  # bytes of a request's line and headers
REQUEST_LIMIT: Final = 10.0  # seconds for a request to come in
WRITE_LIMIT: Final = 30.0  # seconds in which a reader must take something
KEEP_ALIVE: Final = 30.0  # seconds that an idle connection is kept
BUFFER: Final = 64 * 1024  # bytes of an answer that wait for the reader; the kernel holds some 200 KiB besides
STOP_LIMIT: Final = 3.0  # seconds for answers under way when the server ends

TOO_LONG: Final = f"this is no HTTP/1.1, or its line and headers have more than {HEAD} bytes"

logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # what is worth a line is told by the API
logging.getLogger("uvicorn").propagate = False


class Connection(H11Protocol):
    """One connection."""

    gone: asyncio.Event
    _due: asyncio.TimerHandle | None = None  # until then a request must have come in
    _full: asyncio.TimerHandle | None = None  # until then the reader must have read something

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self.gone = asyncio.Event()
        peer = peer_of(transport.get_extra_info("socket"))
        if not peer.allowed:
            transport.abort()
            return
        self.client = (str(peer.uid), peer.pid)  # ASGI's host and port: who asks, as far as a Unix socket tells
        transport.set_write_buffer_limits(high=BUFFER)
        if len(self.connections) > CONNECTIONS:
            self.refuse("unavailable", f"{CONNECTIONS} connections are open, and there is no room for more")
            return
        self._request_is_due()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, whoever ended it."""
        self._no_request_is_due()
        self._room_again()
        super().connection_lost(exc)
        self.gone.set()

    # --- requests that come slowly --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Something came in."""
        if not self.transport.is_closing():
            super().data_received(data)
            self._watch_request()

    def on_response_complete(self) -> None:
        """An answer is through. The next request may have begun to come in behind the one before."""
        super().on_response_complete()
        self._watch_request()

    def _watch_request(self) -> None:
        """The clock runs while a request is half there, and is not set back by what comes of it."""
        theirs = self.conn.their_state
        begun = theirs is h11.SEND_BODY or (theirs is h11.IDLE and self.conn.trailing_data[0])
        if begun and not self.transport.is_closing():
            self._request_is_due()
        else:
            self._no_request_is_due()

    def _request_is_due(self) -> None:
        self._due = self._due or self.loop.call_later(REQUEST_LIMIT, self._too_slow)

    def _no_request_is_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _too_slow(self) -> None:
        self._due = None
        self.refuse("timeout", f"a request must come in within {REQUEST_LIMIT:g} s")

    # --- readers that do not read ---------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The buffer is full."""
        super().pause_writing()
        self._full = self._full or self.loop.call_later(WRITE_LIMIT, self.transport.abort)

    def resume_writing(self) -> None:
        """There is room again."""
        self._room_again()
        super().resume_writing()

    def _room_again(self) -> None:
        if self._full is not None:
            self._full.cancel()
            self._full = None

    # --- refusals below the API -----------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """What came is no request (uvicorn's hook)."""
        self.refuse("malformed", TOO_LONG)

    def refuse(self, kind: str, detail: str) -> None:
        """Answer with a problem and close; where an answer has begun already, cut the connection."""
        body = problems.encoded(problems.document(kind, detail, "/"))
        headers = [
            ("content-type", problems.MEDIA_TYPE),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        response = h11.Response(status_code=problems.KINDS[kind].status, headers=headers, reason=kind)
        try:
            answer = [self.conn.send(event) for event in (response, h11.Data(data=body), h11.EndOfMessage())]
        except h11.LocalProtocolError:
            self.transport.abort()
            return
        self.transport.write(b"".join(part for part in answer if part))
        self.transport.close()


def _bounded(api: Api) -> ASGIApp:
    """The API, for requests whose head is as short as it must be: h11 looks at the length of one that is not whole yet
    alone, and it may come in one piece."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"])
        if line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) <= HEAD:
            await api(scope, receive, send)
            return
        problem = problems.document("malformed", TOO_LONG, "/")
        answer = Response(problems.encoded(problem), problem["status"], {"connection": "close"}, problems.MEDIA_TYPE)
        await answer(scope, receive, send)

    return app


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its ticks and its signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()
        self.listens = asyncio.Event()

    async def main_loop(self) -> None:
        self.listens.set()
        await self.ending.wait()

    async def shutdown(self, sockets: object = None) -> None:
        """Take no more connections; wait for answers under way, and for readers to have them, within the limit."""
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_LIMIT):
                await asyncio.gather(*map(asyncio.shield, state.tasks), return_exceptions=True)
                for connection in list(state.connections):
                    if isinstance(connection, Connection):
                        await connection.gone.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Server:
    """An API on a listener. `serve` is the task of whoever runs it; `stop` ends it in order."""

    def __init__(self, api: Api, listener: Listener) -> None:
        self._api, self._listener = api, listener
        options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
        headers: dict[str, Any] = {"server_header": False, "date_header": False, "proxy_headers": False}
        config = uvicorn.Config(
            _bounded(api),
            **options,
            **headers,
            http=Connection,
            interface="asgi3",
            h11_max_incomplete_event_size=HEAD,
            timeout_keep_alive=int(KEEP_ALIVE),
        )
        self._server = _Uvicorn(config)

    @property
    def connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    async def wait_until_it_listens(self) -> None:
        """Connections are accepted from then on. (Those made before wait in the kernel.)"""
        await self._server.listens.wait()

    async def serve(self) -> None:
        """Answer until `stop`. When this returns, however it does, the socket is closed, its file removed, and no
        connection and no request is left."""
        try:
            await self._server.serve(sockets=[self._listener.socket])
        finally:
            await self._cut()
            self._listener.close()

    def stop(self) -> None:
        """Take no more connections, let answers under way end (streams tell what they have), at most for a few
        seconds. To be called in the loop."""
        self._api.streams.closing.set()
        self._server.ending.set()

    async def _cut(self) -> None:
        """End what is left."""
        state = self._server.server_state
        for server in getattr(self._server, "servers", ()):
            server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        tasks = set(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the loop's next round
