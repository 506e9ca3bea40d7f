"""`allocctl stop`: an orderly end of a run, by its engine; with `--cancel`, scancel of a job that was submitted here.

    allocd holds it            it is asked, and sees to it, also if the engine is not there yet
    the engine is on this host SIGTERM, to a process that is known to be the run's engine
    it is in a job             SIGTERM to the batch script by `scancel --batch`: no node's socket is reached from here

That a stop was asked for is all that is known when this ends: `allocctl wait` tells how the run ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING

from supervisor.cli.arguments import add_socket
from supervisor.cli.daemon import Absent, Daemon, Document, allocation, code_of, names_of, standing
from supervisor.cli.held import disk_name, find_held, part_in, written
from supervisor.cli.list import name_of
from supervisor.cli.output import complain, refuse, tell
from supervisor.core import codes
from supervisor.runs.registry import (
    Ambiguous,
    NoSuchRun,
    default_run,
    find_run,
    job_in,
    job_of_component,
    runs_of_job,
)

if TYPE_CHECKING:
    from supervisor.runs.target import Target
    from supervisor.scheduler.client import SlurmClient


class Cannot(Exception):
    """It cannot be stopped so; `code` is the exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("stop", help="end a run in order, or cancel its job")
    parser.add_argument("run", nargs="?", help="a run's id or directory, a job's id, or allocd's key")
    parser.add_argument("--cancel", action="store_true", help="scancel its job, which was submitted here")
    parser.add_argument("-M", "--cluster", help="the job's cluster, where there are several")
    add_socket(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument("-q", "--quiet", action="store_true", help="say nothing unless something is wrong")


def run(args: argparse.Namespace) -> int:
    """Ask for the end. 0: it was asked for, or has come already; 69 when the run cannot be reached; 78 when it may not
    be ended so; 1 when Slurm did not take it."""
    from supervisor.cli.asking import NobodyAnswers, Refused
    from supervisor.runs.saved import Unreadable

    try:
        name = args.run or default_run()
        daemon, held = find_held(args, name, parts=True) or (None, None)
        part = part_in(held, name) if held else None
        if held and (held["state"] == "ended" or (part and held["state"] == "ending")):
            return _done(args, f"{names_of(held)} has ended already: {standing(held)}{written(held)}", held)
        if held and daemon:
            return _by_daemon(args, daemon, held, part, name)
        name = disk_name(held) if held else name
        if job := job_of_component(name.partition(";")[0]):
            text = f"{name} is a component of job {job}, which has one run on all of them: name the job"
            raise Cannot(text, codes.CONFIG)
        text = _cancel(args, name) if args.cancel else _stop(args, name)
    except Cannot as error:
        return refuse(args, error, error.code)
    except (Absent, NobodyAnswers, Refused) as error:
        return refuse(args, error, code_of(error))
    except (NoSuchRun, Unreadable) as error:
        return refuse(args, error, codes.UNREACHABLE)
    return _done(args, text, None)


def _done(args: argparse.Namespace, text: str, held: Document | None) -> int:
    if not args.quiet:
        complain(text)
    if args.json:
        tell(json.dumps({"schema_version": 1, "text": text, "exit": codes.OK, "allocation": held}, ensure_ascii=False))
    return codes.OK


def _by_daemon(args: argparse.Namespace, daemon: Daemon, held: Document, part: str | None, name: str) -> int:
    """`part`: the task that is to be ended, and not the whole. Raises NobodyAnswers, Refused."""
    how = "cancel" if args.cancel else "stop"
    guests = held["kind"] == "adopted" and name == held["jobid"]  # of a job that has several allocd tells
    asked = name if guests else part or held["key"]
    before = ((part and daemon.find(part)) or held)["stopping"]
    held = daemon.ask("POST", f"{allocation(asked)}/stop", {"how": how}, 30.0)
    if held["state"] == "ended":
        text = f"{names_of(held)} was withdrawn before it became a job"
    else:
        what = _cancels(held, part, before) if args.cancel else _ends(held, before)
        who = f"task {part} of {held['key']}" if part else names_of(held)
        text = f"{who}: {what}; `allocctl wait {part or name_of(held)}` tells its end"
        text += f" (so far: {held['trouble']})" if held["trouble"] else ""
    return _done(args, text, held)


def _cancels(held: Document, part: str | None, before: str | None) -> str:
    """What a cancel does. `before`: what had been asked for."""
    again = ", and scancel is sent again" if before == "cancel" and held["state"] in ("pending", "running") else ""
    return f"its {'task' if part else 'job'} is being cancelled{again}"


def _ends(held: Document, before: str | None) -> str:
    """What a stop does."""
    if before == "cancel":
        return "it is being cancelled already, and nothing more is done (`stop --cancel` sends scancel again)"
    if not held["run_id"]:
        return "it ends in order as soon as its run has begun"
    return "it was asked to end before, and its engine is told once" if before else "it is told to end in order"


# --- without a daemon -------------------------------------------------------------------------------------------------


def _stop(args: argparse.Namespace, name: str) -> str:
    """What was done. Raises Cannot, NoSuchRun, Unreadable."""
    try:
        return _stop_run(args, _own_or_guest(name))
    except Ambiguous:
        raise
    except NoSuchRun:
        if (target := _submitted(name, args.cluster)) is None:
            raise
        return _stop_tasks(args, target)


def _own_or_guest(name: str) -> str:
    """The run directory that a name means; of a job's id, that of the one run in it which is known here and goes on,
    where the job has none of its own. Raises Ambiguous, NoSuchRun, Unreadable."""
    from supervisor.runs.saved import run_document
    from supervisor.runs.sealing import jobs_own

    found = find_run(name)
    if job_in(name) != name or jobs_own([found]):
        return found
    guests = runs_of_job(name)
    if own := jobs_own(guests):
        return own[0]
    going = [guest for guest in guests if not (told := run_document(guest))[1] and told[0]["alive"] is not False]
    if len(going) > 1:
        text = f"job {name} is somebody else's, and has several runs of yours: name one: {' or '.join(going)}"
        raise Ambiguous(text)
    return next(iter(going), found)


def _stop_tasks(args: argparse.Namespace, target: Target) -> str:
    """What was done to a job without a run of its own: to the runs of an array's tasks. Raises Cannot, Unreadable."""
    told, wrong = list[str](), list[Cannot]()
    waiting = 0
    for unit in target.units:
        try:
            told.append(_stop_run(args, find_run(unit)))
        except NoSuchRun:
            waiting += 1
        except Cannot as error:
            wrong.append(error)
    if not told and not wrong:
        text = f"job {target.jobid} has no run yet: `allocctl stop --cancel {target.jobid}` cancels the job"
        raise Cannot(text, codes.UNREACHABLE)
    if waiting:
        told.append(f"{waiting} tasks have no run yet, and are not stopped")
    if wrong:
        raise Cannot("; ".join([*map(str, wrong), *told]), wrong[0].code)
    return "; ".join(told)


def _stop_run(args: argparse.Namespace, directory: str) -> str:
    """What was done. Raises Cannot, Unreadable."""
    from supervisor.runs.saved import run_document
    from supervisor.runs.target import run_target

    document, over = run_document(directory)
    run_id = document["run_id"]
    if over:
        return f"run {run_id} has ended already"
    if document["alive"] is False:
        raise Cannot(f"run {run_id} has no engine any more: its agents end its ranks by themselves", codes.UNREACHABLE)
    if document["alive"]:
        return _signal(directory, run_id)
    target = run_target(directory)
    if target.alone:
        raise Cannot(f"the engine of run {run_id} is on {document['host']}: stop it there", codes.UNREACHABLE)
    if trouble := asyncio.run(_client(args.cluster or _cluster(target.jobid)).signal_batch(target.jobid, "TERM")):
        raise Cannot(f"job {target.jobid} was not told to stop: {trouble}", codes.FAILED)
    return (
        f"the batch script of job {target.jobid} was sent SIGTERM, and run {run_id} ends in order if its engine is "
        f"the script's own process; `allocctl wait {target.jobid}` tells its end"
    )


def _signal(directory: str, run_id: str) -> str:
    """Raises Cannot, Unreadable."""
    from supervisor.service.adopting import stop

    if not stop(directory):
        return f"run {run_id} has just ended"
    return f"the engine of run {run_id} was sent SIGTERM, and ends it in order"


def _cancel(args: argparse.Namespace, name: str) -> str:
    """What was done: to the job, or to the task that is named. Raises Cannot, NoSuchRun, Unreadable."""
    target = _cancellable(name, args.cluster)
    if trouble := asyncio.run(_cancelled(target)):
        raise Cannot(f"job {target.jobid} was not cancelled: {trouble}", codes.FAILED)
    return f"job {target.jobid} is being cancelled; `allocctl wait {target.shown}` tells its end"


def _cancellable(name: str, cluster: str | None) -> Target:
    """The job that a name means, where it was submitted here. Raises Cannot, NoSuchRun, Unreadable."""
    from supervisor.runs.target import run_target

    if (target := _submitted(name, cluster)) is not None:
        return target
    jobid = _job(name)
    if jobid is None:
        run = run_target(find_run(name))
        jobid = run.jobid if run.jobid[0].isdecimal() else None
        if not run.alone and (target := _submitted(run.jobid, cluster)) is not None:
            return target
    whose = f"job {jobid} was not submitted by allocctl here" if jobid else f"run {name} has no job"
    raise Cannot(f"{whose}: only who made a job cancels it, with scancel; `stop` ends the run", codes.CONFIG)


async def _cancelled(target: Target) -> str:
    """Cancel the job, if it is the one that was submitted. Why that failed, or ""."""
    from supervisor.runs.registry import submission_of
    from supervisor.scheduler.ours import strangers

    submission, client = submission_of(target.jobid), _client(target.cluster)
    if submission is None:
        return "the record of its submission is gone"
    others = await strangers(client, [target.jobid], submission.script, target.cluster)
    return others.get(target.jobid) or await client.cancel_job(target.jobid)


def _submitted(name: str, cluster: str | None) -> Target | None:
    """The job that a name means, or a task of it, where `allocctl submit` made it; None for that of another cluster,
    too."""
    from supervisor.runs.registry import submission_of
    from supervisor.runs.target import submitted_target

    jobid = _job(name)
    submission = submission_of(jobid) if jobid else None
    if jobid is None or submission is None or (cluster and submission.cluster != cluster):
        return None
    return submitted_target(submission, jobid)


def _job(name: str) -> str | None:
    """The id of the job, task or component that a name is; None for any other name. Raises Cannot for less than that,
    and for several."""
    from supervisor.core.parts import parse_target

    try:
        jobid = parse_target(name).jobid
    except ValueError:
        return None
    if jobid != name.partition(";")[0]:
        raise Cannot(f"{name} is neither a job nor one task of an array: name job {jobid}, or a task", codes.CONFIG)
    return jobid


def _cluster(jobid: str) -> str | None:
    from supervisor.runs.registry import submission_of

    submission = submission_of(jobid)
    return submission.cluster if submission else None


def _client(cluster: str | None) -> SlurmClient:
    from supervisor.scheduler.client import SlurmClient

    return SlurmClient(cluster=cluster)
