"""Answers that go on: events and logs, to readers who may be slow, may hang, and may be many.

One stream is a generator of pieces, a task that waits for the next of them, and a connection. Nothing is queued in
between: while a reader does not read, the transport's buffer (bounded, see `server.py`) fills, `send` waits, and the
generator is not asked for more. A connection that takes nothing for 30 s is closed by the server. So a slow reader
costs a buffer and a position, and no other reader anything.

An idle stream is kept alive by heartbeats (comments, which clients skip): through them a reader learns that there is
somebody, and the server that there is none.

When the server is to end, a stream may tell what comes without waiting, and ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from supervisor.service.problems import AGAIN, refuse

HEARTBEAT: Final = 15.0  # seconds
LAST_WORDS: Final = 0.5  # seconds that a stream waits for one more piece when the server ends
STREAMS: Final = 384
"""Streams at a time. There are more connections than that (`server.py`): streams alone leave room for questions."""
OF_ONE: Final = 256  # of one process

_END: Final = object()

Pieces = AsyncGenerator[bytes, None]


class Streams:
    """How many streams there are, and whether they are to end."""

    def __init__(self, most: int = STREAMS, of_one: int = OF_ONE) -> None:
        self.closing = asyncio.Event()
        self._most, self._of_one = most, of_one
        self._open: Counter[Hashable] = Counter()

    @property
    def count(self) -> int:
        """Streams that are open."""
        return self._open.total()

    @contextmanager
    def place(self, peer: Hashable) -> Iterator[None]:
        """Room for one more of `peer`. Raises Refusal (429)."""
        if self.count >= self._most:
            raise refuse("busy", f"{self._most} streams are open, and there is no room for more", retry_after=AGAIN)
        if self._open[peer] >= self._of_one:
            raise refuse("busy", f"this process has {self._of_one} streams open already", retry_after=AGAIN)
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


async def send_stream(
    scope: Scope,
    receive: Receive,
    send: Send,
    pieces: Pieces,
    streams: Streams,
    media_type: str,
    heartbeat: bytes = b"",
) -> None:
    """Answer with the pieces as they come, until there are no more, the client is gone or the streams are to end; the
    generator is closed then."""
    headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")]
    async with aclosing(pieces):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] != "HEAD":
            await _pieces(receive, send, pieces, streams, heartbeat)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pieces(receive: Receive, send: Send, pieces: Pieces, streams: Streams, heartbeat: bytes) -> None:
    gone = asyncio.create_task(_gone(receive), name="a client that leaves")
    closing = asyncio.create_task(streams.closing.wait(), name="the end of streams")
    coming: asyncio.Task[Any] | None = None
    try:
        while not gone.done():
            coming = coming or asyncio.create_task(_next(pieces), name="the next piece")
            ends = {gone, coming} if closing.done() else {gone, closing, coming}
            pause = LAST_WORDS if closing.done() else HEARTBEAT
            await asyncio.wait(ends, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                piece, coming = coming.result(), None
                if piece is _END:
                    return
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            elif closing in ends and closing.done():
                continue
            elif closing.done():
                return
            elif not gone.done() and heartbeat:
                await send({"type": "http.response.body", "body": heartbeat, "more_body": True})
    finally:
        tasks = [task for task in (gone, closing, coming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(pieces: Pieces) -> Any:
    return await anext(pieces, _END)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
