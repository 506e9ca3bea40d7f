"""`allocctl marker`: the marker for scripts that have `allocctl` at hand.

    allocctl marker publish CODE    write it, once; a failure noted before is published instead
    allocctl marker note CODE       remember the first part that failed; 0 changes nothing
    allocctl marker wait            wait for it and exit with its code
    allocctl marker read            print its code, now

The file is `--file`, else `$ALLOCD_MARKER`; the attempt is `--attempt`, else `$ALLOCD_RUN_ID`, else the
same id made of Slurm's variables (`--attempt ''`: any attempt). Scripts on machines without `allocctl`
source `marker.sh` instead (`. "$ALLOCD_SH"`), which does the same.

Exit codes: 0 done; `wait` the marker's code; 1 the process given by `--pid` ended and left no marker, or
the file system refused; 65 the file is garbage, or a void file keeps the name from being published;
75 `read`: not yet, or another attempt's; 78 used wrongly; 79 interrupted; 124 the deadline passed. A
marker's code may equal one of these: `--json` has `outcome` and `origin`, and the last line on stderr
says it too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from supervisor.core.marker import Marker

DEFAULT_TIMEOUT: Final = 14_400.0
"""Seconds that a wait lasts at most if nothing else is asked for: the field's limit of a collection."""

MAX_RECHECK: Final = 60.0


class _Misuse(Exception):
    """The command line does not make sense; ends with 78."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb and its four actions to the command line."""
    verb = subparsers.add_parser(
        "marker",
        help="publish, note, wait for or read the coordinator's exit-code file",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)
    publish = actions.add_parser("publish", help="write the marker once; the first one counts")
    publish.add_argument("code", metavar="CODE", help="exit code, 0..255")
    publish.add_argument(
        "--replace",
        action="store_true",
        help="write over a file that is empty or no marker (only when its writer is gone)",
    )
    note = actions.add_parser("note", help="remember the first failed part; publishing uses it")
    note.add_argument("code", metavar="CODE", help="exit code, 0..255; 0 changes nothing")
    wait = actions.add_parser("wait", help="wait for the marker and exit with its code")
    wait.add_argument("--pid", metavar="P", help="give up when this process is gone and left no marker")
    wait.add_argument("--recheck", metavar="S", default="5", help="seconds to look on then, 0..60 (default 5)")
    wait.add_argument("--timeout", metavar="S", default=str(DEFAULT_TIMEOUT), help="seconds to wait (default 14400)")
    read = actions.add_parser("read", help="print the marker's code")
    for action in (publish, note, wait, read):
        action.add_argument("--file", metavar="FILE", help="the marker's path (default $ALLOCD_MARKER)")
        action.add_argument("--attempt", metavar="ID", help="the run id (default $ALLOCD_RUN_ID)")
        action.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="one JSON document on stdout"
        )


def run(args: argparse.Namespace) -> int:
    """Carry out one action; returns the exit code."""
    from supervisor.core import codes

    actions = {"publish": _publish, "note": _note, "wait": _wait, "read": _read}
    try:
        return actions[args.action](args)
    except _Misuse as error:
        return _answer(args, codes.CONFIG, outcome="misuse", reason=str(error))
    except OSError as error:
        return _answer(args, codes.FAILED, outcome="refused", reason=f"{_file(args)}: {error.strerror or error}")
    except KeyboardInterrupt:
        return _answer(args, codes.INTERRUPTED, outcome="interrupted", reason="the wait was interrupted")


def _publish(args: argparse.Namespace) -> int:
    from supervisor.core import codes
    from supervisor.core.marker import Foreign, Marker, effective, explain
    from supervisor.engine import markers

    path, attempt, asked = _file(args), _attempt(args), _code(args.code)
    noted = markers.noted(path, attempt)
    code = effective(asked, noted)
    marker = Marker(code, attempt, _rank(), _host(), "coordinator", _utc_now())
    _check(marker)
    published = markers.publish(path, marker)
    # Another attempt's marker counts for nobody here, so this is the first publish of this attempt.
    if args.replace or isinstance(published.found, Foreign):
        published = markers.replace(path, marker)
    found = published.found
    if not isinstance(found, Marker):
        advice = "if its writer is gone, publish with --replace"
        reason = f"{path}: the name is taken and holds no marker: {explain(found)}; {advice}"
        return _answer(args, codes.ARTIFACTS, outcome="taken", reason=reason)
    what = f"published {found.code}" if published.outcome == "written" else f"{found.code} was published before"
    because = f" (the first failure noted; this call brought {asked})" if code != asked else ""
    return _answer(args, codes.OK, outcome=published.outcome, reason=what + because, marker=found)


def _note(args: argparse.Namespace) -> int:
    from supervisor.core import codes
    from supervisor.core.marker import Marker
    from supervisor.engine import markers

    path, attempt, code = _file(args), _attempt(args), _code(args.code)
    _check(Marker(code, attempt))
    noted = markers.note(path, code, attempt)
    reason = f"the first failure noted is {noted}" if noted else "no failure noted"
    return _answer(args, codes.OK, outcome="noted", reason=reason, noted=noted)


def _read(args: argparse.Namespace) -> int:
    from supervisor.core import codes
    from supervisor.core.marker import Garbage, Marker, explain
    from supervisor.engine import markers

    reading = markers.read(_file(args), _attempt(args))
    if isinstance(reading, Marker):
        if not _json(args):
            print(reading.code)
            return codes.OK
        return _answer(args, codes.OK, outcome="marker", reason=explain(reading), marker=reading)
    if isinstance(reading, Garbage):
        return _answer(args, codes.ARTIFACTS, outcome="garbage", reason=f"no marker: {reading.reason}")
    return _answer(args, codes.UNVERIFIABLE, outcome="not_yet", reason=f"no marker yet: {explain(reading)}")


def _wait(args: argparse.Namespace) -> int:
    from supervisor.engine import markers

    path, attempt = _file(args), _attempt(args)
    recheck = _seconds("--recheck", args.recheck, MAX_RECHECK)
    timeout = _seconds("--timeout", args.timeout, float(10**9))
    pid = _pid(args.pid) if args.pid is not None else None
    ended = markers.wait(path, attempt, pid=pid, recheck=recheck, timeout=timeout)
    return _answer(args, ended.code, outcome=ended.outcome, reason=ended.reason, marker=ended.marker)


def _file(args: argparse.Namespace) -> str:
    path: str = args.file or os.environ.get("ALLOCD_MARKER", "")
    if not path:
        raise _Misuse("no marker file: give --file, or set ALLOCD_MARKER as the engine does")
    return path


def _attempt(args: argparse.Namespace) -> str | None:
    from supervisor.core.marker import attempt_from

    given: str | None = args.attempt
    return (given or None) if given is not None else attempt_from(dict(os.environ))


def _code(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 3 and int(text) <= 255:
        return int(text)
    raise _Misuse(f"CODE: expected an exit code 0..255, found {text!r}")


def _pid(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise _Misuse(f"--pid: expected a process id, found {text!r}")


def _seconds(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:  # also refuses nan
        return value
    raise _Misuse(f"{name}: expected seconds, 0..{most:g}, found {text!r}")


def _check(marker: Marker) -> None:
    from supervisor.core.marker import MarkerError, render

    try:
        render(marker)
    except MarkerError as error:
        raise _Misuse(str(error)) from None


def _rank() -> int | None:
    text = os.environ.get("ALLOCD_RANK", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _json(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "json", False))


def _answer(
    args: argparse.Namespace,
    code: int,
    *,
    outcome: str,
    reason: str,
    marker: Marker | None = None,
    **more: Any,
) -> int:
    """Tell people on stderr, or programs on stdout; returns `code`."""
    origin = "native" if args.action == "wait" and marker is not None else "allocd"
    if _json(args):
        import dataclasses
        import json

        document = {
            "schema_version": 1,
            "action": args.action,
            "outcome": outcome,
            "exit_code": code,
            "origin": origin,
            "reason": reason,
            "marker": dataclasses.asdict(marker) if marker else None,
            **more,
        }
        print(json.dumps(document))
    said = f"exit {code} ({origin}): {reason}" if args.action == "wait" else reason
    print(f"allocctl marker {args.action}: {said}", file=sys.stderr)
    return code
