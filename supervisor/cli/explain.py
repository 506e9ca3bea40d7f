"""`allocctl explain`: how a run's verdict came about, in sentences: what failed first, what fell because of it, and
what else was seen. Each thing is said once; what went as it should is said in a line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from typing import Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import on_disk
from supervisor.cli.output import refuse
from supervisor.cli.status import how, is_lost, last_attempt
from supervisor.core import codes
from supervisor.core.text import block, printable
from supervisor.runs.registry import NoSuchRun, find_run
from supervisor.runs.saved import Document, Unreadable, run_document

TAIL_LINES: Final = 10
TAIL_COLUMNS: Final = 300
TAIL_BYTES: Final = 8192
BEFORE, AFTER = 4, 8  # lines of the timeline around the first failure
ENDS: Final = 8  # lines of the timeline at its beginning and its end, where nothing failed

ORIGINS: Final = {"native": "a rank's own", "slurm": "by Slurm's record", "allocd": "allocd's"}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("explain", help="how a run's verdict came about, in sentences")
    parser.add_argument("run", nargs="?", help="the run's id or directory, allocd's key (default: this one's)")
    add_socket(parser)
    parser.add_argument("--all", action="store_true", help="the whole timeline, not only what is around the failure")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the explanation. 0 when it could be told, 69 when there is no such run."""
    try:
        args.run = on_disk(args, args.run)
        directory = find_run(args.run)
        document, over = run_document(directory)
    except NoSuchRun as error:
        from supervisor.cli.submitted import tell_job

        return tell_job(args, error)
    except Unreadable as error:
        return refuse(args, error, codes.UNREACHABLE)
    if args.json:
        keys = ("run_id", "verdict", "first_failure", "consequences", "doubts", "notes", "status", "timeline")
        print(json.dumps({"schema_version": 1, **{key: document[key] for key in keys}, "over": over}, indent=1))
    else:
        print(
            "\n".join(block(line, _indent(line)) for line in story(document, over, args.all, last_attempt(directory)))
        )
    return codes.OK


def _indent(line: str) -> str:
    """That of the lines after the first, of words that have several."""
    return " " * (len(line) - len(line.lstrip()) + 2)


def story(document: Document, over: bool, whole: bool = False, last: str | None = None) -> Iterator[str]:
    """The explanation, line by line."""
    verdict, failure = document["verdict"], document["first_failure"]
    yield _headline(document, over)
    said = [verdict["summary"]] if over else []
    yield from (f"  {text}." for text in said)
    explained = over and verdict["origin"] == "slurm"  # Slurm ended the job: what was seen first is told as a reason
    if failure and not explained and not _was_said(failure["text"], said):
        said.append(failure["text"])
        yield f"  What failed first: {failure['text']}."
    reasons = (*(verdict["because"] if over else ()), *document["doubts"])
    yield from (f"  {text}." for text in _news(said, reasons))
    if last:
        yield f"  This is an earlier attempt of job {document['jobid']}, which went on: the last attempt is {last}."
    elif over and not verdict["final"]:
        what = "its steps ended" if document.get("adopted") else "the job ended"
        yield f"  Slurm has not said yet how {what}; `allocctl verify` asks, and seals this."
    if not explained:
        yield from _last_words(document)
    fell = document["consequences"]
    yield from _section("Ended because of that", _grouped((item, item["text"]) for item in fell))
    told = {item["rank"] for item in fell} | ({failure["rank"]} if failure else set())
    rest = (rank for rank in document["ranks"] if rank["rank"] not in told)
    title = "Other ranks" if told - {None} else "Ranks"
    lost = is_lost(document, over)
    seen = "" if over or lost or document["alive"] else ", as they were last seen"
    yield from _section(title + seen, _grouped((rank, _how(rank, lost)) for rank in rest))
    yield from _section("Artifacts", (_artifact(item, said) for item in document["artifacts"]))
    yield from _section("Marker", [_marker(document)])
    collected = (document["collected"] or {}).get("errors", ())
    yield from _section("Not collected", (text.removeprefix("collect: ") for text in collected))
    timeline = document["timeline"]
    yield from _section("Also", _news([*said, *(line["text"] for line in timeline)], document["notes"]))
    shown = timeline if whole else _around(timeline, failure)
    left_out = "" if len(shown) == len(timeline) else " (`--all` tells all of it)"
    yield from _section(f"Timeline{left_out}", (_moment(line, failure) for line in shown))
    yield f"Everything is in {document['run_dir']}"


def _headline(document: Document, over: bool) -> str:
    verdict, name = document["verdict"], f"Run {document['run_id']} ({document['name']})"
    if over:
        ended = {"success": "succeeded", "failure": "failed", "unverifiable": "is unverifiable"}[verdict["outcome"]]
        return f"{name} {ended}: exit code {verdict['code']}, {ORIGINS[verdict['origin']]}."
    if document["alive"] is False:
        return f"{name} was lost: its engine is gone, without a receipt. What follows is what its journal tells."
    where = "" if document["alive"] else f" as far as can be seen from here; its engine is on {document['host']}"
    return f"{name} is not over{where}: {document['phase']}."


def _was_said(text: str, said: Iterable[str]) -> bool:
    return any(text in line or line in text for line in said)


def _news(said: Iterable[str], texts: Iterable[str]) -> list[str]:
    """What has not been said yet, each once."""
    before = list(said)
    return [text for text in dict.fromkeys(texts) if not _was_said(text, before)]


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    listed = list(lines)
    if listed:
        yield f"{title}:"
        yield from (f"  {line}" for line in listed)


def _grouped(items: Iterable[tuple[Document, str]]) -> Iterator[str]:
    """Ranks of one role to which the same happened, in one line."""
    from supervisor.cli.check import spans

    groups: dict[tuple[str, str], list[Document]] = {}
    for rank, text in items:
        groups.setdefault((rank["role"], text), []).append(rank)
    for (role, text), ranks in groups.items():
        where = f" on {ranks[0]['node']}" if len(ranks) == 1 else ""
        yield f"rank{'s' * (len(ranks) > 1)} {spans(tuple(rank['rank'] for rank in ranks))} ({role}){where}: {text}"


def _last_words(document: Document) -> Iterator[str]:
    """The end of the logs of the rank that failed first."""
    failure = document["first_failure"]
    if not failure or failure["rank"] is None:
        return
    for path in document["ranks"][failure["rank"]]["logs"].values():
        yield from _section(f"The end of {_short(path, document)}", tail(path))


def tail(path: str | int) -> list[str]:
    """The last lines of a log (a descriptor is closed), control characters made visible; [] when it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [printable(line[:TAIL_COLUMNS]) for line in text.splitlines()[-TAIL_LINES:]]


def _how(rank: Document, lost: bool) -> str:
    return how(rank, lost) if rank["end"] is None or rank["refused"] else f"ended with {how(rank)}"


def _artifact(item: Document, said: Iterable[str]) -> str:
    problems = _news(said, (item["finding"] or {}).get("problems") or ())
    why = f" ({item['reason']})" if item["reason"] else ""
    return f"{item['contract']}: {item['state']}{why}" + (f": {'; '.join(problems)}" if problems else "")


def _marker(document: Document) -> str:
    marker = document["marker"]
    path = _short(marker["path"], document)
    return (
        f"{path} says {marker['code']}" if marker["code"] is not None else f"{path}: {marker['error'] or 'not there'}"
    )


def _short(path: str, document: Document) -> str:
    """A path below the run directory, which the last line tells."""
    return path.removeprefix(f"{document['run_dir']}/")


def _around(timeline: list[Document], failure: Document | None) -> list[Document]:
    if failure:
        place = next((n for n, line in enumerate(timeline) if line["seq"] >= failure["seq"]), 0)
        return timeline[max(0, place - BEFORE) : place + AFTER + 1]
    return timeline if len(timeline) <= 2 * ENDS else [*timeline[:ENDS], *timeline[-ENDS:]]


def _moment(line: Document, failure: Document | None) -> str:
    here = " <- the first failure" if failure and line["seq"] == failure["seq"] else ""
    return f"{line['after']:9.3f} s  {line['text']}{here}"
