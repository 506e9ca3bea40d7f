"""Requests on their way into the books: what is accepted is on the disk, once, whoever asks and how often.

    asked -> checked (`wishes.py`) -> a book of its own, written and synced -> held and answered

To accept is a task of the holder's own: a client that goes away in the middle changes nothing, and what was accepted is
answered to whoever asks again with the same idempotency key. Who cannot be answered in time is refused, and what comes
to the disk after that is withdrawn.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from supervisor.core import kept_events as ev
from supervisor.core.kept import Kept
from supervisor.loop.threads import in_thread
from supervisor.service.book import Book
from supervisor.service.found import Line
from supervisor.service.interface import Document, Refusal
from supervisor.service.life import Life, utc_now
from supervisor.service.wishes import Wish
from supervisor.service.world import World

CHECK_LIMIT: Final = 60.0  # seconds for the checks of a request
WRITE_LIMIT: Final = 10.0  # seconds in which what is answered must be on the disk


class Accepting:
    """Takes requests into `lives`. `changed` is called for each that was taken; nothing is begun once `leaving`."""

    def __init__(
        self,
        lives: dict[str, Life],
        book: Book,
        world: World,
        changed: Callable[[Life, Kept], object],
        leaving: asyncio.Event,
    ) -> None:
        self.new: dict[str, Life] = {}  # on their way to the disk
        self._lives, self._book, self._world, self._changed, self._leaving = lives, book, world, changed, leaving
        self._keys: dict[str, str] = {}  # of allocations, by idempotency key
        self._under_way: dict[str, asyncio.Task[Any]] = {}  # by idempotency key, or another name
        self._group: asyncio.TaskGroup | None = None

    def open(self, group: asyncio.TaskGroup | None) -> None:
        """Accept in this task group; in none any more."""
        self._group = group

    def know(self, life: Life) -> None:
        """An allocation that was accepted before."""
        if life.state.given:
            self._keys[life.state.given] = life.key

    def forget(self, life: Life) -> None:
        """One that is told of no more."""
        self._keys.pop(life.state.given, None)

    async def settled(self, name: str) -> None:
        """Wait for those of the same name that are about to be accepted."""
        while before := self._under_way.get(name):
            await asyncio.wait([before])

    async def accept(
        self, given: str | None, asked: Document, wish: Callable[[], Wish], name: str | None = None
    ) -> Life:
        """Accept, or give what was accepted for the same key before. `given`: the idempotency key; `asked`: what makes
        it the same request; `name` (default: the key): what is accepted once at a time only. Raises Refusal."""
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        if given:
            await self.settled(given)
        if given and (key := self._keys.get(given)):
            life = self._lives[key]
            if life.state.digest != digest:
                text = f"the idempotency key {given!r} stands for another request already (allocation {key})"
                raise Refusal(409, "conflict", text)
            return life
        if self._group is None or self._leaving.is_set():
            raise Refusal(503, "unavailable", "the service is about to end")
        name = name or given or secrets.token_hex(8)
        task = self._group.create_task(_outcome(self._begin_book(given or "", digest, wish)))
        self._under_way[name] = task
        task.add_done_callback(lambda _: self._under_way.pop(name, None))
        outcome: Life | Exception = await asyncio.shield(task)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _begin_book(self, given: str, digest: str, wish: Callable[[], Wish]) -> Life:
        """Check it, and put it on the disk. Raises Refusal."""
        if self._book.trouble:
            raise Refusal(507, "storage", self._book.trouble)
        wished = await self._checked(wish)
        key = self._free_key()
        life = self.new[key] = Life(key, self._book, self._world, self._changed)
        event = ev.Accepted(**{**asdict(wished.event), "given": given, "digest": digest})
        written = self._book.create(key, wished.files, utc_now(), event)
        try:
            line = await asyncio.wait_for(asyncio.shield(written), WRITE_LIMIT)
        except TimeoutError:
            written.add_done_callback(lambda done: self._came_late(life, done))
            raise Refusal(507, "storage", f"it was not on the disk within {WRITE_LIMIT:g} s") from None
        except OSError as error:
            del self.new[key]
            raise Refusal(507, "storage", f"it cannot be saved: {error.strerror or error}") from None
        self._take(life, line)
        return life

    async def _checked(self, wish: Callable[[], Wish]) -> Wish:
        """The wish, unless the service is to end before it is checked. Raises Refusal."""
        checking = asyncio.ensure_future(in_thread(wish, limit=CHECK_LIMIT))
        leaving = asyncio.ensure_future(self._leaving.wait())
        try:
            await asyncio.wait((checking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not checking.done():
                raise Refusal(503, "unavailable", "the service is about to end")
            return checking.result()
        except TimeoutError as error:
            raise Refusal(503, "unavailable", f"the request could not be checked: {error}") from None
        finally:
            checking.cancel()
            leaving.cancel()

    def _take(self, life: Life, line: Line) -> None:
        """It is on the disk."""
        del self.new[life.key]
        life.restore([line])
        self._lives[life.key] = life
        self.know(life)
        self._changed(life, Kept())

    def _came_late(self, life: Life, written: asyncio.Future[Line]) -> None:
        """One that was refused because it was not on the disk in time is there now: it is withdrawn."""
        if written.cancelled() or written.exception() is not None:
            del self.new[life.key]
            return
        self._take(life, written.result())
        if life.state.kind != "followed":  # to be looked at harms nobody
            life.hear(ev.StopAsked("stop"))

    def _free_key(self) -> str:
        while True:
            key = f"a{secrets.token_hex(4)}"
            if key not in self._lives and key not in self.new:
                return key


async def _outcome(accepting: Any) -> Any:
    """What goes wrong with one request is its answer: it must not end the holder's task group."""
    try:
        return await accepting
    except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
        return error
