"""What systemd is told: each message as it comes out of the socket, and nothing at all where nobody listens."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.service.notify import Notifier


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address)
        end.settimeout(5)
        yield end


def heard(end: socket.socket) -> list[str]:
    return end.recv(4096).decode().splitlines()


@pytest.fixture
def end(tmp_path: Path) -> Iterator[socket.socket]:
    with listening(str(tmp_path / "notify")) as end:
        yield end


def silent(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return not end.recv(4096)
    except BlockingIOError:
        return True


def test_its_life_is_told_in_the_words_of_systemd(end: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": end.getsockname()}
    notifier = Notifier(environ)
    assert environ == {}  # no child speaks in our name

    notifier.ready("3 allocations")
    assert heard(end) == ["READY=1", "STATUS=3 allocations"]
    notifier.status("4\nallocations " + "x" * 1000)
    (status,) = heard(end)
    assert status.startswith("STATUS=4 allocations x") and len(status) < 500
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    reloading, stamp = heard(end)
    assert reloading == "RELOADING=1"
    assert before <= int(stamp.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    notifier.ready("5 allocations")
    assert heard(end) == ["READY=1", "STATUS=5 allocations"]
    notifier.stopping("engines go on")
    assert heard(end) == ["STOPPING=1", "STATUS=engines go on"]


def test_a_sentence_is_told_once(end: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": end.getsockname()})
    notifier.status("one")
    notifier.status("one")
    notifier.status("two")
    assert [heard(end), heard(end)] == [["STATUS=one"], ["STATUS=two"]]
    assert silent(end)


def test_a_socket_may_be_abstract() -> None:
    with listening(f"\0allocd-test-{os.getpid()}") as end:
        Notifier({"NOTIFY_SOCKET": f"@allocd-test-{os.getpid()}"}).ready("here")
        assert heard(end)[0] == "READY=1"


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234", "/nowhere/at/all", "/dev/null", "/" + "x" * 200])
def test_where_nobody_listens_nothing_happens(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready("here")
    notifier.stopping("gone")


def test_one_who_does_not_listen_holds_up_nobody(end: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": end.getsockname()})
    for number in range(2000):  # more than any queue holds
        notifier.status(str(number))


@pytest.mark.parametrize(
    ("given", "watchdog"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),  # another process is meant
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_whether_it_wants_to_hear_that_we_are_well(given: dict[str, str], watchdog: float | None) -> None:
    environ = {"NOTIFY_SOCKET": "/run/somewhere", **given}
    assert Notifier(environ).watchdog == watchdog
    assert environ == {}


async def test_it_hears_that_we_are_well_as_long_as_we_are(end: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": end.getsockname(), "WATCHDOG_USEC": "20000"})
    asked: list[bool] = []
    answers = iter([True, True, False, False])
    enough = asyncio.Event()

    def well() -> bool:
        asked.append(next(answers, False))
        if len(asked) >= 6:
            enough.set()
        return asked[-1]

    async with asyncio.timeout(5):
        task = asyncio.create_task(notifier.keep_telling(well))
        await enough.wait()
        task.cancel()
        await asyncio.wait([task])
    assert [heard(end), heard(end)] == [["WATCHDOG=1"], ["WATCHDOG=1"]]
    assert silent(end)


async def test_where_nobody_wants_to_hear_it_the_task_ends() -> None:
    async with asyncio.timeout(5):
        await Notifier({}).keep_telling(lambda: True)
