"""Processes as the kernel shows them: whose child, whose tag, signalled without mistaking a reused number; and the way
from fork to the rank's program."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of ours
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from supervisor.agent.channel import Spec

EXIT_FAILED, EXIT_LOST, EXIT_USAGE, EXIT_FAULT = 1, 70, 78, 125
EXIT_REFUSED, EXIT_NOT_FOUND = 126, 127  # the shell's codes for a command that cannot run, or is not there

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILL_PAUSE = (0.005, 0.25)  # seconds between two rounds of KILL: the first pause, doubled up to the last
SWEEP_LIMIT = 5.0  # seconds
PF_FORKNOEXEC = 0x40  # linux/sched.h: forked, and no exec since
LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2), which Python does not offer. Raises OSError."""
    zero = ctypes.c_ulong(0)
    if LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Process:
    """One process as /proc/PID/stat showed it, see proc_pid_stat(5)."""

    __slots__ = ("alive", "born", "execed", "group", "identity", "parent", "pid")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The name stands in parentheses and may hold anything, parentheses too: cut after the last.
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.execed = not int(fields[6]) & PF_FORKNOEXEC
        # A zombie is dead, unless only its first thread has ended and others still run.
        self.alive = fields[0] not in (b"Z", b"X") or int(fields[17]) > 1
        self.born = int(fields[19])  # clock ticks since the machine's start
        self.identity = (pid, self.born)  # which tells a reused number from the first


def slurp(path: str) -> bytes:
    """A whole file of /proc; empty when it cannot be read: the process is gone, or not ours to look into."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def process(pid: int) -> Process | None:
    """The process that has this number now, zombies included."""
    stat = slurp(f"/proc/{pid}/stat")
    return Process(pid, stat) if stat else None


def numbers() -> list[int]:
    """The pids that /proc shows, except our own."""
    me = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != me]


def descendants(everyone: list[Process], root: int) -> list[Process]:
    """Those of `everyone` that stand below the process `root`, nearest first."""
    children: dict[int, list[Process]] = {}
    for each in everyone:
        children.setdefault(each.parent, []).append(each)
    tree = children.pop(root, [])
    for each in tree:  # grows while it is walked, and ends whatever the listing says, for pop empties the table
        tree += children.pop(each.pid, [])
    return tree


def children() -> list[Process]:
    """Our own living children at this moment; none where the kernel has no such list (CONFIG_PROC_CHILDREN)."""
    me = os.getpid()
    found = [process(int(pid)) for pid in slurp(f"/proc/{me}/task/{me}/children").split()]
    return [each for each in found if each and each.alive]


def carries(pid: int, tag: bytes) -> bool:
    """Whether the process belongs to the caller's uid and was started with ALLOCD_TAG=tag in its environment."""
    path = f"/proc/{pid}"
    if b"\0ALLOCD_TAG=" + tag + b"\0" not in b"\0" + slurp(path + "/environ"):
        return False
    try:
        return os.stat(path).st_uid == os.getuid()
    except OSError:
        return False


def marked(tag: bytes, struck: set[tuple[int, int]]) -> list[Process]:
    """What is alive of those that carry the tag. One that was struck already counts until it has ended: a dying
    process has lost its environment some time before."""
    known = {pid for pid, _ in struck}
    found = [process(pid) for pid in numbers() if pid in known or carries(pid, tag)]
    return [one for one in found if one and one.alive and (one.identity in struck or carries(one.pid, tag))]


def send(seen: Process, number: int) -> bool:
    """Signal the very process that was seen, never one that has got its number since: hold whatever has the
    number by a pidfd, then compare start times. Kernels before 5.3 have no pidfd: there a window of
    microseconds remains. False: it is gone. Raises PermissionError."""
    held = -1
    try:
        held = os.pidfd_open(seen.pid)
    except (AttributeError, OSError):
        pass
    try:
        now = process(seen.pid)
        if now is None or now.identity != seen.identity:
            return False
        if held >= 0:
            signal.pidfd_send_signal(held, number)
        else:
            os.kill(seen.pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if held >= 0:
            os.close(held)


class Tree:
    """What is alive of a rank: our descendants, and whatever else carries its tag. `note` is told what cannot be
    signalled."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.tag = b""  # not known yet
        self.killed: set[tuple[int, int]] = set()
        self.refusing: set[int] = set()

    def alive(self) -> list[Process]:
        everyone = [found for found in map(process, numbers()) if found]
        below = {each.identity: each for each in descendants(everyone, os.getpid()) if each.alive}
        return list({**below, **{each.identity: each for each in self.astray()}}.values())

    def astray(self) -> list[Process]:
        """Those that carry the tag, wherever they stand."""
        return marked(self.tag, self.killed) if self.tag else []

    def signal(self, seen: Process, number: int) -> bool:
        try:
            return send(seen, number)
        except PermissionError:
            if seen.pid not in self.refusing:
                self.refusing.add(seen.pid)
                self.note(f"process {seen.pid} cannot be signalled: it belongs to another user")
            return False

    def strike(self, targets: list[Process]) -> None:
        """KILL these."""
        self.killed |= {each.identity for each in targets if self.signal(each, signal.SIGKILL)}


def sweep(tag: bytes) -> tuple[int, int]:
    """KILL whatever carries the tag until nothing does. Returns how many were killed, and how many are left."""
    end, pause = time.monotonic() + SWEEP_LIMIT, KILL_PAUSE[0]
    killed: set[tuple[int, int]] = set()
    while True:
        alive = marked(tag, killed)
        if not alive or time.monotonic() > end:
            return len(killed), len(alive)
        for each in alive:
            try:
                if send(each, signal.SIGKILL):
                    killed.add(each.identity)
            except PermissionError:
                pass  # counted as left
        time.sleep(pause)
        pause = min(2 * pause, KILL_PAUSE[1])


def fork() -> int:
    """fork(2). The child begins with every signal blocked: it still has our handlers, and would answer a
    signal by writing into our wakeup pipe. Raises OSError."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return pid


def become(spec: Spec, keeper: int, report: int, logs: list[int]) -> NoReturn:
    """The child's way from fork to the rank's program. Failing, it says `PHASE ERRNO ERROR` on the report
    pipe."""
    phase = "session"
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # died before prctl: that death is announced no more
            os._exit(EXIT_LOST)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        phase = "files"
        for source, target in ((os.open(os.devnull, os.O_RDWR), 0), (logs[0], 1), (logs[1], 2)):
            os.dup2(source, target)
        phase = "cwd"
        if spec.cwd is not None:
            os.chdir(spec.cwd)
        phase = "exec"
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(spec.argv[0], spec.argv, spec.env)  # noqa: S606 - that is the trade
    except OSError as error:
        os.write(report, f"{phase} {error.errno} {error.strerror}".encode())
    except BaseException as error:  # noqa: BLE001 - said on the report pipe, whatever it is
        os.write(report, f"{phase} 0 {error}".encode("utf-8", "replace")[: select.PIPE_BUF])
    finally:
        os._exit(EXIT_REFUSED)


def bring(spec: dict[str, Any], keeper: int) -> NoReturn:
    """The fetcher: exits with 0 when everything is told in its file of facts, and is killed when the agent leaves. Its
    signals stay blocked: the agent answers them."""
    code = EXIT_FAULT
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            from supervisor.agent.fetch import fetch  # here: a rank's agent stays small

            fetch(spec)
            code = 0
    except BaseException:  # noqa: BLE001 - on stderr, which is the step's log
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def write_down(logs: list[int]) -> NoReturn:
    """The flusher: exits with the errno of the first log that cannot be brought to the disk, or 0."""
    code = 0
    try:
        for log in logs:
            try:
                os.fsync(log)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe or a device has nothing to sync
                    code = code or error.errno or errno.EIO
    finally:
        os._exit(code)
