"""`allocctl logs`: print a run's logs, or follow them.

Following looks again and again (no event crosses a shared file system), survives truncation, replacement and rotation,
and ends when nothing more can come: a run is over when its receipt is there, or its engine gone; a job, when Slurm says
so. A job that has no run yet is waited for, with Slurm's state on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from supervisor.cli.output import refuse
from supervisor.core import codes
from supervisor.runs.growing import KINDS, Logs
from supervisor.runs.registry import NoSuchRun, default_run, find_run
from supervisor.runs.saved import Unreadable

if TYPE_CHECKING:
    from supervisor.cli.live import Printer
    from supervisor.runs.follow import LogLines, News
    from supervisor.runs.target import Target

LONGEST: Final = 1.0  # seconds between looks while nothing comes
DRAIN: Final = 3600.0  # whoever reads the logs may take its time
SILENT: Final = 10.0  # seconds that a Slurm which cannot be asked is waited for when all runs are over

Write = Callable[[str, str, list[bytes]], None]
"""Prints lines of a log: the run's id, the log's name, the lines."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("logs", help="print or follow a run's logs")
    parser.add_argument("run", nargs="?", help="a run's id or directory, or a job's id (default: this allocation's)")
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run, or the job, is over")
    parser.add_argument("--rank", type=int, action="append", help="only this rank (can be repeated)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these (default: all)")
    parser.add_argument("-M", "--cluster", help="with -f: the job's cluster, where there are several")
    parser.add_argument("--json", action="store_true", help="a JSON object a line: schema_version, run, file, text")


def run(args: argparse.Namespace) -> int:
    """Print the logs. 69 when there is no such run, or it has no such rank."""
    try:
        return _follow(args) if args.follow else _print(args)
    except (NoSuchRun, Unreadable) as error:
        return refuse(args, error, codes.UNREACHABLE)


def _print(args: argparse.Namespace) -> int:
    """What is there now. Raises NoSuchRun."""
    run_dir = find_run(args.run)
    logs = Logs(run_dir, lambda rank, kind: _is_wanted(args, rank, kind))
    write, run_id = _writer(args, None), os.path.basename(run_dir)
    more = True
    while more:
        for name, lines in logs.look(last=True):
            write(run_id, name, lines)
        more = logs.more
    for name, lines in logs.last_lines():
        write(run_id, name, lines)
    if not logs.names():
        return refuse(args, f"there are no such logs in {logs.directory}", codes.UNREACHABLE)
    return codes.OK


def _is_wanted(args: argparse.Namespace, rank: int, kind: str) -> bool:
    return (args.rank is None or rank in args.rank) and (args.kind is None or kind in args.kind)


def _writer(args: argparse.Namespace, jobid: str | None) -> Write:
    """How lines are printed."""
    from supervisor.cli.telling import put, write

    def as_json(run_id: str, name: str, lines: list[bytes]) -> None:
        texts = (line.decode(errors="replace") for line in lines)
        documents = ({"schema_version": 1, "run": run_id, "file": name, "text": text} for text in texts)
        write("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode())

    return as_json if args.json else lambda run_id, name, lines: put(run_id, name, lines, jobid)


# --- following -------------------------------------------------------------------------------------------------------


def _follow(args: argparse.Namespace) -> int:
    """Follow to the end. Raises NoSuchRun, Unreadable, and OSError when nobody reads any more."""
    from supervisor.cli.live import Printer
    from supervisor.core.parts import parse_target
    from supervisor.runs.target import find_target, run_target

    name = args.run or default_run()
    try:
        parse_target(name)
    except ValueError:
        target = run_target(find_run(name))
    else:
        target = find_target(name, args.cluster)
    printer = Printer(sys.stderr)
    try:
        asyncio.run(_Following(args, target, printer).run())
    finally:
        printer.close()
    return codes.OK


class _Following:
    """Logs are followed until nothing more can come: of one run, its end; of a job, what Slurm says."""

    def __init__(self, args: argparse.Namespace, target: Target, printer: Printer) -> None:
        from supervisor.cli.telling import StoryTeller
        from supervisor.runs.follow import Follower

        self._args = args
        self._target = target
        self._teller = StoryTeller(target, printer)
        self._asks = not target.local and any(map(shutil.which, ("squeue", "sacct", "scontrol")))
        self._write = _writer(args, None if target.directories else target.jobid)
        self._runs_over = asyncio.Event()
        self._follower = Follower(
            target.jobid,
            target.places,
            lambda _state, rank, kind: _is_wanted(args, rank, kind),
            directories=target.directories,
            tasks="_" not in target.jobid,
            since=target.since,
            engine=not self._asks,
        )

    async def run(self) -> None:
        """To the end. Raises Unreadable when the run has no such rank, OSError when nobody reads any more."""
        from supervisor.runs.looks import Looks
        from supervisor.runs.waiting import first_error

        looks = Looks(self._follower, self._heard, self._lines, longest=LONGEST)
        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(looks.run())
                await self._end()
                await looks.drain(DRAIN)
                looking.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _end(self) -> None:
        """Wait until nothing more can come."""
        async with asyncio.TaskGroup() as group:
            over = group.create_task(self._runs_over.wait())
            tasks = [over, *([group.create_task(self._job_end())] if self._asks else [])]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A job whose runs are over may be queued again: it is Slurm that knows, if it can be asked.
            while not self._target.directories and self._asks and not tasks[-1].done():
                await asyncio.wait(tasks[-1:], timeout=SILENT)
                if self._teller.away:
                    break
            for task in tasks:
                task.cancel()

    async def _job_end(self) -> None:
        from supervisor.runs.waiting import job_end
        from supervisor.scheduler.client import SlurmClient
        from supervisor.scheduler.parts import list_parts
        from supervisor.scheduler.poller import Poller

        client = SlurmClient(cluster=self._target.cluster)
        poller = Poller(client)
        async with asyncio.TaskGroup() as group:
            polling = group.create_task(poller.run())
            await job_end(
                self._target, poller, lambda jobid: list_parts(client, jobid), self._teller.seen, self._teller.ended
            )
            polling.cancel()

    def _heard(self, news: News) -> None:
        from supervisor.runs.follow import Told, Trouble

        if isinstance(news, Trouble):
            self._teller.news(news)
        elif isinstance(news, Told):
            wanted = self._args.rank
            if news.record.seq == 1 and wanted and not any(rank < len(news.state.ranks) for rank in wanted):
                raise Unreadable(f"the run has no such rank: it has {len(news.state.ranks)}, from 0 on")
        elif all(run.over for run in self._follower.runs.values()):
            self._runs_over.set()

    def _lines(self, lines: LogLines) -> None:
        self._write(lines.run_id, lines.log, lines.lines)
