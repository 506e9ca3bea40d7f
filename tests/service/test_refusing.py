"""A daemon that cannot start, and those who wait for its answer."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli.asking import Refused, ask
from supervisor.cli.daemon import Daemon
from supervisor.service import refusing
from supervisor.service.notify import Notifier
from supervisor.service.refusing import refuse, turn_away

TEXT = "allocd cannot start: no \udcff room"
ALLOCATION = b'{"key": "a1"}'
EVENTS = b'data: {"key": "a1", "seq": 1}\n\n'


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-") as directory:
        yield Path(directory) / "ctl.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[socket.socket]:
    """As systemd hands it over, with a connection that says nothing, and one that is gone."""
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as silent:
        listening.bind(str(path))
        listening.listen(8)
        silent.connect(str(path))
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
        yield listening


def answer(listening: socket.socket, body: bytes) -> None:
    """Have an answer for the next who connects."""
    listening.settimeout(10)
    connection, _ = listening.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def test_each_who_waits_has_an_answer(listening: socket.socket, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusing, "REQUEST_LIMIT", 0.1)  # for the silent one
    refused: list[Refused] = []

    def wait(body: object) -> None:
        with pytest.raises(Refused) as caught:
            ask(str(path), "POST", "/v1/allocations", body, limit=10)
        refused.append(caught.value)

    waiting = [threading.Thread(target=wait, args=(body,)) for body in (None, {"plan": "x" * 1_000_000})]
    for thread in waiting:
        thread.start()
    while any(thread.is_alive() for thread in waiting):
        turn_away(listening, TEXT)
    assert [(error.status, str(error)) for error in refused] == [(503, TEXT)] * 2
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.mark.parametrize("body", [ALLOCATION, EVENTS])
def test_one_who_has_answered_before_is_away_as_long_as_it_cannot_start(
    listening: socket.socket, path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(refusing, "REQUEST_LIMIT", 0.1)
    monkeypatch.setattr("supervisor.cli.daemon.PAUSE", 0.01)
    can_start = threading.Event()

    def start() -> None:
        while not can_start.wait(0.02):
            turn_away(listening, TEXT)
        answer(listening, body)

    starting = threading.Thread(target=start)
    starting.start()
    daemon = Daemon(str(path))
    with pytest.raises(Refused):
        daemon.find("a1")
    threading.Timer(0.2, can_start.set).start()
    found = daemon.seek("a1") if body == ALLOCATION else next(daemon.events("a1"))
    assert found and found["key"] == "a1"
    starting.join(10)


def test_why_it_does_not_start_is_told_without_systemd_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse("this\nand that", 78, Notifier({}), {}) == 78
    assert capsys.readouterr().err == "allocd: this\nallocd: and that\n"
