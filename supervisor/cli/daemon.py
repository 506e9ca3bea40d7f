"""allocd as the verbs see it: where it answers, what it holds, and what is said where it does not answer.

    --socket PATH        this one, and no other: one that does not answer is an error
    $ALLOCD_SOCKET       this one
    else                 where allocd of this user answers on this host (`service/sockets.py`)

Verbs that can do without it go on with what lies on the disk when nobody answers; the others end with 69 and say how to
start one, or on which login node it is: sockets are a host's own, and $HOME is not. A run that answers for itself
(`allocctl run --serve`) is named by its socket's path, or by its run directory, which holds that path.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

from supervisor.core import codes
from supervisor.loop.files import read_whole
from supervisor.runs.registry import Ambiguous, NoSuchRun
from supervisor.service.sockets import NAME, runtime_directory

if TYPE_CHECKING:
    from supervisor.cli.asking import NobodyAnswers, Refused
    from supervisor.service.place import Owner

Document = dict[str, Any]
T = TypeVar("T")

CTL_PATH: Final = "ctl.path"
LOOK_LIMIT: Final = 5.0  # seconds that a verb waits for an answer that it can do without
NEW_LIMIT: Final = 90.0  # seconds for what has to be checked and put on the disk
SILENCE: Final = 45.0  # seconds: a stream that lives says something each 15
AWAY: Final = 30.0  # seconds that one which has answered may be away: it is started anew
PAUSE: Final = 0.5
PAGE: Final = 1000
UNAVAILABLE: Final = 503  # of HTTP: it is about to end, or cannot start, and will be another soon
SETTLED: Final = ("pending", "running", "ending", "ended")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+\-]{0,127}")
_CODES: Final = {
    "not_found": codes.UNREACHABLE,
    "gone": codes.UNREACHABLE,
    "timeout": codes.UNREACHABLE,
    "busy": codes.UNREACHABLE,
    "unavailable": codes.UNREACHABLE,
    "storage": codes.UNREACHABLE,
    "fault": codes.FAULT,
}
"""Exit codes by a problem's kind; with the others something has to be asked otherwise (78)."""


class Absent(NoSuchRun):
    """Nobody answers whom the verb needs, or not with what it needs; the message says what to do."""


class Daemon:
    """Who answers on one socket."""

    def __init__(self, path: str) -> None:
        self.path = path

    def ask(self, method: str, target: str, body: Any = None, limit: float = LOOK_LIMIT, **headers: str) -> Any:
        """See `asking.ask`; names of headers are written with underscores."""
        from supervisor.cli.asking import ask

        fields = {name.replace("_", "-"): text for name, text in headers.items()}
        return ask(self.path, method, target, body, limit, fields)

    def find(self, name: str) -> Document | None:
        """The allocation that it holds by this name. Raises NobodyAnswers, Refused."""
        from supervisor.cli.asking import Refused

        try:
            return dict(self.ask("GET", allocation(name)))
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def who(self) -> tuple[int, str]:
        """Which process answers, and since when. Raises NobodyAnswers, Refused."""
        health = self.ask("GET", "/v1/health")
        return int(health["pid"]), str(health["since"])

    def seek(self, name: str) -> Document | None:
        """The same of one who has answered before, and is waited for: see `again`."""
        return self.again(lambda: self.find(name))

    def allocations(self, states: list[str], name: str | None = None) -> Iterator[Document]:
        """All that fit, in the order in which they were accepted. Raises NobodyAnswers, Refused."""
        query = [f"limit={PAGE}", *(f"state={state}" for state in states)]
        query += [f"name={_quoted(name)}"] if name else []
        page = self.ask("GET", f"/v1/allocations?{'&'.join(query)}")
        while True:
            yield from page["allocations"]
            if page["next"] is None:
                return
            page = self.ask("GET", f"/v1/allocations?{'&'.join([*query, 'after=' + page['next']])}")

    def greet(self) -> None:
        """See that it answers, before it is asked for what nobody may ask for twice. Raises NobodyThere, and Absent
        when it stays silent: nothing was asked for then."""
        from supervisor.cli.asking import NobodyAnswers, NobodyThere, Refused
        from supervisor.cli.output import complain

        try:
            try:
                self.who()
            except NobodyThere:
                raise
            except NobodyAnswers as error:
                complain(f"{error}; it is asked again for {AWAY:g} s (^C leaves)")
                self.again(self.who)
        except NobodyThere:
            raise
        except NobodyAnswers as error:
            raise Absent(f"{error} (`--direct` goes without allocd)") from None
        except Refused:
            return  # it is there, and says itself what it will not do

    def create(self, target: str, body: Document, key: str) -> Document:
        """Ask for a new allocation. The answer may be lost, and is asked for again: by `key` it is the same one. Raises
        NobodyThere when nothing was asked, NobodyAnswers when it is not known whether it was accepted, Refused."""
        from supervisor.cli.asking import NobodyAnswers, NobodyThere

        def ask(limit: float) -> Document:
            return dict(self.ask("POST", target, body, limit, Idempotency_Key=key))

        try:
            return ask(NEW_LIMIT)
        except NobodyThere:
            raise
        except NobodyAnswers:
            time.sleep(PAUSE)
            return self.again(lambda: ask(AWAY))

    def again(self, ask: Callable[[], T]) -> T:
        """An answer of one who has answered before: while it is away it is waited for, and asked again. Raises
        NobodyAnswers when it stays away, Refused."""
        from supervisor.cli.asking import NobodyAnswers, Refused

        deadline = time.monotonic() + AWAY
        while True:
            try:
                return ask()
            except NobodyAnswers as error:
                if time.monotonic() > deadline:
                    raise NobodyAnswers(str(error)) from None
            except Refused as refused:
                if refused.status != UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE)

    def events(
        self, name: str | None = None, deadline: float | None = None, after: int | None = None
    ) -> Generator[Document | None]:
        """Events of one allocation, or of all, behind number `after` (else, or if that cannot be, from the oldest that
        is kept), and None for each sign of life without one. They are of one who has answered before, and is waited for
        while it is away. `deadline`: of the monotonic clock, at which they end. Raises NobodyAnswers, Refused."""
        from supervisor.cli.asking import NobodyAnswers, Refused

        target = f"{allocation(name)}/events" if name else "/v1/events"
        last = after
        heard = time.monotonic()  # it was asked before: that it goes away now is no other matter
        while deadline is None or time.monotonic() < deadline:
            try:
                for found in self._stream(target, last, deadline):
                    heard = time.monotonic()
                    last = found["seq"] if found else last
                    yield found
            except NobodyAnswers:
                if time.monotonic() - heard > AWAY:
                    raise
            except Refused as refused:
                if refused.status == UNAVAILABLE and time.monotonic() - heard <= AWAY:
                    time.sleep(PAUSE)
                    continue
                if refused.status != 410 or last is None:
                    raise
                last = None  # too long ago, or of a state that is gone: what is kept now is told
            time.sleep(PAUSE)

    def log_lines(self, name: str, ranks: Collection[int], kinds: Collection[str]) -> Iterator[Document]:
        """Lines of an allocation's logs as they come: run, file, text. They end when it has ended, or when who answers
        is about to end.
        Nothing may come for as long as its ranks are silent. Raises NobodyAnswers, Refused."""
        from supervisor.cli.asking import lines

        query = [
            "follow=true",
            "format=jsonl",
            *(f"rank={rank}" for rank in ranks),
            *(f"kind={kind}" for kind in kinds),
        ]
        for line in lines(self.path, f"{allocation(name)}/logs?{'&'.join(query)}", None):
            yield json.loads(line)

    def _stream(self, target: str, last: int | None, deadline: float | None) -> Iterator[Document | None]:
        from supervisor.cli.asking import lines

        limit = SILENCE if deadline is None else max(0.01, min(SILENCE, deadline - time.monotonic()))
        headers = {} if last is None else {"Last-Event-ID": str(last)}
        for line in lines(self.path, target, limit, headers):
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
            elif line.startswith(b":"):
                yield None
            if deadline is not None and time.monotonic() >= deadline:
                return


def allocation(name: str) -> str:
    """The path of an allocation, or of one by that name."""
    return f"/v1/allocations/{_quoted(name)}"


def _quoted(text: str) -> str:
    """What was typed, whatever bytes that are."""
    return quote(text, safe="", errors="surrogateescape")


# --- finding one ------------------------------------------------------------------------------------------------------


def daemon_at(args: argparse.Namespace) -> Daemon | None:
    """Who may answer; None where there is no socket: a look, nobody is asked."""
    if args.socket:
        return Daemon(os.path.abspath(args.socket))
    path = os.environ.get("ALLOCD_SOCKET") or os.path.join(runtime_directory(os.environ), NAME)
    return Daemon(path) if _is_socket(path) else None


def holder(args: argparse.Namespace, name: str | None) -> tuple[Daemon, Document] | None:
    """Who holds the allocation with that name, and how it is; None where nobody does, or nobody answers who was not
    named. Raises Absent, Ambiguous."""
    from supervisor.cli.output import complain

    if not name or not _NAME.fullmatch(name) or (daemon := daemon_at(args)) is None:
        return None
    from supervisor.cli.asking import NobodyAnswers, NobodyThere, Refused

    try:
        document = daemon.find(name)
    except Refused as error:
        if error.problem.get("kind") == "conflict":
            raise Ambiguous(str(error)) from None
        if args.socket or error.status != UNAVAILABLE:
            raise Absent(f"{daemon.path} answers: {error}") from None
        complain(f"{error}: told by what is on the disk")
        return None
    except NobodyAnswers as error:
        if args.socket:
            raise Absent(str(error)) from None
        if not isinstance(error, NobodyThere):  # a killed daemon leaves its socket
            complain(f"{error}: told by what is on the disk")
        return None
    cluster = getattr(args, "cluster", None)
    if document and document["state"] == "damaged" and name != document["key"]:
        return None  # the disk and Slurm know more of its job or run
    if document is None or (cluster and document["cluster"] not in (None, cluster)):
        return None
    return daemon, document


def served_run(run_dir: str) -> Daemon | None:
    """A run that answers for itself."""
    try:
        path = os.fsdecode(read_whole(os.path.join(run_dir, CTL_PATH), 4096)).strip()
    except OSError:
        return None
    return Daemon(path) if _is_socket(path) else None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


# --- what is said -----------------------------------------------------------------------------------------------------


def advice() -> str:
    """What to do where nobody answers."""
    if found := elsewhere():
        hosts = " and ".join(f"{owner.host} (since {owner.since})" for owner in found)
        return f"yours runs on {hosts}: ask there"
    from supervisor.cli.units import SOCKET, directory

    if os.path.exists(os.path.join(directory(os.environ), SOCKET)):
        return f"start it with `systemctl --user start {SOCKET}`"
    return "start one with `allocctl service install`, or `allocd &`"


def elsewhere() -> list[Owner]:
    """The daemons of this user that hold their state on other hosts."""
    from supervisor.service.place import owners

    return [owner for owner in owners(os.environ) if owner.alive is None]


def with_hosts(error: object) -> str:
    """What was not found here may be known to a daemon on another login node."""
    text = str(error)
    return f"{text}; {there}" if elsewhere() and (there := advice()) not in text else text


def code_of(error: Absent | NobodyAnswers | Refused) -> int:
    """The exit code."""
    problem = getattr(error, "problem", None)
    if problem is None:
        return codes.UNREACHABLE
    return _CODES.get(str(problem.get("kind")), codes.CONFIG)


def names_of(held: Document) -> str:
    """An allocation, as people know it."""
    names = [f"job {held['jobid']}"] if held["jobid"] not in (None, held["key"]) else []
    names += [f"run {held['run_id']}"] if held["run_id"] not in (None, held["key"], held["jobid"]) else []
    return f"{held['key']} ({', '.join(names)})" if names else str(held["key"])


def standing(held: Document) -> str:
    """How an allocation is, in a line."""
    if verdict := held["verdict"]:
        return f"{verdict['outcome']}, exit code {verdict['code']} ({verdict['origin']}): {verdict['summary']}"
    text = str(held["state"])
    if held["position"]:
        text += f", number {held['position']} in the queue"
    if held["slurm"]:
        text += f", {held['slurm']}" + (f" ({held['reason']})" if held["reason"] else "")
    if held["stopping"]:
        text += f", told to {held['stopping']}"
    return text
