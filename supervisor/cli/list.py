"""`allocctl list`: the allocations that allocd holds; where none answers, those that its books tell of (as of when it
wrote last), and the runs that are known on this disk."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.daemon import Absent, Document, advice, code_of, daemon_at
from supervisor.cli.output import complain, refuse, tell
from supervisor.core import codes
from supervisor.core.text import printable
from supervisor.service.interface import STATES

HEAD: Final = ("KEY", "JOB", "STATE", "SLURM", "NAME", "RUN", "")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("list", help="the allocations that allocd holds")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-a", "--all", action="store_true", help="also those that have ended")
    which.add_argument("--state", choices=STATES, action="append", help="only these (can be repeated)")
    parser.add_argument("--name", help="only those of plans with this name")
    add_socket(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument("-q", "--quiet", action="store_true", help="job ids alone, or the key of what has no job")


def run(args: argparse.Namespace) -> int:
    """Print the list. 0, also when it is empty; 69 when one who was named does not answer."""
    from supervisor.cli.asking import NobodyAnswers, Refused

    states = args.state or list(STATES if args.all else STATES[:-1])
    daemon = daemon_at(args)
    try:
        found = None if daemon is None else list(daemon.allocations(states, args.name))
    except NobodyAnswers as error:
        if args.socket:
            return refuse(args, error, codes.UNREACHABLE)
        found = None
    except (Absent, Refused) as error:
        return refuse(args, error, code_of(error))
    held = found is not None
    if found is None:
        known = "what its books told last, and the runs that are known on this disk"
        complain(f"no allocd answers here ({advice()}): these are {known}")
        found = [item for item in on_disk() if item["state"] in states and args.name in (None, item["name"])]
    if args.json:
        tell(json.dumps({"schema_version": 1, "held": held, "allocations": found}, indent=1))
    elif args.quiet:
        for item in found:
            tell(item["jobid"] or item["key"])
    elif found:
        tell("\n".join(table(found)))
    else:
        ended = "" if args.all or args.state else " that has not ended (`--all` tells of the rest)"
        complain(f"nothing is held{ended}")
    return codes.OK


def table(found: Sequence[Document], width: int = 0) -> list[str]:
    """A line for each, under a head. `width`: of a terminal, 0: whatever it takes."""
    rows = [HEAD, *(tuple(map(printable, _row(item))) for item in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    texts = ("  ".join((*(cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)), row[-1])) for row in rows)
    return [text.rstrip()[: width or None] for text in texts]


def _row(item: Document) -> tuple[str, ...]:
    if item["verdict"]:
        last = f"{item['verdict']['outcome']} ({item['verdict']['code']})"
    elif item["position"]:
        last = f"number {item['position']} in the queue"
    else:
        last = item["trouble"] or item["first_failure"] or (f"told to {item['stopping']}" if item["stopping"] else "")
    job = item["jobid"] or "-"
    return (item["key"], job, item["state"], item["slurm"] or "-", item["name"], item["run_id"] or "-", last)


def on_disk() -> Iterator[Document]:
    """What the books tell, and the runs that are in none of them."""
    from supervisor.cli.held import as_written
    from supervisor.runs.listing import whole
    from supervisor.service.shelf import all_on_shelf

    held = list(map(as_written, all_on_shelf(os.environ)))
    yield from held
    jobs = {item["jobid"] for item in held if item["kind"] != "adopted"}
    own = {item["run_id"] for item in held}
    yield from (item for item in runs() if item["run_id"] not in own and whole(item["jobid"]) not in jobs)


def runs() -> Iterator[Document]:
    """The runs in the registry, as allocations."""
    from supervisor.runs.registry import registry
    from supervisor.runs.saved import Unreadable, run_document

    try:
        names = [name for name in os.listdir(registry()) if "@" not in name]
    except OSError:
        return
    for name in sorted(names, key=_in_numbers):
        try:
            document, over = run_document(os.path.realpath(os.path.join(registry(), name)))
        except Unreadable:
            continue  # it has been removed, or is not opened yet
        lost = not over and document["alive"] is False
        yield {
            "key": document["run_id"],
            "kind": "run",
            "state": "ended" if over or lost else "running",
            "name": document["name"],
            "jobid": document["jobid"],
            "run_id": document["run_id"],
            "run_dir": document["run_dir"],
            "slurm": None,
            "position": None,
            "stopping": None,
            "verdict": document["verdict"] if over or lost else None,
            "first_failure": (document["first_failure"] or {}).get("text"),
            "trouble": "its engine is gone" if lost else None,
            "as_of": None,
        }


def _in_numbers(run_id: str) -> list[tuple[int, str]]:
    """For sorting: 9 before 10, 7.r2 before 7.r10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", run_id)]
