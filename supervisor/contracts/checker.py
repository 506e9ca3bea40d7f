"""A program of the plan's that judges what the rules have let through.

It runs in the artifact's root, with the engine's environment and

    ALLOCD_CONTRACT    the contract's id
    ALLOCD_ROOT        the root
    ALLOCD_FILES       the files, one a line, relative to the root; not set when that is more than a program can be told

and says with its exit code what it thinks of them, and with its first line why:

    0     ready
    10    wait: something is missing
    20    invalid: something is wrong, and waiting does not help

Anything else is no answer about the artifact: a program that breaks, cannot be started or takes too long raises
CheckerBroke, which is a fault and never "pending". The program is asked again when the files have changed, and after 10
with pauses that grow.

A program may take longer than a look: see child. With its end all of its process group ends; a process that it put into
a session of its own is its own business, and lives on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from supervisor.contracts.child import Child, Overstayed
from supervisor.contracts.places import Examiner, Place
from supervisor.contracts.reading import SOON
from supervisor.core.artifacts import Answer, Finding
from supervisor.core.substitution import substitute

READY, WAIT, INVALID = 0, 10, 20
PAUSES: Final = (1.0, 30.0)  # seconds between a 10 and the next question: at first, at most
PATIENCE: Final = 3.0  # seconds that one look waits for the program
LINE_CAP: Final = 300  # characters of its first line
FILES_CAP: Final = 100_000  # bytes of ALLOCD_FILES; Linux takes 128 KiB


class CheckerBroke(Exception):
    """The program gave no answer."""


@dataclass(slots=True)
class _Case:
    """What the program said of files in one state, or is about to say."""

    files: tuple[Any, ...]
    child: Child | None = None
    answer: Answer | None = None  # its last one
    words: str = ""
    pause: float = 0.0  # seconds, after the last 10
    not_before: float = 0.0
    broke: str | None = None


class Checked:
    """Asks the artifact's program about what `inner` finds valid. `clock` counts seconds."""

    def __init__(self, inner: Examiner, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._cases: dict[str, _Case] = {}
        self._closed = False

    def look(self, place: Place) -> Finding:
        """See Examiner. Raises CheckerBroke too."""
        finding = self._inner.look(place)
        files = tuple((fact.path, fact.size, fact.sha256, fact.mtime_ns) for fact in finding.files)
        case = self._cases.get(finding.contract)
        if case is None or finding.answer != "valid" or case.files != files:
            if case is not None and case.child is not None:
                case.child.end()
            case = self._cases[finding.contract] = _Case(files)
        if finding.answer != "valid":
            return finding
        self._ask(case, place, finding)
        if case.answer == "valid":
            return finding
        name = place.instance.artifact.checker[0]
        return replace(finding, answer=case.answer or "pending", problems=(f"checker {name}: {case.words}",))

    def again(self, place: Place) -> float | None:
        """See Examiner."""
        case = self._cases.get(place.instance.contract_id)
        if case is not None and case.child is not None:
            return SOON
        if case is not None and case.answer == "pending":
            return max(SOON, case.not_before - self._clock())
        return self._inner.again(place)

    def progress(self) -> object:
        """See Examiner. What the program does is none: nobody knows whether it comes to an end."""
        return self._inner.progress()

    def close(self) -> None:
        """End what is still at work."""
        self._closed = True
        for case in tuple(self._cases.values()):
            if case.child is not None:
                case.child.end()
        self._inner.close()

    def _ask(self, case: _Case, place: Place, finding: Finding) -> None:
        """Let the program speak, unless it has or it is too early. Raises CheckerBroke."""
        done = case.answer in ("valid", "invalid")
        if case.broke is None and not done and (case.child is not None or self._clock() >= case.not_before):
            try:
                case.child = case.child or self._begin(place, finding)
                status = case.child.wait(PATIENCE)
                if status is not None:
                    self._said(case, status, bytes(case.child.output))
                    case.child = None
                elif case.answer is None:
                    case.words = "found it still at work; expected its answer"
            except OSError as error:
                case.broke = f"cannot be started: {error.strerror}"
            except Overstayed as what:
                case.child, case.broke = None, str(what)
        if case.broke is not None:
            raise CheckerBroke(f"{place.instance.artifact.checker[0]}: {case.broke}")

    def _begin(self, place: Place, finding: Finding) -> Child:
        artifact = place.instance.artifact
        names = "\n".join(fact.path for fact in finding.files)
        words = {"ALLOCD_CONTRACT": finding.contract, "ALLOCD_ROOT": str(place.root), "ALLOCD_FILES": names}
        if len(names.encode()) > FILES_CAP:
            del words["ALLOCD_FILES"]
        command = [substitute(word, place.values) for word in artifact.checker]
        child = Child(command, artifact.checker_timeout, cwd=place.root, env={**os.environ, **words})
        if self._closed:  # meanwhile
            child.end()
        return child

    def _said(self, case: _Case, status: int, output: bytes) -> None:
        line = _first_line(output)
        if status == READY:
            case.answer = "valid"
        elif status == INVALID:
            case.answer, case.words = "invalid", line or "found something wrong, without a word; expected a reason"
        elif status == WAIT:
            first, most = PAUSES
            case.answer, case.words = "pending", line or "found something missing, without a word; expected a reason"
            case.pause = min(most, case.pause * 2 or first)
            case.not_before = self._clock() + case.pause
        else:
            ended = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            case.broke = f"{ended}; expected {READY}, {WAIT} or {INVALID}" + (f": {line}" if line else "")


def _first_line(output: bytes) -> str:
    """The first line that says something, fit for a terminal."""
    for line in output.decode(errors="replace").splitlines():
        words = "".join(character if character.isprintable() else " " for character in line).strip()
        if words:
            return words[:LINE_CAP]
    return ""
