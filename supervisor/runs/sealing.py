"""Sealing: a run's own receipt and Slurm's truth about its job become `receipt.json`, once, whoever comes first.

Nothing is sealed while something may still change it: while Slurm's records do not decide, while the run's engine lives
(a batch script that did not exec its engine can end before it), or when the run is of an earlier attempt than the
record (a requeued job keeps its id, and can end before its engine starts again). A receipt that is sealed already is
not sealed again: terminal evidence is immutable. But it counts only where it is this run's (`papers.py`) and Slurm's
record, where it was just read, does not say otherwise; else it is told, set aside under another name, and the real one
is made.

An adopted run, whose steps ran in somebody else's job, is none of the runs by which that job is judged. It is sealed by
itself (`seal_adopted`) as soon as the records that it takes are there, whether the job goes on or not, and has no
outcome file: that tells of jobs.

With each other sealing goes the outcome file (`outcomes.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor import versions
from supervisor.core import codes
from supervisor.core.identity import SLACK, Known
from supervisor.core.receipt import contradicted, is_adopted, sealed_receipt, stranger_of
from supervisor.core.submission import Submission
from supervisor.core.truth import Truth, deciding, restarts_of
from supervisor.core.verdict import count_outcomes, judge_parts
from supervisor.engine import receipts
from supervisor.runs.outcomes import has_outcome, outcome_lines, write_outcomes
from supervisor.runs.papers import (
    RECEIPT,
    RUN_RECEIPT,
    Document,
    Papers,
    Unreadable,
    epoch,
    papers_of,
    read_receipt,
    set_aside,
)
from supervisor.runs.registry import (
    JOURNAL,
    attempt_of,
    gone_runs,
    is_further,
    is_guests,
    job_receipt,
    runs_of_job,
    submission_of,
)
from supervisor.runs.saved import fold_document

RECEIPT_POLL: Final = 0.2  # seconds


@dataclass
class Sealed:
    """The document of each run of the job (or of the job alone), and sentences about what could not be saved. `whole`
    is the document over all of them where there are several; `before`: all was sealed before, and needs no saving."""

    documents: list[Document]
    trouble: list[str] = field(default_factory=list)
    whole: Document | None = None
    before: bool = False

    @property
    def document(self) -> Document:
        """The one document that answers."""
        return self.whole or self.documents[0]

    @property
    def code(self) -> int:
        """The verdict's code; a success of which something could not be saved is none."""
        code = int(self.document["verdict"]["code"])
        return code or (codes.FAULT if self.trouble and not self.before else codes.OK)


def one_of_runs(jobid: str, documents: list[Document], trouble: list[str], before: bool = False) -> Sealed:
    """A job with several runs has a receipt for each; its verdict is the first that is no success."""
    if len(documents) == 1:
        return Sealed(documents, trouble, before=before)
    worst = next((d for d in documents if d["verdict"]["code"]), documents[0])
    return Sealed(documents, trouble, _whole(jobid, worst["verdict"], documents), before)


def seal_job(
    jobid: str,
    truths: Sequence[Truth],
    patience: float,
    *,
    run_dirs: Sequence[str] | None = None,
    doubts: Sequence[str] = (),
    seen_pending: bool = False,
) -> Sealed:
    """Seal every run of a job (of an array's task) with its truth, and write the outcome files (`has_outcome`).

    `truths`: one; of a heterogeneous job that of each component, in their order. `run_dirs`: default: those of the
    job's last attempt, wherever they are registered. `patience`: seconds for an engine that still lives to say its last
    word. `doubts`: sentences that let nothing count, and nothing be sealed. `seen_pending`: the job had not begun when
    it was last seen. Blocks. Raises OSError, Unreadable.
    """
    truth = deciding(truths)
    submission = submission_of(jobid)
    known = known_of(submission)
    run_dirs = find_runs(jobid, truth) if run_dirs is None else jobs_own(run_dirs)
    restarts = restarts_of(truths[0]) or 0
    gone = {run_dir for run_dir in run_dirs if not os.path.isdir(run_dir)}
    run_dirs = [run_dir for run_dir in run_dirs if run_dir not in gone]
    if submission:
        gone.update(gone_runs(jobid, submission.asked_at - SLACK))
    strangers = {run_dir: why for run_dir in run_dirs if (why := stranger(papers_of(run_dir), truth))}
    if submission and (other := stranger_of(truth, known)) and not other.earlier:
        strangers[f"the submission {submission.token!r}"] = other.why
        known = Known()  # the submission is history: somebody asks about the job that has the id now
    mine = [run_dir for run_dir in run_dirs if run_dir not in strangers]
    ours = [run_dir for run_dir in mine if attempt_of(os.path.basename(run_dir)) >= restarts]
    if truth.standing == "absent" and "_" in jobid:
        how = "was seen PENDING and vanished from the array" if seen_pending else "is in neither of Slurm's books"
        why = "cancelled before it began, or never made; Slurm keeps no record"
        doubts = [*doubts, f"task {jobid} {how}: {why}"]
    trouble: list[str] = []
    case = _Case(jobid, truths, known, tuple(doubts), patience, trouble)
    documents = [case.seal(run_dir) for run_dir in ours] or [case.document(None, None)]
    for what, why in strangers.items():
        documents[0]["disagreements"].append(f"{what} is of another job with the same id: {why}")
    documents[0]["disagreements"] += [
        f"the run directory {run_dir} is gone: what the engine saw is missing, and Slurm's record alone tells the end"
        for run_dir in sorted(gone)
        if not ours and attempt_of(os.path.basename(run_dir)) >= restarts
    ]
    if len(ours) < len(mine):
        documents[0]["disagreements"].append(
            f"the job was requeued {restarts} times, and its last attempt left no run: the runs that are there "
            f"({', '.join(map(os.path.basename, mine))}) are of earlier attempts and tell nothing about this end"
        )
    if not ours and submission and known != Known():
        documents = [case.keep(*os.path.split(str(job_receipt(jobid))), documents[0])]
    if has_outcome(truth.standing, known=bool(ours or submission)):
        trouble += write_outcomes(ours, jobid, documents[0]["slurm"]["outcome_line"])
    return one_of_runs(jobid, documents, trouble, before=len(case.before) == len(documents))


def seal_adopted(run_dir: str, truths: Sequence[Truth], patience: float) -> Sealed:
    """Seal an adopted run, if the records of its steps (of a provisional end: that of the job) are there. `truths`,
    `patience`: see `seal_job`. Blocks. Raises OSError, Unreadable."""
    papers, trouble = papers_of(run_dir), list[str]()
    why = stranger(papers, deciding(truths)) if papers.sealed is None else None
    doubts = (f"Slurm knows the id {papers.jobid} as another job's by now: {why}",) if why else ()
    case = _Case(papers.jobid, truths, Known(), doubts, patience, trouble)
    return Sealed([case.seal(run_dir)], trouble, before=papers.sealed is not None)


def seal_array(jobid: str, tasks: Mapping[str, Truth], patience: float, doubt: str = "") -> Sealed:
    """Seal the runs of each task of an array, and judge the whole: `tasks` are the truths by the tasks' ids, in the
    order of their numbers. `doubt` says why there may be tasks that are not among them. Blocks. Raises OSError,
    Unreadable."""
    return gather({task: seal_job(task, [truth], patience) for task, truth in tasks.items()}, jobid, doubt)


def gather(tasks: Mapping[str, Sealed], jobid: str, doubt: str = "") -> Sealed:
    """The whole of an array whose tasks are sealed; writes its outcome file."""
    sealed = whole_array(jobid, tasks, doubt)
    first = [each.documents[0] for each in tasks.values()]
    over = [document for document in first if has_outcome(document["slurm"]["standing"])]
    if over or not first:
        sealed.trouble += write_outcomes([], jobid, outcome_lines(jobid, over))
    return sealed


def whole_array(jobid: str, tasks: Mapping[str, Sealed], doubt: str = "") -> Sealed:
    """The documents of an array's tasks, with the one over all of them."""
    verdict = judge_parts([(task, sealed.document["verdict"]) for task, sealed in tasks.items()], doubt)
    documents = [document for sealed in tasks.values() for document in sealed.documents]
    trouble = [text for sealed in tasks.values() for text in sealed.trouble]
    counts = count_outcomes(sealed.document["verdict"]["outcome"] for sealed in tasks.values())
    before = all(sealed.before for sealed in tasks.values())
    return Sealed(documents, trouble, {**_whole(jobid, verdict, documents), "counts": counts}, before)


def _whole(jobid: str, verdict: Mapping[str, object], documents: list[Document]) -> Document:
    counts = count_outcomes(document["verdict"]["outcome"] for document in documents)
    return {
        "schema_version": 1,
        "kind": "job",
        "jobid": jobid,
        "verdict": dict(verdict),
        "counts": counts,
        "receipts": documents,
    }


def sealed_already(jobid: str, run_dirs: Sequence[str]) -> Sealed | None:
    """What was sealed before, if all of these runs are. Raises Unreadable."""
    documents = [sealed for run_dir in run_dirs if (sealed := papers_of(run_dir).sealed)]
    if not documents or len(documents) != len(run_dirs):
        return None
    trouble = write_outcomes(run_dirs, jobid, documents[0]["slurm"]["outcome_line"])
    return one_of_runs(jobid, documents, trouble, before=True)


def is_denied(run_dirs: Sequence[str], truth: Truth) -> bool:
    """Whether what Slurm just said denies what is sealed in one of these runs: it ended otherwise, it is not over, or
    it was started anew. What Slurm says of another job with the same id denies nothing. Raises Unreadable."""
    restarts = restarts_of(truth) or 0
    for papers in map(papers_of, run_dirs):
        if truth.record is None or stranger(papers, truth):
            continue
        if attempt_of(papers.run_id) < restarts or (papers.sealed and contradicted(papers.sealed, truth)):
            return True
    return False


def came_again(run_dirs: Sequence[str], truth: Truth) -> bool:
    """Whether Slurm knows the id as another job's than that of the sealed runs: ids come again. Slurm need not have
    answered: what is sealed stands. Raises Unreadable."""
    return truth.record is not None and all(stranger(papers_of(path), truth) for path in run_dirs)


# --- which runs, and whose -----------------------------------------------------------------------------------------


def find_runs(jobid: str, truth: Truth | None = None) -> list[str]:
    """The run directories of the job's last attempt. An array's task that was called by its raw id has them under the
    id that Slurm's record shows."""
    submission = submission_of(jobid)
    base = submission.base if submission else None
    found = runs_of_job(jobid, base)
    if not found and truth is not None and truth.record is not None and truth.record.display != jobid:
        found = runs_of_job(truth.record.display, base)
    return jobs_own(found)


def jobs_own(run_dirs: Sequence[str]) -> list[str]:
    """Those of the runs that are not known to be adopted."""
    return [run_dir for run_dir in run_dirs if is_adopted_run(run_dir) is not True]


def is_adopted_run(run_dir: str) -> bool | None:
    """Whether the run's steps ran in somebody else's job: by its papers, else by its id; None for a further run in an
    allocation that has none to be read."""
    run_id = os.path.basename(run_dir)
    if is_guests(run_id):
        return True
    try:
        papers = papers_of(run_dir)
        if paper := papers.opening or papers.run or (papers.sealed and papers.sealed.get("run")):
            return is_adopted(paper)
    except Unreadable:
        pass
    return None if is_further(run_id) else False


def known_of(submission: Submission | None) -> Known:
    """What the record of the job's submission tells of it."""
    if submission is None:
        return Known()
    cluster, user, name = submission.cluster or "", submission.user, submission.name
    asked, answered = submission.asked_at, submission.answered_at
    return Known(cluster, user, name, asked, answered, script=submission.script)


def job_of(run_dir: str) -> str:
    """The id of the run's job. Raises Unreadable."""
    return papers_of(run_dir).jobid


def on_cluster(run_dir: str, cluster: str | None) -> bool:
    """Whether a run can have been on the named cluster (None: any). Raises Unreadable."""
    return cluster is None or (papers_of(run_dir).opening or {}).get("cluster") in ("", None, cluster)


def stranger(papers: Papers, truth: Truth) -> str | None:
    """Why a run that bears the job's id is not of the job that Slurm's record tells of. Raises Unreadable."""
    opening = papers.opening or {}
    if not opening and papers.run is None:
        raise Unreadable(papers.not_ours[JOURNAL])
    begun = opening.get("utc") if opening else papers.run and papers.run.get("started")
    opened = epoch(begun)
    if opened is None:
        raise Unreadable(f"{papers.run_dir}: its opening cannot be read: {begun!r} is no time")
    other = stranger_of(truth, Known(str(opening.get("cluster") or ""), str(opening.get("user") or ""), opened=opened))
    return other.why if other else None


# --- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """What is the same for all runs of a job. What could not be saved is appended to `trouble`."""

    jobid: str
    truths: Sequence[Truth]
    known: Known
    doubts: Sequence[str]
    patience: float
    trouble: list[str]
    before: list[str] = field(default_factory=list)  # the runs that were sealed already

    def seal(self, run_dir: str) -> Document:
        """The sealed receipt of a run, made only when Slurm's records decide and the engine has said its last word, and
        only the first time."""
        truth = deciding(self.truths)
        papers = papers_of(run_dir)
        denied = contradicted(papers.sealed, truth) if papers.sealed else None
        if papers.sealed is not None and not denied:
            self.before.append(run_dir)
            return papers.sealed
        run, digest, over = _last_word(run_dir, self.patience if truth.settled else 0.0)
        document = self.document(run, digest)
        document["disagreements"] += papers.strange
        if denied:
            document["disagreements"].append(f"{os.path.join(run_dir, RECEIPT)} does not count: {denied}")
        decided = truth.settled
        if is_adopted(run) and not truth.settled:
            decided, over = document["verdict"]["final"], over and run.get("alive", False) is not None
        if not over:
            verdict = document["verdict"]
            text = f"the engine of run {run['run_id']} still lives: ask again when it has ended"
            because = [text, *verdict["because"]]
            document["verdict"] = {**_doubtful(verdict), "summary": text, "because": because}
        elif decided and not self.early and not self.doubts:
            return self._save(run_dir, document, truth)
        return document

    def _save(self, run_dir: str, document: Document, truth: Truth) -> Document:
        """Seal the receipt, after what is in its place and does not count was set aside; or return the one that
        somebody else has sealed meanwhile."""
        try:
            for name in (RUN_RECEIPT, RECEIPT):
                self._make_way(run_dir, name, document, truth)
            if receipts.seal(run_dir, document):
                return document
            sealed = papers_of(run_dir).sealed
            if sealed is not None and not contradicted(sealed, truth):
                return sealed
            why: object = f"{RECEIPT} there is another run's"
        except OSError as error:
            why = error.strerror or error
        self.trouble.append(f"the receipt could not be sealed in {run_dir}: {why}")
        return document

    def keep(self, directory: str, name: str, document: Document) -> Document:
        """The receipt of a job that left no run, kept beside its submission: once, as that of a run, and answered when
        Slurm has forgotten the job."""
        truth = deciding(self.truths)
        saved = read_receipt(directory, name)
        if saved is not None and saved.get("jobid") == self.jobid and not contradicted(saved, truth):
            self.before.append(directory)
            return saved
        if truth.settled and not self.early and not self.doubts:
            try:
                if saved is not None:
                    set_aside(directory, name, saved)
                receipts.seal(directory, document, name)
            except OSError as error:
                self.trouble.append(f"the receipt could not be kept in {directory}: {error.strerror or error}")
        return document

    def _make_way(self, run_dir: str, name: str, document: Document, truth: Truth) -> None:
        """Set a receipt aside that does not count. Raises OSError."""
        papers = papers_of(run_dir)
        denied = name == RECEIPT and papers.sealed is not None and contradicted(papers.sealed, truth)
        judged = read_receipt(run_dir, name) if name in papers.not_ours or denied else None
        if judged is not None and (aside := set_aside(run_dir, name, judged)):
            document["disagreements"].append(f"{name} was set aside as {aside}")

    @property
    def early(self) -> bool:
        """Whether Slurm's record is of a job before the one that we know."""
        return any((other := stranger_of(truth, self.known)) is not None and other.earlier for truth in self.truths)

    def document(self, run: Document | None, digest: str | None) -> Document:
        """The sealed receipt's document."""
        return sealed_receipt(
            run, digest, self.jobid, self.truths, versions=versions(), known=self.known, doubts=self.doubts
        )


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
        papers = papers_of(run_dir)
        if papers.run is not None:
            return papers.run, papers.run_sha256, True
        folded = fold_document(run_dir)
        waited = time.monotonic() - begun
        if folded["alive"] is False or waited >= patience:
            lost = folded["alive"] is not True
            return {**folded, "engine_lost": lost}, None, lost
        time.sleep(RECEIPT_POLL)
