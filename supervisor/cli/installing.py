"""`allocctl service install` and `uninstall`: the units are written, and removed again, and nobody else's."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress

from supervisor.cli import units
from supervisor.cli.asking import listener, socket_path
from supervisor.cli.manager import Failed, Manager, Told, engines, manager_there, tell_of_logout, user_manager
from supervisor.core import codes


def install(args: argparse.Namespace, told: Told) -> int:
    manager, where = manager_there(), units.directory(os.environ)
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
    tell_of_logout(told)
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


def uninstall(args: argparse.Namespace, told: Told) -> int:
    manager, where = user_manager(), units.directory(os.environ)
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
    if going_on := sorted(engines()):
        told.say(f"engines of adopted allocations go on: {', '.join(going_on)}: `allocctl stop RUN` ends one")
    told.document.update({"removed": removed, "going_on": going_on})
    return codes.OK
