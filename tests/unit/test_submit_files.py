"""Submitting on a file system that is gone: it holds up who needs it, for a while, and nobody else."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.settling import Patience
from supervisor.core.submission import Order, Submission
from supervisor.loop.threads import in_thread
from supervisor.scheduler import directories
from supervisor.scheduler.client import Printed
from supervisor.scheduler.directories import write_record
from supervisor.scheduler.submit import Stop, Submitter

LIMIT = 10.0
PLAN = "a plan"
QUICK = Patience(pause=0.01, absence=0.03, looks=3, limit=30)


class Slurm:
    """Knows no job, and gives number 12 to the next."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def run(self, argv: list[str]) -> Printed:
        self.calls.append(argv[0])
        return Printed(0, "12\n") if argv[0] == "sbatch" else Printed(0, "")


class Dead:
    """A file system that answers no more, from one call on; until `revive`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._answers = threading.Event()
        self.hangs = threading.Event()
        self.held: list[threading.Thread] = []

    def at(self, module: Any, name: str, word: str = "") -> None:
        """It hangs in this function, where an argument ends so."""
        real: Callable[..., Any] = getattr(module, name)

        def hang(*args: Any, **kwargs: Any) -> Any:
            if any(str(arg).endswith(word) for arg in args):
                self.held.append(threading.current_thread())
                self.hangs.set()
                self._answers.wait(LIMIT)
            return real(*args, **kwargs)

        self._monkeypatch.setattr(module, name, hang)

    def revive(self) -> None:
        """It answers again, and everybody who hung there has gone on."""
        self._answers.set()
        for thread in self.held:
            if thread is not threading.main_thread():
                thread.join(LIMIT)


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dead]:
    monkeypatch.setattr(directories, "FILES", 0.05)
    monkeypatch.setattr(directories, "SEARCH", 0.05)
    monkeypatch.setattr(directories, "_LET_GO", 0.05)
    dead = Dead(monkeypatch)
    yield dead
    dead.revive()


def order(base: Path, state: Any = "asked") -> Order:
    directory = base / "submit-1"
    now = datetime.now(UTC).isoformat()
    script = f"{directory}/job.sh"
    argv = ("sbatch", script)
    rest = ("plan.toml", script, "slurm-%j.out", None, None)
    record = Submission("1", state, None, None, "me", os.getuid(), "bench", now, None, argv, str(base), *rest)
    return Order(str(directory), "#!/bin/sh\n", record)


def made(base: Path) -> Path:
    """A submission that is in doubt."""
    doubt = order(base)
    directory = Path(doubt.directory)
    directory.mkdir(parents=True)
    (directory / "plan.toml").write_text(PLAN)
    write_record(str(directory), doubt.submission)
    return directory


def locks() -> list[str]:
    """The locks that this process has open."""
    names = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return [name for name in names if name.endswith("/.lock")]


@pytest.mark.parametrize(
    ("module", "name", "word"),
    [
        (os, "makedirs", "base"),
        (os, "mkdir", "submit-1"),
        (os, "open", "job.sh"),
        (os, "open", ".lock"),
        (fcntl, "lockf", ""),
        (os, "replace", "submission.json"),
    ],
)
async def test_nothing_is_submitted_and_nothing_is_left(
    tmp_path: Path, dead: Dead, module: Any, name: str, word: str
) -> None:
    slurm, base = Slurm(), tmp_path / "base"
    dead.at(module, name, word)
    with pytest.raises(TimeoutError, match="is its file system away") as away:
        await Submitter(slurm, slurm, Stop()).submit(order(base), PLAN)
    assert (away.value.errno, away.value.filename) == (errno.ETIMEDOUT, f"{base}/submit-1")
    assert dead.held and threading.main_thread() not in dead.held
    await in_thread(dead.revive, limit=LIMIT)
    assert (slurm.calls, os.listdir(base), locks()) == ([], [], [])


async def test_who_waits_for_it_can_be_cancelled(tmp_path: Path, dead: Dead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "FILES", LIMIT)
    slurm = Slurm()
    dead.at(os, "open", ".lock")
    task = asyncio.create_task(Submitter(slurm, slurm, Stop()).submit(order(tmp_path), PLAN))
    assert await in_thread(dead.hangs.wait, LIMIT, limit=LIMIT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, LIMIT / 2)
    await in_thread(dead.revive, limit=LIMIT)
    assert (slurm.calls, os.listdir(tmp_path), locks()) == ([], [], [])


async def test_an_answer_that_cannot_be_written_is_told_all_the_same(tmp_path: Path, dead: Dead) -> None:
    slurm = Slurm()

    async def run(argv: list[str]) -> Printed:
        dead.at(os, "replace", "submission.json")
        return await Slurm.run(slurm, argv)

    slurm.run = run  # type: ignore[method-assign]
    done = await Submitter(slurm, slurm, Stop()).submit(order(tmp_path), PLAN)
    assert (done.submission.state, done.submission.jobid) == ("submitted", "12")
    assert done.trouble == f"{tmp_path}/submit-1/submission.json: no answer within 0.05 s: is its file system away?"


async def test_a_lock_that_cannot_be_given_back_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up = directories._Lock.give_up

    def fails(lock: directories._Lock) -> None:
        give_up(lock)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(directories._Lock, "give_up", fails)
    slurm = Slurm()
    done = await Submitter(slurm, slurm, Stop()).submit(order(tmp_path), PLAN)
    assert (done.submission.jobid, slurm.calls, locks()) == ("12", ["sbatch", "scontrol"], [])


@pytest.mark.parametrize(("module", "name", "word"), [(os, "open", ".lock"), (os, "open", "submission.json")])
async def test_a_doubt_is_not_settled(tmp_path: Path, dead: Dead, module: Any, name: str, word: str) -> None:
    directory, slurm = made(tmp_path), Slurm()
    dead.at(module, name, word)
    with pytest.raises(TimeoutError):
        await Submitter(slurm, slurm, Stop(), patience=QUICK).settle(str(directory))
    assert threading.main_thread() not in dead.held
    await in_thread(dead.revive, limit=LIMIT)
    assert (slurm.calls, locks()) == ([], [])


@pytest.mark.parametrize("word", [".lock", "submission.json"])
async def test_an_earlier_submission_that_cannot_be_looked_at_stands_in_the_way(
    tmp_path: Path, dead: Dead, word: str
) -> None:
    made(tmp_path)
    slurm = Slurm()
    dead.at(os, "open", word)
    with pytest.raises(TimeoutError, match="is its file system away"):
        await Submitter(slurm, slurm, Stop(), patience=QUICK).settle_earlier(str(tmp_path), PLAN, os.getuid())


async def test_a_job_is_not_believed_absent_where_its_output_cannot_be_seen(tmp_path: Path, dead: Dead) -> None:
    directory, slurm = made(tmp_path), Slurm()
    dead.at(os, "listdir", "submit-1")
    patience = Patience(pause=0.01, absence=0.03, looks=2, limit=0.3)
    done = await Submitter(slurm, slurm, Stop(), patience=patience).settle(str(directory))
    assert done is not None and done.submission.state == "unknown"
    assert f"{directory}: no answer" in done.submission.words


async def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    directory, slurm = made(tmp_path), Slurm()
    submitter = Submitter(slurm, slurm, Stop(), patience=QUICK)
    for name in ("plan.toml", "submission.json"):
        (directory / name).unlink()
        os.mkfifo(directory / name)
        assert await submitter.settle_earlier(str(tmp_path), PLAN, os.getuid()) is None
    with pytest.raises(OSError, match="not a regular file"):
        await submitter.settle(str(directory))
