"""Following runs by reading their directories: every line once and whole, whatever happens to the files; new runs as
they come; and looks that a dead file system can hold up, but nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.core import events as ev
from supervisor.runs import growing
from supervisor.runs.follow import LOGS, MOST, Follower, LogLines, News, Over, Told, Trouble, all_logs, no_logs
from supervisor.runs.growing import LONG, Logs, parts
from supervisor.runs.looks import Looks
from supervisor.runs.registry import Asked

PLAN: dict[str, Any] = {
    "job": {"name": "x", "nodes": 2},
    "roles": {"server": {"ranks": [0], "command": ["true"]}, "client": {"ranks": [1], "command": ["true"]}},
    "coordinator": {"rank": 1},
}


def opening(run_id: str, jobid: str | None = None, run_dir: str = "/run") -> ev.RunOpened:
    jobid = jobid or run_id.partition(".")[0]
    return ev.RunOpened(run_id, jobid, run_dir, f"{run_dir}/m", ["a", "b"], "slurm", "elsewhere", 1, PLAN)


def line(seq: int, event: ev.Event) -> bytes:
    record = {"seq": seq, "utc": "1970-01-01T00:16:41Z", "at": 10.0 + seq, **ev.encode(event)}
    return json.dumps(record).encode() + b"\n"


def make_run(base: Path, run_id: str, *events: ev.Event) -> Path:
    directory = base / run_id
    (directory / "logs").mkdir(parents=True)
    text = b"".join(line(seq, event) for seq, event in enumerate((opening(run_id), *events), 1))
    (directory / "journal.jsonl").write_bytes(text)
    return directory


def end_run(directory: Path) -> None:
    """Write what makes a file the run's own receipt, and nothing more."""
    opened = json.loads((directory / "journal.jsonl").read_bytes().partition(b"\n")[0])
    own = {key: opened[key] for key in ("run_id", "jobid", "host", "run_dir")}
    (directory / "receipt.run.json").write_text(json.dumps({**own, "started": opened["utc"]}))


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_a_long_journal_is_told_whole_and_in_order_in_several_looks(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7", *(ev.Noted(str(number)) for number in range(2 * MOST)))
    end_run(run)
    follower = Follower("7", [str(tmp_path)], no_logs)
    looks: list[list[News]] = []
    while not looks or follower.more:
        follower.look()
        looks.append(follower.take())
    assert [len(look) for look in looks] == [MOST, MOST, 2]
    told = [news.record.seq for look in looks for news in look if isinstance(news, Told)]
    assert told == list(range(1, 2 * MOST + 2))
    assert looks[-1][-1] == Over("7")


def test_an_adopted_run_is_none_of_the_jobs_and_followed_only_when_it_is_given(tmp_path: Path) -> None:
    make_run(tmp_path, "7")
    adopted = make_run(tmp_path, "7.s1")
    opened = dataclasses.replace(opening("7.s1", "7"), adopted=True)
    (adopted / "journal.jsonl").write_bytes(line(1, opened) + line(2, ev.Noted("its own business")))
    (tmp_path / "7.s1@0123abcd").symlink_to(adopted)
    of_job, by_itself = Follower("7", [str(tmp_path)], no_logs), Follower("7", [], no_logs, directories=[str(adopted)])
    for follower in (of_job, by_itself):
        for _ in range(2):
            follower.look()
    assert {news.run_id for news in of_job.take() if isinstance(news, Told)} == {"7"}
    assert list(of_job.runs) == [os.path.realpath(tmp_path / "7")]
    assert [news.run_id for news in by_itself.take() if isinstance(news, Told)] == ["7.s1", "7.s1"]


# --- logs that grow --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def log(run_dir: Path) -> Path:
    path = run_dir / "logs/rank-0.a.out"
    path.touch()
    return path


@pytest.fixture
def logs(run_dir: Path) -> Logs:
    return Logs(str(run_dir), lambda _rank, _kind: True)


def told(logs: Logs, last: bool = False) -> list[str]:
    """The lines of one look (and of those that have to follow it), with the name of their log."""
    found = logs.look(last)
    while logs.more:
        found += logs.look(last)
    return [f"{name}: {text.decode()}" for name, lines in found for text in lines]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rank-0.a.out", (0, "out")),
        ("rank-12.the.role.err", (12, "err")),
        ("rank-3.a.srun", (3, "srun")),
        ("rank-0.a.out.1", None),
        ("rank-0.a.out.gz", None),
        ("rank-x.a.out", None),
        ("rank-0", None),
        ("other.out", None),
    ],
)
def test_names_of_logs(name: str, wanted: tuple[int, str] | None) -> None:
    assert parts(name) == wanted


def test_whole_lines_once(log: Path, logs: Logs) -> None:
    assert told(logs) == []
    append(log, b"one\ntw")
    assert told(logs) == ["rank-0.a.out: one"]
    assert told(logs) == []
    append(log, b"o\nthree")
    assert told(logs) == ["rank-0.a.out: two"]
    assert logs.last_lines() == [("rank-0.a.out", [b"three"])]
    assert logs.last_lines() == []


def test_a_rotated_log_loses_no_line(log: Path, logs: Logs) -> None:
    """Twice, with lines that came between the last look and the rotation, and lines that still go to the old file."""
    append(log, b"1\n")
    assert told(logs) == ["rank-0.a.out: 1"]
    append(log, b"2\n")
    log.rename(log.with_name("rank-0.a.out.1"))
    log.write_bytes(b"3\n")
    assert told(logs) == ["rank-0.a.out: 2", "rank-0.a.out: 3"]
    append(log.with_name("rank-0.a.out.1"), b"late\n")
    append(log, b"4\n")
    log.with_name("rank-0.a.out.1").rename(log.with_name("rank-0.a.out.2"))
    log.rename(log.with_name("rank-0.a.out.1"))
    log.write_bytes(b"5\n")
    assert sorted(told(logs)) == ["rank-0.a.out: 4", "rank-0.a.out: 5", "rank-0.a.out: late"]
    assert told(logs) == []


def test_a_log_whose_rotation_leaves_no_new_file(log: Path, logs: Logs) -> None:
    """The rank writes on into the file that it has open."""
    append(log, b"1\n")
    assert told(logs) == ["rank-0.a.out: 1"]
    log.rename(log.with_name("rank-0.a.out.old"))
    append(log.with_name("rank-0.a.out.old"), b"2\n")
    assert told(logs) == ["rank-0.a.out: 2"]


@pytest.mark.parametrize("how", ["truncated", "truncated, and longer by now", "replaced", "copied and truncated"])
def test_a_log_that_begins_again(log: Path, logs: Logs, how: str) -> None:
    """What was told of a line that never ended stays a line of its own."""
    append(log, b"old line\nold rest")
    assert told(logs) == ["rank-0.a.out: old line"]
    if how == "replaced":
        log.with_name("new").touch()
        log.with_name("new").rename(log)
    elif how == "copied and truncated":
        append(log, b", whole\n")
        log.with_name("rank-0.a.out.1").write_bytes(log.read_bytes())
        os.truncate(log, 0)
    else:
        os.truncate(log, 0)
    new = b"new\n" if how != "truncated, and longer by now" else b"new " * 20 + b"\n"
    append(log, new)
    rest = "old rest, whole" if how == "copied and truncated" else "old rest"
    assert told(logs) == [f"rank-0.a.out: {rest}", f"rank-0.a.out: {new.decode()[:-1]}"]


def test_a_log_that_is_not_there_for_a_while(log: Path, logs: Logs) -> None:
    append(log, b"1\n")
    assert told(logs) == ["rank-0.a.out: 1"]
    log.rename(log.with_name("away"))
    assert told(logs) == []
    log.with_name("away").rename(log)
    append(log, b"2\n")
    assert told(logs) == ["rank-0.a.out: 2"]


def test_zeros_at_the_end_are_not_yet(log: Path, logs: Logs) -> None:
    """A file system may show the length of a file before its content."""
    append(log, b"one\n\0\0\0\0")
    assert told(logs) == ["rank-0.a.out: one"]
    with log.open("r+b") as file:
        file.seek(4)
        file.write(b"two\n")
    assert told(logs) == ["rank-0.a.out: two"]
    append(log, b"\0\n\0")
    assert told(logs) == ["rank-0.a.out: \0"], "zeros that a line follows are the rank's own"
    assert told(logs, last=True) == []
    assert logs.last_lines() == [("rank-0.a.out", [b"\0"])]


def test_what_a_job_put_in_a_logs_place_is_not_followed(run_dir: Path, logs: Logs) -> None:
    secret = run_dir / "secret"
    secret.write_bytes(b"secret\n")
    (run_dir / "logs/rank-0.a.out").symlink_to(secret)
    os.mkfifo(run_dir / "logs/rank-1.a.out")
    (run_dir / "logs/rank-2.a.out").mkdir()
    assert told(logs) == []


def test_a_link_in_the_place_of_all_logs_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/rank-0.a.out").write_bytes(b"secret\n")
    (tmp_path / "run/logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="logs"):
        Logs(str(tmp_path / "run"), lambda _rank, _kind: True).look()


def test_a_big_log_takes_several_looks(log: Path, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one look holds in memory has a bound, and so has a line."""
    monkeypatch.setattr(growing, "LOOK", 64 * 1024)
    append(log, b"x" * (2 * LONG) + b"\nend\n")
    looks = 0
    found: list[bytes] = []
    while not looks or logs.more:
        looks += 1
        found += [text for _, lines in logs.look() for text in lines]
    assert looks > 20
    assert b"".join(found) == b"x" * (2 * LONG) + b"end"
    assert max(map(len, found)) <= LONG + 64 * 1024


# --- runs ------------------------------------------------------------------------------------------------------------


def news_of(follower: Follower, last: bool = False) -> list[News]:
    follower.look(last)
    return follower.take()


def events(news: list[News]) -> list[tuple[str, str]]:
    return [(item.run_id, item.record.event.name) for item in news if isinstance(item, Told)]


def follower(base: Path, jobid: str = "7", logs: str = "none", **more: Any) -> Follower:
    return Follower(jobid, [str(base)], LOGS[logs], **more)


def test_a_run_that_comes_and_grows(tmp_path: Path) -> None:
    base = tmp_path / "base"
    it = follower(base)
    assert news_of(it) == [], "the place is made with the first run"
    run = make_run(base, "7")
    assert events(news_of(it)) == [("7", "RunOpened")]
    assert news_of(it) == []
    append(run / "journal.jsonl", line(2, ev.Noted("a")) + line(3, ev.Noted("b"))[:20])
    assert events(news_of(it)) == [("7", "Noted")]
    append(run / "journal.jsonl", line(3, ev.Noted("b"))[20:] + b"\0" * 50)
    assert events(news_of(it)) == [("7", "Noted")]
    end_run(run)
    assert news_of(it) == [Over("7")]
    assert news_of(it) == []


def test_the_state_is_folded(tmp_path: Path) -> None:
    make_run(tmp_path, "7", ev.StepSpawned(1, 5, "s"), ev.StepEnded(1, 3, "refused"))
    told = [item for item in news_of(follower(tmp_path)) if isinstance(item, Told)]
    assert told[0].state.first_failure is None
    assert told[-1].state.first_failure is not None
    assert told[-1].state.first_failure.rank == 1


def test_runs_of_other_jobs_are_not_followed(tmp_path: Path) -> None:
    for name in ("70", "7_1", "17", "7x", "local-7"):
        make_run(tmp_path, name)
    (tmp_path / "submit-7").mkdir()
    (tmp_path / "7.r9").mkdir()  # a directory without a journal is no run yet
    assert news_of(follower(tmp_path)) == []
    make_run(tmp_path, "7.r1")
    assert events(news_of(follower(tmp_path))) == [("7.r1", "RunOpened")]


def test_attempts(tmp_path: Path) -> None:
    """Earlier attempts than the first that is seen are history; later ones are followed as they come."""
    for name in ("7", "7.r1", "7.r1.s2"):
        make_run(tmp_path, name)
    it = follower(tmp_path)
    assert sorted(events(news_of(it))) == [("7.r1", "RunOpened"), ("7.r1.s2", "RunOpened")]
    make_run(tmp_path, "7.r2")
    assert events(news_of(it)) == [("7.r2", "RunOpened")]


def test_tasks(tmp_path: Path) -> None:
    for name in ("7_1", "7_1.r1", "7_12", "70_1"):
        make_run(tmp_path, name)
    it = follower(tmp_path, tasks=True)
    assert sorted(events(news_of(it))) == [("7_1.r1", "RunOpened"), ("7_12", "RunOpened")]
    assert events(news_of(follower(tmp_path, "7_1"))) == [("7_1.r1", "RunOpened")]


def test_the_registry_names_runs_by_links(tmp_path: Path) -> None:
    run = make_run(tmp_path / "base", "7")
    registry = tmp_path / "registry"
    registry.mkdir()
    for name in ("7", "7@1234abcd"):
        (registry / name).symlink_to(run)
    (registry / "7@gone").symlink_to(tmp_path / "gone")
    it = follower(registry)
    assert events(news_of(it)) == [("7", "RunOpened")]
    assert list(it.runs) == [str(run)]


def test_a_run_from_before_the_job_is_of_another(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7")
    os.utime(run / "journal.jsonl", (1_000_000, 1_000_000))
    assert news_of(follower(tmp_path, asked=Asked(1_100_000.0, "/plan.toml"))) == []
    assert events(news_of(follower(tmp_path, asked=Asked(1_000_200.0, "/plan.toml")))) == [("7", "RunOpened")]


def test_a_run_of_the_very_plan_is_of_the_job_whatever_a_clock_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7")
    ours = dataclasses.replace(opening("7", run_dir=str(run)), plan_file="/submit-a1/plan.toml")
    (run / "journal.jsonl").write_bytes(line(1, ours))
    os.utime(run / "journal.jsonl", (1_000_000, 1_000_000))
    assert news_of(follower(tmp_path, asked=Asked(1_003_600.0, "/submit-b2/plan.toml"))) == []
    assert events(news_of(follower(tmp_path, asked=Asked(1_003_600.0, "/submit-a1/plan.toml")))) == [("7", "RunOpened")]


def test_logs_of_the_coordinator_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7")
    for rank, role in ((0, "server"), (1, "client")):
        (run / f"logs/rank-{rank}.{role}.out").write_text("x\n")
        (run / f"logs/rank-{rank}.{role}.srun").write_text("srun: words\n")
    lines = [item for item in news_of(follower(tmp_path, logs="coordinator")) if isinstance(item, LogLines)]
    assert lines == [LogLines("7", "rank-1.client.out", [b"x"])]
    every = [item for item in news_of(follower(tmp_path, logs="all")) if isinstance(item, LogLines)]
    assert {item.log for item in every} == {path.name for path in run.glob("logs/*")}


def test_everything_before_the_end_is_told_before_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7")
    (run / "logs/rank-0.a.out").write_text("no newline")
    end_run(run)
    news = news_of(follower(tmp_path, logs="all"))
    assert [type(item).__name__ for item in news] == ["Told", "LogLines", "Over"]


def test_a_copy_under_a_name_of_its_own_is_not_followed(tmp_path: Path) -> None:
    make_run(tmp_path, "7.old")
    make_run(tmp_path, "7.s2")
    assert events(news_of(follower(tmp_path))) == [("7.s2", "RunOpened")]


def test_a_receipt_of_another_run_is_no_end(tmp_path: Path) -> None:
    """A rank has copied an old run into the directory: that is told once, and the run is followed on."""
    old, run = make_run(tmp_path / "old", "3"), make_run(tmp_path, "7")
    end_run(old)
    it = follower(tmp_path)
    assert events(news_of(it)) == [("7", "RunOpened")]
    os.replace(old / "receipt.run.json", run / "receipt.run.json")
    assert news_of(it) == [Trouble("7: the receipt.run.json there is another run's, and does not count")]
    append(run / "journal.jsonl", line(2, ev.Noted("a")))
    assert events(news_of(it)) == [("7", "Noted")]
    end_run(run)
    assert news_of(it) == [Over("7")]


def test_the_last_look_is_told_that_nobody_writes_any_more(tmp_path: Path) -> None:
    """A job that was killed leaves no receipt: its last line without a newline is told all the same."""
    run = make_run(tmp_path, "7")
    (run / "logs/rank-0.a.out").write_text("no newline")
    it = follower(tmp_path, logs="all")
    assert events(news_of(it)) == [("7", "RunOpened")]
    assert news_of(it, last=True) == [LogLines("7", "rank-0.a.out", [b"no newline"])]
    assert news_of(it, last=True) == []


def test_damage_in_a_journal_is_not_yet_until_nobody_writes(tmp_path: Path) -> None:
    """Zeros in the middle may become lines on a network file system."""
    run = make_run(tmp_path, "7")
    journal = run / "journal.jsonl"
    before = journal.stat().st_size
    second, third = line(2, ev.Noted("a")), line(3, ev.Noted("b"))
    append(journal, b"\0" * (len(second) - 1) + b"\n" + third)
    it = follower(tmp_path)
    assert events(news_of(it)) == [("7", "RunOpened")]
    with journal.open("r+b") as file:
        file.seek(before)
        file.write(second)
    assert events(news_of(it)) == [("7", "Noted"), ("7", "Noted")]
    append(journal, b"garbage\n" + line(4, ev.Noted("c")))
    assert news_of(it) == []
    (trouble,) = news_of(it, last=True)
    assert isinstance(trouble, Trouble)
    assert "the journal cannot be read to its end" in trouble.text


def test_a_journal_that_does_not_fold_is_told_on(tmp_path: Path) -> None:
    make_run(tmp_path, "7", ev.RankStarted(1, 5), ev.Noted("a"))
    news = news_of(follower(tmp_path))
    assert events(news) == [("7", "RunOpened"), ("7", "RankStarted"), ("7", "Noted")]
    assert sum(isinstance(item, Trouble) for item in news) == 1


def test_trouble_is_told_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, "7")
    it = follower(tmp_path)
    assert len(news_of(it)) == 1
    (run / "journal.jsonl").rename(run / "away")
    (trouble,) = news_of(it)
    assert isinstance(trouble, Trouble)
    assert "No such file" in trouble.text
    assert news_of(it) == []
    (run / "away").rename(run / "journal.jsonl")
    append(run / "journal.jsonl", line(2, ev.Noted("a")))
    assert events(news_of(it)) == [("7", "Noted")]


def test_the_engine_of_a_run_without_a_job_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "7")
    lives: list[bool | None] = [True, None, False]
    monkeypatch.setattr("supervisor.runs.follow.engine_lives", lambda *_: lives.pop(0))
    it = Follower("7", (), all_logs, directories=[str(run)], engine=True)
    assert events(news_of(it)) == [("7", "RunOpened")]
    assert news_of(it) == []
    assert news_of(it) == []
    assert news_of(it) == [Over("7", lost=True)]


def test_an_idle_look_costs_little(tmp_path: Path) -> None:
    """No file is read again when nothing has come."""
    run = make_run(tmp_path, "7")
    for rank in range(8):
        (run / f"logs/rank-{rank}.a.out").write_text("x\n" * 1000)
    it = follower(tmp_path, logs="all")
    news_of(it)
    before = int(Path("/proc/self/io").read_text().split()[1])
    news_of(it)
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 4096


# --- looks from an event loop ----------------------------------------------------------------------------------------


def test_what_has_come_stirs_until_it_is_looked_at(tmp_path: Path) -> None:
    follow = follower(tmp_path)
    assert not follow.stirs(), "no place, no run"
    directory = make_run(tmp_path, "7")
    make_run(tmp_path, "8")
    assert follow.stirs(), "a run has come"
    follow.look()
    assert not follow.stirs(), "another job's run is no news"
    append(directory / "journal.jsonl", line(2, ev.Noted("x"))[:-5])
    assert follow.stirs(), "half a line: the other half comes"
    append(directory / "journal.jsonl", line(2, ev.Noted("x"))[-5:])
    follow.look()
    assert not follow.stirs()
    end_run(directory)
    assert follow.stirs(), "a receipt has come"
    follow.look()
    assert isinstance(follow.take()[-1], Over)
    assert not follow.stirs()
    (tmp_path / "7.r1").mkdir()
    follow.look()
    assert follow.stirs(), "its journal comes next"


class Heard:
    """Who is told."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.lines: list[bytes] = []
        self.more = asyncio.Event()

    def hear(self, news: News) -> None:
        self.news.append(news)
        self.more.set()

    def write(self, lines: LogLines) -> None:
        self.lines += lines.lines

    def troubles(self) -> list[str]:
        return [item.text for item in self.news if isinstance(item, Trouble)]


class Held(Follower):
    """A follower whose looks hang while `free` is not set."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.free = threading.Event()
        self.free.set()
        self.looks = 0

    def look(self, last: bool = False) -> None:
        self.looks += 1
        assert self.free.wait(20)
        super().look(last)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    it = Held("7", [str(tmp_path)], all_logs)
    yield it
    it.free.set()


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await event.wait()
    event.clear()


async def test_looks_tell_what_comes_and_drain(tmp_path: Path, held: Held) -> None:
    heard = Heard()
    looks = Looks(held, heard.hear, heard.write)
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(looks.run())
        run = make_run(tmp_path, "7")
        looks.wake()
        await until(heard.more)
        (run / "logs/rank-0.a.out").write_bytes(b"1\n2")
        assert await looks.drain(10.0) is None
        async with asyncio.timeout(10):
            await looking
    assert heard.lines == [b"1", b"2"]


async def test_events_wake_the_looks_where_there_are_any(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause between looks is longer than this test may take: what comes is told by events alone."""
    for name in ("SHORTEST", "LONGEST"):
        monkeypatch.setattr(f"supervisor.runs.looks.{name}", 1000.0)
    monkeypatch.setattr("supervisor.runs.looks.EVENTS", (10, 20))
    run = make_run(tmp_path, "7")
    heard = Heard()
    looks = Looks(held, heard.hear, heard.write, longest=1000.0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(task) for task in (looks.run(), looks.watch())]
        await until(heard.more)  # the opening, by the first look
        for number in range(2, 500):  # the watch begins at some time after that
            append(run / "journal.jsonl", line(number, ev.Noted("x")))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await heard.more.wait()
                    break
        assert ("7", "Noted") in events(heard.news)
        for task in tasks:
            task.cancel()


async def test_a_directory_that_cannot_be_watched_is_looked_at_all_the_same(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_paths: str, **_options: Any) -> Any:
        raise OSError(28, "no space left for watches")

    monkeypatch.setattr("watchfiles.awatch", no_room)
    run = make_run(tmp_path, "7")
    heard = Heard()
    looks = Looks(held, heard.hear, heard.write)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(task) for task in (looks.run(), looks.watch())]
        await until(heard.more)
        append(run / "journal.jsonl", line(2, ev.Noted("x")))
        await until(heard.more)
        for task in tasks:
            task.cancel()
    assert events(heard.news) == [("7", "RunOpened"), ("7", "Noted")]


async def test_a_dead_file_system_is_told_once_and_holds_nothing_up(tmp_path: Path, held: Held) -> None:
    """One look hangs; no other is begun; when it returns, nothing is lost."""
    make_run(tmp_path, "7")
    heard = Heard()
    looks = Looks(held, heard.hear, heard.write, limit=0.05)
    held.free.clear()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(looks.run())
        await until(heard.more)
        assert "no answer within 0.05 s" in heard.troubles()[0]
        looks.wake()
        await asyncio.sleep(0.2)
        assert held.looks == 1
        assert len(heard.troubles()) == 1
        trouble = await looks.drain(0.2)
        assert trouble is not None and "cannot be looked at" in trouble
        held.free.set()
        assert await looks.drain(10.0) is None
        async with asyncio.timeout(10):
            await looking
    assert events(heard.news) == [("7", "RunOpened")]
    assert "again" in heard.troubles()[-1]


async def test_lines_that_nobody_reads_hold_up_the_drain_for_its_limit(tmp_path: Path, held: Held) -> None:
    run = make_run(tmp_path, "7")
    (run / "logs/rank-0.a.out").write_bytes(b"1\n")
    heard, reads = Heard(), threading.Event()

    def write(_lines: LogLines) -> None:
        assert reads.wait(20)

    looks = Looks(held, heard.hear, write)
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(looks.run())
        trouble = await looks.drain(0.2)
        assert trouble is not None and "nobody reads them" in trouble
        looking.cancel()
    reads.set()


async def test_a_cancelled_look_leaves_nothing(held: Held) -> None:
    heard = Heard()
    looks = Looks(held, heard.hear, heard.write)
    held.free.clear()
    looking = asyncio.create_task(looks.run())
    await asyncio.sleep(0.05)
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    held.free.set()


async def test_a_reader_that_has_left_ends_the_looks(tmp_path: Path, held: Held) -> None:
    """What the writer of lines raises is not swallowed: whoever follows logs alone ends then."""
    run = make_run(tmp_path, "7")
    (run / "logs/rank-0.a.out").write_bytes(b"1\n")

    def write(_lines: LogLines) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await Looks(held, Heard().hear, write).run()
