"""What a person sees while a run runs: a line per rank on a terminal, plain lines elsewhere. Everything on stderr.

Writing is a thread's work: a reader that does not read must not stop the engine, nor keep it from ending. Lines that
pile up are dropped, oldest first, and the drop is said. A terminal's table is a frame that stands below the lines; only
the last one is drawn.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections import deque
from typing import Final, TextIO

from supervisor.cli.runner import put
from supervisor.core import events as ev
from supervisor.core.state import RankState, RunState
from supervisor.core.story import tell
from supervisor.core.text import block

BACKLOG: Final = 1000  # lines
QUIET: Final = (ev.StepSpawned, ev.WatchChanged, ev.ArtifactsLooked, ev.Hello, ev.TreeGone, ev.StepEnded)
"""What plain output leaves out unless something is wrong with it: the journal has it."""

_CLEAR_BELOW: Final = "\x1b[J"


class Printer:
    """Writes lines, and a frame below them, to a stream from a thread of its own. Never raises, never blocks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._frame: tuple[str, ...] = ()
        self._drawn: tuple[str, ...] = ()
        self._wake = threading.Condition()
        self._closing = False
        self._writing = False
        self._thread = threading.Thread(target=self._write, name="printer", daemon=True)
        self._thread.start()

    def print(self, line: str) -> None:
        """Queue a line."""
        with self._wake:
            if len(self._lines) >= BACKLOG:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
            self._wake.notify_all()

    def show(self, frame: tuple[str, ...]) -> None:
        """Lines that stand below all others from now on, in place of those of the last call."""
        with self._wake:
            self._frame = frame
            self._wake.notify_all()

    def settle(self) -> None:
        """The frame becomes lines: what is printed from now on stands below it."""
        with self._wake:
            self._lines.extend(self._frame)
            self._frame = ()
            self._wake.notify_all()

    def flush(self, limit: float = 1.0) -> None:
        """Wait until what was queued is written, for at most `limit` seconds."""
        with self._wake:
            self._wake.wait_for(lambda: not self._lines and not self._writing, limit)

    def close(self, limit: float = 1.0) -> None:
        """Write what is left, for at most `limit` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(limit)

    def _write(self) -> None:
        try:
            while text := self._next():
                self._put(text)
                self._rest()
        except (OSError, ValueError):
            self._rest()  # nobody reads: the journal has it all

    def _rest(self) -> None:
        with self._wake:
            self._writing = False
            self._wake.notify_all()

    def _next(self) -> str:
        """What is to be written next, waited for; empty at the end."""
        with self._wake:
            while not self._lines and self._frame == self._drawn and not self._closing:
                self._wake.wait()
            lines, dropped, frame = list(self._lines), self._dropped, self._frame
            self._lines.clear()
            self._dropped = 0
            self._writing = True
        text = ""
        if self._drawn and (lines or frame != self._drawn):
            text += f"\x1b[{len(self._drawn)}A{_CLEAR_BELOW}"
            self._drawn = ()
        if dropped:
            text += f"... {dropped} lines that nobody read in time are left out here; the journal has everything\n"
        text += "".join(f"{line}\n" for line in lines)
        if frame != self._drawn:
            text += "".join(f"{line}\n" for line in frame)
            self._drawn = frame
        return text

    def _put(self, text: str) -> None:
        try:
            put(self._stream, text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        except io.UnsupportedOperation:
            self._stream.write(text)


class Plain:
    """One line an event, with the seconds since the start."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def __call__(self, record: ev.Record, state: RunState) -> None:
        text = tell(record.event)
        if text is not None and not isinstance(record.event, QUIET):
            self._printer.print(f"{record.at - state.started_at:8.3f}s  {block(text)}")


class Table:
    """A line per rank, redrawn in place; what is worth keeping scrolls above it. Where the terminal is too small for
    that, plain lines."""

    KEEP: Final = (ev.Noted, ev.StopRequested, ev.EngineFault, ev.RankSilent, ev.MarkerPublished, ev.ArtifactSeen)

    def __init__(self, printer: Printer, terminal: int, color: bool) -> None:
        self._printer = printer
        self._terminal = terminal
        self._color = color
        self._plain = Plain(printer)

    def __call__(self, record: ev.Record, state: RunState) -> None:
        try:
            width, height = os.get_terminal_size(self._terminal)
        except OSError:  # the terminal is gone
            width = height = 0
        if len(state.ranks) + 2 > height:  # a frame that does not fit cannot be redrawn
            self._printer.show(())
            self._plain(record, state)
            return
        if isinstance(record.event, self.KEEP):
            self._plain(record, state)
        ranks = (self._line(rank, width - 1) for rank in state.ranks)
        self._printer.show((*ranks, self._summary(record, state)[: width - 1]))

    def _line(self, rank: RankState, width: int) -> str:
        end = ""
        if rank.end is not None:
            end = f"code {rank.end.code}" if rank.end.code is not None else f"signal {rank.end.signal}"
        state = "silent" if rank.silent else rank.phase
        text = f"  {rank.rank:>4}  {rank.role:<14} {rank.node:<18} {state:<10} {end}".rstrip()[:width]
        bad = rank.end is not None and not rank.end.ordered and rank.end.native != 0
        return f"\x1b[31m{text}\x1b[0m" if bad and self._color else text

    @staticmethod
    def _summary(record: ev.Record, state: RunState) -> str:
        why = f" ({state.decision.reason})" if state.decision else ""
        return f"  {record.at - state.started_at:7.1f} s  {state.phase}{why}"


def reporter(printer: Printer, stream: TextIO | None = None) -> Plain | Table:
    """What fits the stream (stderr): a table on a terminal that can draw one, else lines."""
    stream = stream or sys.stderr
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return Table(printer, stream.fileno(), color=not os.environ.get("NO_COLOR"))
    return Plain(printer)
