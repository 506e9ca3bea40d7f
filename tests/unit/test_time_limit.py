"""When the allocation ends, on the monotonic clock of the engine's host."""

from __future__ import annotations

import asyncio
import time

import pytest

from supervisor.core import events as ev
from supervisor.core.state import RunState
from supervisor.engine.time_limit import TimeLimit


class Slurm:
    """Tells one EndTime after another; None: it does not answer."""

    def __init__(self, *ends: float | None) -> None:
        self._ends = iter(ends)

    async def end_time(self) -> float | None:
        return next(self._ends)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_clock_that_is_set_moves_no_limit(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    def post(event: ev.Event) -> None:
        assert isinstance(event, ev.TimeLimitKnown)
        told.append(event.end_at - asyncio.get_running_loop().time())

    wall = time.time()
    limit = TimeLimit(Slurm(wall + 600, wall + 600, None, wall + 900, wall + 300), post, RunState)
    await limit.read()
    monkeypatch.setattr(time, "time", lambda: wall + step)
    for _ in range(4):
        await limit.read()
    assert told == pytest.approx([600, 900, 300], abs=5)
