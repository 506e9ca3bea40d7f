"""`allocctl logs`: print a run's logs, or follow them.

Following uses the file system's events where there are any and looks once a second in any case (a log may grow on
another node), survives truncation and replacement of a file, and ends when the run is over, or its engine gone, and
everything is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from typing import Final

from supervisor.cli.output import refuse
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, find_run
from supervisor.runs.saved import Unreadable, run_is_over

BLOCK: Final = 256 * 1024
LONG: Final = 1024 * 1024  # bytes: a line that is longer is printed in pieces
LOOK_EVERY: Final = 1000  # milliseconds between looks that no event asked for


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("logs", help="print or follow a run's logs")
    parser.add_argument("run", nargs="?", help="the run's id or directory (default: this allocation's)")
    parser.add_argument("-f", "--follow", action="store_true", help="follow until the run is over")
    parser.add_argument("--rank", type=int, action="append", help="only this rank (can be repeated)")
    parser.add_argument("--kind", choices=("out", "err", "srun"), action="append", help="only these (default: all)")
    parser.add_argument("--json", action="store_true", help="a JSON object a line: schema_version, file, text")


def run(args: argparse.Namespace) -> int:
    """Print the logs. 69 when there is no such run, or it has no such rank."""
    try:
        follower = Follower(find_run(args.run), args.rank, args.kind, args.json)
        if args.follow:
            import anyio

            anyio.run(follower.follow)
        elif not follower.names():
            return refuse(args, f"there are no such logs in {follower.directory}", codes.UNREACHABLE)
        else:
            follower.print_new()
            follower.print_rest()
    except (NoSuchRun, Unreadable) as error:
        return refuse(args, error, codes.UNREACHABLE)
    return codes.OK


class Follower:
    """What has been printed of each log so far."""

    def __init__(self, run_dir: str, ranks: list[int] | None, kinds: list[str] | None, as_json: bool) -> None:
        self.directory = os.path.join(run_dir, "logs")
        self._run_dir = run_dir
        self._ranks = ranks
        self._kinds = kinds
        self._json = as_json
        self._places: dict[str, tuple[int, int]] = {}  # name -> (inode, bytes read)
        self._rests: dict[str, bytes] = {}  # name -> the beginning of a line that has not ended yet

    async def follow(self) -> None:
        """Print until the run is over and nothing new comes."""
        from watchfiles import awatch

        ranks = {_parts(name)[0] for name in self._all_names()}  # each rank has a log from the first moment on
        if ranks and not any(map(self._is_wanted, ranks)):
            raise Unreadable(f"the run has no such rank: its logs are in {self.directory}")
        watch = awatch(self._run_dir, debounce=50, rust_timeout=LOOK_EVERY, yield_on_timeout=True)
        async with aclosing(watch) as changes:
            while True:
                over = run_is_over(self._run_dir)  # asked first: what was written before the end is printed after it
                self.print_new()
                if over:
                    break
                await anext(changes)
        self.print_rest()

    def names(self) -> list[str]:
        """The logs that are wanted, by rank."""
        found = []
        for name in self._all_names():
            rank, kind = _parts(name)
            if self._is_wanted(rank) and (self._kinds is None or kind in self._kinds):
                found.append((rank, name))
        return [name for _, name in sorted(found)]

    def _all_names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self.directory) if name.startswith("rank-")]
        except FileNotFoundError:
            return []

    def _is_wanted(self, rank: int) -> bool:
        return self._ranks is None or rank in self._ranks

    def print_new(self) -> None:
        """Print the complete lines that have come since."""
        for name in self.names():
            for data in self._new(name):
                *lines, rest = (self._rests.pop(name, b"") + data).split(b"\n")
                if len(rest) > LONG:
                    lines, rest = [*lines, rest], b""
                self._rests[name] = rest
                self._print(name, lines)
        sys.stdout.flush()

    def print_rest(self) -> None:
        """Print last lines that have no newline."""
        for name in self.names():
            self._end_line(name)
        sys.stdout.flush()

    def _end_line(self, name: str) -> None:
        if rest := self._rests.pop(name, b""):
            self._print(name, [rest])

    def _new(self, name: str) -> Iterator[bytes]:
        """What has come since the last look; all of it when the file was replaced or truncated."""
        try:
            descriptor = os.open(os.path.join(self.directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            inode, position = self._places.get(name, (status.st_ino, 0))
            if inode != status.st_ino or status.st_size < position:
                position = 0
                self._end_line(name)
            file.seek(position)
            while data := file.read(BLOCK):
                position += len(data)
                self._places[name] = (status.st_ino, position)
                yield data

    def _print(self, name: str, lines: list[bytes]) -> None:
        if self._json:
            import json

            for line in lines:
                document = {"schema_version": 1, "file": name, "text": line.decode(errors="replace")}
                print(json.dumps(document, ensure_ascii=False))
            return
        prefix = name.encode(errors="surrogateescape") + b": "
        for line in lines:
            sys.stdout.buffer.write(prefix + line + b"\n")


def _parts(name: str) -> tuple[int, str]:
    """The rank (-1: the name has none) and the kind in a log's name."""
    rank, _, kind = name.removeprefix("rank-").partition(".")
    return int(rank) if rank.isdecimal() else -1, kind.rpartition(".")[2]
