"""One run that answers for itself (`allocctl run --serve`): the daemon's API over an engine, in the engine's process.

It is for a shell on the run's node: no other host reaches the socket. Its path stands in the run directory, in
`ctl.path`, as long as it is answered on. There is one allocation, of kind `served`, whose events are the records of the
run's journal, with their numbers, and one more when the run is over. It can be stopped; there is nothing to submit to.

The run comes first: what serves is imported in a thread, when the first rank has started, and whatever goes wrong with
it is a sentence and no more.
"""

from __future__ import annotations

import asyncio
import os
import socket
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from supervisor import __version__
from supervisor.core import events as ev
from supervisor.core.state import RankState, RunState
from supervisor.core.story import tell
from supervisor.loop.threads import in_thread
from supervisor.service.interface import (
    STATES,
    AdoptRequest,
    Allocation,
    Document,
    Event,
    Refusal,
    State,
    SubmitRequest,
    none_yet,
)
from supervisor.service.sockets import Listener, Unusable, listen, runtime_directory

if TYPE_CHECKING:
    from supervisor.engine.engine import Engine
    from supervisor.engine.session import Outcome
    from supervisor.service.metrics import Metrics

CTL_PATH: Final = "ctl.path"
SERVES: Final = ("supervisor.service.api", "supervisor.service.server", "supervisor.service.metrics")
START_LIMIT: Final = 60.0  # seconds; a node that is busy with what it runs reads slowly
FILE_LIMIT: Final = 10.0
ASKED: Final = "TERM"
"""What a stop over the socket is to the run: the same as this signal."""


class ServedRun:
    """The run, as `engine.session` takes it along and as the API asks it. `say` shows a sentence to people."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._engine: Engine | None = None
        self._meter: Metrics | None = None
        self._outcome: Outcome | None = None
        self._news = asyncio.Event()
        self._begun = asyncio.Event()
        self._over = asyncio.Event()

    # --- beside the engine --------------------------------------------------------------------------------------------

    def heard(self, record: ev.Record, _state: RunState) -> None:
        """See `session.Beside`."""
        if isinstance(record.event, ev.RankStarted):
            self._begun.set()
        self._wake()

    def ended(self, outcome: Outcome) -> None:
        """See `session.Beside`."""
        self._outcome = outcome
        self._over.set()
        self._begun.set()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def attend(self, engine: Engine) -> None:
        """See `session.Beside`."""
        self._engine = engine
        await self._begun.wait()
        directory, name = runtime_directory(os.environ), f"run-{engine.layout.run_id}.sock"
        try:
            for module in SERVES:
                if self._over.is_set():
                    return
                await in_thread(import_module, module, limit=START_LIMIT)
            listener = await in_thread(listen, directory, name, limit=FILE_LIMIT)
        except (Unusable, OSError, ImportError) as error:
            self._say(f"this run is not served: {error}")
            return
        try:
            await self._serve(engine, listener)
        except Exception:  # noqa: BLE001 - the run goes on, and is not served any more
            self._say(f"this run is not served any more: {traceback.format_exc()}")
        finally:
            listener.close()

    async def _serve(self, engine: Engine, listener: Listener) -> None:
        from supervisor.service.api import Api
        from supervisor.service.metrics import Metrics
        from supervisor.service.server import Server

        self._meter = meter = Metrics()
        meter.gauge("allocd_allocations", "Allocations, by state.", "state", self._by_state)
        meter.gauge("allocd_watches", "Directories that are looked at.", "by", self._watches)
        server = Server(Api(self, meter, self._say), listener)
        note = os.path.join(engine.layout.run_dir, CTL_PATH)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(), name="the socket")
            looking = group.create_task(meter.watch_the_loop(), name="the loop's lag")
            self._say(f"answers on {listener.path}")
            with suppress(OSError):  # people see it on stderr as well
                await in_thread(_write, note, f"{listener.path}\n", limit=FILE_LIMIT)
            await self._over.wait()
            with suppress(OSError):
                await in_thread(os.unlink, note, limit=FILE_LIMIT)
            looking.cancel()
            server.stop()

    # --- what is answered ---------------------------------------------------------------------------------------------

    @property
    def _run(self) -> Engine:
        assert self._engine is not None  # noqa: S101 - nobody asks before there is one
        return self._engine

    def allocations(self) -> Sequence[Allocation]:
        """See `interface.Answering`."""
        state, layout = self._run.state, self._run.layout
        records, first = self._run.records, self._run.state.first_failure
        return (
            Allocation(
                key=layout.run_id,
                kind="served",
                state=self._state(),
                name=layout.plan.name,
                created=records[0].utc,
                changed=records[-1].utc,
                jobid=layout.jobid,
                run_id=layout.run_id,
                run_dir=layout.run_dir,
                stopping="stop" if state.stop_signals else None,
                verdict=self._outcome.receipt["verdict"] if self._outcome else None,
                first_failure=first.text if first else None,
                trouble=self._run.journal_trouble,
                ranks=tuple(map(_rank, state.ranks)),
            ),
        )

    def _state(self) -> State:
        if self._outcome is not None:
            return "ended"
        return "ending" if self._run.state.phase in ("collecting", "ended") else "running"

    def _by_state(self) -> dict[str, float]:
        return {state: float(state == self._state()) for state in STATES}

    def _watches(self) -> Counter[str]:
        return Counter(how.by for how in self._run.state.watches.values())

    def find(self, name: str) -> Allocation:
        """See `interface.Answering`."""
        (only,) = self.allocations()
        if name not in (only.key, only.jobid):
            raise Refusal(
                404, "not_found", f"there is no {name} here: this is run {only.key}, which answers for itself"
            )
        return only

    async def submit(self, request: SubmitRequest, key: str | None) -> Allocation:
        """It cannot."""
        self._cannot("submit a plan")

    async def adopt(self, request: AdoptRequest, key: str | None) -> Allocation:
        """It cannot."""
        self._cannot("adopt an allocation")

    async def follow(self, jobid: str, cluster: str | None) -> Allocation:
        """It cannot."""
        self._cannot("follow a job")

    def _cannot(self, what: str) -> NoReturn:
        raise Refusal(501, "unsupported", f"a run that answers for itself cannot {what}: ask allocd, on a login node")

    async def stop(self, name: str, how: Literal["stop", "cancel"]) -> Allocation:
        """An orderly end. Asking once more changes nothing."""
        found = self.find(name)
        if how == "cancel":
            raise Refusal(501, "unsupported", f"a run does not cancel its own job: scancel {found.jobid}, or `stop`")
        if found.state == "ended":
            raise Refusal(409, "conflict", f"{found.key} has ended already")
        if not found.stopping:
            self._run.request_stop(ASKED)
        return self.find(name)

    def events(self, after: int | None, key: str | None = None) -> AsyncGenerator[Event, None]:
        """See `interface.Answering`. All of them are kept."""
        if (after or 0) > self._last_event:
            raise none_yet(after or 0, self._last_event)
        return self._events(after or 0)

    @property
    def _last_event(self) -> int:
        return self._run.records[-1].seq + self._over.is_set()

    async def _events(self, after: int) -> AsyncGenerator[Event, None]:
        while True:
            news, over = self._news, self._over.is_set()
            for record in self._run.records[after:]:
                after = record.seq
                yield self._event(after, record.utc, "record", record)
            if over:
                break
            await news.wait()
        last = self._run.records[-1]
        if after == last.seq:
            yield self._event(last.seq + 1, last.utc, "ended", None)

    def _event(self, seq: int, utc: str, kind: str, record: ev.Record | None) -> Event:
        run_id = self._run.layout.run_id
        data: dict[str, Any] = {"run_id": run_id}
        if record is not None:
            data |= {"line": record.seq, "record": record.event.name, "text": tell(record.event) or ""}
        elif self._outcome is not None:
            data |= {"state": "ended", "verdict": self._outcome.receipt["verdict"]}
        return Event(seq, utc, run_id, kind, data)

    def health(self) -> Document:
        """See `interface.Answering`."""
        return {
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": self._run.records[0].utc,
            "allocations": {state: int(count) for state, count in self._by_state().items()},
            "last_event": self._last_event,
            "wrong": [self._run.journal_trouble] if self._run.journal_trouble else [],
        }

    def metrics(self) -> bytes:
        """See `interface.Answering`."""
        return b"" if self._meter is None else self._meter.render()


def _rank(rank: RankState) -> Document:
    """As `allocctl status` tells it."""
    return {
        "rank": rank.rank,
        "role": rank.role,
        "node": rank.node,
        "phase": rank.phase,
        "silent": rank.silent,
        "end": asdict(rank.end) if rank.end else None,
    }


def _write(path: str, text: str) -> None:
    """In a thread. Whole, or not at all."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.replace(temporary, path)
