"""What GitHub Actions is told of runs that ended: annotations, a step summary, step outputs.

An annotation is a line on stdout or stderr: `::error title=T::MESSAGE`. It is written past the quoting (`runner.py`)
that keeps everybody else's words from being such commands.

Summary and outputs are files that a step appends to: `$GITHUB_STEP_SUMMARY` (Markdown, at most 1 MiB a step, or all of
it is dropped) and `$GITHUB_OUTPUT` (`NAME<<DELIMITER`, lines, `DELIMITER`; empty lines between are skipped). Of each
kind a step shows ten annotations, of each message 4096 characters. (GitHub's reference "Workflow commands for GitHub
Actions", and the sources of its runner.)

None of it can be ended early, or continued, by the words of a job:

* In an annotation, words are one line each (control characters are shown escaped), and `%`, CR, LF, in the title also
  `:` and `,`, are written as `%25`, `%0D`, `%0A`, `%3A`, `%2C`. A log's lines never are annotations.
* In the summary, words are entities wherever Markdown or HTML could read them, and the tail of a log stands in a fence
  of more backticks than it has in a row.
* An output's delimiter is random.

Reporting changes no verdict: what could not be written, or told, is a sentence for stderr.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TextIO

from supervisor.cli.ci import Document, log_tails, name_of, receipt_of, run_of, worst
from supervisor.cli.explain import ORIGINS
from supervisor.cli.output import sentence
from supervisor.cli.runner import unquoted
from supervisor.cli.status import how
from supervisor.core.text import printable

SUMMARY_LIMIT: Final = 64 * 1024  # bytes; a step may report several times, and has 1 MiB
ANNOTATIONS: Final = 10  # of each kind, as many as GitHub shows
MESSAGE: Final = 3000  # characters of an annotation, before escaping
RANKS: Final = 64  # rows of the table of ranks; those that failed come first
RUNS: Final = 100  # rows of the table of runs, likewise
WORDS: Final = 300  # characters of a sentence or cell in the summary
UNREADABLE: Final = (KeyError, TypeError, AttributeError, ValueError, IndexError)
"""What a document that is no receipt raises when it is told."""

KINDS: Final = {"failure": "error", "unverifiable": "warning", "success": "notice"}
"""Outcome -> annotation."""

Row = tuple[bool, tuple[object, ...]]
"""Of a table: whether it is one of the last to be left out, and its cells."""


def report(documents: list[Document], *, environ: Mapping[str, str], stdout: TextIO) -> list[str]:
    """Tell GitHub Actions, if this is one of its steps, how the runs ended that these receipts (sealed, or the run's
    own) prove; several are the tasks of an array or the runs of one job. `stdout` is a stream that the runner reads:
    stderr is one too, for a verb whose stdout is a document. Returns what could not be told, in sentences.
    """
    if not documents or not _in_a_step(environ):
        return []
    parts: dict[str, Callable[[], None]] = {
        "outputs": lambda: _append(environ.get("GITHUB_OUTPUT"), outputs(documents)),
        "summary": lambda: _append(environ.get("GITHUB_STEP_SUMMARY"), fit(markdown(documents), SUMMARY_LIMIT)),
        "annotations": lambda: print(*workflow_commands(documents), sep="\n", file=unquoted(stdout), flush=True),
    }
    trouble = []
    for what, tell in parts.items():
        try:
            tell()
        except OSError as error:
            trouble.append(f"GitHub's step {what} could not be written: {sentence(error)}")
        except UNREADABLE as error:
            trouble.append(f"GitHub's step {what} could not be told: this is not a receipt: {error!r}")
    return trouble


def _in_a_step(environ: Mapping[str, str]) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def _append(path: str | None, text: str) -> None:
    """One write, on a line of its own, where the runner names a file. Raises OSError."""
    if not path:
        return
    with open(path, "ab") as file:
        file.write(b"\n" + text.encode(errors="backslashreplace"))


# --- annotations -------------------------------------------------------------------------------------------------


def workflow_commands(documents: list[Document]) -> Iterator[str]:
    """The lines: one for each run that is no success, and one for all successes together."""
    for outcome in ("failure", "unverifiable"):
        found = [document for document in documents if document["verdict"]["outcome"] == outcome]
        shown = found if len(found) <= ANNOTATIONS else found[: ANNOTATIONS - 1]
        yield from (annotation(KINDS[outcome], _headline(document), _message(document)) for document in shown)
        if len(shown) < len(found):
            text = f"{len(found) - len(shown)} more of {len(documents)} runs: {outcome} (see the step's summary)"
            yield annotation(KINDS[outcome], "allocd", text)
    good = [document for document in documents if document["verdict"]["outcome"] == "success"]
    if good:
        one = len(documents) == 1
        text = _message(good[0]) if one else f"{len(good)} of {len(documents)} runs: success"
        yield annotation(KINDS["success"], _headline(good[0]) if one else "allocd", text)


def annotation(kind: str, title: str, message: str) -> str:
    """A workflow command, on one line. `title` is a line, `message` lines."""
    lines = "\n".join(map(printable, message[:MESSAGE].split("\n")))
    return f"::{kind} title={_property(printable(title[:WORDS]))}::{_data(lines)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _headline(document: Document) -> str:
    run, verdict = run_of(document), document["verdict"]
    name = f"{name_of(document)} ({run['name']})" if run else name_of(document)
    return f"allocd: {name}: {verdict['outcome']}, exit code {verdict['code']}"


def _message(document: Document) -> str:
    """The verdict, what failed first where that is something else, and where the proof is."""
    receipt = receipt_of(document)
    lines = [document["verdict"]["summary"], *_first_failure(document), *([f"Receipt: {receipt}"] if receipt else ())]
    return "\n".join(map(_line, lines))


def _first_failure(document: Document) -> list[str]:
    run = run_of(document)
    failure = run["first_failure"] if run else None
    if not failure or failure["text"] in document["verdict"]["summary"]:
        return []
    return [f"What failed first: {failure['text']}"]


def _line(text: object) -> str:
    """Words that stay on one line."""
    return printable(str(text)[: 2 * WORDS])


# --- outputs -----------------------------------------------------------------------------------------------------


def outputs(documents: list[Document]) -> str:
    """The step's outputs. Of several runs: the verdict that counts, every path, one a line, and the id of their job."""
    verdict, runs = worst(documents)["verdict"], [run for document in documents if (run := run_of(document))]
    several = len(documents) > 1
    jobids = (str(document["jobid"]).partition("_")[0] if several else document["jobid"] for document in documents)
    values = {
        "verdict": str(verdict["outcome"]),
        "exit_code": str(verdict["code"]),
        "receipt": _lines(map(receipt_of, documents)),
        "run_dir": _lines(run["run_dir"] for run in runs),
        "jobid": _lines(jobids),
    }
    return "".join(output(name, value) for name, value in values.items())


def output(name: str, value: str) -> str:
    """An entry of the output file, which no value can end early."""
    delimiter = f"end-{secrets.token_hex(16)}"
    return f"{name}<<{delimiter}\n{value}\n{delimiter}\n"


def _lines(texts: Iterable[object]) -> str:
    return "\n".join(dict.fromkeys(str(text) for text in texts if text))


# --- the summary -------------------------------------------------------------------------------------------------


def markdown(documents: list[Document]) -> Iterator[str]:
    """The step's summary, in pieces that belong together; the most important ones come first."""
    if len(documents) > 1:
        yield from _table_of_runs(documents)
    bad = [document for document in documents if document["verdict"]["code"]]
    for document in bad if len(documents) > 1 else documents:
        yield from _story(document)


def _table_of_runs(documents: list[Document]) -> Iterator[str]:
    good = sum(document["verdict"]["outcome"] == "success" for document in documents)
    yield f"## allocd: {good} of {len(documents)} runs succeeded\n"
    rows: list[Row] = []
    for document in documents:
        verdict = document["verdict"]
        told = (verdict[key] for key in ("outcome", "code", "origin", "summary"))
        rows.append((bool(verdict["code"]), (name_of(document), *told)))
    yield from _table(("run", "verdict", "exit code", "whose", "why"), rows, RUNS)


def _story(document: Document) -> Iterator[str]:
    run, verdict = run_of(document), document["verdict"]
    said = [verdict["summary"], *_first_failure(document)]
    more = [text for text in verdict["because"] if not any(known in text for known in said)]
    origin = ORIGINS.get(verdict["origin"], verdict["origin"])
    places = {"Receipt": receipt_of(document), "Run directory": run["run_dir"] if run else ""}
    yield f"\n## {words(_headline(document))}\n"
    yield "\n".join(
        f"- {line}"
        for line in (
            f"Verdict: **{words(verdict['outcome'])}**, exit code **{words(verdict['code'])}**, {words(origin)}",
            *map(words, [*said, *more]),
            *(f"{title}: {words(place)}" for title, place in places.items() if place),
        )
    )
    if run:
        failure = run["first_failure"]
        for path, lines in log_tails(run, failure["rank"] if failure else None):
            yield f"\nThe end of {words(path)}:\n\n{fence(lines)}"
        yield from _table_of_ranks(run)


def _table_of_ranks(run: Document) -> Iterator[str]:
    failure = run["first_failure"]
    first = failure["rank"] if failure else None
    failed = {item["rank"] for item in run["failures"]}
    fell = {item["rank"]: f"fell because of it ({item['reason']})" for item in run["consequences"]}
    rows: list[Row] = []
    for rank in run["ranks"]:
        number = rank["rank"]
        why = "failed first" if number == first else "failed" if number in failed else fell.get(number, "")
        rows.append((number in failed, (number, rank["role"], rank["node"], how(rank, run["engine_lost"]), why)))
    yield ""
    yield from _table(("rank", "role", "node", "end", ""), rows, RANKS)


def _table(header: tuple[str, ...], rows: list[Row], limit: int) -> Iterator[str]:
    """A table of at most `limit` rows, in their order; marked rows are the last to be left out."""
    kept = sorted(sorted(range(len(rows)), key=lambda row: not rows[row][0])[:limit])
    yield f"| {' | '.join(header)} |\n|{'---|' * len(header)}"
    yield from (f"| {' | '.join(map(words, rows[row][1]))} |" for row in kept)
    if len(kept) < len(rows):
        yield f"\n{len(rows) - len(kept)} more are not shown.\n"


def words(text: object) -> str:
    """Somebody's words as one line of Markdown that is nothing but text: every character that Markdown or HTML knows is
    an entity."""
    said = str(text).strip()
    shown = printable(said[:WORDS]) + ("..." if len(said) > WORDS else "")
    return re.sub(r"[^\w ,/]|_", lambda found: f"&#{ord(found[0])};", shown)


def fence(lines: list[str]) -> str:
    """Lines as a block that none of them can close."""
    text = "\n".join(lines)
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}text\n{text}\n{ticks}"


def fit(pieces: Iterable[str], limit: int) -> str:
    """As many of the pieces, one a line, as `limit` bytes can hold. A piece is there as a whole or not at all."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece.encode(errors="backslashreplace")) + 1
        if size > limit:
            kept.append("\nMore does not fit here: `allocctl explain` tells the rest.")
            break
        kept.append(piece)
    return "\n".join(kept) + "\n"
