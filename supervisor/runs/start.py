"""The start of an engine by somebody who may die meanwhile: at most one engine a start, and nobody forgets it.

Whoever starts an engine that is to outlive him gives it a directory of its own, by name in ALLOCD_START:

    plan.toml    the plan as it is to be run, until no engine will read it any more
    engine.log   what the engine says, from its first word on
    claim        made and locked by the engine before it does anything; the kernel gives the lock back at its end. It
                 names the process and its host: on a file system that hosts share, the lock shows on all of them
    run          a symbolic link to the run directory, made when the run is opened

So a look at the directory tells what became of the start, whoever looks and whenever: nothing yet (starting once more
is harmless, since the second engine finds the claim and leaves), an engine that is on its way, a run, or an engine that
ended before it had one, whose log says why. A start that nobody wants any more is *withdrawn*: claimed for nobody. Then
no engine ever runs for it; where one has the claim already, it is too late for that.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from typing import Final, Literal, NamedTuple

VARIABLE: Final = "ALLOCD_START"
PLAN: Final = "plan.toml"
LOG: Final = "engine.log"
CLAIM: Final = "claim"
RUN: Final = "run"
NOBODY: Final = b"nobody\n"  # what the claim of a withdrawn start says, in the place of an engine's process

Progress = Literal["nothing", "claimed", "run", "failed", "withdrawn"]


class Engine(NamedTuple):
    """Who has claimed a start: a process, on its host."""

    pid: int
    host: str

    @property
    def here(self) -> bool:
        """Whether it is on this host: elsewhere its number is nobody's, or another's."""
        return self.host == socket.gethostname()


class Claimed(Exception):
    """Another engine was started for this before."""


def claim(directory: str) -> int:
    """Claim a start for this process: the descriptor is to stay open until it ends. Raises Claimed, OSError."""
    return _claim(directory, f"{os.getpid()} {socket.gethostname()}\n".encode())


def withdraw(directory: str) -> Progress:
    """Withdraw a start, unless an engine has it: what became of it then. Raises OSError."""
    with suppress(Claimed):
        os.close(_claim(directory, NOBODY))
    return progress(directory)


def _claim(directory: str, owner: bytes) -> int:
    path = os.path.join(directory, CLAIM)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_size:
            raise BlockingIOError
        os.write(descriptor, owner)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise Claimed(f"{path}: an engine was started for this before: it is left to that one") from None
        raise
    return descriptor


def announce(directory: str, run_dir: str) -> None:
    """Tell where the run is. Raises OSError."""
    os.symlink(run_dir, os.path.join(directory, RUN))


def progress(directory: str) -> Progress:
    """What became of a start. Raises OSError."""
    claimed = _claim_of(directory)  # asked first: an engine that is gone writes no more
    if _is_opened(directory):
        return "run"
    return claimed


def _is_opened(directory: str) -> bool:
    from supervisor.runs.papers import Unreadable, papers_of  # whoever starts an engine needs it, the engine does not

    try:
        return papers_of(run_of(directory)).opening is not None
    except (FileNotFoundError, Unreadable):
        return False


def run_of(directory: str) -> str:
    """The run directory. Raises OSError."""
    return os.readlink(os.path.join(directory, RUN))


def engine(directory: str) -> Engine | None:
    """The engine that has claimed a start, for as long as it lives: whatever has become of its run's directory. Raises
    OSError, and ValueError for a claim that names none."""
    if _claim_of(directory) != "claimed":
        return None
    with open(os.path.join(directory, CLAIM), encoding="utf-8") as file:
        pid, _, host = file.read().strip().partition(" ")
    return Engine(int(pid), host)


def last_words(directory: str, limit: int = 2000) -> str:
    """The last line of the engine's log, without the program's name; "" where there is none."""
    with suppress(OSError), open(os.path.join(directory, LOG), "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - limit))
        lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("allocctl: ") if lines else ""
    return ""


def _claim_of(directory: str) -> Progress:
    """Whether the claim is made, and whether its engine lives, or else has failed. A claim without its mark is none
    yet: to try its lock would be in the way of an engine that is just about to take it."""
    try:
        descriptor = os.open(os.path.join(directory, CLAIM), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "nothing"
    try:
        if not (owner := os.read(descriptor, len(NOBODY))):
            return "nothing"
        if owner == NOBODY:
            return "withdrawn"
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "claimed"
    else:
        return "failed"
    finally:
        os.close(descriptor)
