"""What the verbs print: answers on stdout, sentences for people on stderr, and a failed write that is no success."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import suppress
from typing import Final

from supervisor.cli import runner
from supervisor.core import codes
from supervisor.core.text import printable

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def complain(text: object) -> None:
    """A sentence on stderr, if anybody reads there. What others have put into it is no command to a terminal."""
    with suppress(OSError):
        print("allocctl:", "\n".join(map(printable, str(text).split("\n"))), file=sys.stderr)


def refuse(args: argparse.Namespace, error: object, code: int) -> int:
    """Say why a verb cannot do what was asked, as a document too where one was asked for. Returns the exit code. A run
    that is unknown here may be known to a daemon on another login node: that one is named."""
    from supervisor.runs.registry import Ambiguous, NoSuchRun

    if isinstance(error, Ambiguous):
        code = codes.CONFIG
    elif isinstance(error, NoSuchRun):
        from supervisor.cli.daemon import with_hosts

        error = with_hosts(error)
    complain(error)
    if args.json:
        import json

        tell(json.dumps({"schema_version": 1, "error": str(error), "exit": code}, ensure_ascii=False))
    return code


def tell(text: str) -> None:
    """A line on stdout, at once. That it cannot be written is said, and remembered: see `flush_stdout`."""
    try:
        print(text)
    except OSError as error:
        _lose(error)
    flush_stdout(codes.OK)


def put_lines(run_id: str, log: str, lines: list[bytes], jobid: str | None) -> None:
    """Print lines of a log, with the log's name before each; also with the run's, where it is another than the job's
    first. A terminal is shown control characters escaped, for it would obey them. Raises OSError."""
    if sys.stdout.isatty():
        lines = [os.fsencode(printable(line.decode(errors="replace"))) for line in lines]
    prefix = os.fsencode(f"{log}: " if jobid in (None, run_id) else f"{run_id}/{log}: ")
    put(b"".join(prefix + line + b"\n" for line in lines))


def put(data: bytes) -> None:
    """Write to stdout, past the stream's own buffer. Raises OSError."""
    runner.put(sys.stdout, data)


def end_with(code: int) -> None:
    """How it ended is told: from now on a signal ends this process with that code, whatever still hangs."""
    with suppress(ValueError):  # of a thread, which hears no signals
        for number in ENDING:
            signal.signal(number, lambda *_: os._exit(code))


def flush_stdout(code: int) -> int:
    """Write what is left; a success is none when that fails, or has failed before. Returns the exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _lose(error)
    return code or (codes.FAILED if _lost else codes.OK)


_lost = False
"""Something that was to be on stdout is not there."""


def _lose(error: OSError) -> None:
    """From now on nothing goes to stdout, so that Python's own last flush does not fail as well."""
    global _lost
    _lost = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if not isinstance(error, BrokenPipeError):
        complain(f"stdout: {sentence(error)}")


def sentence(error: OSError) -> str:
    """What went wrong with which file."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or str(error) or type(error).__name__}"
