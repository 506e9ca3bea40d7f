"""Reading a large file in a process of its own.

`json.loads` holds the interpreter for its whole length: a loop beside it in another thread stands still. So a program
of its own parses what is large. It gets the open file as a descriptor (the file was opened and refused by the rules of
the one who asks, and nothing is opened again), one JSON document on its standard input that says what to do, and
answers one on its standard output:

    {"size": 5, "judge": ["supervisor.contracts.rules:document", {...}], "lines": false}
    {"sha256": "...", "problems": [...], "summary": {...}}
    {"not_whole": "..."}    {"changing": "..."}    {"errno": 5}

Two of them work at a time, whoever asks, so that the memory of many large files is that of two. One that overstays is
killed; it also ends itself then, should nobody be left to kill it. That, and anything else that it was not made for,
is a fault of ours: ApartError.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from supervisor.contracts.content import Changing, Content, Judge, NotWhole, examine

LIMIT: Final = 300.0  # seconds for one file
_AT_A_TIME: Final = threading.BoundedSemaphore(2)
_HOUSE: Final = str(Path(__file__).parents[2])
_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from supervisor.contracts.reader import main; main(int(sys.argv[2]))"
)


class ApartError(OSError):
    """The process that reads broke, or took too long; says nothing about the file."""


class Apart:
    """Whoever asks for files to be read in a process, one at a time; `close` may come from another thread."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()
        self._closed = False

    def examine(self, descriptor: int, size: int, judge: Judge, lines: bool) -> Content:
        """See content.examine. Raises NotWhole, Changing, OSError of the file, ApartError."""
        request = json.dumps({"size": size, "judge": judge, "lines": lines, "limit": self._limit}).encode()
        with _AT_A_TIME:
            return _content(self._ask(descriptor, request))

    def close(self) -> None:
        """Kill the process, if there is one; no other one is started."""
        with self._guard:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, descriptor: int, request: bytes) -> dict[str, Any]:
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _HOUSE, str(descriptor)]
        pipe = subprocess.PIPE
        with self._guard:
            if self._closed:
                raise ApartError(errno.ECANCELED, "nobody waits for the file any more")
            process = self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(descriptor,), start_new_session=True
            )
        with process:
            try:
                answer, errors = process.communicate(request, timeout=self._limit)
            except subprocess.TimeoutExpired:
                raise ApartError(errno.ETIMEDOUT, f"reading a file took longer than {self._limit:g} s") from None
            finally:
                with self._guard:
                    self._process = None
                process.kill()  # nothing, when it has ended
        if process.returncode != 0:
            said = errors.decode(errors="replace").strip().splitlines()
            words = f"the process that reads a file ended with {process.returncode}: {said[-1] if said else 'no words'}"
            raise ApartError(errno.ECHILD, words)
        found: dict[str, Any] = json.loads(answer)
        return found


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
