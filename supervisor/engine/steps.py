"""The steps of a run: their processes, their channels, and what the machine asks of them.

A line of a channel becomes an event in the same call in which it was read; a command to an agent is written in the same
call in which it was asked for. Nothing here decides: what a line means is the machine's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any, Final

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import Layout
from supervisor.core.state import TALKING, RunState
from supervisor.core.text import printable
from supervisor.engine import channel
from supervisor.engine.journal import Journal
from supervisor.engine.looker import Looker
from supervisor.launch.base import Launcher, NoStep
from supervisor.launch.process import StepProcess
from supervisor.loop.threads import in_thread

PING_EVERY: Final = 5.0  # seconds
SILENT_AFTER: Final = 15.0  # seconds without an answer: three pings
SWEEP_LIMIT: Final = 15.0
FOREIGN_LIMIT: Final = 100  # lines of foreign output per rank that are kept in the journal
WORDS: Final = 2000  # bytes of srun's own last words that become part of the story
NOISE: Final = "lacks support for cpu binding"
"""What srun says to `--cpu-bind=none` where there is nothing to bind with: no word about the step."""

ROOT: Final = "/"
"""Where processes are started that need no directory of their own: to change into one whose file system is dead would
hold the event loop, in the kernel. The rank itself changes into its directory under its agent."""

NO_STEP_AFTER: Final = 1.0  # seconds without a step of that name until its srun is taken for one that waits
NO_STEP_PAUSE: Final = 0.1
YOUNG: Final = 10.0  # seconds since its srun was started, for a rank whose task may not run yet
SIGNAL_AGAIN: Final = 1.0  # seconds, doubled each time


class Steps:
    """All steps of one run. `state` tells the machine's state now, `post` gives it an event; `looker` knows what the
    agents are to watch, and gets their hints."""

    def __init__(
        self,
        layout: Layout,
        launcher: Launcher,
        journal: Journal,
        post: Callable[[ev.Event], None],
        state: Callable[[], RunState],
        cwd: str,
        looker: Looker,
    ) -> None:
        self._layout = layout
        self._launcher = launcher
        self._journal = journal
        self._post = post
        self._state = state
        self._cwd = cwd
        self._looker = looker
        self._loop = asyncio.get_running_loop()
        self._logs: dict[tuple[int, str], int] = {}
        self._processes: dict[int, StepProcess] = {}
        self._early: dict[int, list[bytes]] = {}
        self._foreign: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self.begun = asyncio.Event()
        """Set once the first processes are made (or could not be): what is not to hold them up may be done now."""

    async def open(self, limit: float) -> None:
        """Open the logs, within `limit` seconds. Raises OSError, TimeoutError; nothing has been started then."""
        self._logs = await in_thread(self._open_logs, limit=limit)

    def close(self) -> None:
        """Close the logs."""
        for descriptor in self._logs.values():
            os.close(descriptor)

    # --- a step's life -----------------------------------------------------------------------------------------------

    async def attend(self, rank: int) -> tuple[int, ev.Event | None]:
        """A step's whole life. Returns its end; never raises."""
        try:
            await self._journal.durable()
            if self._state().ranks[rank].phase != "issued":
                return rank, ev.StepRefused(rank, "a stop was decided first")
            process = await self._spawn(rank)
            code = await process.wait()
            self._processes.pop(rank, None)
            return rank, ev.StepEnded(rank, code, await self._words(rank))
        except OSError as error:
            return rank, ev.StepRefused(rank, f"{error.filename or 'the step'}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - told as our own fault
            self._post(ev.EngineFault(f"rank {rank}: {type(error).__name__}: {error}"))
            return rank, None

    async def _spawn(self, rank: int) -> StepProcess:
        command = self._launcher.step(self._layout, rank)
        agent = self._state().ranks[rank].agent
        try:
            process = await StepProcess.start(
                command.argv,
                command.env,
                lambda line: self._line(rank, line),
                stdout=None if agent else self._logs[rank, "out"],
                stderr=self._logs[rank, "srun" if agent else "err"],
                cwd=ROOT if agent else command.cwd or self._cwd,
            )
        finally:
            self.begun.set()
        self._processes[rank] = process
        self._heard[rank] = self._loop.time()
        self._post(ev.StepSpawned(rank, process.pid, self._layout.step_name(rank)))
        for line in self._early.pop(rank, ()):
            self._line(rank, line)
        return process

    def _open_logs(self) -> dict[tuple[int, str], int]:
        """The log files that the engine itself hands to processes: srun's words, and both logs of a rank that has no
        agent."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        opened = {}
        for rank in self._layout.plan.ranks:
            agent = self._layout.plan.role_of(rank).agent == "on"
            for kind in ("srun",) if agent else ("out", "err"):
                opened[rank, kind] = os.open(self._layout.log(rank, kind), flags, 0o644)
        return opened

    async def _words(self, rank: int) -> str:
        """The tail of what the launcher itself said."""
        kind = "srun" if self._state().ranks[rank].agent else "err"

        def tail() -> str:
            with open(self._layout.log(rank, kind), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - WORDS))
                text = file.read().decode(errors="replace")
            return "\n".join(printable(line) for line in text.splitlines() if NOISE not in line)

        try:
            return await in_thread(tail, limit=2.0)
        except (OSError, TimeoutError):
            return ""

    def _line(self, rank: int, line: bytes) -> None:
        """A line from a step's stdout: a report of its agent, or foreign."""
        if rank not in self._processes:
            self._early.setdefault(rank, []).append(line)
            return
        report = channel.report(self._layout.nonce, line)
        if report is None:
            self._foreign_line(rank, line)
            return
        self._heard[rank] = self._loop.time()
        if self._state().ranks[rank].silent:
            self._post(ev.RankHeard(rank))
        if report["e"] == channel.HINT:
            self._looker.hint(rank)
        if report["e"] in channel.OUR_OWN:
            return
        try:
            event = channel.EVENTS[report["e"]](rank, report)
        except (KeyError, TypeError, ValueError):
            self._foreign_line(rank, line)
            return
        self._post(event)

    def _foreign_line(self, rank: int, line: bytes) -> None:
        count = self._foreign[rank] = self._foreign.get(rank, 0) + 1
        if count <= FOREIGN_LIMIT and line.strip():
            text = printable(line[: channel.LINE_LIMIT].decode(errors="replace"))
            self._post(ev.Noted(f"foreign output on the channel: {text}", rank))

    # --- what the machine asks for -----------------------------------------------------------------------------------

    def _send(self, rank: int, name: str, **fields: Any) -> None:
        process = self._processes.get(rank)
        if process is not None:
            process.send(channel.command(self._layout.nonce, name, **fields))

    def start_rank(self, command: cmd.StartRank) -> None:
        number = _signal_number(self._state().ranks[command.rank].stop_signal)
        document = self._layout.specification(command.rank, number, self._cwd)
        document["watch"] = self._looker.watched(command.rank)
        process = self._processes.get(command.rank)
        if process is not None:
            start = channel.command(self._layout.nonce, "start")
            process.send(channel.specification(self._layout.nonce, document) + start)

    def tell_stop(self, command: cmd.StopRank) -> None:
        """Tell an agent to stop its rank."""
        number = _signal_number(self._state().ranks[command.rank].stop_signal)
        self._send(command.rank, "stop", signal=number, grace=command.grace, exit=command.exit)

    async def signal(self, rank: int, name: str) -> None:
        """Signal a rank without an agent, as surely as its launcher can.

        A srun that has no step after a while waits for it: it is ended, which starts nothing. (The while is for a step
        that comes just now, and for one that has just ended, whose srun still writes.) A signal that comes between the
        making of a step and its task's exec is lost, and nobody says so: a rank that is young is signalled again.
        """
        born, again = self._heard.get(rank, 0.0), SIGNAL_AGAIN
        give_up = self._loop.time() + NO_STEP_AFTER
        while (process := self._processes.get(rank)) is not None:
            try:
                error = await self._launcher.signal(self._layout, rank, process.pid, name)
            except NoStep:
                if self._loop.time() > give_up:
                    process.terminate()
                    return
                await asyncio.sleep(NO_STEP_PAUSE)
                continue
            if error:
                self._post(ev.Noted(f"SIG{name} did not reach it: {error}", rank))
            if not self._launcher.loses_early_signals or self._loop.time() - born > YOUNG:
                return
            await asyncio.sleep(again)
            again *= 2
            give_up = self._loop.time() + NO_STEP_AFTER

    def kill_rank(self, command: cmd.KillRank) -> None:
        if self._state().ranks[command.rank].agent:
            self._send(command.rank, "kill", exit=command.exit)
        elif command.rank in self._processes:
            self._launcher.kill(self._processes[command.rank])

    def release(self, command: cmd.ReleaseStep) -> None:
        self._send(command.rank, "bye", exit=command.exit)

    def kill_step(self, command: cmd.KillStep) -> None:
        process = self._processes.get(command.rank)
        if process is not None:
            process.terminate()

    async def search(self, rank: int) -> None:
        """Look on the rank's node for what it left, by the tag in its environment."""
        wanted = self._launcher.sweep(self._layout, rank)
        answers: list[dict[str, Any]] = []

        def heard(line: bytes) -> None:
            report = channel.swept(line)
            if report is not None:
                answers.append(report)

        error = ""
        process: StepProcess | None = None
        try:
            stderr = self._logs.get((rank, "srun"), self._logs.get((rank, "err"), 2))
            process = await StepProcess.start(wanted.argv, wanted.env, heard, stderr=stderr, cwd=ROOT)
            async with asyncio.timeout(SWEEP_LIMIT):
                code = await process.wait()
            error = "" if answers else f"the search ended with {code}: {await self._words(rank)}"
        except TimeoutError:  # before OSError, of which it is one
            error = f"the search did not end within {SWEEP_LIMIT:g} s"
        except OSError as failure:
            error = str(failure)
        finally:
            if process is not None:
                process.terminate()
        if self._state().ranks[rank].phase == "sweeping":
            killed, left = (answers[0]["killed"], answers[0]["left"]) if answers else (0, -1)
            self._post(ev.Swept(rank, killed, left, error))

    # --- life signs --------------------------------------------------------------------------------------------------

    async def ping(self) -> None:
        """Ask every agent whether it lives; tell the machine of those that do not answer."""
        line = channel.command(self._layout.nonce, "ping")
        due = self._loop.time() + PING_EVERY
        while True:
            await asyncio.sleep(PING_EVERY)
            now = self._loop.time()
            if now - due > PING_EVERY:  # we were stopped ourselves: nobody was asked meanwhile, so nobody was silent
                self._heard = {rank: heard + now - due for rank, heard in self._heard.items()}
            due = now + PING_EVERY
            for rank in self._state().ranks:
                if not rank.agent or rank.phase not in TALKING or rank.rank not in self._processes:
                    continue
                self._processes[rank.rank].send(line)
                quiet = now - self._heard[rank.rank]
                if quiet > SILENT_AFTER and not rank.silent:
                    self._post(ev.RankSilent(rank.rank, quiet))


def _signal_number(name: str) -> int:
    return int(signal.Signals[f"SIG{name}"])
