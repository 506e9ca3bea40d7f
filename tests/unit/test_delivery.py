"""What became of files that made a contract complete, as far as anybody could look."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.core import delivery
from supervisor.core import events as ev
from supervisor.core.artifacts import ASIDE, ArtifactState, FileFact, Finding

OLD, NEW = "aa" * 32, "bb" * 32


def contract(*facts: FileFact) -> ArtifactState:
    return ArtifactState("result", None, state="complete", finding=Finding("result", "valid", files=facts))


def collected(path: str = "r.json", **found: Any) -> ev.Collected:
    item = {"contract": "result", "path": path, "found": "a file", "size": 7, "sha256": NEW, "problem": "", **found}
    return ev.Collected(compared=["result"], differing=[item])


def test_nothing_differs() -> None:
    assert delivery.changes(contract(FileFact("r.json", 7, OLD)), ev.Collected(compared=["result"])) == ("", "")


@pytest.mark.parametrize(
    ("judged", "found", "changed"),
    [
        (OLD, {}, f"found 7 bytes with sha256 {NEW}, written since; expected 7 bytes with sha256 {OLD}"),
        (
            OLD,
            {"sha256": None, "size": 8, "problem": "no time"},
            "found 8 bytes of unknown sha256, written since (no t",
        ),
        (OLD, {"found": "nothing"}, "found nothing; expected 7 bytes with sha256 aa"),
        (None, {"found": "a directory"}, "found a directory; expected 7 bytes of unknown sha256"),
        (None, {"size": 8}, f"found 8 bytes with sha256 {NEW}, written since; expected 7 bytes of unknown sha256"),
    ],
)
def test_what_is_another_file_is_changed(judged: str | None, found: dict[str, Any], changed: str) -> None:
    text, unknown = delivery.changes(contract(FileFact("r.json", 7, judged)), collected(**found))
    assert text.startswith(f"r.json: {changed}")
    assert unknown == ""


@pytest.mark.parametrize(
    ("judged", "found"),
    [
        (OLD, {"sha256": None, "problem": "the time for collecting was over"}),
        (OLD, {"found": "", "problem": "Permission denied"}),
        (None, {}),
    ],
)
def test_what_nobody_could_compare_is_unknown(judged: str | None, found: dict[str, Any]) -> None:
    changed, unknown = delivery.changes(contract(FileFact("r.json", 7, judged)), collected(**found))
    assert changed == ""
    assert unknown.startswith("r.json: found ")
    assert found.get("problem", "") in unknown


def test_the_same_bytes_are_the_same_file() -> None:
    assert delivery.changes(contract(FileFact("r.json", 7, OLD)), collected(sha256=OLD)) == ("", "")


def test_a_contract_that_was_not_reached() -> None:
    text = "its files did not answer while they were collected"
    assert delivery.changes(contract(FileFact("r.json", 7, OLD)), ev.Collected()) == ("", text)
    assert delivery.changes(contract(), ev.Collected()) == ("", "")


def test_what_never_counted_may_go() -> None:
    aside = FileFact("probe.json", 7, OLD, ASIDE)
    assert delivery.changes(contract(aside), collected("probe.json", found="nothing")) == ("", "")


def test_files_of_others_are_not_its_business() -> None:
    found = collected(contract="result@1")
    assert delivery.changes(contract(FileFact("r.json", 7, OLD)), found) == ("", "")


def test_of_many_files_a_few_are_named() -> None:
    facts = [FileFact(f"{number}.json", 7, OLD) for number in range(9)]
    differing = [collected(fact.path).differing[0] for fact in facts]
    changed, _ = delivery.changes(contract(*facts), ev.Collected(compared=["result"], differing=differing))
    assert changed.count("; expected ") == 3
    assert changed.endswith("; and 6 more")
