"""`allocctl wait`: follow a job to its proven end, and exit with its code. `submit --wait` does so after submitting.

On the way: Slurm's states and the run's story on stderr, logs on stdout (`--logs`). At the end the verdict on stderr,
whose last line is a sentence with the exit code and its origin in brackets. `-q` leaves that line alone, `--json` gives
one document on stdout instead of logs.

Whoever leaves before the end (SIGINT, SIGTERM, SIGHUP, `--timeout`) gets 79, and the job goes on. With
`--cancel-on-interrupt` the first signal cancels the job and the wait goes on to its end; the second one leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from supervisor.cli.arguments import PATIENCE, add_socket, seconds
from supervisor.cli.interrupts import Interrupts
from supervisor.cli.output import refuse, sentence, tell
from supervisor.core import codes
from supervisor.runs.registry import NoSuchRun
from supervisor.runs.saved import Unreadable

if TYPE_CHECKING:
    from supervisor.cli.daemon import Daemon
    from supervisor.cli.live import Printer
    from supervisor.cli.telling import StoryTeller
    from supervisor.runs.follow import Wanted
    from supervisor.runs.saved import Document
    from supervisor.runs.sealing import Sealed
    from supervisor.runs.target import Target

OUTAGE: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to wait. Seconds; `timeout` None: as long as the job takes."""

    timeout: float | None = None
    patience: float = PATIENCE
    outage: float = OUTAGE
    logs: str | None = None  # none, coordinator or all; None: what fits the job
    collect: str | None = None
    cancel: bool = False
    json: bool = False
    quiet: bool = False


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("wait", help="follow a job to its proven end, and exit with its code")
    parser.add_argument(
        "job", nargs="?", help="a job's id, a run's id or directory, allocd's key (default: $SLURM_JOB_ID)"
    )
    parser.add_argument("-M", "--cluster", help="the cluster, where there are several")
    add_socket(parser)
    add_options(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document on stdout at the end, and no logs")
    output.add_argument("-q", "--quiet", action="store_true", help="nothing but the last line, on stderr")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a wait, for `submit --wait` as well."""
    group = parser.add_argument_group("waiting")
    group.add_argument("--timeout", type=seconds, help="leave after so many seconds (79); the job goes on")
    group.add_argument("--logs", choices=("none", "coordinator", "all"), help="whose logs to print (an array: none)")
    group.add_argument("--patience", type=seconds, default=PATIENCE, help="seconds to examine a doubt (default: 30)")
    group.add_argument(
        "--outage", type=seconds, default=OUTAGE, help="seconds to wait for a Slurm that is away (default: 1800)"
    )
    group.add_argument("--collect", metavar="DIR", help="copy receipts, journal, logs, collected files to DIR/RUNID")
    group.add_argument(
        "--cancel-on-interrupt", action="store_true", help="cancel the job at the first signal, and wait for its end"
    )


def options_from(args: argparse.Namespace) -> Options:
    """The options that were typed."""
    return Options(
        timeout=args.timeout,
        patience=args.patience,
        outage=args.outage,
        logs=args.logs,
        collect=args.collect,
        cancel=args.cancel_on_interrupt,
        json=args.json,
        quiet=args.quiet,
    )


def run(args: argparse.Namespace) -> int:
    """Wait. The exit code is the job's; 75 when nothing can be proven, 79 when the wait was left, 69 when no such run
    is known, 125 when the proof of a success could not be saved."""
    from supervisor.runs.target import find_target

    try:
        if found := _held(args):
            from supervisor.cli.accepted import wait_for_held

            with Interrupts() as interrupts:
                return wait_for_held(*found, options_from(args), interrupts)
        target = find_target(args.job, args.cluster)
    except NoSuchRun as error:
        return refuse(args, error, codes.UNREACHABLE)
    except Unreadable as error:
        return refuse(args, error, codes.UNVERIFIABLE)
    with Interrupts() as interrupts:
        return wait_for(target, options_from(args), interrupts)


def _held(args: argparse.Namespace) -> tuple[Daemon | None, Document] | None:
    """What allocd holds by that name; a job's id is never that of a run that was started in somebody else's job. Raises
    NoSuchRun when one who was named does not answer."""
    from supervisor.cli.held import find_held

    found = find_held(args, args.job)
    return None if found and found[1]["kind"] == "adopted" and args.job == found[1]["jobid"] else found


def wait_for(target: Target, options: Options, interrupts: Interrupts, *, interrupted: bool = False) -> int:
    """Wait for a job or run, tell about it, and return its exit code; see `run`. `interrupted`: the first signal has
    come already."""
    from supervisor.cli.live import Printer
    from supervisor.cli.telling import StoryTeller

    printer = Printer(sys.stderr)
    teller = StoryTeller(target, None if options.quiet else printer)
    try:
        judged = _follow(target, options, teller, interrupts, interrupted)
        if judged is not None:
            return _tell(target, options, teller, printer, judged, interrupts)
        return _left(target, options, teller, printer)
    except KeyboardInterrupt:
        return _left(target, options, teller, printer)
    except OSError as error:
        return _refuse(options, printer, sentence(error), codes.UNVERIFIABLE)
    except (Unreadable, ValueError) as error:  # what lies in the run's directory is not what an engine writes
        return _refuse(options, printer, str(error), codes.UNVERIFIABLE)
    finally:
        interrupts.raises = False
        printer.close()


def _follow(
    target: Target, options: Options, teller: StoryTeller, interrupts: Interrupts, interrupted: bool
) -> Sealed | None:
    """Follow to the end, or until one leaves (None). Raises OSError, Unreadable, ValueError."""
    return asyncio.run(_wait(target, options, _logs(target, options), teller, interrupts, interrupted))


def _logs(target: Target, options: Options) -> str:
    """Whose logs are printed."""
    if options.json or options.quiet:
        return "none"
    return options.logs or ("none" if target.array else "coordinator")


def _wanted(options: Options, logs: str, teller: StoryTeller) -> Wanted:
    """The same for a follower. That a job is an array may turn out later."""
    from supervisor.runs.follow import LOGS

    wanted = LOGS[logs]
    if options.logs or logs == "none":
        return wanted
    return lambda state, rank, kind: not teller.array and wanted(state, rank, kind)


async def _wait(
    target: Target, options: Options, logs: str, teller: StoryTeller, interrupts: Interrupts, interrupted: bool
) -> Sealed | None:
    from supervisor.runs.adopted import settle
    from supervisor.runs.follow import Follower
    from supervisor.runs.waiting import Wait
    from supervisor.scheduler.client import SlurmClient, slurm_is_here
    from supervisor.scheduler.inquiry import USUAL
    from supervisor.scheduler.parts import list_parts
    from supervisor.scheduler.poller import Poller

    patience, outage = (options.patience, options.outage) if slurm_is_here() else (0.0, 0.0)
    client = SlurmClient(cluster=target.cluster)
    follower = Follower(
        target.jobid,
        target.places,
        _wanted(options, logs, teller),
        directories=target.directories,
        tasks="_" not in target.jobid,
        asked=target.asked,
        engine=target.alone,
    )
    wait = Wait(
        target,
        follower,
        teller,
        parts=lambda jobid: list_parts(client, jobid),
        poller=Poller(client, pace=replace(USUAL, patience=patience, outage=outage)),
        client=client,
        alone=(lambda path: settle(client, path, patience, outage=outage)) if target.adopted else None,
        cancel=options.cancel,
        patience=patience,
        outage=outage,
    )
    try:
        with interrupts.told_to(wait.interrupt):
            if interrupted:
                wait.interrupt()
            return await wait.run(options.timeout)
    finally:
        interrupts.raises = True  # what still hangs, and what is told from here on, can be left as well


# --- the end ---------------------------------------------------------------------------------------------------------


def _left(target: Target, options: Options, teller: StoryTeller, printer: Printer) -> int:
    """One left before the end."""
    again = f"`allocctl wait {target.shown}`"
    if target.alone:
        text = f"the wait was left; the run goes on: pick it up with {again}"
    elif teller.was_cancelled:
        text = f"the wait was left; job {target.jobid} was cancelled and is ending: {again} tells how it ended"
    elif not teller.was_seen and target.asked is None:
        slurm = "Slurm could not be asked about it" if teller.away else "Slurm has not shown it"
        text = f"the wait was left; nothing is known of job {target.jobid}: {slurm}, and no run of it is seen here"
    else:
        text = f"the wait was left; job {target.jobid} goes on: pick it up with {again}"
    return _refuse(options, printer, text, codes.INTERRUPTED)


def _refuse(options: Options, printer: Printer, text: str, code: int) -> int:
    """The last line, and the document, of a wait without a verdict."""
    printer.print(f"allocctl: {text} [exit {code}, origin allocd]")
    if options.json:
        tell(json.dumps({"schema_version": 1, "error": text, "exit": code}, ensure_ascii=False))
    return code


def _tell(
    target: Target, options: Options, teller: StoryTeller, printer: Printer, judged: Sealed, interrupts: Interrupts
) -> int:
    """The verdict, told to everybody who is to know. Returns the exit code."""
    from supervisor.cli.github import report
    from supervisor.cli.telling import verdict_lines

    documents, trouble = judged.documents, list(judged.trouble)
    if options.collect:
        trouble += _collect(target, documents, options.collect)
    # A document on stdout stays one: GitHub reads stderr as well.
    trouble += report(documents, environ=os.environ, stdout=sys.stderr if options.json else sys.stdout)
    if not options.quiet:
        for line in verdict_lines(documents, target, teller.reasons):
            printer.print(line)
        for text in trouble:
            printer.print(f"allocctl: {text}")
    if options.json:
        tell(json.dumps(judged.document, ensure_ascii=False, indent=1))
    verdict = judged.document["verdict"]
    saved = "; not everything could be saved or told" if judged.trouble else ""
    origin = verdict["origin"] if judged.code == verdict["code"] else "allocd"
    name = judged.document.get("run_id") or judged.document["jobid"]
    summary = f"{verdict['outcome']}: {verdict['summary']}{saved}"
    interrupts.raises = False  # what the last line says is how we end
    printer.print(f"allocctl: {name}: {summary} [exit {judged.code}, origin {origin}]")
    return judged.code


def _collect(target: Target, documents: list[Document], place: str) -> list[str]:
    """Copy what the runs left, and what their batch scripts printed. Returns what could not be copied, in sentences."""
    from supervisor.cli.ci import receipt_of, run_of
    from supervisor.runs.copies import copy_file, copy_run

    trouble: list[str] = []
    for document in documents:
        if run := run_of(document):
            trouble += copy_run(run["run_dir"], place)
        elif kept := receipt_of(document):
            trouble += copy_file(kept, place)
        output = target.output_of(str(document["jobid"]))
        if output and os.path.exists(output):
            trouble += copy_file(output, place)
    return trouble
