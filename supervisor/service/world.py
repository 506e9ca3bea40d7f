"""What the service needs of the world around it: Slurm, by one client and one poller a cluster, and engines of its own.

Everything that an allocation's task (`life.py`) reaches goes through here, so that a test can put another world in the
place of this one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from supervisor.core import codes
from supervisor.core.parts import Parts
from supervisor.core.submission import Order
from supervisor.loop.threads import in_thread
from supervisor.runs.listing import Listings
from supervisor.runs.rounds import Rounds
from supervisor.runs.waiting import Client
from supervisor.scheduler.client import Printed, SlurmClient
from supervisor.scheduler.inquiry import USUAL, Pace
from supervisor.scheduler.parts import Lists, list_parts
from supervisor.scheduler.poller import Asked, Poller
from supervisor.scheduler.submit import Sbatch, Stop, Submitted, Submitter
from supervisor.service import adopting
from supervisor.service.adopting import Started, Steps
from supervisor.service.interface import AdoptRequest, Refusal
from supervisor.service.settings import Settings

FILES: Final = 60.0  # seconds for small files
SERVER_ERRORS: Final = 500  # refusals with such a status say nothing about the request


class SlurmCommands(Client, Lists, Asked, Steps, Protocol):
    """What is asked of a Slurm client besides what a poller asks."""

    @property
    def calls(self) -> Counter[str]:
        """How often each of its commands was run."""

    @property
    def errors(self) -> Counter[str]:
        """How often each of its commands failed."""

    async def run(self, argv: Sequence[str]) -> Printed:
        """Run one of its commands."""

    async def signal_batch(self, jobid: str, signame: str) -> str:
        """Send a signal to the batch script's own process; what went wrong, or ""."""


class Submits(Protocol):
    """Who submits, and settles what is in doubt."""

    async def submit(self, order: Order, plan_text: str) -> Submitted:
        """Submit once."""

    async def settle(self, directory: str) -> Submitted | None:
        """What came of the submission in a directory."""


class NotStarted(Exception):
    """An engine that cannot be started, and is not there. `code` is the exit code of whoever asked for it."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


class Engines:
    """Engines for adopted allocations, on this host."""

    async def start(self, key: str, request: AdoptRequest, *, wanted: bool) -> Started:
        """Start one; the same key never starts two. One that is not `wanted` any more is not started, unless it is
        there already. Raises NotStarted, and OSError when that is to be tried again."""
        try:
            return await adopting.start(request, key, wanted=wanted)
        except Refusal as refusal:
            if refusal.status < SERVER_ERRORS:
                raise NotStarted(int(refusal.more.get("exit", codes.CONFIG)), refusal.text) from None
            raise OSError(errno.EAGAIN, refusal.text) from None

    def forget(self, key: str) -> None:
        """Remove what is kept of a start that has come to its end. Blocks; raises nothing."""
        with suppress(ValueError):  # nothing was ever started for such a key
            adopting.forget(adopting.start_directory(key))

    async def stop(self, key: str, run_dir: str) -> str:
        """Ask it for an orderly end; what went wrong, or ""."""
        try:
            await in_thread(adopting.stop, run_dir, adopting.start_directory(key), limit=FILES, place=key)
        except Refusal as refusal:
            return refusal.text
        return ""

    async def clean(self, client: Steps, run_dir: str) -> str:
        """When it lives no more: end the steps that it has left; what is in doubt then, or ""."""
        _, trouble = await adopting.stop_leftovers(client, run_dir)
        return trouble


@dataclass
class Cluster:
    """One cluster: who asks it. The poller is run by the holder."""

    client: SlurmCommands
    poller: Poller

    async def parts(self, jobid: str) -> Parts:
        """Which parts a job has."""
        return await list_parts(self.client, jobid)


class World:
    """This world: Slurm's commands as they are on PATH."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engines = Engines()
        self.listings = Listings()
        self.rounds = Rounds()
        self.detected: Callable[[float], object] = lambda seconds: None  # told how long a first failure went unseen
        self.clusters: dict[str, Cluster] = {}
        self._calls: Counter[str] = Counter()  # of all submitters
        self._errors: Counter[str] = Counter()
        self._joined: asyncio.Queue[Cluster] = asyncio.Queue()

    def take(self, settings: Settings) -> None:
        """These settings count from now on."""
        self.settings = settings
        for cluster in self.clusters.values():
            cluster.poller.pace = self.pace()

    def cluster(self, name: str) -> Cluster:
        """A cluster by its name ("": the one that this machine is in), the same one each time."""
        if name not in self.clusters:
            self.clusters[name] = self.make_cluster(name)
            self._joined.put_nowait(self.clusters[name])
        return self.clusters[name]

    def make_cluster(self, name: str) -> Cluster:
        """A cluster that was not asked for before."""
        client = SlurmClient(cluster=name or None)
        return Cluster(client, Poller(client, pace=self.pace()))

    def pace(self) -> Pace:
        """How long doubts and outages are borne."""
        return replace(USUAL, patience=self.settings.patience, outage=self.settings.outage)

    def submitter(self, environ: Mapping[str, str], stop: Stop, cwd: str = "/") -> Submits:
        """Who submits with these variables, in this directory."""
        sbatch, slurm = Sbatch(environ, cwd), SlurmClient()
        for client in (sbatch, slurm):
            client.calls, client.errors = self._calls, self._errors
        return Submitter(sbatch, slurm, stop)

    def environ(self) -> Mapping[str, str]:
        """The variables of a request that brings none."""
        return os.environ

    async def next_cluster(self) -> Cluster:
        """The next cluster that has been asked for: its poller has to be run."""
        return await self._joined.get()

    def calls(self) -> Counter[str]:
        """Slurm's commands that were run, by their names."""
        return sum((cluster.client.calls for cluster in self.clusters.values()), self._calls)

    def errors(self) -> Counter[str]:
        """Those of them that failed."""
        return sum((cluster.client.errors for cluster in self.clusters.values()), self._errors)
