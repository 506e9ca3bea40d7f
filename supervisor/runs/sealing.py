"""Sealing: a run's own receipt and Slurm's truth about its job become `receipt.json`, once, whoever comes first.

Nothing is sealed while something may still change it: while Slurm's records do not decide, while the run's engine lives
(a batch script that did not exec its engine can end before it), or when the run is of an earlier attempt than the
record (a requeued job keeps its id, and can end before its engine starts again). A receipt that is sealed already is
not sealed again: terminal evidence is immutable.

With each sealing goes the outcome file, `slurm_job_<id>_outcome.txt`: the raw record that decided, or
`<id>|UNVERIFIABLE|`, beside each run and where a CI job looks for it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from supervisor import versions
from supervisor.core import codes
from supervisor.core.receipt import sealed_receipt
from supervisor.core.truth import Truth, not_of_this_job
from supervisor.engine import receipts
from supervisor.runs.registry import JOURNAL, attempt_of
from supervisor.runs.saved import Document, Unreadable, fold_document, read_receipt

RECEIPT_POLL: Final = 0.2  # seconds


@dataclass
class Sealed:
    """The document of each run of the job (or of the job alone), and sentences about what could not be saved."""

    documents: list[Document]
    trouble: list[str] = field(default_factory=list)


def job_of(run_dir: str) -> str:
    """The id of the run's job. Raises Unreadable."""
    jobid = _opening(run_dir).get("jobid")
    if not isinstance(jobid, str) or not jobid:
        raise Unreadable(f"{os.path.join(run_dir, JOURNAL)} names no job")
    return jobid


def _opening(run_dir: str) -> Document:
    """The first line of a run's journal. Raises Unreadable."""
    path = os.path.join(run_dir, JOURNAL)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            opening = json.loads(file.readline())
        if opening["event"] != "RunOpened":
            raise ValueError(opening["event"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{path} does not begin with the opening of a run") from error
    return dict(opening)


def stranger(run_dir: str, truth: Truth) -> str | None:
    """Why a run that bears the job's id is not of the job that Slurm's record tells of."""
    if truth.record is None:
        return None
    opening = _opening(run_dir)
    try:
        opened = datetime.fromisoformat(opening["utc"]).timestamp()
        return not_of_this_job(truth.record, str(opening.get("cluster") or ""), opened)
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{run_dir}: its opening cannot be read: {error!r}") from error


def restarts_of(truth: Truth) -> int | None:
    """How often the job had been requeued when it ended, as far as Slurm's answers tell."""
    told = [answer.record.restarts for answer in truth.answers if answer.record and answer.record.restarts is not None]
    rows = [answer.incarnations - 1 for answer in truth.answers if answer.source == "sacct" and answer.incarnations]
    return told[-1] if told else rows[-1] if rows else None


def seal_runs(run_dirs: Sequence[str], jobid: str, truth: Truth, patience: float) -> Sealed:
    """Seal every run of the job with its truth, and write the outcome files. `patience`: seconds for an engine that
    still lives to say its last word. Raises OSError, Unreadable."""
    restarts = restarts_of(truth) or 0
    strangers = {run_dir: why for run_dir in run_dirs if (why := stranger(run_dir, truth))}
    known = [run_dir for run_dir in run_dirs if run_dir not in strangers]
    ours = [run_dir for run_dir in known if attempt_of(os.path.basename(run_dir)) >= restarts]
    trouble: list[str] = []
    documents = [_seal(run_dir, truth, patience, trouble) for run_dir in ours] or [_document(None, None, truth)]
    for run_dir, why in strangers.items():
        documents[0]["disagreements"].append(f"{run_dir} is a run of another job with the same id: {why}")
    if len(ours) < len(known):
        documents[0]["disagreements"].append(
            f"the job was requeued {restarts} times, and its last attempt left no run: the runs that are there "
            f"({', '.join(map(os.path.basename, known))}) are of earlier attempts and tell nothing about this end"
        )
    return Sealed(documents, trouble + write_outcomes(ours, jobid, documents[0]))


def _seal(run_dir: str, truth: Truth, patience: float, trouble: list[str]) -> Document:
    """The sealed receipt of a run, made only when Slurm's records decide and the engine has said its last word, and
    only the first time. What could not be saved is appended to `trouble`."""
    saved = read_receipt(run_dir, "receipt.json")
    if saved is not None:
        return saved
    run, digest, last_word = _last_word(run_dir, patience if truth.settled else 0.0)
    document = _document(run, digest, truth)
    if not last_word:
        verdict = document["verdict"]
        text = f"the engine of run {run['run_id']} still lives: ask again when it has ended"
        because = [text, *verdict["because"]]
        document["verdict"] = {**_doubtful(verdict), "summary": text, "because": because}
        return document
    try:
        if truth.settled and not receipts.seal(run_dir, document):
            return read_receipt(run_dir, "receipt.json") or document
    except OSError as error:
        trouble.append(f"the receipt could not be sealed in {run_dir}: {error.strerror or error}")
    return document


def _doubtful(verdict: Document) -> Document:
    return {
        **verdict,
        "outcome": "unverifiable",
        "code": codes.UNVERIFIABLE,
        "origin": "allocd",
        "reason": "unverifiable",
        "final": False,
    }


def _last_word(run_dir: str, patience: float) -> tuple[Document, str | None, bool]:
    """What the engine left: its receipt with the sha256, or else the fold of its journal, and whether that is its last
    word. A living engine's receipt is waited for, at most `patience` seconds."""
    begun = time.monotonic()
    while True:
        os.listdir(run_dir)  # makes a network client ask its server before it believes that a name is missing
        if found := receipts.read_run_receipt(run_dir):
            return *found, True
        folded = fold_document(run_dir)
        waited = time.monotonic() - begun
        if folded["alive"] is False or waited >= patience:
            lost = folded["alive"] is not True
            return {**folded, "engine_lost": lost}, None, lost
        time.sleep(RECEIPT_POLL)


def _document(run: Document | None, digest: str | None, truth: Truth) -> Document:
    return sealed_receipt(run, digest, truth, versions=versions())


def write_outcomes(run_dirs: Sequence[str], jobid: str, document: Document) -> list[str]:
    """The outcome file beside each run and where a CI job looks for it. Returns what could not be written."""
    trouble = []
    for directory in (*run_dirs, os.environ.get("GITHUB_WORKSPACE") or "."):
        try:
            receipts.write_outcome([directory], jobid, document["slurm"]["outcome_line"])
        except OSError as error:
            what = error.strerror or error
            trouble.append(f"the outcome file could not be written in {os.path.abspath(directory)}: {what}")
    return trouble
