"""The daemon: everything that `allocd` is, put together and taken apart in order.

    state directory taken -> books read -> what they tell taken up -> socket open -> READY -> ... until told to end

Nothing is answered before the books are read, and nothing is begun before: two daemons never hold one state. SIGTERM
and SIGINT end it: it takes no more requests, lets a submission that is under way come to its answer, and goes; engines
and jobs go on, for they are nobody's children here. SIGHUP reads the settings again; with wrong ones nothing changes.
One that comes while they are read has them read once more.

The watchdog is fed by this very event loop, and only while the books can be written by a living thread: a loop that
hangs, or a daemon that could remember nothing, is started anew by systemd.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, MutableMapping
from contextlib import AsyncExitStack, closing
from typing import Final

import structlog

from supervisor.core import codes
from supervisor.engine.signals import hearing
from supervisor.loop.threads import in_thread
from supervisor.service.api import Api
from supervisor.service.book import Book
from supervisor.service.holder import Holder
from supervisor.service.interface import Event
from supervisor.service.metrics import Metrics
from supervisor.service.notify import Notifier
from supervisor.service.place import held_for
from supervisor.service.server import Server
from supervisor.service.settings import Settings, SettingsErrors
from supervisor.service.sockets import open_listener
from supervisor.service.world import World

REPLAY_LIMIT: Final = 600.0  # seconds to read all books
CLOSE_LIMIT: Final = 10.0  # seconds to write what is left of them
RELOAD_LIMIT: Final = 60.0  # seconds to read the settings
STATUS_PERIOD: Final = 5.0  # seconds between looks at what systemd is told

LEVELS: Final = {"record": "debug", "state": "debug", "trouble": "warning"}
"""How loud an event is; the others are info."""

Log = structlog.typing.FilteringBoundLogger


class Daemon:
    """One daemon. `reread` gives the settings as they are now, and raises SettingsErrors."""

    def __init__(
        self,
        settings: Settings,
        reread: Callable[[], Settings],
        notifier: Notifier,
        environ: MutableMapping[str, str],
        log: Log,
    ) -> None:
        self._world = World(settings)
        self._reread = reread
        self._environ = environ
        self._log = log
        self._notifier = notifier
        self._holder: Holder | None = None
        self._asked_to_reload = asyncio.Event()

    async def run(self) -> int:
        """Until it is told to end. Returns the exit code. Raises Unusable (of the place's and of sockets), OSError, and
        what killed the books."""
        async with AsyncExitStack() as stack:
            stack.enter_context(hearing({signal.SIGHUP: self._asked_to_reload.set}))
            place = stack.enter_context(closing(held_for(self._environ)))
            meter = Metrics()
            book = Book(place.descriptor, told=lambda line: holder.on_disk(line), ill=self._ill)
            stack.push_async_callback(book.close, CLOSE_LIMIT)
            holder = self._holder = Holder(book, self._world, meter, listen=self._listen)
            holder.restore(await in_thread(book.replay, limit=REPLAY_LIMIT))
            for note in holder.notes:
                self._log.warning("book", text=note)
            listener = open_listener(self._environ)
            server = Server(Api(holder, meter, lambda text: self._log.error("fault", text=text)), listener)
            book.start()
            self._log.info("started", state=place.path, allocations=len(holder.allocations()))
            await self._serve(holder, server, book)
        self._log.info("ended")
        return codes.OK

    async def _serve(self, holder: Holder, server: Server, book: Book) -> None:
        handlers = {signal.SIGTERM: self._end, signal.SIGINT: self._end}
        with hearing(handlers):
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(server.serve())
                await server.wait_until_it_listens()
                helpers = [
                    group.create_task(self._notifier.keep_telling(lambda: not book.failed.done())),
                    group.create_task(self._tell_status()),
                    group.create_task(self._keep_reloading()),
                ]
                self._notifier.ready(self._status())
                await holder.run()
                server.stop()
                await serving
                for task in helpers:
                    task.cancel()

    # --- what it is told ----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._notifier.stopping("ending; engines and jobs go on")
        if self._holder:
            self._holder.leave()

    async def _keep_reloading(self) -> None:
        while True:
            await self._asked_to_reload.wait()
            self._asked_to_reload.clear()
            self._notifier.reloading()
            await self._reload()
            self._notifier.ready(self._status())

    async def _reload(self) -> None:
        try:
            settings = await in_thread(self._reread, limit=RELOAD_LIMIT)
        except (SettingsErrors, OSError) as error:  # a file system that is away, too
            self._log.error("settings", text=f"nothing was changed: {error}")
            return
        self._world.take(settings)
        if self._holder:
            self._holder.reload()
        self._log.info("settings", text="read again")

    # --- what it tells ------------------------------------------------------------------------------------------------

    def _listen(self, event: Event) -> None:
        level = LEVELS.get(event.kind, "info")
        text = {name: value for name, value in event.data.items() if isinstance(value, str | int) and value != ""}
        getattr(self._log, level)(event.kind, key=event.key, seq=event.seq, **text)

    def _ill(self, trouble: str) -> None:
        if trouble:
            self._log.error("storage", text=trouble)
        else:
            self._log.info("storage", text="the books can be written again")

    async def _tell_status(self) -> None:
        while True:
            self._notifier.status(self._status())
            await asyncio.sleep(STATUS_PERIOD)

    def _status(self) -> str:
        if self._holder is None:
            return "starting"
        health = self._holder.health()
        counts = [f"{count} {state}" for state, count in health["allocations"].items() if count]
        wrong = f"; {len(health['wrong'])} troubles: {health['wrong'][0]}" if health["wrong"] else ""
        return f"{', '.join(counts) or 'no allocations'}{wrong}"
