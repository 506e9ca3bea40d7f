"""Events and commands as a journal keeps them: complete, numbered once and for all, and the same when read again."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import commands as cmd
from supervisor.core import events as ev
from supervisor.core.run import HANDLERS
from supervisor.core.state import RANK_TABLE, RUN_TABLE
from supervisor.core.story import SENTENCES, tell, timeline

NUMBERS = {
    "RunOpened": 1,
    "TimeLimitKnown": 2,
    "StopRequested": 3,
    "TimerFired": 4,
    "Noted": 5,
    "EngineFault": 6,
    "StepSpawned": 20,
    "StepRefused": 21,
    "Hello": 22,
    "RankStarted": 23,
    "RankRefused": 24,
    "RankEnded": 25,
    "TreeGone": 26,
    "AgentSignalled": 27,
    "RankSilent": 28,
    "RankHeard": 29,
    "StepEnded": 30,
    "Swept": 31,
    "MarkerRead": 40,
    "MarkerPublished": 41,
    "MarkerFailed": 42,
    "WatchChanged": 60,
    "ArtifactSeen": 50,
    "ArtifactsLooked": 51,
    "CheckerFault": 52,
    "Collected": 53,
}
"""Written down a second time on purpose: a number, once given, is never given to another kind."""

UNTOLD = {ev.StepSpawned, ev.ArtifactsLooked}
"""Kinds that only the machine needs."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(st.text(), JSON, max_size=3)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
    NoneType: st.none(),
    list[str]: st.lists(st.text(), max_size=3),
    ev.JsonObject: OBJECT,
    list[ev.JsonObject]: st.lists(OBJECT, max_size=3),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    return VALUES[hint] if hint in VALUES else st.one_of([VALUES[each] for each in get_args(hint)])


def events_of(kind: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{item.name: values_of(hints[item.name]) for item in fields(kind)})


ANY_EVENT = st.sampled_from(sorted(ev.KINDS)).flatmap(lambda name: events_of(ev.KINDS[name]))


def kinds_below(kind: type[ev.Event]) -> set[type[ev.Event]]:
    """Every event class of a run that is no mere base of others. (An allocation's book has kinds of its own.)"""
    below = [each for each in kind.__subclasses__() if each.__module__ == ev.__name__]
    return {kind} if not below else {each for sub in below for each in kinds_below(sub)}


def test_every_kind_is_known_numbered_and_handled() -> None:
    assert {name: kind.number for name, kind in ev.KINDS.items()} == NUMBERS
    assert set(ev.KINDS.values()) == kinds_below(ev.Event) == set(HANDLERS)


def test_every_kind_has_one_table_that_permits_it() -> None:
    of_ranks = {kind for kind in ev.KINDS.values() if issubclass(kind, ev.RankEvent)}
    assert set(RANK_TABLE) == of_ranks
    assert set(RUN_TABLE) == set(ev.KINDS.values()) - of_ranks


@given(ANY_EVENT)
def test_an_event_survives_its_journal_line(event: ev.Event) -> None:
    line = json.dumps(ev.encode(event))
    assert "\n" not in line
    assert ev.decode(json.loads(line)) == event


@given(ANY_EVENT)
def test_fields_of_a_newer_version_are_left_out(event: ev.Event) -> None:
    assert ev.decode({**ev.encode(event), "seq": 1, "utc": "", "at": 0.5, "added": []}) == event


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "unknown event None"),
        ({"event": "Rumour"}, "unknown event 'Rumour'"),
        ({"event": "Event"}, "unknown event 'Event'"),
        ({"event": "RankEvent", "rank": 1}, "unknown event 'RankEvent'"),
        ({"event": ["Hello"]}, "unknown event"),
        ({"event": "TreeGone", "rank": 1}, "TreeGone: .*'killed'"),
        ({"event": "TreeGone", "rank": "1", "killed": 0}, "TreeGone: rank is '1'"),
        ({"event": "TreeGone", "rank": True, "killed": 0}, "TreeGone: rank is True"),
        ({"event": "TreeGone", "rank": None, "killed": 0}, "TreeGone: rank is None"),
        ({"event": "RankSilent", "rank": 1, "seconds": False}, "RankSilent: seconds is False"),
        ({"event": "Collected", "files": {}}, "Collected: files is {}"),
    ],
)
def test_what_is_no_event_is_refused(data: ev.JsonObject, words: str) -> None:
    with pytest.raises(ev.UnknownEvent, match=words):
        ev.decode(data)


@pytest.mark.parametrize(
    "event", [ev.RankSilent(1, 15), ev.RankEnded(1, None, 9), ev.Noted("x", None), ev.RankEnded(1, 0, None, core=True)]
)
def test_whole_seconds_and_what_is_left_open_are_read(event: ev.Event) -> None:
    assert ev.decode(ev.encode(event)) == event


def test_a_line_of_an_older_version_lacks_fields_that_came_later() -> None:
    assert ev.decode({"event": "MarkerFailed", "error": "EIO"}) == ev.MarkerFailed("EIO", blocked=False, asked=0)


@pytest.mark.parametrize("kind", ev.KINDS.values())
def test_events_are_frozen(kind: type[ev.Event]) -> None:
    event = object.__new__(kind)
    for item in fields(kind):
        with pytest.raises(FrozenInstanceError):
            setattr(event, item.name, None)
    with pytest.raises(FrozenInstanceError):
        event.extra = 1  # type: ignore[attr-defined]


# --- in words ----------------------------------------------------------------------------------------------------


def test_every_kind_but_a_few_can_be_told() -> None:
    assert set(ev.KINDS.values()) - set(SENTENCES) == UNTOLD


@given(ANY_EVENT)
def test_a_sentence_is_one_line_about_its_event(event: ev.Event) -> None:
    text = tell(event)
    if type(event) in UNTOLD:
        assert text is None
    elif isinstance(event, ev.RankEvent) and text is not None:
        assert f"rank {event.rank}" in text


def test_the_timeline_counts_from_the_first_record() -> None:
    happened = [ev.StepSpawned(0, 1, "step"), ev.RankStarted(0, 2), ev.RankEnded(0, None, 11, core=True)]
    records = [ev.Record(seq, 50.0 + seq, f"t{seq}", event) for seq, event in enumerate(happened, 1)]
    assert timeline(records) == [
        {"seq": 2, "utc": "t2", "after": 1.0, "text": "rank 0 started (pid 2)"},
        {"seq": 3, "utc": "t3", "after": 2.0, "text": "rank 0 was killed by signal 11, core dumped"},
    ]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (ev.TreeGone(1, 0), None),
        (ev.TreeGone(1, 2), "rank 1: 2 left-over processes had to be killed"),
        (ev.TreeGone(1, 2, left=1), "rank 1: 1 of its processes could not be killed"),
        (ev.Swept(1, 0, -1, "no answer"), "rank 1: nobody could look for what it left: no answer"),
        (ev.Swept(1, 2, 0), "rank 1: searched its node, 2 left-over processes killed, 0 left"),
        (ev.MarkerRead("none"), None),
        (ev.MarkerRead("none", note=4), "a failed part was noted: code 4"),
        (ev.MarkerRead("marker", 0), "the marker says 0"),
        (ev.MarkerRead("garbage"), "what stands in the marker's place is no marker of this run (garbage)"),
        (ev.MarkerFailed("EIO", asked=3), "the marker could not be read: EIO"),
        (ev.MarkerFailed("ENOSPC"), "the marker was not published: ENOSPC"),
        (ev.Noted("a word"), "a word"),
        (ev.Noted("a word", 2), "rank 2: a word"),
        (ev.Collected([{}], ["no such file"]), "1 files collected or checksummed, 1 errors: no such file"),
    ],
)
def test_sentences(event: ev.Event, text: str | None) -> None:
    assert tell(event) == text


# --- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", cmd.Command.__subclasses__())
def test_every_command_can_be_journalled(kind: type[cmd.Command]) -> None:
    command = kind(**dict.fromkeys((item.name for item in fields(kind)), 1))
    data = json.loads(json.dumps(cmd.encode(command)))
    assert data.pop("command") == kind.__name__
    assert kind(**data) == command


def test_only_what_must_not_be_forgotten_waits_for_the_disk() -> None:
    """A stop never waits: no dead file system may keep GPUs burning."""
    assert set(cmd.DURABLE) == {cmd.StartStep, cmd.PublishMarker}
