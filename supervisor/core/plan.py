"""The plan: what a job is made of, and every rule that a plan must obey.

A plan arrives as plain data (a parsed TOML file) and leaves as frozen dataclasses, or as a list of everything
that is wrong with it. There is one source of truth: each field of the dataclasses below is annotated with a
`Rule` (its kind with bounds, what it is for, and its place in the file when that differs). From these come

* the reader (`parse_plan`), which walks data and annotations side by side and never stops at the first error,
* the messages, which say where, what was found and what was expected, and suggest a key for an unknown one,
* the JSON Schema (`schema`), for editors and other programs.

What no single field can know (ranks without a gap, a coordinator that exists, two nodes that would write the
same file) is in `CROSS_RULES`, functions over the values that could be read: a rule that needs a value which
is itself wrong keeps quiet, so that one mistake is told once.

Strings may hold substitutions, `{jobid}` and its like, and `{{` and `}}` where a brace is meant. A word that
is not in the list is an error here, before anything starts, and never an empty string in a command.

Types are strict: `true` is not 1, 1.5 is no number of nodes, and a duration is a finite number of seconds.
No I/O happens here: reading files is the caller's business.
"""

# No `from __future__ import annotations`: the rules live in the annotations and are read from them.
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, Final, Literal

from supervisor.core.artifact_table import Artifact, artifacts_agree, words_have_values
from supervisor.core.fields import (
    DIRECTORY,
    ENV,
    EVERYWHERE,
    FLAG,
    LIMIT,
    NAME,
    NODES,
    RANKS,
    SIGNALS,
    SRUN_OPTION,
    WRONG,
    Command,
    Coordinator,
    Draft,
    Field,
    List,
    Names,
    PlanError,
    PlanErrors,
    Reader,
    Rule,
    Schema,
    Table,
    Text,
    choice,
    climbless,
    join,
    like,
    number,
    rules_of,
)
from supervisor.core.slurm_table import NOTHING_ASKED, SLURM, Slurm, components_fit
from supervisor.core.substitution import RUN_WORDS, show

COLLECTION_LIMIT: Final = 14_400.0
"""Seconds: what collectors of self-benchmarks use as the limit of a whole collection."""


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks that run the same command; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(NAME, "the key of the role's table", key=True)]
    ranks: Annotated[tuple[int, ...], Rule(RANKS, "the role's ranks, sorted; one rank a node")]
    command: Annotated[tuple[str, ...], Rule(Command(), "the program and its arguments; no shell reads them")]
    env: Annotated[dict[str, str], Rule(ENV, "variables set for the command")] = field(default_factory=dict)
    cwd: Annotated[
        str | None,
        Rule(climbless("absolute", EVERYWHERE), "working directory; default: where the run was started"),
    ] = None
    stop_signal: Annotated[str, Rule(choice(*SIGNALS, prefix="SIG"), "asks the ranks to end; read without SIG")] = (
        "TERM"
    )
    grace: Annotated[float, Rule(number(0, 3600), "seconds from the stop signal to KILL")] = 30.0
    critical: Annotated[bool, Rule(FLAG, "a failure of these ranks fails the run")] = True
    may_finish: Annotated[bool, Rule(FLAG, "these ranks may end with 0 before the run may end")] = False
    agent: Annotated[
        Literal["on", "off"],
        Rule(choice("on", "off"), "off: srun starts the command itself, without an agent"),
    ] = "on"
    srun_options: Annotated[tuple[str, ...], Rule(List(SRUN_OPTION), "further options of the step's srun")] = ()


@dataclass(frozen=True, slots=True)
class Marker:
    """The coordinator's exit-code file."""

    path: Annotated[str, Rule(climbless("absolute", RUN_WORDS), "where it is")] = "{run_dir}/.bench_done.{jobid}"
    by: Annotated[
        Literal["supervisor", "coordinator"], Rule(choice("supervisor", "coordinator"), "who publishes it")
    ] = "supervisor"
    recheck: Annotated[float, Rule(number(0, 60), "seconds of the second look after an engine's death")] = 5.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits in seconds; None is no limit."""

    hello: Annotated[float, Rule(number(1, 3600), "from a step's start to its agent's hello")] = 60.0
    run: Annotated[float | None, Rule(LIMIT, "from the run's start to its end")] = None
    artifacts: Annotated[float | None, Rule(LIMIT, "from the run's start until every contract is decided")] = None
    finalization: Annotated[
        int, Rule(number(1, 3600, "a whole number of seconds", whole=True), "the finalization window of a node")
    ] = 120
    collect: Annotated[float, Rule(number(1, 14_400), "collecting files after the end")] = 60.0
    silence: Annotated[float, Rule(number(10, 3600), "an agent that is silent this long is lost")] = 60.0
    journal: Annotated[float, Rule(number(1, 300), "writing the journal; past it the run goes on in memory")] = 5.0


@dataclass(frozen=True, slots=True)
class Collect:
    """Files copied to {run_dir}/collected when the run ends."""

    paths: Annotated[
        tuple[str, ...],
        Rule(
            List(climbless("any", RUN_WORDS), 0, "a list of paths"),
            "patterns; relative ones start at the run directory",
        ),
    ] = ()
    nodes: Annotated[
        tuple[str, ...],
        Rule(
            List(climbless("absolute", EVERYWHERE), 0, "a list of absolute paths"),
            "patterns of files on each node's own disks, fetched to {run_dir}/collected/nodes/RANK",
        ),
    ] = ()
    size_max: Annotated[
        int,
        Rule(
            number(1, 1 << 50, "a number of bytes", whole=True),
            "bytes: at most so many are copied, from each node an equal share",
        ),
    ] = 16 << 30
    bundle: Annotated[
        str | None,
        Rule(
            Text("a file name that ends in .tar.gz or .tgz", pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*\.(tar\.gz|tgz)"),
            "an archive of logs and collected files, made in the run directory",
        ),
    ] = None
    required: Annotated[bool, Rule(FLAG, "the run is no success if a file cannot be collected")] = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked plan. Ranks are 0..size-1 without a gap; rank r runs on the run's node number r."""

    name: Annotated[str, Rule(Text(), "the job's name", "job.name")]
    nodes: Annotated[int | tuple[str, ...], Rule(NODES, "how many nodes, or their names", "job.nodes")]
    roles: Annotated[
        tuple[Role, ...],
        Rule(Names(NAME.pattern, NAME.expected, Table(rules_of(Role)), 1), "the roles", "roles"),
    ]
    base: Annotated[str, Rule(DIRECTORY, "where run directories are made", "run.dir")] = "runs"
    finish: Annotated[
        Literal["coordinator", "artifacts"],
        Rule(choice("coordinator", "artifacts"), "what ends the run when nothing fails", "run.finish"),
    ] = "coordinator"
    start: Annotated[
        Literal["together", "each"],
        Rule(
            choice("together", "each"),
            "commands start when every agent is there, or each at once",
            "run.start",
        ),
    ] = "together"
    coordinator: Annotated[int | None, Rule(Coordinator(), "the rank whose end ends the run", "coordinator")] = None
    marker: Annotated[
        Marker, Rule(Table(rules_of(Marker), shape=Marker), "the coordinator's exit-code file", "marker")
    ] = Marker()
    artifacts: Annotated[
        tuple[Artifact, ...],
        Rule(
            List(Table(rules_of(Artifact)), 0, "a list of tables, [[artifacts]]"),
            "the contracts",
            "artifacts",
        ),
    ] = ()
    deadlines: Annotated[
        Deadlines, Rule(Table(rules_of(Deadlines), shape=Deadlines), "limits in seconds", "deadlines")
    ] = Deadlines()
    collect: Annotated[
        Collect, Rule(Table(rules_of(Collect), shape=Collect), "what is copied at the end", "collect")
    ] = Collect()
    python: Annotated[
        str | None, Rule(Text(), "the agents' Python on the nodes; default: the engine's", "job.python")
    ] = None
    slurm: Annotated[Slurm, Rule(SLURM, "what `allocctl submit` asks Slurm for", "slurm")] = NOTHING_ASKED

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank, sorted."""
        return tuple(sorted(rank for role in self.roles for rank in role.ranks))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(role.ranks) for role in self.roles)

    @property
    def shutdown_budget(self) -> float:
        """Seconds that an orderly end needs before Slurm's time limit: a grace per tier, the finalization window
        where something is promised, and collection."""
        coordinator = (self.coordinator,)
        first = max((role.grace for role in self.roles if self.coordinator in role.ranks), default=0.0)
        rest = max((role.grace for role in self.roles if role.ranks != coordinator), default=0.0)
        window = self.deadlines.finalization if self.artifacts else 0.0
        return first + rest + window + self.deadlines.collect

    @property
    def collection_deadline(self) -> float | None:
        """Seconds from the run's start until every contract must be decided. A contract that waits for the ranks of a
        self-benchmark has no other limit before their last file is there, so plans with one have this in any case."""
        if self.deadlines.artifacts is None and any(artifact.contract == "fpm" for artifact in self.artifacts):
            return COLLECTION_LIMIT
        return self.deadlines.artifacts

    def role_of(self, rank: int) -> Role:
        """The role of `rank`. Raises KeyError when the plan has no such rank."""
        for role in self.roles:
            if rank in role.ranks:
                return role
        raise KeyError(rank)


# ------------------------------------------------------------------------------------------------ cross rules

Uses = list[tuple[str, str]]
"""Key path and substitution word, for each use of one."""


def _ranks(draft: Draft) -> dict[str, tuple[int, ...]] | None:
    """Each role's ranks; None when those of any role could not be read."""
    if draft["roles"] is WRONG:
        return None
    ranks = {name: WRONG if role is WRONG else role["ranks"] for name, role in draft["roles"].items()}
    return None if WRONG in ranks.values() or not ranks else ranks


def _ranks_fit(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    """Ranks are 0..n-1 without overlap or gap, and no more than there are nodes."""
    roles = _ranks(draft)
    if roles is None:
        return
    owner: dict[int, str] = {}
    for name, ranks in roles.items():
        for rank in ranks:
            if owner.setdefault(rank, name) != name:
                taken = f"rank {rank}, which belongs to role {owner[rank]}"
                yield PlanError(f"{join('roles', name)}.ranks", taken, "each rank in one role")
    missing = sorted(set(range(max(owner) + 1)) - set(owner))
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield PlanError("roles", f"no role for rank {listed}", f"ranks 0..{max(owner)} without a gap")
    nodes = draft["nodes"]
    if nodes is not WRONG:
        count = nodes if isinstance(nodes, int) else len(nodes)
        if len(owner) > count:
            yield PlanError("job.nodes", f"{count} for {len(owner)} ranks", "at least one node for each rank")


def _coordinator_exists(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    """The coordinator is a rank of the plan, a critical one; only finish = "artifacts" does without."""
    who, roles = draft["coordinator"], _ranks(draft)
    if who is None:
        if draft["finish"] == "coordinator":
            yield PlanError("coordinator", "nothing", 'a [coordinator] table, or run.finish = "artifacts"')
        marker = draft["marker"]
        if isinstance(marker, Marker) and marker.by == "coordinator":
            yield PlanError("marker.by", '"coordinator" in a plan without one', "a [coordinator] table")
        return
    if who is WRONG or roles is None:
        return
    if isinstance(who, str):
        if who not in roles:
            yield PlanError("coordinator.role", show(who), f"a role of the plan{like(who, roles)}")
        elif len(roles[who]) != 1:
            yield PlanError("coordinator.role", f"{len(roles[who])} ranks in role {who}", "exactly one; else give rank")
    elif not any(who in ranks for ranks in roles.values()):
        yield PlanError("coordinator.rank", str(who), "a rank of one of the roles")
    for name, ranks in roles.items():
        if (name == who or who in ranks) and draft["roles"][name]["critical"] is False:
            yield PlanError(f"{join('roles', name)}.critical", "false", "true: the coordinator is in this role")


def _artifacts_fit(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    yield from artifacts_agree(draft, _ranks(draft))


def _words_known(draft: Draft, uses: Uses) -> Iterator[PlanError]:
    """No word without a value: the coordinator's node without a coordinator, a rank where none is meant."""
    artifacts = draft["artifacts"]
    for at, word in uses:
        if word == "coordinator_node" and draft["coordinator"] is None:
            yield PlanError(at, "{coordinator_node} in a plan without a coordinator", "a [coordinator] table")
        if artifacts is not WRONG:
            yield from words_have_values(artifacts, at, word)


CROSS_RULES: Final = (_ranks_fit, _coordinator_exists, _artifacts_fit, _words_known, components_fit)


# ---------------------------------------------------------------------------------------------------- reading


def _sections() -> Table:
    """The file as a table of tables, from the places (`at`) of the plan's fields."""
    sections: dict[str, list[Field]] = {}
    for item in rules_of(Plan):
        name, _, key = item.rule.at.partition(".")
        sections.setdefault(name, []).append(item._replace(name=key))
    return Table(tuple(_section(name, items) for name, items in sections.items()), "a table of tables")


def _section(name: str, items: list[Field]) -> Field:
    if not items[0].name:  # the plan's field is the whole table
        return items[0]._replace(name=name)
    needed = [item.name for item in items if item.default is MISSING]
    table = Table(tuple(items), f"a table with {' and '.join(needed)}" if needed else "a table")
    return Field(name, Rule(table, f"the table [{name}]"), MISSING if needed else table.read(Reader(), name, {}))


def parse_plan(data: Any, source: str) -> Plan:
    """The plan in `data` (plain dicts and lists, as a TOML reader gives them); `source` names it in messages.

    Raises PlanErrors with every error that was found.
    """
    reader = Reader()
    read = _sections().read(reader, "", data)
    if read is not WRONG:
        draft: Draft = {}
        for item in rules_of(Plan):
            section, _, key = item.rule.at.partition(".")
            draft[item.name] = read[section][key] if key and read[section] is not WRONG else read[section]
        for rule in CROSS_RULES:
            reader.errors += rule(draft, reader.uses)
    if reader.errors:
        raise PlanErrors(reader.errors, source)
    return _built(draft)


def _built(draft: Draft) -> Plan:
    who, roles = draft["coordinator"], draft["roles"]
    draft["coordinator"] = roles[who]["ranks"][0] if isinstance(who, str) else who
    draft["roles"] = tuple(Role(name=name, **role) for name, role in roles.items())
    draft["artifacts"] = tuple(Artifact(**artifact) for artifact in draft["artifacts"])
    return Plan(**draft)


def schema() -> Schema:
    """JSON Schema (2020-12) of a plan file: what the fields' own rules say, without the cross rules."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "allocd plan"}
    return head | _sections().schema


def values_for(
    plan: Plan, *, jobid: str, run_dir: str, logs: str, nodes: tuple[str, ...], rank: int | None
) -> dict[str, str]:
    """The values for `substitute`: those of the run, and those of `rank` unless it is None.

    `nodes` are the run's nodes in rank order: rank r runs on nodes[r]. Raises ValueError when there are fewer
    nodes than ranks, KeyError for a rank that the plan does not have.
    """
    if len(nodes) < plan.size:
        raise ValueError(f"{len(nodes)} nodes for {plan.size} ranks")
    values = {"jobid": jobid, "run_dir": run_dir, "logs": logs, "nodes": ",".join(nodes)}
    if plan.coordinator is not None:
        values["coordinator_node"] = nodes[plan.coordinator]
    if rank is not None:
        values |= {"role": plan.role_of(rank).name, "rank": str(rank), "node": nodes[rank]}
    return values
