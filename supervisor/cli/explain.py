"""`allocctl explain`: how a run's verdict came about, in sentences: what failed first, what fell because of it, and
what the verdict is derived from."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Final

from supervisor.cli.runs import NoSuchRun, complain, find_run
from supervisor.cli.saved import Document, Unreadable, run_document
from supervisor.cli.status import how
from supervisor.core import codes

TAIL_LINES: Final = 10
TAIL_BYTES: Final = 8192
AROUND: Final = 6  # lines of the timeline on each side of the first failure


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("explain", help="how a run's verdict came about, in sentences")
    parser.add_argument("run", nargs="?", help="the run's id or directory (default: this allocation's)")
    parser.add_argument(
        "--all", action="store_true", help="the whole timeline, not only what is around the first failure"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the explanation. 0 when it could be told, 69 when there is no such run."""
    try:
        document, over = run_document(find_run(args.run))
    except (NoSuchRun, Unreadable) as error:
        complain(error)
        return codes.UNREACHABLE
    if args.json:
        keys = ("run_id", "verdict", "first_failure", "consequences", "doubts", "notes", "status", "timeline")
        print(json.dumps({"schema_version": 1, **{key: document[key] for key in keys}, "over": over}, indent=1))
    else:
        print("\n".join(_story(document, over, args.all)))
    return codes.OK


def _story(document: Document, over: bool, whole: bool) -> Iterator[str]:
    verdict = document["verdict"]
    if over:
        yield f"Run {document['run_id']} ({document['name']}): {verdict['outcome']}, exit code {verdict['code']}."
        yield f"  {verdict['summary']}."
    else:
        yield f"Run {document['run_id']} ({document['name']}) is not over; what is known so far:"
    if not verdict["final"] and over:
        yield "  First observed: Slurm has not said how the job ended; `allocctl verify` seals this."
    yield from _section("Why", verdict["because"] if over else ())
    yield from _section("What is in doubt", document["doubts"])
    yield from _failure(document)
    fell = (
        f"rank {item['rank']} ({item['role']}) on {item['node']} {item['text']}" for item in document["consequences"]
    )
    yield from _section("Because of that, and no failures of their own", fell)
    yield from _section(
        "Ranks", (f"rank {r['rank']} ({r['role']}) on {r['node']}: {how(r)}" for r in document["ranks"])
    )
    yield from _section("Artifacts", map(_artifact, document["artifacts"]))
    yield from _section("Marker", [_marker(document["marker"])])
    yield from _section("Timeline", _timeline(document, whole))
    yield f"Everything: {document['run_dir']}"


def _section(title: str, lines: object) -> Iterator[str]:
    listed = list(lines)  # type: ignore[call-overload]
    if listed:
        yield f"{title}:"
        yield from (f"  {line}" for line in listed)


def _failure(document: Document) -> Iterator[str]:
    failure = document["first_failure"]
    if not failure:
        return
    word = ", provisional: Slurm's own state may explain it" if failure["provisional"] else ""
    yield f"What failed first (journal line {failure['seq']}{word}):"
    yield f"  {failure['text']}"
    if failure["rank"] is None:
        return
    for kind, path in document["ranks"][failure["rank"]]["logs"].items():
        lines = tail(path)
        if lines:
            yield f"  the last lines of its {kind} ({path}):"
            yield from (f"    {line}" for line in lines)


def tail(path: str) -> list[str]:
    """The last lines of a log, control characters made visible; [] when it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in text.splitlines()[-TAIL_LINES:]]


def _artifact(item: Document) -> str:
    problems = (item["finding"] or {}).get("problems") or ()
    why = f" ({item['reason']})" if item["reason"] else ""
    return f"{item['contract']}: {item['state']}{why}" + (f": {'; '.join(problems)}" if problems else "")


def _marker(marker: Document) -> str:
    if marker["code"] is not None:
        return f"{marker['path']} says {marker['code']}"
    return f"{marker['path']}: {marker['error'] or 'not published'}"


def _timeline(document: Document, whole: bool) -> Iterator[str]:
    lines = document["timeline"]
    failure = document["first_failure"]
    if not whole and failure:
        place = next((n for n, line in enumerate(lines) if line["seq"] >= failure["seq"]), 0)
        lines = lines[max(0, place - AROUND) : place + AROUND + 1]
    elif not whole and len(lines) > 4 * AROUND:
        lines = [*lines[: 2 * AROUND], *lines[-2 * AROUND :]]
    for line in lines:
        here = " <- first failure" if failure and line["seq"] == failure["seq"] else ""
        yield f"{line['after']:9.3f} s  {line['text']}{here}"
