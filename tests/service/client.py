"""A client over a Unix socket: bytes that were written by hand, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

LIMIT = 20.0  # seconds that a test waits for anything


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Line:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """A request and its answer. Header names are given with underscores."""
        self.writer.write(request(method, path, body, headers))
        return await self.answer(method)

    async def answer(self, method: str = "GET") -> Answer:
        """The next answer, to its end."""
        found = await self.head()
        if method == "HEAD" or found.status in (204, 304):
            return found
        if found.headers.get("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                found.body += piece
        else:
            async with asyncio.timeout(LIMIT):
                found.body = await self.reader.readexactly(int(found.headers["content-length"]))
        return found

    async def head(self) -> Answer:
        async with asyncio.timeout(LIMIT):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = [line.split(": ", 1) for line in lines[1:] if line]
        return Answer(int(lines[0].split()[1]), {name.lower(): text for name, text in headers})

    async def chunk(self) -> bytes:
        """The next piece of a stream; b"" at its end."""
        async with asyncio.timeout(LIMIT):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def event(self) -> dict[str, Any]:
        """The next event of a stream of events."""
        while True:
            fields = dict(line.split(": ", 1) for line in (await self.chunk()).decode().splitlines() if ": " in line)
            if "data" in fields:
                found: dict[str, Any] = json.loads(fields["data"])
                assert (fields["id"], fields["event"]) == (str(found["seq"]), found["kind"])
                return found

    async def closed(self) -> bytes:
        """What comes until the other side closes."""
        async with asyncio.timeout(LIMIT):
            return await self.reader.read()


def request(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """A request as bytes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", **{name.replace("_", "-"): text for name, text in (headers or {}).items()}}
    if body is not None:
        fields = {"Content-Type": "application/json", "Content-Length": str(len(data)), **fields}
    head = "".join(f"{name}: {text}\r\n" for name, text in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[Line]:
    """A connection, closed at the end."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def ask(path: str, method: str, target: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own."""
    async with connected(path) as line:
        return await line.ask(method, target, body, **headers)
