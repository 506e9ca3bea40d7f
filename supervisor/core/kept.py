"""What is known of an allocation that the service holds; `keeping.py` says how it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.core.slurm import parse_state

HELD: Final = frozenset({"pending", "running", "ending"})
"""States in which Slurm has it."""


@dataclass(frozen=True)
class Run:
    """A run of the allocation: its directory, the last line of its journal that was told, and whether it is over."""

    directory: str
    told: int = 0
    over: bool = False


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
    live: bool = False  # that run is of the attempt that Slurm shows
    units: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    pid: int = 0
    unit: str = ""
    stopping: str = ""
    tries: int = 0  # of what is being stopped so
    taken: bool = False  # the stop or the cancel was taken
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
    def has_engine(self) -> bool:
        """Whether a run is seen of the attempt that Slurm shows, and is not over: one that can be ended in order."""
        return self.live and not self.runs[self.run_id].over

    @property
    def slurm(self) -> str:
        """Slurm's word for the job; of several parts, that of the one that lives most."""
        return min(self.units.values(), key=liveliness, default="")

    @property
    def admitted(self) -> bool:
        """Whether it counts among those that the service has under way. A job that is only followed does not."""
        return self.kind != "followed" and self.phase in ("submitting", "pending", "running", "ending")


def liveliness(word: str) -> int:
    """How much a job in this state lives: 0 most. Nothing is concluded from a word that nobody knows."""
    phase = parse_state(word).phase if word else "unknown"
    return {"running": 0, "waiting": 1, "ending": OVER, "ended": OVER}.get(phase, 0)


OVER: Final = 2
