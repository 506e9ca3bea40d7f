"""`allocctl check`: is this plan fit to run? Every error at once, or a summary of what would run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from supervisor.core import codes

if TYPE_CHECKING:
    from supervisor.core.fields import PlanErrors
    from supervisor.core.plan import Plan
    from supervisor.core.slurm_table import Component, Slurm

SCHEMA_VERSION = 1
"""Of the --json document."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to allocctl's parser."""
    parser = subparsers.add_parser(
        "check",
        help="check a plan and list every error in it",
        description="Check a plan without running it. Exits 0 when it is fit to run, 78 with every error when not.",
    )
    parser.add_argument("plan", nargs="?", help="the plan, a TOML file")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of plans and exit")


def run(args: argparse.Namespace) -> int:
    """Carry out the verb; returns the exit code."""
    from supervisor.core.fields import PlanErrors
    from supervisor.core.plan import schema
    from supervisor.runs.plans import load_plan

    if args.schema:
        print(json.dumps(schema(), indent=2))
        return codes.OK
    if args.plan is None:
        print("allocctl check: give a plan file, or --schema", file=sys.stderr)
        return codes.CONFIG
    if owners := strangers():
        print(
            f"allocctl check: the package `supervisor` also belongs to {', '.join(owners)}; "
            "install allocd in an environment of its own",
            file=sys.stderr,
        )
        return codes.CONFIG
    try:
        plan = load_plan(args.plan)
    except PlanErrors as errors:
        print(json.dumps(_failed(args.plan, errors), indent=2) if args.json else errors)
        return codes.CONFIG
    print(json.dumps(_passed(args.plan, plan), indent=2) if args.json else _summary(args.plan, plan))
    return codes.OK


def strangers() -> list[str]:
    """Other distributions that own an import package named `supervisor`: theirs and ours overwrite each other.

    Takes about 100 ms, which quick verbs do not have.
    """
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get("supervisor", ())) - {"allocd"})


def _failed(source: str, errors: PlanErrors) -> dict[str, Any]:
    listed = [
        {"line": e.line, "key": e.key_path, "found": e.found, "expected": e.expected, "text": e.text(source)}
        for e in errors.errors
    ]
    return {"schema_version": SCHEMA_VERSION, "ok": False, "file": source, "errors": listed}


def _passed(source: str, plan: Plan) -> dict[str, Any]:
    from supervisor.core.artifacts import instances

    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "file": source,
        "errors": [],
        "name": plan.name,
        "nodes": plan.nodes,
        "finish": plan.finish,
        "roles": [{"name": role.name, "ranks": role.ranks, "command": role.command} for role in plan.roles],
        "coordinator": plan.coordinator,
        "contracts": [instance.contract_id for instance in instances(plan)],
        "slurm": asdict(plan.slurm),
        "finalization": plan.deadlines.finalization,
        "shutdown_budget": plan.shutdown_budget,
    }


def _summary(source: str, plan: Plan) -> str:
    from supervisor.core.artifacts import instances

    ranks: dict[str, list[int]] = {}
    for instance in instances(plan):
        ranks.setdefault(instance.artifact.name, []).extend([] if instance.rank is None else [instance.rank])
    nodes = str(plan.nodes) if isinstance(plan.nodes, int) else f"{len(plan.nodes)}: {', '.join(plan.nodes)}"
    rank = plan.coordinator
    coordinator = "none" if rank is None else f"rank {rank} ({plan.role_of(rank).name})"
    contracts = [
        f"{artifact.name} ({'per node, ' + _ranks(ranks[artifact.name]) if artifact.per_node else 'per run'}, "
        f"{artifact.format if artifact.contract == 'files' else artifact.contract}"
        f"{'' if artifact.required else ', optional'})"
        for artifact in plan.artifacts
    ]
    rows = [
        ("name", plan.name),
        ("nodes", nodes),
        *(("role", f"{role.name}: {_ranks(role.ranks)}") for role in plan.roles),
        ("coordinator", coordinator),
        ("finish", f"when the {plan.finish} {'ends' if plan.finish == 'coordinator' else 'are complete'}"),
        ("contracts", "; ".join(contracts) or "none"),
        *([("finalization", f"{plan.deadlines.finalization:g} s for what comes last")] if plan.artifacts else []),
        ("time to end", f"{plan.shutdown_budget:g} s before Slurm's time limit"),
        *(("slurm", text) for text in _asked(plan)),
    ]
    return "\n".join([f"{source}: OK", *(f"  {name:<12} {value}" for name, value in rows)])


def _asked(plan: Plan) -> Iterator[str]:
    """What `allocctl submit` asks Slurm for, a line for the job and one for each component."""
    parts: tuple[Slurm | Component, ...] = (plan.slurm, *plan.slurm.components)
    for part in parts:
        given = [(field.name, getattr(part, field.name)) for field in fields(part) if field.name != "components"]
        words = [
            name if value is True else " ".join(value) if name == "options" else f"{name} {value}"
            for name, value in given
            if value
        ]
        if words:
            yield ", ".join(words)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(tuple(ranks))}"


def spans(ranks: tuple[int, ...]) -> str:
    """Sorted rank numbers as a plan writes them: `0-2,5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
