"""What a person sees while a run runs: a line per rank on a terminal, plain lines elsewhere. Everything on stderr.

Writing is a thread's work: a reader that does not read must not stop the engine. Lines that pile up are dropped, oldest
first, and the drop is said.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import deque
from typing import Final, TextIO

from supervisor.core import events as ev
from supervisor.core.state import RankState, RunState
from supervisor.core.story import tell

BACKLOG: Final = 1000  # lines
QUIET: Final = (ev.StepSpawned, ev.ArtifactsLooked, ev.Hello, ev.TreeGone, ev.StepEnded)
"""What plain output leaves out unless something is wrong with it: the journal has it."""

_CLEAR: Final = "\x1b[2K"


class Printer:
    """Writes texts to a stream from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=BACKLOG)
        self._wake = threading.Condition()
        self._closing = False
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._write, name="printer", daemon=True)
        self._thread.start()

    def print(self, text: str) -> None:
        """Queue a text. Never blocks."""
        with self._wake:
            self._lines.append(text)
            self._wake.notify()

    def close(self, limit: float = 1.0) -> None:
        """Write what is left, for at most `limit` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(limit)

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closing:
                    self._wake.wait()
                texts, closing = list(self._lines), self._closing
                self._lines.clear()
            try:
                self._stream.write("".join(texts))
                self._stream.flush()
            except (OSError, ValueError):
                return  # nobody reads: the journal has it all
            if closing and not self._lines:
                return


class Plain:
    """One line an event, with the seconds since the start."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def __call__(self, record: ev.Record, state: RunState) -> None:
        event = record.event
        text = tell(event)
        if text is None or isinstance(event, QUIET):
            return
        self._printer.print(f"{record.at - state.started_at:8.3f}s  {text}\n")


class Table:
    """A line per rank, redrawn in place; what is worth keeping scrolls above it."""

    KEEP: Final = (ev.Noted, ev.StopRequested, ev.EngineFault, ev.RankSilent, ev.MarkerPublished, ev.ArtifactSeen)

    def __init__(self, printer: Printer, color: bool) -> None:
        self._printer = printer
        self._color = color
        self._drawn = 0
        self._plain = Plain(printer)

    def __call__(self, record: ev.Record, state: RunState) -> None:
        width, height = shutil.get_terminal_size()
        if len(state.ranks) + 2 > height:  # a table that does not fit cannot be redrawn
            self._plain(record, state)
            return
        above = tell(record.event) if isinstance(record.event, self.KEEP) else None
        lines = [self._line(rank)[:width] for rank in state.ranks]
        lines.append(self._summary(record, state)[:width])
        text = f"\x1b[{self._drawn}A" if self._drawn else ""
        if above:
            text += f"{_CLEAR}{above[: width - 1]}\n"
        text += "".join(f"{_CLEAR}{line}\n" for line in lines)
        self._drawn = len(lines)
        self._printer.print(text)

    def _line(self, rank: RankState) -> str:
        end = ""
        if rank.end is not None:
            end = f"code {rank.end.code}" if rank.end.code is not None else f"signal {rank.end.signal}"
        state = "silent" if rank.silent else rank.phase
        text = f"  {rank.rank:>4}  {rank.role:<14} {rank.node:<18} {state:<10} {end}"
        bad = rank.end is not None and not rank.end.ordered and rank.end.native != 0
        return f"\x1b[31m{text}\x1b[0m" if bad and self._color else text

    @staticmethod
    def _summary(record: ev.Record, state: RunState) -> str:
        why = f" ({state.decision.reason})" if state.decision else ""
        return f"  {record.at - state.started_at:7.1f} s  {state.phase}{why}"


def reporter(stream: TextIO | None = None) -> tuple[Printer, Plain | Table]:
    """What fits the stream (stderr): a table on a terminal that can draw one, else lines."""
    stream = stream or sys.stderr
    printer = Printer(stream)
    terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if terminal:
        return printer, Table(printer, color="NO_COLOR" not in os.environ)
    return printer, Plain(printer)
