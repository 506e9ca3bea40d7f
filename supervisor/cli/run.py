"""`allocctl run`: a plan to a proven verdict, through srun inside an allocation, else on this machine."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shlex
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli.output import end_with, refuse, sentence, tell
from supervisor.core import codes
from supervisor.runs import registry

if TYPE_CHECKING:
    from supervisor.cli.live import Printer
    from supervisor.cli.places import Place
    from supervisor.core.layout import Layout
    from supervisor.core.plan import Plan
    from supervisor.engine.prepare import Prepared
    from supervisor.engine.session import Beside, Outcome
    from supervisor.launch.base import Launcher


SETTLE: Final = 10.0
"""Seconds that Slurm's records of an adopted run's steps are waited for."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("run", help="run a plan to a proven verdict")
    parser.add_argument("plan", help="the plan, a TOML file")
    parser.add_argument("--dir", help="where run directories are made (default: $ALLOCD_RUNS, else the plan's run.dir)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobid", help="start the steps from here, in this job that runs already (see `adopt`)")
    where.add_argument("--local", action="store_true", help="run on this machine, even inside an allocation")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print every command line exactly, start nothing")
    what.add_argument("--serve", action="store_true", help="answer on a Unix socket as allocd does, for this run alone")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the run's receipt on stdout at the end")
    output.add_argument("-q", "--quiet", action="store_true", help="the run's id on stdout, and no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Run the plan. Returns the run's exit code, or 78 when nothing could be started."""
    gc.disable()  # what is imported from here on stays: to look for garbage in it takes a tenth of the way to the start
    from supervisor.core.fields import PlanErrors
    from supervisor.engine.prepare import Unfit
    from supervisor.runs.plans import read_plan
    from supervisor.runs.start import VARIABLE, Claimed, claim

    start = os.environ.pop(VARIABLE, "")  # not the ranks' business
    try:
        if start:
            claim(start)
        return _run(args, *read_plan(args.plan), start)
    except (PlanErrors, Unfit, Claimed) as error:
        return refuse(args, error, codes.CONFIG)
    except OSError as error:  # nothing has been started: the engine itself tells of what breaks later
        return refuse(args, sentence(error), codes.CONFIG)
    finally:
        gc.enable()


def _run(args: argparse.Namespace, plan: Plan, plan_text: str, start: str) -> int:
    from supervisor.cli.places import elsewhere, here, in_slurm
    from supervisor.engine import prepare
    from supervisor.runs.start import announce

    unit = os.environ.pop("ALLOCD_UNIT", "")
    base = args.dir or os.environ.get("ALLOCD_RUNS") or plan.base
    if args.jobid:
        place = elsewhere(plan, args.jobid)
    elif os.environ.get("SLURM_JOB_ID") and not args.local:
        place = in_slurm(plan, base)
    else:
        place = here(plan)
    if args.dry_run:
        attempt = f"{place.attempt}.s1" if place.adopted else place.attempt
        return _dry_run(prepare.layout_for(plan, base, attempt, place.jobid, place.nodes), place.launcher, args.json)
    prepared = prepare.prepare(
        *(plan, plan_text, base, place.attempt, place.jobid, place.nodes), further=place.adopted, ids=registry
    )
    if start:
        announce(start, prepared.layout.run_dir)
    try:
        return _drive(args, prepared, place, plan_text, unit)
    finally:
        for descriptor in prepared.held:
            os.close(descriptor)


def _dry_run(layout: Layout, launcher: Launcher, as_json: bool) -> int:
    """Every command line exactly as it would run, in the order of ranks."""
    steps = [
        {
            "rank": rank,
            "node": layout.nodes[rank],
            "step": list(launcher.step(layout, rank).argv),
            "command": layout.rank_command(rank),
        }
        for rank in layout.plan.ranks
    ]
    if as_json:
        print(json.dumps({"schema_version": 1, "run_dir": layout.run_dir, "steps": steps}, indent=1))
        return codes.OK
    for item in steps:
        print(f"# rank {item['rank']} on {item['node']}: {shlex.join(item['command'])}")  # type: ignore[arg-type]
        print(shlex.join(item["step"]))  # type: ignore[arg-type]
    return codes.OK


def _drive(args: argparse.Namespace, prepared: Prepared, place: Place, plan_text: str, unit: str) -> int:
    import tomllib

    from supervisor import versions
    from supervisor.cli.live import Printer, reporter
    from supervisor.core import events as ev
    from supervisor.engine.session import drive

    layout = prepared.layout
    registry.register(layout.run_id, layout.run_dir)
    opening = ev.RunOpened(
        run_id=layout.run_id,
        jobid=layout.jobid,
        run_dir=layout.run_dir,
        marker=layout.marker,
        nodes=list(layout.nodes),
        launcher=place.launcher.kind,
        host=socket.gethostname(),
        pid=os.getpid(),
        plan=_journalled(tomllib.loads(plan_text), layout.plan),
        versions=versions(),
        cluster=place.cluster,
        user=place.user,
        adopted=place.adopted,
        unit=unit,
        steps=layout.step_prefix,
        plan_file=os.path.join(os.getcwd(), args.plan),
    )
    notes = (*place.notes, *prepared.notes)
    printer = Printer(sys.stderr)
    try:
        if args.quiet:
            tell(layout.run_id)
        else:
            printer.print(f"allocctl: run {layout.run_id} in {layout.run_dir}")
        report = None if args.quiet else reporter(printer)
        gc.freeze()  # no collection looks again at what is there by now, the interpreter's last one included
        gc.enable()
        beside = _served(printer) if args.serve else None
        outcome = drive(layout, place.launcher, opening, clock=place.clock, report=report, notes=notes, beside=beside)
        outcome, later = _by_its_steps(layout.run_dir, outcome) if place.adopted else (outcome, ())
        printer.settle()
        for text in (*outcome.trouble, *later, _verdict(layout.run_id, outcome)):
            printer.print(f"allocctl: {text}")
    finally:
        printer.close()
    end_with(outcome.code)
    if args.json:
        tell(json.dumps(outcome.receipt, indent=1, ensure_ascii=False))
    return outcome.code


def _served(printer: Printer) -> Beside:
    from supervisor.service.served import ServedRun

    return ServedRun(lambda text: printer.print(f"allocctl: {text}"))


def _by_its_steps(run_dir: str, outcome: Outcome) -> tuple[Outcome, tuple[str, ...]]:
    """An adopted run is over when it has ended, whatever its job does: sealed with Slurm's records of its steps. Where
    that cannot be yet, the verdict stays as it was first observed, and a sentence says so."""
    from supervisor.runs.adopted import settle
    from supervisor.runs.saved import Unreadable
    from supervisor.scheduler.client import SlurmClient

    try:
        sealed = asyncio.run(settle(SlurmClient(), run_dir, SETTLE))
        verdict = sealed.document["verdict"]
        if verdict["final"] and not sealed.trouble:
            return replace(outcome, receipt={**outcome.receipt, "verdict": verdict}), ()
        why = sealed.trouble[0] if sealed.trouble else verdict["because"][-1]
    except (OSError, Unreadable) as error:
        why = str(error)
    return outcome, (f"not sealed yet: {why}: `allocctl verify {outcome.receipt['run_id']}` seals it",)


def _journalled(data: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The plan's data with the finalization window that counts, which the environment may have set, and without the
    values of its environment variables: they may be secrets, and decide nothing."""
    deadlines = {**data.get("deadlines", {}), "finalization": plan.deadlines.finalization}
    roles = {
        name: {**role, "env": dict.fromkeys(role["env"], "not journalled")} if "env" in role else role
        for name, role in data["roles"].items()
    }
    return {**data, "roles": roles, "deadlines": deadlines}


def _verdict(run_id: str, outcome: Outcome) -> str:
    """The last line: people read the sentence, programs the brackets."""
    verdict = outcome.receipt["verdict"]
    observed = "" if verdict["final"] else ", first observed"
    saved = "; not everything could be saved" if outcome.trouble else ""
    summary = f"{verdict['outcome']}{observed}: {verdict['summary']}{saved}"
    return f"{run_id}: {summary} [exit {verdict['code']}, origin {verdict['origin']}]"
