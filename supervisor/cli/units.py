"""allocd's systemd units, as files of the user: what `allocctl service` writes, recognizes and removes.

The texts are those in deploy/; what is put into them is the path of this installation's allocd and a few variables.
The first line of a file that was written here holds the checksum of the others: a file whose checksum is right is ours,
as we left it, and may be replaced or removed. Any other was written or changed by somebody, and is not touched unless
that is asked for.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

SOCKET: Final = "allocd.socket"
SERVICE: Final = "allocd.service"
UNITS: Final = (SOCKET, SERVICE)
KEPT: Final = ("PATH", "SLURM_CONF", "XDG_STATE_HOME")
"""Variables of whoever installs that the daemon needs as well, and that a user manager does not have: where Slurm's
commands are, which cluster they ask, and where runs are registered."""
WANTS: Final = f"sockets.target.wants/{SOCKET}"  # the link by which `enable` makes the socket start with the manager

_MARK: Final = "# Written by `allocctl service install`, sha256 of what follows: "

Found = Literal["absent", "ours", "foreign"]


def directory(environ: Mapping[str, str]) -> str:
    """Where a user's own units are."""
    base = environ.get("XDG_CONFIG_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return os.path.join(base, "systemd", "user")


def daemon() -> list[str]:
    """The command that starts this installation's allocd."""
    program = os.path.join(sysconfig.get_path("scripts"), "allocd")
    if os.access(program, os.X_OK):
        return [program]
    return [os.path.abspath(sys.executable), "-P", "-m", "supervisor.service.main"]


def text_of(unit: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """A unit's file. `environ`: variables of which those in KEPT are put into it. Raises ValueError for a value that no
    unit can hold."""
    lines = []
    for line in _template(unit).splitlines(keepends=True):
        if line.startswith("ExecStart="):
            line = f"ExecStart={' '.join(_quoted(word, '$') for word in command)}\n"
            values = (f"{name}={environ[name]}" for name in KEPT if environ.get(name))
            line += "".join(f"Environment={_quoted(value)}\n" for value in values)
        lines.append(line)
    text = "".join(lines)
    return f"{_MARK}{_sum(text)}\n{text}"


def found(path: str, expected: str) -> Found | Literal["same"]:
    """What is at a path. Raises OSError."""
    try:
        if os.path.islink(path):  # a mask (to /dev/null), or a file that is kept elsewhere
            return "foreign"
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read()
    except FileNotFoundError:
        return "absent"
    if text == expected:
        return "same"
    first, _, rest = text.partition("\n")
    return "ours" if first == _MARK + _sum(rest) else "foreign"


def write(path: str, text: str) -> None:
    """Put a file there, whole. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.new"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def set_aside(path: str) -> str:
    """Give somebody's file another name, at which systemd does not look. Returns it. Raises OSError."""
    for name in _names(path):
        with suppress(FileExistsError):
            os.link(path, name, follow_symlinks=False)
            os.unlink(path)
            return name
    raise AssertionError("unreachable: there is always another name")


def _names(path: str) -> Iterable[str]:
    number = 1
    while True:
        yield f"{path}.before-{number}"
        number += 1


def _template(unit: str) -> str:
    """The text in deploy/: beside the package in a checkout, inside it when it was installed as a wheel."""
    package = Path(__file__).parents[1]
    places = [package / "deploy" / unit, package.parent / "deploy" / unit]
    return next(filter(Path.exists, places), places[0]).read_text(encoding="utf-8")


def _quoted(word: str, special: str = "") -> str:
    """A word as systemd reads it in a unit: `%` begins a specifier everywhere, `$` (as `special`) a variable in command
    lines. Raises ValueError."""
    if not word.isprintable():
        raise ValueError(f"{word!r} has control characters, and a systemd unit cannot hold them")
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    for character in special:
        word = word.replace(character, 2 * character)
    return f'"{word}"'


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
