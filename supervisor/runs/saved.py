"""A run as its directory tells it: the receipt where there is one, else the fold of its journal.

The receipt is read without the machine (a finished run's status takes a few milliseconds); the journal is folded only
when it must be: for a run that lives, or one whose engine left no receipt.
"""

from __future__ import annotations

import os
import socket

from supervisor.runs.papers import Document, Unreadable, papers_of
from supervisor.runs.registry import JOURNAL

__all__ = ["Document", "Unreadable", "engine_lives", "fold_document", "run_document"]


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
    return _with_notes(folded, papers_of(run_dir).strange), False


def _written(run_dir: str) -> Document | None:
    papers = papers_of(run_dir)
    document = papers.run
    if (sealed := papers.sealed) is not None:
        document = {**sealed["run"], "verdict": sealed["verdict"], "sealed": True, "slurm": sealed.get("slurm")}
    return None if document is None else _with_notes(document, papers.strange)


def _with_notes(document: Document, strange: list[str]) -> Document:
    """The document, with what lies in the run's directory and is another run's."""
    return {**document, "strange": strange, "notes": [*document["notes"], *strange]} if strange else document


def fold_document(run_dir: str) -> Document:
    """The run receipt folded from the journal, marked `engine_lost` unless the engine lives. Raises Unreadable."""
    from supervisor.core.layout import Layout
    from supervisor.core.receipt import run_receipt
    from supervisor.core.run import IllegalEvent, fold
    from supervisor.engine.journal import read_journal

    path = os.path.join(run_dir, JOURNAL)
    if JOURNAL in (strange := papers_of(run_dir).not_ours):
        raise Unreadable(strange[JOURNAL])
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
