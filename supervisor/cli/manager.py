"""systemd's user manager as `allocctl service` asks it, and how an action tells what it did."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.cli.output import tell
from supervisor.core import codes
from supervisor.service.spawn import ends_at_logout, manager_environment

SYSTEMD_LIMIT: Final = 150.0  # seconds for systemctl: a stop may take the units' TimeoutStopSec

NO_MANAGER: Final = (
    "there is no user manager of systemd here (no $XDG_RUNTIME_DIR/systemd/private): log in by ssh rather than su, or "
    "run `allocd` by hand: in the foreground, or `setsid allocd </dev/null >>allocd.log 2>&1 &`"
)


class Failed(Exception):
    """What could not be done, with the exit code."""

    def __init__(self, text: str, code: int = codes.FAILED) -> None:
        super().__init__(text)
        self.code = code


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


def user_manager() -> Manager | None:
    """This user's; None where there is none."""
    environ = manager_environment(os.environ)
    return None if environ is None else Manager(environ)


def manager_there() -> Manager:
    """The same. Raises Failed where there is none."""
    manager = user_manager()
    if manager is None:
        raise Failed(NO_MANAGER, codes.UNREACHABLE)
    return manager


def engines(held: Collection[str] = ()) -> dict[str, tuple[str, str]]:
    """The runs in adopted allocations whose engines live on this host, whether allocd holds them or not, as far as the
    engines' starts tell: the directories of the runs and of the starts, by the runs' ids. `held`: keys of those that
    are not meant."""
    from supervisor.runs.papers import Unreadable
    from supervisor.runs.start import run_of
    from supervisor.service.adopting import alive, starts_directory

    found, keys = {}, list[str]()
    with suppress(OSError):
        keys = sorted(os.listdir(starts_directory()))
    for place in (os.path.join(starts_directory(), key) for key in keys if key not in held):
        with suppress(OSError, ValueError, Unreadable):
            if alive(run_dir := run_of(place), place):
                found[os.path.basename(run_dir)] = run_dir, place
    return found


def tell_of_logout(told: Told) -> None:
    """What becomes of the daemon and of engines when the user logs out."""
    ends = ends_at_logout() is not None
    told.document["ends_at_logout"] = ends
    if ends:
        told.say(
            "lingering is off for you: systemd ends allocd, and the engines of adopted allocations with their ranks, "
            "at the end of your last session on this host; jobs that were submitted go on by themselves, and allocd "
            "finds them again when it runs again. `loginctl enable-linger` turns it on (at some sites: administrators)"
        )
