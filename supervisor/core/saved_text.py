"""Text that somebody saved from sacct and scontrol, read as an answer: an old job can be judged without its cluster.

Two things are weaker here than where Slurm is asked itself, and so two questions come first:

**Can the text be trusted?** People save what is at hand, and that holds free text: a job's name can hold newlines, and
imitate whole lines of Slurm's. Our own query (`SACCT_FIELDS`) holds none. Of the other forms:

- A *table* (`sacct -P`, with a header line that names the columns) may have any columns. If one of them is free text,
  a row that a name has torn in two must not pass for two rows. Its first half begins with the job's real id, its second
  half ends with the real columns behind the name. So the id has to stand before the free text, and behind it a column
  that only jobs have and steps have not (`WITNESSES`); and there may be one job in the text alone, in its first line.
  Then the second half of a torn row is a second job, or a step with something that steps do not have, and is refused.
- `scontrol show job` in many lines is judged as everywhere (`slurm_records.py`). In *one* line (`-o`) each field that
  counts must have one value in the whole line: a name cannot take Slurm's own field away, only add another.

**What does one reading prove?** An end is believed when two readings agree. A saved text is one reading, made at a time
that is not in it. Accounting corrects itself within seconds, or a minute: a record that had ended `FINAL_AFTER` seconds
before its text was written (the file's time) is final, and counts as confirmed. A younger one needs a second reading.
The controller's is never old: it forgets. A row without its End (people leave the column out) proves nothing by itself,
and confirms what the controller says. What was there, and what it counted for, is said in the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from supervisor.core.answers import LONG_OVER, SAVED, Answer, read_answer
from supervisor.core.parts import Parts, parts_of
from supervisor.core.slurm import Source, Unreadable, agrees, parse_job_id
from supervisor.core.slurm_records import SACCT_FIELDS, JobRecord, parse_sacct_ids, share_sacct
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide

FINAL_AFTER: Final = 600.0  # seconds

_WITHOUT: Final = SACCT_FIELDS.index("Partition")  # fields of the query before partitions were asked for

SAVE_IT: Final = f"sacct -P -D -j JOBID -o {','.join(SACCT_FIELDS)}"
"""What to type for a text that can be judged."""

_OWN: Final = """
Account AllocCPUS AllocNodes AllocTRES Associd Cluster CPUTime CPUTimeRAW DBIndex DerivedExitCode Elapsed ElapsedRaw
Eligible End ExitCode Flags GID Group JobID JobIDRaw NCPUS NNodes NodeList NTasks Partition Planned Priority QOS QOSRAW
ReqCPUS ReqMem ReqNodes ReqTRES Reserved Restarts Start State Submit Suspended SystemCPU Timelimit TimelimitRaw TotalCPU
UID User UserCPU MaxRSS AveCPU
"""
SLURMS_OWN: Final = frozenset(_OWN.split())
"""Columns of sacct(1) that hold nothing which the job's owner writes."""

WITNESSES: Final = ("Partition", "User", "DerivedExitCode")
"""Columns that every job has and no step."""


@dataclass(frozen=True, slots=True)
class SavedText:
    """A saved text: how it is called, what it says, and when it was written (epoch seconds)."""

    name: str
    text: str
    written: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A text that was recognized: whose word it is, in the form that our own query gives; or the `problem` with it."""

    saved: SavedText
    source: Source
    stdout: str
    problem: str = ""

    def answer(self, jobid: str) -> Answer:
        """What it says about one job."""
        stdout = self.stdout
        if self.source == "sacct" and not self.problem:
            stdout = share_sacct(stdout, [jobid])[jobid]
        at = datetime.fromtimestamp(self.saved.written, UTC).isoformat(timespec="milliseconds")
        answer = read_answer(
            source=self.source,
            jobid=jobid,
            argv=(SAVED, self.saved.name),
            at=at,
            returncode=0,
            stdout=stdout,
            stderr="",
            trouble=self.problem,
        )
        return replace(answer, argv=(*answer.argv, LONG_OVER)) if self._is_final(answer.record) else answer

    def _is_final(self, record: JobRecord | None) -> bool:
        """Whether accounting's record had ended so long before the text was written that it is final."""
        if self.source != "sacct" or record is None or not record.terminal or record.end is None:
            return False
        return record.end + FINAL_AFTER <= self.saved.written


def recognize(saved: SavedText) -> Reading:
    """What a text is. Raises `Unreadable` when it is neither sacct's nor scontrol's; a text that is, and cannot be
    trusted, is a reading with a problem."""
    text = saved.text.replace("\r\n", "\n").strip("\n")
    if re.match(r"JobId=\d", text):
        return _reading(saved, "scontrol", _scontrol, text)
    header = text.partition("\n")[0].rstrip("|").split("|")
    if {"State", "ExitCode"} <= set(header) and {"JobID", "JobIDRaw"} & set(header):
        return _reading(saved, "sacct", _table, text)
    if re.match(r"\d+[^|]*\|", text) and len(text.partition("\n")[0].split("|")) in (_WITHOUT, len(SACCT_FIELDS)):
        return Reading(saved, "sacct", text + "\n")
    raise Unreadable(
        f"{saved.name} is neither sacct's table with a header nor `scontrol show job`: save it by `{SAVE_IT}`"
    )


def _reading(saved: SavedText, source: Source, convert: Callable[[str], str], text: str) -> Reading:
    try:
        return Reading(saved, source, convert(text))
    except Unreadable as error:
        return Reading(saved, source, text, f"{saved.name}: {error}")


# --- sacct -----------------------------------------------------------------------------------------------------------


def _table(text: str) -> str:
    """A table with a header as our own query would have printed it. Raises `Unreadable`."""
    lines = [line for line in text.split("\n") if line.strip()]
    open_ended = lines[0].endswith("|")  # sacct -p
    rows = [(line[:-1] if open_ended and line.endswith("|") else line).split("|") for line in lines]
    header = rows[0]
    if "JobID" not in header:
        raise Unreadable(f"without the column JobID a job and one task of an array look alike: save it by `{SAVE_IT}`")
    if len(set(header)) != len(header):
        raise Unreadable("a column stands in the table twice")
    for row in rows[1:]:
        if len(row) != len(header):
            raise Unreadable(f"a line has another number of columns than the header: {'|'.join(row)[:200]!r}")
    table = [dict(zip(header, row, strict=True)) for row in rows[1:]]
    free = [place for place, column in enumerate(header) if column not in SLURMS_OWN]
    if free and table:
        _refuse_torn_rows(header, free, table)
    return "".join(_own_row(row) for row in table)


def _refuse_torn_rows(header: Sequence[str], free: Sequence[int], table: Sequence[dict[str, str]]) -> None:
    """Refuse a table in which a free text may have made a row. See the top. Raises `Unreadable`."""
    column = header[free[0]]
    witness = next((name for name in WITNESSES if name in header[free[-1] + 1 :]), None)
    jobs = [row for row in table if "." not in row["JobID"]]
    steps = [row for row in table if "." in row["JobID"]]
    if (
        witness is None
        or header.index("JobID") > free[0]
        or jobs != [table[0]]
        or not table[0][witness]
        or any(row[witness] or row["JobID"].partition(".")[0] != table[0]["JobID"] for row in steps)
    ):
        raise Unreadable(f"{column} is free text, in which a row could be forged: save it without, by `{SAVE_IT}`")


def _own_row(row: dict[str, str]) -> str:
    """A row as our own query prints it; columns that were not saved are empty."""
    display = row["JobID"]
    if not row.get("JobIDRaw"):
        whole, dot, step = display.partition(".")
        row = {**row, "JobIDRaw": re.split(r"[_+]", whole)[0] + dot + step}
    # A partition that was not saved is not one that is missing.
    fields = SACCT_FIELDS if "Partition" in row else SACCT_FIELDS[:_WITHOUT]
    return "|".join(row.get(field, "") for field in fields) + "\n"


# --- scontrol --------------------------------------------------------------------------------------------------------

_LINES: Final = (
    ("JobState",),
    ("Requeue", "Restarts", "ExitCode"),
    ("RunTime", "TimeLimit"),
    ("SubmitTime",),
    ("StartTime", "EndTime"),
    ("NodeList",),
    ("BatchHost",),
)
"""The fields that count, as they stand in the lines of the long form."""


def _scontrol(text: str) -> str:
    """`scontrol show job` in the long form. Raises `Unreadable`."""
    if len([line for line in text.split("\n") if line.strip()]) > 1:
        return text + "\n"
    head, mark, rest = text.partition(" JobName=")
    if not mark:
        raise Unreadable("scontrol's answer has no JobName=")
    lines = [f"{head} JobName="]
    users = set(re.findall(r"(?<!\S)UserId=(.*?\(\d+\)) GroupId=", rest))
    lines += [f"   UserId={_only('UserId', users)} GroupId="] if users else []
    for keys in _LINES:
        values = [(key, set(re.findall(rf"(?<!\S){key}=(\S*)", rest))) for key in keys]
        words = [f"{key}={_only(key, found)}" for key, found in values if found]
        lines += ["   " + " ".join(words)] if words else []
    return "\n".join(lines) + "\n"


def _only(key: str, values: set[str]) -> str:
    if len(values) > 1:
        raise Unreadable(f"scontrol's answer gives {key}= twice: a name or comment imitates Slurm's fields")
    return next(iter(values))


# --- the truth -------------------------------------------------------------------------------------------------------


def saved_parts(jobid: str, readings: Iterable[Reading]) -> Parts:
    """The parts of a job as the texts tell. The list is complete where accounting's rows are final."""
    parse_job_id(jobid)
    booked: dict[str, bool] = {}
    for reading in readings:
        if reading.source == "sacct" and not reading.problem and jobid.isdecimal():
            for display in _display_ids(reading):
                names = parts_of(jobid, [display], ()).names
                final = all(reading.answer(name).long_over for name in names)
                booked[display] = booked.get(display, False) or final
    parts = parts_of(jobid, list(booked), () if all(booked.values()) else None)
    if parts.complete:
        return parts
    return Parts(jobid, parts.kind, parts.names, False, "the text was saved so soon that it may lack parts of the job")


def _display_ids(reading: Reading) -> tuple[str, ...]:
    try:
        return parse_sacct_ids(reading.stdout)
    except Unreadable:
        return ()


def saved_truth(jobid: str, readings: Sequence[Reading]) -> Truth:
    """What the texts prove about one job or part."""
    answers = [reading.answer(jobid) for reading in sorted(readings, key=lambda reading: reading.saved.written)]
    return decide(jobid, [*answers, *(answer for answer in answers if _seconded(answer, answers))])


def _seconded(answer: Answer, answers: Sequence[Answer]) -> bool:
    """Whether the controller's end is also accounting's, in a row that was saved without its End: nothing by itself, it
    is a second reading of what the controller says."""
    end = answer.record
    if end is None or answer.source != "scontrol" or not end.terminal:
        return False
    rows = [other.record for other in answers if other.source == "sacct" and other.record is not None]
    return any(
        not row.terminal and row.state == end.state and agrees(end.exit.shell, row.exit, "sacct") for row in rows
    )


def describe(names: Sequence[str], readings: Sequence[Reading]) -> list[str]:
    """A sentence for each text: what it says of the job or its parts, and what that counted for."""
    return [f"{reading.saved.name} ({reading.source}): {_what_it_says(names, reading)}" for reading in readings]


def _what_it_says(names: Sequence[str], reading: Reading) -> str:
    if reading.problem:
        return reading.problem.removeprefix(f"{reading.saved.name}: ")
    answers = [reading.answer(name) for name in names]
    told = [answer for answer in answers if answer.record is not None]
    old = sum(answer.long_over for answer in told)
    if len(names) > 1:
        return f"records of {len(told)} of the {len(names)} parts, of which {old} count as confirmed"
    if not told or (record := told[0].record) is None:
        return answers[0].problem or f"no record of job {names[0]}"
    age = "" if record.end is None else f", saved up to {reading.saved.written - record.end:.0f} s after its end"
    return f"{record.words}{age}: {'counts as confirmed' if old else 'one reading, which does not confirm itself'}"
