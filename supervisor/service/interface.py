"""What answers on the socket: allocations, and what can be asked of them.

Two things answer: the daemon (`holder.py`), which holds many allocations, and `allocctl run --serve`, which has one run
and nothing else. The API (`api.py`) knows only this interface; who answers knows nothing of HTTP.

An *allocation* is known by its key, which it keeps for ever, and may be named by its job id or a run's id besides. Each
change of any allocation is an event with a number (`seq`) that grows by one over all of them and is never reused, also
not after a restart: who has seen event 41 can ask for what came after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

Document = dict[str, Any]

Kind = Literal["submitted", "adopted", "followed", "served"]
State = Literal["queued", "submitting", "pending", "running", "ending", "damaged", "ended"]
"""queued: waits for admission; submitting: sbatch (or the engine's start) is under way, or in doubt; pending: Slurm has
it, no run yet; running: a run was seen; ending: Slurm says it is over, the truth is being established; damaged: its
book cannot be read, and nothing is done for it; ended."""

STATES: Final[tuple[State, ...]] = ("queued", "submitting", "pending", "running", "ending", "damaged", "ended")


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation as it is now; everything that `list`, `show` and `status` tell."""

    key: str
    kind: Kind
    state: State
    name: str  # the plan's
    created: str  # UTC, ISO 8601
    changed: str
    jobid: str | None = None
    cluster: str | None = None
    run_id: str | None = None  # of the last attempt
    run_dir: str | None = None
    slurm: str | None = None  # Slurm's word for the job's state, as last seen
    reason: str | None = None  # why Slurm lets it wait
    position: int | None = None  # in the queue, from 1
    stopping: str | None = None  # what was asked: "stop" or "cancel"
    verdict: Document | None = None  # as in receipts: outcome, code, origin, reason, summary; None before the end
    first_failure: str | None = None
    receipt: str | None = None  # path of the sealed receipt
    trouble: str | None = None  # what keeps the service from knowing or doing more, in a sentence
    ranks: Sequence[Document] = field(default_factory=tuple)  # rank, role, node, phase, end (as in `status`)
    run_dirs: Sequence[str] = field(default_factory=tuple)  # of an array, of each task's last attempt


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an allocation. `data` is small and JSON-able."""

    seq: int
    utc: str
    key: str
    kind: (
        str  # "accepted", "submitted", "state", "run", "record" (a record of the run's journal), "ended", "trouble"...
    )
    data: Document


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A plan's text, and how `allocctl submit` was called. `cwd` is where relative paths start; `environ` are the
    caller's variables that sbatch may read."""

    plan: str
    cwd: str
    options: Sequence[str] = ()  # sbatch's
    directory: str | None = None  # where run directories are made
    cluster: str | None = None
    allocctl: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdoptRequest:
    """Run a plan's steps in an allocation that somebody else made, by an engine that this host starts."""

    plan: str
    jobid: str
    cwd: str
    directory: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """Why something cannot be done. `status` is an HTTP status, `kind` a word from a closed list that programs can
    rely on (`not_found`, `conflict`, `invalid`, `unfit`, `busy`, `unsupported`, `unavailable`, `storage`)."""

    def __init__(self, status: int, kind: str, text: str, **more: Any) -> None:
        super().__init__(text)
        self.status, self.kind, self.text, self.more = status, kind, text, more


def none_yet(seq: int, last: int) -> Refusal:
    """Who has seen an event that has not been is told so: what it knows is of a state that was removed, and it would
    wait for a number whose events it has missed."""
    text = f"there was no event {seq} yet, the last one is {last}: the state that told of it is gone; begin anew"
    return Refusal(410, "gone", text, last=last)


class Answering(Protocol):
    """Who answers. Every method is called in the event loop and may raise Refusal."""

    def allocations(self) -> Sequence[Allocation]:
        """All of them, in the order in which they were accepted."""

    def find(self, name: str) -> Allocation:
        """By key, job id or run id (the last one that fits); by the id of an array's task, or its run, as that task is:
        its run, state and what was asked of it, without a verdict. Raises Refusal (404)."""

    async def submit(self, request: SubmitRequest, key: str | None) -> Allocation:
        """Accept a plan. It is on the disk when this returns. `key` is the caller's idempotency key: the same key with
        the same request returns the same allocation, with another one it is refused (409)."""

    async def adopt(self, request: AdoptRequest, key: str | None) -> Allocation:
        """Accept a plan for an allocation that exists."""

    async def follow(self, jobid: str, cluster: str | None) -> Allocation:
        """Take a job that runs already, or has ended, into the book: to follow, verify and collect."""

    async def stop(self, name: str, how: Literal["stop", "cancel"]) -> Allocation:
        """Ask for an orderly end of its engine (of an array, of each task's), or (cancel: only what was submitted here)
        scancel of its job. Where the name is that of an array's task, of that task alone."""

    def events(self, after: int | None, key: str | None = None) -> AsyncGenerator[Event, None]:
        """Events with a greater number (None: from the oldest that is kept), those that are known first, then as they
        come, until the generator is closed or nothing more can come. Raises Refusal (410), already when it is called,
        when `after` is older than what is kept, or was never told here. `key`: only this allocation's."""

    def health(self) -> Document:
        """How the one who answers is: version, host, pid, since when, how many allocations by state, what is wrong,
        the number of the last event."""

    def metrics(self) -> bytes:
        """Prometheus' text format."""
