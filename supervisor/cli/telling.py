"""What a person who waits sees: Slurm's states and the run's story on stderr, logs on stdout, then the verdict."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Final

from supervisor.cli.ci import log_tails, name_of, run_of
from supervisor.cli.explain import tail
from supervisor.cli.live import QUIET, Printer
from supervisor.cli.output import put_lines
from supervisor.core import events as ev
from supervisor.core.state import RunState
from supervisor.core.story import tell
from supervisor.core.text import block
from supervisor.core.truth import Truth
from supervisor.runs.follow import LogLines, News, Over, Told, Trouble
from supervisor.runs.saved import Document
from supervisor.runs.target import Target
from supervisor.scheduler.poller import Seen

NO_REASON: Final = ("", "None", "NonZeroExitCode")
"""Reasons that tell nothing beyond the state."""

BEGUN: Final = ("RUNNING", "COMPLETING", "COMPLETED")
"""States of a job that waits no more: why it did is no reason any longer."""

TAILS: Final = 3
"""Failed runs of which the last words are shown."""


class StoryTeller:
    """Tells what is learned, each thing once. An array's states are counted, and its lines begin with the run's id."""

    def __init__(self, target: Target, printer: Printer | None) -> None:
        self.reasons: dict[str, str] = {}  # by id: why Slurm says that it is in its state
        self._target = target
        self._printer = printer  # None: only the verdict
        self._states: dict[str, Seen] = {}
        self._counted = ""
        self.away: set[str] = set()  # ids about which Slurm cannot be asked now
        self._failed: set[str] = set()
        self._printed: set[str] = set()  # runs of which lines were printed
        self._mute = False
        self.was_cancelled = False
        self.was_seen = False  # Slurm or a run has told something of the job

    @property
    def array(self) -> bool:
        """Whether the job is a whole array, as far as is known."""
        return self._target.array

    def has_parts(self, target: Target) -> None:
        """The job has turned out to have parts."""
        self._target = target

    # --- Slurm -------------------------------------------------------------------------------------------------------

    def seen(self, jobid: str, seen: Seen) -> None:
        """What Slurm shows of one of the ids."""
        before = self._states.get(jobid, Seen())
        self.was_seen |= bool(seen.state)
        self._states[jobid] = seen
        self._answers(jobid, seen.trouble)
        if seen.reason not in NO_REASON:
            self.reasons[jobid] = seen.reason
        elif seen.state in BEGUN:
            self.reasons.pop(jobid, None)
        if seen.restarts and before.restarts is not None and seen.restarts > before.restarts:
            self.say(f"{jobid}: Slurm has put the job into the queue again: attempt {seen.restarts + 1} follows")
        if (seen.state, seen.reason) == (before.state, before.reason) or not seen.state:
            return
        if self._target.array:
            asyncio.get_running_loop().call_soon(self._count)
        else:
            self.say(f"{jobid}: {state_of(seen)}")

    def _answers(self, jobid: str, trouble: str) -> None:
        """Say once that Slurm cannot be asked, and once that it answers again."""
        away = bool(self.away)
        if trouble:
            self.away.add(jobid)
        else:
            self.away.discard(jobid)
        if self.away and not away:
            self.say(f"Slurm cannot be asked about everything now, and is asked again: {trouble}")
        elif away and not self.away:
            self.say("Slurm answers again")

    def _count(self) -> None:
        counts = Counter(state_of(seen) for seen in self._states.values() if seen.state)
        text = ", ".join(f"{count} {state}" for state, count in counts.most_common())
        if text != self._counted:
            self._counted = text
            self.say(f"{self._target.jobid}: {text}")

    def ended(self, jobid: str, truth: Truth) -> None:
        """What is proven about the end of one of the ids; of a single job the verdict tells it."""
        if self._target.array:
            self.say(f"{jobid}: {truth.record.words if truth.settled and truth.record else truth.doubt}")

    # --- the run -----------------------------------------------------------------------------------------------------

    def news(self, news: News) -> None:
        """Something in a run directory, log lines excepted."""
        self.was_seen = True
        if isinstance(news, Told):
            self._story(news.run_id, news.record, news.state)
        elif isinstance(news, Trouble):
            self.say(news.text)
        elif isinstance(news, Over) and news.lost:
            self.say(f"run {news.run_id}: its engine is gone, and has left no receipt")

    def _story(self, run_id: str, record: ev.Record, state: RunState) -> None:
        if isinstance(record.event, ev.RunOpened):
            self.say(f"run {run_id} in {record.event.run_dir}")
            return
        text = tell(record.event)
        if text is not None and not isinstance(record.event, QUIET):
            which = f"{run_id}  " if self._target.array or run_id != self._target.jobid else ""
            self._print(f"{which}{record.at - state.started_at:8.3f}s  {block(text)}")
        failure = state.first_failure
        if failure is not None and run_id not in self._failed:
            self._failed.add(run_id)
            self.say(f"run {run_id}, first failure: {block(failure.text)}")

    def lines(self, lines: LogLines) -> None:
        """Lines of a log, to stdout. When nobody reads there any more, the rest is for the files alone."""
        if not self._mute:
            try:
                if self._printer is not None and lines.run_id not in self._printed:
                    self._printer.flush()  # a run is named before its first line, where both streams are one
                self._printed.add(lines.run_id)
                put_lines(lines.run_id, lines.log, lines.lines, self._target.jobid)
            except OSError as error:
                self._mute = True
                self.say(f"the logs are told no further: stdout: {error.strerror or error}")

    def cancelled(self) -> None:
        """Slurm has taken the scancel that a person's interrupt asked for."""
        self.was_cancelled = True
        self.say(f"job {self._target.jobid} is cancelled; waiting for its end (interrupt again to leave)")

    # --- sentences ---------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """A sentence."""
        self._print(f"allocctl: {text}")

    def _print(self, line: str) -> None:
        if self._printer is not None:
            self._printer.print(line)


def state_of(seen: Seen) -> str:
    """A state with its reason: `PENDING (Resources)`."""
    return seen.state if seen.reason in NO_REASON else f"{seen.state} ({seen.reason})"


# --- the end ---------------------------------------------------------------------------------------------------------


def verdict_lines(documents: list[Document], target: Target, reasons: dict[str, str]) -> Iterator[str]:
    """Why the job ended so, and the last words of the runs that failed first: each thing once, and not what the last
    line will say. Of several runs, each one's verdict in a line besides."""
    tails = TAILS
    for document in documents:
        verdict = document["verdict"]
        if len(documents) > 1:
            how = f"{verdict['outcome']} {verdict['code']} ({verdict['origin']})"
            yield f"{name_of(document)}: {how}: {verdict['summary']}"
            if not verdict["code"]:
                continue
        said = verdict["summary"]
        for text in _reasons(document, target, reasons):
            if text not in said:
                said += f"\n{text}"
                yield f"  {block(text)}"
        if verdict["code"] and tails:
            tails -= 1
            yield from _last_words(document, target)


def _reasons(document: Document, target: Target, reasons: dict[str, str]) -> Iterator[str]:
    verdict, slurm = document["verdict"], document.get("slurm") or {}
    yield from verdict["because"]
    run = run_of(document)
    if run is None:
        unit = str(document["jobid"])
        reason = f" ({reasons[unit]})" if unit in reasons else ""
        yield f"the job ended before it made a run: Slurm says {slurm.get('state') or 'nothing'}{reason}"
    elif run["first_failure"] and verdict["code"]:
        yield f"{run['first_failure']['text']}"
    yield from slurm.get("notes", ())
    yield from document.get("disagreements", ())


def _last_words(document: Document, target: Target) -> Iterator[str]:
    """The end of the logs of the rank that failed first; of a job without a run, of what its script printed."""
    run = run_of(document)
    if run is None:
        output = target.output_of(str(document["jobid"]))
        named = [(output, lines)] if output and (lines := tail(output)) else []
    else:
        failure = run["first_failure"]
        named = log_tails(run, failure["rank"]) if failure else []
    for path, lines in named:
        yield f"  the end of {path}:"
        yield from (f"    {line}" for line in lines)
