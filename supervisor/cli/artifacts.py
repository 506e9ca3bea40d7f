"""`allocctl artifacts`: what a directory's files are worth, or what a run's contracts have come to.

A directory is judged as it stands, without a run and without waiting, by the very code that the engine uses: whoever
collects results elsewhere can ask whether they are complete yet. A run tells what its own engine found, and what was
decided when.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from supervisor.cli.arguments import add_socket
from supervisor.cli.held import on_disk
from supervisor.cli.output import refuse
from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.contracts import Place
    from supervisor.core.artifacts import Instance
    from supervisor.core.plan import Plan

DEFAULT_BASE: Final = "benchmark_results.json"
"""What a self-benchmark's first rank calls its file when nobody says otherwise."""

STATES: Final = {"pending": "pending", "ranks_complete": "finalizing", "valid": "complete", "invalid": "invalid"}
"""What an answer means where nobody waits: the engine would open the window at once."""

OF_KIND: Final = {
    "fpm": ("ranks", "ranks_per_node", "nodes", "base", "run_id", "grid_digest", "mode", "legacy"),
    "sweep": ("path", "concurrencies", "successful"),
}
"""Options that mean something to one kind of contract only."""

Document = dict[str, Any]


class _Broke(Exception):
    """A checker broke: that is no answer about the artifact."""


class _Unclear(Exception):
    """The command line does not say what to judge; the message tells what to add."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb's arguments."""
    parser = subparsers.add_parser(
        "artifacts",
        help="judge a directory's artifacts, or tell what a run's contracts have come to",
        description="Judge the artifacts in a directory as it stands (with --contract or --plan), or tell what a run's "
        "contracts have come to. Exits 0 complete, 10 pending or finalizing, 65 invalid or late by finalization, 124 "
        "late by the deadline, 69 no such run, 78 when it is not clear what to judge, 125 when a checker broke.",
    )
    run = "a directory; or a run's id or directory, allocd's key (default: this allocation's)"
    parser.add_argument("where", nargs="?", help=run)
    add_socket(parser)
    parser.add_argument("--contract", choices=("fpm", "sweep"), help="judge the directory by this kind of contract")
    parser.add_argument("--plan", help="judge the directory by the contracts of a plan ({run_dir} is the directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    benchmark = parser.add_argument_group("self-benchmarks (--contract fpm)")
    benchmark.add_argument("--ranks", help="the data-parallel ranks whose files must be there: 0-3")
    benchmark.add_argument("--ranks-per-node", type=int, metavar="N", help="each node's ranks (default: all)")
    benchmark.add_argument("--nodes", type=int, metavar="N", help="nodes of the whole run, where known")
    benchmark.add_argument("--base", help="rank 0's file name (default: by what is there)")
    benchmark.add_argument("--run-id", help="the only run_id that counts")
    benchmark.add_argument("--grid-digest", help="the only grid_digest that counts")
    benchmark.add_argument("--mode", choices=("prefill", "decode", "agg"), help="the only mode that counts")
    benchmark.add_argument("--legacy", action="store_true", help="accept older, minimal rank files too")
    sweep = parser.add_argument_group("sweeps (--contract sweep)")
    sweep.add_argument("--path", help="names of the results, with {concurrency} and wildcards")
    sweep.add_argument("--concurrencies", help="whose results must be there: 1,8,64")
    sweep.add_argument("--successful", help="dotted path of the number of successful requests (default: completed)")


def run(args: argparse.Namespace) -> int:
    """Judge, print, and return the exit code."""
    from supervisor.core.fields import PlanErrors
    from supervisor.runs.registry import NoSuchRun
    from supervisor.runs.saved import Unreadable

    try:
        _options_fit(args)
        contracts = _of_directory(args) if args.contract or args.plan else _of_run(on_disk(args, args.where))
    except (NoSuchRun, Unreadable) as error:
        from supervisor.cli.daemon import with_hosts

        text = f"{with_hosts(error)}; or say how to judge a directory: --contract or --plan"
        return refuse(args, text, codes.UNREACHABLE)
    except (PlanErrors, _Unclear) as error:
        return refuse(args, error, codes.CONFIG)
    except _Broke as error:
        return refuse(args, error, codes.FAULT)
    code = exit_code(contracts)
    document = {"schema_version": 1, "exit": code, "contracts": contracts}
    print(json.dumps(document, indent=1, ensure_ascii=False) if args.json else "\n".join(_lines(contracts)))
    return code


def _options_fit(args: argparse.Namespace) -> None:
    """Raises _Unclear for an option that nobody would look at."""
    if args.plan and args.contract:
        raise _Unclear("give either --contract or --plan")
    for kind, names in OF_KIND.items():
        for name in names if args.contract != kind else ():
            given = getattr(args, name)
            if given is not None and given is not False:
                raise _Unclear(f"--{name.replace('_', '-')} is for --contract {kind} only")


def exit_code(contracts: Iterable[Document]) -> int:
    """What several contracts come to: what is wrong outranks what is late, and that what is open. Those that are not
    required judge nothing."""
    ends = {(item["state"], item["reason"]) for item in contracts if item["required"]}
    states = {state for state, _ in ends}
    if "invalid" in states:
        return codes.ARTIFACTS
    if "late" in states:
        return codes.DEADLINE if ("late", "deadline") in ends else codes.ARTIFACTS
    return codes.OK if states <= {"complete"} else codes.PENDING


# --- a run -------------------------------------------------------------------------------------------------------


def _of_run(name: str | None) -> list[Document]:
    """The contracts of a run, as its engine left them. Raises NoSuchRun, Unreadable."""
    from supervisor.runs.registry import find_run
    from supervisor.runs.saved import run_document

    document, _ = run_document(find_run(name))
    nothing: Document = {"problems": [], "notes": [], "files": []}
    return [
        {
            "contract": item["contract"],
            "state": STATES.get(item["state"], item["state"]),
            "reason": item["reason"],
            "required": item["required"],
            **{key: (item["finding"] or nothing)[key] for key in nothing},
        }
        for item in document["artifacts"]
    ]


# --- a directory -------------------------------------------------------------------------------------------------


def _of_directory(args: argparse.Namespace) -> list[Document]:
    """The contracts that the command line names, judged now. Raises PlanErrors, _Unclear."""
    from supervisor.core.substitution import SubstitutionError

    directory = os.path.abspath(args.where or ".")
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise _Unclear(f"{directory}: {error.strerror}; expected a directory that can be listed") from error
    try:
        places = _planned(args, directory) if args.plan else _named(args, directory, names)
        documents = [document for group in _by_artifact(places) for document in _judge(group)]
    except SubstitutionError as error:
        raise _Unclear(f"{error}: outside of a run nobody knows what that stands for") from error
    if args.contract == "fpm" and args.ranks_per_node is None:
        _hint(documents)
    return documents


def _hint(documents: Iterable[Document]) -> None:
    """Note it where a merged file holds other ranks than those that were taken for one node's."""
    for document in documents:
        if any("$.dp.source_ranks: found" in problem for problem in document["problems"]):
            document["notes"].append("all --ranks were taken for one node's; of several nodes: --ranks-per-node N")


def _by_artifact(places: Sequence[Place]) -> list[list[Place]]:
    names = dict.fromkeys(place.instance.artifact.name for place in places)
    return [[place for place in places if place.instance.artifact.name == name] for name in names]


def _judge(places: Sequence[Place]) -> list[Document]:
    """Look at each place of an artifact, until nothing is being read any more. Raises OSError for what is no fault of
    the files, _Broke."""
    from supervisor.contracts import SOON, CheckerBroke, examiner

    judge = examiner(places)
    try:
        for place in places[1:]:
            judge.look(place)  # nodes are compared: the first is told with what the others hold
        findings = [judge.look(place) for place in places]
        while any((judge.again(place) or SOON + 1) <= SOON for place in places):
            time.sleep(SOON)  # a large file, or the plan's own checker: both have limits
            findings = [judge.look(place) for place in places]
    except CheckerBroke as error:
        raise _Broke(f"the checker gave no answer: {error}") from error
    finally:
        judge.close()
    return [
        {
            "contract": finding.contract,
            "state": STATES[finding.answer],
            "reason": None,
            "required": place.instance.artifact.required,
            "problems": list(finding.problems),
            "notes": list(finding.notes),
            "files": [asdict(fact) for fact in finding.files],
        }
        for place, finding in zip(places, findings, strict=True)
    ]


def _planned(args: argparse.Namespace, directory: str) -> list[Place]:
    """The contracts of a plan, whose run directory is this one. Raises PlanErrors, _Unclear."""
    from supervisor.core.artifacts import instances
    from supervisor.runs.plans import load_plan

    plan = load_plan(args.plan)
    if not plan.artifacts:
        raise _Unclear(f"{args.plan}: the plan promises no artifacts")
    return list(_places(plan, directory, instances(plan)))


def _named(args: argparse.Namespace, directory: str, names: Sequence[str]) -> list[Place]:
    """The contract that the options describe, by the rules of a plan. Raises PlanErrors, _Unclear."""
    from supervisor.core.artifacts import instances
    from supervisor.core.plan import parse_plan

    first, nodes, table = _benchmark(args, directory, names) if args.contract == "fpm" else (0, 1, _sweep(args))
    given = {key: value for key, value in table.items() if value is not None}
    data = {
        "job": {"name": "artifacts", "nodes": nodes},
        "run": {"finish": "artifacts"},
        "roles": {"node": {"ranks": f"0-{nodes - 1}", "command": ["true"]}},
        "artifacts": [{"name": args.contract, "contract": args.contract, **given}],
    }
    plan = parse_plan(data, "the command line")
    wanted = [replace(instance, nodes=args.nodes or 0) for instance in instances(plan)[first:]]
    return list(_places(plan, directory, wanted))


def _benchmark(args: argparse.Namespace, directory: str, names: Sequence[str]) -> tuple[int, int, Document]:
    """The first node, the number behind the last one, and the contract's table."""
    ranks = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", args.ranks or "")
    if ranks is None:
        raise _Unclear("--contract fpm needs the ranks whose files must be there: --ranks 0-3")
    low, high = int(ranks[1]), int(ranks[2] or ranks[1])
    local = high - low + 1 if args.ranks_per_node is None else args.ranks_per_node
    if high < low or local < 1 or low % local or (high + 1) % local:
        raise _Unclear(f"--ranks {args.ranks} with {local} ranks on each node: these are not whole nodes' ranks")
    if args.nodes is not None and args.nodes <= high // local:
        raise _Unclear(f"--nodes {args.nodes}: --ranks {args.ranks} are those of node {high // local}, counted from 0")
    table = {
        "path": args.base or _base(directory, names),
        "ranks_per_node": local,
        "run_id": args.run_id,
        "grid_digest": args.grid_digest,
        "mode": args.mode,
        "legacy": args.legacy,
    }
    return low // local, (high + 1) // local, table


def _sweep(args: argparse.Namespace) -> Document:
    if not args.path or not re.fullmatch(r"[0-9]{1,8}(,[0-9]{1,8})*", args.concurrencies or ""):
        raise _Unclear("--contract sweep needs --path 'NAMES_{concurrency}.json' and --concurrencies 1,8,64")
    concurrencies = [int(word) for word in args.concurrencies.split(",")]
    return {"path": args.path, "concurrencies": concurrencies, "successful": args.successful}


def _base(directory: str, names: Sequence[str]) -> str:
    """Rank 0's file name, by the names that are there. Raises _Unclear when they are several benchmarks'."""
    pattern = re.compile(r"(.+?)(_dp[0-9]+)?(_merged(?:_worker_probe)?)?\.json")
    found = [match for name in names if (match := pattern.fullmatch(name))]
    stems = dict.fromkeys(match[1] for match in found if match[2] or match[3]) or dict.fromkeys(m[1] for m in found)
    if len(stems) > 1:
        raise _Unclear(f"{directory} has files of {', '.join(stems)}: name one with --base NAME.json")
    return next((f"{stem}.json" for stem in stems), DEFAULT_BASE)


def _places(plan: Plan, directory: str, instances: Iterable[Instance]) -> Sequence[Place]:
    """Raises SubstitutionError where a contract's root needs what only a run knows."""
    from supervisor.contracts import places
    from supervisor.core.plan import values_for

    names = plan.nodes if isinstance(plan.nodes, tuple) else ("",) * plan.nodes

    def values(rank: int | None) -> dict[str, str]:
        logs = os.path.join(directory, "logs")
        known = values_for(plan, jobid="", run_dir=directory, logs=logs, nodes=names, rank=rank)
        return {word: value for word, value in known.items() if value}  # what only a run can know has no value here

    return places(instances, values)


# --- for people --------------------------------------------------------------------------------------------------


def _lines(contracts: Sequence[Document]) -> list[str]:
    if not contracts:
        return ["no artifacts are promised"]
    lines = []
    for item in contracts:
        why = f" ({item['reason']})" if item["reason"] else ""
        optional = "" if item["required"] else ", optional"
        lines.append(f"{item['contract']}: {item['state']}{why}{optional}")
        lines += (_file_line(file) for file in item["files"])
        lines += (f"  {problem}" for problem in item["problems"])
        lines += (f"  note: {note}" for note in item["notes"])
    return lines


def _file_line(file: Document) -> str:
    digest = f"  sha256 {file['sha256'][:12]}" if file["sha256"] else ""
    sound = "  not right" if file["problems"] else ""
    return f"  {file['kind']:<7} {Path(file['path'])}  {file['size']} bytes{digest}{sound}"
