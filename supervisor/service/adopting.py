"""Engines of adopted runs: started here, on a login node, and left to live on; stopped; and what a dead one left.

    start             an engine in a unit (or session) of its own, `spawn.py`; what became of it, `runs/start.py`
    forget            what is kept of a start
    stop              SIGTERM: the engine ends its ranks in order, and leaves its receipt
    stop_leftovers    steps of a run whose engine is gone

A dead engine's agents end their ranks by themselves, within seconds. What they cannot end is a rank without an agent,
whose srun lives on, and one whose agent is dead as well: those are steps that Slurm still has. They are known by their
names, which begin as the run's opening says and as no other's do. They are ended as *steps*, by their ids: first
SIGTERM, then, after a grace, a plain scancel, which kills. The job is somebody else's and is never touched.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from supervisor.core import codes
from supervisor.core.fields import PlanErrors
from supervisor.loop.threads import in_thread
from supervisor.runs import start as starts
from supervisor.runs.papers import papers_of
from supervisor.runs.plans import plan_of
from supervisor.runs.registry import JOURNAL, registry
from supervisor.runs.saved import engine_lives
from supervisor.scheduler.client import Queue
from supervisor.service.interface import AdoptRequest, Refusal
from supervisor.service.spawn import NotSpawned, ends_at_logout, spawn

START_LIMIT: Final = 60.0  # seconds until an engine has opened its run: Slurm is asked three things before
FILES_LIMIT: Final = 10.0
LOOK_PAUSE: Final = 0.05
STOP_MARGIN: Final = 60.0
"""Seconds beyond the plan's shutdown budget until systemd kills an engine that was told to stop: for the journal, the
receipts, and Slurm's records of the steps."""

GRACE: Final = 10.0  # seconds between SIGTERM and the end of a left-over step
GONE_LIMIT: Final = 15.0  # seconds until a step that was ended is out of the controller's list
STEP_PAUSE: Final = 0.5

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has opened its run. `unit` is "" for one in a session of its own."""

    run_dir: str
    run_id: str
    host: str
    pid: int
    unit: str


class Steps(Protocol):
    """What ending steps needs of a Slurm client."""

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs."""

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        """Ids of the job's living steps by name; None when Slurm could not be asked."""

    async def signal_step(self, step: str, signame: str) -> bool:
        """Signal a step's tasks."""

    async def cancel_step(self, step: str) -> bool:
        """End a step at once."""


def start_directory(key: str) -> str:
    """Where the start with this key is kept, if nobody says otherwise. Raises ValueError for no key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key: letters, digits, - _ and . are")
    return os.path.join(starts_directory(), key)


def starts_directory() -> str:
    """Where all starts are kept."""
    return os.path.join(os.path.dirname(registry()), "starts")


# --- start -----------------------------------------------------------------------------------------------------------


async def start(request: AdoptRequest, key: str, directory: str | None = None, *, wanted: bool = True) -> Started:
    """Start an engine for the request, and wait until it has opened its run. The same key never starts two, whenever
    it is asked again: it answers with the one that there is. `directory`: where the start is kept. One that is not
    `wanted` any more is withdrawn, unless an engine has it already. Raises Refusal."""
    place = directory or start_directory(key)
    try:
        found = await in_thread(_open if wanted else _withdraw, place, limit=FILES_LIMIT, place=place)
        if found == "nothing" and wanted:
            await in_thread(_spawn, request, key, place, limit=3 * FILES_LIMIT, place=place)
        return await _opened(place)
    except PlanErrors as error:
        raise Refusal(422, "invalid", str(error)) from error
    except NotSpawned as error:
        text = f"the engine could not be started: {error}; `adopt --foreground` runs it here"
        raise Refusal(503, "unavailable", text) from error
    except OSError as error:
        raise Refusal(507, "storage", f"{error.filename or place}: {error.strerror or error}") from error


def _open(place: str) -> starts.Progress:
    """The start's directory, made once. What became of it so far. Raises OSError."""
    os.makedirs(place, mode=0o700, exist_ok=True)
    return starts.progress(place)


def _withdraw(place: str) -> starts.Progress:
    """Raises OSError."""
    os.makedirs(place, mode=0o700, exist_ok=True)
    return starts.withdraw(place)


def forget(place: str) -> None:
    """Remove what is kept of a start that nobody asks for any more. Blocks; raises nothing."""
    shutil.rmtree(place, ignore_errors=True)


def _spawn(request: AdoptRequest, key: str, place: str) -> None:
    """Raises NotSpawned, OSError, PlanErrors, Refusal."""
    plan = plan_of(request.plan, starts.PLAN, request.environ)
    if why := ends_at_logout():
        raise Refusal(422, "unfit", f"{why}; or let it run here, for as long as you stay: `adopt --foreground`")
    path = os.path.join(place, starts.PLAN)
    temporary = f"{path}.{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(request.plan)  # its env may hold what is nobody else's business
    os.replace(temporary, path)
    base = request.directory or request.environ.get("ALLOCD_RUNS")
    options = [f"--dir={os.path.join(request.cwd, base)}"] if base else []
    allocctl = os.path.join(os.path.dirname(sys.executable), "allocctl")
    spawn(
        [allocctl, "run", f"--jobid={request.jobid}", *options, path],
        unit=f"allocd-run-{key}.service",
        log=os.path.join(place, starts.LOG),
        cwd=request.cwd,
        environ={**request.environ, starts.VARIABLE: place},
        stop_limit=plan.shutdown_budget + plan.deadlines.journal + STOP_MARGIN,
    )


def _progress(place: str) -> starts.Progress:
    """What became of a start. Its copy of the plan goes as soon as no engine will read it any more: the env in it may
    hold secrets. Raises OSError."""
    progress = starts.progress(place)
    if progress in ("run", "failed", "withdrawn"):
        with suppress(OSError):
            os.unlink(os.path.join(place, starts.PLAN))
    return progress


async def _opened(place: str) -> Started:
    """Wait for the run. Raises Refusal with the engine's own words when there will be none."""
    deadline = time.monotonic() + START_LIMIT
    while (progress := await in_thread(_progress, place, limit=FILES_LIMIT, place=place)) != "run":
        late = time.monotonic() > deadline
        if progress == "withdrawn":
            raise Refusal(422, "unfit", "it was stopped before its engine was there", exit=codes.CANCELLED)
        if progress == "failed" or late:
            words = await in_thread(starts.last_words, place, limit=FILES_LIMIT, place=place)
        if progress == "failed":
            raise Refusal(422, "unfit", words or "the engine ended before it had opened its run", exit=codes.CONFIG)
        if late:
            said = f"it said: {words}" if words else f"see {os.path.join(place, starts.LOG)}"
            raise Refusal(503, "unavailable", f"the engine has not opened its run within {START_LIMIT:g} s: {said}")
        await asyncio.sleep(LOOK_PAUSE)
    return await in_thread(_started, place, limit=FILES_LIMIT, place=place)


def _started(place: str) -> Started:
    run_dir = starts.run_of(place)
    opening = papers_of(run_dir).opening
    assert opening is not None  # noqa: S101 - `_progress` has just read it
    host, pid, unit = str(opening["host"]), int(opening["pid"]), str(opening["unit"])
    return Started(run_dir, os.path.basename(run_dir), host, pid, unit)


# --- alive, stop -----------------------------------------------------------------------------------------------------


def alive(run_dir: str, place: str = "") -> bool | None:
    """Whether the run's engine lives; None when it is on another host, or nothing tells. `place`: where its start is
    kept, which tells where the run's directory does not. Blocks. Raises OSError, Unreadable."""
    if (opening := papers_of(run_dir).opening) is not None:
        return engine_lives(run_dir, str(opening.get("host")), int(opening.get("pid", 0)))
    if not os.path.isdir(place):
        return None
    engine = starts.engine(place)
    return engine is not None and (engine.here or None)


def stop(run_dir: str, place: str = "") -> bool:
    """Ask the run's engine to end it in order. False when there is no engine any more. `place`: see `alive`. Blocks.
    Raises OSError, Unreadable, and Refusal when the engine is on another host, or nobody knows where it is."""
    papers = papers_of(run_dir)
    if papers.opening is None:
        return _stop_claimed(place, papers.not_ours[JOURNAL])
    host, pid = str(papers.opening.get("host")), int(papers.opening.get("pid", 0))
    if host != socket.gethostname():
        raise Refusal(409, "conflict", f"the engine of {run_dir} is on {host}: stop it there", host=host)
    return _signal(pid, lambda: engine_lives(run_dir, host, pid) is not False)


def _stop_claimed(place: str, why: str) -> bool:
    """By the claim of its start alone: the run's directory cannot be read. Raises OSError, ValueError, Refusal."""
    if not os.path.isdir(place):
        text = f"its engine cannot be told to end, for nothing tells which process it is: {why}"
        raise Refusal(409, "conflict", text)
    engine = starts.engine(place)
    if engine is not None and not engine.here:
        where = engine.host or "another host"
        raise Refusal(409, "conflict", f"its engine is on {where}: stop it there: {why}", host=engine.host)
    return engine is not None and _signal(engine.pid, lambda: starts.engine(place) == engine)


def _signal(pid: int, is_engine: Callable[[], bool]) -> bool:
    """SIGTERM, if that process is the engine."""
    try:
        descriptor = os.pidfd_open(pid)  # from here on the number cannot become another's
    except OSError:
        return False
    try:
        if not is_engine():
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


# --- what a dead engine left -----------------------------------------------------------------------------------------


async def stop_leftovers(client: Steps, run_dir: str, grace: float = GRACE) -> tuple[list[str], str]:
    """End the steps that a run without a living engine has left: their ids, and a sentence about what is in doubt (""
    for nothing). The run's steps are left alone while its engine lives, or may live on another host. Raises OSError,
    Unreadable."""
    papers = await in_thread(papers_of, run_dir, limit=FILES_LIMIT, place=run_dir)
    prefix = str((papers.opening or {}).get("steps") or "")
    if not prefix or await in_thread(alive, run_dir, limit=FILES_LIMIT, place=run_dir) is not False:
        return [], ""
    left = await _left(client, papers.jobid, prefix)
    if not left:
        return [], "" if left is not None else _unasked(papers.jobid)
    ended = dict(left)
    for step in left.values():
        await client.signal_step(step, "TERM")
    left = await _until_gone(client, papers.jobid, prefix, grace)
    for step in (left or {}).values():
        await client.cancel_step(step)
    if left:
        left = await _until_gone(client, papers.jobid, prefix, GONE_LIMIT)
    trouble = _unasked(papers.jobid) if left is None else ""
    if left:
        trouble = f"steps {', '.join(sorted(left.values()))} were told to end, and are still there"
    return sorted(ended.values()), trouble


def _unasked(jobid: str) -> str:
    return f"Slurm did not say which steps of job {jobid} are left"


async def _until_gone(client: Steps, jobid: str, prefix: str, limit: float) -> dict[str, str] | None:
    """What is left when nothing is, or `limit` seconds have passed."""
    deadline = time.monotonic() + limit
    while True:
        left = await _left(client, jobid, prefix)
        if left == {} or time.monotonic() >= deadline:
            return left
        await asyncio.sleep(STEP_PAUSE)


async def _left(client: Steps, jobid: str, prefix: str) -> dict[str, str] | None:
    """The run's living steps by name, those of its short helpers included; None when Slurm could not be asked. Steps
    on components of a heterogeneous job are these components' own."""
    queue = await client.queue([jobid])
    if queue.problem:
        return None
    found: dict[str, str] = {}
    for raw in {row.jobid for row in queue.rows.values()}:
        steps = await client.steps_by_name(raw)
        if steps is None:
            return None
        found |= {name: step for name, step in steps.items() if _is_ours(name, prefix)}
    return found


def _is_ours(name: str, prefix: str) -> bool:
    return re.fullmatch(rf"(?:[a-z]+-)?{re.escape(prefix)}r\d+", name) is not None
