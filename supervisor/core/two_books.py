"""Slurm's truth about one allocation: from answers to the record that decides, or to a doubt.

Slurm keeps two books. *Accounting* (sacct) keeps a record for good, but late: rows arrive up to a minute
after the fact, stay RUNNING when the end was lost, show codes of 128 and more folded, and one terminal row in
twenty was once seen with a wrong code that was corrected afterwards. *The controller* (scontrol) knows first
and knows the whole code, but forgets a job after MinJobAge. Either may be down. So one look proves little,
and the absence of a job proves nothing. The rules:

- A query has three outcomes: a **record**, **absent** (a valid answer without the job), **failed** (could not
  ask, or the answer cannot be trusted). A failed query says nothing about the job.
- The **latest incarnation** counts. A requeued job keeps its id and gets a new submit time; an ended record
  with an older submit time than another source's record is history.
- What each source said last, leaving failed queries out, gives a pair, and `_CHOICE` names who decides for
  it.
- An end is believed when two readings agree (both sources, or one twice) and none in between disagreed. Ends
  after which a site may requeue (PREEMPTED, NODE_FAIL, ...) need the controller's word besides: present or
  absent.
- Success is COMPLETED with 0:0 in every agreeing reading. DerivedExitCode and the batch step decide nothing.
- A plain id that names a whole array or heterogeneous job proves nothing about it: its parts have records. A young row
  of accounting's shows a part as if it were a job: it counts beside the controller's record only.
- Anything else is a doubt, which is neither success nor failure; it says why, in a sentence.

Everything is pure: the same answers give the same truth, today or from a receipt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

from supervisor.core.answers import Answer
from supervisor.core.slurm import FOLD, ExitCode, Source
from supervisor.core.slurm_records import JobRecord
from supervisor.core.truth import Standing, Truth

Kind = Literal["ended", "alive", "absent", "none"]
Choice = Literal["accounting", "controller", "compare", "behind", "running", "stale", "absent", "unasked"]

_CHOICE: Final[dict[tuple[Kind, Kind], Choice]] = {
    # (accounting, controller)
    ("ended", "ended"): "compare",
    ("ended", "alive"): "behind",
    ("ended", "absent"): "accounting",
    ("ended", "none"): "accounting",
    ("alive", "ended"): "controller",
    ("alive", "alive"): "running",
    ("alive", "absent"): "stale",
    ("alive", "none"): "running",
    ("absent", "ended"): "controller",
    ("absent", "alive"): "running",
    ("absent", "absent"): "absent",
    ("absent", "none"): "unasked",
    ("none", "ended"): "controller",
    ("none", "alive"): "running",
    ("none", "absent"): "unasked",
    ("none", "none"): "unasked",
}
"""Who decides, by what each book said last. "none": it has given no valid answer at all."""

ABSENCES: Final = 2
"""So many valid answers of each book must lack the job before it counts as absent."""


def decide(jobid: str, answers: Sequence[Answer]) -> Truth:
    """Derive the truth from answers in the order in which they were given. See the rules at the top."""
    return _Case(jobid, tuple(answers)).truth()


class _Case:
    """One derivation: the answers, what each book said last, and the sentences that accumulate on the way."""

    def __init__(self, jobid: str, answers: tuple[Answer, ...]) -> None:
        self.jobid = jobid
        self.answers = answers
        # Where each book last gave a valid answer.
        self.place = {answer.source: place for place, answer in enumerate(answers) if answer.outcome != "failed"}
        self.book = self._said("sacct")
        self.live = self._said("scontrol")
        self.notes: list[str] = []
        self._of_parts = (f"{jobid}_", f"{jobid}+")

    def truth(self) -> Truth:
        if (part := self._a_part()) is not None:
            # One part's success would be taken for the success of all.
            return self._doubt(
                "several", part[1], f"{self.jobid} names a job of several parts: ask for one, such as {part[0]}"
            )
        handler = {
            "accounting": self._accounting,
            "controller": self._controller,
            "compare": self._compare,
            "behind": self._behind,
            "running": self._running,
            "stale": self._stale,
            "absent": self._absent,
            "unasked": self._unasked,
        }[_CHOICE[_kind(self.book), _kind(self.live)]]
        return handler()

    def _a_part(self) -> tuple[str, JobRecord | None] | None:
        """A part of the job, if its id is that of a whole array or heterogeneous job.

        Accounting shows the first task that ended without its array's id for a moment; the controller, which may print
        every part then, names the array in its first line.
        """
        for answer in (self.book, self.live):
            if answer is not None and answer.record is not None and answer.record.display.startswith(self._of_parts):
                return answer.record.display, answer.record
        whole = re.compile(rf"\n*JobId=\d+ (?:Array(?P<array>)|Het)JobId={re.escape(self.jobid)} ")
        for answer in self.answers:
            if answer.source == "scontrol" and (found := whole.match(answer.stdout)):
                return f"{self.jobid}{'_' if found['array'] is not None else '+'}N", None
        return None

    # Each of these is one row's answer.

    def _accounting(self) -> Truth:
        record = _record(self.book)
        if record.young:
            return self._doubt(
                "unconfirmed",
                record,
                f"accounting's row ({record.words}) has no partition yet: it may be of one part of a job, and the "
                "controller does not say what it is",
            )
        # The controller's last word is missing, or is of a time before the end that accounting recorded.
        if _kind(self.live) in ("none", "alive") and not self._long_over(record):
            if any(answer.source == "scontrol" and answer.outcome == "failed" for answer in self.answers):
                self.notes.append("the controller could not be asked about this end")
            if record.state.returns:
                return self._doubt(
                    "unasked",
                    record,
                    f"{record.state.word} may be queued again, and scontrol could not be asked whether it is",
                )
            if record.stands_for:
                return self._doubt(
                    "unasked",
                    record,
                    f"accounting has one row for several tasks ({record.stands_for}), which may not know yet that this "
                    "one ran, and scontrol could not be asked about it",
                )
        return self._confirm(record)

    def _controller(self) -> Truth:
        record = _record(self.live)
        if self.book is None:
            self.notes.append("accounting could not be asked; the controller's record decides")
        elif self.book.record is None:
            self.notes.append("accounting has no row of the job; the controller's record decides")
        else:
            self.notes.append(f"accounting's row is stale: {self.book.record.words}; the controller's record decides")
        return self._confirm(record)

    def _compare(self) -> Truth:
        book, live = _record(self.book), _record(self.live)
        if _older(book, live):
            self.notes.append("accounting's latest row is of an earlier incarnation; the controller's record decides")
            return self._confirm(live)
        if _older(live, book):
            return self._doubt("differs", book, "accounting knows a later incarnation of the job than the controller")
        if not _same(book, live):
            return self._doubt("differs", book, f"Slurm's two books differ: {book.words} and {live.words}")
        return self._confirm(book)

    def _behind(self) -> Truth:
        """Accounting says ended, the controller says alive: requeued, tidying up, or simply asked earlier."""
        book, live = _record(self.book), _record(self.live)
        if _older(book, live):
            self.notes.append(f"an earlier incarnation ended {book.state_text} {book.exit}")
            return self._running()
        if live.state.phase == "ending" and book.state.returns:
            # COMPLETING hides whether the job ends or is queued again: a PREEMPTED one was seen to come back from it.
            return self._running()
        if live.state.phase == "ending":
            self.notes.append(f"the controller is still tidying up ({live.state.word})")
            return self._confirm(book)
        if self.place["scontrol"] < self.place["sacct"]:
            return self._accounting()
        return self._doubt("differs", live, f"Slurm's two books differ: {book.words} and {live.words}")

    def _running(self) -> Truth:
        alive = [a.source for a in (self.book, self.live) if a is not None and _kind(a) == "alive"]
        teller = max(alive, key=lambda source: self.place[source])
        record = _record(self._said(teller))
        since = self.answers[self.place[teller] + 1 :]
        failed = [a for a in since if a.source == record.source]
        if failed:
            return self._doubt(
                "unasked",
                record,
                f"{record.source} last said {record.state_text} and could not be asked since: {failed[-1].problem}",
            )
        if record.state.phase == "unknown":
            return self._doubt("running", record, f"{record.source} says {record.state_text!r}, a state we do not know")
        if record.state.terminal:
            return self._doubt("unconfirmed", record, f"accounting is being written: {record.words}")
        return self._doubt("running", record, f"the job is still in state {record.state.word} ({record.source})")

    def _stale(self) -> Truth:
        if (known := self._forgotten()) is not None:
            self.notes.append(f"accounting's row is stale: {_record(self.book).words}")
            return self._confirm(known)
        record = _record(self.book)
        return self._doubt(
            "unasked",
            record,
            f"accounting still says {record.words}, and the controller no longer knows the job",
        )

    def _absent(self) -> Truth:
        if (known := self._forgotten()) is not None:
            return self._confirm(known)
        counts = [sum(a.source == s and a.outcome == "absent" for a in self.answers) for s in ("sacct", "scontrol")]
        if min(counts) < ABSENCES:
            return self._doubt("unconfirmed", None, "the job was not found, which was not asked often enough to count")
        return self._doubt("absent", None, f"neither sacct nor scontrol knows the job (asked {min(counts)} times)")

    def _unasked(self) -> Truth:
        if (known := self._forgotten()) is not None:
            return self._confirm(known)
        problems = [f"{a.source}: {a.problem}" for a in self.answers[-2:] if a.outcome == "failed"]
        if _kind(self.live) == "absent":
            problems.append("the controller does not know the job (any more)")
        return self._doubt("unasked", None, "Slurm could not be asked: " + ("; ".join(problems) or "no answer yet"))

    def _forgotten(self) -> JobRecord | None:
        """The end that the controller told before it forgot the job: what has been read stays true."""
        told = [a.record for a in self.answers if a.source == "scontrol" and a.record is not None]
        if not told or not told[-1].terminal or _kind(self.live) != "absent":
            return None
        self.notes.append("the controller has forgotten the job since")
        return told[-1]

    # The end of a derivation.

    def _confirm(self, chosen: JobRecord) -> Truth:
        agreeing = self._agreeing(chosen)
        if chosen.state.word == "COMPLETED" and not all(record.exit.zero for record in agreeing):
            return self._doubt("differs", chosen, f"a record contradicts itself: {chosen.words}")
        if chosen.state.word == "REVOKED":
            return self._doubt("elsewhere", chosen, "REVOKED: another cluster of the federation ran the job")
        if len(agreeing) < 2 and not self._long_over(chosen):
            earlier = [a.record for a in self.answers if a.record and a.record.terminal and a.record not in agreeing]
            if earlier and not _older(earlier[-1], chosen):
                return self._doubt("differs", chosen, f"readings differ: {earlier[-1].words}, then {chosen.words}")
            return self._doubt("unconfirmed", chosen, f"{chosen.words} was read only once")
        return self._settle(chosen, agreeing)

    def _long_over(self, record: JobRecord) -> bool:
        """Whether the record was read so long after its end that nothing changes it any more."""
        return any(answer.long_over and answer.record == record for answer in self.answers)

    def _agreeing(self, chosen: JobRecord) -> list[JobRecord]:
        """The terminal records that agree with the chosen one, back to the last that did not."""
        found: list[JobRecord] = []
        for answer in reversed(self.answers):
            if answer.record is None or not answer.record.terminal:
                continue
            if answer.source != chosen.source and _older(answer.record, chosen):
                continue  # the other book is behind: what it knows of an earlier incarnation denies nothing
            if not _same(answer.record, chosen):
                break
            found.append(answer.record)
        return found

    def _settle(self, chosen: JobRecord, agreeing: list[JobRecord]) -> Truth:
        native: ExitCode | None = None
        if chosen.state.code is None:
            whole = [record.exit for record in agreeing if record.source == "scontrol"]
            native = whole[0] if whole else chosen.exit
            if not whole and chosen.state.word == "FAILED" and not chosen.exit.signal:
                self.notes.append(f"accounting folds codes: {chosen.exit} may stand for {chosen.exit.code + FOLD}")
        derived = next((record.derived for record in agreeing if record.derived), None)
        if derived and not derived.zero:
            self.notes.append(f"a step ended {derived} (DerivedExitCode); that decides nothing about the job")
        return self._tell("settled", chosen, native, None)

    def _doubt(self, standing: Standing, record: JobRecord | None, sentence: str) -> Truth:
        return self._tell(standing, record, None, sentence)

    def _tell(self, standing: Standing, record: JobRecord | None, native: ExitCode | None, doubt: str | None) -> Truth:
        if self.book is not None and self.book.incarnations > 1:
            self.notes.append(f"accounting lists {self.book.incarnations} incarnations; the latest counts")
        if record is not None and record.display != self.jobid:
            self.notes.append(f"job {self.jobid} is {record.display}: this is the record of that one part")
        if record is not None and record.stands_for:
            self.notes.append(f"accounting's row is one for all tasks that never began ({record.stands_for})")
        return Truth(
            jobid=self.jobid,
            standing=standing,
            record=record,
            native=native,
            doubt=doubt,
            notes=tuple(self.notes),
            steps=self.book.steps if self.book else (),
            answers=self.answers,
        )

    def _said(self, source: Source) -> Answer | None:
        return self.answers[self.place[source]] if source in self.place else None


def _kind(answer: Answer | None) -> Kind:
    if answer is None:
        return "none"
    if answer.record is None:
        return "absent"
    return "ended" if answer.record.terminal else "alive"


def _record(answer: Answer | None) -> JobRecord:
    if answer is None or answer.record is None:
        raise AssertionError("a row of _CHOICE asked for a record that its kind excludes")
    return answer.record


def _older(one: JobRecord, other: JobRecord) -> bool:
    """Whether `one` is of an earlier incarnation than `other`."""
    return one.submit is not None and other.submit is not None and one.submit < other.submit


def _same(one: JobRecord, other: JobRecord) -> bool:
    """Whether two terminal records tell the same end. Codes are compared only where they mean something: of a
    job that was cancelled or ran out of time the two books record different ones.
    """
    if one.state.word != other.state.word or _older(one, other) or _older(other, one):
        return False
    if one.state.code is not None:
        return True
    if one.source == other.source:
        return one.exit == other.exit
    return one.exit.signal == other.exit.signal and one.exit.code % FOLD == other.exit.code % FOLD
