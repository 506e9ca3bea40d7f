"""`allocctl receipt`: print a run's receipt as it was written: the sealed one where there is one."""

from __future__ import annotations

import argparse
import os
import sys

from supervisor.cli.output import refuse
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, find_run


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("receipt", help="print a run's receipt")
    parser.add_argument("run", nargs="?", help="the run's id or directory (default: this allocation's)")
    parser.add_argument("--path", action="store_true", help="print the receipt's path instead")
    parser.add_argument("--json", action="store_true", help="the receipt is JSON in any case; accepted like everywhere")


def run(args: argparse.Namespace) -> int:
    """Print the receipt. 75 when the run has none yet, 69 when there is no such run."""
    try:
        run_dir = find_run(args.run)
    except NoSuchRun as error:
        return refuse(args, error, codes.UNREACHABLE)
    for name in ("receipt.json", "receipt.run.json"):
        path = os.path.join(run_dir, name)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        except OSError as error:
            return refuse(args, f"{path}: {error.strerror}", codes.UNREACHABLE)
        if args.path:
            print(path)
        else:
            sys.stdout.buffer.write(data)
        return codes.OK
    text = f"{run_dir} has no receipt: the run is not over, or its engine was lost (see `allocctl verify`)"
    return refuse(args, text, codes.UNVERIFIABLE)
