"""A plan's `[slurm]` table: what `allocctl submit` asks Slurm for. `allocctl run` does not look at it.

    [slurm]
    partition = "gpu"
    time = "02:00:00"
    gres = "gpu:8"
    options = ["--mem=0", "--cpus-per-task=64"]     # anything else, as sbatch reads it

A heterogeneous job has components instead, each with nodes of its own kind; the plan's nodes are counted through them
in order, so rank r runs on node number r of all of them:

    [[slurm.components]]
    nodes = 1
    partition = "cpu"
    [[slurm.components]]
    nodes = 2
    gres = "gpu:8"

What stands in both tables would be ambiguous with components (sbatch hands some options of the first component on to
the others, and some not), so it belongs in the components alone; account, qos, time and the like are the whole job's.
"""

# No `from __future__ import annotations`: the rules live in the annotations and are read from them.
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from supervisor.core.fields import (
    FLAG,
    MAX_NODES,
    WRONG,
    Draft,
    Kind,
    List,
    PlanError,
    Reader,
    Rule,
    Table,
    Text,
    number,
    rules_of,
)
from supervisor.core.sbatch_options import array_tasks, refusal_in_plan, time_limit
from supervisor.core.substitution import show


class _Option(Text):
    """An option of sbatch, in one piece, that has no other place."""

    def __init__(self) -> None:
        super().__init__("an option of sbatch in one piece (--name=value)", pattern="-{1,2}[A-Za-z].*")

    def read(self, reader: Reader, at: str, value: Any) -> Any:
        word = super().read(reader, at, value)
        if word is WRONG or (why := refusal_in_plan(word)) is None:
            return word
        reader.errors.append(PlanError(at, show(value), f"another option; {why.removeprefix(f'{word}: ')}"))
        return WRONG


def _time(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    return text if isinstance(text, str) and text == text.strip() and time_limit(text) else WRONG


_WORD: Final = Text("one word", pattern=r"[^\s-]\S*")
_TIME: Final = Kind(
    "a time limit: minutes, or MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS",
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^[0-9]+(-[0-9]+)?(:[0-9]+){0,2}$"}]},
    _time,
)
_ARRAY: Final = Kind(
    'task numbers of an array: "0-7", "1,3,5", "0-15:4", and "%2" behind them for two at a time',
    {"type": "string", "pattern": r"^[0-9]+([-,:][0-9]+)*(%[1-9][0-9]*)?$"},
    lambda value: value if isinstance(value, str) and value == value.strip() and array_tasks(value) else WRONG,
)
_OPTIONS: Final = List(_Option(), 0, "a list of sbatch's options")


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a heterogeneous job."""

    nodes: Annotated[int, Rule(number(1, MAX_NODES, "a number of nodes", whole=True), "its nodes")]
    partition: Annotated[str | None, Rule(_WORD, "partition")] = None
    gres: Annotated[str | None, Rule(_WORD, "generic resources of each node")] = None
    constraint: Annotated[str | None, Rule(_WORD, "features of its nodes")] = None
    exclusive: Annotated[bool, Rule(FLAG, "its nodes are for this job alone")] = False
    options: Annotated[tuple[str, ...], Rule(_OPTIONS, "further options of sbatch for it")] = ()


@dataclass(frozen=True, slots=True)
class Slurm:
    """What `allocctl submit` asks for; None and () leave it to the site."""

    partition: Annotated[str | None, Rule(_WORD, "partition")] = None
    account: Annotated[str | None, Rule(_WORD, "account")] = None
    qos: Annotated[str | None, Rule(_WORD, "quality of service")] = None
    time: Annotated[str | None, Rule(_TIME, "time limit of the job")] = None
    gres: Annotated[str | None, Rule(_WORD, 'generic resources of each node ("gpu:8")')] = None
    constraint: Annotated[str | None, Rule(_WORD, "features of the nodes")] = None
    exclusive: Annotated[bool, Rule(FLAG, "the nodes are for this job alone")] = False
    requeue: Annotated[bool, Rule(FLAG, "Slurm may start the job again; each attempt has a run directory")] = False
    array: Annotated[str | None, Rule(_ARRAY, "an array of jobs, each of which runs the plan")] = None
    cluster: Annotated[
        str | None, Rule(Text("the name of a cluster", pattern=r"[A-Za-z0-9_.-]+"), "the cluster, where there are more")
    ] = None
    allocctl: Annotated[
        str | None, Rule(Text("an absolute path", pattern="/.*"), "allocctl on the nodes; default: this installation")
    ] = None
    options: Annotated[tuple[str, ...], Rule(_OPTIONS, "further options of sbatch, as they are")] = ()
    components: Annotated[
        tuple[Component, ...],
        Rule(
            List(Table(rules_of(Component), shape=Component), 0, "a list of tables, [[slurm.components]]"),
            "the components of a heterogeneous job",
        ),
    ] = ()


SLURM: Final = Table(rules_of(Slurm), shape=Slurm)
NOTHING_ASKED: Final = Slurm()

_IN_COMPONENTS: Final = ("partition", "gres", "constraint", "exclusive", "options")


def components_fit(draft: Draft, uses: object) -> Iterator[PlanError]:
    """Components have the plan's nodes between them, and nothing is said twice."""
    slurm, nodes = draft["slurm"], draft["nodes"]
    if not isinstance(slurm, Slurm) or not slurm.components:
        return
    if len(slurm.components) == 1:
        yield PlanError("slurm.components", "one component", "at least two, or none")
    if slurm.array:
        yield PlanError("slurm.array", show(slurm.array), "no array: Slurm takes none of heterogeneous jobs")
    for key in _IN_COMPONENTS:
        if found := getattr(slurm, key):
            what = show(found if isinstance(found, str | bool) else list(found))
            yield PlanError(f"slurm.{key}", f"{what} beside components", f"{key} in each [[slurm.components]]")
    if nodes is not WRONG:
        wanted = nodes if isinstance(nodes, int) else len(nodes)
        have = sum(component.nodes for component in slurm.components)
        if have != wanted:
            yield PlanError("slurm.components", f"{have} nodes", f"{wanted} between them, as in job.nodes")
