"""Ten thousand requests to a real daemon, while two hundred readers do not read and allocations come and go."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.fake_slurm import FakeSlurm
from tests.service.host import Connection
from tests.service.running import ALLOCCTL, Running, plan, until
from tests.service.test_faults import FAILS, LIVES, failed_by_7, resident, whole

READERS = 200
CLIENTS = 10
EACH = 1000  # requests of a client, one after another on its connection
OTHERS = 20


def open_files(daemon: Running) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@pytest.mark.slow
def test_ten_thousand_requests_beside_two_hundred_readers_that_do_not_read(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", history=LIVES)
    with Running(tmp_path, slurm) as daemon, ExitStack() as stack:
        key = daemon.submit(Idempotency_Key="the-one")["key"]
        until(lambda: daemon.show(key)["slurm"], "Slurm shows it")
        for _ in range(READERS):
            reader = stack.enter_context(socket.socket(socket.AF_UNIX))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(daemon.path)
            reader.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        requests = questions(daemon, key)
        assert ask(daemon, requests, 100) == Counter({True: 100})
        files, memory = open_files(daemon), resident(daemon.process.pid)

        slurm.become(FAILS)
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(ask, daemon, requests, EACH) for _ in range(CLIENTS)]
            others = [daemon.submit()["key"] for _ in range(OTHERS)]
            answered = sum((each.result() for each in asked), Counter[bool]())
        assert answered == Counter({True: CLIENTS * EACH})
        assert all(failed_by_7(daemon.until(other, "ended")) for other in others)

        assert daemon.show(key)["state"] != "ended"
        assert daemon.ask("GET", "/v1/allocations")["total"] == 1 + OTHERS  # the one was submitted once
        assert len(slurm.state()["jobs"]) == 1 + OTHERS
        assert whole(daemon.events())
        assert daemon.health()["wrong"] == []
        until(lambda: open_files(daemon) <= files, "the connections are closed")
        assert resident(daemon.process.pid) - memory < 20  # MB


Question = tuple[str, str, Any, dict[str, str], int]
"""Method, target, body, headers, and the status that is right."""


def questions(daemon: Running, key: str) -> list[Question]:
    """What people and programs ask, well and badly."""
    again = {"plan": plan(), "cwd": str(daemon.top), "directory": str(daemon.base), "allocctl": ALLOCCTL}
    return [
        ("GET", "/v1/allocations", None, {}, 200),
        ("GET", f"/v1/allocations/{key}", None, {}, 200),
        ("GET", "/v1/health", None, {}, 200),
        ("GET", "/v1/allocations?state=running&name=bench", None, {}, 200),
        ("POST", "/v1/allocations", again, {"Idempotency-Key": "the-one"}, 201),
        ("GET", "/v1/allocations/nobody", None, {}, 404),
        ("GET", f"/v1/allocations/{key}/receipt", None, {}, 404),
        ("DELETE", f"/v1/allocations/{key}", None, {}, 405),
        ("POST", "/v1/allocations", {"plan": 7}, {}, 422),
        ("GET", "/metrics", None, {}, 200),
    ]


def ask(daemon: Running, requests: list[Question], count: int) -> Counter[bool]:
    """Whether each answer was the right one, so many times."""
    right: Counter[bool] = Counter()
    with closing(Connection(daemon.path)) as connection:
        for method, target, body, headers, status in itertools.islice(itertools.cycle(requests), count):
            media = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, target, None if body is None else json.dumps(body), {**media, **headers})
            answer: http.client.HTTPResponse = connection.getresponse()
            answer.read()
            right[answer.status == status] += 1
            assert answer.status == status, f"{method} {target}: {answer.status}"
    return right
