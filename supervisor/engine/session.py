"""A run from the outside: the event loop, signals, the engine, and the receipt at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from supervisor.core import codes
from supervisor.core import events as ev
from supervisor.core.layout import Layout
from supervisor.core.state import RunState
from supervisor.engine.engine import Engine, Reporter
from supervisor.engine.signals import hearing
from supervisor.engine.time_limit import EndTimeReader
from supervisor.launch.base import Launcher
from supervisor.launch.process import use_pidfd_watcher
from supervisor.loop.threads import in_thread

STOPPING: Final = {
    signal.SIGTERM: "TERM",
    signal.SIGINT: "INT",
    signal.SIGHUP: "HUP",  # the terminal is gone: without a handler the engine would be, too
    signal.SIGUSR1: "USR1",  # what the batch template asks Slurm to send before the time limit
}
"""Signals that end a run in order; the second one ends it at once."""

RECEIPT_LIMIT: Final = 10.0
BESIDE_LIMIT: Final = 5.0  # seconds that what went along with a run has for its own end


class Beside(Protocol):
    """What goes along with a run and has no say in it: a socket, on which it can be asked how it is."""

    def heard(self, record: ev.Record, state: RunState) -> None:
        """Something happened. Called in the loop for each record."""

    def ended(self, outcome: Outcome) -> None:
        """The run is over, and its receipt written as far as that was possible."""

    async def attend(self, engine: Engine) -> None:
        """Go along from the run's begin until soon after `ended` was called. Raises nothing; may be cancelled."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its receipt, and sentences about what could not be saved."""

    receipt: dict[str, Any]
    trouble: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The run's exit code."""
        return int(self.receipt["verdict"]["code"])


def drive(
    layout: Layout,
    launcher: Launcher,
    opening: ev.RunOpened,
    *,
    clock: EndTimeReader | None = None,
    report: Reporter | None = None,
    notes: Sequence[str] = (),
    beside: Beside | None = None,
) -> Outcome:
    """Run the plan of `layout` to its end in an event loop of its own. From then on the signals that stop a run are
    ignored. Raises OSError when the journal cannot be made."""
    return asyncio.run(_drive(layout, launcher, opening, clock, report, notes, beside))


async def _drive(
    layout: Layout,
    launcher: Launcher,
    opening: ev.RunOpened,
    clock: EndTimeReader | None,
    report: Reporter | None,
    notes: Sequence[str],
    beside: Beside | None,
) -> Outcome:
    use_pidfd_watcher()
    reports = [report] if report else []
    reports += [beside.heard] if beside else []
    engine = Engine(layout, launcher, opening, reports=reports, clock=clock, notes=notes)
    stopping = {
        number: partial(engine.request_stop, name) for number, name in STOPPING.items() if not _is_nohup(number)
    }
    async with _accompanied(engine, beside):
        # The run over, how it ended is to be told: no signal may end the process in between, with a code of its own.
        with hearing(stopping, after=signal.SIG_IGN):
            await engine.run()
            outcome = await _conclude(engine, opening)
        if beside:
            beside.ended(outcome)
    return outcome


@asynccontextmanager
async def _accompanied(engine: Engine, beside: Beside | None) -> AsyncIterator[None]:
    """Let `beside` go along. Its time after the run is limited, for the job's end waits for it."""
    attending = asyncio.create_task(beside.attend(engine), name="beside") if beside else None
    try:
        yield
        if attending:
            await asyncio.wait([attending], timeout=BESIDE_LIMIT)
    finally:
        if attending:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)


def _is_nohup(number: signal.Signals) -> bool:
    """Whether we were started (`nohup`) so as to outlive the terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


async def _conclude(engine: Engine, opening: ev.RunOpened) -> Outcome:
    """Close the journal, judge, write the receipt. A success whose proof cannot be saved is none."""
    from supervisor.core.receipt import run_receipt  # these two are not needed before the first rank runs
    from supervisor.engine import receipts

    trouble = []
    complete = await engine.close()
    if not complete:
        trouble.append(f"not every line of the journal could be written: {engine.journal_trouble}")
    document = run_receipt(
        engine.state,
        engine.records,
        engine.layout,
        versions=opening.versions,
        journal_trouble=engine.journal_trouble,
    )
    try:
        await in_thread(receipts.write_run_receipt, engine.layout.run_dir, document, limit=RECEIPT_LIMIT)
    except OSError as error:  # TimeoutError is one
        text = f"the receipt could not be written in {engine.layout.run_dir}: {error}"
        trouble.append(text)
        if document["verdict"]["code"] == codes.OK:
            document["verdict"] = _unproven(document["verdict"], text)
    return Outcome(document, tuple(trouble))


def _unproven(verdict: dict[str, Any], why: str) -> dict[str, Any]:
    """What becomes of a success when its proof cannot be saved: a fault of ours."""
    ours = {"outcome": "failure", "code": codes.FAULT, "origin": "allocd", "reason": "fault"}
    return {**verdict, **ours, "summary": f"the run completed, but {why}", "because": [*verdict["because"], why]}
