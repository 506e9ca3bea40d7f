"""Following a job's runs from outside, by reading their directories as they grow.

The engine runs on another machine, and no event crosses a shared file system: whoever follows looks, again and again.
A look is cheap (some dozens of system calls, no question to Slurm) and believes listings only, for a network client
remembers for up to a minute that a name was missing. One look takes in, in this order:

    the places where run directories are made    -> new runs: `4711`, after a requeue `4711.r1`, an array's `4711_3`
    a run's own directory                        -> whether its receipt is there: then what is read next is all of it
    its journal, from where the last look ended  -> events, folded by the machine (core/run.py)
    its logs                                     -> whole lines

What is found becomes *news*, in a queue that another thread may take from: a look that hangs on a dead file system
loses nothing, its news come when it returns. A last line of a journal that is torn or zero-filled is not yet written;
what cannot be read in the middle of a journal is damage only when nobody writes any more, so `last` alone tells it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from supervisor.core import events as ev
from supervisor.core.run import IllegalEvent, step
from supervisor.core.state import RunState
from supervisor.engine.journal import read_journal
from supervisor.runs.growing import Logs
from supervisor.runs.listing import Listings
from supervisor.runs.papers import RUN_RECEIPT, Unreadable, opening_of, papers_of
from supervisor.runs.registry import JOURNAL, Asked, attempt_of, is_guests, job_in
from supervisor.runs.saved import engine_lives

CLOCKS: Final = 300.0  # seconds by which the clocks of two machines may differ

MOST: Final = 256
"""Records that one look takes in: each is told with the state that it leads to, and states that grow are held at the
same time only for so many."""


@dataclass(frozen=True)
class Told:
    """One more record in a run's journal, and the state that it leads to. The first of a run is its opening."""

    run_id: str
    record: ev.Record
    state: RunState


@dataclass(frozen=True)
class LogLines:
    """Lines of a log, without their newlines."""

    run_id: str
    log: str
    lines: list[bytes]


@dataclass(frozen=True)
class Over:
    """The run's receipt is there (or, `lost`, its engine is gone without one), and everything before it was told."""

    run_id: str
    lost: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something cannot be read; each trouble is told once."""

    text: str


News = Told | LogLines | Over | Trouble
Wanted = Callable[[RunState, int, str], bool]
"""Whether a log is wanted: by what is known of the run, its rank and its kind."""


def no_logs(_state: RunState, _rank: int, _kind: str) -> bool:
    """No log at all."""
    return False


def coordinator_logs(state: RunState, rank: int, kind: str) -> bool:
    """The coordinator's own logs, without the words of its srun; none of a plan without one."""
    return state.plan is not None and state.plan.coordinator == rank and kind != "srun"


def all_logs(_state: RunState, _rank: int, _kind: str) -> bool:
    """Every rank's logs."""
    return True


LOGS: Final[dict[str, Wanted]] = {"none": no_logs, "coordinator": coordinator_logs, "all": all_logs}
"""The choices of `--logs`."""


class RunFollower:
    """One run directory. `engine`: look for the engine's process as well, for a run that no Slurm tells the end of."""

    def __init__(self, directory: str, wanted: Wanted, *, engine: bool = False) -> None:
        self.directory = directory
        self.run_id = os.path.basename(directory)
        self.state = RunState()
        self.over = False
        self.logs = Logs(directory, lambda rank, kind: wanted(self.state, rank, kind))
        self._wanted = wanted
        self._engine = engine
        self._end = self._seq = 0
        self._unread = False  # the journal has more than one look takes in
        self._damage: str | None = None
        self._folds = True
        self._strange: tuple[int, int] | None = None  # the receipt that is another run's: its inode and time
        self._changed = 0  # the directory's time of change before it was listed last (ns)

    @property
    def more(self) -> bool:
        """Whether the next look has something to read already."""
        return self.logs.more or self._unread

    def stirs(self) -> bool:
        """Whether there is something new, by sizes and times alone, or the engine that is looked for is gone."""
        if self.over:
            return False
        try:
            grown = os.stat(os.path.join(self.directory, JOURNAL)).st_size > self._end
            return grown or os.stat(self.directory).st_mtime_ns != self._changed or self._is_lost()
        except OSError:
            return False  # what is wrong is for looks to tell

    def look(self, last: bool = False) -> Iterator[News]:
        """What is new. With `last`, nobody writes any more. Raises OSError."""
        strange = self._strange
        over, lost = self._ended()
        if self._strange != strange:
            yield Trouble(f"{self.run_id}: the {RUN_RECEIPT} there is another run's, and does not count")
        last = last or over
        yield from self._journal()
        if self._wanted is not no_logs:
            yield from (LogLines(self.run_id, *lines) for lines in self.logs.look(last))
        if not last or self.more:
            return
        yield from (LogLines(self.run_id, *lines) for lines in self.logs.last_lines())
        if self._damage:
            yield Trouble(f"{self.run_id}: the journal cannot be read to its end: {self._damage}")
        self.over = True
        if over:
            yield Over(self.run_id, lost)

    def _ended(self) -> tuple[bool, bool]:
        """Whether the run has ended, and whether without a receipt. Asked before anything is read."""
        if self._has_receipt():
            return True, False
        if not self._is_lost():
            return False, False
        return True, not self._has_receipt()  # it may have just ended, and not without a word

    def _is_lost(self) -> bool:
        """Whether the engine that is looked for lives no more."""
        opened = self.state.opened
        return self._engine and opened is not None and engine_lives(self.directory, opened.host, opened.pid) is False

    def _has_receipt(self) -> bool:
        """Whether the run's own receipt is there. A damaged one is somebody's last word as well."""
        self._changed = os.stat(self.directory).st_mtime_ns
        if RUN_RECEIPT not in os.listdir(self.directory):
            return False
        found = os.stat(os.path.join(self.directory, RUN_RECEIPT))
        signature = (found.st_ino, found.st_mtime_ns)
        if signature == self._strange:
            return False
        with suppress(Unreadable):
            if RUN_RECEIPT in papers_of(self.directory).not_ours:
                self._strange = signature
                return False
        return True

    def _journal(self) -> Iterator[News]:
        read = read_journal(os.path.join(self.directory, JOURNAL), self._end, self._seq, MOST)
        self._end, self._seq, self._damage = read.end, self._seq + len(read.records), read.damage
        self._unread = read.more
        for record in read.records:
            if self._folds:
                try:
                    self.state, _ = step(self.state, record)
                except IllegalEvent as error:
                    self._folds = False
                    yield Trouble(f"{self.run_id}: its journal does not fold: {str(error).splitlines()[0]}")
            yield Told(self.run_id, record, self.state)


class Follower:
    """The runs of a job, or of all tasks of an array (`tasks`), in `places`; or the run directories that are given.

    An adopted run has a job's id in its name and is none of that job's (`sealing.py`): it is followed only when it is
    given. `since` is the epoch second of the job's submission, where it is known. Looks are for one thread at a time;
    `take` is for any.
    """

    def __init__(
        self,
        jobid: str,
        places: Sequence[str],
        wanted: Wanted,
        *,
        directories: Iterable[str] = (),
        tasks: bool = False,
        asked: Asked | None = None,
        engine: bool = False,
        listings: Listings | None = None,
    ) -> None:
        """`listings`: shared with others who look at the same places."""
        self.runs: dict[str, RunFollower] = {}  # by real path
        self.more = False
        self._jobid = jobid
        self._places = tuple(places)
        self._wanted = wanted
        self._tasks = tasks
        self._asked = asked
        self._engine = engine
        self._listings = listings or Listings(age=0.0)
        self._first = True
        self._known: set[str] = set()  # paths in the places that need no second look
        self._adopted: set[str] = set()  # real paths of runs that are none of the job's
        self._news: deque[News] = deque()
        self._told: set[str] = set()
        for directory in directories:
            self._follow(directory)
        self._given = frozenset(self.runs)
        self.place = next(iter(self._places), "") or os.path.dirname(next(iter(self.runs), ""))

    def take(self) -> list[News]:
        """The news since the last call, in their order."""
        taken: list[News] = []
        with suppress(IndexError):
            while True:
                taken.append(self._news.popleft())
        return taken

    def stirs(self) -> bool:
        """Whether a look would find something, as far as sizes, times and names tell. For any thread."""
        return any(run.stirs() for run in list(self.runs.values())) or any(self._unknown(fresh=False))

    def look(self, last: bool = False) -> None:
        """Look once at everything. With `last`, nobody writes any more. Trouble is news, never raised."""
        self._discover(last)
        self.more = False
        for path, run in list(self.runs.items()):
            if run.over:
                continue
            try:
                for news in run.look(last):
                    if self._is_anothers(path, run):
                        break
                    self._news.append(news)
            except OSError as error:
                self._trouble(f"{run.directory}: {error.strerror or error}")
            self.more |= run.more and not run.over

    def _is_anothers(self, path: str, run: RunFollower) -> bool:
        """Whether its first record, which comes before any other news, says that the run is none of the job's."""
        if path in self._given or run.state.opened is None or not run.state.opened.adopted:
            return False
        self._adopted.add(path)
        del self.runs[path]
        return True

    def _trouble(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._news.append(Trouble(text))

    def _follow(self, directory: str) -> None:
        real = os.path.realpath(directory)
        if real not in self._adopted:
            self.runs.setdefault(real, RunFollower(real, self._wanted, engine=self._engine))

    def _discover(self, last_look: bool) -> None:
        new = dict(self._new_runs(last_look))
        if self._first:  # earlier attempts of a job that was requeued before are history
            last: dict[str | None, int] = {}
            for run_id in new.values():
                last[job_in(run_id)] = max(attempt_of(run_id), last.get(job_in(run_id), 0))
            new = {path: run_id for path, run_id in new.items() if attempt_of(run_id) == last[job_in(run_id)]}
            self._first = not new
        for path in sorted(new, key=lambda path: (attempt_of(new[path]), path)):
            if may_be_of_job(path, self._asked):
                self._follow(path)

    def _new_runs(self, fresh: bool) -> Iterator[tuple[str, str]]:
        """The real path and the id of each directory that has become a run of the job: one with a journal."""
        for run_id, path in self._unknown(fresh):
            with suppress(OSError):
                if JOURNAL in os.listdir(path):
                    self._known.add(path)
                    yield os.path.realpath(path), run_id

    def _unknown(self, fresh: bool) -> Iterator[tuple[str, str]]:
        """The id and the path of what may be a new run, by its name."""
        for place in self._places:
            try:
                names = self._listings.names(place, self._jobid, fresh=fresh)
            except FileNotFoundError:
                continue  # made with the first run
            except OSError as error:
                self._trouble(f"{place}: {error.strerror or error}")
                continue
            for name in names:
                run_id, path = name.partition("@")[0], os.path.join(place, name)
                if path not in self._known and not is_guests(run_id) and self._is_ours(job_in(run_id)):
                    yield run_id, path

    def _is_ours(self, job: str | None) -> bool:
        return job == self._jobid or (self._tasks and (job or "").startswith(f"{self._jobid}_"))


def may_be_of_job(run_dir: str, asked: Asked | None) -> bool:
    """Whether a run may be of the job that was asked for so (None: nobody knows how): ids come again. It is when its
    journal was written after that, or, for that clock may have been wrong, when it runs that very plan."""
    if asked is None:
        return True
    try:
        if os.stat(os.path.join(run_dir, JOURNAL)).st_mtime > asked.at - CLOCKS:
            return True
    except OSError:
        return True
    return (opening_of(run_dir)[0] or {}).get("plan_file") == asked.plan
