"""The daemon's log, on stderr: for systemd's journal with priorities, for people on a terminal, for programs as JSON.

    journal    <4>trouble key=a1b2c3d4 text='Slurm cannot be asked'     sd-daemon(3): the number is syslog's priority
    console    2026-01-02T03:04:05.678Z warning trouble key=a1b2c3d4 ...
    json       {"event": "trouble", "key": "a1b2c3d4", "level": "warning", "timestamp": "2026-01-02T03:04:05.678Z"}

Which one fits is found out: the journal is told by $JOURNAL_STREAM, which names the very file that stderr is. What
libraries log by the standard module (asyncio's complaints, uvicorn's) goes the same way. No plan, no environment and no
word of a request's body is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from supervisor.service.settings import Settings

PRIORITIES: Final[Mapping[str, int]] = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def make_log(settings: Settings, stream: TextIO, environ: Mapping[str, str]) -> structlog.typing.FilteringBoundLogger:
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
        structlog.WriteLogger(stream),
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


def _is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
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
