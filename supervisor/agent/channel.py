"""The agent's side of the channel: lines cut from a stream, messages that fit a line, the specification read. What is
said there is told in agent.py."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import sys

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of ours
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

LINE_LIMIT = 1000  # with the newline: Slurm keeps such lines whole even when several tasks share a stream
GRACE_LIMIT = 3600.0
DEPTH_LIMIT = 1000  # levels of directories
FETCH_LIMIT = 86400.0
LEASE, LEASE_LIMIT = 600.0, 86400.0  # an engine that is stopped for minutes, in a debugger say, harms nothing
OUTBOX_LIMIT = 64 << 10  # bytes: when the channel is stuck that far, this is dropped:
MAY_BE_DROPPED = ("pong", "hint", "note")


class Lines:
    """Cuts a byte stream into lines. An overlong one comes out cut to LINE_LIMIT + 1 bytes, whatever its
    length."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *whole, last = data.split(b"\n")
        for part in whole:
            line, self.rest = self.rest + part, b""
            yield line[: LINE_LIMIT + 1]
        self.rest = (self.rest + last)[: LINE_LIMIT + 1]


class Channel:
    """Standard input and output, which are never waited for. `take` gets each command. `ended` is called when nobody
    speaks or nobody listens any more; it comes from the middle of something, and maybe again. `selector` is run by the
    owner, who calls what is registered there."""

    def __init__(
        self,
        nonce: str,
        selector: selectors.BaseSelector,
        take: Callable[[dict[str, Any]], None],
        ended: Callable[[], None],
    ) -> None:
        self.nonce, self.selector = nonce, selector
        self.take, self.ended = take, ended
        self.lines = Lines()
        self.outbox = bytearray()
        self.writable = select.poll()
        self.writable.register(1, select.POLLOUT)

    def listen(self) -> None:
        """Take commands from now on."""
        self.selector.register(0, selectors.EVENT_READ, self.read)

    def emit(self, event: str, **fields: Any) -> None:
        if event not in MAY_BE_DROPPED or len(self.outbox) < OUTBOX_LIMIT:
            self.outbox += encode({"n": self.nonce, "e": event, **fields})
            self.write()

    def note(self, sentence: str) -> None:
        self.emit("note", text=sentence)

    def write(self) -> None:
        """Hand over what the channel takes now. The description is not made non-blocking, for others hold it
        too; but a pipe that polls writable takes PIPE_BUF bytes without blocking."""
        try:
            while self.outbox and self.writable.poll(0):
                del self.outbox[: os.write(1, self.outbox[: select.PIPE_BUF])]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()
            self.ended()
        waiting = 1 in self.selector.get_map()
        if self.outbox and not waiting:
            self.selector.register(1, selectors.EVENT_WRITE, self.write)
        elif waiting and not self.outbox:
            self.selector.unregister(1)

    def read(self) -> None:
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for line in self.lines.feed(data):
            self.hear(line)
        if not data:  # a last line without its newline is no command
            self.selector.unregister(0)
            self.ended()

    def hear(self, line: bytes) -> None:
        if len(line) > LINE_LIMIT:
            if self.nonce.encode() in line:
                self.note(f"a line of more than {LINE_LIMIT} bytes was dropped")
            return
        try:
            command = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(command, dict) and command.get("n") == self.nonce:
            self.take(command)


def encode(message: dict[str, Any]) -> bytes:
    """One line of at most LINE_LIMIT bytes; the longest text in it is shortened until it fits."""
    while True:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        excess = len(line) - LINE_LIMIT
        if excess <= 0:
            return line
        key = max(message.keys() - {"n", "e"}, key=lambda key: len(str(message[key])))
        value = str(message[key])
        message[key] = value[: min(LINE_LIMIT, len(value) - max(1, excess // 6))]  # an escape takes up to 6 bytes


def typed(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {kind.__name__}, found {value!r:.60}")
    return value


def text(value: Any, name: str) -> bytes:
    """A string as the kernel takes it. Bytes that are no UTF-8 come as surrogates."""
    if "\0" in typed(value, name, str):
        raise ValueError(f"{name}: holds a NUL")
    return bytes(value.encode("utf-8", "surrogateescape"))


def between(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, found {value!r:.60}")
    return value


def watched(value: Any) -> tuple[str, str, int]:
    """A directory to watch: one above it that is expected to be there, itself, and how many levels below it."""
    root, directory, depth = (*typed(value, "watch", list), None, None, None)[:3]
    paths = [os.fsdecode(text(path, "watch")) for path in (root, directory)]
    if not all(map(os.path.isabs, paths)):
        raise ValueError(f"watch: expected absolute paths, found {value!r:.60}")
    return paths[0], paths[1], int(between(depth, "watch", 0, DEPTH_LIMIT))


class Spec:
    """What to start and how to stop it. Raises ValueError, with a sentence, on a document that does not say
    so."""

    def __init__(self, document: Any) -> None:
        typed(document, "spec", dict)
        self.argv = [text(each, "argv") for each in typed(document.get("argv"), "argv", list)]
        self.tag = text(document.get("tag"), "tag")
        if not self.argv or not self.tag:
            raise ValueError("argv and tag: neither may be empty")
        self.logs = [(name, text(document.get(name), name)) for name in ("out", "err")]
        cwd = document.get("cwd")
        self.cwd = None if cwd is None else text(cwd, "cwd")
        self.stop_signal = int(between(document.get("stop_signal", signal.SIGTERM), "stop_signal", 1, 64))
        self.grace = between(document.get("grace", 30.0), "grace", 0, GRACE_LIMIT)
        self.lease = between(document.get("lease", LEASE), "lease", 0, LEASE_LIMIT)
        fetch = document.get("fetch")
        self.fetch: dict[str, Any] | None = None if fetch is None else typed(fetch, "fetch", dict)
        if self.fetch is not None:
            between(self.fetch.get("seconds"), "fetch.seconds", 0, FETCH_LIMIT)
        self.watch = [watched(each) for each in typed(document.get("watch", []), "watch", list)]
        self.env = dict(os.environb)
        for name in typed(document.get("unset", []), "unset", list):
            self.env.pop(text(name, "unset"), None)
        for name, value in typed(document.get("env", {}), "env", dict).items():
            self.env[text(name, "env")] = text(value, "env." + name)
        self.env[b"ALLOCD_TAG"] = self.tag


def introduction() -> dict[str, Any]:
    """Who says hello: the node by Slurm's name, and the step as accounting names it, JOB.STEP with the raw id.

    ALLOCD_STEP_JOB is that id where SLURM_JOB_ID is another: on a component of a heterogeneous job it is the leader's.
    """
    env, host = os.environ, os.uname().nodename
    attempt = env.get("SLURM_RESTART_COUNT", "")
    job, number = env.get("ALLOCD_STEP_JOB") or env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
    step = f"{job}.{number}" if job and number else None
    return {
        "host": host,
        "pid": os.getpid(),
        "node": env.get("SLURMD_NODENAME", host),
        "step": step,
        "attempt": int(attempt) if attempt.isdecimal() else 0,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
