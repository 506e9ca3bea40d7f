"""How an allocation's job, or its engine, comes to be: carried out for `life.py`, told as events of its book.

sbatch's run, and an engine's start, cannot be repeated. So what is about to be done is on the disk before it is, what
came of it is told when it is known, and what nobody knows is settled, by the record in the submission's directory, or
by the claim of the engine's start.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from supervisor.core import kept_events as ev
from supervisor.core.fields import PlanErrors
from supervisor.core.sbatch_options import Misfit
from supervisor.core.submission import Order
from supervisor.loop.threads import in_thread
from supervisor.runs.ordering import Terms
from supervisor.runs.plans import plan_of
from supervisor.scheduler.directories import Locked
from supervisor.scheduler.submit import Stop, Submitted
from supervisor.service.book import FULL, PLAN, REQUEST, Book
from supervisor.service.interface import AdoptRequest, Document
from supervisor.service.world import NotStarted, World

if TYPE_CHECKING:
    from supervisor.service.life import Life

FILES: Final = 60.0  # seconds for small files


class Starting:
    """For one allocation. `stop` is asked when its submission should come to its answer."""

    def __init__(self, life: Life, book: Book, world: World, stop: Stop) -> None:
        self._life, self._book, self._world, self._stop = life, book, world, stop

    async def submit(self) -> None:
        try:
            text, terms, order = await in_thread(self._order, limit=FILES, place=self._life.key)
        except (PlanErrors, Misfit) as error:  # accepted by another version
            await self._life.hear(ev.SubmissionBegun(""))
            await self._life.hear(ev.SubmissionEnded("refused", words=str(error)))
            return
        if self._life.ended:
            return
        await self._life.hear(ev.SubmissionBegun(order.directory))
        if self._life.state.stopping:
            await self._life.hear(ev.SubmissionEnded("absent", words="cancelled before sbatch was run"))
            return
        submitter = self._world.submitter(terms.environ, self._stop, terms.cwd)
        try:
            done = await submitter.submit(order, text)
        except OSError as error:  # its directory cannot be made
            outcome = "unreached" if error.errno in (*FULL, errno.ETIMEDOUT, errno.EAGAIN) else "refused"
            await self._life.hear(ev.SubmissionEnded(outcome, words=f"nothing was submitted: {sentence(error)}"))
            return
        await self._life.hear(answer_of(done))

    def _asked(self) -> tuple[str, Document]:
        """In a thread: the plan, and how it was asked for."""
        return self._book.read_file(self._life.key, PLAN), json.loads(self._book.read_file(self._life.key, REQUEST))

    def _order(self) -> tuple[str, Terms, Order]:
        """In a thread: the plan, on which terms it is to be submitted, and the order for this time. The place where its
        directory will be is there then: one that is missing later is a file system that is away. Raises PlanErrors,
        Misfit."""
        text, asked = self._asked()
        terms = Terms(**{**asked, "options": tuple(asked["options"])})
        if not os.access(terms.cwd, os.X_OK):
            raise Misfit(f"{terms.cwd}, where it was submitted, is gone, or may not be entered: change to another one")
        try:
            os.makedirs(terms.base, exist_ok=True)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise Misfit(f"{terms.base} cannot be made: {error.strerror or error}") from None
        return text, terms, terms.order(plan_of(text, PLAN, terms.environ))

    async def settle(self, directory: str) -> None:
        submitter = self._world.submitter(self._world.environ(), self._stop)
        try:
            done = await submitter.settle(directory) if directory else None
        except Locked:
            await self._life.hear(ev.SubmissionEnded("unknown", words="another process is about to settle it"))
            return
        except ValueError as error:
            await self._life.hear(ev.SubmissionEnded("unknown", words=str(error)))
            return
        base = os.path.dirname(directory)
        if done is not None:
            await self._life.hear(answer_of(done))
        elif directory and not await in_thread(os.path.isdir, base, limit=FILES, place=self._life.key):
            await self._life.hear(ev.SubmissionEnded("unknown", words=f"{base} is not there: is its file system away?"))
        else:
            await self._life.hear(ev.SubmissionEnded("unreached", words="sbatch was not run"))

    def forget_request(self) -> None:
        """In a thread: it holds variables of the caller's, and is of no use any more."""
        with suppress(OSError):
            self._book.remove_file(self._life.key, REQUEST)

    async def start(self) -> None:
        """The same key never starts two engines: whether one was begun before makes no difference here. After a stop
        was asked for none is started; one that is on its way is waited for, and then stopped."""
        _, asked = await in_thread(self._asked, limit=FILES, place=self._life.key)
        if not self._life.state.begun:
            await self._life.hear(ev.EngineBegun())
        try:
            wanted = not self._life.state.stopping
            engine = await self._world.engines.start(self._life.key, AdoptRequest(**asked), wanted=wanted)
        except NotStarted as error:
            await self._life.hear(ev.EngineRefused(error.code, error.words))
        else:
            await self._life.hear(ev.EngineStarted(engine.run_id, engine.run_dir, engine.pid, engine.unit))
            with suppress(OSError):
                await in_thread(self.forget_request, limit=FILES)


def answer_of(done: Submitted) -> ev.SubmissionEnded:
    """What came of a submission, as the book has it."""
    submission = done.submission
    words = submission.words + (f"; {done.trouble}" if done.trouble else "")
    if submission.state == "submitted" and submission.jobid:
        jobs = list(done.several) or [submission.jobid]
        return ev.SubmissionEnded("submitted", jobs, submission.cluster or "", words)
    if submission.state == "refused":
        return ev.SubmissionEnded("refused" if done.reached else "unreached", words=words)
    return ev.SubmissionEnded("absent" if submission.state == "absent" else "unknown", words=words)


def sentence(error: BaseException) -> str:
    """An error, for people."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
