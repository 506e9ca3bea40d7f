"""The looker: what it tells the machine of contracts and of a script's marker, and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from supervisor.contracts import Place
from supervisor.contracts.child import Child
from supervisor.core import events as ev
from supervisor.core.artifacts import Answer, Finding
from supervisor.core.layout import Layout
from supervisor.core.marker import Foreign, Garbage, Marker, NotYet, render
from supervisor.core.plan import parse_plan
from supervisor.engine import looker as module
from supervisor.engine import watcher
from supervisor.engine.looker import Looker, marker_event
from supervisor.watch.filesystems import FileSystem

LIMIT = 10.0
E = TypeVar("E", bound=ev.Event)


def layout(run_dir: Path, **tables: Any) -> Layout:
    command = {"command": ["true"]}
    roles = {"worker": {"ranks": 0, **command}, "client": {"ranks": 1, **command}}
    plan = parse_plan(
        {"job": {"name": "x", "nodes": 2}, "coordinator": {"rank": 1}, "roles": roles, **tables}, "plan.toml"
    )
    return Layout(plan, "run-1", "1", str(run_dir), ("n1", "n2"), "nonce")


RESULT = {"name": "result", "path": "out/result.json", "format": "json", "fields": {"ok": {"equals": True}}}


class Look:
    """A looker at work, what it has told, and which contracts still matter."""

    def __init__(self, where: Layout) -> None:
        self.open = frozenset(["result"])
        self.told: list[ev.Event] = []
        self._news = asyncio.Event()
        self.looker = Looker(where, self._post, lambda: self.open)

    def _post(self, event: ev.Event) -> None:
        self.told.append(event)
        self._news.set()

    def events(self, kind: type[E], **wanted: Any) -> list[E]:
        """The events of a kind so far whose fields are as wanted."""
        found = (event for event in self.told if isinstance(event, kind))
        return [event for event in found if all(getattr(event, key) == value for key, value in wanted.items())]

    async def until(self, kind: type[E], count: int = 1, **wanted: Any) -> E:
        """The event of a kind that makes so many of them."""
        async with asyncio.timeout(LIMIT):
            while len(found := self.events(kind, **wanted)) < count:
                self._news.clear()
                await self._news.wait()
        return found[count - 1]

    async def watching(self, *paths: Path) -> None:
        """Until these directories are watched, and the looks that the first visits ask for are over."""
        async with asyncio.timeout(LIMIT):
            while not {str(path) for path in paths} <= {
                directory for event in self.events(ev.WatchChanged) for directory in event.directories
            }:
                self._news.clear()
                await self._news.wait()
        await self.ask(1000)

    async def ask(self, number: int) -> None:
        """Ask for a look, and wait for its end."""
        self.looker.ask(number)
        await self.until(ev.ArtifactsLooked, asked=number)


@asynccontextmanager
async def looking(where: Layout) -> AsyncIterator[Look]:
    look = Look(where)
    task = asyncio.create_task(look.looker.run())
    try:
        yield look
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and requests alone make it look: no test passes because some seconds went by."""
    monkeypatch.setattr(watcher, "SCAN", 3600.0)


async def test_a_contract_is_told_when_its_answer_changes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "out/result.json"
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        assert (await look.until(ev.ArtifactSeen)).answer == "pending"
        assert (await look.until(ev.WatchChanged)).by == "events"
        await look.ask(7)
        assert len(look.told) == 3  # nothing changed: nothing to tell but the answer
        path.write_text('{"ok": ')
        seen = await look.until(ev.ArtifactSeen, 2)
        assert (seen.answer, seen.problems[0].split(":")[0]) == ("pending", "out/result.json")
        path.with_suffix(".new").write_text(json.dumps({"ok": True}))
        path.with_suffix(".new").rename(path)
        seen = await look.until(ev.ArtifactSeen, answer="valid")
        assert [fact["path"] for fact in seen.files] == ["out/result.json"]


async def test_a_file_is_told_when_it_has_changed(tmp_path: Path) -> None:
    """Of thousands of files that come one after the other, each event holds the one that came."""
    make(tmp_path, "out")
    several = {"name": "result", "path": "out/*.json", "count": 3}
    async with looking(layout(tmp_path, artifacts=[several])) as look:
        for name in "abc":
            put(str(tmp_path / f"out/{name}.json"), b"1")
            await look.ask(ord(name))
        seen = [[fact["path"] for fact in event.files] for event in look.events(ev.ArtifactSeen)]
        told = [path for paths in seen for path in paths]
        assert told.count("out/a.json") == 2, "when it came, and with its checksum"
        assert look.events(ev.ArtifactSeen)[-1].answer == "valid"


async def test_a_question_waits_for_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written in time is not late because it takes long to read."""
    monkeypatch.setattr("supervisor.contracts.reading.PATIENCE", 0.0)
    (tmp_path / "out").mkdir()
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.until(ev.ArtifactSeen)
        path = tmp_path / "large.json"
        path.write_text(json.dumps({"ok": True, "more": ["x" * 1000] * 1100}))
        path.rename(tmp_path / "out/result.json")
        await look.ask(7)
        assert look.events(ev.ArtifactSeen)[-1].answer == "valid"


async def test_a_contract_that_is_over_is_not_read_again(tmp_path: Path) -> None:
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.until(ev.ArtifactSeen)
        look.open = frozenset()
        (tmp_path / "out").mkdir()
        (tmp_path / "out/result.json").write_text('{"ok": false}')
        look.looker.ask(1)
        await look.ask(2)
        assert len(look.events(ev.ArtifactSeen)) == 1
        assert [event.asked for event in look.events(ev.ArtifactsLooked)] == [1, 2]


async def test_a_checker_that_breaks_is_a_fault_and_not_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("supervisor.contracts.files.Files.look", broken)
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        fault = await look.until(ev.CheckerFault)
    assert (fault.contract, fault.text) == ("result", "RuntimeError: broken")


async def test_a_file_system_that_does_not_answer_is_noted_and_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*_: object, limit: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(module, "in_thread", no_answer)
    async with looking(layout(tmp_path, artifacts=[RESULT], marker={"by": "coordinator"})) as look:
        assert "did not answer" in (await look.until(ev.Noted)).text
        await look.ask(3)
        assert len(look.events(ev.Noted)) == 1  # each look that hangs leaves a thread behind: no second one so soon
        (seen,) = look.events(ev.ArtifactSeen)
        assert (seen.answer, seen.problems) == ("pending", [f"{tmp_path} did not answer within 25 s"])
        assert look.events(ev.MarkerRead) == []


async def test_how_it_is_watched_is_told_once_and_polling_finds_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(24, "")

    monkeypatch.setattr(watcher, "Trees", refuse)
    (tmp_path / "out").mkdir()
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.ask(1)
        put(str(tmp_path / "out/result.json"), b'{"ok": true}')
        await look.until(ev.ArtifactSeen, answer="valid")
        (how,) = look.events(ev.WatchChanged)
    assert (how.directories, how.by) == ([str(tmp_path / "out")], "polling")
    assert "max_user_instances" in how.why


async def test_a_scripts_marker_is_told_once_and_only_ours(tmp_path: Path) -> None:
    where = layout(tmp_path, marker={"by": "coordinator"})
    other, ours = render(Marker(3, "run-2")), render(Marker(0, "run-1"))
    async with looking(where) as look:
        for number, content in enumerate((b"", b"0", b"zero\n", other)):
            put(where.marker, content)
            await look.ask(number)
        assert look.events(ev.MarkerRead) == []
        put(where.marker, ours)
        assert await look.until(ev.MarkerRead) == ev.MarkerRead("marker", 0, None, asked=0)
        await look.ask(9)
        assert len(look.events(ev.MarkerRead)) == 1


def put(path: str, content: bytes) -> None:
    """A file that appears whole."""
    Path(f"{path}.new").write_bytes(content)
    Path(f"{path}.new").rename(path)


async def test_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    assert not Looker(layout(tmp_path), lambda event: None, frozenset).has_work
    assert Looker(layout(tmp_path, artifacts=[RESULT]), lambda event: None, frozenset).has_work
    assert Looker(layout(tmp_path, marker={"by": "coordinator"}), lambda event: None, frozenset).has_work


@pytest.mark.parametrize(
    ("reading", "found", "code"),
    [
        (Marker(5, "run-1"), "marker", 5),
        (NotYet("empty"), "none", None),
        (Garbage("x"), "garbage", None),
        (Foreign(Marker(5, "run-2"), "run-1"), "foreign", None),
    ],
)
def test_what_a_look_at_the_marker_means(reading: Any, found: str, code: int | None) -> None:
    event = marker_event(reading, 0, 9)
    assert (event.found, event.code, event.note, event.asked) == (found, code, None, 9)
    assert marker_event(reading, 4, 9).note == 4


# --- several contracts -----------------------------------------------------------------------------------------------

FIRST = {"name": "first", "path": "first/result.json", "format": "json"}
SECOND = {"name": "second", "path": "second/result.json", "format": "json"}
OF_NODES = {"name": "part", "path": "parts/{rank}/*/x.json", "per": "node"}


class Examiners:
    """Instead of real ones: what was looked at, and one contract that does not answer until it is let go."""

    def __init__(self, stuck: str = "") -> None:
        self.looked: list[str] = []
        self.numbers = itertools.count()
        self.made = 0
        self.closed = threading.Semaphore(0)
        self.stuck = stuck
        self.pauses = iter(list[float]())
        self.progress = iter(list[int]())
        self.hangs, self.let_go = threading.Event(), threading.Event()

    def __call__(self, places: list[Place]) -> One:
        self.made += 1
        return One(self)


class One:
    """One of them."""

    def __init__(self, all_of_them: Examiners) -> None:
        self._all = all_of_them

    def look(self, place: Place) -> Finding:
        contract = place.instance.contract_id
        self._all.looked.append(contract)
        if contract == self._all.stuck and not self._all.let_go.is_set():
            self._all.hangs.set()
            assert self._all.let_go.wait(LIMIT)
        return Finding(contract, "pending", (f"look {next(self._all.numbers)}",))

    def again(self, place: Place) -> float | None:
        return next(self._all.pauses, None)

    def progress(self) -> object:
        return next(self._all.progress, None)

    def close(self) -> None:
        self._all.closed.release()


def make(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / name).mkdir(parents=True)


async def test_an_event_is_a_look_at_the_contracts_that_it_concerns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examiners = Examiners()
    monkeypatch.setattr(module, "examiner", examiners)
    make(tmp_path, "first", "second")
    async with looking(layout(tmp_path, artifacts=[FIRST, SECOND])) as look:
        look.open = frozenset(["first", "second"])
        await look.ask(1)
        await look.watching(tmp_path / "first", tmp_path / "second")
        del examiners.looked[:]
        seen = len(look.events(ev.ArtifactSeen, contract="second"))
        (tmp_path / "second/x").touch()
        await look.until(ev.ArtifactSeen, seen + 1, contract="second")
        assert set(examiners.looked) == {"second"}


async def test_one_that_does_not_answer_holds_its_own_desk_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examiners = Examiners(stuck="first")
    monkeypatch.setattr(module, "examiner", examiners)
    monkeypatch.setattr(module, "LOOK_LIMIT", 0.3)
    make(tmp_path, "first", "second")
    async with looking(layout(tmp_path, artifacts=[FIRST, SECOND])) as look:
        look.open = frozenset(["first", "second"])
        look.looker.ask(1)
        await asyncio.to_thread(examiners.hangs.wait, LIMIT)
        await look.until(ev.ArtifactSeen, contract="second")
        assert look.events(ev.ArtifactsLooked) == []
        assert "first" in (await look.until(ev.Noted)).text
        await look.until(ev.ArtifactsLooked, asked=1)  # the machine is not kept waiting by it
        assert examiners.made == 3, "the one that hangs is left to its thread, and another takes its place"
        assert not examiners.closed.acquire(blocking=False)
        examiners.let_go.set()
        assert await asyncio.to_thread(examiners.closed.acquire, timeout=LIMIT)
    assert all(examiners.closed.acquire(blocking=False) for _ in range(2))


async def test_a_file_system_that_does_not_answer_holds_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not blamed on the artifact, either: the verdict tells why nothing was found."""
    examiners = Examiners(stuck="first")
    monkeypatch.setattr(module, "examiner", examiners)
    monkeypatch.setattr(module, "STALL", 0.2)
    make(tmp_path, "first", "second")
    async with looking(layout(tmp_path, artifacts=[FIRST, SECOND])) as look:
        look.open = frozenset(["first", "second"])
        await look.ask(1)
        (seen,) = look.events(ev.ArtifactSeen, contract="first")
        assert (seen.answer, seen.problems) == ("pending", [f"{tmp_path} did not answer within 0.2 s"])
        assert not examiners.let_go.is_set()
        look.open = frozenset(["second"])
        examiners.let_go.set()
        await look.ask(2)
        assert len(look.events(ev.ArtifactSeen, contract="first")) == 1, "a look that ends late is nobody's news"


async def test_a_question_waits_as_long_as_reading_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examiners = Examiners()
    examiners.progress = iter(range(4))
    examiners.pauses = itertools.repeat(0.05)
    monkeypatch.setattr(module, "examiner", examiners)
    monkeypatch.setattr(module, "STALL", 0.05)
    make(tmp_path, "out")
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.ask(1)
    assert next(examiners.progress, None) is None
    assert examiners.looked, "it was looked at, and never done"


async def test_a_process_that_was_stopped_holds_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.contracts.reading.PATIENCE", 0.0)
    monkeypatch.setattr(module, "STALL", 0.2)
    stopped: list[int] = []

    class Stopped(Child):
        def __init__(self, command: Any, *rest: Any, **more: Any) -> None:
            super().__init__(["sh", "-c", "kill -STOP $$; exit 7"], *rest, **more)
            stopped.append(1)

    monkeypatch.setattr("supervisor.contracts.reader.Child", Stopped)
    make(tmp_path, "out")
    put(str(tmp_path / "out/result.json"), json.dumps({"ok": True, "more": ["x" * 1000] * 1100}).encode())
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.ask(1)
        assert stopped
        assert "which are still being read" in look.events(ev.ArtifactSeen)[-1].problems[0]


async def test_a_checker_that_takes_its_time_holds_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.contracts.checker.PATIENCE", 0.0)
    monkeypatch.setattr(module, "STALL", 0.2)
    make(tmp_path, "out")
    put(str(tmp_path / "out/result.json"), b'{"ok": true}')
    checked = {**RESULT, "checker": ["sleep", "1000"], "checker_timeout": 3600}
    async with looking(layout(tmp_path, artifacts=[checked])) as look:
        await look.ask(1)
        seen = look.events(ev.ArtifactSeen)[-1]
        assert seen.problems == ["checker sleep: found it still at work; expected its answer"]


async def test_a_hint_is_a_look_at_what_its_agent_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examiners = Examiners()
    monkeypatch.setattr(module, "examiner", examiners)
    make(tmp_path, "first", "parts/0", "parts/1")
    where = layout(tmp_path, artifacts=[FIRST, OF_NODES])
    async with looking(where) as look:
        look.open = frozenset(["first", "part@0", "part@1"])
        await look.watching(tmp_path / "first", tmp_path / "parts/0", tmp_path / "parts/1")
        del examiners.looked[:]
        seen = {name: len(look.events(ev.ArtifactSeen, contract=name)) for name in ("first", "part@1")}
        look.looker.hint(1)
        for name, count in seen.items():
            await look.until(ev.ArtifactSeen, count + 1, contract=name)
        assert sorted(examiners.looked) == ["first", "part@1"]
    assert look.looker.watched(1) == [
        (str(tmp_path), str(tmp_path / "first"), 0),
        (str(tmp_path), str(tmp_path / "parts/1"), 1),
    ]


async def test_a_file_that_grows_in_place_is_found_where_no_events_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory does not change, so a listing does not show it."""
    monkeypatch.setattr(watcher, "file_system", lambda _: FileSystem("lustre", "/"))
    make(tmp_path, "out")
    path = tmp_path / "out/result.json"
    path.write_text('{"ok": ')
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        assert (await look.until(ev.ArtifactSeen)).answer == "pending"
        await look.ask(1)
        with path.open("a") as file:
            file.write("true}")
        await look.until(ev.ArtifactSeen, answer="valid")


async def test_a_contract_is_looked_at_again_when_its_examiner_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes in any directory: half a file is read once more a while later, and one look replaces another."""
    pauses = iter([0.001, 0.001, None])
    monkeypatch.setattr("supervisor.contracts.files.Files.again", lambda *_: next(pauses))
    answers: Iterator[Answer] = iter(["pending", "invalid", "valid"])
    monkeypatch.setattr("supervisor.contracts.files.Files.look", lambda *_: Finding("result", next(answers)))
    async with looking(layout(tmp_path, artifacts=[RESULT])) as look:
        await look.until(ev.ArtifactSeen, answer="valid")
        assert [event.answer for event in look.events(ev.ArtifactSeen)] == ["pending", "invalid", "valid"]
