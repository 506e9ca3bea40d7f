"""Every event that can enter a run.

An event says what *happened*, never what to do about it. The engine observes the world (agents' reports, ends of
srun, files, signals, timers), wraps each observation in an envelope and gives it to the machine in `run.py`:

    Record(seq, at, utc, event)

`seq` is the order of the journal, and by it "first" is decided; `at` is monotonic seconds of the engine's host, and
by it deadlines are; `utc` is for people. A run's state is the fold of its records, so whatever the machine needs to
know must be in an event; whatever is in an event must survive a round trip through one JSON line.

Each event has a number that is never reused: a journal written by an older version stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Base of all events. `number` identifies the kind in a journal, `name` is for people."""

    number: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return type(self).__name__


# --- the run as a whole ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunOpened(Event):
    """The run directory is made and the plan is accepted. `plan` is the plan's data as parsed from TOML."""

    number: ClassVar[int] = 1
    run_id: str
    jobid: str  # as people call it: an array's task is 123_4, a heterogeneous job its leader
    run_dir: str
    marker: str
    nodes: list[str]
    launcher: str  # "slurm" or "local"
    host: str
    pid: int
    plan: JsonObject
    versions: JsonObject = field(default_factory=dict)
    cluster: str = ""  # Slurm's name of it; job ids are unique in a cluster only
    user: str = ""  # Slurm's name of the job's owner; ids come again
    adopted: bool = False  # its steps run in a job that somebody else made
    unit: str = ""  # the user manager's unit in which the engine runs, where it has one of its own
    steps: str = ""  # how the names of its steps begin, and those of nobody else
    plan_file: str = ""  # the absolute path of the plan's file


@dataclass(frozen=True)
class TimeLimitKnown(Event):
    """Slurm's EndTime of the job, as monotonic seconds of this host (`end_at`) and as UTC for people."""

    number: ClassVar[int] = 2
    end_at: float
    end_utc: str


@dataclass(frozen=True)
class StopRequested(Event):
    """Somebody asked the engine to stop: a signal's name (TERM, INT, USR1 = Slurm's early signal), or the socket."""

    number: ClassVar[int] = 3
    signal: str


@dataclass(frozen=True)
class TimerFired(Event):
    """A deadline that the machine keeps in `RunState.deadlines` has passed."""

    number: ClassVar[int] = 4
    timer: str


@dataclass(frozen=True)
class Noted(Event):
    """Something worth telling that changes nothing (foreign output, a warning, a degraded journal)."""

    number: ClassVar[int] = 5
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class EngineFault(Event):
    """Our own code broke while carrying out a command. Never a rank's failure."""

    number: ClassVar[int] = 6
    text: str


# --- steps and ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankEvent(Event):
    """Base of the events that belong to one rank."""

    rank: int


@dataclass(frozen=True)
class StepSpawned(RankEvent):
    """The process that starts the step (srun, or the local agent) exists."""

    number: ClassVar[int] = 20
    pid: int
    step_name: str


@dataclass(frozen=True)
class StepRefused(RankEvent):
    """The process that starts the step could not be made (no srun, no memory, no permission)."""

    number: ClassVar[int] = 21
    error: str


@dataclass(frozen=True)
class Hello(RankEvent):
    """The agent runs on its node and has installed its signal handlers."""

    number: ClassVar[int] = 22
    host: str
    pid: int
    node: str | None
    step: str | None  # as accounting names it, with the raw id: 123.0
    python: str


@dataclass(frozen=True)
class RankStarted(RankEvent):
    """exec of the rank's command succeeded."""

    number: ClassVar[int] = 23
    pid: int


@dataclass(frozen=True)
class RankRefused(RankEvent):
    """The rank's command never ran: exec, its working directory or its log files were refused on the node."""

    number: ClassVar[int] = 24
    phase: str
    errno: int
    error: str


@dataclass(frozen=True)
class RankEnded(RankEvent):
    """The rank's main process ended: `code` or `signal` as its parent's wait status says."""

    number: ClassVar[int] = 25
    code: int | None
    signal: int | None
    core: bool = False


@dataclass(frozen=True)
class TreeGone(RankEvent):
    """No descendant of the rank is left (`left` > 0: that many could not be killed)."""

    number: ClassVar[int] = 26
    killed: int
    left: int = 0


@dataclass(frozen=True)
class AgentSignalled(RankEvent):
    """Someone else signalled the agent: Slurm (scancel, time limit, a lost node) or a person on the node."""

    number: ClassVar[int] = 27
    signal: int


@dataclass(frozen=True)
class RankSilent(RankEvent):
    """The agent has not answered for `seconds`: how the rank is doing is unknown."""

    number: ClassVar[int] = 28
    seconds: float


@dataclass(frozen=True)
class RankHeard(RankEvent):
    """The silent agent answered again."""

    number: ClassVar[int] = 29


@dataclass(frozen=True)
class StepEnded(RankEvent):
    """srun (or the local agent) ended. `returncode` is negative when a signal killed it; `words` is the tail of
    its own stderr."""

    number: ClassVar[int] = 30
    returncode: int
    words: str = ""


@dataclass(frozen=True)
class Swept(RankEvent):
    """A search of the node for processes that the rank left behind is over; `left` < 0: it could not be made."""

    number: ClassVar[int] = 31
    killed: int
    left: int
    error: str = ""


# --- marker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarkerRead(Event):
    """A look at the marker: `found` is none, empty, garbage, foreign or marker (then `code` is its code); `note` is
    the first non-zero code that a script noted. `asked` is the question's (0: nobody asked, a watcher saw it)."""

    number: ClassVar[int] = 40
    found: str
    code: int | None = None
    note: int | None = None
    text: str = ""
    asked: int = 0


@dataclass(frozen=True)
class MarkerPublished(Event):
    """The marker is in its place, complete. `code` is what it says now, which is the first one published."""

    number: ClassVar[int] = 41
    code: int
    outcome: str  # written | already | replaced


@dataclass(frozen=True)
class MarkerFailed(Event):
    """The marker could not be published (`blocked`: something that is no marker stands in its place), or, with `asked`,
    the look that this question is for could not be made."""

    number: ClassVar[int] = 42
    error: str
    blocked: bool = False
    asked: int = 0


# --- directories that are waited on ------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchChanged(Event):
    """How directories are watched from now on: `by` their events or by polling, the kind of file system that they are
    on, and why so."""

    number: ClassVar[int] = 60
    directories: list[str]
    by: str  # events | polling
    file_system: str
    why: str = ""


# --- artifacts and evidence --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArtifactSeen(Event):
    """A look at one contract's files. `answer` is pending, ranks_complete, valid or invalid; `files` hold path, size,
    sha256, kind and problems of those that have changed since the contract's last event, `gone` the paths of those that
    are not there any more; `notes` judge nothing."""

    number: ClassVar[int] = 50
    contract: str
    answer: str
    problems: list[str] = field(default_factory=list)
    files: list[JsonObject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ArtifactsLooked(Event):
    """The look that CheckArtifacts asked for is complete: every contract was read after the command."""

    number: ClassVar[int] = 51
    asked: int = 0


@dataclass(frozen=True)
class CheckerFault(Event):
    """Nobody could judge a contract: the plan's checker gave no answer, or our own code broke. Never "pending"."""

    number: ClassVar[int] = 52
    contract: str
    text: str


@dataclass(frozen=True)
class Collected(Event):
    """Logs and artifacts are collected. `files` hold path, size, sha256 (null and a `remark` where it was not made);
    `errors` are sentences. `compared`: the contracts whose files were compared with what was judged. `differing`: those
    of their files that have another size or time of change than then, or are no files any more: contract, path, what
    was `found` there (see `delivery`), size, sha256 (null: not read), problem."""

    number: ClassVar[int] = 53
    files: list[JsonObject] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    differing: list[JsonObject] = field(default_factory=list)


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunOpened,
        TimeLimitKnown,
        StopRequested,
        TimerFired,
        Noted,
        EngineFault,
        StepSpawned,
        StepRefused,
        Hello,
        RankStarted,
        RankRefused,
        RankEnded,
        TreeGone,
        AgentSignalled,
        RankSilent,
        RankHeard,
        StepEnded,
        Swept,
        MarkerRead,
        MarkerPublished,
        MarkerFailed,
        WatchChanged,
        ArtifactSeen,
        ArtifactsLooked,
        CheckerFault,
        Collected,
    )
}


@dataclass(frozen=True)
class Record:
    """An event in its envelope: `seq` from 1 without gaps, `at` monotonic seconds, `utc` ISO 8601 with a `Z`."""

    seq: int
    at: float
    utc: str
    event: Event


class UnknownEvent(ValueError):
    """A journal line names an event that this version does not know, lacks a field of it, or has another type there."""


def encode(event: Event) -> JsonObject:
    """The event as a JSON object: its kind under `event`, then its fields."""
    return {"event": event.name, **asdict(event)}


def decode(data: JsonObject, kinds: Mapping[str, type[Event]] = KINDS) -> Event:
    """The inverse of `encode`, for one of the `kinds`; fields that a newer version added are left out. Raises
    UnknownEvent."""
    kind = kinds.get(str(data.get("event")))
    if kind is None:
        raise UnknownEvent(f"unknown event {data.get('event')!r}")
    types = _types_of(kind)  # type: ignore[arg-type]  # a class has a hash; this is not that of its instances
    values = {key: value for key, value in data.items() if key in types}
    for key, value in values.items():
        if not isinstance(value, types[key]) or (isinstance(value, bool) and bool not in types[key]):
            raise UnknownEvent(f"{kind.__name__}: {key} is {value!r}")
    try:
        return kind(**values)
    except TypeError as error:
        raise UnknownEvent(f"{kind.__name__}: {error}") from error


@cache
def _types_of(kind: type[Any]) -> dict[str, tuple[type, ...]]:
    """What each field of a kind may hold in JSON: the outer types only, and a whole number where a float is meant."""
    hints = get_type_hints(kind)
    found = {}
    for item in fields(kind):
        hint = hints[item.name]
        choices = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        outer = tuple(get_origin(choice) or choice for choice in choices)
        found[item.name] = (*outer, int) if float in outer else outer
    return found
