"""The process that holds a test cluster's daemons, and takes everything down when its owner is gone.

A test cluster is a dozen daemons, and whatever the jobs on it started: slurmstepd and tasks that leave their
session, their group and their parent. None of it may outlive the tests, not even when the test process is
killed by SIGKILL. Names are no way to find it (`pkill slurmd` ends other people's clusters too), so one small
process owns the tree:

* It is a **child subreaper**: every orphan below it becomes its child instead of PID 1's. So the cluster is
  exactly the set of its descendants, found by parent pids in /proc, and each is reaped, also where PID 1
  reaps nothing.
* It watches its **owner** by a pidfd and by its standard input. When either ends, it kills all descendants
  until none is left, then every process whose environment names this cluster's slurm.conf (clients like srun
  are children of the tests, not of the keeper), and removes the cluster's directory.
* Each daemon has a parent-death signal, so killing the keeper itself ends the daemons as well.

Requests come as JSON lines on standard input, one answer line each on standard output:

    {"do": "start", "name": N, "argv": [...], "env": {...}, "cwd": D, "log": F}   -> {"pid": P}
    {"do": "end", "name": N, "signal": S, "seconds": T}      -> {"code": C|null}  (KILL after T seconds)
    {"do": "ended"}                                          -> {"ended": {N: C}} (and not started again)

or {"error": "text"}. C is the exit code, or minus the number of the signal, as in `subprocess`; null says
that no such process was running. Standard library only, and no thread: the parent-death signal of a daemon is
bound to the thread that forked it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_REAP_INTERVAL = 0.005  # seconds between two looks while something is being killed
_TAKE_DOWN_LIMIT = 60.0  # seconds; only a process that waits for a busy disk needs more than milliseconds


def parents() -> dict[int, int]:
    """Each process of this machine with its parent's pid, read from /proc; zombies included."""
    found: dict[int, int] = {}
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command's name may hold spaces and parentheses: after the last comes `state ppid ...`.
            found[pid] = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> set[int]:
    """Every process below `root`, itself not included; zombies that wait for their parent included."""
    tree = parents()
    family = {root}
    grown = True
    while grown:
        below = {pid for pid, parent in tree.items() if parent in family} - family
        family |= below
        grown = bool(below)
    return family - {root}


def processes_with(text: str, places: tuple[str, ...] = ("cmdline", "environ")) -> list[int]:
    """The pids, in order, whose command line or initial environment contains `text`, the caller's own not.

    Processes of other users cannot be read and are not found; nor are zombies, which have neither.
    """
    wanted = text.encode()
    found = []
    for pid in _pids():
        for place in places:
            with contextlib.suppress(OSError):
                if pid != os.getpid() and wanted in Path(f"/proc/{pid}/{place}").read_bytes():
                    found.append(pid)
                    break
    return sorted(found)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


class Keeper:
    """The daemons by name, and the codes of those that have ended."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.running: dict[str, int] = {}
        self.ended: dict[str, int] = {}

    def start(self, name: str, argv: list[str], env: dict[str, str], cwd: str, log: str) -> dict[str, Any]:
        """Starts a daemon; answers only after exec succeeded, so a missing program is an error here."""
        if name in self.running:
            return {"error": f"{name} is running already (pid {self.running[name]})"}
        refusal, told = os.pipe()  # closed by a successful exec; else carries the reason
        keeper = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(argv, env, cwd, log, told, keeper)
        os.close(told)
        with open(refusal, "rb") as pipe:
            reason = pipe.read().decode()
        if reason:
            os.waitpid(pid, 0)
            return {"error": f"cannot start {name}: {reason}"}
        self.running[name] = pid
        self.ended.pop(name, None)
        return {"pid": pid}

    def end(self, name: str, signum: int, seconds: float) -> dict[str, Any]:
        """Signals a daemon and waits for its end; KILL after `seconds`."""
        pid = self.running.get(name)
        if pid is None:
            return {"code": None}
        os.kill(pid, signum)
        deadline = time.monotonic() + seconds
        while name in self.running:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(_REAP_INTERVAL)
        return {"code": self.ended[name]}

    def reap(self) -> None:
        """Collects every child that has ended, the adopted ones too."""
        names = {pid: name for name, pid in self.running.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if name := names.get(pid):
                del self.running[name]
                self.ended[name] = os.waitstatus_to_exitcode(status)

    def answer(self, line: bytes) -> dict[str, Any]:
        """Carries out one request."""
        request = json.loads(line)
        match request.pop("do"):
            case "start":
                return self.start(**request)
            case "end":
                return self.end(request["name"], request["signal"], request["seconds"])
            case "ended":
                self.reap()
                return {"ended": self.ended}
            case other:
                return {"error": f"unknown request {other!r}"}

    def take_down(self) -> set[int]:
        """Kills all that belongs to the cluster and removes its directory; answers what is still there."""
        deadline = time.monotonic() + _TAKE_DOWN_LIMIT
        clients = f"SLURM_CONF={self.directory}/"
        while victims := descendants(os.getpid()) | set(processes_with(clients, ("environ",))) - _ancestors():
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if time.monotonic() > deadline:
                break
            time.sleep(_REAP_INTERVAL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return victims


def _describe(pid: int) -> str:
    """`pid (name) state ppid`, and the command line, as far as they are still there."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{' '.join(stat[:4])} {command}"
    return f"{pid} ended meanwhile"


def _ancestors() -> set[int]:
    tree, pid, line = parents(), os.getpid(), set[int]()
    while pid in tree:
        line.add(pid)
        pid = tree[pid]
    return line


def _become(argv: list[str], env: dict[str, str], cwd: str, log: str, told: int, keeper: int) -> NoReturn:
    """In the forked child: everything set for a daemon, then exec."""
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died between fork and prctl
            os._exit(1)
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(cwd)
        os.execve(argv[0], argv, env)  # noqa: S606 - an argument list; no shell is what is wanted
    except OSError as error:
        os.write(told, f"{argv[0]}: {error}".encode())
    finally:
        os._exit(127)


def serve(directory: str, owner: int) -> int:
    """Answers requests until standard input ends, the owner dies, or a SIGTERM comes; then takes all down.

    Returns the exit code: 1 when something could not be killed.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = Keeper(directory)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)  # noticed by its number in the wake-up pipe
    try:
        _serve(keeper, owner, wake)
    finally:
        left = keeper.take_down()
    if left:
        print(f"still there after {_TAKE_DOWN_LIMIT} s of SIGKILL:", *map(_describe, left), sep="\n", file=sys.stderr)
    return 1 if left else 0


def _serve(keeper: Keeper, owner: int, wake: int) -> None:
    try:
        life = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    poll = select.poll()
    for descriptor in (0, life, wake):
        poll.register(descriptor, select.POLLIN)
    pending = b""
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if wake in ready:
            signals = os.read(wake, 4096)
            keeper.reap()
            if signal.SIGTERM in signals:
                return
        if life in ready:
            return
        if 0 not in ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            reply = json.dumps(keeper.answer(line)).encode() + b"\n"
            try:
                os.write(1, reply)
            except BrokenPipeError:
                return


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2])))
