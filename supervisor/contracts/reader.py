"""Reading a large file in a process of its own.

`json.loads` holds the interpreter for its whole length: a loop beside it in another thread stands still. So a program
of its own parses what is large. It gets the open file as a descriptor (the file was opened and refused by the rules of
the one who asks, and nothing is opened again), one JSON document on its standard input that says what to do, and
answers one on its standard output:

    {"size": 5, "judge": ["supervisor.contracts.rules:document", {...}], "lines": false}
    {"sha256": "...", "problems": [...], "summary": {...}}
    {"not_whole": "..."}    {"changing": "..."}    {"errno": 5}

Nobody waits for it to the end: a look waits for a while, says that the file is being read, and the next look waits
again. Two of them work at a time, whoever asks, and only one when its file is very large, so that the memory of many
large files is that of two. One that overstays is killed; it also ends itself then, should nobody be left to kill it.

A process that is killed was most likely the one that took the most when memory was short. So it is tried once more,
alone. That it is killed again, and anything else that it was not made for, is a fault of ours: ApartError.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.contracts.child import Child, Overstayed
from supervisor.contracts.content import Changing, Content, Judge, NotWhole, examine

LIMIT: Final = 300.0  # seconds for one file
AT_A_TIME: Final = 2  # processes
ALONE: Final = 100_000_000  # bytes: a larger file is read by one process while there is no other
_HOUSE: Final = str(Path(__file__).parents[2])
_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from supervisor.contracts.reader import main; main(int(sys.argv[2]))"
)


_CHILDREN: Final = dict[Child, None]()  # those at work now, whoever asked


def progress() -> object:
    """Equal to what it was before when no process has done anything since."""
    return [(id(child), child.spent()) for child in tuple(_CHILDREN)]


class ApartError(OSError):
    """The process that reads broke, or took too long; says nothing about the file."""


class Busy(Exception):
    """The file, or another one before it, is still being read."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be read: a file in the state that it was in, by `key`, which is equal for nothing else."""

    path: str
    key: object
    size: int  # bytes
    judge: Judge
    lines: bool

    def request(self, limit: float) -> bytes:
        """As the process is told it."""
        words = {"size": self.size, "judge": self.judge, "lines": self.lines, "limit": limit}
        return json.dumps(words).encode()


class _Seats:
    """Who may work at the same time."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = 0

    def take(self, count: int) -> bool:
        """Whether so many were free; they are taken then."""
        with self._guard:
            free = self._taken + count <= AT_A_TIME
            self._taken += count if free else 0
            return free

    def give_back(self, count: int) -> None:
        """So many are free again."""
        with self._guard:
            self._taken -= count


_SEATS: Final = _Seats()


@dataclass(frozen=True, slots=True)
class _Work:
    """What a process does."""

    task: Task
    child: Child
    seats: int


class Apart:
    """Has files read in a process, one at a time. `close` may come from another thread, the rest not."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._work: _Work | None = None
        self._killed: Task | None = None  # what a process was killed at, and is tried once more
        self._guard = threading.Lock()
        self._closed = False

    def examine(self, task: Task, descriptor: int, seconds: float) -> Content:
        """See content.examine. Raises Busy when that takes more seconds; ask again then. Raises NotWhole, Changing,
        OSError of the file, ApartError."""
        child = self._child(task, descriptor)
        try:
            status = child.wait(seconds)
        except Overstayed as what:
            self._end()
            raise ApartError(errno.ETIMEDOUT, f"the process that reads {task.path} {what}") from None
        if status is None:
            raise Busy
        self._end()
        if status < 0 and not self._closed:
            again, self._killed = self._killed == task, task
            if again:
                raise ApartError(errno.ECHILD, _was_killed(task, -status))
            raise Busy
        self._killed = None
        return _content(_answer(status, bytes(child.output), task.path))

    def keep(self, paths: Collection[str]) -> None:
        """Read no file on that is none of these."""
        if self._work is not None and self._work.task.path not in paths:
            self._end()

    def close(self) -> None:
        """Kill the process, if there is one; no other one is started."""
        with self._guard:
            self._closed = True
        self._end()

    def _child(self, task: Task, descriptor: int) -> Child:
        """The process that does this task: it may be at work since an earlier look."""
        work = self._work
        if work is not None and work.task.path != task.path:
            raise Busy
        if work is not None and work.task != task:
            self._end()
        with self._guard:
            if self._closed:
                raise ApartError(errno.ECANCELED, "nobody waits for the file any more")
            if self._work is None:
                self._work = self._begin(task, descriptor)
            return self._work.child

    def _begin(self, task: Task, descriptor: int) -> _Work:
        seats = AT_A_TIME if task.size > ALONE or task == self._killed else 1
        if not _SEATS.take(seats):
            raise Busy
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _HOUSE, str(descriptor)]
        request = os.memfd_create("request")
        try:
            os.write(request, task.request(self._limit))
            os.lseek(request, 0, os.SEEK_SET)
            child = Child(command, self._limit, stdin=request, pass_fds=(descriptor,))
            _CHILDREN[child] = None
        except OSError:
            _SEATS.give_back(seats)
            raise
        finally:
            os.close(request)
        return _Work(task, child, seats)

    def _end(self) -> None:
        with self._guard:
            work, self._work = self._work, None
        if work is not None:
            work.child.end()
            _CHILDREN.pop(work.child, None)
            _SEATS.give_back(work.seats)


def _was_killed(task: Task, number: int) -> str:
    """Twice."""
    with open("/proc/meminfo") as lines:
        free = next((int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return (
        f"the process that reads {task.path} ({task.size >> 20} MiB) was killed twice by signal {number}: out of "
        f"memory? Reading takes several times a file's size, and {free} MiB are available here now (a job's own limit "
        "may be lower: sbatch --mem)"
    )


def _answer(status: int, output: bytes, path: str) -> dict[str, Any]:
    words = output.decode(errors="replace").strip()
    if status == 0:
        try:
            found: dict[str, Any] = json.loads(words)
        except ValueError:
            pass
        else:
            return found
    last = words.splitlines()[-1] if words else "no words"
    raise ApartError(errno.ECHILD, f"the process that reads {path} ended with {status}: {last}")


def _content(answer: dict[str, Any]) -> Content:
    if "not_whole" in answer:
        raise NotWhole(answer["not_whole"])
    if "changing" in answer:
        raise Changing(answer["changing"])
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]))
    return Content(answer["sha256"], tuple(answer["problems"]), answer["summary"])


def main(descriptor: int) -> None:
    """The process: one question, one answer."""
    request, answer = json.load(sys.stdin), dict[str, Any]()
    signal.setitimer(signal.ITIMER_REAL, request["limit"] + 1)  # its default is the end
    gc.disable()  # a document has no cycles, and looking for them takes longer than all the rest
    try:
        with open(descriptor, "rb", buffering=0) as file:
            name, options = request["judge"]
            content = examine(file, request["size"], (name, options), request["lines"])
        answer = {"sha256": content.sha256, "problems": content.problems, "summary": content.summary}
    except NotWhole as reason:
        answer = {"not_whole": str(reason)}
    except Changing as reason:
        answer = {"changing": str(reason)}
    except MemoryError:
        answer = {"errno": errno.ENOMEM}
    except OSError as error:
        answer = {"errno": error.errno}
    json.dump(answer, sys.stdout)
