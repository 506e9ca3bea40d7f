"""Jobs that have no run (yet, or never), and whole arrays: what `status`, `explain`, `logs` and `receipt` tell of them,
from the record of their submission, the runs of their tasks, and the receipts that `wait` and `verify` keep beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from supervisor.cli.held import part_in
from supervisor.cli.output import complain, put_lines, refuse
from supervisor.cli.status import held_lines, last_attempt, state
from supervisor.core import codes
from supervisor.core.parts import parse_target
from supervisor.core.submission import Submission
from supervisor.runs.papers import Document, Unreadable, read_receipt
from supervisor.runs.registry import NoSuchRun, find_run, job_receipt, submission_of
from supervisor.runs.saved import run_document
from supervisor.runs.target import Target, submitted_target


def tell_job(args: argparse.Namespace, error: NoSuchRun, held: Document | None = None) -> int:
    """What is known of a job that has no run of its own; `error` is what is said where nothing is. `held`: the
    allocation as allocd has it."""
    found = _submission(held["jobid"] if held and not part_in(held, args.run) else args.run)
    if found is None:
        return _tell_held(args, held) if held else refuse(args, error, codes.UNREACHABLE)
    submission, target = found
    parts = [_part(unit) for unit in target.units]
    if args.json:
        told: Document = {
            "jobid": target.jobid,
            "run_id": None,
            "name": submission.name,
            "submission": submission.to_dict(),
        }
        verdict = None if target.array else parts[0]["verdict"]
        told |= {"verdict": verdict, "parts": parts, "allocation": held}
        print(json.dumps({"schema_version": 1, **told}, indent=1))
        return codes.OK
    print(f"{target.jobid}  {submission.name}  submitted {submission.asked} by {submission.user}")
    for part in parts:
        print(f"  {part['run_id'] or part['jobid']}: {part['text']}")
        if not target.array and (output := target.output_of(part["jobid"])) and os.path.exists(output):
            print(f"  its batch script's output: {output}")
    for line in held_lines(held):
        print(line)
    if not all(part["verdict"] for part in parts):
        print(f"  `allocctl wait {target.shown}` follows it to its end, `allocctl verify {target.shown}` tells the end")
    return codes.OK


def _tell_held(args: argparse.Namespace, held: Document) -> int:
    """What allocd alone knows: no job is there yet, or its files are not seen from here."""
    from supervisor.cli.daemon import names_of, standing
    from supervisor.cli.held import written

    if args.json:
        known = {"jobid": held["jobid"], "run_id": held["run_id"], "name": held["name"], "verdict": held["verdict"]}
        print(json.dumps({"schema_version": 1, **known, "allocation": held}, indent=1))
        return codes.OK
    print(f"{names_of(held)}  {held['name']}\n{standing(held)}{written(held)}")
    if held["trouble"]:
        print(f"  {held['trouble']}")
    return codes.OK


def tell_output(args: argparse.Namespace, error: NoSuchRun) -> int:
    """What the batch script of a job without a run has printed, in the place of logs. Raises OSError."""
    found = _submission(args.run)
    if found is None or found[1].array:
        what = "is an array: name one of its tasks" if found else ""
        return refuse(args, f"{args.run} {what}" if found else error, codes.UNREACHABLE)
    target = found[1]
    output = target.output_of(target.jobid) or ""
    try:
        with open(output, "rb") as file:
            lines = file.read().splitlines()
    except OSError as problem:
        why = f"there is no output of its batch script ({output}: {problem.strerror})"
        return refuse(args, f"job {target.jobid} has no run, and {why}", codes.UNREACHABLE)
    complain(f"job {target.jobid} has no run; what its batch script printed:")
    put_lines(target.jobid, os.path.basename(output), lines, target.jobid)
    return codes.OK


def units_of(name: str | None) -> list[str] | None:
    """The job, or the tasks of the whole array, that a name without a run means; None where there is no submission."""
    found = _submission(name)
    return list(found[1].units) if found else None


def saved_receipt(jobid: str) -> str | None:
    """The path of the receipt that is kept of a job without a run."""
    path = job_receipt(jobid)
    return path if path is not None and os.path.isfile(path) else None


def _submission(name: str | None) -> tuple[Submission, Target] | None:
    try:
        jobid = parse_target(name or "").jobid
    except ValueError:
        return None
    submission = submission_of(jobid)
    return (submission, submitted_target(submission, jobid)) if submission else None


def _part(unit: str) -> dict[str, Any]:
    """A job or task: its run's state in a line, or else its kept receipt's verdict."""
    try:
        directory = find_run(unit)
        document, over = run_document(directory)
    except NoSuchRun:
        return _without_run(unit)
    except Unreadable as error:
        return {"jobid": unit, "run_id": None, "verdict": None, "text": str(error)}
    verdict = document["verdict"] if over else None
    text = state(document, over, last_attempt(directory))
    return {"jobid": unit, "run_id": document["run_id"], "verdict": verdict, "text": text}


def _without_run(unit: str) -> dict[str, Any]:
    path = saved_receipt(unit)
    try:
        receipt: Document = (read_receipt(*os.path.split(path)) if path else None) or {}
    except Unreadable as error:
        return {"jobid": unit, "run_id": None, "verdict": None, "text": str(error)}
    verdict, text = receipt.get("verdict"), "no run is known here"
    if verdict:
        text = f"{verdict['outcome']}, exit code {verdict['code']} ({verdict['origin']}): {verdict['summary']}; no run"
    return {"jobid": unit, "run_id": None, "verdict": verdict, "text": text}
