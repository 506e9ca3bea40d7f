"""Events and logs as streams."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from supervisor.service import logs as looks
from supervisor.service import stream
from supervisor.service.logs import TAIL
from tests.service.client import ask, connected, request
from tests.service.test_api import problem
from tests.service.world import World, served
from tests.unit.test_follow import make_run


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "SHORTEST", 0.01)
    monkeypatch.setattr(looks, "LONGEST", 0.02)


# --- events ----------------------------------------------------------------------------------------------------------


async def test_events_come_as_they_happen_and_go_on_where_a_client_was(tmp_path: Path) -> None:
    world = World()
    for _ in range(2):
        world.put()
    await world.tell("a1", "one")
    await world.tell("a2", "two")
    async with served(world, tmp_path) as (_, path):
        async with connected(path) as line:
            line.writer.write(request("GET", "/v1/events"))
            head = await line.head()
            assert (head.headers["content-type"], head.headers["cache-control"]) == ("text/event-stream", "no-store")
            assert [(await line.event())["kind"] for _ in range(2)] == ["one", "two"]
            await world.tell("a1", "three", number=3)
            event = await line.event()
            assert event == {
                "schema_version": 1,
                "seq": 3,
                "utc": event["utc"],
                "key": "a1",
                "kind": "three",
                "data": {"number": 3},
            }
        await world.tell("a2", "four")
        async with connected(path) as line:
            line.writer.write(request("GET", "/v1/events?after=0", headers={"Last-Event-ID": "2"}))
            await line.head()
            assert [(await line.event())["kind"] for _ in range(2)] == ["three", "four"]
        async with connected(path) as line:
            line.writer.write(request("GET", "/v1/allocations/1002/events?after=1"))
            await line.head()
            assert [(await line.event())["seq"] for _ in range(2)] == [2, 4]


async def test_events_that_are_not_kept_are_told_before_the_stream_begins(tmp_path: Path) -> None:
    world = World(kept=3, endless=False)
    world.put()
    for _ in range(5):
        await world.tell("a1")
    async with served(world, tmp_path) as (_, path):
        assert problem(await ask(path, "GET", "/v1/events?after=1"))[:2] == (410, "gone")
        for target, expected in (("/v1/events?after=2", [3, 4, 5]), ("/v1/events", [3, 4, 5])):
            body = (await ask(path, "GET", target)).body.decode()
            assert [int(line[4:]) for line in body.splitlines() if line.startswith("id: ")] == expected
        assert problem(await ask(path, "GET", "/v1/allocations/nobody/events"))[:2] == (404, "not_found")


async def test_a_rank_that_the_run_does_not_have(tmp_path: Path) -> None:
    """Known by the journal, where nothing else tells; before there is a run nobody is refused."""
    world = World()
    world.put(state="ended", run_dir=str(make_run(tmp_path, "1001")))
    world.put(state="ended", ranks=({"rank": 0},))
    world.put(state="ended")
    async with served(world, tmp_path) as (_, path):
        for name, rank, status in (("a1", 1, 200), ("a1", 2, 404), ("a2", 0, 200), ("a2", 9, 404), ("a3", 9, 200)):
            answer = await ask(path, "GET", f"/v1/allocations/{name}/logs?rank=0&rank={rank}")
            assert answer.status == status, (name, rank)


async def test_events_that_never_were_are_not_waited_for(tmp_path: Path) -> None:
    """Who has seen 41 of a state that was removed would miss 40 of the new one."""
    world = World(endless=False)
    world.put()
    await world.tell("a1")
    async with served(world, tmp_path) as (_, path):
        assert problem(await ask(path, "GET", "/v1/events?after=2"))[:2] == (410, "gone")
        assert problem(await ask(path, "GET", "/v1/events", Last_Event_ID="41"))[:2] == (410, "gone")
        assert (await ask(path, "GET", "/v1/events?after=1")).body == b"retry: 1000\n\n"


async def test_a_silent_stream_has_a_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT", 0.02)
    world = World()
    world.put()
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        line.writer.write(request("GET", "/v1/events"))
        await line.head()
        assert await line.chunk() == b"retry: 1000\n\n"
        assert [await line.chunk() for _ in range(2)] == [b": still here\n\n"] * 2
        await world.tell("a1")
        assert (await line.event())["seq"] == 1


async def test_data_of_an_event_stays_in_its_line(tmp_path: Path) -> None:
    world = World()
    world.put()
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        line.writer.write(request("GET", "/v1/events"))
        await line.head()
        await world.tell("a1", text="\n\nid: 9\r\u2028\udc80")
        assert (await line.event())["data"]["text"] == "\n\nid: 9\r\u2028\udc80"


# --- logs ------------------------------------------------------------------------------------------------------------


def run_dir(tmp_path: Path, **files: bytes) -> Path:
    """A run directory with logs: `r0_out=b"..."` is rank 0's output."""
    directory = tmp_path / "1001"
    (directory / "logs").mkdir(parents=True)
    for name, data in files.items():
        rank, kind = name.split("_")
        (directory / "logs" / f"rank-{rank[1:]}.client.{kind}").write_bytes(data)
    return directory


async def test_one_log_is_bytes_and_several_have_names(tmp_path: Path) -> None:
    directory = run_dir(tmp_path, r0_out=b"a\n\xff\nlast", r0_err=b"e\n", r1_out=b"b\n")
    world = World()
    world.put(run_dir=str(directory))
    async with served(world, tmp_path) as (_, path):
        one = await ask(path, "GET", "/v1/allocations/a1/logs?rank=0&kind=out")
        assert (one.headers["content-type"], one.body) == ("text/plain; charset=utf-8", b"a\n\xff\nlast\n")
        two = await ask(path, "GET", "/v1/allocations/a1/logs?rank=0&rank=1&kind=out")
        assert sorted(two.body.splitlines()) == [
            b"rank-0.client.out: a",
            b"rank-0.client.out: last",
            b"rank-0.client.out: \xff",
            b"rank-1.client.out: b",
        ]
        lines = await ask(path, "GET", "/v1/allocations/a1/logs?rank=1&format=jsonl")
        assert list(map(json.loads, lines.body.splitlines())) == [
            {"schema_version": 1, "run": "1001", "file": "rank-1.client.out", "text": "b"}
        ]
        assert (await ask(path, "GET", "/v1/allocations/a1/logs?rank=7")).body == b""


async def test_a_tail_is_the_last_lines_of_each(tmp_path: Path) -> None:
    many = b"".join(b"line %07d\n" % number for number in range(TAIL // 10))
    directory = run_dir(tmp_path, r0_out=many, r1_out=b"x" * (TAIL + 9) + b"\nshort\n", r2_out=b"a\nb\nc")
    world = World()
    world.put(run_dir=str(directory))
    async with served(world, tmp_path) as (_, path):

        async def tail(rank: int, count: int) -> list[bytes]:
            target = f"/v1/allocations/a1/logs?rank={rank}&kind=out&tail={count}"
            return (await ask(path, "GET", target)).body.splitlines()

        assert await tail(0, 2) == many.splitlines()[-2:]
        assert await tail(0, 0) == []
        reached = await tail(0, 100_000)
        assert reached == many.splitlines()[-len(reached) :]
        assert TAIL - 20 < sum(len(line) + 1 for line in reached) <= TAIL
        assert await tail(1, 5) == [b"short"]
        assert await tail(2, 2) == [b"b", b"c"]


async def test_a_log_is_followed_through_rotation_and_requeue_to_the_end(tmp_path: Path) -> None:
    directory = run_dir(tmp_path, r0_out=b"first\nbefore\n")
    log = directory / "logs" / "rank-0.client.out"
    world = World()
    world.put(run_dir=None, state="pending")
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        line.writer.write(request("GET", "/v1/allocations/a1/logs?rank=0&kind=out&follow=true&tail=1"))
        await line.head()
        world.change("a1", run_dir=str(directory), state="running")
        assert await line.chunk() == b"before\n"
        with log.open("ab") as file:
            file.write(b"one\n")
        assert await line.chunk() == b"one\n"
        log.rename(log.with_name("rank-0.client.out.1"))
        log.write_bytes(b"two\n")
        assert await line.chunk() == b"two\n"
        with log.open("ab") as file:
            file.write(b"torn")
        again = tmp_path / "1001.r1"
        (again / "logs").mkdir(parents=True)
        (again / "logs" / "rank-0.client.out").write_bytes(b"three\n")
        world.change("a1", run_dir=str(again))
        assert await line.chunk() == b"torn\n"
        assert await line.chunk() == b"three\n"
        (again / "logs" / "rank-0.client.out").write_bytes(b"three\nfour")
        world.change("a1", state="ended")
        assert await line.chunk() == b"four\n"
        assert await line.chunk() == b""


async def test_many_lines_are_all_told(tmp_path: Path) -> None:
    """More than a look reads."""
    data = b"".join(b"%07d %s\n" % (number, b"x" * 90) for number in range(60_000))
    world = World()
    world.put(run_dir=str(run_dir(tmp_path, r0_out=data)))
    async with served(world, tmp_path) as (_, path):
        answer = await ask(path, "GET", "/v1/allocations/a1/logs?rank=0&kind=out")
        assert answer.body == data


async def test_a_look_at_logs_of_a_run_without_any(tmp_path: Path) -> None:
    world = World()
    world.put(run_dir=str(tmp_path / "absent"))
    world.put(run_dir=None)
    async with served(world, tmp_path) as (_, path):
        assert (await ask(path, "GET", "/v1/allocations/a1/logs")).body == b""
        assert (await ask(path, "GET", "/v1/allocations/a2/logs")).body == b""


async def test_logs_that_cannot_be_read_break_off(tmp_path: Path) -> None:
    world = World()
    directory = tmp_path / "1001"
    directory.mkdir()
    (directory / "logs").write_bytes(b"no directory")
    world.put(run_dir=str(directory))
    async with served(world, tmp_path) as (_, path), connected(path) as line:
        line.writer.write(request("GET", "/v1/allocations/a1/logs"))
        await line.head()
        assert await asyncio.wait_for(line.reader.read(), 10) == b""
