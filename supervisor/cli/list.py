"""`allocctl list`: the allocations that allocd holds (where none answers, those that its books tell of, as of when it
wrote last), and the other runs that are known on this disk."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.daemon import LOOK_LIMIT, Absent, Daemon, Document, advice, code_of, daemon_at
from supervisor.cli.output import complain, refuse, tell
from supervisor.core import codes
from supervisor.core.text import printable
from supervisor.runs.registry import is_further
from supervisor.service.interface import STATES

WIDEST: Final = 240  # characters of a cell
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
    output.add_argument("-q", "--quiet", action="store_true", help="ids alone: a job's, an adopted run's, or the key")


def run(args: argparse.Namespace) -> int:
    """Print the list. 0, also when it is empty; 69 when one who was named does not answer."""
    from supervisor.cli.asking import NobodyAnswers, Refused

    states = args.state or list(STATES if args.all else STATES[:-1])
    daemon = daemon_at(args)
    try:
        found = None if daemon is None else list(daemon.allocations(states, args.name))
        if daemon and found is not None and not args.socket:
            found += beside(daemon, found, states, args.name)
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
            tell(name_of(item))
    elif found:
        tell("\n".join(table(found)))
    else:
        ended = "" if args.all or args.state else " that has not ended (`--all` tells of the rest)"
        complain(f"nothing is held{ended}")
    return codes.OK


def name_of(item: Document) -> str:
    """By which other verbs know it: its job's id; an adopted run's own, for its job is somebody else's."""
    run = item["kind"] == "adopted" or (item["kind"] == "run" and is_further(item["run_id"]))
    return str(item["run_id" if run else "jobid"] or item["key"])


def table(found: Sequence[Document], width: int = 0) -> list[str]:
    """A line for each, under a head. `width`: of a terminal, 0: whatever it takes."""
    rows = [HEAD, *(tuple(map(_cell, _row(item))) for item in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    texts = ("  ".join((*(cell.ljust(wide) for cell, wide in zip(row, widths, strict=False)), row[-1])) for row in rows)
    return [text.rstrip()[: width or None] for text in texts]


def _cell(text: str) -> str:
    """Somebody's words, as much as a line has room for: `status` and the JSON have all of them."""
    shown = printable(text)
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 3]}..."


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
    from supervisor.service.shelf import all_on_shelf

    held = list(map(as_written, all_on_shelf(os.environ)))
    yield from held
    yield from runs(held)


def beside(daemon: Daemon, held: Sequence[Document], states: Sequence[str], name: str | None) -> list[Document]:
    """The runs here that allocd does not hold. `held`: some of those that it does. A file system that is away keeps
    nobody from seeing these. Raises NobodyAnswers, Refused."""
    import threading

    found: list[Document] = []
    looking = threading.Thread(target=lambda: found.extend(runs(held, ended="ended" in states)), daemon=True)
    looking.start()
    looking.join(LOOK_LIMIT)
    if looking.is_alive():
        complain(f"not all runs that allocd does not hold are told: the disk gave no answer within {LOOK_LIMIT:g} s")
    fit = [item for item in tuple(found) if item["state"] in states and name in (None, item["name"])]
    return [item for item in fit if not _holds(daemon, item)]


def _holds(daemon: Daemon, run: Document) -> bool:
    """Whether it holds a run, or the job that the run is of, whatever their state. Raises NobodyAnswers, Refused."""
    from supervisor.cli.asking import Refused
    from supervisor.runs.listing import whole

    further = is_further(run["run_id"])
    try:
        held = daemon.find(run["run_id"] if further else whole(run["jobid"]))
    except Refused as error:
        if error.problem.get("kind") != "conflict":
            raise
        return False  # several have that name: runs in somebody else's job, and this one is none of them
    return held is not None and (further or held["kind"] != "adopted")


def runs(held: Sequence[Document], *, ended: bool = True) -> Iterator[Document]:
    """The runs in the registry that are no held allocation's, as allocations; `ended`: those with a receipt, too."""
    from supervisor.core.layout import RUN_RECEIPT
    from supervisor.runs.listing import whole
    from supervisor.runs.registry import job_in, registry
    from supervisor.runs.saved import Unreadable, run_document

    jobs = {item["jobid"] for item in held if item["kind"] != "adopted"}
    own = {item["run_id"] for item in held}
    try:
        names = [name for name in os.listdir(registry()) if "@" not in name and name not in own]
    except OSError:
        return
    for name in sorted(names, key=_in_numbers):
        place = os.path.join(registry(), name)
        if whole(job_in(name) or "") in jobs or (not ended and os.path.exists(os.path.join(place, RUN_RECEIPT))):
            continue
        try:
            document, over = run_document(os.path.realpath(place))
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
