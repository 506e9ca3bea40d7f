"""`allocctl run`: a plan to a proven verdict, through srun inside an allocation, else on this machine."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from supervisor.cli.output import end_with, refuse, sentence, tell
from supervisor.core import codes
from supervisor.runs.registry import register

if TYPE_CHECKING:
    from supervisor.core.allocation import Allocation
    from supervisor.core.layout import Layout
    from supervisor.core.plan import Plan
    from supervisor.engine.prepare import Prepared
    from supervisor.engine.session import Outcome
    from supervisor.engine.time_limit import EndTimeReader
    from supervisor.launch.base import Launcher
    from supervisor.scheduler.client import SlurmClient


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("run", help="run a plan to a proven verdict")
    parser.add_argument("plan", help="the plan, a TOML file")
    parser.add_argument("--dir", help="where run directories are made (default: $ALLOCD_RUNS, else the plan's run.dir)")
    parser.add_argument("--local", action="store_true", help="run on this machine, even inside an allocation")
    parser.add_argument("--dry-run", action="store_true", help="print every command line exactly, start nothing")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the run's receipt on stdout at the end")
    output.add_argument("-q", "--quiet", action="store_true", help="the run's id on stdout, and no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Run the plan. Returns the run's exit code, or 78 when nothing could be started."""
    gc.disable()  # what is imported from here on stays: to look for garbage in it takes a tenth of the way to the start
    from supervisor.core.fields import PlanErrors
    from supervisor.engine.prepare import Unfit
    from supervisor.runs.plans import read_plan

    try:
        return _run(args, *read_plan(args.plan))
    except (PlanErrors, Unfit) as error:
        return refuse(args, error, codes.CONFIG)
    except OSError as error:  # nothing has been started: the engine itself tells of what breaks later
        return refuse(args, sentence(error), codes.CONFIG)
    finally:
        gc.enable()


def _run(args: argparse.Namespace, plan: Plan, plan_text: str) -> int:
    from supervisor.engine import prepare

    in_slurm = bool(os.environ.get("SLURM_JOB_ID")) and not args.local
    base = args.dir or os.environ.get("ALLOCD_RUNS") or plan.base
    launcher: Launcher
    clock: EndTimeReader | None = None
    notes: tuple[str, ...] = ()
    if in_slurm:
        allocation, launcher, clock, notes = _in_slurm(base)
        jobid, attempt = allocation.jobid, allocation.attempt
        nodes = prepare.slurm_nodes(plan, allocation.nodes)
    else:
        from supervisor.launch.local import LocalLauncher

        attempt = prepare.local_attempt()
        jobid, nodes, launcher = attempt, prepare.local_nodes(plan), LocalLauncher()
    if args.dry_run:
        return _dry_run(prepare.layout_for(plan, base, attempt, jobid, nodes), launcher, args.json)
    prepared = prepare.prepare(plan, plan_text, base, attempt, jobid, nodes)
    try:
        return _drive(args, prepared, launcher, clock, plan_text, notes)
    finally:
        for descriptor in prepared.held:
            os.close(descriptor)


def _in_slurm(base: str) -> tuple[Allocation, Launcher, EndTimeReader, tuple[str, ...]]:
    """The allocation that we are in, its launcher, its clock, and sentences for the journal. Raises Unfit."""
    from supervisor.core.allocation import allocation_from
    from supervisor.engine.prepare import Unfit
    from supervisor.engine.time_limit import SlurmClock
    from supervisor.launch.srun import SrunLauncher
    from supervisor.scheduler.client import SlurmClient

    client = SlurmClient()
    try:
        allocation = allocation_from(os.environ)
    except ValueError as error:
        raise Unfit(f"{error}: unset SLURM_JOB_ID, or use --local") from error
    allocation, notes = _confirmed(allocation, client, base)
    srun = shutil.which("srun")
    if srun is None:
        raise Unfit("SLURM_JOB_ID is set, but there is no srun on PATH: add Slurm's bin directory, or use --local")
    return allocation, SrunLauncher(client, allocation, srun), SlurmClock(client, allocation.records), notes


def _confirmed(allocation: Allocation, client: SlurmClient, base: str) -> tuple[Allocation, tuple[str, ...]]:
    """The allocation as the controller knows it, asked only where the variables alone may mislead: a job that an
    array's task submitted inherits that task's name, and a run that is here already may be one of before a requeue of
    which SLURM_RESTART_COUNT, lost on the way, did not tell."""
    claims_task = "_" in allocation.jobid
    if not claims_task and not os.path.exists(os.path.join(base, allocation.attempt)):
        return allocation, ()
    answer = asyncio.run(client.show_job(allocation.records[0]))
    if answer.outcome == "failed":
        return allocation, (f"that this is job {allocation.attempt} was not confirmed: {answer.problem}",)
    if claims_task and (answer.record is None or answer.record.jobid != allocation.raw):
        text = f"SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID are another job's: this is {allocation.raw}"
        return replace(allocation, jobid=allocation.raw), (text,)
    if answer.record is None or answer.record.restarts is None:
        return allocation, ()
    return replace(allocation, restarts=answer.record.restarts), ()


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


def _drive(
    args: argparse.Namespace,
    prepared: Prepared,
    launcher: Launcher,
    clock: EndTimeReader | None,
    plan_text: str,
    notes: tuple[str, ...],
) -> int:
    import tomllib

    from supervisor import versions
    from supervisor.cli.live import Printer, reporter
    from supervisor.core import events as ev
    from supervisor.engine.session import drive

    layout = prepared.layout
    register(layout.run_id, layout.run_dir)
    opening = ev.RunOpened(
        run_id=layout.run_id,
        jobid=layout.jobid,
        run_dir=layout.run_dir,
        marker=layout.marker,
        nodes=list(layout.nodes),
        launcher=launcher.kind,
        host=socket.gethostname(),
        pid=os.getpid(),
        plan=_journalled(tomllib.loads(plan_text), layout.plan),
        versions=versions(),
        cluster=os.environ.get("SLURM_CLUSTER_NAME", "") if launcher.kind == "slurm" else "",
        user=os.environ.get("SLURM_JOB_USER", "") if launcher.kind == "slurm" else "",
    )
    notes = (*notes, *prepared.notes, *_not_the_batch_process())
    printer = Printer(sys.stderr)
    try:
        if args.quiet:
            tell(layout.run_id)
        else:
            printer.print(f"allocctl: run {layout.run_id} in {layout.run_dir}")
        report = None if args.quiet else reporter(printer)
        gc.freeze()  # no collection looks again at what is there by now, the interpreter's last one included
        gc.enable()
        outcome = drive(layout, launcher, opening, clock=clock, report=report, notes=notes)
        printer.settle()
        for text in (*outcome.trouble, _verdict(layout.run_id, outcome)):
            printer.print(f"allocctl: {text}")
    finally:
        printer.close()
    end_with(outcome.code)
    if args.json:
        tell(json.dumps(outcome.receipt, indent=1, ensure_ascii=False))
    return outcome.code


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


def _not_the_batch_process() -> tuple[str, ...]:
    """Slurm's early signal reaches only the batch script's own process: say so when that is not us."""
    if os.environ.get("ENVIRONMENT") != "BATCH" or "SLURM_JOB_ID" not in os.environ:
        return ()
    try:
        with open(f"/proc/{os.getppid()}/comm", encoding="utf-8") as file:
            parent = file.read().strip()
    except OSError:
        return ()
    if parent.startswith("slurmstepd"):
        return ()
    text = (
        f"allocctl is a child of {parent!r}, not the batch script's own process: Slurm's signals to the script do not "
        "reach it. Start it with `exec allocctl run ...` as the script's last line"
    )
    return (text,)
