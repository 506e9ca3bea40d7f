"""The machine of an allocation that the service holds, in every order of events, with a world that may be killed at any
moment: whatever happens, the laws hold, and it comes to its end.

The world is as large as the laws need: sbatch that may have made a job or not, whoever looks at it later; scancel that
fails; Slurm that shows states in any order; a daemon that forgets everything but the events.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core import duties, keeping
from supervisor.core import kept_events as ev
from supervisor.core.duties import Duty
from supervisor.core.events import Event, decode, encode
from supervisor.core.keeping import IllegalEvent
from supervisor.core.kept import Kept, unit_of

EXAMPLES = 3000 if os.environ.get("ALLOCD_THOROUGH") else 300
VERDICT = {"outcome": "failure", "code": 7, "origin": "slurm", "reason": "exit", "summary": "x"}


class World:
    """One allocation, whoever carries out its duties, and Slurm. `pick` chooses among what can happen."""

    def __init__(self, kind: str, rng: random.Random) -> None:
        self.kind, self.rng = kind, rng
        self.events: list[Event] = []
        self.state = Kept()
        self.under_way: dict[str, Duty] = {}
        self.begun: dict[str, Duty] = {}
        self.asking = ""  # directory of an sbatch that runs
        self.jobs: list[str] = []  # all that Slurm has ever made for it, by directory
        self.made: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.cancel_asked = False
        self.tasks = rng.choice([0, 3])
        self.told: list[str] = []  # runs whose engines took a stop
        self.numbers = itertools.count(1)
        jobid = "" if kind == "submitted" else "1"
        self.hear(ev.Accepted(kind, "bench", jobid=jobid))

    def hear(self, event: Event) -> None:
        assert decode(encode(event), ev.KINDS) == event
        before = self.state
        self.state, wanted = keeping.step(before, event)
        assert before.phase != "ended", "an end is final"
        assert keeping.fold([*self.events, event]) == self.state
        assert len({duty.slot for duty in wanted}) == len(wanted), "one duty a slot"
        self.events.append(event)
        self.take_up()

    def take_up(self) -> None:
        if self.state.phase == "ended":
            self.under_way.clear()
            return
        for duty in duties.duties(self.state):
            if duty.slot not in self.under_way and self.begun.get(duty.slot) != duty:
                self.under_way[duty.slot] = self.begun[duty.slot] = duty

    def done(self, slot: str) -> None:
        self.under_way.pop(slot, None)
        self.take_up()

    @property
    def units(self) -> list[str]:
        """The job, or the tasks of the array."""
        return [f"{self.state.jobid}_{task}" for task in range(self.tasks)] or [self.state.jobid]

    # --- what can happen ----------------------------------------------------------------------------------------------

    def die(self) -> None:
        """The daemon is killed and started anew; sbatch may be through, and may not."""
        if self.asking and self.rng.random() < 0.5:
            self.make(self.asking)
        self.asking = ""
        self.under_way, self.begun = {}, {}
        self.state = keeping.fold(self.events)
        self.take_up()

    def make(self, directory: str) -> str:
        assert directory not in self.made
        job = str(100 + len(self.jobs))
        self.jobs.append(job)
        self.made[directory] = job
        return job

    def someone_asks(self) -> None:
        how = self.rng.choice(["stop", "cancel"])
        if self.kind != "submitted":
            how = "stop"
        part = self.rng.choice(["", *self.state.units]) if self.tasks else ""
        if self.state.is_asked(how, part) or self.state.verdict:
            return
        self.cancel_asked |= how == "cancel" and not part
        self.hear(ev.StopAsked(how, part))

    def act(self) -> None:
        """One of the duties that are under way gets on."""
        duty = self.under_way[self.rng.choice(sorted(self.under_way))]
        if duty.slot != "start" and duty not in duties.duties(self.state):  # who carries it out looks first
            self.begun.pop(duty.slot)
            self.done(duty.slot)
            return
        getattr(self, f"_{type(duty).__name__.lower()}")(duty)

    def _submit(self, duty: duties.Submit) -> None:
        if not self.state.begun:
            assert not self.jobs, "a plan is submitted again only when there is no job"
            self.hear(ev.SubmissionBegun(f"d{next(self.numbers)}"))
            if self.state.stopping:
                self.answer("absent")
            else:
                self.asking = self.state.directory
            return
        outcome = self.rng.choice(["submitted", "submitted", "refused", "unreached", "absent", "unknown"])
        if outcome == "submitted" or (outcome == "unknown" and self.rng.random() < 0.5):
            self.make(self.asking)
        self.asking = ""
        self.answer(outcome)
        self.done("start")

    def answer(self, outcome: str) -> None:
        job = self.made.get(self.state.directory)
        self.hear(ev.SubmissionEnded(outcome, [job] if outcome == "submitted" and job else [], words="so it is"))

    def _settle(self, duty: duties.Settle) -> None:
        found = duty.directory in self.made
        outcome = self.rng.choice(["unknown", "submitted" if found else self.rng.choice(["absent", "unreached"])])
        self.answer(outcome)
        self.done("start")

    def _hurry(self, duty: duties.Hurry) -> None:
        self.under_way.pop("hurry")

    def _start(self, duty: duties.Start) -> None:
        if not self.state.begun:
            self.hear(ev.EngineBegun())
        elif self.rng.random() < 0.3:
            self.hear(ev.EngineRefused(78, "no"))
        else:
            self.hear(ev.EngineStarted("1.s1", "/run/1.s1", 5))
            self.done("start")

    def _follow(self, duty: duties.Follow) -> None:
        chance = self.rng.random()
        unit, run_id = self.rng.choice(self.units), self.rng.choice(list(self.state.runs) or [""])
        if chance < 0.4:
            word = self.rng.choice(["PENDING", "RUNNING", "COMPLETING", "FAILED", "REQUEUED", "STRANGE"])
            self.hear(ev.StateSeen(unit, word))
        elif chance < 0.6 and len(self.state.runs) < 10:
            attempt = sum(unit_of(run_id) == unit for run_id in self.state.runs)
            self.hear(ev.RunSeen(f"{unit}.r{attempt}" if attempt else unit, "/run"))
        elif chance < 0.7 and run_id:
            self.hear(ev.RunTold(run_id, self.state.runs[run_id].told + 1, "Hello", "hello"))
        elif chance < 0.75 and run_id:
            self.hear(ev.RunOver(run_id))
        elif chance < 0.85 and (not self.cancel_asked or self.cancelled) and not self.state.to_stop:
            self.end()

    def end(self) -> None:
        self.hear(ev.JobEnded(self.state.jobid, "settled", "FAILED"))
        self.hear(ev.Sealed(VERDICT))
        self.done("follow")

    def _attend(self, duty: duties.Attend) -> None:
        if self.rng.random() < 0.5:
            self.hear(ev.Sealed(VERDICT))
            self.done("follow")

    def _cancel(self, duty: duties.Cancel) -> None:
        assert self.kind == "submitted"
        assert not set(duty.jobs) & set(self.state.cancelled), "nothing is cancelled twice, unless somebody asks again"
        if self.state.stopping == "cancel":
            assert set(duty.jobs) == set(self.jobs) - set(self.state.cancelled)
        self.scancel(duty.jobs)

    def _cancelagain(self, duty: duties.CancelAgain) -> None:
        assert set(self.state.uncancelled) <= self.cancelled
        self.scancel(self.state.uncancelled)

    def scancel(self, jobs: Sequence[str]) -> None:
        taken = [job for job in jobs if self.rng.random() < 0.5]
        self.cancelled |= set(taken)
        self.hear(ev.CancelTried("" if len(taken) == len(jobs) else "no", taken))
        self.done("cancel")

    def _stopengines(self, duty: duties.StopEngines) -> None:
        for run_id in self.state.to_stop:
            assert "stop" in (self.state.stopping, self.state.parts.get(unit_of(run_id)))
            assert self.state.runs[run_id].live
            if self.rng.random() < 0.5:
                self.told.append(run_id)
                self.hear(ev.StopTried("", run_id))
        if left := self.state.to_stop:
            self.hear(ev.StopTried("no", left[0]))
        self.done("stop")

    def _copy(self, duty: duties.Copy) -> None:
        self.hear(ev.Copied([]))

    def move(self) -> None:
        chance = self.rng.random()
        if self.state.phase == "queued":
            self.hear(ev.Admitted())
        elif chance < 0.05:
            self.someone_asks()
        elif chance < 0.1:
            self.die()
        elif chance < 0.13:
            self.hear(ev.Troubled(self.rng.choice(["", "dark"])))
        else:
            assert self.under_way, f"nobody does anything: {self.state}"
            self.act()


def live(kind: str, seed: int) -> World:
    """A whole life."""
    world = World(kind, random.Random(seed))
    for _ in range(2000):
        if world.state.phase == "ended":
            break
        world.move()
    assert world.state.phase == "ended", f"it never ends: {world.state}"
    return world


@settings(max_examples=EXAMPLES)
@given(kind=st.sampled_from(["submitted", "adopted", "followed"]), seed=st.integers(0, 1 << 32))
def test_the_laws_hold(kind: str, seed: int) -> None:
    world = live(kind, seed)
    state = world.state
    assert state.verdict is not None
    assert len(world.jobs) <= 1, "at most one job"
    if world.jobs:
        assert state.jobs == tuple(world.jobs), "no job is forgotten"
    assert len(world.told) == len(set(world.told)), "no engine is told twice"
    whole = {name for name in world.cancelled if "_" not in name}
    assert whole == (set(world.jobs) if world.cancel_asked else set()), "a cancel is never lost"
    admitted = [event for event in world.events if isinstance(event, ev.Admitted)]
    assert len(admitted) <= 1


def test_lives_come_to_every_kind_of_end() -> None:
    """A simulation that never gets anywhere holds every law."""
    ends = {
        (live(kind, seed).state.verdict or {})["reason"] for kind in ("submitted", "adopted") for seed in range(300)
    }
    assert ends == {"cancelled", "refused", "not_submitted", "not_started", "exit"}


@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_an_illegal_event_changes_nothing(seed: int, data: st.DataObject) -> None:
    world = live("submitted", seed)
    cut = data.draw(st.integers(0, len(world.events)))
    state = keeping.fold(world.events[:cut])
    for event in STRANGE:
        if type(event) in keeping.TABLE and state.phase in keeping.TABLE[type(event)]:
            continue
        with pytest.raises(IllegalEvent, match=event.name):
            keeping.step(state, event)


STRANGE: tuple[Event, ...] = (
    ev.Accepted("submitted", "x"),
    ev.Admitted(),
    ev.SubmissionBegun("d"),
    ev.SubmissionEnded("absent"),
    ev.StateSeen("1", "RUNNING"),
    ev.RunSeen("1", "/x"),
    ev.StopAsked("stop"),
    ev.CancelTried(),
    ev.Sealed(VERDICT),
    ev.Copied(),
    ev.Troubled("x"),
)


@pytest.mark.parametrize(
    ("events", "event"),
    [
        ([ev.Accepted("submitted", "x"), ev.Admitted()], ev.SubmissionEnded("absent")),
        ([ev.Accepted("submitted", "x"), ev.Admitted(), ev.SubmissionBegun("d")], ev.SubmissionBegun("e")),
        ([ev.Accepted("submitted", "x"), ev.Admitted(), ev.SubmissionBegun("d")], ev.SubmissionEnded("submitted")),
        ([ev.Accepted("followed", "x", jobid="1")], ev.StopAsked("cancel")),
        ([ev.Accepted("followed", "x", jobid="1")], ev.RunTold("1", 1, "Hello", "hello")),
        ([ev.Accepted("followed", "x", jobid="1")], ev.Copied()),
        ([ev.Accepted("followed", "x", jobid="1"), ev.Sealed(VERDICT)], ev.StopAsked("stop")),
        ([ev.Accepted("followed", "x", jobid="1"), ev.Sealed(VERDICT)], ev.Sealed(VERDICT)),
        ([ev.Accepted("followed", "x", jobid="1"), ev.StopAsked("stop")], ev.CancelTried()),
        ([ev.Accepted("adopted", "x", jobid="1"), ev.Admitted()], ev.SubmissionBegun("d")),
        ([ev.Accepted("submitted", "x"), ev.Admitted()], ev.EngineBegun()),
    ],
)
def test_what_the_table_alone_does_not_forbid(events: list[Event], event: Event) -> None:
    state = keeping.fold(events)
    with pytest.raises(IllegalEvent):
        keeping.step(state, event)


def test_numbers_are_never_given_twice() -> None:
    numbers: list[Any] = [kind.number for kind in ev.KINDS.values()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    ("words", "phase"),
    [
        (["PENDING"], "pending"),
        (["RUNNING"], "running"),
        (["RUNNING", "PENDING"], "pending"),
        (["COMPLETING"], "ending"),
        (["FAILED", "RUNNING"], "pending"),
        (["NONSENSE"], "running"),
    ],
)
def test_what_slurm_says_and_what_was_seen(words: list[str], phase: str) -> None:
    """A run was seen before these words; one that waits again has no run of this attempt."""
    state = keeping.fold([ev.Accepted("followed", "x", jobid="1"), ev.RunSeen("1", "/r")])
    for word in words:
        state, _ = keeping.step(state, ev.StateSeen("1", word))
    assert state.phase == ("running" if words == ["FAILED", "RUNNING"] else phase)


# --- arrays and attempts ----------------------------------------------------------------------------------------------

ARRAY: list[Event] = [
    *(ev.Accepted("submitted", "x"), ev.Admitted(), ev.SubmissionBegun("d"), ev.SubmissionEnded("submitted", ["7"])),
    *(ev.StateSeen(f"7_{task}", "RUNNING") for task in range(3)),
    *(ev.RunSeen(f"7_{task}", f"/run/7_{task}") for task in range(3)),
]


def wanted(*events: Event, before: list[Event] = ARRAY) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Whose engines are to be told to stop after these events, and what is to be cancelled."""
    state = keeping.fold([*before, *events])
    found = {type(duty) for duty in duties.duties(state)}
    assert (bool(state.to_stop), bool(state.to_cancel)) == (duties.StopEngines in found, duties.Cancel in found)
    return state.to_stop, state.to_cancel


def test_a_stop_of_an_array_reaches_every_task_that_lives() -> None:
    stop = ev.StopAsked("stop")
    assert wanted(stop)[0] == ("7_0", "7_1", "7_2")
    assert wanted(stop, ev.RunOver("7_2"))[0] == ("7_0", "7_1"), "the one that was seen last is over"
    assert wanted(stop, ev.StateSeen("7_0", "FAILED"))[0] == ("7_1", "7_2")
    assert wanted(ev.StateSeen("7_3", "PENDING"), stop)[0] == ("7_0", "7_1", "7_2"), "another one waits"
    assert wanted(stop, ev.StopTried("", "7_1"))[0] == ("7_0", "7_2")
    told = [ev.StopTried("", f"7_{task}") for task in range(3)]
    assert wanted(stop, *told)[0] == ()
    assert wanted(stop, *told, ev.RunSeen("7_3", "/run/7_3"))[0] == ("7_3",), "it begins later"


def test_a_stop_or_a_cancel_of_a_task_is_that_tasks_alone() -> None:
    assert wanted(ev.StopAsked("stop", "7_0")) == (("7_0",), ())
    assert wanted(ev.StopAsked("cancel", "7_0")) == ((), ("7_0",))
    assert wanted(ev.StopAsked("cancel", "7_0"), ev.CancelTried("", ["7_0"])) == ((), ())
    assert wanted(ev.StopAsked("cancel", "7_0"), ev.StopAsked("stop")) == (("7_1", "7_2"), ("7_0",))
    assert wanted(ev.StopAsked("stop", "7_0"), ev.StopAsked("cancel", "7_0")) == ((), ("7_0",))
    assert wanted(ev.StopAsked("cancel", "7_0"), ev.CancelTried("", ["7_0"]), ev.StopAsked("cancel")) == ((), ("7",))
    with pytest.raises(IllegalEvent, match="nobody has seen this part"):
        wanted(ev.StopAsked("stop", "7_9"))


def test_a_cancel_that_had_no_effect_is_sent_again_after_a_while_or_when_asked_for_again() -> None:
    def again(*events: Event) -> list[float]:
        found = duties.duties(keeping.fold([*ARRAY, ev.StopAsked("cancel"), ev.CancelTried("", ["7"]), *events]))
        return [duty.after for duty in found if isinstance(duty, duties.CancelAgain)]

    assert (again(), again(ev.CancelTried("", ["7"]))) == ([60.0], [120.0])
    assert again(ev.CancelTried("no")) == [2.0]
    assert again(*(ev.StateSeen(f"7_{task}", "COMPLETING") for task in range(3))) == []
    taken = [ev.StopAsked("cancel"), ev.CancelTried("", ["7"])]
    assert wanted(*taken, ev.StopAsked("cancel")) == ((), ("7",))
    one = [ev.StopAsked("cancel", f"7_{task}") for task in range(2)]
    both = ev.CancelTried("", ["7_0", "7_1"])
    assert wanted(*one, both, ev.StopAsked("cancel", "7_1")) == ((), ("7_1",))
    assert keeping.fold([*ARRAY, *one, both, ev.StateSeen("7_0", "CANCELLED")]).uncancelled == ("7_1",)
    over = [ev.StateSeen(f"7_{task}", "COMPLETING") for task in range(3)]
    for events in ([ev.StopAsked("stop")], [*over, ev.StopAsked("cancel")]):
        with pytest.raises(IllegalEvent, match="asked already"):
            wanted(*taken, *events)


def test_a_stop_reaches_the_attempt_after_a_requeue_too() -> None:
    again = [ev.StateSeen("7_0", "PENDING"), ev.StateSeen("7_0", "RUNNING")]
    taken = [ev.StopAsked("stop", "7_0"), ev.StopTried("", "7_0")]
    assert wanted(*taken, *again) == ((), ())
    assert wanted(*taken, *again, ev.RunSeen("7_0.r1", "/run/7_0.r1")) == (("7_0.r1",), ())


def test_a_run_on_several_components_goes_on_while_one_of_them_lives() -> None:
    before: list[Event] = [
        *ARRAY[:4],
        *(ev.StateSeen(f"7+{part}", "RUNNING") for part in range(2)),
        ev.RunSeen("7", "/r"),
    ]
    stop = ev.StopAsked("stop")
    assert wanted(ev.StateSeen("7+0", "COMPLETED"), stop, before=before)[0] == ("7",)
    assert wanted(*(ev.StateSeen(f"7+{part}", "COMPLETED") for part in range(2)), stop, before=before)[0] == ()


@pytest.mark.parametrize("outcome", ["unreached", "absent", "refused"])
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_what_was_to_be_ended_is_not_submitted_again(how: str, outcome: str) -> None:
    state = keeping.fold([*ARRAY[:3], ev.StopAsked(how), ev.SubmissionEnded(outcome)])
    assert (state.phase, (state.verdict or {})["reason"]) == ("ended", "cancelled")


def test_books_of_before_tell_the_same() -> None:
    """Of a job without parts, a stop and a cancel that named neither runs nor jobs."""
    before: list[Event] = [*ARRAY[:4], ev.RunSeen("7", "/run/7")]
    assert wanted(ev.StopAsked("stop"), ev.StopTried(""), before=before) == ((), ())
    assert wanted(ev.StopAsked("cancel"), ev.CancelTried(""), before=before) == ((), ())
