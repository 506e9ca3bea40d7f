"""The engine's side of steps and marker, where a real run would take too long to show it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.layout import Layout
from supervisor.core.plan import parse_plan
from supervisor.core.run import step
from supervisor.core.state import RunState
from supervisor.engine import steps as module
from supervisor.engine.engine import Engine
from supervisor.engine.looker import Looker
from supervisor.engine.steps import Steps
from supervisor.launch.local import LocalLauncher

PLAN: dict[str, Any] = {
    "job": {"name": "t", "nodes": 1},
    "coordinator": {"rank": 0},
    "roles": {"client": {"ranks": 0, "command": ["true"]}},
}


def layout(directory: Path) -> Layout:
    return Layout(parse_plan(PLAN, "t"), "run-1", "run-1", str(directory), ("here",), "n0")


def opening(directory: Path) -> ev.RunOpened:
    return ev.RunOpened("run-1", "run-1", str(directory), f"{directory}/.done", ["here"], "local", "host", 1, PLAN)


def talking(directory: Path) -> RunState:
    """A run whose only agent has said hello."""
    state, _ = step(RunState(), ev.Record(1, 0.0, "", opening(directory)))
    state, _ = step(state, ev.Record(2, 0.0, "", ev.StepSpawned(0, 7, "s")))
    state, _ = step(state, ev.Record(3, 0.0, "", ev.Hello(0, "host", 8, None, None, "3.11")))
    return state


class Journal:
    async def durable(self) -> bool:
        return True


class Deaf:
    """A process that takes every line and answers none."""

    pid = 7

    def send(self, line: bytes) -> None:
        pass


def steps_of(directory: Path, posted: list[ev.Event]) -> Steps:
    state = talking(directory)
    where = layout(directory)
    looker = Looker(where, posted.append, frozenset)
    steps = Steps(where, LocalLauncher(), Journal(), posted.append, lambda: state, str(directory), looker)  # type: ignore[arg-type]
    steps._processes[0] = Deaf()  # type: ignore[assignment]
    steps._heard[0] = asyncio.get_running_loop().time()
    return steps


async def pinged(steps: Steps, posted: list[ev.Event], *, stopped: float) -> list[ev.Event]:
    """What a few rounds of pings post, when the whole engine stands still for `stopped` seconds in between."""
    pings = asyncio.create_task(steps.ping())
    await asyncio.sleep(0)
    time.sleep(stopped)  # noqa: ASYNC251 - that is the point: the loop does not run
    for _ in range(4):
        await asyncio.sleep(module.PING_EVERY)
        if posted:
            break
    pings.cancel()
    await asyncio.gather(pings, return_exceptions=True)
    return posted


async def test_an_agent_that_does_not_answer_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_EVERY", 0.05)
    monkeypatch.setattr(module, "SILENT_AFTER", 0.12)
    posted: list[ev.Event] = []
    found = await pinged(steps_of(tmp_path, posted), posted, stopped=0.0)
    assert isinstance(found[0], ev.RankSilent)


async def test_an_engine_that_stood_still_takes_nobody_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, a suspended job, a frozen machine: nobody was asked meanwhile."""
    monkeypatch.setattr(module, "PING_EVERY", 0.05)
    monkeypatch.setattr(module, "SILENT_AFTER", 0.25)
    posted: list[ev.Event] = []
    assert await pinged(steps_of(tmp_path, posted), posted, stopped=0.4) == []


async def test_processes_start_where_no_file_system_can_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[str | None] = []

    class Refused:
        @staticmethod
        async def start(*_: Any, cwd: str | None = None, **__: Any) -> None:
            places.append(cwd)
            raise OSError(2, "not here")

    monkeypatch.setattr(module, "StepProcess", Refused)
    posted: list[ev.Event] = []
    steps = steps_of(tmp_path, posted)
    steps._logs[0, "srun"] = 2
    await steps.search(0)
    state = steps._state()
    steps._state = lambda: replace(state, ranks=(replace(state.ranks[0], phase="issued"),))
    _, end = await steps.attend(0)
    assert isinstance(end, ev.StepRefused)
    assert places == ["/", "/"]


async def test_a_look_at_the_marker_that_fails_says_whose_look_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be taken for a publication that failed, which makes a success none."""
    engine = Engine(layout(tmp_path), LocalLauncher(), opening(tmp_path))
    posted: list[ev.Event] = []
    work: list[Any] = []

    def stale(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(engine, "post", posted.append)
    monkeypatch.setattr(engine, "_help", lambda _, coroutine: work.append(coroutine))
    monkeypatch.setattr("supervisor.engine.markers.read", stale)
    engine._read_marker(cmd.ReadMarker(41))
    await work[0]()
    (failed,) = posted
    assert isinstance(failed, ev.MarkerFailed)
    assert failed.asked == 41


def test_the_environment_of_a_plan_is_not_journalled() -> None:
    from supervisor.cli.run import _journalled

    env: Mapping[str, str] = {"TOKEN": "secret"}
    plan = {**PLAN, "roles": {"client": {**PLAN["roles"]["client"], "env": env}}}
    journalled = _journalled(plan, parse_plan(plan, "t"))
    assert "secret" not in repr(journalled)
    assert parse_plan(journalled, "t").role_of(0).env.keys() == env.keys()
    assert plan["roles"]["client"]["env"] == env
