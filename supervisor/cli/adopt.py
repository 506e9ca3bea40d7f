"""`allocctl adopt`: a plan's steps in a job that somebody else made (sbatch, `salloc --no-shell`), started from here.

    allocctl adopt 4711 plan.toml                  start an engine that lives on by itself, and follow it
    allocctl adopt --detach 4711 plan.toml         start it, print the run's id, and leave
    allocctl adopt --foreground 4711 plan.toml     be the engine: it ends with this terminal

The engine is in a unit of the user manager, or in a session, of its own. Who leaves it (SIGINT, SIGTERM, SIGHUP) gets
79, and the run goes on: `allocctl wait RUN` picks it up, and SIGTERM to the engine stops it. A run that is over is
sealed with Slurm's records of its steps: the job's own end is somebody else's. When an engine that is followed dies,
what it has left in the job is ended: steps, never the job. Where allocd answers, the engine is started, followed and
cleaned up after by allocd (`--direct`: from here).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
from typing import TYPE_CHECKING

from supervisor.cli.arguments import add_socket
from supervisor.cli.interrupts import Interrupts
from supervisor.cli.output import complain, refuse, sentence, tell
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.service.adopting import Started


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser("adopt", help="run a plan in a job that runs already, from here")
    parser.add_argument("job", help="the job's id (123, an array's task 123_4)")
    parser.add_argument("plan", help="the plan, a TOML file")
    parser.add_argument("--dir", help="where run directories are made (default: $ALLOCD_RUNS, else the plan's run.dir)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--foreground", action="store_true", help="run the engine right here, for as long as you stay")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--direct", action="store_true", help="start the engine from here, also where allocd answers")
    add_socket(way)
    how.add_argument("--detach", action="store_true", help="do not follow the run")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON document on stdout at the end")
    output.add_argument("-q", "--quiet", action="store_true", help="no progress (with --detach: the id alone)")


def run(args: argparse.Namespace) -> int:
    """Adopt. The exit code is the run's; 78 when nothing could be started, 69 when that cannot be known, 79 when the
    run was left."""
    if args.foreground:
        return _foreground(args)
    from supervisor.core.fields import PlanErrors
    from supervisor.core.slurm import parse_job_id
    from supervisor.runs.plans import read_plan
    from supervisor.service.adopting import forget, start, start_directory
    from supervisor.service.interface import AdoptRequest, Refusal

    try:
        key = f"{parse_job_id(args.job).job}-{secrets.token_hex(4)}"
    except ValueError as error:
        return refuse(args, error, codes.CONFIG)
    with Interrupts() as interrupts:
        try:
            _, text = read_plan(args.plan)
            code = _through_daemon(args, text, interrupts)
            if code is not None:
                return code
            request = AdoptRequest(text, args.job, os.getcwd(), args.dir, dict(os.environ))
            started = asyncio.run(start(request, key))
        except PlanErrors as error:
            return refuse(args, error, codes.CONFIG)
        except Refusal as error:
            return refuse(args, error.text, codes.UNREACHABLE if error.kind == "unavailable" else codes.CONFIG)
        except OSError as error:
            return refuse(args, sentence(error), codes.CONFIG)
        if args.detach:
            return _detached(args, started)
        code = _follow(args, started, start_directory(key), interrupts)
        if code != codes.INTERRUPTED:
            forget(start_directory(key))
        return code


def _through_daemon(args: argparse.Namespace, plan: str, interrupts: Interrupts) -> int | None:
    """Have allocd start the engine. The exit code; None when nobody was there. Raises OSError."""
    from supervisor.cli.daemon import Absent, daemon_at

    if args.direct or (daemon := daemon_at(args)) is None:
        return None
    from supervisor.cli.accepted import Interrupted, Left, carried, ended, follow, hand_over, has_job, wait_for_held
    from supervisor.cli.asking import NobodyAnswers, NobodyThere, Refused
    from supervisor.cli.daemon import code_of, names_of
    from supervisor.cli.wait import Options

    environ = carried(os.environ)
    if environ is None:
        complain("allocd is not asked: an environment variable is no UTF-8, and cannot be handed over")
        return None
    directory = os.path.abspath(args.dir) if args.dir else None
    body = {"plan": plan, "jobid": args.job, "cwd": os.getcwd(), "directory": directory, "environ": environ}
    options = Options(json=args.json, quiet=args.quiet)
    held = None
    try:
        held = hand_over(daemon, "/v1/adoptions", body, interrupts)
        interrupts.raises = True
        held = follow(daemon, held, has_job, say=(lambda text: None) if args.quiet else complain)
    except NobodyThere as error:
        return refuse(args, f"nothing was started: {error}", codes.UNREACHABLE) if args.socket else None
    except (Left, KeyboardInterrupt):
        if held is None:
            raise
        text = f"it was left; {names_of(held)} goes on: `allocctl wait {held['key']}` picks it up"
        return refuse(args, text, codes.INTERRUPTED)
    except NobodyAnswers as error:
        return refuse(args, f"it may have been accepted (`allocctl list`): {error}", codes.UNVERIFIABLE)
    except Interrupted as error:
        return refuse(args, error, codes.CANCELLED)
    except (Absent, Refused) as error:
        return refuse(args, f"nothing was started: {error}", code_of(error))
    finally:
        interrupts.raises = False
    if not has_job(held):
        return ended(options, held)
    if not args.quiet:
        complain(f"run {held['run_id']} in {held['run_dir']}: allocd holds it as {held['key']}")
    if not args.detach:
        return wait_for_held(daemon, held, options, interrupts)
    document = {"schema_version": 1, "run_id": held["run_id"], "run_dir": held["run_dir"], "allocation": held}
    tell(json.dumps(document, ensure_ascii=False) if args.json else held["run_id"])
    return codes.OK


def _foreground(args: argparse.Namespace) -> int:
    """`allocctl run`, as it would be typed."""
    from supervisor.cli import run as verb

    verbs = argparse.ArgumentParser().add_subparsers()
    verb.add(verbs)
    words = [f"--jobid={args.job}"]
    words += [f"--dir={args.dir}"] if args.dir else []
    words += [option for option, given in (("--json", args.json), ("--quiet", args.quiet)) if given]
    return verb.run(verbs.choices["run"].parse_args([*words, "--", args.plan]))


def _detached(args: argparse.Namespace, started: Started) -> int:
    where = {"run_id": started.run_id, "run_dir": started.run_dir, "pid": started.pid, "unit": started.unit or None}
    if args.json:
        tell(json.dumps({"schema_version": 1, **where}, ensure_ascii=False))
        return codes.OK
    if not args.quiet:
        complain(_story(started))
    tell(started.run_id)
    return codes.OK


def _story(started: Started) -> str:
    where = f"unit {started.unit}" if started.unit else "a session of its own"
    engine = f"its engine is process {started.pid} on {started.host}, in {where}"
    return f"run {started.run_id} in {started.run_dir}: {engine}"


def _follow(args: argparse.Namespace, started: Started, place: str, interrupts: Interrupts) -> int:
    from supervisor.cli.wait import Options, wait_for
    from supervisor.core.layout import RUN_RECEIPT
    from supervisor.runs.target import adopted_target

    if not args.quiet:
        complain(_story(started))
    options = Options(json=args.json, quiet=args.quiet)
    code = wait_for(adopted_target(started.run_dir, args.job, place), options, interrupts)
    if code != codes.INTERRUPTED and not os.path.exists(os.path.join(started.run_dir, RUN_RECEIPT)):
        _clean_up(started)
    return code


def _clean_up(started: Started) -> None:
    """End what a dead engine has left."""
    from supervisor.runs.saved import Unreadable
    from supervisor.scheduler.client import SlurmClient
    from supervisor.service.adopting import stop_leftovers

    try:
        ended, trouble = asyncio.run(stop_leftovers(SlurmClient(), started.run_dir))
    except (OSError, Unreadable) as error:
        ended, trouble = [], f"what the engine has left was not looked for: {error}"
    if ended:
        complain(f"the engine was gone, and had left steps {', '.join(ended)}: they were told to end")
    if trouble:
        complain(trouble)
