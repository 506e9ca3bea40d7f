"""What a run knows: the state that the machine in `run.py` folds events into, and the tables of what may happen.

Everything here is frozen: an event makes a new state or, when it is illegal, none. The two tables are the whole
permission: RANK_TABLE says in which phase of a rank an event of that rank may come and which phase follows, RUN_TABLE
in which phases of the run the other events may come.

A rank's phases:

    issued ----> spawned ----> ready ----> launching ----> running ----> ending ----> gone ----> over
       |            |  (hello)    (start sent)   (exec done)  (main process ended)  (tree empty)   ^
       v            |                                                                              |
    withdrawn       +---- its srun ends without the agent's word: sweeping (look on the node) -----+
    (stop decided before the step was made)

    abandoned: a srun that cannot be ended, or a step of which nobody says whether it was made

A run's phases:

    new -> starting -> running -> settling -> stopping -> collecting -> ended
                                  (the work seems    (decided)
                                   done: marker, note
                                   and open contracts)

Every wait has a deadline. Those of a rank hang on its phase: GUARDS says which timers guard which phases, and a timer
is dropped with the last of its phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from supervisor.core import events as ev
from supervisor.core.artifacts import ArtifactState
from supervisor.core.codes import SIGNAL_BASE
from supervisor.core.plan import Plan

# --- tables ------------------------------------------------------------------------------------------------------

TALKING: Final = frozenset({"ready", "launching", "running", "ending", "gone"})
"""Phases in which an agent answers."""

FINAL: Final = frozenset({"over", "abandoned"})

SAME: Final = ""
LATE: Final = "late"
"""Legal, and without consequence: nothing is expected of the rank any more."""

RANK_TABLE: Final[Mapping[type[ev.Event], Mapping[str, str]]] = {
    ev.StepSpawned: {"issued": "spawned", "withdrawn": "spawned", "abandoned": "spawned"},
    ev.StepRefused: {"issued": "over", "withdrawn": "over", "abandoned": "over"},
    ev.Hello: {"spawned": "ready", "abandoned": LATE},
    ev.RankStarted: {"launching": "running", "abandoned": LATE},
    ev.RankRefused: {"launching": "ending", "abandoned": LATE},
    ev.RankEnded: {"running": "ending", "abandoned": LATE},
    ev.TreeGone: {
        "ready": "gone",
        "launching": "gone",
        "running": "gone",  # given up: a process that survives KILL
        "ending": "gone",
        "abandoned": LATE,
    },
    ev.AgentSignalled: {**dict.fromkeys(TALKING, SAME), "abandoned": LATE},
    ev.RankSilent: dict.fromkeys(TALKING, SAME),
    ev.RankHeard: {**dict.fromkeys(TALKING, SAME), "abandoned": LATE},
    ev.StepEnded: {
        "spawned": "over",
        "ready": "over",
        "launching": "sweeping",
        "running": "sweeping",
        "ending": "sweeping",
        "gone": "over",
        "abandoned": "over",
    },
    ev.Swept: {"sweeping": "over"},
}

BEFORE_THE_END: Final = frozenset({"starting", "running", "settling", "stopping", "collecting"})
"""Phases in which the run takes events; those of ranks too."""
ALWAYS: Final = BEFORE_THE_END | {"new", "ended"}

RUN_TABLE: Final[Mapping[type[ev.Event], frozenset[str]]] = {
    ev.RunOpened: frozenset({"new"}),
    ev.TimeLimitKnown: BEFORE_THE_END,
    ev.StopRequested: BEFORE_THE_END,
    ev.TimerFired: BEFORE_THE_END,
    ev.Noted: ALWAYS,
    ev.EngineFault: BEFORE_THE_END,
    ev.MarkerRead: BEFORE_THE_END,
    ev.MarkerPublished: BEFORE_THE_END,
    ev.MarkerFailed: BEFORE_THE_END,
    ev.WatchChanged: BEFORE_THE_END,
    ev.ArtifactSeen: BEFORE_THE_END,
    ev.ArtifactsLooked: BEFORE_THE_END,
    ev.CheckerFault: BEFORE_THE_END,
    ev.Collected: frozenset({"collecting"}),
}

STOP_REASONS: Final = frozenset(
    {"peer_failed", "stop_requested", "deadline", "time_limit", "artifacts_invalid", "completed"}
)

COORDINATOR_FIRST: Final = frozenset({"stop_requested", "deadline", "time_limit"})
"""Stops that end the coordinator before the workers, so that its last measurement sees living engines. After a failure
every rank is stopped at once, and in the other cases the coordinator has ended already."""

GUARDS: Final[Mapping[str, frozenset[str]]] = {
    "hello": frozenset({"issued", "spawned"}),
    "launch": frozenset({"launching"}),
    "silence": frozenset({"ready", "launching", "running", "ending"}),
    "stop": frozenset({"ready", "launching", "running", "ending"}),
    "release": frozenset({"gone"}),
    "kill": frozenset({"withdrawn", "spawned", "ready", "launching", "running", "ending", "gone"}),
    "sweep": frozenset({"sweeping"}),
    "recheck": frozenset({"ending", "gone", "sweeping", *FINAL}),
}
"""Timers of a rank (`stop:3`), and the phases in which there is something for them to guard."""

# --- limits of our own, in seconds; every wait has one ------------------------------------------------------------

KILL_MARGIN: Final = 10.0  # an agent kills its tree at the end of the grace; later than this we end its step
RELEASE_LIMIT: Final = 10.0  # an agent that may exit does so at once
REAP_LIMIT: Final = 15.0  # srun after SIGKILL; longer means a process that cannot die (a dead file system)
SWEEP_LIMIT: Final = 20.0
MARKER_LIMIT: Final = 10.0  # reading or writing the marker on a file system that does not answer
LOOK_LIMIT: Final = 60.0  # the last look at the artifacts: hundreds of megabytes may have come at the last moment
COLLECT_MARGIN: Final = 5.0
EARLY_SIGNAL: Final = 60.0  # Slurm may send its early signal this much before the time asked for (sbatch --signal)
NEAR_LOSS: Final = 5.0  # a peer that ended so shortly before an agent vanished may have lost its connection to it
NEAR_SIGNAL: Final = 1.0  # an agent tells its rank's end before a signal that came with it

ENDING_SIGNALS: Final = frozenset({1, 2, 3, 15})
"""HUP, INT, QUIT, TERM: by these an agent, and whatever else they are sent to, is asked to end."""


# --- facts -------------------------------------------------------------------------------------------------------


KILLED: Final = frozenset({SIGNAL_BASE + 9, SIGNAL_BASE + 15})


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's main process ended, as its agent saw it (`code` or `signal`), or as srun says where no agent
    runs. `ordered`: we had told it to stop. `outside`: the agent was signalled by someone else before."""

    seq: int
    at: float
    code: int | None
    signal: int | None
    core: bool = False
    ordered: bool = False
    outside: int | None = None

    @property
    def native(self) -> int:
        """The code by the shell's convention: 128 + N for signal N."""
        return self.code if self.code is not None else SIGNAL_BASE + (self.signal or 0)

    @property
    def provisional(self) -> bool:
        """Slurm's own terminal state may explain this end: death by TERM or KILL that we did not order (a shell tells
        its child's as 128 + N), or any end after somebody else asked the agent to end."""
        return not self.ordered and (self.outside is not None or self.native in KILLED)


@dataclass(frozen=True)
class Failure:
    """Something that makes the run fail. `what` is from a closed list: exit, signal, not_started, no_hello, step_lost,
    rank_lost, marker, artifact, late, deadline, time_limit, stop, fault."""

    seq: int
    at: float
    rank: int | None
    what: str
    code: int
    origin: str  # native | allocd
    text: str
    provisional: bool = False


@dataclass(frozen=True)
class Decision:
    """The run ends: why (`reason`, a stop reason), since when, and the code that the ranks' steps end with."""

    reason: str
    seq: int
    at: float
    exit: int


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank: what the plan says of it, and what has been seen of it."""

    rank: int
    role: str
    node: str
    grace: float
    stop_signal: str
    critical: bool = True
    may_finish: bool = False
    agent: bool = True
    phase: str = "issued"
    step_name: str | None = None
    step: str | None = None
    host: str | None = None
    pid: int | None = None
    started: bool = False
    end: End | None = None
    refused: str | None = None
    outside: int | None = None  # the signal by which someone else asked the agent to end
    silent: bool = False
    stop: str | None = None  # the reason of our stop order
    exit: int | None = None  # what its step was told to end with
    released: bool = False
    hurried: bool = False  # its agent was told to kill: a second stop request has no grace
    killed_step: bool = False  # we ended its srun from outside: srun's code says nothing then
    suspect: Failure | None = None  # ended while the coordinator may just have finished: a second look is due
    returncode: int | None = None  # srun's
    words: str = ""  # srun's own last words
    killed: int = 0  # processes of its tree that had to be killed
    left: int = 0  # processes that could not be killed; -1: nobody could look


@dataclass(frozen=True)
class MarkerState:
    """`status`: none, publishing, published, blocked (something that is no marker is in its place), failed."""

    status: str = "none"
    replacing: bool = False  # the last try might replace what stood in its place
    code: int | None = None
    outcome: str | None = None
    found: str | None = None  # what the last look saw
    note: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class RunState:
    """A whole run. `deadlines` maps a timer's name to monotonic seconds: the engine fires TimerFired when one is
    due."""

    phase: str = "new"
    opened: ev.RunOpened | None = None
    plan: Plan | None = None
    ranks: tuple[RankState, ...] = ()
    contracts: tuple[ArtifactState, ...] = ()
    watches: Mapping[str, ev.WatchChanged] = field(default_factory=dict)  # by directory: how it is watched now
    deadlines: Mapping[str, float] = field(default_factory=dict)
    decision: Decision | None = None
    failures: tuple[Failure, ...] = ()
    reading: int = (
        0  # settling: sequence number that the look at marker and note must answer; 0: they said nothing else
    )
    look: int = 0  # sequence number that the last look at the artifacts must answer
    declared: bool = False  # the coordinator published 0 itself: ends of workers are no failures any more
    marker: MarkerState = field(default_factory=MarkerState)
    collect_by: float | None = None  # when what agents began to fetch must be collected
    collected: ev.Collected | None = None
    end_at: float | None = None
    end_utc: str | None = None
    stop_signals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what keeps an otherwise clean run from being a proven success
    seq: int = 0
    at: float = 0.0
    started_at: float = 0.0

    @property
    def the_plan(self) -> Plan:
        """The plan of an opened run."""
        assert self.plan is not None  # noqa: S101 - only a run that was not opened lacks one
        return self.plan

    @property
    def coordinator(self) -> RankState | None:
        rank = self.plan.coordinator if self.plan else None
        return None if rank is None else self.ranks[rank]

    @property
    def work_done(self) -> bool:
        """Whoever does the work has done it, as far as exit codes, marker and note tell: contracts may be open."""
        return self.phase == "settling" and not self.reading

    @property
    def coordinator_gone(self) -> bool:
        """No process of the coordinator is left, as far as can be known; or there is none."""
        return self.coordinator is None or self.coordinator.phase in ("gone", *FINAL)

    @property
    def first_failure(self) -> Failure | None:
        """The failure with the lowest sequence number: what happened first."""
        return min(self.failures, key=lambda failure: failure.seq, default=None)

    @property
    def budget(self) -> float:
        """Seconds that an orderly end needs before Slurm's time limit."""
        return self.the_plan.shutdown_budget
