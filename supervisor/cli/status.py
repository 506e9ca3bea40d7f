"""`allocctl status`: what a run is doing, or how it ended, by its directory; and what allocd knows besides, where it
holds it: the queue, Slurm's word, what keeps it from doing more."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import find_held, held_directory, written
from supervisor.cli.output import refuse
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, attempt_of, find_run, later_runs
from supervisor.runs.saved import Document, Unreadable, run_document


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("status", help="what a run is doing, or how it ended")
    parser.add_argument("run", nargs="?", help="the run's id or directory, allocd's key (default: this one's)")
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the status. 0 when it could be told, 69 when there is no such run."""
    try:
        found = find_held(args, args.run, parts=True)
    except NoSuchRun as error:
        return refuse(args, error, codes.UNREACHABLE)
    held = found[1] if found else None
    try:
        directory = held_directory(held, args.run) or find_run(args.run)
        document, over = run_document(directory)
    except NoSuchRun as error:
        from supervisor.cli.submitted import tell_job

        return tell_job(args, error, held)
    except Unreadable as error:
        return refuse(args, error, codes.UNREACHABLE)
    last = last_attempt(directory)
    if args.json:
        print(json.dumps({**summary(document, over), "last_attempt": last, "allocation": held}, indent=1))
    else:
        print("\n".join([*_lines(document, over, last), *held_lines(held)]))
    return codes.OK


def held_lines(held: Document | None) -> Iterator[str]:
    """What allocd knows besides."""
    if held is None:
        return
    from supervisor.cli.daemon import standing

    if held["state"] != "ended" and held["kind"] != "served":
        holds = "held" if held.get("as_of") else "holds"
        yield f"  allocd {holds} it as {held['key']}: {standing(held)}{written(held)}"
    if held["trouble"]:
        yield f"  {held['trouble']}"


def last_attempt(run_dir: str) -> str | None:
    """The run of the job's last attempt, where this one is of an earlier one."""
    return next(map(os.path.basename, later_runs(run_dir)), None)


def summary(document: Document, over: bool) -> Document:
    """The status as one JSON document."""
    keys = ("run_id", "jobid", "name", "run_dir", "launcher", "started", "first_failure", "doubts", "marker", "status")
    ranks = [
        {key: rank[key] for key in ("rank", "role", "node", "phase", "silent", "end")} for rank in document["ranks"]
    ]
    return {
        "schema_version": 1,
        **{key: document[key] for key in keys},
        "over": over,
        "sealed": bool(document.get("sealed")),
        "phase": "ended" if over else document["phase"],
        "engine": None if over else {True: "alive", False: "lost", None: "on another host"}[document["alive"]],
        "verdict": document["verdict"] if over or document.get("alive") is False else None,
        "ranks": ranks,
        "artifacts": [{"contract": item["contract"], "state": item["state"]} for item in document["artifacts"]],
        "watches": document.get("watches", []),
    }


def _lines(document: Document, over: bool, last: str | None) -> list[str]:
    lines = [f"{document['run_id']}  {document['name']}  {document['run_dir']}", state(document, over, last)]
    if last:
        lines.append(f"  an earlier attempt of job {document['jobid']}: the last one is {last}")
    elif attempt := attempt_of(document["run_id"]):
        earlier = f"an earlier one by its own id, as {document['jobid']}.r0"
        lines.append(f"  attempt {attempt + 1} of job {document['jobid']}; {earlier}")
    lost = is_lost(document, over)
    lines += (
        f"  rank {rank['rank']:>3}  {rank['role']:<14} {rank['node']:<18} {how(rank, lost)}"
        for rank in document["ranks"]
    )
    lines += (f"  artifact {item['contract']}: {item['state']}" for item in document["artifacts"])
    if not over:
        lines += (f"  {line}" for line in _polled(document))
    lines += (f"  {text}" for text in document.get("strange", ()))
    failure = document["first_failure"]
    if failure and not (over and failure["text"] in document["verdict"]["summary"]):
        lines.append(f"  first failure: {failure['text']}")
    return lines


def _polled(document: Document) -> Iterator[str]:
    """The directories whose events are not believed, those with the same reason in one line."""
    from supervisor.core.story import watched

    reasons: dict[tuple[str, str], list[str]] = {}
    for watch in document.get("watches", ()):
        if watch["by"] != "events":
            reasons.setdefault((watch["file_system"], watch["why"]), []).append(watch["directory"])
    return (watched(directories, "polling", *reason) for reason, directories in reasons.items())


def state(document: Document, over: bool, last: str | None) -> str:
    """Where a run is, or how it ended, in a line."""
    verdict = document["verdict"]
    if over:
        never = "it is not sealed: the job went on" if last else "`allocctl verify` seals it"
        seen = "" if verdict["final"] else f", first observed ({never})"
        return f"{verdict['outcome']}, exit code {verdict['code']} ({verdict['origin']}){seen}: {verdict['summary']}"
    engine = {True: "", False: ", but its engine is gone", None: f", engine on {document['host']}"}[document["alive"]]
    return f"{document['phase']}{engine}"


def is_lost(run: Document, over: bool) -> bool:
    """Whether a run has ended (`over`), or will never go on, and what is known of it is what its engine last wrote."""
    return bool(run["engine_lost"]) and (over or run.get("alive") is False)


def how(rank: Document, lost: bool = False) -> str:
    """How a rank does, in words. `lost`: the engine is, and nobody saw what came after."""
    end: dict[str, Any] | None = rank["end"]
    if rank["refused"]:
        return f"not executed: {rank['refused']}"
    if end is None:
        over = "ended unseen" if rank["started"] else "never started"
        now = over if rank["phase"] == "over" else "silent" if rank["silent"] else str(rank["phase"])
        return now if not lost or now == over else f"{now} when the engine was lost"
    text = f"code {end['code']}" if end["code"] is not None else f"signal {end['signal']}"
    return f"{text} (stopped: {rank['stop']})" if end["ordered"] else text
