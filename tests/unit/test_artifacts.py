"""The artifact machine: every event in every state, and any order of events."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import (
    FINAL,
    TRANSITIONS,
    ArtifactState,
    Event,
    FileFact,
    Finding,
    IllegalArtifactEvent,
    Instance,
    State,
    expire,
    few,
    initial,
    instances,
    observe,
    open_window,
)
from supervisor.core.plan import Plan, Role

ANSWERS = ("pending", "ranks_complete", "valid", "invalid")
EVENTS: tuple[Event, ...] = get_args(Event)
STATES: tuple[State, ...] = get_args(State)
START = ArtifactState("result", None)


def finding(answer: str, contract: str = "result") -> Finding:
    return Finding(contract, answer, (f"r.json: {answer}",), (FileFact("r.json", 3, None),))  # type: ignore[arg-type]


def send(state: ArtifactState, event: Event) -> ArtifactState:
    """The event through the function that a caller would use."""
    if event in ("deadline", "finalization"):
        return expire(state, event)
    return open_window(state) if event == "window" else observe(state, finding(event))


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ("valid", "complete", None),
        ("pending valid", "complete", None),
        ("window valid", "complete", None),
        ("invalid", "invalid", None),
        ("window invalid", "invalid", None),
        ("deadline", "late", "deadline"),
        ("window finalization", "late", "finalization"),
        ("window deadline", "late", "deadline"),
        ("window pending", "finalizing", None),
        ("ranks_complete", "ranks_complete", None),
        ("ranks_complete pending", "ranks_complete", None),
        ("ranks_complete window", "finalizing", None),
        ("ranks_complete window ranks_complete valid", "complete", None),
        ("ranks_complete deadline", "late", "deadline"),
        ("ranks_complete invalid", "invalid", None),
    ],
)
def test_paths_through_the_diagram(events: str, state: str, reason: str | None) -> None:
    reached = START
    for event in events.split():
        reached = send(reached, event)  # type: ignore[arg-type]
    assert (reached.state, reached.reason) == (state, reason)


@pytest.mark.parametrize(
    "events",
    [
        "finalization",  # no window is open
        "ranks_complete finalization",
        "window window",  # nothing reopens or restarts it
        "window pending window",
        *(f"{end} {event}" for end in ("valid", "invalid", "deadline") for event in EVENTS),
    ],
)
def test_illegal_events(events: str) -> None:
    *legal, last = events.split()
    state = START
    for event in legal:
        state = send(state, event)  # type: ignore[arg-type]
    before = replace(state)
    with pytest.raises(IllegalArtifactEvent, match=f"result: {last} while {state.state}"):
        send(state, last)  # type: ignore[arg-type]
    assert state == before


def test_the_table_is_complete_and_ends_where_it_says() -> None:
    assert set(TRANSITIONS) == set(STATES)
    assert {state for state, row in TRANSITIONS.items() if not row} == FINAL
    for row in TRANSITIONS.values():
        assert set(row) <= set(EVENTS)
    for state in set(STATES) - FINAL:
        assert {"valid", "invalid", "pending", "deadline"} <= set(TRANSITIONS[state])


@given(st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_order_of_events(events: list[Event]) -> None:
    state, window, end = START, 0, None
    for event in events:
        legal = event in TRANSITIONS[state.state]
        try:
            following = send(state, event)
        except IllegalArtifactEvent:
            assert not legal
            continue
        assert legal
        assert end is None, "a final state accepted an event"
        window += event == "window"
        assert (following.reason is not None) == (following.state == "late")
        if event in ANSWERS:
            assert following.finding == finding(event)
        else:
            assert following.finding == state.finding
        if following.final:
            end = following
        if state.state == "ranks_complete":
            assert following.state != "pending"
        state = following
    assert window <= 1
    assert end is None or state == end


def test_a_finding_about_another_contract_is_illegal() -> None:
    with pytest.raises(IllegalArtifactEvent, match="a finding about other"):
        observe(START, finding("valid", "other"))


def test_states_cannot_be_changed_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        START.state = "complete"  # type: ignore[misc]


def test_a_finding_survives_json() -> None:
    seen = Finding("r@1", "invalid", ("a", "b"), (FileFact("x/y.json", 12, "ab" * 32), FileFact("z", 0, None)))
    assert Finding.from_dict(json.loads(json.dumps(asdict(seen)))) == seen


def test_what_is_wrong_is_told_first_and_few() -> None:
    files = tuple(FileFact(f"{n}.json", 1, None, problems=(f"{n}.json: wrong",)) for n in range(150))
    missing = tuple(f"{n}.txt: found nothing" for n in range(150))
    seen = Finding("r", "invalid", (*missing, *(fact.problems[0] for fact in files)), files).told()
    assert (seen.problems[0], len(seen.problems), seen.problems[-1]) == ("0.json: wrong", 101, "and 200 more")
    assert seen.files == files
    assert few(seen.problems) == ("0.json: wrong", "1.json: wrong", "2.json: wrong", "and 297 more")
    assert few(few(seen.problems)) == few(seen.problems)
    assert few(["a", "b", "c"]) == ("a", "b", "c")


def test_only_files_that_changed_are_told() -> None:
    a, b, c = (FileFact(name, 1, None) for name in "abc")
    before = Finding("r", "pending", ("x",), (a, b))
    now = Finding("r", "pending", ("y",), (replace(a, size=2), c))
    changed, gone = now.since(before)
    assert (changed, gone) == (now.files, ("b",))
    assert replace(now, files=changed).after(before, gone) == now
    assert now.since(now) == ((), ())
    assert now.since(None) == (now.files, ())


def plan(*items: Artifact) -> Plan:
    client = Role("client", (1,), ("c",))
    workers = Role("workers", (0, 2, 3), ("w",))
    return Plan("job", 4, (client, workers), coordinator=1, artifacts=items)


def test_instances() -> None:
    run = Artifact("run", "r.json")
    every = Artifact("every", "e_{rank}.json", per="node")
    some = Artifact("some", "s_{rank}.json", per="node", roles=("workers",))
    assert instances(plan(every, run, some)) == (
        *(Instance(f"every@{rank}", every, rank, rank, 4) for rank in (0, 1, 2, 3)),
        Instance("run", run, None),
        *(Instance(f"some@{rank}", some, rank, node, 3) for node, rank in enumerate((0, 2, 3))),
    )
    assert instances(plan()) == ()


def test_the_coordinators_rank_is_no_node_of_a_self_benchmark_unless_a_role_says_so() -> None:
    every = Artifact("b", "b.json", contract="fpm", ranks_per_node=4)
    assert instances(plan(every)) == tuple(
        Instance(f"b@{rank}", every, rank, node, 3) for node, rank in enumerate((0, 2, 3))
    )
    named = replace(every, roles=("client",))
    assert instances(plan(named)) == (Instance("b@1", named, 1, 0, 1),)
    alone = Plan("job", 1, (Role("client", (0,), ("c",)),), coordinator=0, artifacts=(every,))
    assert instances(alone) == (Instance("b@0", every, 0, 0, 1),)


def test_the_initial_state_is_pending() -> None:
    state = initial(Instance("every@2", Artifact("every", "x", per="node"), 2))
    assert state == ArtifactState("every@2", 2, False, "pending", None, None)
    assert not state.final
