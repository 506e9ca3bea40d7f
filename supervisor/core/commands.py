"""Everything that the machine can ask for. The engine carries commands out and answers with events.

Each command names what is wanted; how it is done (srun, a local process, a container) is the launcher's business.
`DURABLE` commands are carried out only after the record that led to them is on disk; a stop is carried out first
and journalled after, for no dead file system may keep GPUs burning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """Base of all commands."""

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class StartStep(Command):
    """Make the step of a rank: answers StepSpawned or StepRefused, then Hello, and StepEnded at its end."""

    rank: int


@dataclass(frozen=True)
class StartRank(Command):
    """Let the agent exec the rank's command: answers RankStarted or RankRefused, then RankEnded and TreeGone."""

    rank: int


@dataclass(frozen=True)
class StopRank(Command):
    """Signal the rank and kill its tree after `grace` seconds; its step will end with `exit`."""

    rank: int
    reason: str
    grace: float
    exit: int


@dataclass(frozen=True)
class KillRank(Command):
    """Kill the rank's tree now; its step will end with `exit`."""

    rank: int
    exit: int


@dataclass(frozen=True)
class ReleaseStep(Command):
    """The rank's tree is gone: let its agent exit with code `exit`."""

    rank: int
    exit: int


@dataclass(frozen=True)
class KillStep(Command):
    """End the step from outside: close the channel, TERM to srun, then KILL."""

    rank: int


@dataclass(frozen=True)
class Sweep(Command):
    """The agent is gone without having said that its tree is: look for the tree on the node and kill it."""

    rank: int


@dataclass(frozen=True)
class ReadMarker(Command):
    """Look at the marker and at the note now: answers MarkerRead with the same `asked`, a sequence number by which
    an answer to an earlier question is told apart."""

    asked: int


@dataclass(frozen=True)
class PublishMarker(Command):
    """Publish the marker; `replace` what is no marker of this run (the coordinator is known to be gone)."""

    code: int
    by: str
    replace: bool


@dataclass(frozen=True)
class CheckArtifacts(Command):
    """Look at every contract now: answers ArtifactSeen for each that changed, then ArtifactsLooked with `asked`."""

    asked: int


@dataclass(frozen=True)
class Collect(Command):
    """Collect logs and artifacts, within `limit` seconds: answers Collected."""

    limit: float


@dataclass(frozen=True)
class Finish(Command):
    """Every rank is over and the evidence is in: judge, write the receipt, end."""


DURABLE: frozenset[type[Command]] = frozenset({StartStep, PublishMarker})


def encode(command: Command) -> dict[str, Any]:
    """The command as a JSON object: its kind under `command`, then its fields."""
    return {"command": command.name, **asdict(command)}
