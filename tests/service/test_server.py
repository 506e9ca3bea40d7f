"""What the server does with clients that send too much, too slowly, or nothing, and with those that do not read."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from supervisor.service import server as limits
from supervisor.service import stream
from supervisor.service.api import Api
from supervisor.service.server import HEAD, Server
from supervisor.service.sockets import Listener, listen
from tests.service.client import ask, connected, request
from tests.service.test_api import PLAN, problem
from tests.service.world import World, served


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait less for a last word."""
    monkeypatch.setattr(stream, "LAST_WORDS", 0.05)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of a tenth of a second, so that what they end is seen to end."""
    monkeypatch.setattr(limits, "REQUEST_LIMIT", 0.1)
    monkeypatch.setattr(limits, "WRITE_LIMIT", 0.1)


@pytest.mark.parametrize(
    "line",
    [
        b"GET /" + b"x" * HEAD,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X-Y: z\r\n" * (HEAD // 8 + 1),
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Y: " + b"z" * 12 * HEAD + b"\r\n\r\n",  # whole, in one write
        b"GET /?" + b"x" * HEAD + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/follows HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        request("POST", "/v1/follows", None, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"})
        + b"x\r\n",
    ],
)
async def test_what_is_no_request_is_refused_and_closed(tmp_path: Path, line: bytes) -> None:
    async with served(World(), tmp_path) as (_, path), connected(path) as client:
        client.writer.write(line)
        assert problem(await client.answer())[:2] == (400, "malformed")
        assert await client.closed() == b""


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"G",
        b"GET /v1/health HTTP/1.1\r\nHost: a\r\n",
        b"POST /v1/follows HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{",
        request("GET", "/v1/health") + b"GET /v1/heal",
    ],
)
async def test_half_a_request_does_not_stay(tmp_path: Path, begin: bytes) -> None:
    async with served(World(), tmp_path) as (_, path), connected(path) as client:
        client.writer.write(begin)
        if begin.startswith(request("GET", "/v1/health")):
            assert (await client.answer()).status == 200
        assert problem(await client.answer())[:2] == (408, "timeout")
        assert await client.closed() == b""


async def test_a_drop_now_and_then_does_not_set_the_clock_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUEST_LIMIT", 0.3)
    async with served(World(), tmp_path) as (_, path), connected(path) as client:
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.writer.write(b"G")
            await asyncio.wait([answer], timeout=0.02)
        assert problem(answer.result())[:2] == (408, "timeout")


@pytest.mark.usefixtures("hasty")
async def test_an_answer_may_take_longer_than_a_request(tmp_path: Path) -> None:
    """The clock is of what comes in; the client asks for more meanwhile, and is answered in turn."""
    world = World()
    world.put()
    async with served(world, tmp_path) as (_, path), connected(path) as client:
        client.writer.write(request("GET", "/v1/events"))
        assert (await client.head()).status == 200
        client.writer.write(request("GET", "/v1/health"))
        await asyncio.sleep(limits.REQUEST_LIMIT * 3)
        await world.tell("a1")
        assert (await client.event())["seq"] == 1


async def test_requests_that_come_together_are_answered_in_order(tmp_path: Path) -> None:
    async with served(World(), tmp_path) as (_, path), connected(path) as client:
        both = request("POST", "/v1/allocations", PLAN) + request("GET", "/v1/allocations/a1") + request("GET", "/x")
        client.writer.write(both)
        assert [(await client.answer()).status for _ in range(3)] == [201, 200, 404]


async def test_an_old_client_is_answered_and_closed(tmp_path: Path) -> None:
    world = World(endless=False)
    world.put()
    await world.tell("a1")
    async with served(world, tmp_path) as (_, path):
        for target in ("/v1/health", "/v1/events"):
            async with connected(path) as client:
                client.writer.write(f"GET {target} HTTP/1.0\r\n\r\n".encode())
                assert (await client.head()).status == 200
                assert (await client.closed()).endswith(b"}\n" if target == "/v1/health" else b"}\n\n")


async def test_too_many_connections_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS", 2)
    async with served(World(), tmp_path) as (server, path), AsyncExitStack() as stack:
        for _ in range(2):
            line = await stack.enter_async_context(connected(path))
            assert (await line.ask("GET", "/v1/health")).status == 200
        async with connected(path) as third:
            assert problem(await third.answer())[:2] == (503, "unavailable")
            assert await third.closed() == b""
        assert (await line.ask("GET", "/v1/health")).status == 200
        assert server.connections == 2


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    world = World()
    world.put(run_dir=str(tmp_path))
    async with served(world, tmp_path) as (server, path):
        for target in ("/v1/events", "/v1/allocations/a1/events", "/v1/allocations/a1/logs?follow=true"):
            async with connected(path) as line:
                line.writer.write(request("GET", target))
                assert (await line.head()).status == 200
        async with connected(path) as line:
            line.writer.write(b"POST /v1/follows HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
            line.writer.write(b"Content-Length: 20\r\n\r\n{")
        async with connected(path) as line:
            while server.connections > 1 or b'allocd_streams{kind="all"} 0.0' not in world.metrics():
                assert (await line.ask("GET", "/v1/health")).status == 200
        assert world.waiting == 0


# --- readers that do not read ----------------------------------------------------------------------------------------


class Deaf:
    """Clients that ask for all events and never read."""

    def __init__(self, path: str, count: int) -> None:
        self.sockets = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        for each in self.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(path)
            each.sendall(request("GET", "/v1/events"))

    def close(self) -> None:
        for each in self.sockets:
            each.close()


@pytest.fixture
def deaf() -> Iterator[list[Deaf]]:
    there: list[Deaf] = []
    yield there
    for each in there:
        each.close()


def _resident() -> float:
    """MB of this process now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.slow
async def test_two_hundred_readers_that_do_not_read_cost_a_buffer_each(tmp_path: Path, deaf: list[Deaf]) -> None:
    """Forty megabytes of events for each of them: others are served, and memory does not follow."""
    world = World()
    world.put()
    for _ in range(2000):
        await world.tell("a1", text="x" * 1000)
    async with served(world, tmp_path) as (server, path):
        deaf.append(Deaf(path, 100))
        await _connected(server, 100)
        deaf.append(Deaf(path, 100))
        async with connected(path) as line:
            while b'allocd_streams{kind="all"} 200.0' not in world.metrics():
                assert (await line.ask("GET", "/v1/health")).status == 200
            line.writer.write(request("GET", "/v1/events"))
            await line.head()
            before = _resident()
            assert [(await line.event())["seq"] for _ in range(2000)] == list(range(1, 2001))
            grown = _resident() - before
            assert grown < 200 * 0.2, f"{grown:.0f} MB for 200 readers"
            assert (await ask(path, "GET", "/v1/allocations")).json["total"] == 1
        for each in deaf:
            each.close()


@pytest.mark.usefixtures("hasty")
async def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path, deaf: list[Deaf]) -> None:
    world = World()
    world.put()
    for _ in range(1000):
        await world.tell("a1", text="x" * 1000)
    async with served(world, tmp_path) as (server, path):
        deaf.append(Deaf(path, 3))
        async with connected(path) as line:
            line.writer.write(request("GET", "/v1/events"))
            await line.head()
            assert [(await line.event())["seq"] for _ in range(1000)][-1] == 1000
            while server.connections > 1:
                await world.tell("a1")
                await line.event()


async def test_streams_of_one_process_are_limited_and_questions_are_not(tmp_path: Path) -> None:
    world = World()
    async with served(world, tmp_path) as (server, path), AsyncExitStack() as stack:
        server._api.streams._of_one = 3
        for _ in range(3):
            line = await stack.enter_async_context(connected(path))
            line.writer.write(request("GET", "/v1/events"))
            assert (await line.head()).status == 200
        refused = await ask(path, "GET", "/v1/events")
        assert problem(refused)[:2] == (429, "busy")
        assert refused.headers["retry-after"] == "1"
        assert (await ask(path, "GET", "/v1/health")).status == 200


# --- its end ---------------------------------------------------------------------------------------------------------


async def test_a_stop_lets_answers_end_and_streams_say_what_they_have(tmp_path: Path) -> None:
    world = World()
    world.put()
    listener = listen(str(tmp_path / "a"))
    server, task, path = await _started(world, listener)
    async with connected(path) as idle, connected(path) as line:
        assert (await idle.ask("GET", "/v1/health")).status == 200
        line.writer.write(request("GET", "/v1/events"))
        await line.head()
        await world.tell("a1", "last")
        server.stop()
        assert (await line.event())["kind"] == "last"
        assert await line.chunk() == b""
        assert await idle.closed() == b""
        await asyncio.wait_for(task, 10)
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(path)


async def test_a_cancelled_server_leaves_nothing(tmp_path: Path) -> None:
    world = World()
    _, task, path = await _started(world, listen(str(tmp_path / "a")))
    async with connected(path) as line:
        line.writer.write(request("GET", "/v1/events"))
        await line.head()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await line.event()


async def test_a_reader_that_does_not_read_does_not_hold_the_end(
    tmp_path: Path, deaf: list[Deaf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STOP_LIMIT", 0.1)
    world = World()
    world.put()
    for _ in range(1000):
        await world.tell("a1", text="x" * 1000)
    server, task, path = await _started(world, listen(str(tmp_path / "a")))
    deaf.append(Deaf(path, 2))
    await _connected(server, 2)
    server.stop()
    await asyncio.wait_for(task, 10)


async def _connected(server: Server, count: int) -> None:
    """Until so many connections were accepted."""
    while server.connections < count:  # noqa: ASYNC110 - nobody tells when one is accepted
        await asyncio.sleep(0)


async def _started(world: World, listener: Listener) -> tuple[Server, asyncio.Task[None], str]:
    faults: list[Any] = []
    server = Server(Api(world, world.meter, faults.append), listener)
    task = asyncio.create_task(server.serve())
    await server.wait_until_it_listens()
    assert listener.path is not None
    return server, task, listener.path
