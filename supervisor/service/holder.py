"""Who holds all allocations and answers for them: the daemon's heart, which knows nothing of HTTP.

One task group holds everything: a task for each allocation that has something to be done (`life.py`), one for each
cluster's poller, one that ends the service when its books cannot be written at all. An allocation is accepted when it
is on the disk; it waits in the queue, first come, first served, until fewer than `limit` are under way; one that Slurm
refuses makes room like one that has ended. A job that is only followed takes no room: it is there anyway.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, TypeVar

from supervisor import __version__
from supervisor.core import kept_events as ev
from supervisor.core.keeping import IllegalEvent
from supervisor.core.kept import Kept, unit_of
from supervisor.core.slurm import parse_job_id
from supervisor.loop.threads import in_thread
from supervisor.runs.registry import is_further
from supervisor.service.accepting import WRITE_LIMIT, Accepting
from supervisor.service.book import Book
from supervisor.service.found import BOOKS, Found, Line
from supervisor.service.interface import (
    STATES,
    AdoptRequest,
    Allocation,
    Document,
    Event,
    Refusal,
    SubmitRequest,
)
from supervisor.service.life import Life, utc_now
from supervisor.service.metrics import Metrics
from supervisor.service.telling import Told, event_of
from supervisor.service.wishes import Wish, adoption, identity, submission
from supervisor.service.world import Cluster, World

FILES: Final = 60.0  # seconds for small files
FORGET_PERIOD: Final = 60.0  # seconds between looks for allocations that ended long ago
POLL_AGAIN: Final = 5.0  # seconds until a poller that broke is tried again
STOP_LIMIT: Final = 8.0  # seconds that sbatch may take to answer when the service is to end

T = TypeVar("T")


class Holder:
    """Implements `interface.Answering`. Made in the event loop that runs it."""

    def __init__(
        self,
        book: Book,
        world: World,
        meter: Metrics | None = None,
        *,
        listen: Callable[[Event], object] = lambda event: None,
    ) -> None:
        """`book` calls `on_disk` for each line (`daemon.py`); `listen` is called for each event."""
        self._book = book
        self._world = world
        self._meter = meter or Metrics()
        self._told = Told()
        self._listen = listen
        self._since = utc_now()
        self._lives: dict[str, Life] = {}
        self._queue: dict[str, Life] = {}
        self._running = 0
        self._admitting = False
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving = asyncio.Event()
        self._accepting = Accepting(self._lives, book, world, self._changed, self._leaving)
        self.notes: list[str] = []  # what was found at the start that people should know
        self._measure()

    def _measure(self) -> None:
        self._meter.gauge("allocd_allocations", "Allocations, by state.", "state", self._by_state)
        self._meter.gauge("allocd_watches", "Allocations whose directories are looked at.", "by", self._watches)
        self._world.detected = self._meter.detected
        self._meter.counter("allocd_slurm_calls", "Slurm's commands that were run.", "command", self._world.calls)
        self._meter.counter("allocd_slurm_errors", "Those that failed.", "command", self._world.errors)

    # --- the start ----------------------------------------------------------------------------------------------------

    def restore(self, found: Sequence[Found]) -> None:
        """Take up what the books tell; before `run`."""
        events: list[Event] = []
        for book in found:
            life = self._lives[book.key] = Life(book.key, self._book, self._world, self._changed)
            if book.cut:
                self.notes.append(f"{book.key}: a torn last line of {book.cut} bytes was cut off")
            life.damage = book.damage
            events += self._fold(life, book.lines)
            self._accepting.know(life)
            if life.damage:
                life.damage = book.advice(life.damage)
                self.notes.append(f"{book.key}: {life.damage}")
                continue
            self._place(life, Kept())
        self._told.restore(sorted(events, key=lambda event: event.seq))

    def _fold(self, life: Life, lines: Sequence[Line]) -> list[Event]:
        events = []
        for line in lines:
            try:
                life.restore([line])
            except IllegalEvent as error:
                life.damage = life.damage or f"it tells what cannot be: {str(error).splitlines()[0]}"
                break
            events.append(event_of(line, life.state))
        return events

    async def run(self) -> None:
        """Hold everything until `leave`, or until the books are dead (raises what killed them)."""
        async with asyncio.TaskGroup() as self._group:
            self._accepting.open(self._group)
            helpers = [self._group.create_task(helper) for helper in self._helpers()]
            for life in list(self._lives.values()):
                self._begin(life)
            self._admit()
            leaving = self._group.create_task(self._leaving.wait())
            await asyncio.wait((leaving, self._book.failed), return_when=asyncio.FIRST_COMPLETED)
            if self._leaving.is_set():
                await self._settle_down()
            self._leaving.set()  # from here on nothing is begun
            for task in (*helpers, leaving, *self._tasks.values()):
                task.cancel()  # what is being written is answered first
        self._group = None
        self._accepting.open(None)
        self._told.close()
        if self._book.failed.done():
            self._book.failed.result()

    def _helpers(self) -> tuple[Coroutine[Any, Any, None], ...]:
        watch = self._meter.watch_the_loop()
        return self._poll(), self._world.rounds.run(), self._tidy_up(), self._forget_old(), watch

    def leave(self) -> None:
        """End, and leave everything that runs as it is."""
        self._leaving.set()

    async def _settle_down(self) -> None:
        """Let submissions that are under way come to their answer: a doubt costs the next start some time."""
        submitting = [life for life in self._lives.values() if life.is_submitting]
        for life in submitting:
            life.interrupt()
        loop = asyncio.get_running_loop()
        end = loop.time() + STOP_LIMIT
        while any(life.is_submitting for life in submitting) and loop.time() < end:  # noqa: ASYNC110 - each its own end
            await asyncio.sleep(0.05)

    async def _poll(self) -> None:
        """Run each cluster's poller."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._keep_polling(await self._world.next_cluster()))

    async def _keep_polling(self, cluster: Cluster) -> None:
        """A fault in there is told, and ends nothing: whoever waits for a job's end goes on waiting."""
        while True:
            with suppress(Exception):  # it must not take the service along: `health` tells of it
                await cluster.poller.run()
            await asyncio.sleep(POLL_AGAIN)

    # --- what changes -------------------------------------------------------------------------------------------------

    def on_disk(self, line: Line) -> None:
        """A line is on the disk: it is told."""
        life = self._lives.get(line.key) or self._accepting.new.get(line.key)
        if life is not None:
            event = life.on_disk(line)
            self._told.add(event)
            self._listen(event)

    def _changed(self, life: Life, before: Kept) -> None:
        """Called by an allocation after each of its events."""
        self._place(life, before)
        if life.ended and life.state.verdict:
            self._meter.verdict(life.state.verdict["outcome"], life.state.verdict["reason"])
        if life.state.phase != before.phase:
            self._begin(life)
            self._admit()

    async def _tidy_up(self) -> None:
        """Once: what a daemon that died could not remove any more."""
        ended = [life for life in self._lives.values() if life.ended and not life.damage]

        def tidy_up() -> None:
            for life in ended:
                life.tidy_up()

        with suppress(OSError):
            await in_thread(tidy_up, limit=FORGET_PERIOD)

    async def _forget_old(self) -> None:
        """Of those that have ended the last `keep` are told of; older ones are forgotten, book and all: their receipts
        are with their runs. So are those whose damaged book somebody has moved away."""
        while True:
            await asyncio.sleep(FORGET_PERIOD)
            lives = sorted(self._lives.values(), key=lambda life: life.newest)
            damaged = [life for life in lives if life.damage]
            ended = [life for life in lives if life.ended and not life.damage]
            with suppress(OSError):  # a file system that is away
                for life in ended[: -self._world.settings.keep]:
                    await in_thread(self._book.forget, life.key, limit=FILES, place=BOOKS)
                    self._forget(life)
                for life in damaged:
                    if await in_thread(self._book.is_gone, life.key, limit=FILES, place=BOOKS):
                        self._forget(life)

    def _forget(self, life: Life) -> None:
        del self._lives[life.key]
        self._accepting.forget(life)

    def _place(self, life: Life, before: Kept) -> None:
        """Where it stands: in the queue, among those that take room, or in neither."""
        self._running += life.state.admitted - before.admitted
        if life.state.phase == "queued":
            self._queue[life.key] = life
        else:
            self._queue.pop(life.key, None)

    def _begin(self, life: Life) -> None:
        if self._group is None or self._leaving.is_set() or not life.is_active or life.key in self._tasks:
            return
        task = self._tasks[life.key] = self._group.create_task(life.run(), name=life.key)
        task.add_done_callback(lambda _: self._tasks.pop(life.key, None))

    def _admit(self) -> None:
        """Let in who has waited longest, as long as there is room."""
        if self._group is None or self._leaving.is_set():
            return
        if self._admitting:
            return  # it is one of these that has changed
        self._admitting = True
        try:
            while self._queue and self._running < self._world.settings.limit:
                next(iter(self._queue.values())).hear(ev.Admitted())
        finally:
            self._admitting = False

    def reload(self) -> None:
        """The settings have changed."""
        self._admit()

    # --- what is asked for --------------------------------------------------------------------------------------------

    async def submit(self, request: SubmitRequest, key: str | None) -> Allocation:
        """See `interface.Answering`."""
        wish = partial(submission, request, self._world.environ())
        return self._answer(await self._accepting.accept(key, identity(request), wish))

    async def adopt(self, request: AdoptRequest, key: str | None) -> Allocation:
        """See `interface.Answering`."""
        wish = partial(adoption, request, self._world.environ())
        return self._answer(await self._accepting.accept(key, identity(request), wish))

    async def follow(self, jobid: str, cluster: str | None) -> Allocation:
        """See `interface.Answering`. A job that is held already is answered as it is."""
        try:
            jobid = parse_job_id(jobid).allocation
        except ValueError as error:
            raise Refusal(422, "invalid", str(error)) from None
        name = f"follow {jobid} {cluster or ''}"
        await self._accepting.settled(name)
        for life in self._lives.values():
            known = life.state.jobid == jobid and (not cluster or life.state.cluster == cluster)
            if known and life.state.kind != "adopted" and not life.ended and not life.damage:
                return self._answer(life)
        wish = Wish(ev.Accepted("followed", f"job {jobid}", jobid=jobid, cluster=cluster or ""), {})
        asked = {"jobid": jobid, "cluster": cluster}
        return self._answer(await self._accepting.accept(None, asked, lambda: wish, name))

    # --- answering ----------------------------------------------------------------------------------------------------

    def allocations(self) -> Sequence[Allocation]:
        """See `interface.Answering`."""
        positions = {key: position for position, key in enumerate(self._queue, 1)}
        return [life.allocation(positions.get(key)) for key, life in self._lives.items()]

    def find(self, name: str) -> Allocation:
        """See `interface.Answering`."""
        life = self._life(name)
        return self._answer(life, _task(life, name))

    def _answer(self, life: Life, task: str = "") -> Allocation:
        position = list(self._queue).index(life.key) + 1 if life.key in self._queue else None
        return life.allocation(position, task)

    def _life(self, name: str) -> Life:
        if name in self._lives:
            return self._lives[name]
        named = [
            life
            for life in reversed(self._lives.values())
            if name in life.state.jobs or name in life.state.units or name in life.state.runs
        ]
        own = [life for life in named if life.state.kind != "adopted"]  # a job's id is the job's, not its guests'
        if is_further(name) and len(named) > 1:
            raise Refusal(409, "conflict", f"several runs have the id {name}: name the key: {_told_apart(named)}")
        if named:
            return next(iter([*own, *filter(_lives, named)]), named[0])
        raise Refusal(404, "not_found", f"no allocation {name!r} is known here")

    def _one_to_stop(self, name: str) -> Life:
        """The allocation, if it is one: a job may have several guests. Raises Refusal."""
        life = self._life(name)
        if life.state.kind == "adopted" and name == life.state.jobid:
            guests = [each for each in self._lives.values() if each.state.jobid == name and _lives(each)]
            if len(guests) > 1:
                text = f"job {name} is somebody else's, and has several runs of yours: name one: {_told_apart(guests)}"
                raise Refusal(409, "conflict", text)
        return life

    async def stop(self, name: str, how: Literal["stop", "cancel"]) -> Allocation:
        """See `interface.Answering`. An allocation without a job is withdrawn, either way; one whose job, or task, has
        not begun is stopped as soon as its engine is there."""
        life = self._one_to_stop(name)
        task = _task(life, name)
        if life.damage:
            raise Refusal(409, "conflict", life.damage)
        if "+" in name and name.partition(".")[0] not in life.state.jobs:
            text = f"{name} is a component of job {life.state.jobid}, which has one run on all of them: name the job"
            raise Refusal(409, "conflict", text)
        if how == "cancel" and life.state.kind != "submitted":
            raise Refusal(409, "conflict", "its job was not submitted here: only who made it cancels it")
        over = life.ended or life.state.verdict or (task and life.state.is_over(task))
        task = "" if how == life.state.stopping == "cancel" else task  # sent again: for the whole
        if over or life.state.is_asked(how, task):
            return self._answer(life, task)
        if how == "stop" and life.state.kind == "followed" and not life.state.has_engine(task):
            job = task or life.state.jobid
            text = f"job {job} has no run that could end in order: only who made it cancels it, with scancel"
            raise Refusal(409, "conflict", text)
        line = life.hear(ev.StopAsked(how, task))
        try:
            await asyncio.wait_for(asyncio.shield(line), WRITE_LIMIT if not self._book.trouble else 0.5)
        except (TimeoutError, OSError):
            text = "it is being stopped, but that is not on the disk: a service that is started anew would not know"
            raise Refusal(507, "storage", text) from None
        return self._answer(life, task)

    def events(self, after: int | None, key: str | None = None) -> AsyncGenerator[Event, None]:
        """See `interface.Answering`."""
        return self._told.after(after, key)

    def _by_state(self) -> dict[str, float]:
        counts = Counter("damaged" if life.damage else life.state.phase for life in self._lives.values())
        return {state: float(counts[state]) for state in STATES}

    def _watches(self) -> dict[str, float]:
        return {"polling": float(self._world.rounds.count)}

    def health(self) -> Document:
        """See `interface.Answering`."""
        damaged = [f"{life.key}: {life.damage}" for life in self._lives.values() if life.damage]
        faults = [cluster.poller.fault for cluster in self._world.clusters.values()]
        broken = [f"Slurm's answers broke what reads them: {fault}" for fault in faults if fault]
        wrong = [*filter(None, [self._book.trouble]), *broken, *damaged]
        return {
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._since,
            "allocations": {state: int(count) for state, count in self._by_state().items()},
            "limit": self._world.settings.limit,
            "last_event": self._told.last,
            "wrong": wrong,
        }

    def metrics(self) -> bytes:
        """See `interface.Answering`."""
        return self._meter.render()


def _lives(life: Life) -> bool:
    return not (life.ended or life.damage)


def _told_apart(lives: Sequence[Life]) -> str:
    """Allocations that one name means, by their keys and runs."""
    runs = ((life.key, life.state.run_id, life.state.run_dir) for life in lives)
    return ", ".join(f"{key} (run {run_id} in {where})" if run_id else key for key, run_id, where in runs)


def _task(life: Life, name: str) -> str:
    """The task of an array that a name means, that of its run too; "" for the whole, or a component: one run is on all
    of them."""
    whole = name == life.key or unit_of(name) in map(unit_of, life.state.jobs)
    return "" if whole else unit_of(name)
