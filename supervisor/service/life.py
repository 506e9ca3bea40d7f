"""The life of one allocation: its task, which carries out the duties that its state has (`core/keeping.py`).

    hear(event) -> the next state, the line on its way to the disk, and the duties that are not under way begun

Each duty has a task in the allocation's task group; of those of one slot one is carried out at a time, and none twice.
A duty that touches the world so that it cannot be repeated (sbatch, an engine's start) first waits until what it is
about to do is on the disk. A cancel does not wait: no full disk may keep GPUs burning.

What goes wrong inside a duty ends neither the allocation nor the service: it is told as `Troubled`, and the duty is
carried out again after a pause.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from supervisor.core import codes, duties, keeping
from supervisor.core import kept_events as ev
from supervisor.core.duties import PAUSES, Duty
from supervisor.core.events import Event as KeptEvent
from supervisor.core.kept import HELD, Kept, unit_of
from supervisor.core.state import RunState
from supervisor.core.submission import SCRIPT
from supervisor.loop.flag import Flag
from supervisor.loop.threads import in_thread
from supervisor.runs.copies import LIMIT, copy_file, copy_run
from supervisor.runs.papers import Unreadable
from supervisor.runs.registry import job_receipt, register_job
from supervisor.runs.sight import Gone
from supervisor.runs.waiting import first_error
from supervisor.scheduler.ours import GONE, strangers
from supervisor.scheduler.submit import Stop
from supervisor.service.book import Book
from supervisor.service.following import Following
from supervisor.service.found import Line
from supervisor.service.interface import Allocation, Document, Event
from supervisor.service.shelf import allocation_of
from supervisor.service.starting import Starting, sentence
from supervisor.service.telling import event_of
from supervisor.service.world import World

FILES: Final = 60.0  # seconds for small files
SIGNALS: Final = 8  # engines that are told to stop at the same time: each call may last its whole deadline
READINGS: Final = 3
"""So often is a run tried to be judged whose files cannot be understood."""


def utc_now() -> str:
    """The time, as books have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Life:
    """One allocation. `changed` is called after each event, with the state before it."""

    def __init__(self, key: str, book: Book, world: World, changed: Callable[[Life, Kept], object]) -> None:
        self.key = key
        self.state = Kept()
        self.told = Kept()  # as of what is on the disk
        self.created = self.changed_at = ""
        self.newest = 0  # the number of its last line on the disk
        self.damage = ""  # why its book cannot be read: nothing is done for it then
        self.ranks: Mapping[str, RunState] = {}
        self._book = book
        self._world = world
        self._changed = changed
        self._group: asyncio.TaskGroup | None = None
        self._over = Flag()
        self._slots: dict[str, tuple[Duty, asyncio.Task[None]]] = {}
        self._done: dict[str, Duty] = {}  # by slot: what was begun last
        self._pausing: set[str] = set()  # slots whose duty waits for its time
        self._stop = Stop()
        self._starting = Starting(self, book, world, self._stop)
        self._hurried = Flag()
        self._kept = Flag()  # its end is on the disk

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.state.phase == "ended"

    @property
    def is_active(self) -> bool:
        """Whether there is something to be done for it."""
        return not self.damage and (self.state.phase == "submitting" or self.state.phase in HELD)

    def restore(self, lines: Sequence[Line]) -> None:
        """Fold what its book tells. Raises IllegalEvent, with the state before the event."""
        for line in lines:
            self.created = self.created or line.utc
            self.changed_at, self.newest = line.utc, line.seq
            self.state, _ = keeping.step(self.state, line.event)
            self.told = self.state

    def allocation(self, position: int | None = None, task: str = "") -> Allocation:
        """As the interface has it, or as one of its tasks is."""
        state = keeping.of_task(self.state, task) if task else self.state
        return allocation_of(
            self.key,
            state,
            self.created,
            self.changed_at,
            position=position,
            damage=self.damage,
            ranks=rank_documents(self.ranks.get(state.run_id)),
        )

    # --- events -------------------------------------------------------------------------------------------------------

    def hear(self, event: KeptEvent) -> asyncio.Future[Line]:
        """Something happened. What is returned is done when it is on the disk. Raises IllegalEvent."""
        before = self.state
        self.state, _ = keeping.step(before, event)
        self.changed_at = utc_now()
        future = self._book.append(self.key, self.changed_at, event)
        self._changed(self, before)
        self._take_up()
        return future

    def on_disk(self, line: Line) -> Event:
        """A line of its book is on the disk. Returns how that is told."""
        self.newest = line.seq
        self.told, _ = keeping.step(self.told, line.event)
        if self.told == self.state:
            self.told = self.state  # once in memory is enough
        if self.told.phase == "ended":
            self._kept.set()
        return event_of(line, self.told)

    async def run(self) -> None:
        """Carry out its duties, to its end or until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                self._take_up()
                await self._over.wait()
            finally:
                self._over.set()  # nothing more is begun
                for _, task in self._slots.values():
                    task.cancel()
        if self.ended:
            self.ranks = {}  # its receipt tells of them, and thousands of ended ones may be held
            await self._kept.wait()  # until then what had begun may have to begin again
            with suppress(OSError):  # it will be seen to at the next start
                await in_thread(self.tidy_up, limit=FILES)

    def tidy_up(self) -> None:
        """Remove what is of no use after its end. Blocks; raises nothing."""
        self._starting.forget_request()
        if self.state.kind == "adopted":
            self._world.engines.forget(self.key)

    def interrupt(self) -> None:
        """The service is about to end: a submission that is under way should come to its answer."""
        self._stop.ask()

    @property
    def is_submitting(self) -> bool:
        """Whether sbatch or an engine's start runs, or is about to. To settle a doubt may take minutes, and is begun
        anew after the next start: nobody waits for that."""
        duty, _ = self._slots.get("start", (None, None))
        return self.state.begun and duty is not None and not isinstance(duty, duties.Settle)

    def _take_up(self) -> None:
        """Begin what is not under way."""
        if self._group is None or self._over.is_set():
            return
        if self.ended:
            self._over.set()
            return
        wanted = duties.duties(self.state)
        for slot in [slot for slot in self._pausing if self._slots[slot][0] not in wanted]:
            self._done.pop(slot, None)
            self._slots[slot][1].cancel()
        for duty in wanted:
            if duty.slot not in self._slots and self._done.get(duty.slot) != duty:
                self._done[duty.slot] = duty
                task = self._group.create_task(self._carry_out(duty), name=f"{self.key} {type(duty).__name__}")
                self._slots[duty.slot] = (duty, task)
                task.add_done_callback(partial(self._freed, duty.slot))

    def _freed(self, slot: str, _: asyncio.Task[None]) -> None:
        del self._slots[slot]
        self._take_up()

    async def _carry_out(self, duty: Duty) -> None:
        """Do it, again and again until it is done. Never raises, but when cancelled or when the book is dead."""
        await self._pause(duty, duty.after)
        tries, unread = 0, ""
        while duty in duties.duties(self.state) and not self._book.failed.done():
            try:
                if unread and tries >= READINGS:
                    await self.hear(unverifiable(unread))
                else:
                    await self._do(duty)
                return
            except (Unreadable, ValueError) as error:
                unread = str(error) if isinstance(duty, duties.Follow | duties.Attend) else ""
                self._trouble(str(error))
            except Exception as error:  # noqa: BLE001 - a fault in here must not take the other allocations along
                unread = ""
                self._trouble(sentence(error))
            tries += 1
            await self._pause(duty, PAUSES[min(tries, len(PAUSES)) - 1])
        self._done.pop(duty.slot, None)  # it was not done, and may be wanted once more

    def _do(self, duty: Duty) -> Coroutine[Any, Any, None]:
        match duty:
            case duties.Submit():
                return self._starting.submit()
            case duties.Settle():
                return self._starting.settle(duty.directory)
            case duties.Hurry():
                return self._hurry()
            case duties.Start():
                return self._starting.start()
            case duties.Follow():
                return self._follow()
            case duties.Attend():
                return self._attend()
            case duties.Cancel():
                return self._cancel(duty.jobs)
            case duties.CancelAgain():
                return self._cancel(self.state.uncancelled)
            case duties.StopEngines():
                return self._stop_engines()
            case duties.Copy():
                return self._copy()
        raise TypeError(f"nobody can carry out {duty!r}")

    async def _hurry(self) -> None:
        self._hurried.set()
        self._stop.ask()

    async def _pause(self, duty: Duty, seconds: float) -> None:
        """Wait, but for nobody who is in a hurry. A duty that is not wanted any more is let go meanwhile."""
        if not seconds:
            return
        self._pausing.add(duty.slot)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurried.wait()
        finally:
            self._pausing.discard(duty.slot)
        self._hurried.clear()

    def _trouble(self, text: str) -> None:
        if text != self.state.trouble and self.state.phase in keeping.OPEN:
            self.hear(ev.Troubled(text))

    # --- engines of ours ----------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """It ends when nothing of it is left in the job."""
        try:
            sealed = await Following(self, self._world).attend(self.state.run_dir)
        except Gone as gone:  # with its papers is gone what tells which steps are its own
            sealed = unverifiable(str(gone))
        except (Unreadable, ValueError):
            await self._clean()
            raise
        await self._clean()
        await self.hear(sealed)

    async def _clean(self) -> None:
        """End the steps that a dead engine has left. Raises OSError when that is to be tried again."""
        cluster = self._world.cluster(self.state.cluster)
        if trouble := await self._world.engines.clean(cluster.client, self.state.run_dir):
            raise OSError(errno.EAGAIN, trouble)

    # --- the job ------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        if self.state.kind == "submitted":
            await in_thread(self._register, limit=FILES, place=self.key)
        await self.hear(await Following(self, self._world).follow())

    def _register(self) -> None:
        """In a thread: the submission is found by its jobs' ids from now on, and how it was asked for is of no use."""
        for jobid in self.state.jobs:
            register_job(jobid, self.state.directory)
        self._starting.forget_request()

    async def _cancel(self, jobs: tuple[str, ...]) -> None:
        """Ids come again, and Slurm may have been away for long. What is over is no trouble where the scancel was taken
        before."""
        cluster = self._world.cluster(self.state.cluster)
        others = await self._strangers(jobs)
        jobs = tuple(job for job in jobs if others.get(job) != GONE or job not in self.state.cancelled)
        troubles = {job: others.get(job) or await cluster.client.cancel_job(job) for job in jobs}
        taken = [job for job, trouble in troubles.items() if not trouble]
        self.hear(ev.CancelTried("; ".join(filter(None, troubles.values())), taken))
        cluster.poller.hasten()

    async def _strangers(self, jobs: Collection[str]) -> dict[str, str]:
        """Those that are not known to be what was submitted here, each with the reason."""
        client, script = self._world.cluster(self.state.cluster).client, os.path.join(self.state.directory, SCRIPT)
        return await strangers(client, jobs, script, self.state.cluster or None)

    async def _stop_engines(self) -> None:
        """Each engine is told once, for a second signal ends it without any grace: that it was told is in the book at
        once."""
        turns = asyncio.Semaphore(SIGNALS)
        submitted = self.state.kind == "submitted"
        others = await self._strangers([unit_of(run_id) for run_id in self.state.to_stop]) if submitted else {}
        troubles: dict[str, None] = {}  # each once

        async def tell(run_id: str) -> None:
            async with turns:
                if run_id not in self.state.to_stop:
                    return
                if trouble := others.get(unit_of(run_id)) or await self._stop_engine(run_id):
                    troubles[trouble] = None
                elif run_id in self.state.to_stop:  # a cancel may have come meanwhile
                    self.hear(ev.StopTried("", run_id))

        try:
            async with asyncio.TaskGroup() as group:
                for run_id in self.state.to_stop:
                    group.create_task(tell(run_id))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        if troubles and self.state.to_stop:
            self.hear(ev.StopTried("; ".join(troubles), self.state.to_stop[0]))

    async def _stop_engine(self, run_id: str) -> str:
        """What went wrong, or ""."""
        if self.state.kind == "adopted":
            return await self._world.engines.stop(self.key, self.state.runs[run_id].directory)
        return await self._world.cluster(self.state.cluster).client.signal_batch(unit_of(run_id), "TERM")

    async def _copy(self) -> None:
        place = self._world.settings.collect
        trouble = await in_thread(self._copy_all, place, limit=LIMIT, place=self.key) if place else []
        await self.hear(ev.Copied(trouble))

    def _copy_all(self, place: str) -> list[str]:
        """In a thread."""
        runs = [run.directory for run in self.state.runs.values()]
        trouble = [text for run in runs for text in copy_run(run, place)]
        if not runs and (receipt := job_receipt(self.state.jobid)) and os.path.exists(receipt):
            trouble += copy_file(receipt, place)
        return trouble


def unverifiable(why: str) -> ev.Sealed:
    """The verdict about a run whose files cannot be understood."""
    verdict = {
        "outcome": "unverifiable",
        "code": codes.UNVERIFIABLE,
        "origin": "allocd",
        "reason": "unverifiable",
        "summary": why,
    }
    return ev.Sealed(verdict)


def rank_documents(run: RunState | None) -> tuple[Document, ...]:
    """The ranks of a run, as `status` has them."""
    return tuple(
        {
            "rank": rank.rank,
            "role": rank.role,
            "node": rank.node,
            "phase": rank.phase,
            "end": rank.end and {"code": rank.end.code, "signal": rank.end.signal, "ordered": rank.end.ordered},
        }
        for rank in (run.ranks if run else ())
    )
