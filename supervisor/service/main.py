"""`allocd`: the daemon that holds every allocation. People talk to it with allocctl.

    allocd                       runs in the foreground until SIGTERM or SIGINT; engines and jobs go on without it
    allocd --limit 20            a setting: `settings.py` has all of them

Exit codes: 0 told to end; 78 a setting, the state directory, the socket's directory or the machine is not fit; 69
another one answers here, or holds the state, already (systemd does not start it again by itself after these two); 1
what is in its way may go by itself, like a full disk; 125 a fault of its own. Why it does not start is told on stderr,
to systemd (`allocctl service status` shows it), and to those whose connections have had it started.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn

from supervisor import __version__
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.service.notify import Notifier
    from supervisor.service.settings import Settings


class CannotStart(Exception):
    """Why it does not start, with the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class _Parser(argparse.ArgumentParser):
    """A flag is a setting, and a wrong one is told as such, not by argparse's exit."""

    def error(self, message: str) -> NoReturn:
        """Raises CannotStart."""
        raise CannotStart(f"{message} (`allocd --help` tells what there is)", codes.CONFIG)


def main(words: Sequence[str] | None = None) -> int:
    """Run the daemon. Returns its exit code."""
    if not sys.platform.startswith("linux"):
        sys.stderr.write("allocd: allocd runs on Linux only\n")
        return codes.CONFIG
    from supervisor.service.notify import Notifier
    from supervisor.service.refusing import refuse
    from supervisor.service.settings import Settings, SettingsErrors, add_flags, read_settings

    parser = _Parser(prog="allocd", description="Holds Slurm allocations; allocctl talks to it.")
    parser.add_argument("--version", action="version", version=f"allocd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings (default: $XDG_CONFIG_HOME/allocd/allocd.toml)")
    add_flags(parser)
    notifier = Notifier(os.environ)
    try:
        args = parser.parse_args(words)
        flags = {item.name: getattr(args, item.name) for item in fields(Settings)}
        config = args.config and _from_root(args.config)

        def read() -> Settings:
            return read_settings(os.environ, flags, config)

        settings = read()
        os.chdir("/")  # where it was started may be removed, or be a file system that is to be unmounted
        if other := _other_owner():
            text = f"the package `supervisor` here is also that of {other}: install allocd in an environment of its own"
            raise CannotStart(text, codes.CONFIG)
        return _run(settings, read, notifier)
    except SettingsErrors as error:
        return refuse(str(error), codes.CONFIG, notifier, os.environ)
    except CannotStart as error:
        return refuse(str(error), error.code, notifier, os.environ)


def _run(settings: Settings, read: Callable[[], Settings], notifier: Notifier) -> int:
    """Run it with these settings. Raises CannotStart."""
    from supervisor.launch.process import use_pidfd_watcher
    from supervisor.runs.outcomes import leave_workspace
    from supervisor.service import place, sockets
    from supervisor.service.daemon import Daemon
    from supervisor.service.log import Libraries, Outlet, make_log

    leave_workspace()
    faulthandler.enable()  # systemd's watchdog ends a loop that hangs by SIGABRT: where it hung is told
    outlet = Outlet(sys.stderr.fileno())
    log = make_log(settings, outlet, os.environ)
    outlet.lost = lambda count: log.warning("log", text=f"{count} lines could not be written")
    logging.getLogger().addHandler(Libraries(log))

    async def run() -> int:
        use_pidfd_watcher()
        return await Daemon(settings, read, notifier, os.environ, log).run()

    try:
        return asyncio.run(run())
    except (place.Unusable, sockets.Unusable) as error:
        raise CannotStart(str(error), error.code) from None
    except OSError as error:
        unusable = place.unusable(error, str(error.filename or "the state directory"))
        raise CannotStart(str(unusable), unusable.code) from None
    except BaseExceptionGroup:
        log.critical("fault", exc_info=True)
        return codes.FAULT
    finally:
        outlet.close()


def _from_root(path: str) -> str:
    """Raises CannotStart."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise CannotStart(f"{path}: the working directory is gone: change to one that is there", codes.CONFIG) from None


def _other_owner() -> str:
    """Another distribution that has put files into the package `supervisor`; "" when it is ours alone."""
    from importlib.metadata import packages_distributions

    owners = packages_distributions().get("supervisor", [])
    return next((owner for owner in owners if owner != "allocd"), "")


if __name__ == "__main__":
    sys.exit(main())
