"""Events in sentences: for the terminal, the timeline and `explain`. One sentence a kind of event, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from supervisor.core import events as ev
from supervisor.core.artifacts import few


def tell(event: ev.Event) -> str | None:
    """The event as a sentence; None for one that only the machine needs."""
    teller = SENTENCES.get(type(event))
    return teller(event) if teller else None


def timeline(records: Iterable[ev.Record]) -> list[dict[str, Any]]:
    """`seq`, `utc`, seconds since the first record, and the sentence, of every record that has one."""
    lines: list[dict[str, Any]] = []
    start: float | None = None
    for record in records:
        start = record.at if start is None else start
        text = tell(record.event)
        if text is not None:
            lines.append({"seq": record.seq, "utc": record.utc, "after": round(record.at - start, 3), "text": text})
    return lines


def _ended(event: ev.RankEnded) -> str:
    if event.signal is not None:
        core = ", core dumped" if event.core else ""
        return f"rank {event.rank} was killed by signal {event.signal}{core}"
    return f"rank {event.rank} ended with code {event.code}"


def _opened(event: ev.RunOpened) -> str:
    return f"run {event.run_id} opened on {event.host} ({event.launcher}), nodes {', '.join(event.nodes)}"


def _gone(event: ev.TreeGone) -> str | None:
    if event.left:
        return f"rank {event.rank}: {event.left} of its processes could not be killed"
    return f"rank {event.rank}: {event.killed} left-over processes had to be killed" if event.killed else None


def _step_ended(event: ev.StepEnded) -> str:
    return f"the step of rank {event.rank} ended ({event.returncode})"


def _swept(event: ev.Swept) -> str:
    if event.left < 0:
        return f"rank {event.rank}: nobody could look for what it left: {event.error}"
    return f"rank {event.rank}: searched its node, {event.killed} left-over processes killed, {event.left} left"


def _artifact(event: ev.ArtifactSeen) -> str:
    why = f": {'; '.join(few(event.problems))}" if event.problems else ""
    return f"artifact {event.contract} is {event.answer}{why}"


def _marker_read(event: ev.MarkerRead) -> str | None:
    if event.found == "marker":
        return f"the marker says {event.code}"
    if event.note:
        return f"a failed part was noted: code {event.note}"
    return (
        None if event.found == "none" else f"what stands in the marker's place is no marker of this run ({event.found})"
    )


def _noted(event: ev.Noted) -> str:
    return event.text if event.rank is None else f"rank {event.rank}: {event.text}"


def watched(directories: Sequence[str], by: str, file_system: str, why: str) -> str:
    """How directories are watched, as a sentence's end; of many only the first is named."""
    first, *others = directories or ("nothing",)
    more = f" and {len(others)} more" if others else ""
    return f"watching {first}{more}: {by} ({file_system}: {why})"


def _collected(event: ev.Collected) -> str:
    errors = f", {len(event.errors)} errors: {'; '.join(event.errors)}" if event.errors else ""
    return f"{len(event.files)} files collected or checksummed{errors}"


SENTENCES: Final[dict[type[ev.Event], Callable[[Any], str | None]]] = {
    ev.RunOpened: _opened,
    ev.TimeLimitKnown: lambda e: f"Slurm's time limit is {e.end_utc}",
    ev.StopRequested: lambda e: f"asked to stop by SIG{e.signal}",
    ev.TimerFired: lambda e: f"deadline passed: {e.timer}",
    ev.Noted: _noted,
    ev.EngineFault: lambda e: f"fault of allocd itself: {e.text}",
    ev.StepRefused: lambda e: f"the step of rank {e.rank} was not started: {e.error}",
    ev.Hello: lambda e: f"rank {e.rank}: its agent says hello from {e.node or e.host}",
    ev.RankStarted: lambda e: f"rank {e.rank} started (pid {e.pid})",
    ev.RankRefused: lambda e: f"rank {e.rank} could not be executed ({e.phase}): {e.error}",
    ev.RankEnded: _ended,
    ev.TreeGone: _gone,
    ev.AgentSignalled: lambda e: f"rank {e.rank}: its agent got signal {e.signal} from outside",
    ev.RankSilent: lambda e: f"rank {e.rank}: no answer for {e.seconds:.0f} s",
    ev.RankHeard: lambda e: f"rank {e.rank} answers again",
    ev.StepEnded: _step_ended,
    ev.Swept: _swept,
    ev.MarkerRead: _marker_read,
    ev.MarkerPublished: lambda e: f"the marker is published: {e.code} ({e.outcome})",
    ev.MarkerFailed: lambda e: f"the marker {'could not be read' if e.asked else 'was not published'}: {e.error}",
    ev.WatchChanged: lambda e: watched(e.directories, e.by, e.file_system, e.why),
    ev.ArtifactSeen: _artifact,
    ev.CheckerFault: lambda e: f"artifact {e.contract} could not be judged: {e.text}",
    ev.Collected: _collected,
}
