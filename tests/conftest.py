"""What all tests share: one Slurm cluster for the whole run, and a look after each test for what it left
behind.

The cluster is brought up when the first test asks for it, and taken down at the end. Where it cannot run,
every test marked `slurm` is skipped with the reason; where it should run and does not come up, they fail.

A test must leave no child process, file descriptor, thread or task. A process that outlives its test is this
project's own trade, so it is reported as an error of the test that made it, whatever the test itself was
about.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import inspect
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.cluster import Cluster

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="allocd-state-")  # no test touches its user's own list of runs
os.environ["ALLOCD_SOCKET"] = "/dev/null"  # nor asks its user's own allocd
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

settings.register_profile("full", deadline=None)  # a busy machine is no failure
settings.register_profile("quick", settings.get_profile("full"), max_examples=10)  # of `make quick`
settings.load_profile("full")

_THREAD_LIMIT = 1.0  # seconds that a thread may need to end after its owner let it go


@functools.cache
def _missing() -> str | None:
    return Cluster.missing()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the cluster, directly or through a fixture, is marked `slurm`."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a cluster where none can run: -ra prints the reason, and JUnit's file tells these apart."""
    if item.get_closest_marker("slurm"):
        item.user_properties.append(("slurm", "yes"))
        if reason := _missing():
            pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The one real Slurm cluster of this run; tests/slurm makes it whole again after each of its tests."""
    with Cluster() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No child process, descriptor or thread more than before the test and its other fixtures."""
    children, descriptors, threads = _children(), _descriptors(), set(threading.enumerate())
    yield
    complaints = [f"thread {thread.name}" for thread in _join(set(threading.enumerate()) - threads)]
    if opened := _descriptors() - descriptors:
        gc.collect()  # only now: it costs more than everything else here
        opened &= _descriptors()
    complaints += [f"descriptor {number} -> {target}" for number, target in opened]
    complaints += [f"child process {_end(pid)}" for pid in _children() - children]
    if complaints:
        pytest.fail("the test left behind: " + "; ".join(complaints), pytrace=False)


@pytest.fixture(autouse=True)
def _no_task_is_left(request: pytest.FixtureRequest, _nothing_is_left: None) -> None:
    """Has a look at the loop of a test that is a coroutine function; others get none because of us."""
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_loop_is_empty")


@pytest.fixture
async def _loop_is_empty() -> AsyncIterator[None]:
    """No task more than before the test: each one has an owner that waited for it."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)  # what was waited for may still have its last callbacks to run
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        pytest.fail(f"the test left tasks behind: {', '.join(map(repr, left))}", pytrace=False)


def _children() -> set[int]:
    """This process's children, those that ended and were not waited for included."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return found


def _descriptors() -> set[tuple[str, str]]:
    """Open descriptors with what they lead to, so that a number that was used again counts as new."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def _join(threads: set[threading.Thread]) -> set[threading.Thread]:
    for thread in threads:
        thread.join(_THREAD_LIMIT)
    return {thread for thread in threads if thread.is_alive()}


def _end(pid: int) -> str:
    """Kills a child that a test left, or the next tests would suffer from it; says what it was."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return f"{pid} ({command.strip() or 'ended, and nobody waited for it'})"
