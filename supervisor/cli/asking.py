"""Asking who answers on the socket, by http.client over a Unix socket: a request and its answer (`ask`), or one whose
answer goes on and is read by lines (`lines`)."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Generator, Mapping
from typing import Any, Final

from supervisor.service.sockets import NAME, Peer, peer_of, runtime_directory

LIMIT: Final = 30.0  # seconds for an answer
CONNECT_LIMIT: Final = 5.0  # seconds to connect: one whose queue is full is there


class NobodyAnswers(Exception):
    """Nothing is there, or it does not answer; the message says what was tried."""


class NobodyThere(NobodyAnswers):
    """There is nobody to connect to: nothing was asked."""


class Refused(Exception):
    """It answered that it will not. `status`: of HTTP; `problem`: its problem document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(str(problem.get("detail") or problem.get("title") or f"HTTP status {status}"))
        self.status, self.problem = status, problem


def socket_path(environ: Mapping[str, str]) -> str:
    """Where the daemon's socket is, if it is anywhere."""
    return os.path.join(runtime_directory(environ), NAME)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, limit: float | None) -> None:
        super().__init__("localhost", timeout=limit)
        self._path = path

    def connect(self) -> None:
        self.sock = _connected(self._path, self.timeout)


def _connected(path: str, limit: float | None) -> socket.socket:
    """Raises OSError."""
    way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        way.settimeout(limit)
        way.connect(path)
        if not peer_of(way).allowed:
            raise PermissionError(f"{path} is answered by uid {peer_of(way).uid}")
    except BaseException:
        way.close()
        raise
    return way


def listener(path: str) -> Peer | None:
    """Who made the socket listen; None when nobody does. (Behind a socket unit that is systemd, whoever answers.) It is
    not asked anything, but systemd starts what is to answer."""
    try:
        with _connected(path, CONNECT_LIMIT) as way:
            return peer_of(way)
    except OSError:
        return None


def ask(
    path: str,
    method: str,
    target: str,
    body: Any = None,
    limit: float = LIMIT,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """The document that answers. Raises NobodyAnswers, Refused."""
    connection = _Connection(path, limit)
    try:
        answer = _asked(connection, method, target, body, headers)
        data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise _nobody(path, error) from None
    finally:
        connection.close()
    document = _document(path, data)
    if answer.status >= 400:
        raise Refused(answer.status, document if isinstance(document, dict) else {})
    return document


def lines(path: str, target: str, limit: float | None, headers: Mapping[str, str] | None = None) -> Generator[bytes]:
    """The lines of an answer that goes on, without their ends, until it ends; `limit`: seconds for each (None: a
    stream without signs of life is believed to live as long as its connection). Raises
    NobodyAnswers (also when it breaks off), Refused."""
    connection = _Connection(path, limit)
    try:
        answer = _asked(connection, "GET", target, None, headers)
        if answer.status >= 400:
            raise Refused(answer.status, _document(path, answer.read()))
        while line := answer.readline():
            yield line.rstrip(b"\n")
    except (OSError, http.client.HTTPException) as error:
        raise _nobody(path, error) from None
    finally:
        connection.close()


def _asked(
    connection: _Connection, method: str, target: str, body: Any, headers: Mapping[str, str] | None
) -> http.client.HTTPResponse:
    """The answer's head. Raises OSError, HTTPException."""
    media = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, target, None if body is None else json.dumps(body), {**media, **(headers or {})})
    return connection.getresponse()


def _document(path: str, data: bytes) -> Any:
    """Raises NobodyAnswers."""
    try:
        return json.loads(data) if data else {}
    except ValueError:
        raise NobodyAnswers(f"what answers on {path} is not allocd: {data[:100]!r}") from None


def _nobody(path: str, error: Exception) -> NobodyAnswers:
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    nobody = isinstance(error, FileNotFoundError | ConnectionRefusedError)  # only connecting ends so
    return (NobodyThere if nobody else NobodyAnswers)(f"nobody answers on {path}: {why}")
