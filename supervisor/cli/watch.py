"""`allocctl watch`: allocations as they change. On a terminal a table that is drawn anew, elsewhere a line an event.

    allocctl watch                 all that allocd holds, until somebody leaves
    allocctl watch 4711            one, to its end
    allocctl watch RUN_DIRECTORY   a run that answers for itself (`allocctl run --serve`), on its own node
    allocctl watch --json          events, one JSON object a line

Events are told from now on; `--since N` begins behind event N. One who goes away is waited for: it is started anew, and
tells what came meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from typing import Any, Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.daemon import Absent, Daemon, Document, advice, code_of, daemon_at, names_of, served_run, standing
from supervisor.cli.held import disk_name, find_held
from supervisor.cli.list import table
from supervisor.cli.output import complain, put, refuse, sentence
from supervisor.core import codes
from supervisor.core.text import block, printable
from supervisor.runs.registry import NoSuchRun
from supervisor.service.interface import STATES

REST: Final = 0.2  # seconds between two drawings


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("watch", help="see allocations change, as they do")
    parser.add_argument("run", nargs="?", help="one allocation, to its end: allocd's key, a job's or run's id")
    parser.add_argument("--since", type=int, metavar="N", help="tell the events behind that number first (lines)")
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="a JSON object for each event, a line each")


def run(args: argparse.Namespace) -> int:
    """Watch. 0 when the one allocation has ended, or the reader has left; 69 when nobody answers (any more); 75 when
    its book is damaged."""
    from supervisor.cli.asking import NobodyAnswers, NobodyThere, Refused

    try:
        daemon, held = _found(args)
        if held and held["state"] == "damaged":
            return refuse(args, f"{names_of(held)}: {held['trouble']}", codes.UNVERIFIABLE)
        if not args.json and args.since is None and _can_draw():
            return _draw(daemon, held)
        return _print(args, daemon, held)
    except NobodyThere as error:
        return refuse(args, _instead(args, error), code_of(error))
    except (Absent, NobodyAnswers, Refused) as error:
        return refuse(args, error, code_of(error))


def _found(args: argparse.Namespace) -> tuple[Daemon, Document | None]:
    """Who answers, and the one allocation that is wanted. Raises Absent, NobodyAnswers, Refused."""
    from supervisor.cli.asking import NobodyThere

    name = args.run
    if name and os.path.isdir(name):
        return _served(name)
    daemon = daemon_at(args)
    if daemon is None:
        raise NobodyThere("no allocd answers here")
    held = daemon.find(name) if name else None
    if name and held is None:
        raise Absent(f"allocd holds no {printable(name)} (`allocctl list --all` tells what it holds)")
    return daemon, held


def _served(run_dir: str) -> tuple[Daemon, Document]:
    """A run that answers for itself. Raises Absent, NobodyAnswers, Refused."""
    daemon = served_run(run_dir)
    if daemon is None:
        raise Absent(f"run {run_dir} does not answer for itself (`allocctl run --serve`): `allocctl wait` follows it")
    return daemon, _all(daemon)[0]


def _instead(args: argparse.Namespace, error: Exception) -> str:
    """What can be done where nobody is there."""
    if args.socket:
        return str(error)
    if args.run and os.path.isdir(args.run):
        gone = "the run's engine is gone, or on another host"
        return f"{error}: {gone}; `allocctl status {args.run}` tells how it is, `allocctl wait {args.run}` its end"
    text = f"{error}: {advice()}"
    if not args.run:
        return text
    _, held = find_held(args, args.run) or (None, None)
    try:
        if held:
            disk_name(held)
    except NoSuchRun as none:
        return str(none)
    return f"{text}; without one `allocctl wait {args.run}` follows it"


# --- lines ------------------------------------------------------------------------------------------------------------


def _print(args: argparse.Namespace, daemon: Daemon, held: Document | None) -> int:
    last = int(daemon.ask("GET", "/v1/health")["last_event"])
    if held is not None:
        held = daemon.find(held["key"]) or held  # what has come up to that event is known
    if held is not None and held["state"] == "ended" and args.since is None:
        complain(f"{names_of(held)} has ended already")
        return codes.OK
    if not args.json:
        told = f"{names_of(held)}: {standing(held)}" if held else f"{_held(daemon)}; events are told as they come"
        complain(told)
    if args.since is not None and args.since > last:
        complain(f"the last event here is {last}, and {args.since} is none of these: all that are kept are told")
    for event in daemon.events(held["key"] if held else None, after=last if args.since is None else args.since):
        if event is None:
            if held is not None and held["state"] == "ended":
                break  # everything has been told
            continue
        text = json.dumps(event, ensure_ascii=False) if args.json else line(event)
        if text:
            put(text.encode(errors="backslashreplace") + b"\n")
        if held is not None and event["kind"] == "ended":
            break
    return codes.OK


def _held(daemon: Daemon) -> str:
    counts = daemon.ask("GET", "/v1/health")["allocations"]
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing is held"


def line(event: Document) -> str:
    """An event for people; "" for one that only the machine needs."""
    data: dict[str, Any] = event["data"]
    if verdict := data.get("verdict"):
        text = f"{verdict['outcome']}, exit code {verdict['code']} ({verdict['origin']}): {verdict['summary']}"
    elif event["kind"] == "record":
        text = str(data["text"])
        if not text:
            return ""
    else:
        known = ("text", "words", "trouble", "slurm", "reason", "how", "run_id", "jobs", "title")
        found = (data.get(name) for name in known)
        text = " ".join(" ".join(map(str, item)) if isinstance(item, list) else str(item) for item in found if item)
        text = text or str(data.get("state", ""))
    return f"{event['utc']}  {event['key']}  {event['kind']:<10}  {block(text)}"


# --- a table ----------------------------------------------------------------------------------------------------------


def _can_draw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Listener:
    """Reads events in a thread of its own: `news` says that there was one, `why` that there will be none any more."""

    def __init__(self, daemon: Daemon, key: str | None) -> None:
        self.news = threading.Event()
        self.why: Exception | None = None
        self._daemon, self._key = daemon, key
        threading.Thread(target=self._listen, name="events", daemon=True).start()

    def _listen(self) -> None:
        try:
            for event in self._daemon.events(self._key):
                if event is not None:
                    self.news.set()
        except Exception as error:  # noqa: BLE001 - raised where it is looked at
            self.why = error
        self.news.set()


def _draw(daemon: Daemon, held: Document | None) -> int:
    """Until the one allocation has ended, or somebody leaves. Raises NobodyAnswers, Refused."""
    from supervisor.cli.live import Printer

    printer = Printer(sys.stdout)
    listener = _Listener(daemon, held["key"] if held else None)
    ended: set[str] | None = None  # those that had ended before
    try:
        while True:
            listener.news.clear()
            found = [daemon.seek(held["key"]) or held] if held else daemon.again(lambda: _all(daemon))
            if ended is None:
                ended = {item["key"] for item in found if item["state"] == "ended" and not held}
            printer.show(_frame([item for item in found if item["key"] not in ended], held is not None))
            if held and found[0]["state"] == "ended":
                printer.settle()
                return codes.OK
            listener.news.wait()
            if listener.why is not None:
                raise listener.why
            threading.Event().wait(REST)  # what comes at once is drawn at once
    except OSError as error:
        complain(sentence(error))
        return codes.FAILED
    finally:
        printer.close()


def _all(daemon: Daemon) -> list[Document]:
    return list(daemon.allocations(list(STATES)))


def _frame(found: list[Document], ranks: bool) -> tuple[str, ...]:
    """What fits the terminal: the newest, when not all of them do."""
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        width, height = 80, 24
    lines = table(found, width - 1) if found else ["nothing is held that has not ended"]
    if ranks:
        for rank in found[0].get("ranks", ()):
            end = rank["end"]
            how = "" if end is None else f"code {end['code']}" if end["code"] is not None else f"signal {end['signal']}"
            text = f"  {rank['rank']:>4}  {rank['role']:<14} {rank['node']:<18} {rank['phase']:<10} {how}"
            lines.append(printable(text.rstrip())[: width - 1])
    if len(lines) > height - 1:
        left = len(lines) - (height - 2)
        lines = [lines[0], f"... {left} more", *lines[left + 1 :]]
    return tuple(lines)
