"""A daemon that cannot start says why: on stderr, to systemd, and to those who wait on the socket that systemd opened.

Without an answer they would wait on, and systemd, for which a connection that nobody takes is a reason to start what is
to take it, would start the daemon again at once, and again, until it gives the socket up as well. So each of them has
its answer, a problem document, and the next who connects has the daemon tried once more: what has been put right by
then needs nobody to tell systemd.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

from supervisor.service import problems, sockets
from supervisor.service.notify import Notifier

LIMIT: Final = 5.0  # seconds for all of them
REQUEST_LIMIT: Final = 1.0  # seconds for a request that is answered without being read
REQUEST: Final = 1 << 21  # bytes of it: more than the API takes


def refuse(text: str, code: int, notifier: Notifier, environ: MutableMapping[str, str]) -> int:
    """Tell everybody. Returns the exit code."""
    try:
        for line in text.splitlines():
            sys.stderr.write(f"allocd: {line}\n")
        sys.stderr.flush()
    except OSError:  # a full disk: the interpreter would try again at its end, and exit with 120
        sys.stderr = None
    notifier.status(text)
    with suppress(sockets.Unusable):
        if given := sockets.handed_over(environ):
            turn_away(given.socket, f"allocd cannot start: {'; '.join(text.splitlines())}")
    return code


def turn_away(listening: socket.socket, text: str) -> None:
    """Answer each connection that waits there. Blocks, for a few seconds at most."""
    body = problems.encoded(problems.document("unavailable", text, "/"))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        f"Content-Type: {problems.MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    end = time.monotonic() + LIMIT
    listening.setblocking(False)
    while time.monotonic() < end:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, suppress(OSError):
            _answer(connection, head.encode() + body)


def _answer(connection: socket.socket, answer: bytes) -> None:
    """Raises OSError. What would be left unread makes the other side's write fail before it has read the answer."""
    connection.settimeout(REQUEST_LIMIT)
    if not sockets.peer_of(connection).allowed or not connection.recv(1):
        return
    connection.sendall(answer)
    connection.shutdown(socket.SHUT_WR)
    end, left = time.monotonic() + REQUEST_LIMIT, REQUEST
    while left > 0 and time.monotonic() < end and (data := connection.recv(1 << 16)):
        left -= len(data)
