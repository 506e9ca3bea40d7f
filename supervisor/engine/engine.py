"""The engine: carries out what the machine asks for, and tells it what happened. It decides nothing.

One `Engine` is one run. Everything that happens comes in through `post`, in the loop, one event at a time:

    observation --post--> Record --core.run.step--> new state, commands --> carried out, journalled

Commands that stop ranks are carried out in that same call, before the record is even queued for the disk; StartStep and
PublishMarker wait until it is on the disk. Deadlines live in the machine's state: after each event the engine arms one
timer for the next of them.

Tasks, all in one TaskGroup: one per step (`Steps.attend`: it starts the process, waits for it, returns `(rank, end)`
and never raises), one per wave of steps that observes their ends in completion order, and the helpers (pings, looks at
files, Slurm's end time, single slow commands), which are cancelled when the machine has finished. Stopping a rank is a
command to its agent; no task is cancelled for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeVar

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import JOURNAL, Layout
from supervisor.core.marker import Foreign, Garbage, Marker, NotYet, explain
from supervisor.core.run import IllegalEvent, step
from supervisor.core.state import RunState
from supervisor.engine import markers
from supervisor.engine.clock import utc
from supervisor.engine.collect import collect
from supervisor.engine.fetch import fetch
from supervisor.engine.journal import Journal
from supervisor.engine.looker import Looker, marker_event
from supervisor.engine.promised import promised_files
from supervisor.engine.steps import Steps
from supervisor.engine.time_limit import EndTimeReader, TimeLimit
from supervisor.launch.base import Launcher
from supervisor.loop.threads import in_thread

MARKER_LIMIT: Final = 8.0
FOR_THE_END: Final = ("supervisor.core.receipt", "supervisor.engine.receipts")


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
        reports: Sequence[Reporter] = (),
        clock: EndTimeReader | None = None,
        notes: Sequence[str] = (),
        cwd: str | None = None,
    ) -> None:
        self.layout = layout
        self.state = RunState()
        self.records: list[ev.Record] = []
        self._launcher = launcher
        self._opening = opening
        self._reports = tuple(reports)
        self._clock = clock
        self._notes = notes
        self._stops: list[str] = []
        self._cwd = cwd or os.getcwd()
        self._inbox: deque[ev.Event] = deque()
        self._busy = False
        self._wave: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._rereading = False
        self._finished = asyncio.Event()
        self._helpers: set[asyncio.Task[None]] = set()
        self._attended: set[asyncio.Task[Any]] = set()  # empty at the end, but for steps whose srun cannot be ended

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
        self._steps = Steps(
            self.layout, self._launcher, self._journal, self.post, lambda: self.state, self._cwd, self._looker
        )
        if self._clock is not None:
            self._time_limit = TimeLimit(self._clock, self.post, lambda: self.state)
        await self._steps.open(limit)
        try:
            async with asyncio.TaskGroup() as self._group:
                self._help("pings", self._steps.ping)
                if self._looker.has_work:
                    self._help("looking at files", self._looker.run)
                self._help("what can wait", self._what_can_wait)
                self._open()
                await self._finished.wait()
                for task in (*self._helpers, *self._attended):
                    task.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._steps.close()
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
        moment = utc(time.time())
        record = ev.Record(self.state.seq + 1, now, moment, event)
        try:
            self.state, commands = step(self.state, record)
        except Exception as error:  # noqa: BLE001 - IllegalEvent, or the machine itself broke: nothing has changed
            self._refused(event, error)
            return
        for command in commands:
            if type(command) not in cmd.DURABLE:
                self._carry_out(command)
        self.records.append(record)
        envelope = {"seq": record.seq, "utc": moment, "at": now}
        self._journal.append({**envelope, **ev.encode(event)})
        for command in commands:
            self._journal.append({**envelope, **cmd.encode(command)})
        for command in commands:
            if type(command) in cmd.DURABLE:
                self._carry_out(command)
        self._tell(record)

    def _tell(self, record: ev.Record) -> None:
        """Show it to those who look. What breaks there (a terminal that is gone) is noted, and no event's business."""
        for report in self._reports:
            try:
                report(record, self.state)
            except Exception as error:  # noqa: BLE001 - the run goes on unseen there
                self._reports = tuple(each for each in self._reports if each is not report)
                self._inbox.append(ev.Noted(f"the display broke: {type(error).__name__}: {error}"))

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
                    self._help("the time limit again", self._reread_time_limit)
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
        self._attended.add(task)
        task.add_done_callback(self._attended.discard)
        return task

    async def _observe(self, wave: list[int]) -> None:
        """A wave of steps, each end told in the order in which they come."""
        tasks = [self._step_task(self._steps.attend(rank), f"rank {rank}") for rank in wave]
        for next_end in asyncio.as_completed(tasks):
            _, end = await next_end
            if end is not None:
                self.post(end)

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def _what_can_wait(self) -> None:
        """Steps take a while from their start to their agents' hello. In that time: what the end needs is imported, and
        Slurm is asked for the time limit; before it, both would delay the first rank."""
        await self._steps.begun.wait()
        for module in FOR_THE_END:
            import_module(module)
        if self._clock is not None:
            await self._time_limit.follow()

    async def _reread_time_limit(self) -> None:
        """The time limit is near: it may have been extended since it was read."""
        try:
            await self._time_limit.read()
        finally:
            self._rereading = False
        if self.state.deadlines.get("time_limit", float("inf")) <= self._loop.time():
            self.post(ev.TimerFired("time_limit"))
        self._arm()

    def _open_contracts(self) -> frozenset[str]:
        return frozenset(item.contract for item in self.state.contracts if not item.final)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _start_step(self, command: cmd.StartStep) -> None:
        self._wave.append(command.rank)

    def _start_rank(self, command: cmd.StartRank) -> None:
        self._steps.start_rank(command)

    def _stop_rank(self, command: cmd.StopRank) -> None:
        rank = self.state.ranks[command.rank]
        if rank.agent:
            self._steps.tell_stop(command)
        else:
            name = f"stopping rank {command.rank}"
            self._help(name, lambda: self._steps.signal(command.rank, rank.stop_signal))

    def _kill_rank(self, command: cmd.KillRank) -> None:
        self._steps.kill_rank(command)

    def _release_step(self, command: cmd.ReleaseStep) -> None:
        self._steps.release(command)

    def _kill_step(self, command: cmd.KillStep) -> None:
        self._steps.kill_step(command)

    def _sweep(self, command: cmd.Sweep) -> None:
        self._help(f"sweep of rank {command.rank}", lambda: self._steps.search(command.rank))

    def _read_marker(self, command: cmd.ReadMarker) -> None:
        async def read() -> None:
            def look() -> ev.MarkerRead:
                reading = markers.read(self.layout.marker, self.layout.run_id)
                return marker_event(reading, markers.noted(self.layout.marker, self.layout.run_id), command.asked)

            try:
                self.post(await in_thread(look, limit=MARKER_LIMIT))
            except (OSError, TimeoutError) as error:
                self.post(ev.MarkerFailed(f"{self.layout.marker}: {error}", asked=command.asked))

        self._help("reading the marker", read)

    def _publish_marker(self, command: cmd.PublishMarker) -> None:
        marker = Marker(
            code=command.code,
            attempt=self.layout.run_id,
            rank=self.layout.plan.coordinator,
            host=self._opening.host,
            by=command.by,
            at=utc(time.time()),
        )

        async def publish() -> None:
            await self._journal.durable()
            write = markers.replace if command.replace else markers.publish
            try:
                done = await in_thread(write, self.layout.marker, marker, limit=MARKER_LIMIT)
            except (OSError, TimeoutError) as error:
                self.post(ev.MarkerFailed(f"{self.layout.marker}: {error}"))
                return
            match done.found:
                case Marker(code=code):
                    self.post(ev.MarkerPublished(code, done.outcome))
                case NotYet() | Garbage() | Foreign() as found:
                    text = f"{self.layout.marker}: in its place is something else ({explain(found)})"
                    self.post(ev.MarkerFailed(text, blocked=not command.replace))

        self._help("publishing the marker", publish)

    def _check_artifacts(self, command: cmd.CheckArtifacts) -> None:
        self._looker.ask(command.asked)

    def _collect(self, command: cmd.Collect) -> None:
        async def work() -> None:
            layout, plan = self.layout, self.layout.plan
            done = await collect(
                layout,
                partial(fetch, layout, self._launcher),
                command.limit,
                promised=promised_files(self.state, layout),
                started=[rank.rank for rank in self.state.ranks if rank.started],
                archive=layout.at(plan.collect.bundle) if plan.collect.bundle else None,
            )
            self.post(done.event())

        self._help("collecting", work)

    def _finish(self, _: cmd.Finish) -> None:
        self._finished.set()


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
