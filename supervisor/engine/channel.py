"""The engine's side of the control channel: commands to an agent, reports from it.

One JSON object a line, at most 1,000 bytes (lines up to that size stay whole whatever else a step prints), each with
the run's nonce under `n`. Everything else that comes is foreign output: a prolog's greeting, an entrypoint's banner.
It is kept and is never an error. The agent's side is in `supervisor/agent/agent.py`, which tells the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from supervisor.core import events as ev
from supervisor.core.text import printable

LINE_LIMIT: Final = 1000
_PIECE: Final = 700  # characters of a specification in one line: escapes and the envelope come on top

Report = dict[str, Any]


def command(nonce: str, name: str, **fields: Any) -> bytes:
    """One command line."""
    return json.dumps({"n": nonce, "c": name, **fields}, separators=(",", ":")).encode() + b"\n"


def specification(nonce: str, document: dict[str, Any]) -> bytes:
    """The command lines that carry a rank's specification, in pieces that fit."""
    text = json.dumps(document, separators=(",", ":"))
    pieces = _pieces(text)
    return b"".join(
        command(nonce, "spec", part=piece, more=index + 1 < len(pieces)) for index, piece in enumerate(pieces)
    )


def _pieces(text: str) -> list[str]:
    """Cut so that each piece, quoted once more, stays under the limit."""
    pieces, start = [], 0
    while start < len(text):
        size = _PIECE
        while len(json.dumps(text[start : start + size])) > LINE_LIMIT - 150:
            size //= 2
        pieces.append(text[start : start + size])
        start += size
    return pieces


def report(nonce: str, line: bytes) -> Report | None:
    """The report in a line, or None when the line is foreign."""
    if not line.startswith(b"{"):
        return None
    try:
        data = json.loads(line)
    except ValueError:
        return None
    if not isinstance(data, dict) or data.get("n") != nonce or not isinstance(data.get("e"), str):
        return None
    return {key: printable(value) if isinstance(value, str) else value for key, value in data.items()}


def swept(line: bytes) -> Report | None:
    """The answer of a search for left-over processes, or None when the line is foreign."""
    try:
        data = json.loads(line)
    except ValueError:
        return None
    sound = isinstance(data, dict) and data.get("e") == "swept"
    return data if sound and isinstance(data.get("killed"), int) and isinstance(data.get("left"), int) else None


EVENTS: Final[dict[str, Callable[[int, Report], ev.Event]]] = {
    "hello": lambda rank, r: ev.Hello(
        rank, str(r["host"]), int(r["pid"]), r.get("node"), r.get("step"), str(r.get("python", ""))
    ),
    "started": lambda rank, r: ev.RankStarted(rank, int(r["pid"])),
    "refused": lambda rank, r: ev.RankRefused(rank, str(r["phase"]), int(r["errno"]), str(r["error"])),
    "ended": lambda rank, r: ev.RankEnded(rank, r["code"], r["signal"], bool(r.get("core"))),
    "gone": lambda rank, r: ev.TreeGone(rank, int(r.get("killed", 0)), int(r.get("left", 0))),
    "signalled": lambda rank, r: ev.AgentSignalled(rank, int(r["signal"])),
    "note": lambda rank, r: ev.Noted(str(r["text"]), rank),
}
"""What each report means to the machine."""

HINT: Final = "hint"
OUR_OWN: Final = frozenset({"pong", HINT})
"""Reports that mean nothing to the machine: that the agent lives, and that files have changed on its node."""
