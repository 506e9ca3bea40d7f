"""The socket: what a question costs, while there are a thousand allocations of sixteen ranks.

The server is a process of its own over the tests' world in memory, so that what is measured is the socket, the API and
the documents, and no Slurm.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.stage import BenchError, Stage
from tests.bench.table import Row

ALLOCATIONS = 1000
RANKS = 16
REQUESTS = 500  # of one measurement of a rate
IDLE = 5.0  # seconds
_TICKS = 100  # of the kernel a second, in /proc


class Connection(http.client.HTTPConnection):
    """Over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def asked(stage: Stage) -> list[Row]:
    """All allocations in one answer, one of them, how many questions a second on one connection, and doing nothing."""
    with _server(stage) as (process, path), contextlib.closing(Connection(path)) as connection:

        def ask(target: str) -> bytes:
            connection.request("GET", target)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise BenchError(f"{target}: {answer.status} {body[:200]!r}")
            return body

        def milliseconds(target: str) -> float:
            begin = time.monotonic()
            ask(target)
            return (time.monotonic() - begin) * 1e3

        def rate(target: str) -> float:
            begin = time.monotonic()
            for _ in range(REQUESTS):
                ask(target)
            return REQUESTS / (time.monotonic() - begin)

        whole, one = f"/v1/allocations?limit={ALLOCATIONS}", "/v1/allocations/a500"
        if len(json.loads(ask(whole))["allocations"]) != ALLOCATIONS:
            raise BenchError("not all allocations were listed")

        def rounds(measure: Callable[[str], float], target: str) -> list[float]:
            return [measure(target) for _ in range(stage.runs)]

        many = f"of {ALLOCATIONS} allocations"
        return [
            Row(f"socket: a list {many}", "ms", rounds(milliseconds, whole)),
            Row(f"socket: a page of 100 {many}", "ms", rounds(milliseconds, "/v1/allocations")),
            Row(f"socket: one {many}", "ms", rounds(milliseconds, one)),
            Row("socket: from a question that changes something to its event", "ms", _latencies(stage.runs, path)),
            Row("socket: questions on one connection", "per s", rounds(rate, one)),
            Row(f"socket: an idle server, {ALLOCATIONS} allocations, processor", "ms per s", [_idle(process.pid)]),
            Row(
                f"socket: a server, {ALLOCATIONS} allocations of {RANKS} ranks, resident",
                "MB",
                [_resident(process.pid)],
            ),
        ]


def _latencies(count: int, path: str) -> list[float]:
    """Milliseconds from asking for a stop to the event of it, read by somebody else."""
    with contextlib.closing(Connection(path)) as reader, contextlib.closing(Connection(path)) as connection:
        reader.request("GET", "/v1/events")
        events = reader.getresponse()

        def latency() -> float:
            begin = time.monotonic()
            connection.request(
                "POST", "/v1/allocations/a1/stop", '{"how": "stop"}', {"Content-Type": "application/json"}
            )
            while not events.readline().startswith(b"data: "):
                pass
            taken = (time.monotonic() - begin) * 1e3
            connection.getresponse().read()
            return taken

        return [latency() for _ in range(count)]


def _idle(pid: int) -> float:
    """Milliseconds of processor time that a process takes a second."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(IDLE)
    return (ticks() - before) / _TICKS / IDLE * 1e3


def _resident(pid: int) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024


@contextlib.contextmanager
def _server(stage: Stage) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    directory = stage.place()
    argv = [sys.executable, "-m", "tests.bench.asking", str(directory)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(stage.env)) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.stdin.close()


async def _serve(directory: Path) -> None:
    """Serve until stdin ends."""
    from tests.service.world import World, served

    world = World()
    for number in range(ALLOCATIONS):
        ranks = [{"rank": rank, "role": "worker", "node": f"node{rank}", "phase": "running"} for rank in range(RANKS)]
        world.put(run_id=f"{number}.r1", run_dir=f"/shared/runs/{number}.r1", slurm="RUNNING", ranks=ranks)
    async with served(world, directory) as (_, path):
        print(path, flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, ended.set)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
