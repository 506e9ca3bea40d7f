"""`allocctl submit`: a plan to a batch job of Slurm's, exactly once.

    allocctl submit plan.toml                            the job's id on stdout, sentences on stderr
    allocctl submit plan.toml -- -p debug --comment=x    further options of sbatch; they win over the plan
    allocctl submit --dry-run plan.toml                  sbatch's command line and the script, and nothing is done
    allocctl submit --direct plan.toml                   past allocd, if one answers here

Where allocd answers, the plan is handed over to it: it is submitted when there is room, and followed to its end. While
it waits in the queue there is no job: allocd's key is printed in the place of an id, and every verb takes it.

What can go wrong and what it ends with: the plan, an option, the machine, or a refusal by sbatch (a wrong partition, an
account that may not: what was asked for has to change) 78; a controller that was not reached 69: nothing was submitted;
a submission that may or may not have happened 75: the same command settles it later, and submits only when it may;
sbatch failed, and there is certainly no job: 1. After an interrupt: 79 when there is a job, 130 when there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.interrupts import Interrupts
from supervisor.cli.output import complain, refuse, sentence, tell
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.cli.daemon import Daemon, Document
    from supervisor.core.submission import Order
    from supervisor.scheduler.submit import Submitted

SCHEMA_VERSION: Final = 1
ANSWER_LIMIT: Final = 90.0  # seconds that one stays for sbatch's answer to allocd, which has a minute for it


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    from supervisor.cli.wait import add_options

    parser = subparsers.add_parser(
        "submit",
        help="submit a plan to Slurm",
        usage="allocctl submit [options] plan [-- options of sbatch]",
        description="Submit a plan as a batch job. Options of sbatch behind -- win over the plan's [slurm] table.",
    )
    parser.add_argument("plan", help="the plan, a TOML file")
    parser.add_argument("--dir", help="where run directories are made (default: $ALLOCD_RUNS, else the plan's run.dir)")
    parser.add_argument("--allocctl", help="allocctl on the nodes (default: $ALLOCCTL, slurm.allocctl, this one)")
    parser.add_argument("-M", "--cluster", help="the cluster, where there are several (default: slurm.cluster)")
    parser.add_argument("--wait", action="store_true", help="follow the job to its proven end, and exit with its code")
    add_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print sbatch's command line and the script, do nothing")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--direct", action="store_true", help="run sbatch from here, also where allocd answers")
    add_socket(way)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document")
    output.add_argument("-q", "--quiet", action="store_true", help="the id alone, and sentences only about trouble")


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """The arguments; what stands behind `--` is sbatch's, untouched (argparse would look for plans in it)."""
    own = words[: words.index("--")] if "--" in words else words
    args = parser.parse_args(own)
    args.options = words[len(own) + 1 :]
    return args


def run(args: argparse.Namespace) -> int:
    """Submit. Returns 0 when there is a job."""
    from supervisor.core.fields import PlanErrors
    from supervisor.core.sbatch_options import Misfit
    from supervisor.runs.ordering import Unfit

    try:
        made = prepare(args)
        for note in made.notes:
            complain(note)
        if args.dry_run:
            return _dry_run(made, args.json)
    except (PlanErrors, Misfit, Unfit) as error:
        return refuse(args, error, codes.CONFIG)
    with Interrupts() as interrupts:
        try:
            code = _through_daemon(args, made, interrupts)
            if code is not None:
                return code
            done = submit(made, interrupts)
        except OSError as error:
            return refuse(args, f"nothing was submitted: {sentence(error)}", codes.CONFIG)
        code = report(args, done)
        return _wait(args, done, interrupts) if _goes_on(args, code) else code


# --- before sbatch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """What is to be submitted."""

    order: Order
    plan_text: str
    notes: tuple[str, ...]


def prepare(args: argparse.Namespace) -> Made:
    """Read and check everything; nothing is written. Raises PlanErrors, Misfit, Unfit."""
    from supervisor.runs.ordering import terms
    from supervisor.runs.plans import read_plan

    plan, text = read_plan(args.plan)
    found, notes = terms(
        plan,
        os.environ,
        directory=args.dir,
        allocctl=args.allocctl,
        cluster=args.cluster,
        options=args.options,
    )
    return Made(found.order(plan), text, notes)


def _dry_run(made: Made, as_json: bool) -> int:
    submission, script = made.order.submission, made.order.script
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "argv": submission.argv, "script": script}
        tell(json.dumps({**document, "directory": made.order.directory}, indent=1, ensure_ascii=False))
        return codes.OK
    tell(f"{shlex.join(submission.argv)}\n\n# {submission.script}:\n{script}")
    return codes.OK


# --- sbatch -----------------------------------------------------------------------------------------------------------


def submit(made: Made, interrupts: Interrupts) -> Submitted:
    """Submit, unless an earlier submission of the same plan has a job or cannot be settled. Raises OSError, and
    KeyboardInterrupt when it was interrupted before anything was asked for."""
    from supervisor.runs.registry import register_job

    done = asyncio.run(_submit(made, interrupts))
    if done is None:
        raise KeyboardInterrupt
    if done.submission.state == "submitted" and done.submission.jobid:
        register_job(done.submission.jobid, done.directory)
    return done


async def _submit(made: Made, interrupts: Interrupts) -> Submitted | None:
    from supervisor.scheduler.client import SlurmClient
    from supervisor.scheduler.submit import Sbatch, Stop, Submitter

    stop, submission = Stop(), made.order.submission
    submitter = Submitter(Sbatch(os.environ, os.getcwd()), SlurmClient(), stop)
    with interrupts.told_to(stop.ask):
        done = await submitter.settle_earlier(submission.base, made.plan_text, submission.uid)
        if done is None:
            if stop.gently.is_set():
                return None
            done = await submitter.submit(made.order, made.plan_text)
    return replace(done, interrupted=stop.gently.is_set())


# --- through allocd ---------------------------------------------------------------------------------------------------


def _through_daemon(args: argparse.Namespace, made: Made, interrupts: Interrupts) -> int | None:
    """Hand the plan over to allocd. The exit code; None when nobody was there. An earlier submission of the same plan
    that is in doubt is settled first. Raises OSError, and KeyboardInterrupt when nothing was asked for."""
    from supervisor.cli.daemon import Absent, daemon_at

    if args.direct or (daemon := daemon_at(args)) is None:
        return None
    from supervisor.cli.accepted import Interrupted, carried, hand_over
    from supervisor.cli.asking import NobodyAnswers, NobodyThere, Refused
    from supervisor.cli.daemon import code_of
    from supervisor.core.sbatch_options import in_one_piece

    environ = carried(os.environ)
    if environ is None:
        complain("allocd is not asked: an environment variable's name or value is such that it cannot be handed over")
        return None
    if (earlier := asyncio.run(_settle(made, interrupts))) is not None:
        code = report(args, earlier)
        return _wait(args, earlier, interrupts) if _goes_on(args, code) else code
    body = {
        "plan": made.plan_text,
        "cwd": os.getcwd(),
        "options": in_one_piece(args.options),
        "directory": made.order.submission.base,
        "cluster": args.cluster,
        "allocctl": args.allocctl or os.environ.get("ALLOCCTL") or None,
        "environ": environ,
    }
    try:
        held = hand_over(daemon, "/v1/allocations", body, interrupts)
    except NobodyThere as error:
        if args.socket:
            return refuse(args, f"nothing was submitted: {error}", codes.UNREACHABLE)
        return None
    except NobodyAnswers as error:
        text = f"it may have been accepted: {error}. `allocctl list` tells, when allocd answers again"
        return refuse(args, text, codes.UNVERIFIABLE)
    except Interrupted as error:
        return refuse(args, error, codes.CANCELLED)
    except (Absent, Refused) as error:
        return refuse(args, f"nothing was submitted: {error}", code_of(error))
    return _accepted(args, daemon, held, interrupts)


async def _settle(made: Made, interrupts: Interrupts) -> Submitted | None:
    """An earlier submission of the plan that stands in the way."""
    from supervisor.scheduler.client import SlurmClient
    from supervisor.scheduler.submit import Sbatch, Stop, Submitter

    stop, submission = Stop(), made.order.submission
    with interrupts.told_to(stop.ask):
        submitter = Submitter(Sbatch(os.environ, "/"), SlurmClient(), stop)
        earlier = await submitter.settle_earlier(submission.base, made.plan_text, submission.uid)
    if earlier is None and stop.gently.is_set():
        raise KeyboardInterrupt
    return earlier


def _accepted(args: argparse.Namespace, daemon: Daemon, held: Document, interrupts: Interrupts) -> int:
    """What becomes of it: at once, or (--wait) to its end. Returns the exit code."""
    from supervisor.cli.accepted import Left, ended, follow, has_job, wait_for_held
    from supervisor.cli.asking import NobodyAnswers, Refused
    from supervisor.cli.daemon import names_of, standing
    from supervisor.cli.wait import options_from

    options, interrupted, why = options_from(args), False, ""
    try:
        interrupts.raises = True
        if held["state"] == "submitting":
            held = follow(
                daemon,
                held,
                has_job,
                deadline=time.monotonic() + ANSWER_LIMIT,
                heard=lambda event: event["kind"] == "submitted",
            )
    except Left:
        why = f"sbatch has not answered for {ANSWER_LIMIT:g} s"
    except KeyboardInterrupt:
        interrupted = True
    except (NobodyAnswers, Refused) as error:
        why = str(error)
    finally:
        interrupts.raises = False
    if held["state"] == "ended" and not held["jobid"]:
        return ended(options, held)
    code = codes.INTERRUPTED if interrupted else codes.OK
    name = f"{held['jobid']};{held['cluster']}" if held["jobid"] and held["cluster"] else held["jobid"] or held["key"]
    waits = args.wait and not interrupted
    if not args.json:
        tell(name)
    elif not waits:
        document: Document = {
            "id": name,
            "exit": code,
            "earlier": False,
            "several": [],
            "allocation": held,
        }
        tell(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=1, ensure_ascii=False))
    if not args.quiet or code:
        what = "submitted" if held["jobid"] else f"accepted, and not submitted yet: {standing(held)}"
        trouble = "; ".join(filter(None, [why, held["trouble"]]))
        goes_on = "; interrupted, and it goes on" if interrupted else ""
        complain(f"{names_of(held)} {what}{f' ({trouble})' if trouble else ''}{goes_on}")
    return wait_for_held(daemon, held, options, interrupts) if waits else code


# --- after it ---------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, done: Submitted) -> int:
    """Tell what came of it. Returns the exit code."""
    code = code_of(done)
    text = _told(done)
    if done.submission.state == "submitted" and not done.several:
        if not args.json:
            tell(done.submission.shown_id)
        elif not _goes_on(args, code):  # else the one document is the receipt
            tell(json.dumps(_document(done, code), indent=1, ensure_ascii=False))
        if not args.quiet or code or done.earlier:
            complain(text)
    else:
        complain(text)
        if args.json:
            tell(json.dumps({**_document(done, code), "error": text}, indent=1, ensure_ascii=False))
    if done.trouble:
        complain(done.trouble)
    return code


def _goes_on(args: argparse.Namespace, code: int) -> bool:
    """Whether the job is waited for: also when an interrupt came while sbatch ran, which is to cancel it."""
    return args.wait and (code == codes.OK or (code == codes.INTERRUPTED and args.cancel_on_interrupt))


def _wait(args: argparse.Namespace, done: Submitted, interrupts: Interrupts) -> int:
    """Follow the job to its end. Returns its exit code."""
    from supervisor.cli.wait import options_from, wait_for
    from supervisor.runs.target import submitted_target

    target = submitted_target(done.submission, str(done.submission.jobid))
    return wait_for(target, options_from(args), interrupts, interrupted=done.interrupted)


def code_of(done: Submitted) -> int:
    """The exit code of a submission."""
    submission = done.submission
    if done.several:
        return codes.UNVERIFIABLE
    if submission.state == "refused":
        return codes.CONFIG if done.reached else codes.UNREACHABLE
    if submission.state == "submitted":
        return codes.INTERRUPTED if done.interrupted else codes.OK
    if submission.state == "absent":
        return codes.CANCELLED if done.interrupted else codes.FAILED
    return codes.UNVERIFIABLE


def _told(done: Submitted) -> str:
    submission, where = done.submission, done.directory
    if done.several:
        ids = " and ".join(done.several)
        return (
            f"jobs {ids} all run {submission.script}: it was submitted more than once. Look at them with squeue, "
            "cancel what should not be (scancel), and follow the other one by its id"
        )
    words = f": {submission.words}" if submission.words else ""
    if submission.state == "submitted":
        when = f"was submitted earlier ({submission.asked}); nothing was submitted now" if done.earlier else "submitted"
        directory, name = os.path.split(submission.output)
        output = os.path.join(directory, re.sub("%[jA]", f"{submission.jobid}", name))
        ends = "; interrupted, and the job goes on" if done.interrupted else ""
        return f"job {submission.jobid} {when}{words}; its output: {output}{ends}"
    if submission.state == "refused":
        why = "sbatch refused" if done.reached else "the controller was not reached, nothing was submitted"
        return f"{why}{words}"
    if submission.state == "absent":
        return f"nothing was submitted{words}: it is safe to submit again"
    return (
        f"it may have been submitted{words}. Submit the same plan again to settle that first, or look for its script: "
        f"squeue --me --states=all --format='%i %o' | grep {os.path.basename(where)}"
    )


def _document(done: Submitted, code: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "id": done.submission.shown_id if done.submission.jobid else None,
        "exit": code,
        "directory": done.directory,
        "earlier": done.earlier,
        "several": done.several,
        "submission": done.submission.to_dict(),
    }
