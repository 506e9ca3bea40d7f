"""Starting a program that is to live on when we end, and when our user logs out.

With a user manager of systemd it gets a transient unit of its own, `systemd-run --user`: killing or restarting the
daemon's unit does not touch it, and `systemctl --user status` shows it. Without one it gets a session of its own
(setsid, and a fork more, so that it is nobody's child).

systemd signals and kills the engine alone (KillMode=process). Its sruns are not systemd's to end: SIGTERM to srun kills
its rank without a word, and where the sruns of a dead engine were killed with it (KillMode=mixed), in 2 of 25 trials
slurmstepd did not notice, and an agent went on for ever. Left alone they see the end of their standard input, tell it
to their agents, and all is over in a tenth of a second (25 of 25).

Where systemd runs the host, it ends a user's manager, and what may be left of the session, when the user logs out of
his last session, unless lingering is on for him (`loginctl enable-linger`): see `ends_at_logout`.

The environment goes to the unit by name (`--setenv=NAME`): values may be secrets, and command lines can be read by
everybody. systemd takes no variables with strange names (a shell's exported functions) or control characters in them;
those are left out. It expands `$` in a unit's command line, hence `$$`.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

BOOTED: Final = "/run/systemd/system"  # sd_booted(3)
LINGER: Final = "/var/lib/systemd/linger"
LIMIT: Final = 10.0  # seconds for each call
UNIT: Final = "ALLOCD_UNIT"  # tells the program its unit's name

_DETACH: Final = "import os, sys\nif os.fork() == 0:\n    os.execv(sys.argv[1], sys.argv[1:])\n"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class NotSpawned(Exception):
    """The program could not be started; the message says why."""


def ends_at_logout() -> str | None:
    """Why what is started here ends when the user logs out, and how to change that; None where it lives on."""
    if not os.path.isdir(BOOTED):
        return None
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a directory service that is away
        user = str(os.getuid())
    if os.path.exists(os.path.join(LINGER, user)):
        return None
    return (
        f"lingering is off for {user}: systemd would end the engine, and all ranks with it, at the end of your last "
        "session here: turn it on with `loginctl enable-linger` (some sites allow that to administrators only)"
    )


def manager_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The environment in which systemctl and systemd-run reach the user manager; None when there is none."""
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    reached = os.path.exists(os.path.join(runtime, "systemd", "private"))
    if not reached or shutil.which("systemd-run", path=environ.get("PATH")) is None:
        return None
    return {**environ, "XDG_RUNTIME_DIR": runtime}


def spawn(argv: Sequence[str], *, unit: str, log: str, cwd: str, environ: Mapping[str, str], stop_limit: float) -> str:
    """Start a program (`argv[0]` is a path) with its output to a file, which is appended to. Returns its unit's name,
    "" when it has none. `stop_limit`: seconds from the request to stop its unit until it is killed. Blocks. Raises
    NotSpawned."""
    manager = manager_environment(environ)
    if manager is not None:
        command = [*_unit_options(unit, log, cwd, manager, stop_limit), *(word.replace("$", "$$") for word in argv)]
        try:
            _run(command, manager, "/", None)
        except NotSpawned as error:
            if "connect to bus" not in str(error):  # a manager that is not there after all
                raise
        else:
            return unit
    mine = {name: text for name, text in environ.items() if name != UNIT}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        _run([sys.executable, "-I", "-S", "-c", _DETACH, *argv], mine, cwd, descriptor)
    finally:
        os.close(descriptor)
    return ""


def _unit_options(unit: str, log: str, cwd: str, environ: Mapping[str, str], stop_limit: float) -> list[str]:
    names = (name for name, text in environ.items() if _NAME.fullmatch(name) and not _CONTROL.search(text))
    return [
        "systemd-run",
        "--user",
        "--quiet",
        "--collect",
        "--no-ask-password",
        f"--unit={unit}",
        "--service-type=exec",  # an engine that cannot be executed is an error here
        f"--working-directory={cwd}",
        "--property=KillMode=process",  # see the top
        f"--property=TimeoutStopSec={stop_limit:.0f}",
        f"--property=StandardOutput=append:{log}",
        f"--property=StandardError=append:{log}",
        *(f"--setenv={name}" for name in names),
        f"--setenv={UNIT}={unit}",
        "--",
    ]


def _run(argv: Sequence[str], environ: Mapping[str, str], cwd: str, output: int | None) -> None:
    """Run a command that ends at once. Raises NotSpawned with its last words."""
    try:
        done = subprocess.run(
            argv,
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotSpawned(f"{argv[0]} did not end within {LIMIT:g} s") from None
    except OSError as error:
        raise NotSpawned(f"{error.filename or argv[0]}: {error.strerror or error}") from error
    if done.returncode:
        words = (done.stdout or b"").decode(errors="replace").strip().splitlines() or ["no message"]
        raise NotSpawned(f"{argv[0]} ended with {done.returncode}: {words[-1]}")
