"""The artifact machine: what each contract has come to, as a table.

    pending --all local ranks valid--> ranks_complete
    pending | ranks_complete --window opened--> finalizing
    any of the three --everything valid--> complete
    any of the three --content that can never become valid--> invalid
    any of the three --deadline--> late (deadline);  finalizing --window closed--> late (finalization)

A *finding* is what one look at the disk said. Looking is somebody else's business (`supervisor.contracts`), and
so is time: the caller opens the window, and says when it or the deadline has passed. The window opens once: nothing
reopens it, nothing restarts it. When it opens depends on the contract:

* that of a self-benchmark's node (`ranked`): when the node's last local rank is done, however long the others take; or
  when nobody is left on the node who could still write;
* any other: when the work is done.

A look that sees less than an earlier one did (a network file system can show the past) takes nothing back.

`complete`, `invalid` and `late` are final. An event that has no row in the table raises IllegalArtifactEvent and
changes nothing: states are values, and a new one is returned only when the event was legal.

Only self-benchmarks answer `ranks_complete`: every other contract goes from pending, with or without a window,
straight to an end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from supervisor.core.artifact_table import Artifact
    from supervisor.core.plan import Plan

PROBLEMS_CAP: Final = 100
"""Problems of one finding that are told."""

_MORE: Final = re.compile("and ([0-9]+) more")

State = Literal["pending", "ranks_complete", "finalizing", "complete", "invalid", "late"]
Answer = Literal["pending", "ranks_complete", "valid", "invalid"]
Reason = Literal["deadline", "finalization"]
Event = Literal["pending", "ranks_complete", "valid", "invalid", "window", "deadline", "finalization"]
"""An answer of a finding; `window`: the finalization window opens; `deadline`, `finalization`: it has passed."""

FINAL: Final[frozenset[State]] = frozenset({"complete", "invalid", "late"})

TRANSITIONS: Final[dict[State, dict[Event, State]]] = {
    "pending": {
        "pending": "pending",
        "ranks_complete": "ranks_complete",
        "valid": "complete",
        "invalid": "invalid",
        "window": "finalizing",
        "deadline": "late",
    },
    "ranks_complete": {
        "pending": "ranks_complete",
        "ranks_complete": "ranks_complete",
        "valid": "complete",
        "invalid": "invalid",
        "window": "finalizing",
        "deadline": "late",
    },
    "finalizing": {
        "pending": "finalizing",
        "ranks_complete": "finalizing",
        "valid": "complete",
        "invalid": "invalid",
        "deadline": "late",
        "finalization": "late",
    },
    "complete": {},
    "invalid": {},
    "late": {},
}
"""state -> event -> next state. What is not here is illegal."""


ASIDE: Final = "unannounced"
"""The kind of a file that is there and does not count, whatever becomes of it: a probe that nobody has announced."""


class IllegalArtifactEvent(Exception):
    """An event that its state does not allow; nothing was changed."""


@dataclass(frozen=True, slots=True)
class FileFact:
    """A file that a look has seen."""

    path: str  # relative to the artifact's root
    size: int  # bytes
    sha256: str | None  # hexadecimal; None when the content was not (wholly) read
    kind: str = "file"  # what it is to its contract: file, rank, merged, probe, checksums, or ASIDE
    problems: tuple[str, ...] = ()  # what is wrong with it, or still missing in it
    mtime_ns: int | None = None  # the time of its last change when it was read


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at the disk said about one contract."""

    contract: str  # the instance's id: "result", or "result@3" for rank 3's node
    answer: Answer
    problems: tuple[str, ...] = ()  # each names the file, the place in it, what was found and what was expected
    files: tuple[FileFact, ...] = ()
    notes: tuple[str, ...] = ()  # what the files say besides, which judges nothing

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """The finding that `dataclasses.asdict` (through JSON) made `data` from."""
        files = tuple(FileFact(**{**fact, "problems": tuple(fact["problems"])}) for fact in data["files"])
        return cls(data["contract"], data["answer"], tuple(data["problems"]), files, tuple(data["notes"]))

    def told(self) -> Finding:
        """The same, with no more problems than can be told each time: first what is wrong with files that are there,
        then what is missing. What is wrong with each file stays with it."""
        here = {problem for fact in self.files for problem in fact.problems}
        return replace(self, problems=few(sorted(self.problems, key=lambda each: each not in here), PROBLEMS_CAP))

    def since(self, before: Finding | None) -> tuple[tuple[FileFact, ...], tuple[str, ...]]:
        """Files that `before` knew nothing of, or something else; and the paths of those that are gone."""
        known = {fact.path: fact for fact in before.files} if before is not None else {}
        here = {fact.path for fact in self.files}
        changed = tuple(fact for fact in self.files if known.get(fact.path) != fact)
        return changed, tuple(path for path in known if path not in here)

    def after(self, before: Finding | None, gone: Collection[str]) -> Finding:
        """The inverse of `since`: this one holds only the files that have changed. All of them are told by their
        paths' order, in whatever order they came."""
        known = {fact.path: fact for fact in before.files} if before is not None else {}
        known |= {fact.path: fact for fact in self.files}
        return replace(self, files=tuple(fact for path, fact in sorted(known.items()) if path not in gone))


def few(problems: Sequence[str], most: int = 3) -> tuple[str, ...]:
    """The first problems, and how many more there are; also of problems that are few already."""
    left = len(problems) - most
    if left <= 0 or (left == 1 and _MORE.fullmatch(problems[-1])):
        return tuple(problems)
    more = _MORE.fullmatch(problems[-1])
    return (*problems[:most], f"and {left + int(more[1]) - 1 if more else left} more")


@dataclass(frozen=True, slots=True)
class Instance:
    """A contract as it is waited for: one for the run, or one for the node of a rank. `node` is that node's number
    among the `nodes` that have this contract, by which a self-benchmark's ranks are counted."""

    contract_id: str
    artifact: Artifact
    rank: int | None
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class ArtifactState:
    """Where one contract stands."""

    contract: str
    rank: int | None
    ranked: bool = False  # its window opens when its node's last local rank is done
    state: State = "pending"
    reason: Reason | None = None  # why it is late
    finding: Finding | None = None  # the last one
    required: bool = True  # the run is no success without it

    @property
    def final(self) -> bool:
        """Nothing changes this state any more."""
        return self.state in FINAL


def instances(plan: Plan) -> tuple[Instance, ...]:
    """Every contract of `plan`: in the plan's order, those per node by rank.

    Without `roles`, all ranks are nodes; of a self-benchmark all but the coordinator, which measures nothing, unless it
    is alone."""
    found: list[Instance] = []
    for artifact in plan.artifacts:
        if not artifact.per_node:
            found.append(Instance(artifact.name, artifact, None))
            continue
        wanted = [role for role in plan.roles if not artifact.roles or role.name in artifact.roles]
        ranks = sorted(rank for role in wanted for rank in role.ranks)
        if artifact.contract == "fpm" and not artifact.roles:
            ranks = [rank for rank in ranks if rank != plan.coordinator] or ranks
        found += (
            Instance(f"{artifact.name}@{rank}", artifact, rank, node, len(ranks)) for node, rank in enumerate(ranks)
        )
    return tuple(found)


def initial(instance: Instance) -> ArtifactState:
    """The state in which a contract begins."""
    artifact = instance.artifact
    return ArtifactState(
        instance.contract_id, instance.rank, ranked=artifact.contract == "fpm", required=artifact.required
    )


def observe(state: ArtifactState, finding: Finding) -> ArtifactState:
    """What a look at the disk makes of `state`. Raises IllegalArtifactEvent for another contract's finding."""
    if finding.contract != state.contract:
        raise IllegalArtifactEvent(f"contract {state.contract}: a finding about {finding.contract}")
    return replace(_step(state, finding.answer), finding=finding)


def open_window(state: ArtifactState) -> ArtifactState:
    """The finalization window opens; a second time is illegal."""
    return _step(state, "window")


def expire(state: ArtifactState, reason: Reason) -> ArtifactState:
    """A limit has passed: the collection deadline, or the finalization window (illegal while none is open)."""
    return replace(_step(state, reason), reason=reason)


def _step(state: ArtifactState, event: Event) -> ArtifactState:
    following = TRANSITIONS[state.state].get(event)
    if following is None:
        raise IllegalArtifactEvent(f"contract {state.contract}: {event} while {state.state}")
    return replace(state, state=following)
