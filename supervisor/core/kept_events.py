"""What can happen to an allocation that the service holds: the events of its book (`keeping.py` says what follows).

They are written like a run's (`events.py`): frozen, with a number that is never reused, one JSON line each. A line of a
book has the event's fields besides its place in the book (`n`), its number over all allocations (`seq`) and its time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from supervisor.core.events import Event, JsonObject


@dataclass(frozen=True)
class Accepted(Event):
    """The service has taken it on. `kind`: submitted (a plan that will be a job), adopted (a plan for a job of somebody
    else's, `jobid`) or followed (a job as it is). `title` is the plan's name, `given` the caller's idempotency key, and
    `digest` tells whether another request is the same."""

    number: ClassVar[int] = 1
    kind: str
    title: str
    given: str = ""
    digest: str = ""
    jobid: str = ""
    cluster: str = ""


@dataclass(frozen=True)
class Admitted(Event):
    """Its turn has come."""

    number: ClassVar[int] = 2


@dataclass(frozen=True)
class SubmissionBegun(Event):
    """sbatch is about to run for what is in `directory`, which need not exist yet."""

    number: ClassVar[int] = 3
    directory: str


@dataclass(frozen=True)
class SubmissionEnded(Event):
    """What came of it. submitted: `jobs` are there (more than one, where it was submitted several times); refused:
    Slurm will not have it so; unreached: the controller never got it; absent: there is certainly no job; unknown:
    nobody could find out. `words` are sbatch's or our own, in a sentence."""

    number: ClassVar[int] = 4
    outcome: str
    jobs: list[str] = field(default_factory=list)
    cluster: str = ""
    words: str = ""


@dataclass(frozen=True)
class EngineBegun(Event):
    """The engine for an adopted allocation is about to be started."""

    number: ClassVar[int] = 5


@dataclass(frozen=True)
class EngineStarted(Event):
    """It is there: its process on this host, and the unit of the user manager that holds it ("": none)."""

    number: ClassVar[int] = 6
    run_id: str
    run_dir: str
    pid: int
    unit: str = ""


@dataclass(frozen=True)
class EngineRefused(Event):
    """It cannot be started, and is not there."""

    number: ClassVar[int] = 7
    code: int
    words: str


@dataclass(frozen=True)
class StateSeen(Event):
    """What Slurm shows of the job, or of one of its parts."""

    number: ClassVar[int] = 8
    jobid: str
    slurm: str
    reason: str = ""


@dataclass(frozen=True)
class RunSeen(Event):
    """A run of the job has opened its directory."""

    number: ClassVar[int] = 9
    run_id: str
    run_dir: str


@dataclass(frozen=True)
class RunTold(Event):
    """Record `line` of a run's journal, as a sentence; `record` is the name of its event."""

    number: ClassVar[int] = 10
    run_id: str
    line: int
    record: str
    text: str


@dataclass(frozen=True)
class RunOver(Event):
    """A run has left its receipt; or, `lost`, its engine is gone without one."""

    number: ClassVar[int] = 11
    run_id: str
    lost: bool = False


@dataclass(frozen=True)
class StopAsked(Event):
    """Somebody wants it to end: `stop`, in order by its engine, or `cancel`, by Slurm. `part`: that task of an array
    alone."""

    number: ClassVar[int] = 12
    how: str
    part: str = ""


@dataclass(frozen=True)
class CancelTried(Event):
    """scancel was run: Slurm has taken it for these jobs and tasks ([] without trouble: for all that were to be
    cancelled)."""

    number: ClassVar[int] = 13
    trouble: str = ""
    jobs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StopTried(Event):
    """The run's engine ("": that of the last attempt) was told to stop; or could not be told, for the `trouble`."""

    number: ClassVar[int] = 14
    trouble: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class JobEnded(Event):
    """Slurm has nothing more to tell about the job, or one of its parts: `standing` is that of the truth."""

    number: ClassVar[int] = 15
    jobid: str
    standing: str
    slurm: str = ""


@dataclass(frozen=True)
class Sealed(Event):
    """The verdict, and where it is proven. `verdict` has outcome, code, origin, reason and summary."""

    number: ClassVar[int] = 16
    verdict: JsonObject
    receipt: str = ""
    first_failure: str = ""


@dataclass(frozen=True)
class Copied(Event):
    """What its runs left was copied to where the settings say, if they say so; with what could not be, in sentences."""

    number: ClassVar[int] = 17
    trouble: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Troubled(Event):
    """Something keeps the service from knowing or doing more, in a sentence; "" when it is over."""

    number: ClassVar[int] = 18
    text: str


KINDS: Final[dict[str, type[Event]]] = {
    kind.__name__: kind
    for kind in (
        Accepted,
        Admitted,
        SubmissionBegun,
        SubmissionEnded,
        EngineBegun,
        EngineStarted,
        EngineRefused,
        StateSeen,
        RunSeen,
        RunTold,
        RunOver,
        StopAsked,
        CancelTried,
        StopTried,
        JobEnded,
        Sealed,
        Copied,
        Troubled,
    )
}
