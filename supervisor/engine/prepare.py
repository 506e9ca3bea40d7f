"""What has to be there before the first step, and what may not: the run directory and everything in it.

All of it blocks and is called before the loop does anything else. Every refusal is an `Unfit` with a sentence that says
what to do; nothing has been started then, and the exit code is 78.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from supervisor import agent
from supervisor.agent.build import agent_archive
from supervisor.contracts import Way, directories, places, preexisting
from supervisor.core.artifacts import instances
from supervisor.core.layout import AGENT, PLAN_COPY, SHELL, Layout
from supervisor.core.plan import Plan
from supervisor.engine.markers import note_path

MAX_RUNS: Final = 10_000  # further runs in one allocation
OWN_DESCRIPTORS: Final = 64  # what an engine needs itself
RANK_DESCRIPTORS: Final = 6  # and for each rank: two pipes, a pidfd, logs, a search


class Ids(Protocol):
    """Who sees to it that no two runs have the same id (`runs/registry.py`)."""

    def take(self, run_id: str, run_dir: str, /) -> bool:
        """Take it for this run; False when another one has it."""

    def give_back(self, run_id: str, run_dir: str, /) -> None:
        """The run came to nothing."""


class Unfit(Exception):
    """The plan, the settings or the machine are not fit to start; the message says what to do."""


@dataclass(frozen=True)
class Prepared:
    """A run that may start. `held` are descriptors that stay open until this process ends: the run directory, by which
    others know that its engine lives, and the lock of a marker that lies elsewhere. `notes` are sentences for the
    journal."""

    layout: Layout
    held: tuple[int, ...]
    notes: tuple[str, ...] = ()


def layout_for(plan: Plan, base: str, attempt: str, jobid: str, nodes: tuple[str, ...]) -> Layout:
    """The layout of a run that is not made (for a dry run)."""
    run_dir = os.path.join(absolute(base), attempt)
    return Layout(plan, attempt, jobid, run_dir, nodes, secrets.token_hex(8))


def prepare(
    plan: Plan,
    plan_text: str,
    base: str,
    attempt: str,
    jobid: str,
    nodes: tuple[str, ...],
    *,
    further: bool = False,
    ids: Ids | None = None,
) -> Prepared:
    """Make the run directory and what belongs in it. `further`: the run is not the job's own, and never has the plain
    id. `ids`: whom ids of further runs are taken from. Raises Unfit; nothing of it is left then."""
    _make_room(plan.size)
    run_id, run_dir = _make_directory(absolute(base), attempt, further, ids)
    layout = Layout(plan, run_id, jobid, run_dir, nodes, secrets.token_hex(8))
    try:
        return _fill(layout, plan_text)
    except (OSError, Unfit) as error:
        shutil.rmtree(run_dir, ignore_errors=True)
        if ids:
            ids.give_back(run_id, run_dir)
        if isinstance(error, Unfit):
            raise
        where = error.filename or run_dir
        raise Unfit(f"{where}: {error.strerror or error}: choose another place with --dir") from error


def _make_room(ranks: int) -> None:
    """Enough descriptors for that many ranks: the usual soft limit of 1,024 is not. Raises Unfit."""
    wanted = OWN_DESCRIPTORS + RANK_DESCRIPTORS * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise Unfit(f"{ranks} ranks need {wanted} open files, but the limit is {hard}: raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def absolute(base: str) -> str:
    """Where run directories are made, from the root. Raises Unfit for a path that could not be told to anybody, and
    where there is no working directory for the ranks."""
    try:
        path = os.path.join(os.getcwd(), base)
    except FileNotFoundError:
        raise Unfit("the working directory does not exist any more: change to one that does") from None
    path = os.path.normpath(path)
    if not path.isprintable():
        raise Unfit(f"{path!a}: a path that is no printable text: choose another place with --dir")
    return path


def _fill(layout: Layout, plan_text: str) -> Prepared:
    """Everything in the run directory. Raises OSError, Unfit."""
    os.mkdir(layout.logs)
    _write(layout.at(PLAN_COPY), plan_text.encode(), 0o600)  # its env may hold what is nobody else's business
    _write(layout.at(AGENT), agent_archive())
    _write(layout.at(SHELL), Path(agent.__path__[0], SHELL).read_bytes())
    _make_contract_directories(layout)
    _refuse_existing(layout)
    held, notes = _claim_marker(layout)
    directory = os.open(layout.run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return Prepared(layout, (directory, *held), notes)


def _make_directory(base: str, attempt: str, further: bool, ids: Ids | None) -> tuple[str, str]:
    """A directory of this run's own: `base/attempt`, or `.s2`, `.s3` ... for further runs in the same allocation; with
    `further` from `.s1` on. A number that a run has in another directory is passed over."""
    try:
        os.makedirs(base, exist_ok=True)
        for number in range(1, MAX_RUNS):
            run_id = attempt if number == 1 and not further else f"{attempt}.s{number}"
            path = os.path.join(base, run_id)
            try:
                os.mkdir(path)
            except FileExistsError:
                continue
            if ids is None or run_id == attempt or ids.take(run_id, path):
                return run_id, path
            os.rmdir(path)
    except OSError as error:
        what = error.strerror or str(error)
        raise Unfit(f"the run directory cannot be made in {base}: {what}: choose another place with --dir") from error
    raise Unfit(f"{base} has {MAX_RUNS} runs of {attempt} already: choose another place with --dir")


def _write(path: str, data: bytes, mode: int = 0o644) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        file.write(data)


def _make_contract_directories(layout: Layout) -> None:
    """Directories of promised files inside the run directory, so that the ranks need not race to make them and their
    events are seen from the start."""
    for place in places(instances(layout.plan), layout.values):
        for directory in directories(place):
            if directory.is_relative_to(layout.run_dir):
                directory.mkdir(parents=True, exist_ok=True)


def _refuse_existing(layout: Layout) -> None:
    """Nothing that exists before the run may count as its output, and nothing is overwritten."""
    found: list[str] = []
    way = Way()
    for place in places(instances(layout.plan), layout.values):
        found += (f"{place.root}/{path}" for path in preexisting(place, way))
    if found:
        listed = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise Unfit(f"outputs that the plan promises exist before the run: {listed}: move them away first")


def _claim_marker(layout: Layout) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Another run's plan may name our marker, or ours another's: a lock beside it is held for as long as this engine
    lives (the kernel gives it back, whatever kills us). Where the file system has no locks, that is noted."""
    marker = layout.marker
    os.makedirs(os.path.dirname(marker), exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"{marker}.lock", flags, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise Unfit(f"the marker {marker} is used by a run that lives: name another one (marker.path)") from error
        text = f"{marker}: {error.strerror}: nothing keeps a second run from using the same marker"
        return (), (text, *_set_aside_old_marker(layout))
    return (descriptor,), _set_aside_old_marker(layout)


def _set_aside_old_marker(layout: Layout) -> tuple[str, ...]:
    """A marker, or a note of a failed part, that is there before the run is of an earlier attempt (a requeued job keeps
    its id). Scripts write markers that name no attempt, so it would be believed: it is renamed, which loses nothing."""
    notes = []
    for path in (layout.marker, str(note_path(layout.marker))):
        aside = f"{path}.before.{layout.run_id}"
        if os.path.basename(path) in os.listdir(os.path.dirname(path)):
            os.rename(path, aside)
            notes.append(f"{path} was there before the run: it is of an earlier attempt, and is now {aside}")
    return tuple(notes)


def local_attempt() -> str:
    """The id of a run outside of Slurm."""
    return f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def slurm_nodes(plan: Plan, allocated: Sequence[str]) -> tuple[str, ...]:
    """The node of each rank in an allocation. Raises Unfit when the plan's nodes are not the allocation's."""
    if isinstance(plan.nodes, tuple):
        absent = [name for name in plan.nodes if name not in allocated]
        if absent:
            have = ",".join(allocated)
            raise Unfit(f"the plan names {', '.join(absent)}, but the allocation has {have}: change job.nodes")
        return plan.nodes
    if plan.nodes > len(allocated):
        raise Unfit(
            f"the plan wants {plan.nodes} nodes, but the allocation has {len(allocated)} ({','.join(allocated)}): "
            "ask sbatch for more (--nodes) or change job.nodes"
        )
    return tuple(allocated[: plan.nodes])


def local_nodes(plan: Plan) -> tuple[str, ...]:
    """A name for each node on this machine: the plan's, or loopback addresses, so that each rank has one of its own
    at which its servers can be reached."""
    if isinstance(plan.nodes, tuple):
        return plan.nodes
    return tuple(f"127.0.{index // 250}.{index % 250 + 1}" for index in range(plan.nodes))
