"""`allocctl service`: allocd as a service of this user, under systemd's user manager.

    install      write the units with this installation's path, and let the socket wait for the first who connects
    uninstall    stop the daemon, and remove the units that were written here
    status       the units, the socket, and how the daemon is, without starting it
    stop         end the daemon; every engine goes on (--with-runs: end the runs of adopted allocations first)
    reload       have the daemon read its settings again

Each can be typed again without harm. Where there is no user manager (compute nodes, containers, `su`), the daemon can
still be run by hand: `allocd` in the foreground, or `setsid allocd`; stop, status and reload find that one too.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from supervisor.cli import units
from supervisor.cli.arguments import seconds
from supervisor.cli.asking import NobodyAnswers, Refused, ask, listener, socket_path
from supervisor.cli.daemon import LOOK_LIMIT, NEW_LIMIT, with_hosts
from supervisor.cli.installing import install, uninstall
from supervisor.cli.manager import NO_MANAGER, Failed, Told, engines, tell_of_logout, user_manager
from supervisor.cli.output import refuse, sentence
from supervisor.core import codes
from supervisor.service.place import Owner, boot_id, owners, process_start

END_LIMIT: Final = 60.0  # seconds for a daemon without a unit to end
PAUSE: Final = 0.5  # seconds between looks at runs that end
PAGE: Final = 1000  # allocations asked for at once
GIVEN_UP: Final = ("start-limit-hit", "service-start-limit-hit", "trigger-limit-hit")
"""How a unit has ended that nothing but a person starts again."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("service", help="allocd as a service of systemd's user manager")
    actions = parser.add_subparsers(dest="action", required=True)
    install = actions.add_parser("install", help="write the units, and let the socket wait for the first who connects")
    uninstall = actions.add_parser("uninstall", help="stop the daemon, and remove the units; engines go on")
    for action in (install, uninstall):
        action.add_argument("--force", action="store_true", help="set unit files aside that were written by others")
    stop = actions.add_parser("stop", help="end the daemon; engines go on")
    stop.add_argument("--with-runs", action="store_true", help="end the runs of adopted allocations first, in order")
    stop.add_argument("--limit", type=seconds, default=900.0, metavar="S", help="seconds for those runs (default: 900)")
    status = actions.add_parser("status", help="the units, the socket, and how the daemon is")
    reload = actions.add_parser("reload", help="have the daemon read its settings again")
    for action in (install, uninstall, stop, status, reload):
        action.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """0 when it is done; 69 when there is no user manager or no daemon, 78 for unit files of others, 124 when runs did
    not end in time; of `status`: 69 unless a daemon answers, or would be started by the next who connects."""
    told = Told(args.json)
    try:
        code: int = _ACTIONS[args.action](args, told)
    except Failed as error:
        return refuse(args, error, error.code)
    except Refused as error:
        return refuse(args, f"the daemon refuses: {error}", codes.FAILED)
    except NobodyAnswers as error:
        return refuse(args, error, codes.UNREACHABLE)
    except OSError as error:
        return refuse(args, sentence(error), codes.FAILED)
    told.print()
    return code


# --- status -----------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace, told: Told) -> int:
    manager, path, by_hand = user_manager(), socket_path(os.environ), _by_hand()
    shown = {} if manager is None else {unit: manager.show(unit) for unit in units.UNITS}
    states = {unit: show.get("ActiveState", "unknown") for unit, show in shown.items()}
    waits = states.get(units.SOCKET) == "active" and states[units.SERVICE] in ("inactive", "failed")
    health, held = (None, "") if waits else _health(path)
    for unit, show in shown.items():
        told.say(f"{unit}: {_how(show, answers=health is not None)}")
    if manager is None:
        told.say(NO_MANAGER)
    told.say(f"{path}: systemd starts the daemon for the first who connects" if waits else held)
    for text in (health or {}).get("wrong") or ():
        told.say(f"wrong: {text}")
    for owner in owners(os.environ):
        if owner.alive is None:
            told.say(f"another daemon of yours is on {owner.host}, since {owner.since}: ask that one there")
    for owner in by_hand:
        told.say(f"a daemon without a unit: process {owner.pid}" + (f", since {owner.since}" if owner.since else ""))
    told.document.update({"units": shown or None, "socket": path, "waits": waits, "health": health})
    tell_of_logout(told)
    return codes.OK if waits or health is not None else codes.UNREACHABLE


def _how(show: Mapping[str, str], *, answers: bool) -> str:
    """A unit in a line. What the daemon told systemd last is some seconds old, and left out where it `answers`."""
    if show.get("LoadState") == "not-found":
        return "not installed (`allocctl service install`)"
    words = [f"{show.get('ActiveState')} ({show.get('SubState')})"]
    words += [text for text in (show.get("UnitFileState"),) if text not in (None, "", "indirect")]
    words += [f"process {show['MainPID']}"] if show.get("MainPID", "0") != "0" else []
    if show.get("Result", "success") != "success":
        words.append(f"result {show['Result']}: `journalctl --user -u allocd` tells why")
    if show.get("Result") in GIVEN_UP:
        words.append("once that is put right, `allocctl service install` has it tried again")
    often = {"0": "", "1": "restarted once"}.get(show.get("NRestarts", "0"), f"restarted {show.get('NRestarts')} times")
    words += [often] if often else []
    words += [f'"{show["StatusText"]}"'] if show.get("StatusText") and not answers else []
    return ", ".join(words)


def _health(path: str) -> tuple[dict[str, Any] | None, str]:
    """How who answers is, and a sentence: about that, or why nobody does."""
    try:
        health = ask(path, "GET", "/v1/health", limit=LOOK_LIMIT)
    except (NobodyAnswers, Refused) as error:
        return None, str(error)
    counts = health.get("allocations") or {}
    held = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no allocations"
    text = f"allocd {health.get('version')}, process {health.get('pid')}, since {health.get('since')}: {held}"
    return health, text


# --- stop, reload -----------------------------------------------------------------------------------------------------


def _by_hand() -> list[Owner]:
    """The daemons that run on this host in no unit: the one that holds the state that is meant here, and the one that
    answers here, for that may have been started with other variables, or its state may be gone."""
    manager = user_manager()
    unit = "0" if manager is None else manager.show(units.SERVICE).get("MainPID", "0")
    found = [owner for owner in owners(os.environ) if owner.alive]
    systemds = manager is not None and manager.active(units.SOCKET)  # it listens, whoever answers
    peer = None if systemds else listener(socket_path(os.environ))
    if peer is not None and peer.pid not in (0, *(owner.pid for owner in found)):  # 0: of another container
        found.append(Owner(socket.gethostname(), boot_id(), peer.pid, process_start(peer.pid) or 0, ""))
    return [owner for owner in found if str(owner.pid) != unit]


def _stop(args: argparse.Namespace, told: Told) -> int:
    manager, by_hand = user_manager(), _by_hand()
    in_unit = manager is not None and manager.active(units.SERVICE)
    for owner in filter(_suspended, by_hand):
        who = f"the daemon, process {owner.pid}, is suspended (SIGSTOP, or ^Z) and cannot end in order"
        raise Failed(f"{who}: `kill -CONT {owner.pid}` lets it go on", codes.UNREACHABLE)
    if args.with_runs:
        answers = in_unit or by_hand or (manager is not None and manager.active(units.SOCKET))
        _end_engines(args.limit, told, _end_runs(args.limit, told) if answers else set())
    if manager is not None and (in_unit or manager.active(units.SOCKET)):
        manager.do("stop", *units.UNITS)
        again = "`systemctl --user start allocd.socket` lets it wait again, and so does your next login"
        told.say(f"the daemon {'was stopped' if in_unit else 'did not run'}, and nothing waits for it: {again}")
    for owner in by_hand:
        _end(owner)
        told.say(f"the daemon, process {owner.pid}, was stopped")
    if not told.sentences:
        told.say(with_hosts("no daemon runs here"))
    told.document.update({"stopped": in_unit or bool(by_hand)})
    return codes.OK


def _end_runs(limit: float, told: Told) -> set[str]:
    """Have the engines of adopted allocations that the daemon holds end, and wait for that: their keys. Raises Failed,
    NobodyAnswers, Refused."""
    path, deadline = socket_path(os.environ), time.monotonic() + limit
    asked: set[str] = set()
    while alive := [each["key"] for each in _adopted(path)]:
        for key in alive:
            if key not in asked:
                asked.add(key)
                ask(path, "POST", f"/v1/allocations/{key}/stop", {"how": "stop"}, NEW_LIMIT)
                told.say(f"{key}: asked to end")
        if time.monotonic() > deadline:
            raise Failed(
                f"still running after {limit:g} s: {', '.join(alive)}: the daemon was not stopped", codes.DEADLINE
            )
        time.sleep(PAUSE)
    return asked


def _end_engines(limit: float, told: Told, held: Collection[str]) -> None:
    """The same of those that no daemon is asked for: none runs, or they were started while none did. `held`: what has
    been ended already. Raises Failed."""
    from supervisor.service.adopting import stop

    asked, deadline = engines(held), time.monotonic() + limit
    for run_id, where in asked.items():
        stop(*where)
        told.say(f"{run_id}: asked to end")
    while alive := sorted(engines(held).keys() & asked.keys()):
        if time.monotonic() > deadline:
            raise Failed(f"still running after {limit:g} s: {', '.join(alive)}", codes.DEADLINE)
        time.sleep(PAUSE)
    told.document["ended"] = sorted({*held, *asked})


def _adopted(path: str) -> Iterator[dict[str, Any]]:
    """Adopted allocations that have not ended."""
    after: str | None = ""
    while after is not None:
        page = ask(path, "GET", f"/v1/allocations?limit={PAGE}" + (f"&after={after}" if after else ""))
        adopted = (each for each in page["allocations"] if each["kind"] == "adopted")
        yield from (each for each in adopted if each["state"] not in ("damaged", "ended"))
        after = page["next"]


def _end(owner: Owner) -> None:
    """End a daemon that is nobody's unit, and wait for it. Raises Failed, OSError."""
    if not _signal(owner, signal.SIGTERM, END_LIMIT):
        raise Failed(f"the daemon, process {owner.pid}, has not ended within {END_LIMIT:g} s", codes.DEADLINE)


def _suspended(owner: Owner) -> bool:
    try:
        with open(f"/proc/{owner.pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"T"]
    except OSError:
        return False


def _signal(owner: Owner, number: signal.Signals, limit: float = 0.0) -> bool:
    """To that process, not to one that has its number now. Returns whether it ends within a limit. Raises OSError."""
    try:
        descriptor = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return True
    try:
        with suppress(ProcessLookupError):
            if owner.alive:
                signal.pidfd_send_signal(descriptor, number)
        ended, _, _ = select.select([descriptor], [], [], limit)
        return bool(ended)
    finally:
        os.close(descriptor)


def _reload(args: argparse.Namespace, told: Told) -> int:
    manager, by_hand = user_manager(), _by_hand()
    if manager is not None and manager.active(units.SERVICE):
        manager.do("reload", units.SERVICE)
        told.say("the daemon reads its settings again: `journalctl --user -u allocd` tells what came of it")
    for owner in by_hand:
        _signal(owner, signal.SIGHUP)
        told.say(f"the daemon, process {owner.pid}, reads its settings again: its log tells what came of it")
    if not told.sentences:
        raise Failed(with_hosts("no daemon runs here: it reads its settings when it starts"), codes.UNREACHABLE)
    return codes.OK


_ACTIONS: Final = {
    "install": install,
    "uninstall": uninstall,
    "status": _status,
    "stop": _stop,
    "reload": _reload,
}
