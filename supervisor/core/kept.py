"""What is known of an allocation that the service holds; `keeping.py` says how it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.core.slurm import parse_state

HELD: Final = frozenset({"pending", "running", "ending"})
"""States in which Slurm has it."""
LIVES: Final = frozenset({"pending", "running"})


@dataclass(frozen=True)
class Run:
    """A run of the allocation: its directory, the last line of its journal that was told, whether it is of the attempt
    that Slurm shows, whether it is over, and whether its engine was told to end in order."""

    directory: str
    told: int = 0
    live: bool = False
    over: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Kept:
    """Everything that is known. `phase` is a state of the interface's, or `new`; `units` are the job's parts (itself,
    where it has none) with Slurm's last word for each."""

    phase: str = "new"
    kind: str = ""
    name: str = ""
    given: str = ""
    digest: str = ""
    jobs: tuple[str, ...] = ()
    cluster: str = ""
    directory: str = ""  # of the submission that is under way, or was the last one
    begun: bool = False  # sbatch, or the engine's start, is under way or in doubt
    attempts: int = 0  # submissions that left no job, by those of whom nobody knows why
    unreached: int = 0
    doubts: int = 0  # how often this submission could not be settled
    runs: Mapping[str, Run] = field(default_factory=dict)
    run_id: str = ""  # of the last attempt
    units: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    pid: int = 0
    unit: str = ""
    stopping: str = ""  # what was asked of the whole: stop or cancel
    parts: Mapping[str, str] = field(default_factory=dict)  # what was asked of tasks by themselves
    cancelled: tuple[str, ...] = ()  # jobs and tasks of which Slurm has taken the scancel
    cancels: int = 0  # how often it has taken one
    tries: int = 0  # of ending something, that failed since one did not
    verdict: Mapping[str, Any] | None = None
    receipt: str = ""
    first_failure: str = ""
    trouble: str = ""

    @property
    def jobid(self) -> str:
        """The job's id; "" before it is known."""
        return self.jobs[0] if self.jobs else ""

    @property
    def run_dir(self) -> str:
        """The directory of the last attempt's run; "" before it is known."""
        return self.runs[self.run_id].directory if self.run_id in self.runs else ""

    @property
    def live(self) -> bool:
        """Whether a run is seen of what Slurm has not ended yet."""
        return any(run.live and not self.is_over(run_id) for run_id, run in self.runs.items())

    @property
    def last_runs(self) -> Mapping[str, str]:
        """The directory of the last attempt's run, by the job or the task that it is of."""
        return {unit_of(run_id): run.directory for run_id, run in self.runs.items()}

    def has_engine(self, part: str = "") -> bool:
        """Whether there is a run, of that part, that can be ended in order."""
        return any(part in ("", unit_of(run_id)) and self._can_end(run_id) for run_id in self.runs)

    def has_part(self, part: str) -> bool:
        """Whether Slurm or a run has shown this task or component."""
        return part in self.units or any(unit_of(run_id) == part for run_id in self.runs)

    def asked(self, name: str = "") -> str:
        """What was asked of the whole, or of the part that a name (a run's, too) means: the strongest that concerns
        it."""
        asked = (self.stopping, self.parts.get(unit_of(name), ""))
        return "cancel" if "cancel" in asked else "stop" if "stop" in asked else ""

    def is_asked(self, how: str, name: str = "") -> bool:
        """Whether asking for this changes nothing: it, or more, was asked for already. A cancel of what lives is sent
        again."""
        before = self.asked(name)
        return before == how == "stop" or (before == "cancel" and (how == "stop" or self.phase not in LIVES))

    @property
    def to_stop(self) -> tuple[str, ...]:
        """The runs whose engines are still to be told to end in order."""
        if self.verdict is not None or not (self.stopping or self.parts):
            return ()
        return tuple(
            run_id
            for run_id, run in self.runs.items()
            if self.asked(run_id) == "stop" and not run.stopped and self._can_end(run_id)
        )

    @property
    def to_cancel(self) -> tuple[str, ...]:
        """The jobs and tasks that are still to be cancelled."""
        parts = (part for part, how in self.parts.items() if how == "cancel")
        wanted = self.jobs if self.stopping == "cancel" else parts
        return tuple(name for name in wanted if name not in self.cancelled)

    @property
    def uncancelled(self) -> tuple[str, ...]:
        """The jobs and tasks that live all the same, although Slurm has taken the scancel."""
        alive = self.cancelled if self.verdict is None and self.phase in LIVES else ()
        return tuple(name for name in alive if not self.is_over(name))

    def is_over(self, name: str) -> bool:
        """Whether Slurm has ended what a run, or a part, is of; a run of several components is of all of them."""
        unit = unit_of(name)
        if unit in self.units:
            words = [self.units[unit]]
        else:
            words = [word for part, word in self.units.items() if unit_of(part) == unit]
        return bool(words) and min(map(liveliness, words)) == OVER

    def _can_end(self, run_id: str) -> bool:
        run = self.runs[run_id]
        return run.live and not run.over and not self.is_over(run_id)

    @property
    def slurm(self) -> str:
        """Slurm's word for the job; of several parts, that of the one that lives most."""
        return min(self.units.values(), key=liveliness, default="")

    @property
    def admitted(self) -> bool:
        """Whether it counts among those that the service has under way. A job that is only followed does not."""
        return self.kind != "followed" and self.phase in ("submitting", "pending", "running", "ending")


def unit_of(name: str) -> str:
    """What is judged by itself, of the name of a run or of a part: the task of an array, else the job."""
    return name.partition(".")[0].partition("+")[0]


def liveliness(word: str) -> int:
    """How much a job in this state lives: 0 most. Nothing is concluded from a word that nobody knows."""
    phase = parse_state(word).phase if word else "unknown"
    return {"running": 0, "waiting": 1, "ending": OVER, "ended": OVER}.get(phase, 0)


OVER: Final = 2
