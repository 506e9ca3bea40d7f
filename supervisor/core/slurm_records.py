"""The questions put to sacct and scontrol, and how their answers are read: nobody can lie by a name.

A part of what these commands print belongs to the job's owner: its name, its comment, its paths. `sbatch
--job-name=$'x\\n5|COMPLETED|0:0'` is accepted and printed as it is, newline included. So three rules hold
here:

1. **Ask for nothing that is free text.** The sacct query (`SACCT_FIELDS`) names only fields that Slurm itself
   fills; a line with another shape is then an error, never a guess. The order begins
   `JobIDRaw|State|ExitCode`, the record that existing outcome files hold.
2. **Where free text cannot be avoided, judge the whole answer.** `scontrol show job` prints the name first
   and comments later. The multi-line form puts the fields that Slurm fills on lines of their own that begin
   with three spaces and a known key. No text can remove such a line, it can only add another: a known key
   with two different values, or a second `JobId=` line, proves that somebody else wrote a part of the answer
   (or that it holds several jobs), and the answer is refused (`Unreadable`). One line of an answer cannot
   imitate another without a newline, so a name that holds `ExitCode=0:0` harms nothing.
3. **Read fields whole.** `DerivedExitCode=0:0` is no `ExitCode`, in whichever order they stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from supervisor.core.parts import shared_tasks
from supervisor.core.slurm import (
    ExitCode,
    JobId,
    Source,
    State,
    Unreadable,
    expand_hostlist,
    parse_duration,
    parse_exit_code,
    parse_job_id,
    parse_state,
    parse_time,
)

# --- records ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What one source said about one incarnation of an allocation.

    `jobid` is the raw id, `display` the id with array task or component (`12_2`, `13+1`). Fields that a
    source does not know are None, () or "". `raw` is the text that decides, as printed (scontrol: its known
    lines joined by spaces). `name` is the user's text: it is told and decides nothing. `stands_for` is not empty
    where the row is one for several tasks of an array (`12_[3-5%2]`), none of which has begun. `young`: accounting
    has the job's end before its beginning (for some four seconds after a short job): the row has no partition yet,
    and shows an array's task or a component under its raw id, as if it were a job. `command`: the batch script's path.
    """

    source: Source
    jobid: str
    display: str
    state: State
    state_text: str
    exit: ExitCode
    derived: ExitCode | None
    submit: float | None
    start: float | None
    end: float | None
    user: str
    cluster: str
    nodes: tuple[str, ...]
    raw: str
    uid: int | None = None
    batch_host: str = ""
    time_limit: float | None = None
    restarts: int | None = None
    name: str = ""
    command: str = ""
    stands_for: str = ""
    young: bool = False

    @property
    def terminal(self) -> bool:
        """Whether this record says that the job is over.

        Accounting writes the state first where its daemon was down at the end: `FAILED|0:0` with an unknown
        End was seen for seconds, and then became `FAILED|4:0`. Without its End a row is not finished.
        """
        return self.state.terminal and (self.source != "sacct" or self.end is not None)

    @property
    def words(self) -> str:
        """State and code for a sentence, with the source."""
        unfinished = ", without an end" if self.state.terminal and not self.terminal else ""
        return f"{self.state_text} {self.exit} ({self.source}{unfinished})"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step's row in accounting; `step` is its raw id, such as `270.0`.

    `exit` is None where Slurm recorded none: the steps of a lost node are `CANCELLED` with an empty ExitCode.
    """

    step: str
    state: State
    state_text: str
    exit: ExitCode | None
    start: float | None
    end: float | None
    nodes: tuple[str, ...]
    raw: str

    @property
    def terminal(self) -> bool:
        """Whether the row is finished: an end state and an end, as for jobs."""
        return self.state.terminal and self.end is not None


SACCT_FIELDS: Final = (
    "JobIDRaw",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "JobID",
    "Submit",
    "Start",
    "End",
    "User",
    "Cluster",
    "NodeList",
    "Partition",
)
"""Fields that sacct of 21.08 to 25.05 knows and that no user writes. `Restarts` is younger, names are free
text.
"""

_EARLIER_FIELDS: Final = SACCT_FIELDS[:-1]
"""Answers that were saved before the partition was asked for are read as well."""


NO_END: Final = "--endtime=2100-01-01"
"""For sacct: later than any record."""


def sacct_argv(jobids: Iterable[str], cluster: str | None = None, *, steps: bool = True) -> list[str]:
    """The query for these jobs, steps (unless they are not wanted) and earlier incarnations included.

    `--starttime` is given because sacct's own default depends on its version (midnight, or the epoch with
    `--jobs`); the epoch costs no more than yesterday, since the rows are found by id. `--endtime` is given because
    sacct's own is now, by the clock of this host: one that is behind hides what has just happened (measured).
    """
    return [
        "sacct",
        "--parsable2",
        "--noheader",
        "--duplicates",
        "--starttime=1970-01-01",
        NO_END,
        *([] if steps else ["--allocations"]),
        *([f"--clusters={cluster}"] if cluster else []),
        "--jobs=" + ",".join(jobids),
        "--format=" + ",".join(SACCT_FIELDS),
    ]


@dataclass(frozen=True, slots=True)
class Accounting:
    """What sacct knows about one job: the latest incarnation, its steps, how many there were."""

    record: JobRecord | None
    steps: tuple[StepRecord, ...] = ()
    incarnations: int = 0


def parse_sacct(text: str, jobid: str) -> Accounting:
    """Read the answer to `sacct_argv` for one job (`123`, `123_4` or `123+1`; a plain id means JobIDRaw).

    A task that has no row of its own is read from the row that stands for it (`123_[3-5%2]`).

    Raises `Unreadable` when any line of the answer has another shape than was asked for.
    """
    wanted = parse_job_id(jobid)
    column = _id_column(wanted)
    found: list[tuple[JobRecord, list[StepRecord]]] = []
    shared: list[tuple[JobRecord, list[StepRecord]]] = []
    ours = False
    for line in text.split("\n"):
        if not line.strip():
            continue
        row = _sacct_row(line)
        if "." not in row["JobIDRaw"]:
            ours = row[column] == wanted.allocation
            if ours:
                found.append((_sacct_job(row, line), []))
            elif _stands_for(row["JobID"], wanted):
                record = _sacct_job(row, line)
                shared.append((replace(record, display=wanted.allocation, stands_for=record.display), []))
        elif ours:
            # Steps follow their own incarnation's row.
            found[-1][1].append(_sacct_step(row, line))
    found = found or shared
    if not found:
        return Accounting(None)
    record, steps = max(enumerate(found), key=lambda item: (_age(item[1][0]), item[0]))[1]
    return Accounting(record, tuple(steps), len(found))


def parse_sacct_ids(text: str) -> tuple[str, ...]:
    """The display ids of the allocations in an answer to `sacct_argv`, each once; those of rows that stand for several
    tasks among them. Raises `Unreadable` as `parse_sacct` does."""
    rows = [_sacct_row(line) for line in text.split("\n") if line.strip()]
    return tuple(dict.fromkeys(row["JobID"] for row in rows if "." not in row["JobIDRaw"]))


def _stands_for(display: str, wanted: JobId) -> bool:
    """Whether a row is one for several tasks that have not begun, the wanted one among them."""
    shared = shared_tasks(display) if wanted.task is not None else None
    return shared is not None and shared[0] == wanted.job and wanted.task in shared[1]


def _id_column(job: JobId) -> str:
    """Which of sacct's columns names this job."""
    return "JobIDRaw" if job.task is None and job.offset is None else "JobID"


def _age(record: JobRecord) -> tuple[float, float]:
    return (record.submit or 0.0, record.start or float("inf"))


def _sacct_row(line: str) -> dict[str, str]:
    fields = line.split("|")
    if len(fields) not in (len(SACCT_FIELDS), len(_EARLIER_FIELDS)) or not re.fullmatch(r"\d+(\.[\w+]+)?", fields[0]):
        raise Unreadable(f"sacct printed a line of another shape than asked for: {line[:200]!r}")
    return dict(zip(SACCT_FIELDS, fields, strict=False))


def _sacct_job(row: dict[str, str], line: str) -> JobRecord:
    return JobRecord(
        source="sacct",
        jobid=row["JobIDRaw"],
        display=row["JobID"],
        state=parse_state(row["State"]),
        state_text=row["State"],
        exit=parse_exit_code(row["ExitCode"]),
        derived=parse_exit_code(row["DerivedExitCode"]) if row["DerivedExitCode"] else None,
        submit=parse_time(row["Submit"]),
        start=parse_time(row["Start"]),
        end=parse_time(row["End"]),
        user=row["User"],
        cluster=row["Cluster"],
        nodes=_nodes(row["NodeList"]),
        raw=line,
        young=row.get("Partition") == "",
    )


def _sacct_step(row: dict[str, str], line: str) -> StepRecord:
    return StepRecord(
        step=row["JobIDRaw"],
        state=parse_state(row["State"]),
        state_text=row["State"],
        exit=parse_exit_code(row["ExitCode"]) if row["ExitCode"] else None,
        start=parse_time(row["Start"]),
        end=parse_time(row["End"]),
        nodes=_nodes(row["NodeList"]),
        raw=line,
    )


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return expand_hostlist(text)
    except ValueError as error:
        raise Unreadable(f"Slurm printed a list of nodes that cannot be read: {error}") from None


# --- scontrol -----------------------------------------------------------------------------------------------

_KNOWN_LINES: Final = (
    "UserId",
    "JobState",
    "Requeue",
    "ExitCode",
    "DerivedExitCode",
    "RunTime",
    "SubmitTime",
    "StartTime",
    "NodeList",
    "BatchHost",
)
"""First keys of the lines that Slurm fills alone. The reason on the JobState line has its spaces replaced."""

_KNOWN_LINE: Final = re.compile(r"^   ((?:" + "|".join(_KNOWN_LINES) + r")=.*)$", re.MULTILINE)
_FIRST_LINE: Final = re.compile(
    r"\n*JobId=(?P<job>\d+) "
    r"(?:ArrayJobId=(?P<array>\d+) (?:ArrayTaskId=(?P<task>\S+) )?(?:ArrayTaskThrottle=\d+ )?"
    r"|HetJobId=(?P<het>\d+) HetJobOffset=(?P<offset>\d+) )?JobName=(?P<name>.*)"
)


def scontrol_argv(jobid: str, cluster: str | None = None) -> list[str]:
    """The query for one job's record in the controller's memory, in the multi-line form that `parse_scontrol`
    needs.
    """
    return ["scontrol", *([f"--clusters={cluster}"] if cluster else []), "show", "job", jobid]


def parse_scontrol(text: str, jobid: str) -> JobRecord:
    """Read `scontrol show job JOBID`; raises `Unreadable` when the answer could mean two things (see the
    top).
    """
    wanted = parse_job_id(jobid)
    head = _FIRST_LINE.match(text)
    if not head:
        raise Unreadable("scontrol's answer does not begin with JobId= and JobName=")
    if len(re.findall(r"^JobId=", text, re.MULTILINE)) != 1:
        raise Unreadable("scontrol's answer holds several records, or a text that imitates one")
    display = _display(head)
    if wanted.allocation not in (head["job"], display):
        raise Unreadable(f"scontrol answered about job {display}, not about {jobid}")
    field = _known_fields(text)
    return JobRecord(
        source="scontrol",
        jobid=head["job"],
        display=display,
        state=parse_state(_need(field, "JobState")),
        state_text=_need(field, "JobState"),
        exit=parse_exit_code(_need(field, "ExitCode")),
        derived=parse_exit_code(field["DerivedExitCode"]) if "DerivedExitCode" in field else None,
        submit=parse_time(field.get("SubmitTime", "")),
        start=parse_time(field.get("StartTime", "")),
        end=parse_time(field.get("EndTime", "")),
        user=field.get("UserId", ""),
        cluster="",
        nodes=_nodes(field.get("NodeList", "")),
        raw=f"JobId={head['job']} " + " ".join(found[1] for found in _KNOWN_LINE.finditer(text)),
        uid=int(field["uid"]) if "uid" in field else None,
        batch_host=field.get("BatchHost", ""),
        time_limit=parse_duration(field.get("TimeLimit", "")),
        restarts=int(field["Restarts"]) if field.get("Restarts", "").isdecimal() else None,
        name=head["name"],
        command=_command(text),
    )


def _command(text: str) -> str:
    """The batch script's path; "" where there is none, or where a user's text imitates that line."""
    found = re.findall(r"^   Command=(.*)$", text, re.MULTILINE)
    return found[0] if len(found) == 1 and found[0] != "(null)" else ""


def _display(head: re.Match[str]) -> str:
    if head["task"]:
        return f"{head['array']}_{head['task']}"
    return f"{head['het']}+{head['offset']}" if head["het"] else head["job"]


def _need(field: Mapping[str, str], key: str) -> str:
    if key not in field:
        raise Unreadable(f"scontrol's answer has no line with {key}=")
    return field[key]


def _known_fields(text: str) -> dict[str, str]:
    """Fields of the known lines. A key with two different values is refused."""
    field: dict[str, str] = {}
    for found in _KNOWN_LINE.finditer(text):
        for key, value in _line_fields(found[1]):
            if field.setdefault(key, value) != value:
                raise Unreadable(f"scontrol's answer gives {key}= twice: a name or comment imitates Slurm's lines")
    return field


def _line_fields(line: str) -> list[tuple[str, str]]:
    if line.startswith("UserId="):
        # A user's name may hold spaces where a directory service supplies it; the id in brackets ends it.
        found = re.match(r"UserId=(.*?)\((\d+)\) GroupId=", line)
        return [("UserId", found[1]), ("uid", found[2])] if found else []
    return [(key, value) for key, mark, value in (word.partition("=") for word in line.split()) if mark]


# --- many jobs in one call ----------------------------------------------------------------------------------


def share_sacct(text: str, jobids: Iterable[str]) -> dict[str, str]:
    """Each job's own lines of an answer to `sacct_argv` for all of them: what `parse_sacct` would read of it.

    Lines of another shape go to every job, and spoil its answer: whose they are cannot be known.
    """
    shares: dict[str, list[str]] = {jobid: [] for jobid in jobids}
    of: dict[tuple[str, str], list[list[str]]] = {}
    for jobid, share in shares.items():
        job = parse_job_id(jobid)
        of.setdefault((_id_column(job), job.allocation), []).append(share)
    owners: list[list[str]] = []  # steps follow their own incarnation's row
    for line in filter(str.strip, text.split("\n")):
        try:
            row = _sacct_row(line)
        except Unreadable:
            for share in shares.values():
                share.append(line)
            continue
        if "." not in row["JobIDRaw"]:
            array, tasks = shared_tasks(row["JobID"]) or (0, ())
            names = [row["JobID"], *(f"{array}_{task}" for task in tasks)]
            keys = [("JobIDRaw", row["JobIDRaw"]), *(("JobID", name) for name in names)]
            owners = [share for key in keys for share in of.get(key, [])]
        for share in owners:
            share.append(line)
    return {jobid: "".join(f"{line}\n" for line in share) for jobid, share in shares.items()}
