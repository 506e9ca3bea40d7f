"""The daemon's log, on stderr: for systemd's journal with priorities, for people on a terminal, for programs as JSON.

    journal    <4>trouble key=a1b2c3d4 text='Slurm cannot be asked'     sd-daemon(3): the number is syslog's priority
    console    2026-01-02T03:04:05.678Z warning trouble key=a1b2c3d4 ...
    json       {"event": "trouble", "key": "a1b2c3d4", "level": "warning", "timestamp": "2026-01-02T03:04:05.678Z"}

Which one fits is found out: the journal is told by $JOURNAL_STREAM, which names the very file that stderr is. What
libraries log by the standard module (asyncio's complaints, uvicorn's) goes the same way. No plan, no environment and no
word of a request's body is logged.

A log is worth no allocation: a full disk below it, or a pipe that nobody reads, costs lines and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final, TextIO, cast

import structlog

from supervisor.service.settings import Settings

PRIORITIES: Final[Mapping[str, int]] = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


class Outlet:
    """A descriptor that lines are written to by a thread of its own: who logs waits for nothing. What cannot be
    written, and what comes while `most` lines wait, is lost; `lost` is called, in that thread, with the number of such
    lines as soon as one can be written again."""

    def __init__(self, descriptor: int, most: int = 10_000) -> None:
        self.lost: Callable[[int], object] = lambda count: None
        self._descriptor = descriptor
        self._most = most
        self._lines: deque[bytes] = deque()
        self._count = 0
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a line."""
        with self._wake:
            if len(self._lines) < self._most:
                self._lines.append(text.encode(errors="backslashreplace"))
                self._wake.notify()
            else:
                self._count += 1
        return len(text)

    def flush(self) -> None:
        """Nothing: whoever logs waits for nothing."""

    def isatty(self) -> bool:
        """Whether a person looks at it."""
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self, limit: float = 1.0) -> None:
        """Write what is queued, for at most so many seconds. The descriptor stays open."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(limit)

    def _work(self) -> None:
        torn = b""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._lines or self._closing)
                if not self._lines:
                    return
                line = self._lines.popleft()
            left = torn + line
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
                torn = b""
            except OSError:
                torn = b"\n" if torn or len(left) < len(line) else b""
                with self._wake:
                    self._count += 1
                continue
            with self._wake:
                count, self._count = self._count, 0
            if count:
                self.lost(count)


def make_log(
    settings: Settings, stream: TextIO | Outlet, environ: Mapping[str, str]
) -> structlog.typing.FilteringBoundLogger:
    """A logger that writes to the stream."""
    kind = settings.log_format
    if kind == "auto":
        kind = "journal" if _is_journal(stream, environ) else "console" if stream.isatty() else "json"
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    processors: list[Any] = [structlog.processors.add_log_level, structlog.processors.format_exc_info]
    if kind == "json":
        processors += [stamp, structlog.processors.JSONRenderer(sort_keys=True)]
    elif kind == "console":
        processors += [stamp, _line]
    else:
        processors += [_line, _with_priority]
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    made: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", stream)),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )
    return made


class Libraries(logging.Handler):
    """What libraries log, as lines of ours: for the root of the standard module's loggers."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """A record; its traceback too."""
        level = "warning" if record.levelno < logging.ERROR else "error"
        getattr(self._log, level)("library", name=record.name, text=record.getMessage(), exc_info=record.exc_info)


def _is_journal(stream: TextIO | Outlet, environ: Mapping[str, str]) -> bool:
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _line(_logger: object, level: str, values: MutableMapping[str, Any]) -> str:
    """One line, whatever is in the values; a traceback has its newlines escaped."""
    stamp = f"{values.pop('timestamp')} {level} " if "timestamp" in values else ""
    event = values.pop("event")
    values.pop("level", None)
    return " ".join([f"{stamp}{event}", *(f"{key}={_shown(value)}" for key, value in values.items())])


def _shown(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _with_priority(_logger: object, level: str, line: str) -> str:
    return f"<{PRIORITIES.get(level, 6)}>{line}"
