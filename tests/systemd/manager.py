"""A real user manager of systemd, for one test: private to it, and gone with it.

`manager.sh` brings it up in namespaces of its own. Its directories lie where everybody can reach them, so `systemctl
--user`, allocctl and allocd's socket work from outside as they do in a login session: with XDG_RUNTIME_DIR.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

SYSTEMD: Final = ("/usr/lib/systemd/systemd", "/lib/systemd/systemd")
SCRIPT: Final = Path(__file__).with_name("manager.sh")
LIMIT: Final = 20.0  # seconds for anything that systemd does


def missing() -> str | None:
    """Why there can be no manager here; None when there can."""
    if os.geteuid() != 0:
        return "a user manager of systemd in namespaces of its own needs root"
    if not any(map(os.path.exists, SYSTEMD)):
        return "systemd is not installed"
    for program in ("systemctl", "systemd-run", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    probe = "mount -t cgroup2 none /mnt && mkdir -p /run/systemd && mount -t tmpfs none /run/systemd"
    tried = subprocess.run(
        ["unshare", "--mount", "--cgroup", "sh", "-c", probe], capture_output=True, text=True, check=False
    )
    return f"this root may not mount: {tried.stderr.strip()}" if tried.returncode else None


class Manager:
    """A user manager. `uid`: 0 for root's own, else one without privileges. `linger`: whether it outlives sessions."""

    def __init__(self, uid: int = 0, *, linger: bool = True) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="systemd-", dir="/tmp"))  # a socket's path holds 107 bytes
        self.log = self.directory / "log"
        self.home = self.directory / "home"
        self.runtime = self.directory / "run"
        for directory in (self.home, self.runtime):
            directory.mkdir(mode=0o700)
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "PYTHONDONTWRITEBYTECODE") if key in os.environ}
        self.environ = {
            **kept,
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "XDG_STATE_HOME": str(self.home / ".local/state"),
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={self.runtime}/bus",
            "SYSTEMD_IGNORE_CHROOT": "1",  # systemctl compares our root with that of process 1: it may be another one
        }
        self.units = self.home / ".config/systemd/user"
        name = f"allocd-test-{os.getpid()}-{secrets.token_hex(4)}"
        systemd = next(filter(os.path.exists, SYSTEMD))
        words = ["unshare", "--mount", "--propagation", "private", "sh", str(SCRIPT)]
        words += [str(self.directory), name, str(uid), systemd, *([_user(uid)] if linger else [])]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words, env=self.environ, cwd="/", stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and all that it started."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(4 * LIMIT)
        shutil.rmtree(self.directory)

    def _wait(self) -> None:
        deadline = time.monotonic() + LIMIT
        while self.ask("is-active", "default.target", check=False).strip() != "active":
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"systemd --user did not come up:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.02)

    # --- what one does with it --------------------------------------------------------------------------------------

    def ask(self, *words: str, check: bool = True) -> str:
        """What `systemctl --user WORDS` prints on stdout."""
        done = self.run("systemctl", "--user", *words)
        if check and done.returncode:
            raise AssertionError(f"systemctl --user {' '.join(words)}: {done.returncode}: {done.stderr}{self.tail()}")
        return done.stdout

    def run(self, *words: str | os.PathLike[str], **environ: str) -> subprocess.CompletedProcess[str]:
        """A command in the session of this user."""
        return subprocess.run(
            words, env={**self.environ, **environ}, capture_output=True, text=True, timeout=3 * LIMIT, check=False
        )

    def run_inside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in a unit of its own, which sees what the manager sees."""
        return self.run("systemd-run", "--user", "--quiet", "--pipe", "--wait", "--collect", *words)

    def show(self, unit: str, key: str) -> str:
        """A unit's property."""
        return self.ask("show", "--value", "--property", key, unit).strip()

    def pids(self, unit: str) -> list[int]:
        """The processes of a unit."""
        return [int(line) for line in self._processes(unit).read_text().split()]

    def take_in(self, unit: str, pid: int) -> None:
        """Make a process one of a unit's, as if that had started it."""
        self._processes(unit).write_text(str(pid))

    def _processes(self, unit: str) -> Path:
        keeper = self._process.pid
        manager = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]
        group = self.show(unit, "ControlGroup").lstrip("/")
        assert group, f"{unit} does not run"
        return Path(f"/proc/{manager}/root/sys/fs/cgroup", group, "cgroup.procs")

    def wait_for(self, unit: str, key: str, *wanted: str) -> str:
        """Until a property has one of these values. Fails when that takes too long."""
        deadline = time.monotonic() + LIMIT
        while (value := self.show(unit, key)) not in wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{unit}: {key} is {value!r}, not {' or '.join(wanted)}:\n{self.tail()}")
            time.sleep(0.02)
        return value

    def tail(self) -> str:
        """The end of what the manager, and its units where they log to the console, have printed."""
        return self.log.read_text(errors="replace")[-4000:]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
