"""The engine: carries out what the machine asks for, and tells it what happened. It decides nothing.

One `Engine` is one run. Everything that happens comes in through `post`, in the loop, one event at a time:

    observation --post--> Record --core.run.step--> new state, commands --> carried out, journalled

Commands that stop ranks are carried out in that same call, before the record is even queued for the disk; StartStep and
PublishMarker wait until it is on the disk. Deadlines live in the machine's state: after each event the engine arms one
timer for the next of them.

Tasks, all in one TaskGroup: one per step (`_attend`: it starts the step's process, waits for it, returns `(rank, end)`
and never raises), one per wave of steps that observes their ends in completion order, and the helpers (pings, looks at
files, Slurm's end time, single slow commands), which are cancelled when the machine has finished. Stopping a rank is a
command to its agent; no task is cancelled for it.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol, TypeVar

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import JOURNAL, Layout
from supervisor.core.marker import Foreign, Garbage, Marker, NotYet
from supervisor.core.run import IllegalEvent, step
from supervisor.core.state import TALKING, RunState
from supervisor.engine import channel, markers
from supervisor.engine.collect import collect
from supervisor.engine.journal import Journal
from supervisor.engine.looker import Looker, contract_root, marker_event
from supervisor.engine.threads import in_thread
from supervisor.launch.base import Launcher, NoStep
from supervisor.launch.process import StepProcess

PING_EVERY: Final = 5.0  # seconds
SILENT_AFTER: Final = 15.0  # seconds without an answer: three pings
SWEEP_LIMIT: Final = 15.0
MARKER_LIMIT: Final = 8.0
FOREIGN_LIMIT: Final = 100  # lines of foreign output per rank that are kept in the journal
WORDS: Final = 2000  # bytes of srun's own last words that become part of the story
NO_STEP_AFTER: Final = 1.0  # seconds without a step of that name until its srun is taken for one that waits
NO_STEP_PAUSE: Final = 0.1
YOUNG: Final = 10.0  # seconds since its srun was started, for a rank whose task may not run yet
SIGNAL_AGAIN: Final = 1.0  # seconds, doubled each time
REREAD_SOONEST: Final = 30.0  # seconds between two readings of the job's end time, at least


class EndTimeReader(Protocol):
    """Who knows when the allocation ends: Slurm's client, or nobody."""

    async def end_time(self, jobid: str) -> float | None:
        """The job's EndTime, in seconds since the epoch; None when it is not known now."""


T = TypeVar("T")

Reporter = Callable[[ev.Record, RunState], None]


class Engine:
    """One run, from its opening to the last piece of evidence."""

    def __init__(
        self,
        layout: Layout,
        launcher: Launcher,
        opening: ev.RunOpened,
        *,
        report: Reporter = lambda record, state: None,
        clock: EndTimeReader | None = None,
        notes: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        self.layout = layout
        self.state = RunState()
        self.records: list[ev.Record] = []
        self._launcher = launcher
        self._opening = opening
        self._report = report
        self._clock = clock
        self._notes = notes
        self._stops: list[str] = []
        self._cwd = cwd or os.getcwd()
        self._inbox: deque[ev.Event] = deque()
        self._busy = False
        self._wave: list[int] = []
        self._processes: dict[int, StepProcess] = {}
        self._early: dict[int, list[bytes]] = {}
        self._foreign: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._rereading = False
        self._finished = asyncio.Event()
        self._helpers: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[Any]] = set()  # empty at the end, but for steps whose srun cannot be ended

    @property
    def journal_trouble(self) -> str | None:
        """What kept the journal from being written, if anything did."""
        return self._journal.trouble

    async def run(self) -> RunState:
        """Run to the end. Raises OSError when the journal cannot be created; nothing has been started then."""
        self._loop = asyncio.get_running_loop()
        limit = self.layout.plan.deadlines.journal
        self._journal = Journal(self.layout.at(JOURNAL), limit, lambda text: self.post(ev.Noted(text)))
        self._looker = Looker(self.layout, self.post, self._open_contracts)
        self._logs = await in_thread(self._open_logs, limit=limit)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._help("pings", self._ping)
                if self._looker.has_work:
                    self._help("looking at files", self._looker.run)
                if self._clock is not None:
                    self._help("the end time", self._follow_end_time)
                self._open()
                await self._finished.wait()
                for task in (*self._helpers, *self._steps):
                    task.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for descriptor in self._logs.values():
                os.close(descriptor)
        return self.state

    def request_stop(self, name: str) -> None:
        """Somebody wants the run to end (a signal's name). To be called in the loop, at any time."""
        if self.state.phase == "new":
            self._stops.append(name)  # nothing is opened yet: nothing will be started
        elif self.state.phase != "ended":
            self.post(ev.StopRequested(name))

    async def close(self) -> bool:
        """Write the rest of the journal; False when not every line is on the disk."""
        return await self._journal.close()

    def _open(self) -> None:
        """Open the run. A stop that came before is posted in the same breath, so that no step is started."""
        self._busy = True
        self.post(self._opening)
        for name in self._stops:
            self.post(ev.StopRequested(name))
        for text in self._notes:
            self.post(ev.Noted(text))
        self._busy = False
        self._drain()

    # --- the one entrance ------------------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Something happened. To be called in the loop; may be called from within a command."""
        self._inbox.append(event)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._inbox:
                self._take(self._inbox.popleft())
        finally:
            self._busy = False
        self._arm()
        if self._wave:
            wave, self._wave = self._wave, []
            self._step_task(self._observe(wave), "wave")

    def _take(self, event: ev.Event) -> None:
        now = self._loop.time()
        utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = ev.Record(self.state.seq + 1, now, utc, event)
        try:
            self.state, commands = step(self.state, record)
        except Exception as error:  # noqa: BLE001 - IllegalEvent, or the machine itself broke: nothing has changed
            self._refused(event, error)
            return
        for command in commands:
            if type(command) not in cmd.DURABLE:
                self._carry_out(command)
        self.records.append(record)
        envelope = {"seq": record.seq, "utc": utc, "at": now}
        self._journal.append({**envelope, **ev.encode(event)})
        for command in commands:
            self._journal.append({**envelope, **cmd.encode(command)})
        for command in commands:
            if type(command) in cmd.DURABLE:
                self._carry_out(command)
        self._report(record, self.state)

    def _refused(self, event: ev.Event, error: Exception) -> None:
        """The machine did not take an event: that is a fault of ours, and the run ends for it. A machine that does not
        even take that leaves nothing but to let go: the agents end their ranks when their channels close."""
        if self.state.phase == "new":
            raise error
        if isinstance(event, ev.EngineFault):
            self._finished.set()
        elif self.state.phase != "ended":
            text = str(error) if isinstance(error, IllegalEvent) else f"{event.name}: {type(error).__name__}: {error}"
            self._inbox.append(ev.EngineFault(text))

    def _carry_out(self, command: cmd.Command) -> None:
        try:
            CARRY_OUT[type(command)](self, command)
        except Exception as error:  # noqa: BLE001 - told as our own fault; the other commands are carried out
            self._inbox.append(ev.EngineFault(f"{command.name}: {type(error).__name__}: {error}"))

    def _arm(self) -> None:
        """One timer for the machine's next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = [at for name, at in self.state.deadlines.items() if not (self._rereading and name == "time_limit")]
        if due and not self._finished.is_set():
            self._timer = self._loop.call_at(min(due), self._fire)

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for name, at in sorted(self.state.deadlines.items(), key=lambda item: item[1]):
            if at > now:
                break
            if name == "time_limit" and self._clock is not None:
                if not self._rereading:
                    self._rereading = True
                    self._help("the time limit", self._reread_end_time)
            else:
                self.post(ev.TimerFired(name))
        self._arm()

    def _help(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A helper task: cancelled at the end of the run; if it breaks, that is our own fault and is said."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - told as our own fault
                self.post(ev.EngineFault(f"{what}: {type(error).__name__}: {error}"))

        task = self._group.create_task(guarded(), name=what)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _step_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = self._group.create_task(work, name=name)
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
        return task

    async def _observe(self, wave: list[int]) -> None:
        """A wave of steps, each end told in the order in which they come."""
        tasks = [self._step_task(self._attend(rank), f"rank {rank}") for rank in wave]
        for next_end in asyncio.as_completed(tasks):
            _, end = await next_end
            if end is not None:
                self.post(end)

    async def _attend(self, rank: int) -> tuple[int, ev.Event | None]:
        """A step's whole life. Returns its end; never raises."""
        try:
            await self._journal.durable()
            if self.state.ranks[rank].phase != "issued":
                return rank, ev.StepRefused(rank, "a stop was decided first")
            process = await self._spawn(rank)
            code = await process.wait()
            self._processes.pop(rank, None)
            return rank, ev.StepEnded(rank, code, await self._words(rank))
        except OSError as error:
            return rank, ev.StepRefused(rank, f"{error.filename or 'the step'}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - told as our own fault
            self.post(ev.EngineFault(f"rank {rank}: {type(error).__name__}: {error}"))
            return rank, None

    async def _spawn(self, rank: int) -> StepProcess:
        command = self._launcher.step(self.layout, rank)
        agent = self.state.ranks[rank].agent
        process = await StepProcess.start(
            command.argv,
            command.env,
            lambda line: self._line(rank, line),
            stdout=None if agent else self._logs[rank, "out"],
            stderr=self._logs[rank, "srun" if agent else "err"],
            cwd=command.cwd or self._cwd,
        )
        self._processes[rank] = process
        self._heard[rank] = self._loop.time()
        self.post(ev.StepSpawned(rank, process.pid, self.layout.step_name(rank)))
        for line in self._early.pop(rank, ()):
            self._line(rank, line)
        return process

    def _open_logs(self) -> dict[tuple[int, str], int]:
        """The log files that the engine itself hands to processes: srun's words, and both logs of a rank that has no
        agent."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        opened = {}
        for rank in self.layout.plan.ranks:
            agent = self.layout.plan.role_of(rank).agent == "on"
            for kind in ("srun",) if agent else ("out", "err"):
                opened[rank, kind] = os.open(self.layout.log(rank, kind), flags, 0o644)
        return opened

    async def _words(self, rank: int) -> str:
        """The tail of what the launcher itself said."""
        kind = "srun" if self.state.ranks[rank].agent else "err"

        def tail() -> str:
            with open(self.layout.log(rank, kind), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - WORDS))
                return file.read().decode(errors="replace")

        try:
            return await in_thread(tail, limit=2.0)
        except (OSError, TimeoutError):
            return ""

    def _line(self, rank: int, line: bytes) -> None:
        """A line from a step's stdout: a report of its agent, or foreign."""
        if rank not in self._processes:
            self._early.setdefault(rank, []).append(line)
            return
        report = channel.report(self.layout.nonce, line)
        if report is None:
            self._foreign_line(rank, line)
            return
        self._heard[rank] = self._loop.time()
        if self.state.ranks[rank].silent:
            self.post(ev.RankHeard(rank))
        if report["e"] == "pong":
            return
        try:
            event = channel.EVENTS[report["e"]](rank, report)
        except (KeyError, TypeError, ValueError):
            self._foreign_line(rank, line)
            return
        self.post(event)

    def _foreign_line(self, rank: int, line: bytes) -> None:
        count = self._foreign[rank] = self._foreign.get(rank, 0) + 1
        if count <= FOREIGN_LIMIT and line.strip():
            text = line[: channel.LINE_LIMIT].decode(errors="replace")
            self.post(ev.Noted(f"foreign output on the channel: {text}", rank))

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _ping(self) -> None:
        """Ask every agent whether it lives; tell the machine of those that do not answer."""
        line = channel.command(self.layout.nonce, "ping")
        while True:
            await asyncio.sleep(PING_EVERY)
            now = self._loop.time()
            for rank in self.state.ranks:
                if not rank.agent or rank.phase not in TALKING or rank.rank not in self._processes:
                    continue
                self._processes[rank.rank].send(line)
                quiet = now - self._heard[rank.rank]
                if quiet > SILENT_AFTER and not rank.silent:
                    self.post(ev.RankSilent(rank.rank, quiet))

    async def _follow_end_time(self) -> None:
        """Slurm's EndTime now, and again when half of the rest has passed: a limit may be changed under way."""
        while True:
            await self._read_end_time()
            end_at = self.state.end_at
            rest = 600.0 if end_at is None else (end_at - self._loop.time()) / 2
            await asyncio.sleep(max(REREAD_SOONEST, rest))

    async def _read_end_time(self) -> bool:
        """Tell the machine of an end time that it does not know yet. True when there was news."""
        assert self._clock is not None  # noqa: S101 - only started with one
        end = await self._clock.end_time(self.layout.jobid)
        if end is None:
            return False
        end_at = self._loop.time() + (end - time.time())
        known = self.state.end_at
        if known is not None and abs(known - end_at) < 1.0:
            return False
        utc = datetime.datetime.fromtimestamp(end, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self.post(ev.TimeLimitKnown(end_at, utc))
        return True

    async def _reread_end_time(self) -> None:
        """The time limit is near: it may have been extended since it was read."""
        try:
            await self._read_end_time()
        finally:
            self._rereading = False
        if self.state.deadlines.get("time_limit", float("inf")) <= self._loop.time():
            self.post(ev.TimerFired("time_limit"))
        self._arm()

    def _open_contracts(self) -> frozenset[str]:
        return frozenset(item.contract for item in self.state.contracts if not item.final)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _send(self, rank: int, name: str, **fields: Any) -> None:
        process = self._processes.get(rank)
        if process is not None:
            process.send(channel.command(self.layout.nonce, name, **fields))

    def _start_step(self, command: cmd.StartStep) -> None:
        self._wave.append(command.rank)

    def _start_rank(self, command: cmd.StartRank) -> None:
        number = _signal_number(self.state.ranks[command.rank].stop_signal)
        document = self.layout.specification(command.rank, number, self._cwd)
        process = self._processes.get(command.rank)
        if process is not None:
            start = channel.command(self.layout.nonce, "start")
            process.send(channel.specification(self.layout.nonce, document) + start)

    def _stop_rank(self, command: cmd.StopRank) -> None:
        rank = self.state.ranks[command.rank]
        if rank.agent:
            number = _signal_number(rank.stop_signal)
            self._send(command.rank, "stop", signal=number, grace=command.grace, exit=command.exit)
        else:
            self._help(f"stopping rank {command.rank}", lambda: self._signal_step(command.rank, rank.stop_signal))

    async def _signal_step(self, rank: int, name: str) -> None:
        """Signal a rank without an agent, as surely as its launcher can.

        A srun that has no step after a while waits for it: it is ended, which starts nothing. (The while is for a step
        that comes just now, and for one that has just ended, whose srun still writes.) A signal that comes between the
        making of a step and its task's exec is lost, and nobody says so: a rank that is young is signalled again.
        """
        born, again = self._heard.get(rank, 0.0), SIGNAL_AGAIN
        give_up = self._loop.time() + NO_STEP_AFTER
        while (process := self._processes.get(rank)) is not None:
            try:
                error = await self._launcher.signal(self.layout, rank, process.pid, name)
            except NoStep:
                if self._loop.time() > give_up:
                    process.terminate()
                    return
                await asyncio.sleep(NO_STEP_PAUSE)
                continue
            if error:
                self.post(ev.Noted(f"SIG{name} did not reach it: {error}", rank))
            if not self._launcher.loses_early_signals or self._loop.time() - born > YOUNG:
                return
            await asyncio.sleep(again)
            again *= 2
            give_up = self._loop.time() + NO_STEP_AFTER

    def _kill_rank(self, command: cmd.KillRank) -> None:
        if self.state.ranks[command.rank].agent:
            self._send(command.rank, "kill", exit=command.exit)
        elif command.rank in self._processes:
            self._processes[command.rank].terminate()

    def _release_step(self, command: cmd.ReleaseStep) -> None:
        self._send(command.rank, "bye", exit=command.exit)

    def _kill_step(self, command: cmd.KillStep) -> None:
        process = self._processes.get(command.rank)
        if process is not None:
            process.terminate()

    def _sweep(self, command: cmd.Sweep) -> None:
        self._help(f"sweep of rank {command.rank}", lambda: self._search(command.rank))

    async def _search(self, rank: int) -> None:
        """Look on the rank's node for what it left, by the tag in its environment."""
        wanted = self._launcher.sweep(self.layout, rank)
        answers: list[dict[str, Any]] = []

        def heard(line: bytes) -> None:
            report = channel.swept(line)
            if report is not None:
                answers.append(report)

        error = ""
        process: StepProcess | None = None
        try:
            stderr = self._logs.get((rank, "srun"), self._logs.get((rank, "err"), 2))
            process = await StepProcess.start(wanted.argv, wanted.env, heard, stderr=stderr, cwd=self._cwd)
            async with asyncio.timeout(SWEEP_LIMIT):
                code = await process.wait()
            error = "" if answers else f"the search ended with {code}: {await self._words(rank)}"
        except OSError as failure:
            error = str(failure)
        except TimeoutError:
            error = f"the search did not end within {SWEEP_LIMIT:g} s"
        finally:
            if process is not None:
                process.terminate()
        if self.state.ranks[rank].phase == "sweeping":
            killed, left = (answers[0]["killed"], answers[0]["left"]) if answers else (0, -1)
            self.post(ev.Swept(rank, killed, left, error))

    def _read_marker(self, command: cmd.ReadMarker) -> None:
        async def read() -> None:
            def look() -> ev.MarkerRead:
                reading = markers.read(self.layout.marker, self.layout.run_id)
                return marker_event(reading, markers.noted(self.layout.marker, self.layout.run_id), command.asked)

            try:
                self.post(await in_thread(look, limit=MARKER_LIMIT))
            except (OSError, TimeoutError) as error:
                self.post(ev.MarkerFailed(f"{self.layout.marker}: {error or 'no answer'}"))

        self._help("reading the marker", read)

    def _publish_marker(self, command: cmd.PublishMarker) -> None:
        marker = Marker(
            code=command.code,
            attempt=self.layout.run_id,
            rank=self.layout.plan.coordinator,
            host=self._opening.host,
            by=command.by,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        )

        async def publish() -> None:
            await self._journal.durable()
            write = markers.replace if command.replace else markers.publish
            try:
                done = await in_thread(write, self.layout.marker, marker, limit=MARKER_LIMIT)
            except (OSError, TimeoutError) as error:
                self.post(ev.MarkerFailed(f"{self.layout.marker}: {error or 'no answer'}"))
                return
            match done.found:
                case Marker(code=code):
                    self.post(ev.MarkerPublished(code, done.outcome))
                case NotYet() | Garbage() | Foreign() as found:
                    text = f"{self.layout.marker}: in its place is {found}"
                    self.post(ev.MarkerFailed(text, blocked=not command.replace))

        self._help("publishing the marker", publish)

    def _check_artifacts(self, command: cmd.CheckArtifacts) -> None:
        self._looker.ask(command.asked)

    def _collect(self, _: cmd.Collect) -> None:
        async def work() -> None:
            roots = {instance.contract_id: contract_root(self.layout, instance) for instance in self._looker.instances}
            wanted = [
                str(roots[item.contract] / fact.path)
                for item in self.state.contracts
                if item.finding is not None
                for fact in item.finding.files
            ]
            limit = self.layout.plan.deadlines.collect
            files: list[dict[str, Any]] = []
            errors: list[str] = []
            try:
                await in_thread(collect, self.layout, wanted, files, errors, limit=limit)
            except TimeoutError:
                errors.append(f"collection did not end within {limit:g} s")
            self.post(ev.Collected(list(files), list(errors)))  # copies: the thread may still be at work

        self._help("collecting", work)

    def _finish(self, _: cmd.Finish) -> None:
        self._finished.set()


def _signal_number(name: str) -> int:
    return int(signal.Signals[f"SIG{name}"])


CARRY_OUT: Final[dict[type[cmd.Command], Callable[[Engine, Any], None]]] = {
    cmd.StartStep: Engine._start_step,
    cmd.StartRank: Engine._start_rank,
    cmd.StopRank: Engine._stop_rank,
    cmd.KillRank: Engine._kill_rank,
    cmd.ReleaseStep: Engine._release_step,
    cmd.KillStep: Engine._kill_step,
    cmd.Sweep: Engine._sweep,
    cmd.ReadMarker: Engine._read_marker,
    cmd.PublishMarker: Engine._publish_marker,
    cmd.CheckArtifacts: Engine._check_artifacts,
    cmd.Collect: Engine._collect,
    cmd.Finish: Engine._finish,
}
