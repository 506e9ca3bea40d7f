"""`allocctl verify`: how a job really ended, by Slurm's records; seals the receipts of its runs and writes the outcome
file.

A job without a run of ours is judged by Slurm's record alone. A receipt that is sealed already is not sealed again:
terminal evidence is immutable, and its verdict is what this verb answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from supervisor.cli.runs import JOURNAL, NoSuchRun, complain, find_run, runs_of_job
from supervisor.cli.saved import Document, Unreadable, fold_document, read_receipt
from supervisor.core import codes

ABSENCE = 30.0
"""Seconds that a doubt (accounting late, controller away) is examined before it is the answer."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("verify", help="say how a job really ended, and seal its receipt")
    parser.add_argument("job", nargs="?", help="a job's id, a run's id or a run directory (default: $SLURM_JOB_ID)")
    parser.add_argument("--wait", action="store_true", help="wait until the job is over")
    parser.add_argument(
        "--timeout", type=float, help="with --wait: at most this many seconds (default: as long as it runs)"
    )
    parser.add_argument("--patience", type=float, default=ABSENCE, help="seconds to examine a doubt (default: 30)")
    parser.add_argument("--run", help="the run directory, where it cannot be found by the job's id")
    parser.add_argument("--replay", metavar="RECEIPT", help="derive the verdict again from a saved receipt")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; its code is the exit code. 75 when nothing can be proven."""
    if args.replay:
        return _replay(args.replay, args.json)
    try:
        jobid, run_dirs = _target(args)
    except NoSuchRun as error:
        complain(error)
        return codes.UNREACHABLE
    try:
        if not jobid.isdecimal():
            documents = [_local(run_dir) for run_dir in run_dirs]
        else:
            documents = _verify(args, jobid, run_dirs)
    except (Unreadable, OSError, ValueError) as error:
        complain(error)
        return codes.UNVERIFIABLE
    for document in documents:
        _print(document, args.json)
    return next((int(d["verdict"]["code"]) for d in documents if d["verdict"]["code"]), codes.OK)


def _target(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The job's id, and the directories of the runs that belong to its last attempt. Raises NoSuchRun."""
    if args.run:
        run_dir = find_run(args.run)
        return _job_of(run_dir), [run_dir]
    name = args.job or os.environ.get("SLURM_JOB_ID")
    if not name:
        raise NoSuchRun("which job? Name its id")
    if name.isdecimal():
        return name, runs_of_job(name)
    run_dir = find_run(name)
    return _job_of(run_dir), [run_dir]


def _job_of(run_dir: str) -> str:
    with open(os.path.join(run_dir, JOURNAL), encoding="utf-8") as file:
        try:
            return str(json.loads(file.readline())["jobid"])
        except (ValueError, KeyError) as error:
            raise NoSuchRun(f"{run_dir}: its journal does not begin with the opening of a run") from error


def _local(run_dir: str) -> Document:
    """A run outside of Slurm: its receipt is final."""
    document = read_receipt(run_dir, "receipt.run.json") or fold_document(run_dir)
    return document


def _verify(args: argparse.Namespace, jobid: str, run_dirs: list[str]) -> list[Document]:
    sealed = [read_receipt(run_dir, "receipt.json") for run_dir in run_dirs]
    if run_dirs and all(sealed):
        return [document for document in sealed if document is not None]
    from supervisor.scheduler.client import SlurmClient
    from supervisor.scheduler.verify import verify_job

    job = verify_job(SlurmClient(), jobid, args.wait, args.patience, limit=args.timeout)
    truth = asyncio.run(job)
    documents = [_seal(run_dir, truth) for run_dir in run_dirs] or [_document(None, None, truth)]
    from supervisor.engine.receipts import write_outcome

    workspace = os.environ.get("GITHUB_WORKSPACE") or "."
    write_outcome([*run_dirs, workspace], jobid, truth.outcome_line)
    return documents


def _seal(run_dir: str, truth: Any) -> Document:
    """The sealed receipt of a run; kept only when Slurm's records decide, and only the first time."""
    from supervisor.engine.receipts import read_run_receipt, seal

    saved = read_receipt(run_dir, "receipt.json")
    if saved is not None:
        return saved
    found = read_run_receipt(run_dir)
    run, digest = found if found else (None, None)
    if run is None:
        run = {**fold_document(run_dir), "engine_lost": True} if truth.settled else fold_document(run_dir)
    document = _document(run, digest, truth)
    if truth.settled and not seal(run_dir, document):
        return read_receipt(run_dir, "receipt.json") or document
    return document


def _document(run: Document | None, digest: str | None, truth: Any) -> Document:
    from supervisor.cli.run import versions
    from supervisor.core.receipt import sealed_receipt

    return sealed_receipt(run, digest, truth, versions=versions())


def _print(document: Document, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, ensure_ascii=False, indent=1))
        return
    verdict = document["verdict"]
    name = document.get("run_id") or document["jobid"]
    print(f"{name}: {verdict['outcome']} {verdict['code']} ({verdict['origin']}): {verdict['summary']}")
    for text in (*verdict["because"], *document.get("disagreements", ())):
        print(f"  {text}")


def _replay(path: str, as_json: bool) -> int:
    """Derive the verdict again from saved evidence. Its code, or 75 when it is not the saved one."""
    from supervisor.core.receipt import NotAReceipt, replay

    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        verdict, same = replay(document)
    except (OSError, ValueError, NotAReceipt) as error:
        complain(f"{path}: {error}")
        return codes.CONFIG
    if as_json:
        print(json.dumps({"schema_version": 1, "agrees": same, "verdict": verdict.as_dict()}, indent=1))
    else:
        word = "agrees with" if same else "DISAGREES with"
        print(f"{verdict.outcome} {verdict.code} ({verdict.origin}): {verdict.summary}")
        print(f"  derived again from the saved evidence; it {word} the saved verdict")
    return verdict.code if same else codes.UNVERIFIABLE
