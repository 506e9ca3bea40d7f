"""Events that the machine must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from supervisor.core import events as ev
from supervisor.core.run import IllegalEvent, step
from supervisor.core.state import BEFORE_THE_END, RANK_TABLE, RUN_TABLE, RunState
from tests.simulation.plans import Pick
from tests.simulation.world import World

OF_RANKS: tuple[ev.RankEvent, ...] = (
    ev.StepSpawned(0, 1, "step"),
    ev.StepRefused(0, "no"),
    ev.Hello(0, "h", 1, None, None, "3.11"),
    ev.RankStarted(0, 1),
    ev.RankRefused(0, "exec", 2, "no"),
    ev.RankEnded(0, 0, None),
    ev.TreeGone(0, 0),
    ev.AgentSignalled(0, 15),
    ev.RankSilent(0, 20.0),
    ev.RankHeard(0),
    ev.StepEnded(0, 0),
    ev.Swept(0, 0, 0),
)
OF_THE_RUN: tuple[ev.Event, ...] = (
    ev.RunOpened("1", "1", "/run", "/run/m", ["n0"], "local", "n0", 1, {}),
    ev.TimeLimitKnown(1.0, ""),
    ev.StopRequested("TERM"),
    ev.TimerFired("run"),
    ev.EngineFault(""),
    ev.MarkerRead("none"),
    ev.MarkerPublished(0, "written"),
    ev.MarkerFailed(""),
    ev.ArtifactsLooked(),
    ev.CheckerFault("", ""),
    ev.Collected(),
)


def illegal_events(state: RunState) -> Iterator[ev.Event]:
    """Every event of the samples above that is illegal now."""
    for rank in state.ranks:
        for event in OF_RANKS:
            if state.phase not in BEFORE_THE_END or rank.phase not in RANK_TABLE[type(event)]:
                yield replace(event, rank=rank.rank)
    yield from (replace(event, rank=number) for event in OF_RANKS for number in (-1, len(state.ranks)))
    yield from (event for event in OF_THE_RUN if state.phase not in RUN_TABLE[type(event)])
    yield ev.ArtifactSeen("no such contract", "valid")
    for contract in state.contracts:
        if not contract.final:
            yield ev.ArtifactSeen(contract.contract, "no such answer")


def refuse(world: World, pick: Pick) -> None:
    """An illegal event raises with the run's story, and changes nothing."""
    event = pick(list(illegal_events(world.state)))
    before = replace(world.state, deadlines=dict(world.state.deadlines))  # the only thing in it that is not frozen
    record = ev.Record(world.state.seq + 1, world.now, "2026-01-01T00:00:00.000Z", event)
    with pytest.raises(IllegalEvent) as raised:
        step(world.state, record)
    assert world.state == before
    assert event.name in str(raised.value) and f"run: {before.phase}" in str(raised.value)
