"""Following one allocation's job, or its engine, to the proven end: what is seen on the way becomes events of its book.

The work is `runs/waiting.py`'s, with the poller that all allocations of the cluster share. What the book knows already
is not told again: a service that was started anew reads a run's journal from its beginning, and goes on telling where
it had been.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from supervisor.core import events as run_events
from supervisor.core import kept_events as ev
from supervisor.core.story import tell
from supervisor.core.truth import Truth
from supervisor.loop.threads import in_thread
from supervisor.runs.adopted import settle
from supervisor.runs.follow import Follower, LogLines, News, Over, RunFollower, Told, Trouble, no_logs
from supervisor.runs.papers import RECEIPT, RUN_RECEIPT
from supervisor.runs.registry import job_receipt
from supervisor.runs.sealing import Sealed
from supervisor.runs.target import Target, adopted_target, job_target, submitted_target
from supervisor.runs.waiting import Wait
from supervisor.scheduler.poller import Seen
from supervisor.scheduler.record import read_record
from supervisor.service.adopting import start_directory

if TYPE_CHECKING:
    from supervisor.service.life import Life
    from supervisor.service.world import World

FILES: Final = 60.0  # seconds for small files
AGAIN: Final = 30.0
"""Seconds until a job that is over is judged again whose engine still lives."""
VERDICT: Final = ("outcome", "code", "origin", "reason", "summary")


class Following:
    """A teller (see `runs/waiting.py`) for one allocation."""

    def __init__(self, life: Life, world: World) -> None:
        self._life = life
        self._world = world
        self._slurm_is_away = False
        self._runs: Mapping[str, RunFollower] = {}  # what is followed
        self._ended: set[ev.JobEnded] = set()

    async def follow(self) -> ev.Sealed:
        """To the end of the job. Raises OSError, Unreadable, ValueError."""
        while True:
            target = await in_thread(self._target, limit=FILES, place=self._life.key)
            sealed = await self._wait(target)
            if (why := undecided(sealed)) is None:
                return await in_thread(sealed_event, sealed, limit=FILES, place=self._life.key)
            self._trouble(why)
            await asyncio.sleep(AGAIN)

    async def attend(self, run_dir: str) -> ev.Sealed:
        """To the end of a run whose engine is on this host. Raises Gone when nothing can tell it any more."""
        target = adopted_target(run_dir, self._life.state.jobid, start_directory(self._life.key))
        return await in_thread(sealed_event, await self._wait(target), limit=FILES, place=self._life.key)

    async def _wait(self, target: Target) -> Sealed:
        cluster = self._world.cluster(self._life.state.cluster)
        settings = self._world.settings
        make = partial(
            Follower,
            target.jobid,
            target.places,
            no_logs,
            directories=target.directories,
            tasks="_" not in target.jobid,
            asked=target.asked,
            engine=target.alone,
            listings=self._world.listings,
        )
        follower = await in_thread(make, limit=FILES, place=self._life.key)
        self._runs = follower.runs
        wait = Wait(
            target,
            follower,
            self,
            parts=cluster.parts,
            poller=cluster.poller,
            client=cluster.client,
            alone=lambda path: settle(cluster.client, path, settings.patience, outage=settings.outage),
            patience=settings.patience,
            outage=settings.outage,
            rounds=self._world.rounds,
            polls=False,
        )
        sealed = await wait.run()
        if sealed is None:
            raise AssertionError("nobody has interrupted this wait")
        return sealed

    def _target(self) -> Target:
        """In a thread: what to follow."""
        state = self._life.state
        if state.kind == "submitted" and state.directory:
            try:
                submission = read_record(state.directory)
            except (OSError, ValueError):
                pass
            else:
                if submission.jobid == state.jobid:
                    return submitted_target(submission, state.jobid)
        return job_target(state.jobid, state.cluster or None)

    # --- what is told -------------------------------------------------------------------------------------------------

    def news(self, news: News) -> None:
        """Something in a run directory."""
        life = self._life
        if isinstance(news, Trouble):
            self._trouble(news.text)
        elif isinstance(news, Told):
            self._told(news)
        elif isinstance(news, Over):
            if news.run_id not in life.state.runs:  # its journal has lost its opening
                where = [run.directory for run in self._runs.values() if run.run_id == news.run_id]
                life.hear(ev.RunSeen(news.run_id, where[0]))
            if not life.state.runs[news.run_id].over:
                life.hear(ev.RunOver(news.run_id, news.lost))

    def _told(self, news: Told) -> None:
        life, record = self._life, news.record
        life.ranks = {**life.ranks, news.run_id: news.state}
        if isinstance(record.event, run_events.RunOpened) and news.run_id not in life.state.runs:
            life.hear(ev.RunSeen(news.run_id, record.event.run_dir))
        run = life.state.runs.get(news.run_id)
        text = tell(record.event)
        if text and run is not None and record.seq > run.told:
            self._measure(news)
            life.hear(ev.RunTold(news.run_id, record.seq, record.event.name, text))

    def _measure(self, news: Told) -> None:
        """How long a first failure went unseen, when it is decided upon."""
        decision, failures = news.state.decision, news.state.failures
        if decision is not None and failures and decision.seq == news.record.seq:
            self._world.detected(max(0.0, decision.at - failures[0].at))

    def lines(self, lines: LogLines) -> None:
        """No log is followed."""

    def seen(self, jobid: str, seen: Seen) -> None:
        """What Slurm shows."""
        state = self._life.state
        if seen.trouble:
            self._slurm_is_away = True
            self._trouble(f"Slurm cannot be asked: {seen.trouble}")
        elif self._slurm_is_away:
            self._slurm_is_away = False
            self._trouble("")
        if seen.state and (state.units.get(jobid), state.reason) != (seen.state, seen.reason):
            self._life.hear(ev.StateSeen(jobid, seen.state, seen.reason))

    def ended(self, jobid: str, truth: Truth) -> None:
        """What is proven about the end."""
        event = ev.JobEnded(jobid, truth.standing, truth.record.state.word if truth.record else "")
        if event in self._ended and event.slurm in ("", self._life.state.units.get(jobid)):
            return  # a task that is over is asked about again while another one's engine lives
        self._ended.add(event)
        self._life.hear(event)

    def has_parts(self, target: Target) -> None:
        """It has parts: each is seen by itself."""

    def cancelled(self) -> None:
        """Nobody cancels by a wait here."""

    def say(self, text: str) -> None:
        """A sentence."""
        self._trouble(text)

    def _trouble(self, text: str) -> None:
        if text != self._life.state.trouble:
            self._life.hear(ev.Troubled(text))


def undecided(sealed: Sealed) -> str | None:
    """Why a run of the job, or of any of its tasks, that Slurm has ended cannot be judged yet: its engine still lives.
    None when all are judged as far as they can be."""
    for document in sealed.documents:
        settled = (document.get("slurm") or {}).get("standing") == "settled"
        if settled and not document["verdict"].get("final", True):
            return str(document["verdict"]["summary"])
    return None


def sealed_event(sealed: Sealed) -> ev.Sealed:
    """The verdict, as the book has it. Blocks."""
    document = sealed.document
    verdict: dict[str, Any] = {name: document["verdict"][name] for name in VERDICT}
    if sealed.code != verdict["code"]:
        trouble = "; ".join(sealed.trouble)
        verdict |= {"code": sealed.code, "origin": "allocd", "summary": f"{verdict['summary']}; {trouble}"}
    one = next((each for each in sealed.documents if each["verdict"]["code"]), sealed.documents[0])
    run = one.get("run") if one.get("kind") != "run" else one
    failure = (run or {}).get("first_failure") if verdict["code"] else None
    return ev.Sealed(verdict, _receipt(one, run), str(failure["text"]) if failure else "")


def _receipt(document: dict[str, Any], run: dict[str, Any] | None) -> str:
    """Where the receipt is; "" when there is none."""
    kept = [] if run else [job_receipt(str(document["jobid"])) or ""]
    paths = [os.path.join(run["run_dir"], name) for name in (RECEIPT, RUN_RECEIPT)] if run else kept
    return next((path for path in paths if os.path.isfile(path)), "")
