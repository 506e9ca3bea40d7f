"""A run as its directory tells it: the receipt where there is one, else the fold of its journal.

The receipt is read without the machine (a finished run's status takes a few milliseconds); the journal is folded only
when it must be: for a run that lives, or one whose engine left no receipt.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from supervisor.runs.registry import JOURNAL

Document = dict[str, Any]


class Unreadable(Exception):
    """The run's directory does not tell what was asked for."""


def read_receipt(run_dir: str, name: str) -> Document | None:
    """`receipt.json` or `receipt.run.json` of a run; None when it is not there. Raises Unreadable."""
    found = read_with_digest(run_dir, name)
    return found[0] if found else None


def read_with_digest(run_dir: str, name: str) -> tuple[Document, str] | None:
    """The same with the sha256 of its bytes."""
    from hashlib import sha256

    path = os.path.join(run_dir, name)
    try:
        with open(path, "rb") as file:
            data = file.read()
        document = json.loads(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if not isinstance(document, dict):
        raise Unreadable(f"{path}: not a JSON object")
    return document, sha256(data).hexdigest()


def run_document(run_dir: str) -> tuple[Document, bool]:
    """The run's receipt (sealed verdict put in its place where there is one), and whether the run is over.

    Without a receipt the journal is folded: the document then has the same shape, and `alive` tells whether the engine
    lives (None: it runs on another host). Raises Unreadable.
    """
    if document := _written(run_dir):
        return document, True
    folded = fold_document(run_dir)
    if folded["alive"] is False and (document := _written(run_dir)):  # it has just ended, and not without a word
        return document, True
    return folded, False


def _written(run_dir: str) -> Document | None:
    sealed = read_receipt(run_dir, "receipt.json")
    if sealed is not None and sealed.get("run"):
        return {**sealed["run"], "verdict": sealed["verdict"], "sealed": True, "slurm": sealed.get("slurm")}
    return read_receipt(run_dir, "receipt.run.json")


def fold_document(run_dir: str) -> Document:
    """The run receipt folded from the journal, marked `engine_lost` unless the engine lives. Raises Unreadable."""
    from supervisor.core.layout import Layout
    from supervisor.core.receipt import run_receipt
    from supervisor.core.run import IllegalEvent, fold
    from supervisor.engine.journal import read_journal

    path = os.path.join(run_dir, JOURNAL)
    try:
        journal = read_journal(path)
        state = fold(journal.records)
    except (OSError, IllegalEvent) as error:
        raise Unreadable(f"{path}: {error}") from error
    if state.opened is None or state.plan is None:
        raise Unreadable(f"{path}: the run was not opened yet")
    opened = state.opened
    layout = Layout(state.plan, opened.run_id, opened.jobid, opened.run_dir, tuple(opened.nodes), "")
    alive = engine_lives(run_dir, opened.host, opened.pid)
    document = run_receipt(
        state,
        journal.records,
        layout,
        versions=opened.versions,
        journal_trouble=journal.damage,
        engine_lost=alive is not True,
    )
    return {**document, "alive": alive, "phase": state.phase}


def engine_lives(run_dir: str, host: str, pid: int) -> bool | None:
    """Whether the engine of a run lives; None when it runs on another host and cannot be seen from here.

    Its number may be another process's by now: an engine is known by the run directory, which it holds open to its
    end. Of another user's process only the command line can be seen.
    """
    if host != socket.gethostname():
        return None
    try:
        ours = os.stat(run_dir)
        return any(_leads_to(ours, f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return _is_allocctl(pid)
    except OSError:
        return False


def _leads_to(wanted: os.stat_result, link: str) -> bool:
    try:
        return os.path.samestat(wanted, os.stat(link))
    except OSError:
        return False


def _is_allocctl(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"allocctl" in file.read()
    except OSError:
        return False
