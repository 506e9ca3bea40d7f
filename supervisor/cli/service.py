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
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.cli import units
from supervisor.cli.arguments import seconds
from supervisor.cli.asking import NobodyAnswers, Refused, ask, listener, socket_path
from supervisor.cli.daemon import with_hosts
from supervisor.cli.output import refuse, sentence, tell
from supervisor.core import codes
from supervisor.service.place import Owner, owners
from supervisor.service.spawn import ends_at_logout, manager_environment

SYSTEMD_LIMIT: Final = 150.0  # seconds for systemctl: a stop may take the units' TimeoutStopSec
END_LIMIT: Final = 60.0  # seconds for a daemon without a unit to end
PAUSE: Final = 0.5  # seconds between looks at runs that end
PAGE: Final = 1000  # allocations asked for at once
GIVEN_UP: Final = ("start-limit-hit", "service-start-limit-hit", "trigger-limit-hit")
"""How a unit has ended that nothing but a person starts again."""

NO_MANAGER: Final = (
    "there is no user manager of systemd here (no $XDG_RUNTIME_DIR/systemd/private): log in by ssh rather than su, or "
    "run `allocd` by hand: in the foreground, or `setsid allocd </dev/null >>allocd.log 2>&1 &`"
)


class Failed(Exception):
    """What could not be done, with the exit code."""

    def __init__(self, text: str, code: int = codes.FAILED) -> None:
        super().__init__(text)
        self.code = code


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


@dataclass
class Told:
    """What an action has to say: a sentence a line as it comes, or one document at the end."""

    as_json: bool
    document: dict[str, Any] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Something that was done, or should be known."""
        self.sentences.append(text)
        if not self.as_json:
            tell(text)

    def print(self) -> None:
        """The document."""
        if self.as_json:
            tell(json.dumps({"schema_version": 1, **self.document, "told": self.sentences}, ensure_ascii=False))


class Manager:
    """systemctl --user."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Whatever comes of it. Raises Failed when it does not end."""
        command = ["systemctl", "--user", "--no-pager", "--no-ask-password", *words]
        try:
            return subprocess.run(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SYSTEMD_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"`{' '.join(command)}` did not end within {SYSTEMD_LIMIT:g} s", codes.DEADLINE) from None

    def do(self, *words: str) -> None:
        """Raises Failed with systemd's words."""
        done = self.call(*words)
        if done.returncode:
            raise Failed(f"`systemctl --user {' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")

    def show(self, unit: str) -> dict[str, str]:
        """Some properties of a unit, also of one that there is not."""
        keys = "LoadState,ActiveState,SubState,UnitFileState,FragmentPath,MainPID,StatusText,Result,NRestarts"
        lines = self.call("show", f"--property={keys}", unit).stdout.splitlines()
        return {key: value for key, _, value in (line.partition("=") for line in lines)}

    def active(self, unit: str) -> bool:
        """Whether it runs, or is about to."""
        return self.show(unit).get("ActiveState") in ("active", "activating", "reloading")


def _manager() -> Manager | None:
    environ = manager_environment(os.environ)
    return None if environ is None else Manager(environ)


def _there() -> Manager:
    manager = _manager()
    if manager is None:
        raise Failed(NO_MANAGER, codes.UNREACHABLE)
    return manager


# --- install, uninstall -----------------------------------------------------------------------------------------------


def _install(args: argparse.Namespace, told: Told) -> int:
    manager, where = _there(), units.directory(os.environ)
    if not manager.active(units.SOCKET) and (peer := listener(socket_path(os.environ))) is not None:
        # systemd would put its own socket in the place of one that is being served
        raise Failed(
            f"process {peer.pid} answers on {socket_path(os.environ)} already, and is no service: `allocctl service "
            "stop` ends it, and its engines go on",
            codes.UNREACHABLE,
        )
    changed = _write(where, _texts(), args.force, told)
    manager.do("daemon-reload")
    _check_place(manager, where)
    manager.call("reset-failed", *units.UNITS)  # fails where there is nothing to forget
    ran = manager.active(units.SERVICE)
    if changed and (ran or manager.active(units.SOCKET)):
        manager.do("stop", *units.UNITS)
    manager.do("enable", "--now", units.SOCKET)
    if changed and ran:
        manager.do("start", units.SERVICE)
        told.say("the daemon was started again; engines were left alone")
    told.say(f"allocd waits on {socket_path(os.environ)} and starts when somebody connects")
    told.document.update({"units": where, "changed": changed, "socket": socket_path(os.environ)})
    if shutil.which("squeue") is None:
        told.say(
            "Slurm's commands are not on your PATH, which the daemon was given: put them there (`module load ...`) and "
            "install once more"
        )
    _tell_of_logout(told)
    return codes.OK


def _texts() -> dict[str, str]:
    try:
        return {unit: units.text_of(unit, units.daemon(), os.environ) for unit in units.UNITS}
    except ValueError as error:
        raise Failed(str(error), codes.CONFIG) from None


def _write(where: str, texts: Mapping[str, str], force: bool, told: Told) -> list[str]:
    """Write what is not there as it should be. Returns the paths. Nothing is written when something may not be."""
    paths = {os.path.join(where, unit): text for unit, text in texts.items()}
    states = {path: units.found(path, text) for path, text in paths.items()}
    _settle_foreign([path for path, state in states.items() if state == "foreign"], force, told)
    changed = [path for path, state in states.items() if state != "same"]
    for path in changed:
        units.write(path, paths[path])
        told.say(f"{'replaced' if states[path] == 'ours' else 'wrote'} {path}")
    return changed


def _settle_foreign(paths: list[str], force: bool, told: Told) -> None:
    """Set files of others aside. Raises Failed when that was not asked for."""
    if paths and not force:
        raise Failed(
            f"{' and '.join(paths)}: not as `allocctl service install` left it: nothing was changed. Keep changes of "
            "your own in a drop-in (`systemctl --user edit allocd.service`), or say --force to set the file aside",
            codes.CONFIG,
        )
    for path in paths:
        told.say(f"{path} was somebody else's, and is now {units.set_aside(path)}")


def _check_place(manager: Manager, where: str) -> None:
    """That the manager reads the files that were written."""
    for unit in units.UNITS:
        shown = manager.show(unit)
        if shown.get("LoadState") == "masked":
            raise Failed(f"{unit} is masked: `systemctl --user unmask {unit}`", codes.CONFIG)
        path = shown.get("FragmentPath", "")
        if os.path.realpath(path) != os.path.realpath(os.path.join(where, unit)):
            raise Failed(
                f"{where}/{unit} was written, and the user manager reads {path or 'none'}: its XDG_CONFIG_HOME is "
                "another one than yours: unset yours, or `systemctl --user import-environment XDG_CONFIG_HOME`",
                codes.CONFIG,
            )


def _tell_of_logout(told: Told) -> None:
    ends = ends_at_logout() is not None
    told.document["ends_at_logout"] = ends
    if ends:
        told.say(
            "lingering is off for you: systemd ends allocd, and the engines of adopted allocations with their ranks, "
            "at the end of your last session on this host; jobs that were submitted go on by themselves, and allocd "
            "finds them again when it runs again. `loginctl enable-linger` turns it on (at some sites: administrators)"
        )


def _uninstall(args: argparse.Namespace, told: Told) -> int:
    manager, where = _manager(), units.directory(os.environ)
    paths = [os.path.join(where, unit) for unit in units.UNITS]
    states = {path: units.found(path, "") for path in paths}
    _settle_foreign([path for path, state in states.items() if state == "foreign"], args.force, told)
    if manager is not None and any(manager.show(unit).get("LoadState") != "not-found" for unit in units.UNITS):
        manager.do("stop", *units.UNITS)
        manager.call("reset-failed", *units.UNITS)
    removed = []
    for path in (os.path.join(where, units.WANTS), *paths):
        with suppress(FileNotFoundError):
            os.unlink(path)
            removed.append(path)
            told.say(f"removed {path}")
    with suppress(OSError):
        os.rmdir(os.path.join(where, os.path.dirname(units.WANTS)))  # when nothing else is in it
    if manager is not None:
        manager.do("daemon-reload")
    told.say("what allocd knows of its allocations stays" if removed else "nothing was installed")
    told.document.update({"removed": removed})
    return codes.OK


# --- status -----------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace, told: Told) -> int:
    manager, path, by_hand = _manager(), socket_path(os.environ), _by_hand()
    shown = {} if manager is None else {unit: manager.show(unit) for unit in units.UNITS}
    states = {unit: show.get("ActiveState", "unknown") for unit, show in shown.items()}
    for unit, show in shown.items():
        told.say(f"{unit}: {_how(show)}")
    if manager is None:
        told.say(NO_MANAGER)
    waits = states.get(units.SOCKET) == "active" and states[units.SERVICE] in ("inactive", "failed")
    health = None
    if waits:
        told.say(f"{path}: systemd starts the daemon for the first who connects")
    else:
        health = _health(path, told)
    for owner in owners(os.environ):
        if owner.alive is None:
            told.say(f"another daemon of yours is on {owner.host}, since {owner.since}: ask that one there")
    if by_hand is not None:
        told.say(f"a daemon without a unit: process {by_hand.pid}, since {by_hand.since}")
    told.document.update({"units": shown or None, "socket": path, "waits": waits, "health": health})
    _tell_of_logout(told)
    return codes.OK if waits or health is not None else codes.UNREACHABLE


def _how(show: Mapping[str, str]) -> str:
    if show.get("LoadState") == "not-found":
        return "not installed (`allocctl service install`)"
    words = [f"{show.get('ActiveState')} ({show.get('SubState')})"]
    words += [text for text in (show.get("UnitFileState"),) if text not in (None, "", "indirect")]
    words += [f"process {show['MainPID']}"] if show.get("MainPID", "0") != "0" else []
    if show.get("Result", "success") != "success":
        words.append(f"result {show['Result']}: `journalctl --user -u allocd` tells why")
    if show.get("Result") in GIVEN_UP:
        words.append("once that is put right, `allocctl service install` has it tried again")
    words += [f"restarted {show['NRestarts']} times"] if show.get("NRestarts", "0") != "0" else []
    words += [f'"{show["StatusText"]}"'] if show.get("StatusText") else []
    return ", ".join(words)


def _health(path: str, told: Told) -> Any:
    try:
        health = ask(path, "GET", "/v1/health")
    except (NobodyAnswers, Refused) as error:
        told.say(str(error))
        return None
    counts = health.get("allocations") or {}
    held = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    told.say(f"allocd {health.get('version')}, process {health.get('pid')}, since {health.get('since')}: {held}")
    for text in health.get("wrong") or ():
        told.say(f"wrong: {text}")
    return health


# --- stop, reload -----------------------------------------------------------------------------------------------------


def _by_hand() -> Owner | None:
    """The daemon that runs on this host in no unit."""
    manager = _manager()
    unit = "0" if manager is None else manager.show(units.SERVICE).get("MainPID", "0")
    return next((owner for owner in owners(os.environ) if owner.alive and str(owner.pid) != unit), None)


def _stop(args: argparse.Namespace, told: Told) -> int:
    manager, by_hand = _manager(), _by_hand()
    in_unit = manager is not None and manager.active(units.SERVICE)
    if args.with_runs and (in_unit or by_hand):
        _end_runs(args.limit, told)
    if manager is not None and (in_unit or manager.active(units.SOCKET)):
        manager.do("stop", *units.UNITS)
        again = "`systemctl --user start allocd.socket` lets it wait again, and so does your next login"
        told.say(f"the daemon {'was stopped' if in_unit else 'did not run'}, and nothing waits for it: {again}")
    if by_hand is not None:
        _end(by_hand)
        told.say(f"the daemon, process {by_hand.pid}, was stopped")
    if not told.sentences:
        told.say(with_hosts("no daemon runs here"))
    told.document.update({"stopped": in_unit or by_hand is not None})
    return codes.OK


def _end_runs(limit: float, told: Told) -> None:
    """Have the engines of adopted allocations end, and wait for that. Raises Failed, NobodyAnswers, Refused."""
    path, deadline = socket_path(os.environ), time.monotonic() + limit
    asked: set[str] = set()
    while alive := [each["key"] for each in _adopted(path)]:
        for key in alive:
            if key not in asked:
                asked.add(key)
                ask(path, "POST", f"/v1/allocations/{key}/stop", {"how": "stop"})
                told.say(f"{key}: asked to end")
        if time.monotonic() > deadline:
            raise Failed(
                f"still running after {limit:g} s: {', '.join(alive)}: the daemon was not stopped", codes.DEADLINE
            )
        time.sleep(PAUSE)
    told.document["ended"] = sorted(asked)


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
    manager, by_hand = _manager(), _by_hand()
    if manager is not None and manager.active(units.SERVICE):
        manager.do("reload", units.SERVICE)
        told.say("the daemon reads its settings again: `journalctl --user -u allocd` tells what came of it")
    elif by_hand is not None:
        _signal(by_hand, signal.SIGHUP)
        told.say(f"the daemon, process {by_hand.pid}, reads its settings again: its log tells what came of it")
    else:
        raise Failed(with_hosts("no daemon runs here: it reads its settings when it starts"), codes.UNREACHABLE)
    return codes.OK


_ACTIONS: Final = {
    "install": _install,
    "uninstall": _uninstall,
    "status": _status,
    "stop": _stop,
    "reload": _reload,
}
