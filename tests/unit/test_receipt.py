"""The receipts: what they tell, and that a verdict can be derived from them again and not otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.core import events as ev
from supervisor.core.answers import Answer
from supervisor.core.identity import Known
from supervisor.core.layout import Layout
from supervisor.core.receipt import (
    NotAReceipt,
    changed_conclusions,
    contradicted,
    describe_end,
    replay,
    run_receipt,
    sealed_receipt,
)
from supervisor.core.run import fold
from supervisor.core.state import End
from supervisor.core.truth import Truth
from supervisor.core.two_books import decide
from tests.unit.test_run import RESULT, TERM, Run
from tests.unit.test_truth import NO_JOB, NO_ROW, book, live

SUCCESS = decide("7", [book("COMPLETED"), live("COMPLETED")])
FAILED_3 = decide("7", [book("FAILED", "3:0"), live("FAILED", "3:0")])
CANCELLED = decide("7", [book("CANCELLED by 0", "0:15"), live("CANCELLED", "0:15")])
ABSENT = decide("7", [NO_ROW, NO_JOB, NO_ROW, NO_JOB])


def saved(document: dict[str, Any]) -> dict[str, Any]:
    """The document as it comes back from its file."""
    loaded = json.loads(json.dumps(document, allow_nan=False))
    assert isinstance(loaded, dict)
    return loaded


def receipt(run: Run, **more: Any) -> dict[str, Any]:
    opened = run.state.opened
    assert opened is not None
    layout = Layout(run.state.the_plan, "7", "7", "/run", tuple(opened.nodes), "nonce")
    return saved(run_receipt(run.state, run.records, layout, versions={"allocd": "1"}, **more))


def completed(**plan: Any) -> Run:
    run = Run(artifacts=[RESULT], **plan).start()
    run.see()
    run.complete()
    run.wind_up()
    return run


def failed() -> Run:
    """Rank 1 ends with 3; the others are stopped."""
    run = Run().start()
    run.take(ev.RankEnded(1, 3, None), after=2.0)
    run.wind_up()
    return run


def sealed(run: Run | None, truth: Truth) -> dict[str, Any]:
    document = None if run is None else receipt(run)
    return saved(sealed_receipt(document, None if run is None else "ab12", "7", [truth], versions={"allocd": "1"}))


# --- what a run receipt tells ------------------------------------------------------------------------------------


def test_a_success_in_a_job_is_first_observed() -> None:
    document = receipt(completed())
    assert (document["verdict"]["outcome"], document["verdict"]["code"]) == ("success", 0)
    assert document["verdict"]["final"] is False
    assert "allocctl verify" in document["job_end"]
    assert document["status"] == {"native": "ok", "artifacts": "ok", "checker": "ok", "collection": "ok"}
    assert document["first_failure"] is None
    assert document["consequences"] == []


def test_without_slurm_the_verdict_is_final() -> None:
    run = failed()
    first = run.records[0]
    assert isinstance(first.event, ev.RunOpened)
    run.records[0] = replace(first, event=replace(first.event, launcher="local"))
    run.state = fold(run.records)
    document = receipt(run)
    assert document["verdict"]["final"] is True
    assert document["job_end"] == "no job"


def test_the_first_failure_and_what_fell_because_of_it_are_apart() -> None:
    document = receipt(failed())
    assert (document["first_failure"]["rank"], document["first_failure"]["code"]) == (1, 3)
    assert [(rank["rank"], rank["reason"]) for rank in document["consequences"]] == [
        (0, "peer_failed"),
        (2, "peer_failed"),
    ]
    assert document["consequences"][0]["text"] == "ended with code 0"
    assert document["status"]["native"] == "failed"
    assert document["seconds"] == 2.0


def test_what_never_started_and_what_ended_unseen_are_consequences() -> None:
    run = Run(run={"start": "each"}).connect(0, 1)
    run.take(ev.RankStarted(0, 1), ev.RankStarted(1, 1))
    run.end(1, 3)
    run.take(ev.StepEnded(0, 1), ev.Swept(0, 0, 0), ev.StepRefused(2, "a stop was decided first"))
    texts = {rank["rank"]: rank["text"] for rank in receipt(run)["consequences"]}
    assert texts == {0: "ended unseen", 2: "was never started"}


def test_ends_before_the_failure_are_no_consequences() -> None:
    run = Run(roles={2: {"may_finish": True}}).start()
    run.end(2, 0)
    run.end(1, 3)
    assert [rank["rank"] for rank in receipt(run)["consequences"]] == [0]


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (ev.TimerFired("hello:1"), {"native": "failed"}),
        (ev.CheckerFault("result", "a bug"), {"checker": "fault", "native": "ok"}),
        (ev.StopRequested("TERM"), {"native": "ok", "artifacts": "pending"}),
        (ev.ArtifactSeen("result", "invalid", ["wrong"], []), {"artifacts": "failed", "native": "ok"}),
        (ev.ArtifactSeen("result", "valid", [], []), {"artifacts": "ok"}),
    ],
)
def test_each_status_stands_by_itself(event: ev.Event, status: dict[str, str]) -> None:
    run = Run(artifacts=[RESULT])
    run.take(event)
    assert receipt(run)["status"].items() >= status.items()


def test_a_collection_error_hides_no_native_failure() -> None:
    run = Run(collect={"required": True}).start()
    run.end(1, 3)
    run.wind_up()
    last = run.records.pop()
    run.records.append(replace(last, event=ev.Collected([], ["no such file"])))
    run.state = fold(run.records)
    document = receipt(run)
    assert (document["verdict"]["code"], document["status"]["collection"]) == (3, "failed")
    assert document["not_collected"] == ["no such file"]


def test_a_receipt_folded_from_a_journal_is_never_a_success() -> None:
    document = receipt(completed(), engine_lost=True)
    assert (document["verdict"]["outcome"], document["verdict"]["code"]) == ("unverifiable", 75)


def test_a_receipt_can_be_made_while_the_run_runs() -> None:
    document = receipt(Run().start())
    assert document["verdict"]["outcome"] == "unverifiable"
    assert document["decision"] is None
    assert document["status"]["collection"] == "failed"


def test_the_timeline_tells_what_happened_in_order() -> None:
    lines = receipt(failed())["timeline"]
    assert [line["seq"] for line in lines] == sorted(line["seq"] for line in lines)
    ended = next(line for line in lines if line["text"] == "rank 1 ended with code 3")
    assert ended["after"] == 2.0


def test_every_rank_has_its_logs() -> None:
    document = receipt(completed(roles={2: {"agent": "off"}}))
    assert document["ranks"][1]["logs"]["srun"] == "/run/logs/rank-1.r1.srun"
    assert sorted(document["ranks"][2]["logs"]) == ["err", "out"]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (End(1, 1.0, 3, None), "ended with code 3"),
        (End(1, 1.0, None, TERM), "was killed by signal 15"),
        (End(1, 1.0, None, 11, core=True), "was killed by signal 11 (core dumped)"),
    ],
)
def test_ends_in_words(end: End, text: str) -> None:
    assert describe_end(end) == text


# --- sealing -----------------------------------------------------------------------------------------------------


def test_a_success_that_slurm_confirms_is_sealed() -> None:
    document = sealed(completed(), SUCCESS)
    assert document["verdict"]["outcome"] == "success"
    assert document["verdict"]["final"] is True
    assert document["run_sha256"] == "ab12"
    assert document["run"]["verdict"]["final"] is False


def test_a_success_that_slurm_denies_is_none() -> None:
    document = sealed(completed(), FAILED_3)
    assert (document["verdict"]["outcome"], document["verdict"]["code"]) == ("failure", 3)
    assert document["verdict"]["origin"] == "slurm"


def test_a_job_without_a_run_is_sealed_by_its_record() -> None:
    document = sealed(None, CANCELLED)
    assert (document["run"], document["run_id"], document["jobid"]) == (None, None, "7")
    assert document["verdict"]["code"] == 130


STEPS = ("COMPLETED|0:0", "FAILED|9:0", "COMPLETED|0:0")
"""What accounting says of the steps of ranks 0, 1 and 2."""


def with_steps(state: str, steps: Sequence[str]) -> Truth:
    """The truth about a job in that state, of whose steps accounting says so."""
    answer = book(state)
    rows = [f"7.{rank}|{end}||7.{rank}|1000|1001|1002|||node{rank}\n" for rank, end in enumerate(steps)]
    said = type(answer).from_dict({**answer.to_dict(), "stdout": answer.stdout + "".join(rows)})
    return decide("7", [said, live(state)])


def test_a_success_that_a_steps_record_contradicts_is_unproven() -> None:
    document = sealed(completed(), with_steps("COMPLETED", STEPS))
    assert document["disagreements"] == ["step 7.1 ended with 0; accounting says FAILED 9:0"]
    assert [raw.split("|")[0] for raw in document["steps"]] == ["7.0", "7.1", "7.2"]
    assert (document["verdict"]["outcome"], document["verdict"]["code"]) == ("unverifiable", 75)  # no agreement
    assert replay(document)[1]


def het(run: Run | None, *states: str) -> dict[str, Any]:
    """Sealed with a truth for each component: its state and code."""
    truths = []
    for number, text in enumerate(states):
        word, _, code = text.partition(" ")
        answers = [component(answer, number) for answer in (book(word, code or "0:0"), live(word, code or "0:0"))]
        truths.append(decide(f"7+{number}", answers))
    document = None if run is None else receipt(run)
    return saved(sealed_receipt(document, None if run is None else "ab12", "7", truths, versions={"allocd": "1"}))


def component(answer: Answer, number: int) -> Answer:
    """The same, told of component `number` of job 7."""
    text = answer.stdout.replace("JobId=7 ", f"JobId={7 + number} HetJobId=7 HetJobOffset={number} ")
    text = text.replace("|7|1000|", f"|7+{number}|1000|")
    return Answer.from_dict({**answer.to_dict(), "jobid": f"7+{number}", "stdout": text})


def test_every_component_must_have_ended_well() -> None:
    assert het(completed(), "COMPLETED", "COMPLETED")["verdict"]["outcome"] == "success"
    document = het(completed(), "COMPLETED", "FAILED 3:0")
    assert (document["verdict"]["outcome"], document["verdict"]["code"]) == ("failure", 3)
    assert document["slurm"]["jobid"] == "7+1"
    assert [each["jobid"] for each in document["components"]] == ["7+0", "7+1"]
    assert het(None, "COMPLETED", "RUNNING")["verdict"]["outcome"] == "unverifiable"
    # Slurm's own end of one component outranks what may follow from it in another.
    assert het(None, "FAILED 15:0", "TIMEOUT")["verdict"]["code"] == 124


def test_a_record_from_before_the_job_was_asked_for_proves_nothing() -> None:
    known = Known(asked=1e9, answered=1e9)
    document = saved(sealed_receipt(None, None, "7", [SUCCESS], versions={}, known=known))
    assert document["verdict"]["outcome"] == "unverifiable"
    assert "another job with this id" in document["verdict"]["summary"]
    assert replay(document)[1]
    document["known"] = {}
    assert not replay(document)[1]


def test_a_doubt_is_part_of_the_document() -> None:
    document = saved(sealed_receipt(None, None, "7", [SUCCESS], versions={}, doubts=("there may be more",)))
    assert (document["verdict"]["code"], document["verdict"]["summary"]) == (75, "there may be more")
    assert replay(document)[1]


def test_another_name_is_told() -> None:
    document = saved(sealed_receipt(None, None, "7", [SUCCESS], versions={}, known=Known(name="y")))
    assert document["verdict"]["outcome"] == "success"
    assert document["disagreements"] == ["the job was submitted as 'y', and Slurm calls it 'x': names can be changed"]


# --- replay ------------------------------------------------------------------------------------------------------

DOCUMENTS = {
    "success": lambda: receipt(completed()),
    "failure": lambda: receipt(failed()),
    "lost": lambda: receipt(failed(), engine_lost=True),
    "sealed success": lambda: sealed(completed(), SUCCESS),
    "denied": lambda: sealed(completed(), FAILED_3),
    "sealed failure": lambda: sealed(failed(), FAILED_3),
    "no run": lambda: sealed(None, CANCELLED),
    "unverifiable": lambda: sealed(completed(), ABSENT),
    "components": lambda: het(completed(), "COMPLETED", "COMPLETED"),
    "a component's failure": lambda: het(completed(), "COMPLETED", "FAILED 3:0"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_replay_agrees(name: str) -> None:
    document = DOCUMENTS[name]()
    verdict, same = replay(document)
    assert same
    assert verdict.as_dict() == document["verdict"]


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(("key", "value"), [("code", 99), ("outcome", "?"), ("origin", "?"), ("reason", "?")])
def test_a_changed_verdict_is_noticed(name: str, key: str, value: object) -> None:
    document = DOCUMENTS[name]()
    genuine = document["verdict"]["code"]
    document["verdict"][key] = value
    verdict, same = replay(document)
    assert not same
    assert verdict.code == genuine


def test_changed_evidence_is_noticed() -> None:
    document = sealed(failed(), FAILED_3)
    document["run"]["failures"].clear()
    assert replay(document)[1] is False
    document = sealed(failed(), FAILED_3)
    document["run"]["failures"][0]["code"] = 9
    assert replay(document)[1] is False
    document = sealed(completed(), SUCCESS)
    document["run"]["doubts"].append("something may be left")
    assert replay(document)[1] is False
    document = receipt(completed())
    document["completed"] = False
    assert replay(document)[1] is False


def test_changed_words_of_slurm_are_noticed() -> None:
    document = sealed(completed(), SUCCESS)
    for answer in document["slurm"]["answers"]:
        answer["stdout"] = answer["stdout"].replace("COMPLETED", "FAILED")
    verdict, same = replay(document)
    assert (verdict.outcome, same) == ("failure", False)


@pytest.mark.parametrize("place", [0, 1])
def test_a_changed_component_is_noticed(place: int) -> None:
    document = het(completed(), "COMPLETED", "COMPLETED")
    for answer in document["components"][place]["answers"]:
        answer["stdout"] = answer["stdout"].replace("COMPLETED", "CANCELLED")
    assert replay(document)[1] is False
    assert changed_conclusions(document)
    document = het(completed(), "COMPLETED", "FAILED 3:0")
    assert changed_conclusions(document) == []
    del document["components"][place]
    with suppress(NotAReceipt):
        assert replay(document)[1] is False
    document = het(completed(), "COMPLETED", "COMPLETED")
    document["slurm"] |= {"state": "FAILED"}
    assert changed_conclusions(document) == ["Slurm's answers say state 'COMPLETED', the receipt says 'FAILED'"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_receipt_follows_from_its_evidence(name: str) -> None:
    assert changed_conclusions(DOCUMENTS[name]()) == []


SEALED_KEYS = ("jobid", "run_id", "run_sha256", "known", "doubts", "steps", "steps_compared", "disagreements")


@pytest.mark.parametrize("key", SEALED_KEYS)
@pytest.mark.parametrize("value", [None, {}, "drop"])
def test_what_is_missing_is_noticed(key: str, value: object) -> None:
    document = sealed(failed(), FAILED_3) | {"run_sha256": "0" * 64}
    assert changed_conclusions(document) == []
    if value == "drop":
        del document[key]
    elif document[key] == value or (key, value) == ("run_sha256", {}):
        return
    else:
        document[key] = value
    assert changed_conclusions(document)


@pytest.mark.parametrize("key", ["jobid", "run_id"])
@pytest.mark.parametrize("value", [None, "", "8", 7])
def test_a_run_of_nobody_is_noticed(key: str, value: object) -> None:
    document = sealed(failed(), FAILED_3)
    document["run"][key] = value
    assert changed_conclusions(document)
    document = receipt(failed())
    document[key] = value
    assert bool(changed_conclusions(document)) == (value != "8")


def test_saved_conclusions_are_not_believed() -> None:
    document = sealed(completed(), FAILED_3)
    document["slurm"] |= {"code": 0, "state": "COMPLETED", "standing": "settled"}
    document["run"]["verdict"] = {"outcome": "failure"}
    verdict, same = replay(document)
    assert (verdict.code, same) == (3, True)


def test_what_a_newer_version_adds_is_no_reason_to_refuse() -> None:
    document = receipt(failed())
    document["failures"][0]["added"] = {"later": True}
    document["added"] = 1
    assert replay(document)[1] is True


@pytest.mark.parametrize(
    "document",
    [
        None,
        "receipt",
        [],
        {},
        {"kind": "run"},
        {"kind": "letter", "verdict": {}},
        {"kind": "run", "verdict": {}, "launcher": "slurm"},
        {"kind": "sealed", "verdict": {}, "jobid": "7", "slurm": {"answers": [{}]}, "run": None},
        {"kind": "sealed", "verdict": {}, "jobid": "7", "slurm": {"answers": [{"source": "rumour"}]}, "run": None},
    ],
)
def test_what_is_no_receipt_is_refused(document: Any) -> None:
    with pytest.raises(NotAReceipt):
        replay(document)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    if isinstance(value, dict):
        for key in value:
            yield from ((*path, key), *places(value[key], (*path, key)))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from ((*path, index), *places(value[index], (*path, index)))


SAMPLE = sealed(failed(), FAILED_3)
ODD = st.sampled_from([None, True, -1, 3.5, "", "x", [], {}, [None], {"a": 1}])


@given(st.sampled_from(list(places(SAMPLE))), st.one_of(st.just("drop"), ODD))
def test_a_mangled_receipt_is_judged_or_refused(path: tuple[Any, ...], value: Any) -> None:
    document = copy.deepcopy(SAMPLE)
    *parents, last = path
    place: Any = document
    for key in parents:
        place = place[key]
    if value == "drop":
        del place[last]
    else:
        place[last] = value
    try:
        verdict, same = replay(document)
    except NotAReceipt:
        return
    assert verdict.outcome in ("success", "failure", "unverifiable")
    assert isinstance(same, bool)
    with suppress(NotAReceipt):
        assert isinstance(changed_conclusions(document), list)


# --- a run in somebody else's job ------------------------------------------------------------------------------------


def adopted(run: Run) -> dict[str, Any]:
    """The run receipt of an adopted run."""
    return {**receipt(run), "adopted": True}


def test_an_adopted_run_is_sealed_while_its_job_goes_on_and_however_that_ends() -> None:
    running = with_steps("RUNNING", ["COMPLETED|0:0"] * 3)
    document = saved(sealed_receipt(adopted(completed()), "ab12", "7", [running], versions={}))
    assert (document["verdict"]["outcome"], document["verdict"]["final"]) == ("success", True)
    assert replay(document)[1]
    assert changed_conclusions(document) == []
    assert contradicted(document, CANCELLED) is None
    assert contradicted({**document, "run": receipt(completed())}, CANCELLED) is not None
