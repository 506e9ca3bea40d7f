r"""The marker: the file that tells every rank of a job how its coordinator ended.

The theory
----------
Workers serve until the work is done, and only the coordinator knows when that is. They share a file
system with it and nothing else that can be relied upon, so the coordinator's exit code is left in a
file, `.bench_done.<jobid>`, and the workers wait for it. Three things have gone wrong with such files
in the field, and the format answers each of them.

*A reader comes too early.* `echo 0 > file` makes an empty file first, a file on a network may be
seen cut short, and `12` is a valid beginning of `120`. So **the newline is the seal**: only a first
line that is complete counts. Everything before that is `NotYet`, which is no error, however often
it is seen.

*A reader comes too late.* Slurm gives a requeued job its old id, and the last attempt's file may
still lie there. So the file names the attempt that wrote it, and a marker of another attempt is
`Foreign`: it is ignored, as if the file were absent. A marker that names no attempt (a script's
`echo`) is believed: its name, which holds the job id, is all the binding that it has.

*Something else was written.* `Garbage` is content that can never become a marker. It may be seen
for a moment while somebody writes, so one look proves nothing; garbage that *stays* is a protocol
error, and the reader that waits is the one who knows how long it has stayed.

The format
----------
::

    0                              the exit code, decimal, 0..255, and a newline
    attempt=4242.r1                then, in any order, lines `key=value`; all of them may be missing
    rank=2
    host=node7
    by=supervisor
    at=2025-01-31T12:00:00Z

A shell script that reads only the first line (`read -r code < file`) needs to know no more.

Strictness: the first line is `0` or digits without a leading zero. Signs, blanks before or after,
`007`, `7\r` (a file from an editor that ends lines in CRLF), other scripts' digits and numbers over
255 are garbage. It would be easy to be lenient with ` 7`, and wrong: a lenient reader and a strict
one would end the same job differently, and the shell's `[ "$code" -eq 0 ]` is such a strict one.
The lines below the first inform; what is not a line `key=value`, or holds a value out of its
range, is skipped, and of two lines with one key the first counts. They judge nothing, except that
`attempt` binds. Bytes of zero alone are a file whose size arrived before its content: not yet.

    parse: bytes -> Marker | NotYet | Garbage         what the bytes say
    bind:  that, attempt -> the same | Foreign        whether it is said to us
    render: Marker -> bytes                           the one way our programs write it
    Patience: looks and time -> an end of the wait    when waiting has become pointless

This module does no I/O; `supervisor.engine.markers` reads and writes, `supervisor/agent/marker.sh`
does the same in POSIX sh and must agree with every rule above (a test compares the two).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from supervisor.core.attempt import attempt_id, display_id
from supervisor.core.codes import ARTIFACTS, DEADLINE, FAILED

MAX_BYTES: Final = 4096
"""A marker is never longer than this, in bytes; ours have about 120."""

MAX_FIRST_LINE: Final = 16
"""Bytes without a newline that may still become a first line; more are garbage."""

MAX_VALUE: Final = 512
"""Longest value that `render` writes, in characters."""

NOTE_SUFFIX: Final = ".note"
"""The file beside the marker that remembers the first failed part of a sweep."""

_CODE = re.compile(rb"0|[1-9][0-9]{0,2}")
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,8}")


class MarkerError(ValueError):
    """A marker that cannot be written: its code is not 0..255, or a value does not fit a line."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The coordinator's end. `code` is its exit code (0..255; 128 + N when signal N killed it).

    Fields that are None are not written, or were not found. `attempt` is a run id, `by` is
    `supervisor` or `coordinator` (who wrote the file), `at` a UTC time as ISO 8601.
    """

    code: int
    attempt: str | None = None
    rank: int | None = None
    host: str | None = None
    by: str | None = None
    at: str | None = None


@dataclass(frozen=True, slots=True)
class NotYet:
    """No marker so far: absent, empty or half-written. `reason` is a phrase for people.

    `present` tells whether there is a file at all.
    """

    reason: str = "absent"
    present: bool = True


@dataclass(frozen=True, slots=True)
class Garbage:
    """Content that can never become a marker. `reason` names what was found and what was expected."""

    reason: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """A marker of another attempt: ignored. `expected` is the attempt that was asked for."""

    marker: Marker
    expected: str


Parsed: TypeAlias = Marker | NotYet | Garbage
Reading: TypeAlias = Marker | NotYet | Garbage | Foreign


def render(marker: Marker) -> bytes:
    """The marker as a file's whole content. Raises MarkerError for what would not read back equal."""
    if not 0 <= marker.code <= 255:
        raise MarkerError(f"code: an exit code is 0..255, not {marker.code}")
    if marker.rank is not None and not 0 <= marker.rank < 10**9:
        raise MarkerError(f"rank: expected 0..999999999, not {marker.rank}")
    values = {
        "attempt": marker.attempt,
        "rank": None if marker.rank is None else str(marker.rank),
        "host": marker.host,
        "by": marker.by,
        "at": marker.at,
    }
    lines = [str(marker.code)]
    for key, value in values.items():
        if value is None:
            continue
        if len(value) > MAX_VALUE or not _VALUE.fullmatch(value):
            raise MarkerError(f"{key}: expected printable ASCII on one line, not {value[:80]!r}")
        lines.append(f"{key}={value}")
    return ("\n".join(lines) + "\n").encode("ascii")


def parse(data: bytes) -> Parsed:
    """What the bytes of a marker file say, whoever wrote it. Never raises."""
    if len(data) > MAX_BYTES:
        return Garbage(f"more than {MAX_BYTES} bytes; a marker is a number and a few short lines")
    if not data.strip(b"\0"):
        return NotYet("zero bytes only: the content has not arrived" if data else "empty")
    first, newline, rest = data.partition(b"\n")
    if not newline:
        if len(first) > MAX_FIRST_LINE:
            return Garbage(f"the first line has no end after {len(first)} bytes; expected a number 0..255")
        return NotYet("the first line is not complete: no newline")
    if not _CODE.fullmatch(first) or int(first) > 255:
        return Garbage(f"the first line is {_shown(first)}; expected a number 0..255 alone on it")
    values = _values(rest)
    return Marker(
        code=int(first),
        attempt=values.get("attempt"),
        rank=int(values["rank"]) if _DECIMAL.fullmatch(values.get("rank", "")) else None,
        host=values.get("host"),
        by=values.get("by"),
        at=values.get("at"),
    )


def bind(parsed: Parsed, attempt: str | None, *, sealed: bool = True) -> Reading:
    """Whether what was parsed counts for `attempt` (None: any attempt will do).

    `sealed` says whether the file ended with a newline. Where it did not, a marker that names no
    attempt may be about to name one, so an asker who cares about attempts waits.
    """
    if attempt is None or not isinstance(parsed, Marker) or parsed.attempt == attempt:
        return parsed
    if parsed.attempt is not None:
        return Foreign(parsed, attempt)
    return parsed if sealed else NotYet("the lines below the code are not complete: no newline")


def judge(data: bytes, attempt: str | None) -> Reading:
    """`parse` and `bind` in one: what these bytes mean to an asker from `attempt`."""
    return bind(parse(data), attempt, sealed=data.endswith(b"\n"))


def effective(code: int, noted: int) -> int:
    """The code to publish: the first failure that was noted, whatever succeeded or failed later."""
    return noted or code


def attempt_from(environ: dict[str, str]) -> str | None:
    """The attempt that a process belongs to: `ALLOCD_RUN_ID`, or the same id made of Slurm's variables.

    A plain script that was not started by an engine still gets an id that differs from requeue to
    requeue: `JOBID`, then `JOBID.rN`; of an array's task `ARRAY_TASK`. None outside of any job.
    """
    if run_id := environ.get("ALLOCD_RUN_ID"):
        return run_id
    jobid = display_id(environ)
    return attempt_id(jobid, environ.get("SLURM_RESTART_COUNT", "")) if jobid else None


@dataclass(frozen=True, slots=True)
class Waited:
    """How a wait ended. `code` is the exit code that follows; `marker` is set if there was one."""

    outcome: Literal["marker", "dead", "garbage", "deadline"]
    code: int
    reason: str
    marker: Marker | None = None


class Patience:
    """When to stop waiting for a marker: every wait has liveness and a deadline.

    The owner looks, asks `decide`, and looks again at `next_look` at the latest; a hint may make it
    sooner. Times are seconds on one clock that never goes back. Liveness must be sampled *before*
    the look it is given with: a coordinator that writes and dies has then been seen to write.

    - A marker ends the wait with its code.
    - The process whose end makes the marker unlikely is gone: looks go on for `recheck` seconds, for
      a file can become visible later than the death of its writer, and then the wait failed (1).
    - Garbage that has stayed for `settle` seconds is a protocol error (65).
    - At `timeout` seconds the wait is over (124). None: no deadline.
    """

    LOOK_EVERY: Final = 1.0

    def __init__(self, now: float, *, recheck: float = 5.0, timeout: float | None = None, settle: float = 2.0) -> None:
        self._deadline = None if timeout is None else now + timeout
        self._recheck, self._settle = recheck, settle
        self._dead_since: float | None = None
        self._garbage_since: float | None = None

    def decide(self, reading: Reading, alive: bool, now: float) -> Waited | None:
        """The end of the wait, or None: look again. `alive` is True where no process is watched."""
        if isinstance(reading, Marker):
            return Waited("marker", reading.code, "the marker was read", reading)
        self._dead_since = None if alive else self._dead_since if self._dead_since is not None else now
        if not isinstance(reading, Garbage):
            self._garbage_since = None
        elif self._garbage_since is None:
            self._garbage_since = now
        dead = _passed(self._dead_since, self._recheck, now)
        if isinstance(reading, Garbage) and (dead or _passed(self._garbage_since, self._settle, now)):
            return Waited("garbage", ARTIFACTS, f"the file is no marker: {reading.reason}")
        if dead:
            return Waited("dead", FAILED, f"the process ended and left no marker: {explain(reading)}")
        if self._deadline is not None and now >= self._deadline:
            return Waited("deadline", DEADLINE, f"the deadline passed without a marker: {explain(reading)}")
        return None

    def next_look(self, now: float) -> float:
        """The time of the next look, in (now, now + 1 s]."""
        moments = [now + self.LOOK_EVERY]
        if self._dead_since is not None:
            moments.append(self._dead_since + self._recheck)
        if self._garbage_since is not None:
            moments.append(self._garbage_since + self._settle)
        if self._deadline is not None:
            moments.append(self._deadline)
        return min(moment for moment in moments if moment > now)


def explain(reading: Reading) -> str:
    """A reading as a phrase for people."""
    match reading:
        case Marker():
            return f"code {reading.code}"
        case Foreign():
            return f"ignored, it is of attempt {reading.marker.attempt}, not {reading.expected}"
        case NotYet() | Garbage():
            return reading.reason


def _passed(since: float | None, limit: float, now: float) -> bool:
    return since is not None and now - since >= limit


def _values(rest: bytes) -> dict[str, str]:
    """The complete `key=value` lines; the first of a key counts."""
    values: dict[str, str] = {}
    for line in rest.split(b"\n")[:-1]:  # what follows the last newline is not complete
        key, equals, value = line.decode("latin-1").partition("=")
        if equals and len(value) <= MAX_VALUE and _VALUE.fullmatch(value):
            values.setdefault(key, value)
    return values


def _shown(line: bytes) -> str:
    text = repr(line[:40])[1:]
    return f"{text} and {len(line) - 40} bytes more" if len(line) > 40 else text
