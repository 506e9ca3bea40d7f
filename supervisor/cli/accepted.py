"""What allocd has accepted, on its way to a job or a run: `submit`, `adopt` and `wait` through the daemon.

A plan is handed over with an idempotency key of its own, so that asking again after a lost answer is safe. From then on
the daemon's events tell: it waits in the queue, sbatch runs, there is a job. The end is not the daemon's word: what it
has sealed is on the disk, and is read and told there as it is of any job (`wait.py`).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from supervisor.cli.daemon import SETTLED, Daemon, Document, allocation, names_of, standing
from supervisor.cli.output import complain
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.cli.interrupts import Interrupts
    from supervisor.cli.wait import Options
    from supervisor.runs.target import Target

CANCEL_LIMIT: Final = 30.0  # seconds


class Left(Exception):
    """The waiting was left, by a signal or at its deadline; what is waited for goes on."""


class Interrupted(Exception):
    """Somebody left before there was an answer; the message says what is known."""


def hand_over(daemon: Daemon, target: str, body: Document, interrupts: Interrupts) -> Document:
    """Have a plan accepted; what is None in the body is left out. Raises NobodyThere and Absent when nothing was asked,
    NobodyAnswers when it is not known whether it was accepted, Interrupted, Refused."""
    body = {name: value for name, value in body.items() if value is not None}
    known = "allocd was not asked for anything"
    interrupts.raises = True
    try:
        daemon.greet()
        known = "allocd had not answered, and may have accepted it: `allocctl list` tells"
        return daemon.create(target, body, secrets.token_hex(16))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted: {known}") from None
    finally:
        interrupts.raises = False


def carried(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The environment as a request can carry it; None when it cannot: a value that is no UTF-8, or a strange name."""
    if not all(re.fullmatch("[ -<>-~]*", name) for name in environ):
        return None
    try:
        "".join((*environ, *environ.values())).encode()
    except UnicodeEncodeError:
        return None
    return {name: value for name, value in environ.items() if name}


def follow(
    daemon: Daemon,
    held: Document,
    enough: Callable[[Document], bool],
    *,
    deadline: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    heard: Callable[[Document], bool] = lambda event: False,
) -> Document:
    """The allocation as soon as it is `enough`, has ended, or `heard` of an event says so. `say` is told where it
    stands, as often as that changes. Raises Left at the deadline (monotonic), NobodyAnswers, Refused."""
    told = ""
    for event in daemon.events(held["key"], deadline):
        if event is None:
            continue
        held = daemon.seek(held["key"]) or held
        if standing(held) != told and held["state"] != "ended":
            told = standing(held)
            say(f"{names_of(held)}: {told}" + (f": {held['trouble']}" if held["trouble"] else ""))
        if held["state"] in ("damaged", "ended") or enough(held) or heard(event):
            return held
    raise Left


def has_job(held: Document) -> bool:
    """Whether there is something that Slurm or a run directory can tell of."""
    return held["state"] in SETTLED and bool(held["run_dir"] if held["kind"] == "adopted" else held["jobid"])


def wait_for_held(daemon: Daemon | None, held: Document, options: Options, interrupts: Interrupts) -> int:
    """Wait for what the daemon holds, or what a book tells of (None). Returns its exit code. With `options.quiet` the
    daemon's events are all that is listened to until the end; else from the job on its story and logs are told as those
    of any other."""
    from supervisor.cli.asking import NobodyAnswers, Refused
    from supervisor.cli.held import no_job
    from supervisor.cli.wait import wait_for
    from supervisor.runs.registry import NoSuchRun
    from supervisor.runs.saved import Unreadable
    from supervisor.runs.target import find_target

    began = time.monotonic()
    deadline = None if options.timeout is None else began + options.timeout
    try:
        held = _waited(daemon, held, options, interrupts, deadline) if daemon else held
    except (Left, KeyboardInterrupt):
        again = f"`allocctl wait {held['key']}` picks it up"
        return last_line(options, f"the wait was left; {names_of(held)} goes on: {again}", codes.INTERRUPTED)
    except (NobodyAnswers, Refused) as error:
        if not has_job(held):
            return last_line(options, f"{error}; it had accepted {held['key']}", codes.UNREACHABLE)
    finally:
        interrupts.raises = False
    if held["state"] == "damaged":
        instead = f"; `allocctl wait {held['jobid']}` follows its job" if held["jobid"] else ""
        return last_line(options, f"{names_of(held)}: {held['trouble']}{instead}", codes.UNVERIFIABLE, held)
    adopted = held["kind"] == "adopted"
    if held["verdict"] and (not has_job(held) or (adopted and not os.path.isdir(held["run_dir"]))):
        return ended(options, held)
    if not has_job(held):
        return last_line(options, str(no_job(held)), codes.UNREACHABLE)
    if options.timeout is not None:
        options = replace(options, timeout=max(0.0, options.timeout - (time.monotonic() - began)))
    try:
        target = guest(held) if adopted else find_target(held["jobid"], held["cluster"])
    except (NoSuchRun, Unreadable) as error:
        return last_line(options, str(error), codes.UNVERIFIABLE)
    return wait_for(target, options, interrupts)


def guest(held: Document) -> Target:
    """The run of an adopted allocation, which may be in a directory that cannot be read."""
    from supervisor.runs.target import adopted_target
    from supervisor.service.adopting import start_directory

    return adopted_target(held["run_dir"], held["jobid"], start_directory(held["key"]))


def _waited(
    daemon: Daemon, held: Document, options: Options, interrupts: Interrupts, deadline: float | None
) -> Document:
    """Raises Left, NobodyAnswers, Refused, KeyboardInterrupt."""
    if held["state"] in ("damaged", "ended") or (has_job(held) and not options.quiet):
        return held
    say: Callable[[str], None] = (lambda text: None) if options.quiet else complain
    cancelled = False
    while True:
        interrupts.raises = True
        try:
            return follow(daemon, held, lambda now: has_job(now) and not options.quiet, deadline=deadline, say=say)
        except KeyboardInterrupt:
            if cancelled or not options.cancel:
                raise
            cancelled = True
            say(f"{names_of(held)} is to be cancelled (interrupt again to leave)")
            daemon.ask("POST", f"{allocation(held['key'])}/stop", {"how": "cancel"}, CANCEL_LIMIT)
            say(f"{names_of(held)} is being cancelled")


def ended(options: Options, held: Document) -> int:
    """One that never became a job, or a run, or whose run is gone: the daemon's word is all there is."""
    verdict = held["verdict"]
    code, text = int(verdict["code"]), f"{names_of(held)}: {verdict['outcome']}: {verdict['summary']}"
    return last_line(options, text, code, held, verdict["origin"])


def last_line(options: Options, text: str, code: int, held: Document | None = None, origin: str = "allocd") -> int:
    """The last line of a wait without a receipt, and its document. Returns the exit code."""
    import json

    from supervisor.cli.output import tell

    complain(f"{text} [exit {code}, origin {origin}]")
    if options.json:
        document = {"schema_version": 1, "error": text, "exit": code, "allocation": held}
        tell(json.dumps(document, ensure_ascii=False))
    return code
