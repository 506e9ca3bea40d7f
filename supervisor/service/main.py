"""`allocd`: the daemon that holds every allocation. People talk to it with allocctl.

    allocd                       runs in the foreground until SIGTERM or SIGINT; engines and jobs go on without it
    allocd --limit 20            a setting: `settings.py` has all of them

Exit codes: 0 told to end; 78 a setting, the state directory, the socket's directory or the machine is not fit (systemd
does not start it again); 69 another one answers here already; 125 a fault of its own.
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
from typing import TYPE_CHECKING

from supervisor import __version__
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.service.settings import Settings


def main(words: Sequence[str] | None = None) -> int:
    """Run the daemon. Returns its exit code."""
    if not sys.platform.startswith("linux"):
        return _refuse("allocd runs on Linux only", codes.CONFIG)
    from supervisor.service.settings import Settings, SettingsErrors, add_flags, read_settings

    parser = argparse.ArgumentParser(prog="allocd", description="Holds Slurm allocations; allocctl talks to it.")
    parser.add_argument("--version", action="version", version=f"allocd {__version__}")
    parser.add_argument("--config", metavar="FILE", help="settings (default: $XDG_CONFIG_HOME/allocd/allocd.toml)")
    add_flags(parser)
    args = parser.parse_args(words)
    flags = {item.name: getattr(args, item.name) for item in fields(Settings)}

    def read() -> Settings:
        return read_settings(os.environ, flags, args.config)

    try:
        settings = read()
    except SettingsErrors as error:
        return _refuse(str(error), codes.CONFIG)
    if other := _other_owner():
        return _refuse(
            f"the package `supervisor` here is also that of {other}: install allocd in an environment of its own",
            codes.CONFIG,
        )
    return _run(settings, read)


def _run(settings: Settings, read: Callable[[], Settings]) -> int:
    """Run it with these settings."""
    from supervisor.launch.process import use_pidfd_watcher
    from supervisor.runs.outcomes import leave_workspace
    from supervisor.service import place, sockets
    from supervisor.service.daemon import Daemon
    from supervisor.service.log import Libraries, make_log

    leave_workspace()
    faulthandler.enable()  # systemd's watchdog ends a loop that hangs by SIGABRT: where it hung is told
    log = make_log(settings, sys.stderr, os.environ)
    logging.getLogger().addHandler(Libraries(log))

    async def run() -> int:
        use_pidfd_watcher()
        return await Daemon(settings, read, os.environ, log).run()

    try:
        return asyncio.run(run())
    except place.Unusable as error:
        return _refuse(str(error), codes.CONFIG)
    except sockets.Unusable as error:
        return _refuse(str(error), error.code)
    except OSError as error:
        return _refuse(f"{error.filename or 'allocd'}: {error.strerror or error}", codes.CONFIG)
    except BaseExceptionGroup:
        log.critical("fault", exc_info=True)
        return codes.FAULT


def _other_owner() -> str:
    """Another distribution that has put files into the package `supervisor`; "" when it is ours alone."""
    from importlib.metadata import packages_distributions

    owners = packages_distributions().get("supervisor", [])
    return next((owner for owner in owners if owner != "allocd"), "")


def _refuse(text: str, code: int) -> int:
    for line in text.splitlines():
        sys.stderr.write(f"allocd: {line}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
