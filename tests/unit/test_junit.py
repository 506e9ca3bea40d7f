"""Runs as JUnit XML: valid whatever a job says, and each thing in its place."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli.junit import junit
from supervisor.cli.main import main
from supervisor.core import events as ev
from supervisor.core.text import printable
from supervisor.engine.receipts import render
from tests.unit.test_github import HOSTILE, hostile, placed
from tests.unit.test_receipt import ABSENT, CANCELLED, FAILED_3, SUCCESS, completed, failed, receipt, sealed
from tests.unit.test_run import RESULT, Run

Document = dict[str, Any]
Element = ElementTree.Element


def parsed(*documents: Document) -> Element:
    """The report, as an XML parser reads it."""
    return read(junit(list(documents)))


def read(text: bytes | str) -> Element:
    return ElementTree.fromstring(text)  # noqa: S314 - ours


def cases(root: Element) -> dict[str, Element]:
    return {case.attrib["name"]: case for case in root.iter("testcase")}


def result(case: Element) -> str:
    """passed, failure, error or skipped."""
    (found,) = [child.tag for child in case] or ["passed"]
    return found


def counts(element: Element) -> dict[str, int]:
    return {key: int(element.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}


def test_a_success() -> None:
    root = parsed(sealed(completed(), SUCCESS))
    assert counts(root) == {"tests": 5, "failures": 0, "errors": 0, "skipped": 0}
    (suite,) = root
    assert suite.attrib["name"] == "7"
    assert {case.attrib["classname"] for case in suite.iter("testcase")} == {"test"}
    found = cases(root)
    assert list(found) == ["verdict", *(name for name in found if name.startswith("rank ")), "artifact result"]
    assert {result(case) for case in found.values()} == {"passed"}
    told = {item.attrib["name"]: item.attrib["value"] for item in root.iter("property")}
    assert told == {"jobid": "7", "run_dir": "/run", "exit_code": "0", "origin": "native"}


def test_a_failure_and_what_fell_because_of_it(tmp_path: Path) -> None:
    document = placed(sealed(failed(), FAILED_3), tmp_path / "run", {"1.err": b"out of memory\n", "0.err": b"fine\n"})
    root = parsed(document)
    assert counts(root) == {"tests": 4, "failures": 2, "errors": 0, "skipped": 2}
    assert counts(root[0]) == counts(root)
    verdict, first, second, third = root.iter("testcase")
    assert result(verdict) == "failure"
    assert verdict[0].attrib == {"message": document["verdict"]["summary"], "type": "rank_failed"}
    assert "exit code 3 (native)" in (verdict[0].text or "")
    assert "Slurm's record of the allocation says FAILED" in (verdict[0].text or "")
    assert result(second) == "failure"
    assert second.attrib["name"].startswith("rank 1 (")
    assert second[0].attrib == {"message": document["run"]["first_failure"]["text"], "type": "exit"}
    assert (second[0].text or "").splitlines()[-1] == "out of memory"
    assert "fine" not in (second[0].text or "")
    assert [result(case) for case in (first, third)] == ["skipped", "skipped"]
    assert first[0].attrib["message"] == "ended with code 0 (peer_failed)"


def test_times_are_seconds() -> None:
    run = Run().start()
    run.take(ev.RankEnded(1, 3, None), after=2.0)
    run.wind_up()
    document = receipt(run)
    root = parsed(document)
    assert root[0].attrib["time"] == str(document["seconds"])
    assert root[0].attrib["timestamp"] == document["started"]
    found = list(root.iter("testcase"))
    assert float(found[0].attrib["time"]) == document["seconds"]
    assert found[2].attrib["time"] == "2.000"


def test_what_is_not_known_is_an_error() -> None:
    assert [result(case) for case in parsed(sealed(None, ABSENT)).iter("testcase")] == ["error"]
    document = receipt(failed())
    document["consequences"] = []  # as of an engine that was lost
    document["ranks"][2]["end"] = None
    case = list(parsed(document).iter("testcase"))[3]
    assert result(case) == "error"
    assert case[0].attrib["message"] == "ended unseen"
    assert "time" not in case.attrib


def test_a_job_without_a_run() -> None:
    root = parsed(sealed(None, CANCELLED))
    assert [case.attrib["name"] for case in root.iter("testcase")] == ["verdict"]
    assert root[0][1][0].attrib["type"] == "slurm_cancelled"
    told = {item.attrib["name"]: item.attrib["value"] for item in root.iter("property")}
    assert told == {"jobid": "7", "exit_code": "130", "origin": "slurm"}


@pytest.mark.parametrize(
    ("state", "reason", "expected", "message"),
    [
        ("complete", None, "passed", ""),
        ("invalid", None, "failure", "invalid; it lies"),
        ("late", "finalization", "failure", "late: finalization; it lies"),
        ("pending", None, "skipped", "pending when the run ended"),
        ("finalizing", None, "skipped", "finalizing when the run ended"),
    ],
)
def test_an_artifact(state: str, reason: str | None, expected: str, message: str) -> None:
    document = receipt(completed())
    document["artifacts"][0] |= {"state": state, "reason": reason, "finding": {"problems": ["it lies"]}}
    case = cases(parsed(document))["artifact result"]
    assert result(case) == expected
    assert "".join(child.attrib["message"] for child in case) == message


def test_an_artifact_that_nobody_looked_at() -> None:
    run = Run(artifacts=[RESULT]).start()
    run.take(ev.RankEnded(1, 3, None))
    run.wind_up()
    assert result(cases(parsed(receipt(run)))["artifact result"]) == "skipped"


def test_a_suite_for_each_run() -> None:
    root = parsed(sealed(failed(), FAILED_3), sealed(completed(), SUCCESS), sealed(None, ABSENT))
    assert [suite.tag for suite in root] == ["testsuite"] * 3
    assert counts(root) == {"tests": 10, "failures": 2, "errors": 1, "skipped": 2}


def test_hostile_words_are_words(tmp_path: Path) -> None:
    log = b"]]>&<x/>\x00\x01\x0b\x7f\xff\xed\xa0\x80\xef\xbf\xbe\n" + b"z" * 1_000_000
    document = placed(
        hostile(receipt(failed())), tmp_path / "run", {"1.out": log, "1.err": HOSTILE.encode(errors="replace")}
    )
    document["run_id"] = document["jobid"] = HOSTILE
    text = junit([document])
    assert len(text) < 20_000
    root = read(text)
    assert root[0].attrib["name"] == printable(HOSTILE)
    assert next(root.iter("failure")).attrib["message"] == printable(HOSTILE)
    assert sum(1 for _ in root.iter()) == 1 + 1 + 1 + 4 + 4 + 4  # nothing was added


@given(st.text(), st.text())
def test_any_words_are_valid_xml(name: str, text: str) -> None:
    document = copy.deepcopy(FAILURE)
    document["name"] = document["ranks"][0]["role"] = name
    document["verdict"]["summary"] = document["failures"][0]["text"] = text
    root = parsed(document)
    assert next(root.iter("failure")).attrib["message"] == printable(text)
    assert next(root.iter("testcase")).attrib["classname"] == printable(name)


FAILURE = receipt(failed())


# --- the verb ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with a sealed receipt, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return saved(sealed(failed(), FAILED_3), tmp_path / "run")


def saved(document: Document, run_dir: Path) -> Path:
    placed(document, run_dir)
    document["run_sha256"] = hashlib.sha256(render(document["run"])).hexdigest()
    (run_dir / "journal.jsonl").touch()
    (run_dir / "receipt.json").write_text(json.dumps(document))
    return run_dir


def test_the_verb_writes_the_report(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.xml"
    report.write_text("an older one")
    assert main(["receipt", str(run_dir), "--junit", str(report)]) == 0
    assert capfd.readouterr().out == ""
    assert counts(read(report.read_bytes()))["failures"] == 2
    assert sorted(os.listdir(tmp_path)) == ["report.xml", "run"]  # and nothing half-written
    assert main(["receipt", str(run_dir), "--junit", "-"]) == 0
    assert capfd.readouterr().out == report.read_text()


def test_the_verb_takes_several_runs(run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = saved(sealed(completed(), SUCCESS), tmp_path / "other")
    assert main(["receipt", str(run_dir), str(other), "--junit", "-"]) == 0
    assert len(read(capfd.readouterr().out)) == 2
    assert main(["receipt", "--path", str(run_dir), str(other)]) == 0
    assert capfd.readouterr().out == f"{run_dir}/receipt.json\n{other}/receipt.json\n"


def no_directory(path: Path) -> str:
    return str(path / "no" / "report.xml")


def a_pipe(path: Path) -> str:
    os.mkfifo(path / "pipe")
    return str(path / "pipe")


@pytest.mark.parametrize(
    ("file", "words"), [(no_directory, "No such file"), (a_pipe, "not a regular file"), (str, "not a regular file")]
)
def test_a_report_that_cannot_be_written(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], file: Callable[[Path], str], words: str
) -> None:
    name = file(tmp_path)
    assert main(["receipt", str(run_dir), "--junit", name]) == 1
    assert f"allocctl: {name}" in (said := capfd.readouterr().err)
    assert words in said
    assert "Traceback" not in said


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"kind": "run"}', '{"kind": "sealed", "run": {}, "verdict": {}}'])
def test_a_receipt_that_is_none(run_dir: Path, capfd: pytest.CaptureFixture[str], content: str) -> None:
    (run_dir / "receipt.json").write_text(content)
    assert main(["receipt", str(run_dir), "--junit", "-"]) == 69
    said = capfd.readouterr()
    assert f"{run_dir}/receipt.json is not a receipt" in said.err
    assert said.out == ""
