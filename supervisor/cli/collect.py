"""`allocctl collect`: collect a run's files once more, later: what the plan names, from where it is now.

A receipt is not touched: what it says of checksums was true when it was written. The facts of this collection are in
`collected/collected.json`. Files on the nodes' own disks can be had only while the job still runs; what was fetched
from there before is there, and told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import on_disk
from supervisor.cli.output import complain, refuse, sentence
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, attempt_of, find_run
from supervisor.runs.saved import Unreadable

if TYPE_CHECKING:
    from supervisor.core.allocation import Allocation
    from supervisor.core.layout import Layout
    from supervisor.core.state import RunState
    from supervisor.engine.promised import Collection
    from supervisor.scheduler.client import SlurmClient

FACTS: Final = "collected/collected.json"

Fetch = Callable[[int, float], Awaitable[str]]
"""Fetches from a rank's node within seconds; answers what went wrong."""


class Unreachable(Exception):
    """Why nothing can be fetched from the nodes now."""


class StillRunning(Exception):
    """The run's engine is, or may be, at work."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("collect", help="collect a run's files once more")
    parser.add_argument("run", nargs="?", help="the run's id or directory, allocd's key (default: this one's)")
    add_socket(parser)
    parser.add_argument(
        "--to", metavar="DIR", help="copy the run's files, the collected ones among them, to DIR as well"
    )
    parser.add_argument("--bundle", metavar="FILE", help="make an archive (tar.gz) of logs and collected files")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Collect. 0: everything; 65: something is missing, or was not copied; 69: no such run; 78: it is not over."""
    try:
        run_dir = find_run(on_disk(args, args.run))
        state, layout = _folded(run_dir)
        done = asyncio.run(_collect(state, layout, os.path.abspath(args.bundle) if args.bundle else None))
    except (NoSuchRun, Unreadable) as error:
        return refuse(args, error, codes.UNREACHABLE)
    except StillRunning as error:
        return refuse(args, error, codes.CONFIG)
    document = {
        "schema_version": 1,
        "run_id": layout.run_id,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": done.files,
        "errors": done.errors,
    }
    saved = _save(run_dir, document, done.errors)
    if args.to:
        from supervisor.runs.copies import copy_run

        done.errors += copy_run(run_dir, args.to)
    if args.json:
        print(json.dumps(document, indent=1))
    else:
        for item in done.files:
            print(f"{item['sha256'] or '-' * 64}  {item['path']}")
    for text in done.errors:
        complain(text)
    where = f"; the facts are in {os.path.join(run_dir, FACTS)}" if saved else ""
    complain(f"{len(done.files)} files, {len(done.errors)} errors{where}")
    return codes.ARTIFACTS if done.errors else codes.OK


def _save(run_dir: str, document: dict[str, object], errors: list[str]) -> bool:
    """Write the facts; whether that could be done, else the errors say why."""
    from supervisor.agent.copying import made, written

    *way, name = FACTS.split("/")
    try:
        with (
            made(run_dir, way) as directory,
            written(directory, name, 0o644) as descriptor,
            open(descriptor, "wb", closefd=False) as file,
        ):
            file.write(json.dumps(document, indent=1).encode() + b"\n")
    except OSError as error:
        errors.append(f"the facts could not be written: {sentence(error)}")
        return False
    return True


def _folded(run_dir: str) -> tuple[RunState, Layout]:
    """The run as its journal tells it. Raises Unreadable."""
    from supervisor.core.layout import JOURNAL, Layout
    from supervisor.core.run import IllegalEvent, fold
    from supervisor.engine.journal import read_journal

    try:
        state = fold(read_journal(os.path.join(run_dir, JOURNAL)).records)
    except (OSError, IllegalEvent) as error:
        raise Unreadable(f"{run_dir}: {error}") from error
    opened = state.opened
    if opened is None or state.plan is None:
        raise Unreadable(f"{run_dir}: the run was not opened yet")
    # The nonce is the run's own; in the names of steps another keeps ours apart from its.
    nonce = os.urandom(8).hex()
    return state, Layout(state.plan, opened.run_id, opened.jobid, run_dir, tuple(opened.nodes), nonce)


async def _collect(state: RunState, layout: Layout, archive: str | None) -> Collection:
    """Raises StillRunning."""
    from supervisor.engine.collect import collect
    from supervisor.engine.promised import promised_files
    from supervisor.launch.process import use_pidfd_watcher

    use_pidfd_watcher()
    try:
        fetch = await _way_to_nodes(state, layout)
    except Unreachable as error:
        fetch = partial(_no_way, str(error))
        again = False
    else:
        again = True
    return await collect(
        layout,
        fetch,
        layout.plan.deadlines.collect,
        promised=promised_files(state, layout),
        started=[rank.rank for rank in state.ranks if rank.started],
        again=again,
        archive=archive,
    )


async def _no_way(why: str, rank: int, limit: float) -> str:
    return why


async def _way_to_nodes(state: RunState, layout: Layout) -> Fetch:
    """How to reach the nodes' disks. Raises Unreachable, StillRunning."""
    from supervisor.engine.fetch import fetch
    from supervisor.launch.local import LocalLauncher
    from supervisor.launch.srun import SrunLauncher
    from supervisor.runs.saved import engine_lives
    from supervisor.scheduler.client import SlurmClient

    opened = state.opened
    assert opened is not None  # noqa: S101 - see _folded
    over = state.phase == "ended"
    alive = False if over else engine_lives(layout.run_dir, opened.host, opened.pid)
    if alive:
        raise StillRunning(f"{layout.run_id} is not over: its engine collects when it ends")
    if opened.launcher == "local":
        if opened.host != socket.gethostname():
            raise Unreachable(f"the run was on {opened.host}, and this is another host")
        return partial(fetch, layout, LocalLauncher())
    if not layout.plan.collect.nodes and over:
        raise Unreachable("the plan names no files on nodes")
    client = SlurmClient()
    allocation = await allocation_of(client, layout)
    if alive is None:
        raise StillRunning(f"{layout.run_id}: its job runs, and its engine on {opened.host} may be at work")
    return partial(fetch, layout, SrunLauncher(client, allocation))


async def allocation_of(client: SlurmClient, layout: Layout) -> Allocation:
    """The job's allocation, if that of this very attempt still runs. Raises Unreachable."""
    from supervisor.core.allocation import Allocation, Component
    from supervisor.scheduler.parts import list_parts

    parts = await list_parts(client, layout.jobid) if layout.jobid.isdecimal() else None
    names = parts.names if parts is not None and parts.kind == "het" else (layout.jobid,)
    components = []
    for name in names:
        answer = await client.show_job(name)
        record = answer.record
        if record is None or record.state.phase != "running":
            what = answer.problem or (record.words if record else "Slurm does not know it any more")
            raise Unreachable(f"job {name} does not run, and without it no node can be reached: {what}")
        if record.restarts not in (None, attempt_of(layout.run_id)):
            raise Unreachable(f"job {name} was requeued since: what runs is another attempt")
        components.append(Component(record.jobid, record.nodes))
    allocation = Allocation(layout.jobid, components[0].jobid, attempt_of(layout.run_id), tuple(components))
    if set(layout.nodes) - set(allocation.nodes):
        raise Unreachable(f"job {layout.jobid} is not on the run's nodes any more")
    return allocation
