"""Whose papers lie in a run directory: which receipts count there, and which are another run's.

A run directory is open ground for its job: a rank can copy an old run into it, receipts, journal and all, and nothing
in such a copy says that it is in the wrong place. So a file counts only where it is bound to this very run:

    the directory's name   the run's id: the engine makes it exclusively. (A directory that somebody has renamed since,
                           so that no run can have that name, is known by its papers.)
    journal.jsonl          its first line opens the run of that id
    receipt.run.json       has that id and its job; and where the journal counts, the run in it began at the same
                           moment, on the same host, in the same directory
    receipt.json           the same of the run receipt in it, whose sha256 it names: that of the file beside it, or
                           where none counts, of the one in it. Without a sha256 it was folded from the journal

What does not count is named with the reason, is never evidence, and is never lost: `set_aside` renames it. This keeps
out copies and mistakes. A job that forges on purpose can forge everything; for that there is Slurm's own record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from supervisor.loop.files import opened, read_whole
from supervisor.runs.registry import JOURNAL, RUN_ID

SIZE: Final = 32 << 20  # bytes: more is no receipt of ours, and no opening of a run
RECEIPT: Final = "receipt.json"  # as in core/layout.py, which quick verbs do not import
RUN_RECEIPT: Final = "receipt.run.json"

Document = dict[str, Any]

_BOUND: Final = {"started": "utc", "host": "host", "run_dir": "run_dir"}
"""What a run receipt says of the run, and where the journal's first line says it."""


class Unreadable(Exception):
    """The run's directory does not tell what was asked for."""


@dataclass(frozen=True, slots=True)
class Papers:
    """What counts in a run directory; None where there is no such file, or one that does not count. `not_ours` says
    why, in a sentence, by the file's name."""

    run_dir: str
    run_id: str
    jobid: str
    opening: Document | None
    run: Document | None
    run_sha256: str | None
    sealed: Document | None
    not_ours: Mapping[str, str]

    @property
    def strange(self) -> list[str]:
        """The sentences about what does not count."""
        return list(self.not_ours.values())


def papers_of(run_dir: str) -> Papers:
    """Read the papers of a run. Raises Unreadable for a damaged receipt, and where nothing says which run this is."""
    opening, trouble = opening_of(run_dir)
    run, digest = read_with_digest(run_dir, RUN_RECEIPT) or (None, None)
    sealed = read_receipt(run_dir, RECEIPT)
    if (found := RUN_ID.fullmatch(os.path.basename(os.path.realpath(run_dir)))) is not None:
        run_id, jobid = found[0], found["job"]
    else:
        run_id, jobid = _identity(run_dir, trouble, opening, run, sealed)
    not_ours: dict[str, str] = {}

    def refuse(file: str, why: str) -> None:
        not_ours[file] = f"{os.path.join(run_dir, file)} is not of this run ({run_id}) and does not count: {why}"

    if opening is None:
        not_ours[JOURNAL] = trouble
    elif why := _another(opening, run_id, jobid, None):
        refuse(JOURNAL, why)
        opening = None
    if run is not None and (why := _another(run, run_id, jobid, opening)):
        refuse(RUN_RECEIPT, why)
        run = digest = None
    if sealed is not None and (why := _not_sealed_here(sealed, run_id, jobid, opening, digest)):
        refuse(RECEIPT, why)
        sealed = None
    return Papers(run_dir, run_id, jobid, opening, run, digest, sealed, not_ours)


def _identity(
    run_dir: str, trouble: str, opening: Document | None, run: Document | None, sealed: Document | None
) -> tuple[str, str]:
    """The run's and its job's id, where the directory's name tells nothing. Raises Unreadable."""
    for document in (opening, run, sealed and sealed.get("run")):
        if isinstance(document, dict) and document.get("run_id") and document.get("jobid"):
            return str(document["run_id"]), str(document["jobid"])
    name = RUN_RECEIPT if run is not None else RECEIPT
    damaged = run is not None or sealed is not None
    raise Unreadable(f"{os.path.join(run_dir, name)} is not a receipt: it names no run" if damaged else trouble)


def _another(document: Document, run_id: str, jobid: str, opening: Document | None) -> str | None:
    """Why a run receipt (or a journal's opening) is another run's."""
    if document.get("run_id") != run_id:
        return f"it is of run {document.get('run_id')}"
    if document.get("jobid") != jobid:
        return f"it is of job {document.get('jobid')}"
    for key, word in _BOUND.items():
        if opening is not None and document.get(key) != opening.get(word):
            return f"its {key} is {document.get(key)!r}, and the journal of this run says {opening.get(word)!r}"
    return None


def _not_sealed_here(
    sealed: Document, run_id: str, jobid: str, opening: Document | None, digest: str | None
) -> str | None:
    """Why a sealed receipt is not this run's."""
    run = sealed.get("run")
    if not isinstance(run, dict) or not isinstance(sealed.get("verdict"), dict):
        return "it seals no run"
    if why := _another(run, run_id, jobid, opening):
        return why
    if sealed.get("run_id") != run_id:
        return f"it seals run {sealed.get('run_id')}"
    if sealed.get("run_sha256") is None:
        return None if run.get("engine_lost") else "it names no sha256 of the run receipt"
    if sealed["run_sha256"] != (digest or _digest(run)):
        return "the run receipt that it seals has another sha256"
    return None


def _digest(run: Document) -> str:
    from hashlib import sha256

    from supervisor.engine.receipts import render

    return sha256(render(run)).hexdigest()


def opening_of(run_dir: str) -> tuple[Document | None, str]:
    """The first line of a run's journal, or None and why there is none."""
    path = os.path.join(run_dir, JOURNAL)
    try:
        with opened(path) as file:
            opening = json.loads(file.readline(SIZE).decode(errors="replace"))
        if opening["event"] != "RunOpened" or not isinstance(opening["jobid"], str) or not opening["jobid"]:
            raise ValueError(opening["event"])
        return {**opening, "run_id": str(opening["run_id"])}, ""
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, f"{path} does not begin with the opening of a run"


def epoch(text: object) -> float | None:
    """The epoch seconds of a time in a journal or receipt; None for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


# --- files -----------------------------------------------------------------------------------------------------------


def read_receipt(run_dir: str, name: str) -> Document | None:
    """`receipt.json` or `receipt.run.json` as it is; None when it is not there. Raises Unreadable."""
    found = read_with_digest(run_dir, name)
    return found[0] if found else None


def read_with_digest(run_dir: str, name: str) -> tuple[Document, str] | None:
    """The same with the sha256 of its bytes."""
    from hashlib import sha256

    path = os.path.join(run_dir, name)
    try:
        data = read_whole(path, SIZE)
        document = json.loads(data)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"{path} is not a receipt: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not a receipt: {error}") from error
    if not isinstance(document, dict):
        raise Unreadable(f"{path} is not a receipt: no JSON object")
    return document, sha256(data).hexdigest()


def set_aside(directory: str, name: str, judged: Document) -> str | None:
    """Rename a file that does not count, to `NAME.not-ours`. Its new name; None when it is `judged` no longer: somebody
    has put another in its place. Raises OSError."""
    path = os.path.join(directory, name)
    aside = next(free for number in range(1, 1000) if not os.path.lexists(free := _aside(path, number)))
    os.rename(path, aside)
    with suppress(Unreadable):
        if read_receipt(directory, os.path.basename(aside)) != judged:
            os.link(aside, path, follow_symlinks=False)
            os.unlink(aside)
            return None
    return os.path.basename(aside)


def _aside(path: str, number: int) -> str:
    return f"{path}.not-ours" + (f".{number}" if number > 1 else "")
