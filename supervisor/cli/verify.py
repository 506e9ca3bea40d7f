"""`allocctl verify`: how a job really ended, by Slurm's records; seals the receipts of its runs and writes the outcome
file.

A job without a run of ours is judged by Slurm's record alone. A receipt that is sealed already is not sealed again:
terminal evidence is immutable, and its verdict is what this verb answers, whether Slurm can be asked or not.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from supervisor.cli.output import complain, refuse, sentence, tell
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, find_run
from supervisor.runs.saved import Document, Unreadable, fold_document, read_receipt

if TYPE_CHECKING:
    from supervisor.core.truth import Truth
    from supervisor.runs.sealing import Sealed

PATIENCE: Final = 30.0
"""Seconds that a doubt (accounting late, controller away, an engine that still writes) is examined before it is the
answer."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("verify", help="say how a job really ended, and seal its receipt")
    parser.add_argument("job", nargs="?", help="a job's id, a run's id or a run directory (default: $SLURM_JOB_ID)")
    parser.add_argument("--wait", action="store_true", help="wait until the job is over")
    parser.add_argument(
        "--timeout", type=_seconds, help="with --wait: at most this many seconds (default: as long as it runs)"
    )
    parser.add_argument("--patience", type=_seconds, default=PATIENCE, help="seconds to examine a doubt (default: 30)")
    parser.add_argument("--run", help="the run directory, where it cannot be found by the job's id")
    parser.add_argument("--replay", metavar="RECEIPT", help="derive the verdict again from a saved receipt")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text!r}")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; its code is the exit code. 75 when nothing can be proven, 79 when a wait was interrupted, 69
    when no such run is known, 125 when the proof of a success could not be saved."""
    if args.replay:
        return _replay(args.replay, args.json)
    try:
        sealed = _sealed(args)
    except NoSuchRun as error:
        return refuse(args, error, codes.UNREACHABLE)
    except (Unreadable, ValueError) as error:
        return refuse(args, error, codes.UNVERIFIABLE)
    except OSError as error:
        return refuse(args, sentence(error), codes.UNVERIFIABLE)
    except KeyboardInterrupt:
        return refuse(args, "interrupted; that ends this wait alone: the job goes on", codes.INTERRUPTED)
    _print(sealed, args.json)
    for text in sealed.trouble:
        complain(text)
    return sealed.code


def _sealed(args: argparse.Namespace) -> Sealed:
    """The sealed document of each run of the job (or of the job alone), and what could not be saved."""
    from supervisor.runs.sealing import Sealed, seal_job, sealed_already

    jobid, run_dirs = _target(args)
    if not jobid[0].isdecimal():
        return Sealed([read_receipt(run_dir, "receipt.run.json") or fold_document(run_dir) for run_dir in run_dirs])
    if (before := sealed_already(jobid, run_dirs)) and not _came_again(args, jobid, run_dirs):
        return before
    return seal_job(jobid, [_ask(args, jobid, args.patience)], args.patience, run_dirs=run_dirs or None)


# --- which job, which runs -----------------------------------------------------------------------------------------


def _target(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The job's id (or a local run's), and the directories of the runs of its last attempt. Raises NoSuchRun."""
    from supervisor.core.attempt import display_id
    from supervisor.core.slurm import parse_job_id
    from supervisor.runs.sealing import find_runs, job_of

    name = args.run or args.job or display_id(os.environ)
    if not name:
        raise NoSuchRun("which job? Name its id")
    if not args.run:
        try:
            jobid = parse_job_id(name).allocation
        except ValueError:
            pass
        else:
            return jobid, find_runs(jobid)
    run_dir = find_run(name)
    return job_of(run_dir), [run_dir]


# --- Slurm ---------------------------------------------------------------------------------------------------------


def _came_again(args: argparse.Namespace, jobid: str, run_dirs: list[str]) -> bool:
    """Whether Slurm knows the id as another job's than that of the sealed runs: ids come again. Slurm need not answer:
    what is sealed stands."""
    from supervisor.runs.sealing import stranger

    if args.run or os.sep in (args.job or ""):
        return False  # that very run was asked for
    truth = _ask(args, jobid, 0.0)
    return truth.record is not None and all(stranger(run_dir, truth) for run_dir in run_dirs)


def _ask(args: argparse.Namespace, jobid: str, patience: float) -> Truth:
    from supervisor.scheduler.client import SlurmClient
    from supervisor.scheduler.verify import verify_job

    # Commands that are not there do not come while one waits.
    anything = shutil.which("sacct") or shutil.which("scontrol")
    patience = patience if anything else 0.0
    return asyncio.run(verify_job(SlurmClient(), jobid, args.wait, patience, limit=args.timeout))


# --- what is printed -----------------------------------------------------------------------------------------------


def _print(sealed: Sealed, as_json: bool) -> None:
    if as_json:
        tell(json.dumps(sealed.document, ensure_ascii=False, indent=1))
        return
    for document in sealed.documents:
        verdict = document["verdict"]
        name = document.get("run_id") or document["jobid"]
        tell(f"{name}: {verdict['outcome']} {verdict['code']} ({verdict['origin']}): {verdict['summary']}")
        notes = (document.get("slurm") or {}).get("notes", ())
        for text in dict.fromkeys((*verdict["because"], *notes, *document.get("disagreements", ()))):
            tell(f"  {text}")


# --- replay --------------------------------------------------------------------------------------------------------


def _replay(path: str, as_json: bool) -> int:
    """Derive the verdict again from saved evidence. Its code, or 75 when it is not the saved one."""
    from supervisor.core.receipt import NotAReceipt, replay

    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        verdict, same = replay(document)
    except OSError as error:
        complain(sentence(error))
        return codes.CONFIG
    except (ValueError, NotAReceipt) as error:
        complain(f"{path}: {error}")
        return codes.CONFIG
    problems = ([] if same else ["the saved verdict is another"]) + _changed(document)
    if as_json:
        answer = {"schema_version": 1, "agrees": not problems, "problems": problems, "verdict": verdict.as_dict()}
        tell(json.dumps(answer, ensure_ascii=False, indent=1))
    else:
        tell(f"{verdict.outcome} {verdict.code} ({verdict.origin}): {verdict.summary}")
        tell(f"  derived again from the saved evidence, which {'DISAGREES' if problems else 'agrees'}")
        for text in problems:
            tell(f"  {text}")
    return codes.UNVERIFIABLE if problems else verdict.code


def _changed(document: Document) -> list[str]:
    """What in a sealed receipt is not as it was sealed, beyond the verdict: the run inside it is byte for byte the run
    receipt of that sha256, and what is said of Slurm follows from Slurm's own words."""
    from supervisor.core.receipt import changed_conclusions
    from supervisor.engine.receipts import render

    problems = []
    digest = document.get("run_sha256")
    if digest is not None and hashlib.sha256(render(document["run"])).hexdigest() != digest:
        problems.append("the run is not the one that was sealed: its sha256 is another")
    return problems + (changed_conclusions(document) if document["kind"] == "sealed" else [])
