"""`allocctl logs`: print a run's logs, or follow them.

Following looks again and again (no event crosses a shared file system), survives truncation, replacement and rotation,
and ends when nothing more can come: a run is over when its receipt is there, or its engine gone; a job, when Slurm says
so. A job that has no run yet is waited for, with Slurm's state on stderr.

What allocd holds is followed by its looks. When it goes away, the files are followed from here, behind the lines that
were printed; where there are none yet, it is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import disk_name, find_held, held_directory
from supervisor.cli.output import complain, put, put_lines, refuse
from supervisor.core import codes
from supervisor.runs.growing import KINDS, Logs
from supervisor.runs.registry import NoSuchRun, attempt_of, default_run, find_run, job_of_component
from supervisor.runs.saved import Document, Unreadable

if TYPE_CHECKING:
    from supervisor.cli.daemon import Daemon
    from supervisor.runs.follow import LogLines


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("logs", help="print or follow a run's logs")
    parser.add_argument("run", nargs="?", help="a run's id or directory, a job's id, allocd's key (default: this)")
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run, or the job, is over")
    parser.add_argument("--rank", type=int, action="append", help="only this rank (can be repeated)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these (default: all)")
    parser.add_argument("-M", "--cluster", help="with -f: the job's cluster, where there are several")
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object a line: schema_version, run, file, text")


def run(args: argparse.Namespace) -> int:
    """Print the logs. 69 when there is no such run, or it has no such rank."""
    try:
        args.run = job_of_component(args.run or "") or args.run
        daemon, held = find_held(args, args.run) or (None, None)
        if args.follow and held and daemon:
            return _follow_held(args, daemon, held)
        if held and args.run == held["key"]:
            args.run = disk_name(held, job=args.follow)
        return _follow(args) if args.follow else _print(args, held)
    except NoSuchRun as error:
        from supervisor.cli.submitted import tell_output

        return tell_output(args, error)
    except Unreadable as error:
        return refuse(args, error, codes.UNREACHABLE)


def _print(args: argparse.Namespace, held: Document | None) -> int:
    """What is there now. Raises NoSuchRun."""
    run_dir = held_directory(held, args.run) or find_run(args.run)
    logs = Logs(run_dir, lambda rank, kind: _is_wanted(args, rank, kind))
    run_id = os.path.basename(run_dir)
    if attempt_of(run_id) and args.run and not attempt_of(args.run):
        complain(f"these are the logs of {run_id}, the job's last attempt")
    more = True
    while more:
        for name, lines in logs.look(last=True):
            _write(args, run_id, run_id, name, lines)
        more = logs.more
    for name, lines in logs.last_lines():
        _write(args, run_id, run_id, name, lines)
    if not logs.names():
        return refuse(args, f"there are no such logs in {logs.directory}", codes.UNREACHABLE)
    return codes.OK


def _is_wanted(args: argparse.Namespace, rank: int, kind: str) -> bool:
    return (args.rank is None or rank in args.rank) and (args.kind is None or kind in args.kind)


def _write(args: argparse.Namespace, jobid: str | None, run_id: str, name: str, lines: list[bytes]) -> None:
    """Print lines of a log, which begin with the run's id where it is another than the job's first. Raises OSError."""
    if not args.json:
        put_lines(run_id, name, lines, jobid)
        return
    texts = (line.decode(errors="replace") for line in lines)
    documents = ({"schema_version": 1, "run": run_id, "file": name, "text": text} for text in texts)
    put("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents).encode())


# --- following -------------------------------------------------------------------------------------------------------


def _follow_held(args: argparse.Namespace, daemon: Daemon, held: Document) -> int:
    """Follow by allocd's looks. Raises NoSuchRun, Unreadable, OSError."""
    from supervisor.cli.accepted import has_job
    from supervisor.cli.asking import NobodyAnswers, Refused
    from supervisor.cli.daemon import code_of, names_of, standing

    key, printed = held["key"], Counter[tuple[str, str]]()
    while True:
        why = ""
        try:
            try:
                who = daemon.who()
                _print_told(args, daemon, held, printed)
            except NobodyAnswers as error:
                why = str(error)
            held = (daemon.find(key) if has_job(held) else daemon.seek(key)) or held
            why = why or ("" if daemon.who() == who else "allocd was started anew")
        except NobodyAnswers as error:
            why = str(error)
            if not args.socket:
                _, held = find_held(args, key) or (None, held)  # what it has written meanwhile
            break
        except Refused as error:
            if error.status == 404 or not has_job(held):
                return refuse(args, error, code_of(error))
            why = str(error)
            break
        if held["state"] == "ended" and not held["run_id"]:
            complain(f"{names_of(held)} has no run: {standing(held)}")
            return codes.OK
        if held["state"] == "ended" and not why:
            return codes.OK
        if has_job(held) or held["state"] == "damaged":
            why = why or held["trouble"] or "allocd is about to end"
            break
    try:
        args.run = disk_name(held, job=True)
    except NoSuchRun as error:
        return refuse(args, f"{why}; {error}", codes.UNREACHABLE)
    complain(f"{why}: the files are followed from here")
    return _follow(args, printed)


def _print_told(args: argparse.Namespace, daemon: Daemon, held: Document, printed: Counter[tuple[str, str]]) -> None:
    """Print what allocd tells, from the beginning, except for the lines that are `printed` already (of each run's log),
    to its end. Raises NobodyAnswers, Refused, OSError."""
    told: Counter[tuple[str, str]] = Counter()
    for line in daemon.log_lines(held["key"], args.rank or (), args.kind or ()):
        where = (line["run"], line["file"])
        told[where] += 1
        if told[where] > printed[where]:
            _write(args, held["jobid"], *where, [line["text"].encode()])
            printed[where] += 1


def _follow(args: argparse.Namespace, printed: Counter[tuple[str, str]] | None = None) -> int:
    """Follow to the end; so many lines of each log are `printed` already. Raises NoSuchRun, Unreadable, and OSError
    when nobody reads any more."""
    import asyncio

    from supervisor.cli.following import Following
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
    first = None if target.directories else target.jobid
    printer = Printer(sys.stderr)
    behind = printed or Counter()

    def write(news: LogLines) -> None:
        where = (news.run_id, news.log)
        known = min(behind[where], len(news.lines))
        behind[where] -= known
        _write(args, first, *where, news.lines[known:])

    try:
        asyncio.run(
            Following(
                target,
                printer,
                lambda rank, kind: _is_wanted(args, rank, kind),
                args.rank,
                write,
            ).run()
        )
    finally:
        printer.close()
    return codes.OK
