"""`allocctl receipt`: print runs' receipts as they were written, the sealed ones where there are any; or report the
runs as JUnit XML, for CI systems that read that."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import on_disk
from supervisor.cli.output import complain, refuse
from supervisor.core import codes
from supervisor.loop.files import read_whole
from supervisor.runs.papers import RECEIPT, RUN_RECEIPT, SIZE, Unreadable, papers_of
from supervisor.runs.registry import Ambiguous, NoSuchRun, find_run


class NoReceipt(Exception):
    """The run has none yet."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("receipt", help="print a run's receipt")
    parser.add_argument("run", nargs="*", help="ids or directories of runs, allocd's keys (default: this one's)")
    add_socket(parser)
    parser.add_argument("--path", action="store_true", help="print the receipt's path instead")
    parser.add_argument("--junit", metavar="FILE", help="report the runs as JUnit XML in FILE (-: print it) instead")
    parser.add_argument("--json", action="store_true", help="the receipt is JSON in any case; accepted like everywhere")


def run(args: argparse.Namespace) -> int:
    """Print the receipts. 75 when a run has none yet, 69 when there is no such run or its receipt cannot be read."""
    try:
        receipts = [receipt for name in args.run or [None] for receipt in _receipts(on_disk(args, name))]
    except NoReceipt as error:
        return refuse(args, error, codes.UNVERIFIABLE)
    except (NoSuchRun, Unreadable) as error:
        return refuse(args, error, codes.UNREACHABLE)
    except OSError as error:
        return refuse(args, f"{error.filename}: {error.strerror}", codes.UNREACHABLE)
    if args.junit is not None:
        return _report(args, receipts)
    for path, data in receipts:
        if args.path:
            print(path)
        else:
            sys.stdout.buffer.write(data)
    return codes.OK


def _receipts(name: str | None) -> list[tuple[str, bytes]]:
    """Those that a name means: a run's, that of a job without a run, or those of an array's tasks. Raises as
    `_receipt`, and NoSuchRun."""
    try:
        return [_receipt(find_run(name))]
    except Ambiguous:
        raise
    except NoSuchRun:
        from supervisor.cli.submitted import saved_receipt, units_of

        units = units_of(name)
        if units is None:
            raise
        if units != [name]:
            return [receipt for unit in units for receipt in _receipts(unit)]
        path = saved_receipt(units[0])
        if path is None:
            again = f"`allocctl verify {units[0]}` makes one when it is over"
            raise NoReceipt(f"{units[0]} has no run here, and no receipt yet: {again}") from None
        return [(path, read_whole(path, SIZE))]


def _receipt(run_dir: str) -> tuple[str, bytes]:
    """The path and the content of a run's receipt; one that is another run's is no receipt. Raises NoReceipt, OSError,
    Unreadable."""
    papers = papers_of(run_dir)
    for text in papers.strange:
        complain(text)
    for name, document in ((RECEIPT, papers.sealed), (RUN_RECEIPT, papers.run)):
        if document is not None:
            path = os.path.join(run_dir, name)
            return path, read_whole(path, SIZE)
    raise NoReceipt(f"{run_dir} has no receipt: the run is not over, or its engine was lost (see `allocctl verify`)")


def _report(args: argparse.Namespace, receipts: list[tuple[str, bytes]]) -> int:
    """The runs as JUnit XML. 69 when a receipt is none, 1 when the file cannot be written."""
    from supervisor.cli.junit import junit
    from supervisor.engine.receipts import replace

    documents = []
    for path, data in receipts:
        try:
            documents.append(json.loads(data))
            junit(documents[-1:])  # names the one that is none
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
            return refuse(args, f"{path} is not a receipt: {error!r}", codes.UNREACHABLE)
    report = junit(documents)
    if args.junit == "-":
        sys.stdout.buffer.write(report)
        return codes.OK
    if os.path.exists(args.junit) and not os.path.isfile(args.junit):  # a device or a pipe would be replaced
        return refuse(args, f"{args.junit} is not a regular file; `--junit -` prints the report", codes.FAILED)
    try:
        replace(Path(args.junit), report)
    except OSError as error:
        return refuse(args, f"{args.junit}: {error.strerror}", codes.FAILED)
    return codes.OK
