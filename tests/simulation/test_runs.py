"""The machine alone, in every world: whatever happens, in whatever order, the laws of `laws.py` hold and the run ends.

Two drivers of the same world. Hypothesis looks for short stories that break a law and shrinks them; seeded walks are
many, long and cheap, and what a failing one prints (its plan and its records) is a story too. ALLOCD_THOROUGH=1 makes
both of them stubborn.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.simulation import laws
from tests.simulation.illegal import refuse
from tests.simulation.plans import Pick, plan_data
from tests.simulation.world import World

THOROUGH = bool(os.environ.get("ALLOCD_THOROUGH"))
EXAMPLES, STEPS = (2000, 80) if THOROUGH else (40, 30)
WALKS, BATCHES = (2000, 20) if THOROUGH else (80, 5)
PAUSES = (0.01, 1.0, 5.0, 20.0)

pytestmark = pytest.mark.timeout(3600 if THOROUGH else 120)

T = TypeVar("T")


def seeded(rng: random.Random) -> Pick:
    def pick(options: Sequence[T]) -> T:
        return rng.choice(options)

    return pick


def drawn(data: st.DataObject) -> Pick:
    def pick(options: Sequence[T]) -> T:
        return data.draw(st.sampled_from(options))

    return pick


def finish(world: World, pick: Pick, silent: bool) -> None:
    """Whatever has happened so far, the run comes to its end, in a world that answers or in one that is silent."""
    if silent:
        world.finish_silent()
    else:
        world.finish_answering(pick)
    laws.hold_at_the_end(world)
    refuse(world, pick)


class AnyWorld(RuleBasedStateMachine):
    """Hypothesis chooses the plan and what happens."""

    world: World

    @initialize(data=st.data(), kind=st.booleans(), lazy=st.booleans(), silent=st.booleans(), seed=st.integers(0, 999))
    def open(self, data: st.DataObject, kind: bool, lazy: bool, silent: bool, seed: int) -> None:
        self.world = World(plan_data(drawn(data)), kind, lazy)
        self.silent, self.rest = silent, seeded(random.Random(seed))
        self.world.open()

    @precondition(lambda self: self.world.moves())
    @rule(data=st.data(), several=st.integers(1, 10))
    def move(self, data: st.DataObject, several: int) -> None:
        for _ in range(several):
            if moves := self.world.moves():
                moves[drawn(data)(sorted(moves))](drawn(data))

    @precondition(lambda self: self.world.disturbances())
    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        disturbances = self.world.disturbances()
        disturbances[drawn(data)(sorted(disturbances))](drawn(data))

    @precondition(lambda self: not self.world.over)
    @rule(seconds=st.sampled_from(PAUSES))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(kind=st.booleans())
    def turn_kind(self, kind: bool) -> None:
        self.world.kind = kind

    @rule(data=st.data())
    def send_something_illegal(self, data: st.DataObject) -> None:
        refuse(self.world, drawn(data))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            finish(self.world, self.rest, self.silent)


TestAnyWorld = AnyWorld.TestCase
TestAnyWorld.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,  # a busy machine is no failure
    suppress_health_check=list(HealthCheck),
)


def walk(seed: int) -> World:
    """A random walk through a world of a random temper: from one where hardly anything goes wrong to one where hardly
    anything goes right."""
    rng = random.Random(seed)
    pick = seeded(rng)
    world = World(plan_data(pick), kind=rng.random() < 0.7, lazy=rng.random() < 0.1)
    world.open()
    trouble, illness = rng.random() ** 4, rng.choice((0.0, 0.05))
    for _ in range(rng.choice((5, 20, 60))):
        if rng.random() < 0.03:
            world.kind = not world.kind
        if rng.random() < illness:
            refuse(world, pick)
        _one_step(world, pick, rng.random(), trouble)
    finish(world, pick, silent=rng.random() < 0.4)
    return world


def _one_step(world: World, pick: Pick, chance: float, trouble: float) -> None:
    moves = world.moves()
    if world.over:
        return
    if chance < 0.1 or not moves:
        world.pass_time(pick(PAUSES))
        return
    choice: dict[str, Any] = world.disturbances() if chance < 0.1 + 0.3 * trouble else moves
    choice[pick(sorted(choice))](pick)


@functools.cache
def reached(seed: int) -> frozenset[str]:
    """What a walk has come to, in words of the machine's."""
    try:
        state = walk(seed).state
    except Exception as error:
        error.add_note(f"walk({seed}) of tests/simulation/test_runs.py")
        raise
    assert state.decision is not None
    words = {
        state.decision.reason,
        *(failure.what for failure in state.failures),
        *(rank.phase for rank in state.ranks),
    }
    return frozenset(words if state.failures or state.doubts else words | {"success"})


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=() if batch < 2 else pytest.mark.slow) for batch in range(BATCHES)]
)
def test_walks(batch: int) -> None:
    for seed in range(batch * WALKS, (batch + 1) * WALKS):
        reached(seed)


def test_walks_see_every_kind_of_end() -> None:
    """A simulation that never gets anywhere holds every law: what its walks reach is looked at too."""
    seen = frozenset().union(*map(reached, range(2 * WALKS)))
    assert seen >= {"completed", "peer_failed", "stop_requested", "deadline", "time_limit", "artifacts_invalid"}
    assert seen >= {"success", "exit", "signal", "not_started", "no_hello", "step_lost", "rank_lost", "marker"}
    assert seen >= {"artifact", "late", "fault", "over", "abandoned"}
