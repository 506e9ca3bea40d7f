"""`allocctl verify`: how a job really ended, by Slurm's records; seals the receipts of its runs and writes the outcome
file.

A job without a run of ours is judged by Slurm's record alone. A receipt that is sealed already is not sealed again:
terminal evidence is immutable, and its verdict is what this verb answers, whether Slurm can be asked or not. The plain
id of an array means all of its tasks, each judged by itself; that of a heterogeneous job all of its components,
judged together. The id of a run in somebody else's job (`allocctl adopt`) means that run alone, and a job's id never
does: that run is judged by Slurm's records of its steps, also while the job goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from supervisor.cli.arguments import PATIENCE, add_socket, seconds
from supervisor.cli.held import on_disk
from supervisor.cli.output import complain, refuse, sentence, tell
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun, find_run, later_runs, submission_of
from supervisor.runs.saved import Document, Unreadable, run_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.core.answers import Answer
    from supervisor.core.parts import Parts, Target
    from supervisor.core.truth import Truth
    from supervisor.runs.sealing import Sealed
    from supervisor.scheduler.poller import Seen


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("verify", help="say how a job really ended, and seal its receipt")
    parser.add_argument(
        "job",
        nargs="?",
        help="a job's id (123, 123_4, 123_[1-9], 123+1, 123;cluster), a run's id or a run directory, allocd's key "
        "(default: the job that this is)",
    )
    parser.add_argument("--wait", action="store_true", help="wait until the job is over")
    parser.add_argument(
        "--timeout", type=seconds, help="with --wait: at most this many seconds (default: as long as it runs)"
    )
    parser.add_argument("--patience", type=seconds, default=PATIENCE, help="seconds to examine a doubt (default: 30)")
    parser.add_argument("-M", "--cluster", help="the cluster that the job is on (default: this one)")
    add_socket(parser)
    parser.add_argument("--run", help="the run directory, where it cannot be found by the job's id")
    parser.add_argument("--replay", metavar="RECEIPT", help="derive the verdict again from a saved receipt")
    parser.add_argument(
        "--from-files",
        nargs="+",
        metavar="FILE",
        help="judge by saved output of sacct and scontrol (- for standard input), with the job's id behind the files; "
        "nothing is asked or sealed",
    )
    parser.add_argument("--outcome", action="store_true", help="with --from-files: write the outcome file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say on stderr what is being waited for")


def run(args: argparse.Namespace) -> int:
    """Print the verdict; its code is the exit code. 75 when nothing can be proven, 79 when a wait was interrupted, 69
    when no such run is known, 78 for files that cannot be read, 125 when the proof of a success could not be saved."""
    if args.replay:
        from supervisor.cli.replay import replay_receipt

        return replay_receipt(args.replay, args.json)
    try:
        sealed = _from_files(args) if args.from_files else _sealed(args)
    except NoSuchRun as error:
        return refuse(args, error, codes.UNREACHABLE)
    except (Unreadable, ValueError) as error:
        return refuse(args, error, codes.CONFIG if args.from_files else codes.UNVERIFIABLE)
    except OSError as error:
        return refuse(args, sentence(error), codes.CONFIG if args.from_files else codes.UNVERIFIABLE)
    except KeyboardInterrupt:
        return refuse(args, "interrupted; that ends this wait alone: the job goes on", codes.INTERRUPTED)
    print_sealed(sealed, args.json)
    for text in (*sealed.trouble, *_reported(sealed, args.json)):
        complain(text)
    return sealed.code


def _reported(sealed: Sealed, as_json: bool) -> list[str]:
    """Tell GitHub Actions, where this is one of its steps. Returns what could not be told."""
    if "GITHUB_ACTIONS" not in os.environ:
        return []
    from supervisor.cli.github import report

    return report(sealed.documents, environ=os.environ, stdout=sys.stderr if as_json else sys.stdout)


def _from_files(args: argparse.Namespace) -> Sealed:
    from supervisor.cli.offline import from_files

    return from_files(args.from_files, args.job, args.outcome)


def _sealed(args: argparse.Namespace) -> Sealed:
    """The sealed document of each run of the job (or of the job alone), and what could not be saved."""
    from supervisor.runs.sealing import (
        Sealed,
        find_runs,
        is_adopted_run,
        on_cluster,
        seal_array,
        seal_job,
        sealed_already,
    )

    target, asked_for = _target(args)
    if not target.jobid[0].isdecimal():
        return Sealed([run_document(path)[0] for path in asked_for])
    named = args.cluster or target.cluster
    if asked_for and is_adopted_run(asked_for[0]) is not False:
        return _settled(args, asked_for[0])

    def runs_of(jobid: str) -> list[str]:
        return asked_for or [path for path in find_runs(jobid) if on_cluster(path, named)]

    if target.tasks is None:
        run_dirs = runs_of(target.jobid)
        before = sealed_already(target.jobid, run_dirs)
        if before and _stands(args, target, run_dirs, bool(asked_for)):
            return before
    parts, truths = _ask(args, target)
    if parts.kind == "array":
        return seal_array(parts.jobid, truths, args.patience, parts.why)
    doubts = [parts.why] if parts.why else []
    return seal_job(parts.jobid, list(truths.values()), args.patience, run_dirs=runs_of(parts.jobid), doubts=doubts)


def _settled(args: argparse.Namespace, run_dir: str) -> Sealed:
    """The same of a run in somebody else's job, whose end is not waited for."""
    from supervisor.runs.adopted import settle
    from supervisor.scheduler.client import SlurmClient

    limit = (math.inf if args.timeout is None else args.timeout) if args.wait else args.patience
    return asyncio.run(settle(SlurmClient(cluster=args.cluster), run_dir, limit, wait=args.wait))


# --- which job, which runs -----------------------------------------------------------------------------------------


def _target(args: argparse.Namespace) -> tuple[Target, list[str]]:
    """The job (or a local run), and the run directory where that very run was asked for. Raises NoSuchRun."""
    from supervisor.core.attempt import display_id
    from supervisor.core.parts import Target, parse_target
    from supervisor.runs.sealing import is_adopted_run, job_of

    name = args.run or on_disk(args, args.job, job=True) or display_id(os.environ)
    if not name:
        raise NoSuchRun("which job? Name its id")
    if not args.run:
        with suppress(ValueError):
            return parse_target(name), []
    run_dir = find_run(name)
    if is_adopted_run(run_dir) is False and (later := later_runs(run_dir)):
        mine, last = os.path.basename(run_dir), os.path.basename(later[0])
        complain(f"{mine} is an earlier attempt of its job, whose last attempt is {last}: that one is judged")
        return Target(job_of(run_dir)), later
    return Target(job_of(run_dir)), [run_dir]


def _stands(args: argparse.Namespace, target: Target, run_dirs: list[str], asked_for: bool) -> bool:
    """Whether what is sealed answers, also when Slurm is asked once more: it may deny it, or (unless these very runs
    were asked for) have given the id to another job."""
    from supervisor.runs.sealing import came_again, is_denied

    truth = asyncio.run(_Asking(args, target, quiet=True).one(target.jobid, False, 0.0))
    return not is_denied(run_dirs, truth) and (asked_for or not came_again(run_dirs, truth))


# --- Slurm ---------------------------------------------------------------------------------------------------------


def _ask(args: argparse.Namespace, target: Target) -> tuple[Parts, dict[str, Truth]]:
    """The parts of the job (itself, where it has none), and the truth about each."""
    from supervisor.scheduler.client import slurm_is_here

    return asyncio.run(_Asking(args, target).everything(args.wait, args.patience if slurm_is_here() else 0.0))


class _Asking:
    """The questions to Slurm, and what is said of them on stderr meanwhile."""

    def __init__(self, args: argparse.Namespace, target: Target, quiet: bool = False) -> None:
        from supervisor.scheduler.client import SlurmClient

        self._target = target
        self._submission = submission_of(target.jobid)
        submitted_to = self._submission.cluster if self._submission else None
        self._client = SlurmClient(cluster=args.cluster or target.cluster or submitted_to)
        self._limit = args.timeout
        self._patience = args.patience
        self._quiet = quiet or args.quiet
        self._said: set[str] = set()

    async def everything(self, wait: bool, patience: float) -> tuple[Parts, dict[str, Truth]]:
        """See `_ask`. Raises ValueError for a malformed id."""
        from supervisor.core.parts import Parts
        from supervisor.scheduler.parts import list_parts

        target, jobid = self._target, self._target.jobid
        if target.tasks is not None:
            parts = Parts(jobid, "array", tuple(f"{jobid}_{task}" for task in target.tasks))
            return parts, await self._many(parts.names, wait, patience)
        tasks, components = self._asked_for(jobid)
        if not tasks and not components:
            truth = await self.one(jobid, wait, patience)
            if truth.standing != "several":
                return await self._by_its_name(truth, wait, patience)
        parts = await list_parts(self._client, jobid, tasks=tasks, components=components)
        return parts, await self._many(parts.names, wait, patience)

    async def _by_its_name(self, truth: Truth, wait: bool, patience: float) -> tuple[Parts, dict[str, Truth]]:
        """A task or component that was called by its raw id, asked for again by the id that everybody calls it by: its
        runs and its submission are known by that one."""
        from supervisor.core.parts import Parts

        jobid = truth.record.display if truth.record is not None and truth.settled else truth.jobid
        if jobid != truth.jobid:
            truth = await self.one(jobid, wait, patience)
        return Parts(jobid, "single", (jobid,)), {jobid: truth}

    def _asked_for(self, jobid: str) -> tuple[tuple[int, ...] | None, int | None]:
        """The tasks and the number of components that the job's submission asked for, as far as that is known."""
        if self._submission is None or not jobid.isdecimal():
            return None, None
        return self._submission.tasks, self._submission.components

    async def one(self, jobid: str, wait: bool, patience: float) -> Truth:
        """The truth about one job."""
        from supervisor.scheduler.verify import verify_job

        asking = self

        class Heard:
            """The client, listened to."""

            async def sacct(self, jobid: str) -> Answer:
                return asking._hear(await asking._client.sacct(jobid))

            async def show_job(self, jobid: str) -> Answer:
                return asking._hear(await asking._client.show_job(jobid))

        return await verify_job(Heard(), jobid, wait, patience, limit=self._limit)

    async def _many(self, names: Sequence[str], wait: bool, patience: float) -> dict[str, Truth]:
        from supervisor.scheduler.parts import verify_parts

        def told(name: str, seen: Seen) -> None:
            if seen.trouble:
                self._say(seen.trouble)

        return await verify_parts(self._client, names, wait, patience, limit=self._limit, told=told)

    def _hear(self, answer: Answer) -> Answer:
        if answer.outcome == "failed":
            self._say(answer.problem)
        return answer

    def _say(self, trouble: str) -> None:
        if not self._quiet and self._patience > 0 and trouble not in self._said:
            self._said.add(trouble)
            complain(f"{trouble}: asking again, for up to {self._patience:g} s")


# --- what is printed -----------------------------------------------------------------------------------------------


def print_sealed(sealed: Sealed, as_json: bool) -> None:
    """The answer on stdout."""
    if as_json:
        tell(json.dumps(sealed.document, ensure_ascii=False, indent=1))
        return
    array = sealed.whole is not None and any(d["jobid"] != sealed.whole["jobid"] for d in sealed.documents)
    for document in sealed.documents:
        _print_one(document, brief=array and not document["verdict"]["code"])
    if array and sealed.whole is not None:
        _print_one(sealed.whole, brief=True)
    for text in sealed.document.get("evidence", ()):
        tell(f"  {text}")


def _print_one(document: Document, brief: bool) -> None:
    verdict = document["verdict"]
    name = document.get("run_id") or document["jobid"]
    tell(f"{name}: {verdict['outcome']} {verdict['code']} ({verdict['origin']}): {verdict['summary']}")
    notes = (document.get("slurm") or {}).get("notes", ())
    told = () if brief else (*verdict["because"], *notes, *document.get("disagreements", ()))
    for text in dict.fromkeys(told):
        if text != verdict["summary"]:
            tell(f"  {text}")
