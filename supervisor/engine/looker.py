"""Looks at what the run's files say, and tells the machine what changed: contracts, and a marker that a script
publishes.

    events, polling (watcher.py) --seen--+
    an agent's hint ---------------------+--> a desk: what wants a look --> a look, in a thread --> post
    a question of the machine -----------+

There is a desk for each artifact, and one for the marker. Looks at one desk come one after the other, by one examiner,
which is kept for the run and so judges each file once; a file system that does not answer holds its own desk only.
Hints make single contracts wanted, and what is wanted while a look is under way is looked at again after it. Contracts
that have come to their end are not read again.

A question is not answered while something is being read and that gets on (what was written in time is not late because
it takes long to read). It is once nothing has moved for STALL seconds: a file system that does not answer, a process
that was stopped, a program of the plan's that takes its time hold no deadline.

A visit that saw no change still makes a contract wanted when one of its files was not whole or not right yet (a file
that grows changes no directory), when its checker may say something else by now, and once a minute.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from supervisor.contracts import SOON, CheckerBroke, Examiner, Place, directories, examiner, places
from supervisor.contracts.child import ticks
from supervisor.core import events as ev
from supervisor.core.artifacts import Finding, instances
from supervisor.core.layout import Layout
from supervisor.core.marker import Foreign, Garbage, Marker, Reading, explain
from supervisor.engine import markers
from supervisor.engine.watcher import Manner, Watcher
from supervisor.loop.threads import in_thread
from supervisor.watch.polling import Target

LOOK_LIMIT: Final = 25.0  # seconds for one contract; longer is a file system that does not answer
LOOKS: Final = 4  # threads that look at the same time
REST: Final = 0.5
"""Seconds, at most, that a desk rests after its looks, as long as they took: no event storm burns a core."""
STALL: Final = 5.0  # seconds without progress after which a question is answered as things stand
FULL: Final = 60.0  # seconds after which a contract is looked at even if nothing seems to have changed
MARKER: Final = ""  # the marker, among the ids of contracts


@dataclass(slots=True, eq=False)
class _Question:
    """A question of the machine's, and the desks that have not answered it."""

    number: int
    waiting: set[_Desk]
    answer: Callable[[int], None]

    def done(self, desks: Collection[_Desk]) -> None:
        """These desks have answered it, or will not."""
        if self.waiting:
            self.waiting.difference_update(desks)
            if not self.waiting:
                self.answer(self.number)


class _Progress(NamedTuple):
    """How far an artifact's looks have come."""

    read: object
    look: tuple[str, str] | None  # the one under way
    spent: int  # clock ticks of a processor, by that look

    def since(self, before: _Progress) -> bool:
        """Whether something has moved. That another look began is nothing yet: it may only see that nothing has."""
        return self.read != before.read or (self.look is before.look and self.spent != before.spent)


class _Desk:
    """What wants a look, and a task that looks. `look` is called with the ids that are wanted; it returns whether it is
    done with them, or something is still being read."""

    def __init__(self, look: Callable[[set[str]], Awaitable[bool]]) -> None:
        self._look = look
        self._wanted: set[str] = set()
        self._questions: list[_Question] = []
        self._wake = asyncio.Event()

    def want(self, wanted: Iterable[str], question: _Question | None = None) -> None:
        """Look at these; a question is answered by a look that begins after it, and is done: what was written in time
        is not late because it takes long to read."""
        self._wanted.update(wanted)
        if question is not None:
            self._questions.append(question)
        self._wake.set()

    async def run(self) -> None:
        """Look until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._wake.wait()
            self._wake.clear()
            wanted, self._wanted = self._wanted, set()
            questions, self._questions = self._questions, []
            begun = clock()
            if not await self._look(wanted):
                self._questions = questions + self._questions
                questions = []
            for question in questions:
                question.done({self})
            await asyncio.sleep(min(REST, clock() - begun))


@dataclass(slots=True, eq=False)
class _Artifact:
    """The places of an artifact, and who looks at them."""

    places: dict[str, Place]  # by the contract's id
    examiner: Examiner
    findings: dict[str, Finding] = field(default_factory=dict)
    told: dict[str, Finding] = field(default_factory=dict)  # the last ones that the machine knows
    looked: dict[str, float] = field(default_factory=dict)
    hung: dict[str, float] = field(default_factory=dict)  # seconds of the last pause after a place did not answer
    not_before: dict[str, float] = field(default_factory=dict)
    again: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    at_work: tuple[str, str] | None = None  # the contract that is looked at now, and the thread that does, in /proc

    def look(self, place: Place) -> tuple[Finding, float | None]:
        """In a thread: one look, and in how many seconds another one may say something else although nothing changes.
        Who was left alone meanwhile cleans up himself."""
        mine = self.examiner
        work = self.at_work = place.instance.contract_id, f"/proc/self/task/{threading.get_native_id()}"
        try:
            return mine.look(place), mine.again(place)
        finally:
            if self.at_work is work:
                self.at_work = None
            if self.examiner is not mine:
                mine.close()

    def progress(self) -> _Progress:
        """See Examiner; and what the look that is under way has used of a processor: that lists, if nothing else."""
        work = self.at_work
        return _Progress(self.examiner.progress(), work, ticks(work[1]) if work is not None else 0)

    def restless(self, contract: str, now: float) -> bool:
        """Whether a look may find something else although no directory has changed."""
        finding = self.findings.get(contract)
        unfinished = finding is None or any(fact.problems for fact in finding.files)
        return unfinished or now - self.looked.get(contract, 0.0) > FULL


class Looker:
    """One per run. `open_contracts` tells which contracts still matter; `post` gives events to the machine."""

    def __init__(
        self, layout: Layout, post: Callable[[ev.Event], None], open_contracts: Callable[[], frozenset[str]]
    ) -> None:
        self._layout = layout
        self._post = post
        self._open_contracts = open_contracts
        self._loop = asyncio.get_running_loop()
        self._looks = asyncio.Semaphore(LOOKS)
        self._reading: Reading | None = None
        self.instances = instances(layout.plan)
        self._artifacts: list[_Artifact] = []
        self._desks: dict[str, tuple[_Desk, _Artifact | None]] = {}  # by contract
        self._targets: dict[Target, list[str]] = {}  # with the contracts that have files there
        self._same: dict[tuple[str, int], Target] = {}
        self._of_rank: dict[int | None, list[Target]] = {}
        self._patience: dict[int, asyncio.TimerHandle] = {}  # for each question that is not answered
        groups = [self._furnish(artifact.name) for artifact in layout.plan.artifacts]
        if layout.plan.marker.by == "coordinator":
            directory = str(Path(layout.marker).parent)
            self._desks[MARKER] = _Desk(self._read_marker), None
            groups.append(self._aim(MARKER, None, Target(directory, directory)))
        self._watcher = Watcher(groups, self._seen, self._manner)

    @property
    def has_work(self) -> bool:
        return bool(self._desks)

    def ask(self, asked: int) -> None:
        """Look at every open contract now, and say so with ArtifactsLooked(asked)."""
        desks: dict[_Desk, list[str]] = {}
        for contract, (desk, _) in self._desks.items():
            desks.setdefault(desk, []).append(contract)
        question = _Question(asked, set(desks), self._answered)
        for desk, contracts in desks.items():
            desk.want(contracts, question)
        if desks:
            self._be_patient(question)
        else:
            self._answered(asked)

    def watched(self, rank: int) -> list[Target]:
        """What the agent of a rank is to watch."""
        return self._concerning(rank)

    def hint(self, rank: int) -> None:
        """The agent of a rank says that something has changed in what it watches."""
        wanted = self._open_contracts() | {MARKER}
        for target in self._concerning(rank):
            if not wanted.isdisjoint(self._targets[target]):
                self._watcher.hint(target)

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for desk in {desk for desk, _ in self._desks.values()}:
                    tasks.create_task(desk.run())
                tasks.create_task(self._watcher.run())
        finally:
            for patience in self._patience.values():
                patience.cancel()
            for artifact in self._artifacts:
                for timer in artifact.again.values():
                    timer.cancel()
                artifact.examiner.close()

    # --- who looks at what, and when ---------------------------------------------------------------------------------

    def _furnish(self, name: str) -> list[Target]:
        """A desk for an artifact. Returns what is to be watched for it."""
        mine = places((each for each in self.instances if each.artifact.name == name), self._layout.values)
        if not mine:
            return []
        artifact = _Artifact({place.instance.contract_id: place for place in mine}, examiner(mine))
        self._artifacts.append(artifact)

        async def look(wanted: set[str]) -> bool:
            done = [
                await self._examine(artifact, contract)
                for contract in artifact.places
                if contract in wanted & self._open_contracts()
            ]
            return all(done)

        desk = _Desk(look)
        targets: list[Target] = []
        for contract, place in artifact.places.items():
            self._desks[contract] = desk, artifact
            for directory, depth in directories(place).items():
                targets += self._aim(contract, place.instance.rank, Target(str(place.root), str(directory), depth))
        return targets

    def _aim(self, contract: str, rank: int | None, wanted: Target) -> list[Target]:
        """Have a target watched for a contract. Returns it, in a list, if nobody has asked for the same before."""
        target = self._same.setdefault(wanted[1:], wanted)
        known = target in self._targets
        self._targets.setdefault(target, []).append(contract)
        self._of_rank.setdefault(rank, []).append(target)
        return [] if known else [target]

    def _concerning(self, rank: int) -> list[Target]:
        """What the agent of a rank can tell of: its node's contracts, and those of the run."""
        return list(dict.fromkeys((*self._of_rank.get(None, ()), *self._of_rank.get(rank, ()))))

    def _seen(self, target: Target, changed: bool) -> None:
        now = self._loop.time()
        for contract in self._targets[target]:
            desk, artifact = self._desks[contract]
            if changed or artifact is None or artifact.restless(contract, now):
                desk.want([contract])

    def _manner(self, targets: Collection[Target], manner: Manner) -> None:
        watched = list(dict.fromkeys(target.directory for target in targets))
        self._post(ev.WatchChanged(watched, manner.by, manner.file_system, manner.why))

    def _be_patient(self, question: _Question) -> None:
        """As long as something moves that the question waits for; then it is answered as things stand."""
        waiting = [artifact for desk, artifact in self._desks.values() if artifact and desk in question.waiting]
        before = [(artifact, artifact.progress()) for artifact in dict.fromkeys(waiting)]

        def look() -> None:
            if any(artifact.progress().since(progress) for artifact, progress in before):
                self._be_patient(question)
                return
            for artifact, _ in before:
                if artifact.at_work is not None:
                    self._hangs(artifact, artifact.at_work[0], STALL)
            question.done(set(question.waiting))

        self._patience[question.number] = self._loop.call_later(STALL, look)

    def _answered(self, asked: int) -> None:
        if asked in self._patience:
            self._patience.pop(asked).cancel()
        self._post(ev.ArtifactsLooked(asked))

    # --- looks -------------------------------------------------------------------------------------------------------

    def _look_again(self, artifact: _Artifact, contract: str, pause: float | None) -> None:
        """In so many seconds, instead of what was said before."""
        if contract in artifact.again:
            artifact.again.pop(contract).cancel()
        if pause is not None:
            desk, _ = self._desks[contract]
            artifact.again[contract] = self._loop.call_later(pause, desk.want, [contract])

    async def _examine(self, artifact: _Artifact, contract: str) -> bool:
        """Whether the look is done; otherwise it goes on by itself (see _look_again)."""
        now, place = self._loop.time(), artifact.places[contract]
        if now < artifact.not_before.get(contract, 0.0):
            return True  # each look that never returns leaves a thread behind: they become rare
        artifact.looked[contract] = now
        try:
            async with self._looks:
                finding, pause = await in_thread(artifact.look, place, limit=LOOK_LIMIT)
        except TimeoutError:
            self._hangs(artifact, contract, LOOK_LIMIT)
            artifact.at_work = None
            artifact.examiner = examiner(list(artifact.places.values()))  # the other one still waits, in that thread
            artifact.hung[contract] = rest = 2 * artifact.hung.get(contract, LOOK_LIMIT)
            artifact.not_before[contract] = self._loop.time() + rest
            return True
        except CheckerBroke as error:
            self._post(ev.CheckerFault(contract, f"checker {error}"))
            return True
        except Exception as error:  # noqa: BLE001 - our own code broke: a fault too, and never "pending"
            self._post(ev.CheckerFault(contract, f"{type(error).__name__}: {error}"))
            return True
        self._look_again(artifact, contract, pause)
        self._tell(artifact, finding)
        return pause is None or pause > SOON

    def _hangs(self, artifact: _Artifact, contract: str, seconds: float) -> None:
        """A look has not come to its end: what the last one said holds, and this beside it."""
        problem = f"{artifact.places[contract].root} did not answer within {seconds:g} s"
        self._post(ev.Noted(f"artifact {contract}: {problem}"))
        known = artifact.findings.get(contract, Finding(contract, "pending"))
        self._tell(artifact, replace(known, problems=(problem, *(each for each in known.problems if each != problem))))

    def _tell(self, artifact: _Artifact, finding: Finding) -> None:
        """What a look found, unless it has been told, or the contract has come to its end meanwhile."""
        contract = finding.contract
        if contract not in self._open_contracts():
            return
        artifact.findings[contract] = finding
        news, told = finding.told(), artifact.told.get(contract)
        if told is None or news.answer == "valid" or _said(told) != _said(news):  # growth alone is no news
            artifact.told[contract] = news
            changed, gone = news.since(told)
            files = [asdict(fact) for fact in changed]
            problems, notes = list(news.problems), list(news.notes)
            self._post(ev.ArtifactSeen(news.contract, news.answer, problems, files, notes, list(gone)))

    async def _read_marker(self, _: set[str]) -> bool:
        reading = await read_marker(self._layout)
        if reading is not None and reading != self._reading:
            self._reading = reading
            if isinstance(reading, Marker):
                self._post(marker_event(reading, 0, 0))
        return True


def _said(finding: Finding) -> tuple[object, ...]:
    return finding.answer, finding.problems, finding.notes


async def read_marker(layout: Layout) -> Reading | None:
    """One look at the marker; None when its directory cannot be read now."""
    try:
        return await in_thread(markers.read, layout.marker, layout.run_id, limit=5.0)
    except (OSError, TimeoutError):
        return None


def marker_event(reading: Reading, note: int, asked: int) -> ev.MarkerRead:
    """What a look at the marker means to the machine."""
    match reading:
        case Marker():
            return ev.MarkerRead("marker", reading.code, note or None, asked=asked)
        case Garbage():
            return ev.MarkerRead("garbage", None, note or None, explain(reading), asked)
        case Foreign():
            return ev.MarkerRead("foreign", None, note or None, explain(reading), asked)
        case _:
            return ev.MarkerRead("none", None, note or None, explain(reading), asked)
