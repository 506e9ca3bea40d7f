"""What GitHub Actions is told: read back by a model of its runner, whatever the words of a job are."""

from __future__ import annotations

import errno
import html
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli.github import (
    SUMMARY_LIMIT,
    WORDS,
    annotation,
    fence,
    fit,
    output,
    report,
    words,
)
from supervisor.core.text import printable
from supervisor.core.verdict import Verdict
from tests.unit.test_receipt import ABSENT, CANCELLED, FAILED_3, SUCCESS, completed, failed, receipt, sealed

Document = dict[str, Any]

HOSTILE = (
    "::error::forged\r\n##[add-mask]x\n```\n</code><img src=x>|`]]>&amp;%0A\x00\x1b[31m\udc80\u2028$(x){{ x }}@all"
)
"""What a job could call itself, or print."""


# --- a model of the runner ---------------------------------------------------------------------------------------

COMMANDS = {"error", "warning", "notice", "debug", "add-mask", "group", "set-output", "stop-commands"}


def obeyed(printed: str) -> list[tuple[str, dict[str, str], str]]:
    """The workflow commands in what a step printed: name, properties, data."""
    known, found, token = set(COMMANDS), [], None
    for line in re.split("\r\n|\r|\n", printed):
        modern = re.match(r"\s*::([^ ]*?)(?: (.*?))?::(.*)$", line)
        old = re.search(r"##\[([^ \]]*)(?: ([^\]]*))?\](.*)$", line)
        parts = modern if modern and modern[1].lower() in known else old if old and old[1].lower() in known else None
        if parts is None or (token and parts[1] != token):
            continue
        name, data = parts[1].lower(), unescaped(parts[3], {"%0D": "\r", "%0A": "\n", "%25": "%"})
        if name == token:
            token = None
        elif name == "stop-commands":
            token = data
            known.add(data)
        else:
            pairs = [pair.partition("=") for pair in (parts[2] or "").split(",") if pair]
            escapes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}
            found.append((name, {key: unescaped(value, escapes) for key, _, value in pairs}, data))
    assert token is None, "commands are stopped for the rest of the step"
    return found


def unescaped(text: str, escapes: dict[str, str]) -> str:
    for written, meant in escapes.items():
        text = text.replace(written, meant)
    return text


def outputs_of(text: str) -> dict[str, str]:
    """The step outputs in an output file."""
    found, lines = {}, iter(text.split("\n"))
    for line in lines:
        if line:
            name, delimiter = line.split("<<")
            value = list(iter(lambda: next(lines), delimiter))
            found[name] = "\n".join(value)
    return found


def fenced(markdown: str) -> list[str]:
    """The contents of the fenced blocks."""
    blocks: list[str] = []
    inside: list[str] | None = None
    ticks = ""
    for line in markdown.split("\n"):
        if inside is None:
            if opening := re.fullmatch("(```+)[a-z]*", line):
                inside, ticks = [], opening[1]
        elif re.fullmatch(f" {{0,3}}{ticks}`*\\s*", line):
            blocks.append("\n".join(inside))
            inside = None
        else:
            inside.append(line)
    assert inside is None, "a fence is open at the end"
    return blocks


# --- the receipts ------------------------------------------------------------------------------------------------


def placed(document: Document, run_dir: Path, logs: dict[str, bytes] | None = None) -> Document:
    """A receipt of a run in that directory, with these logs (rank and kind -> content)."""
    run = document if document["kind"] == "run" else document["run"]
    (run_dir / "logs").mkdir(parents=True)
    run["run_dir"] = str(run_dir)
    for rank in run["ranks"]:
        rank["logs"] = {kind: f"{run_dir}/logs/{os.path.basename(path)}" for kind, path in rank["logs"].items()}
        for kind, path in rank["logs"].items():
            if logs and (content := logs.get(f"{rank['rank']}.{kind}")) is not None:
                Path(path).write_bytes(content)
    return document


def hostile(run: Document) -> Document:
    """The run receipt with every word that a job, a plan or a node chooses replaced."""
    run["name"] = HOSTILE
    for rank in run["ranks"]:
        rank["role"] = rank["node"] = HOSTILE
    for failure in (run["first_failure"], *run["failures"]):
        failure["text"] = HOSTILE
    for item in run["consequences"]:
        item["text"] = item["reason"] = HOSTILE
    run["verdict"]["summary"] = HOSTILE
    run["verdict"]["because"] = [HOSTILE, HOSTILE + "2"]
    return run


class Step:
    """A step of a workflow: the files that its runner gave it, and what was printed."""

    def __init__(self, directory: Path) -> None:
        self.summary_file, self.output_file = directory / "summary", directory / "output"
        self.environ = {
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(self.summary_file),
            "GITHUB_OUTPUT": str(self.output_file),
        }
        self.stdout = io.StringIO()

    def told(self, *documents: Document) -> list[str]:
        return report(list(documents), environ=self.environ, stdout=self.stdout)

    @property
    def commands(self) -> list[tuple[str, dict[str, str], str]]:
        return obeyed(self.stdout.getvalue())

    @property
    def summary(self) -> str:
        return self.summary_file.read_text()

    @property
    def outputs(self) -> dict[str, str]:
        return outputs_of(self.output_file.read_text())


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


# --- one run -----------------------------------------------------------------------------------------------------


def test_a_failure(step: Step, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    document = placed(sealed(failed(), FAILED_3), run_dir, {"1.err": b"first\nout of memory\n", "0.out": b"fine\n"})
    (run_dir / "receipt.json").touch()
    assert step.told(document) == []

    ((kind, properties, message),) = step.commands
    assert kind == "error"
    assert properties == {"title": "allocd: 7 (test): failure, exit code 3"}
    assert message == f"{document['verdict']['summary']}\nReceipt: {run_dir}/receipt.json"

    told = {"verdict": "failure", "exit_code": "3", "receipt": f"{run_dir}/receipt.json", "run_dir": str(run_dir)}
    assert step.outputs == {**told, "jobid": "7"}

    text = html.unescape(step.summary)
    assert "## allocd: 7 (test): failure, exit code 3" in text
    assert "- Verdict: **failure**, exit code **3**, a rank's own" in text
    assert text.count(document["verdict"]["summary"]) == 1
    assert "- Slurm's record of the allocation says FAILED 3:0 (sacct)" in text
    assert "The end of logs/rank-1." in text
    assert fenced(step.summary) == ["first\nout of memory"]
    rows = [line.split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["| 0", "| 1", "| 2"]
    assert rows[1][4] == "failed first |"
    assert rows[0][4] == "fell because of it (peer_failed) |"


@pytest.mark.parametrize(
    ("document", "kind", "outcome", "code"),
    [
        (lambda: sealed(completed(), SUCCESS), "notice", "success", "0"),
        (lambda: receipt(completed()), "notice", "success", "0"),
        (lambda: sealed(completed(), ABSENT), "warning", "unverifiable", "75"),
        (lambda: sealed(failed(), CANCELLED), "error", "failure", "3"),
        (lambda: sealed(None, CANCELLED), "error", "failure", "130"),
        (lambda: sealed(None, ABSENT), "warning", "unverifiable", "75"),
    ],
)
def test_every_outcome_has_its_kind(
    step: Step, document: Callable[[], Document], kind: str, outcome: str, code: str
) -> None:
    assert step.told(document()) == []
    assert [command[0] for command in step.commands] == [kind]
    assert (step.outputs["verdict"], step.outputs["exit_code"]) == (outcome, code)
    assert f"**{outcome}**, exit code **{code}**" in step.summary


def test_a_job_without_a_run_has_no_paths(step: Step) -> None:
    step.told(sealed(None, FAILED_3))
    assert (step.outputs["receipt"], step.outputs["run_dir"], step.outputs["jobid"]) == ("", "", "7")


def test_what_failed_first_is_told_beside_another_verdict(step: Step) -> None:
    document = sealed(failed(), CANCELLED)
    document["verdict"] = Verdict("failure", 130, "slurm", "slurm_cancelled", "Slurm says CANCELLED").as_dict()
    step.told(document)
    first = f"What failed first: {document['run']['first_failure']['text']}"
    assert first in step.commands[0][2].splitlines()
    assert first in html.unescape(step.summary)


def test_the_receipt_is_the_one_that_is_there(step: Step, tmp_path: Path) -> None:
    document = placed(receipt(failed()), tmp_path / "run")
    step.told(document)
    assert step.outputs["receipt"] == ""
    (tmp_path / "run" / "receipt.run.json").touch()
    step.told(document)
    assert step.outputs["receipt"] == str(tmp_path / "run" / "receipt.run.json")


def test_elsewhere_nothing_is_told(step: Step) -> None:
    for value in (None, "", "false", "1"):
        step.environ.pop("GITHUB_ACTIONS", None)
        if value is not None:
            step.environ["GITHUB_ACTIONS"] = value
        assert step.told(sealed(failed(), FAILED_3)) == []
    assert step.stdout.getvalue() == ""
    assert not step.summary_file.exists()
    assert not step.output_file.exists()


def test_a_step_may_report_more_than_once_and_after_others(step: Step) -> None:
    step.output_file.write_text("other=1")  # whose writer forgot the end of the line
    step.summary_file.write_text("- other")
    step.told(sealed(failed(), FAILED_3))
    step.told(sealed(completed(), SUCCESS))
    first, _, rest = step.output_file.read_text().partition("\n")
    assert first == "other=1"
    assert outputs_of(rest)["exit_code"] == "0"  # the last one counts
    assert step.summary.startswith("- other\n\n## ")
    assert step.summary.count("\n## ") == 2


# --- several runs ------------------------------------------------------------------------------------------------


def tasks(tmp_path: Path, *codes: int) -> list[Document]:
    """An array's tasks."""
    documents = []
    for number, code in enumerate(codes):
        document = placed(
            sealed(failed() if code else completed(), FAILED_3 if code else SUCCESS), tmp_path / f"{number}"
        )
        document["jobid"] = document["run_id"] = f"90_{number}"
        (tmp_path / f"{number}" / "receipt.json").touch()
        documents.append(document)
    return documents


def test_an_array_has_one_summary(step: Step, tmp_path: Path) -> None:
    documents = tasks(tmp_path, 0, 3, 0, 3)
    assert step.told(*documents) == []
    assert [kind for kind, _, _ in step.commands] == ["error", "error", "notice"]
    assert step.commands[-1][2] == "2 of 4 runs: success"
    assert (step.outputs["verdict"], step.outputs["exit_code"], step.outputs["jobid"]) == ("failure", "3", "90")
    assert step.outputs["run_dir"].split("\n") == [str(tmp_path / str(number)) for number in range(4)]
    assert len(step.outputs["receipt"].split("\n")) == 4
    text = html.unescape(step.summary)
    assert "## allocd: 2 of 4 runs succeeded" in text
    table = text.partition("## allocd: 90_1")[0]
    assert [line.split(" | ")[:3] for line in table.splitlines() if line.startswith("| 90_")] == [
        ["| 90_0", "success", "0"],
        ["| 90_1", "failure", "3"],
        ["| 90_2", "success", "0"],
        ["| 90_3", "failure", "3"],
    ]
    assert re.findall(r"## allocd: (90_\d)", text) == ["90_1", "90_3"]  # those that need an explanation


def test_many_failures_are_no_flood(step: Step) -> None:
    bad, good = sealed(failed(), FAILED_3), sealed(completed(), SUCCESS)
    documents = [{**(bad if number < 290 else good), "run_id": f"90_{number}"} for number in range(300)]
    step.told(*documents)
    kinds = [kind for kind, _, _ in step.commands]
    assert kinds == ["error"] * 10 + ["notice"]
    assert step.commands[9][2].startswith("281 more of 300 runs: failure")
    assert "200 more are not shown" in step.summary
    assert len(step.summary) <= SUMMARY_LIMIT + 200
    assert "More does not fit here" in step.summary


def test_the_ranks_that_failed_are_the_last_to_be_left_out(step: Step) -> None:
    document = receipt(failed())
    rank = document["ranks"][0]
    document["ranks"] = [{**rank, "rank": number} for number in range(200)]
    document["failures"][0]["rank"] = 177
    step.told(document)
    shown = re.findall(r"(?m)^\| (\d+) \|", step.summary)
    assert shown == [*map(str, range(63)), "177"]
    assert "136 more are not shown" in step.summary


# --- hostile words -----------------------------------------------------------------------------------------------


def test_hostile_words_are_words(step: Step, tmp_path: Path) -> None:
    log = (
        b"::error::x\n```\n````\n~~~\n</pre>\r::set-output name=verdict::success\n\x00\xff\xed\xa0\x80\n" + b"z" * 5000
    )
    document = placed(hostile(receipt(failed())), tmp_path / "run", {"1.out": log, "1.err": b"`" * 400})
    assert step.told(document) == []

    ((kind, properties, message),) = step.commands
    assert kind == "error"
    assert list(properties) == ["title"]
    assert properties["title"].startswith("allocd: 7 (::error::forged\\r\\n##[add-mask]x")
    assert message.split("\n")[0] == printable(HOSTILE)
    assert step.outputs["verdict"] == "failure"
    assert len(fenced(step.summary)) == 2
    assert "::error::x" in fenced(step.summary)[0]

    outside = re.sub(r"(?s)(````+)text\n.*?\n\1\n", "", step.summary)
    for line in outside.splitlines():  # our own skeleton, and words of which nothing is left but letters and entities
        assert re.fullmatch(r"(## |- |\|)?[\w ,/&#;*:|().-]*", line), line
        assert line.count("|") in (0, 6), line
    assert "<" not in outside
    assert "`" not in outside.replace("allocctl explain", "")


@given(st.text(), st.text())
def test_an_annotation_is_one_command(title: str, message: str) -> None:
    line = annotation("error", title, message)
    assert len(re.split("\r\n|\r|\n", line)) == 1
    shown = "\n".join(map(printable, message.split("\n")))
    properties = {"title": printable(title)} if title else {}
    ((kind, found, data),) = obeyed(line)
    assert (kind, data) == ("error", shown)
    assert {key: value for key, value in found.items() if value} == properties


@given(st.text())
def test_words_are_text_and_nothing_else(text: str) -> None:
    written = words(text)
    assert re.fullmatch(r"(?:[^\W_]|[ ,/]|&#\d+;)*", written)
    assert html.unescape(written) == printable(text.strip()[:WORDS])


def test_long_words_are_cut() -> None:
    assert html.unescape(words("x" * 10_000)) == "x" * WORDS + "..."
    assert len(annotation("error", "t" * 10_000, "%" * 1_000_000)) < 10_000


@given(st.lists(st.text(alphabet="`~a -", max_size=20), min_size=1))
def test_no_line_closes_the_fence(lines: list[str]) -> None:
    assert fenced(f"{fence(lines)}\n") == ["\n".join(lines)]


@given(st.text())
def test_no_value_ends_an_output(value: str) -> None:
    assert outputs_of(output("name", value) + output("next", "1")) == {"name": value, "next": "1"}


def test_a_huge_log_takes_little_room(step: Step, tmp_path: Path) -> None:
    line = "\U0010ffff" * 100_000
    document = placed(receipt(failed()), tmp_path / "run", {"1.out": f"{line}\n".encode() * 30})
    step.told(document)
    assert len(step.summary.encode()) < SUMMARY_LIMIT


def test_what_does_not_fit_is_left_out_as_a_whole() -> None:
    text = fit(["a" * 50, fence(["b" * 50]), "c"], 80)
    assert text.startswith("a" * 50 + "\n")
    assert "```" not in text
    assert "More does not fit here" in text


# --- logs are read where logs are ----------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "kind", ["link", "link to a log", "directory", "pipe", "linked directory", "elsewhere", "none"]
)
def test_only_logs_of_the_run_are_read(step: Step, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    document = placed(receipt(failed()), tmp_path / "run")
    path = Path(document["ranks"][1]["logs"]["out"])
    match kind:
        case "link":
            path.symlink_to(secret)
        case "link to a log":  # a log is a file, nothing else
            path.with_name("other").write_text("the secret")
            path.symlink_to(path.with_name("other"))
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "linked directory":
            (tmp_path / "other").mkdir()
            (tmp_path / "other" / path.name).write_text("the secret")
            path.parent.rmdir()
            path.parent.symlink_to(tmp_path / "other")
        case "elsewhere":
            document["ranks"][1]["logs"]["out"] = f"{tmp_path}/run/logs/../../secret"
        case "none":
            document["ranks"][1]["logs"]["out"] = "/\x00\ud800"
    before = set(os.listdir("/proc/self/fd"))
    assert step.told(document) == []
    assert set(os.listdir("/proc/self/fd")) == before
    assert fenced(step.summary) == []
    assert "secret" not in step.summary


# --- what cannot be told -------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_told(step: Step, tmp_path: Path) -> None:
    step.environ["GITHUB_STEP_SUMMARY"] = str(tmp_path / "no" / "summary")
    step.environ["GITHUB_OUTPUT"] = str(tmp_path)
    trouble = step.told(sealed(failed(), FAILED_3))
    assert len(trouble) == 2
    assert "GitHub's step outputs could not be written" in trouble[0]
    assert f"{tmp_path}/no/summary: No such file or directory" in trouble[1]
    assert [kind for kind, _, _ in step.commands] == ["error"]


def test_a_runner_without_files_is_none_of_our_trouble(step: Step) -> None:
    del step.environ["GITHUB_STEP_SUMMARY"]
    step.environ["GITHUB_OUTPUT"] = ""
    assert step.told(sealed(failed(), FAILED_3)) == []
    assert len(step.commands) == 1


class Full(io.StringIO):
    """A stdout on a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stdout_that_is_full_is_told(step: Step) -> None:
    (trouble,) = report([sealed(failed(), FAILED_3)], environ=step.environ, stdout=Full())
    assert trouble == "GitHub's step annotations could not be written: No space left on device"
    assert step.outputs["exit_code"] == "3"


@pytest.mark.parametrize("broken", [{}, {"kind": "run"}, {"kind": "sealed", "run": 1}, {"kind": "run", "verdict": []}])
def test_no_receipt_raises(step: Step, broken: Document) -> None:
    trouble = step.told(broken)
    assert len(trouble) == 3
    assert all("not a receipt" in text for text in trouble)


def test_nothing_to_tell_is_nothing_told(step: Step) -> None:
    assert step.told() == []
    assert step.stdout.getvalue() == ""
