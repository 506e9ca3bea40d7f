"""What a submission is made of: the batch script, sbatch's command line and environment, and the record of it.

Each submission has a directory of its own, `BASE/submit-TOKEN/`, beside the run directories:

    job.sh            the batch script; its path is unique, and Slurm keeps it with the job
    plan.toml         the plan as it was: what the job runs, whatever becomes of the file that was submitted
    submission.json   the record (`Submission`): what was asked, and what came of it
    slurm-JOBID.out   what the script prints, appended to by each attempt of a requeued job

**Values are data.** In a `#SBATCH` line a quote, a backslash, a `#` or a space has a meaning; each line is therefore
one quoted word in which quotes and backslashes are escaped, and the plan's rules let no control character through.
sbatch also looks for the letters `hetjob` and `packjob` anywhere in such a line: a backslash inside the word, which
sbatch drops, keeps a job of that name from becoming a heterogeneous one. What the shell reads is quoted by shlex.

**The early signal** comes at the plan's shutdown budget before the time limit, and never before half of the time: the
engine begins to stop when it gets it, and Slurm may send it up to a minute early.

**The script finds out by itself** whether this node can run allocctl, for a compute node may lack what the login node
has: the file, its interpreter, the version that made the plan's copy. And it does not run a submission that was given
up: whoever could not find its job takes the plan's copy away first (see `settling.py`).

Source: sbatch(1) and the behaviour of 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from shlex import quote
from typing import Any, Final, Literal

from supervisor.core.plan import Plan
from supervisor.core.sbatch_options import Misfit, Option, array_tasks, effective, most_nodes, read_options, time_limit
from supervisor.core.slurm import SCHEDULER_PREFIXES
from supervisor.core.slurm_table import Component, Slurm

SCRIPT: Final = "job.sh"
PLAN: Final = "plan.toml"
RECORD: Final = "submission.json"
SCHEMA_VERSION: Final = 1

State = Literal["asked", "submitted", "refused", "unknown", "absent"]


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission. Times are UTC in ISO 8601; `tasks` are an array's task numbers, `components` the number of a
    heterogeneous job's. `words` say in a sentence what came of it, sbatch's own where it refused.

    `asked`: sbatch runs, or whoever ran it is gone. `unknown`: nobody could find out. `absent`: there is no such job.
    """

    token: str
    state: State
    jobid: str | None
    cluster: str | None
    user: str
    uid: int
    name: str
    asked: str
    answered: str | None
    argv: tuple[str, ...]
    base: str
    plan: str
    script: str
    output: str
    tasks: tuple[int, ...] | None
    components: int | None
    words: str = ""

    @property
    def shown_id(self) -> str:
        """The job's id as sbatch prints it: `id`, or `id;cluster` where one was named."""
        return f"{self.jobid};{self.cluster}" if self.cluster else f"{self.jobid}"

    @property
    def asked_at(self) -> float:
        """When sbatch was about to run, in epoch seconds."""
        return datetime.fromisoformat(self.asked).timestamp()

    @property
    def answered_at(self) -> float | None:
        """When it had answered, or the job was found, in epoch seconds; None before that."""
        return datetime.fromisoformat(self.answered).timestamp() if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data. It holds no value of an environment variable."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @staticmethod
    def from_dict(data: Any) -> Submission:
        """The record read again. Raises ValueError for data of another shape."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError("no record of a submission that this allocctl can read")
        try:
            values = {item.name: data[item.name] for item in fields(Submission)}
            values["argv"] = tuple(values["argv"])
            values["tasks"] = None if values["tasks"] is None else tuple(values["tasks"])
            submission = Submission(**values)
            _ = submission.asked_at, submission.answered_at
        except (KeyError, TypeError) as error:
            raise ValueError(f"no record of a submission: {error!r}") from None
        if not all(type(task) is int for task in submission.tasks or ()):
            raise ValueError(f"no record of a submission: tasks that are no numbers: {submission.tasks!r}")
        return submission


@dataclass(frozen=True, slots=True)
class Order:
    """What will be submitted: the directory's files, and the record as it is before sbatch runs."""

    directory: str
    script: str
    submission: Submission


def make_order(
    plan: Plan,
    *,
    base: str,
    token: str,
    allocctl: str,
    version: str,
    options: Sequence[str],
    environ: Mapping[str, str],
    cluster: str | None,
    user: str,
    uid: int,
) -> Order:
    """The submission of a plan below the absolute path `base`. `options` are sbatch's own, from the command line;
    `environ` is sbatch's environment.

    Raises Misfit for an option that cannot be given, for fewer nodes than the plan has, and for a base whose name
    sbatch would read as a pattern.
    """
    if "\\" in base:
        raise Misfit(f"{base}: sbatch cannot name an output below a path with a backslash: choose another with --dir")
    given = read_options(options)
    _check_nodes(plan, given)
    array = effective("array", given, environ, plan.slurm.array)
    limit = effective("time", given, environ, plan.slurm.time)
    directory = f"{base.rstrip('/')}/submit-{token}"
    files = "slurm-%A_%a.out" if array else "slurm-%j.out"
    output = f"{directory.replace('%', '%%')}/{files}"
    command = Command(allocctl, version, base, f"{directory}/{PLAN}")
    where = [f"--clusters={cluster}"] if cluster else []
    submission = Submission(
        token=token,
        state="asked",
        jobid=None,
        cluster=cluster,
        user=user,
        uid=uid,
        name=effective("job-name", given, environ, plan.name) or plan.name,
        asked="",
        answered=None,
        argv=("sbatch", "--parsable", *where, *options, f"{directory}/{SCRIPT}"),
        base=base,
        plan=command.plan,
        script=f"{directory}/{SCRIPT}",
        output=f"{directory}/{files}",
        tasks=array_tasks(array) if array else None,
        components=len(plan.slurm.components) or None,
    )
    return Order(directory, script_text(plan, output, early_signal(plan, limit), command), submission)


def _check_nodes(plan: Plan, given: Sequence[Option]) -> None:
    """Raises Misfit for a job that would wait in the queue for nodes that are too few to start on."""
    texts = [option.value for option in given if option.name == "nodes" and option.value]
    count, wanted = most_nodes(texts[-1]) if texts else None, _count(plan)
    if count is not None and count < wanted and not plan.slurm.components:
        raise Misfit(
            f"--nodes={texts[-1]} is too few for a plan of {wanted} nodes: leave it out, for the plan asks for them, "
            "or change job.nodes"
        )


# --- the script -------------------------------------------------------------------------------------------------------

MAX_EARLY: Final = 65_535
"""Seconds: sbatch takes no more for --signal."""


def early_signal(plan: Plan, limit: str | None) -> int:
    """Whole seconds before the time limit at which Slurm should send its signal; `limit` as sbatch reads it."""
    seconds = time_limit(limit) if limit else None
    budget = plan.shutdown_budget
    return max(1, int(min(budget, MAX_EARLY if seconds is None else seconds / 2, MAX_EARLY)))


@dataclass(frozen=True, slots=True)
class Command:
    """What the script execs: absolute paths, and the version that `allocctl --version` must tell."""

    allocctl: str
    version: str
    base: str
    plan: str


def script_text(plan: Plan, output: str, early: int, command: Command) -> str:
    """The batch script. `output` is sbatch's pattern, `early` the signal's seconds before the limit."""
    lines = "\n".join(f"#SBATCH {word}" for word in _directives(plan, output, early))
    words = {name: quote(getattr(command, name)) for name in ("allocctl", "version", "base", "plan")}
    return _SCRIPT.format(directives=lines, **words)


_SCRIPT: Final = """\
#!/bin/bash
# Made by `allocctl submit`. What runs is the plan's copy beside this script.
{directives}

allocctl={allocctl}
version={version}
plan={plan}
node=${{SLURMD_NODENAME:-$(hostname)}}

unfit() {{
    printf 'allocctl submit: %s\\n' "$1" >&2
    exit 78
}}

[ -e "$plan" ] || unfit "this submission was given up, or $plan is not to be seen on $node: nothing was started"
[ -e "$allocctl" ] || unfit "$allocctl is not there on $node: it must be where every node has it \\
(--allocctl, or slurm.allocctl in the plan, names another one)"
interpreter=$(sed -n '1s/^#! *\\([^ ]*\\).*/\\1/p' "$allocctl" 2>/dev/null)
[ -z "$interpreter" ] || [ -x "$interpreter" ] || unfit "$allocctl needs the interpreter $interpreter, which is not \\
there on $node: install allocd with a Python that every node has, or name another allocctl (--allocctl)"
found=$("$allocctl" --version) || unfit "$allocctl does not run on $node: its own words are above"
[ "$found" = "allocctl $version" ] || unfit "$allocctl on $node is '$found', but the plan was submitted by allocctl \\
$version: install the same version there, or name another allocctl (--allocctl)"

# exec: allocctl becomes the script's own process, so that Slurm's signals reach it and its exit code is the job's.
exec "$allocctl" run --dir {base} "$plan"
"""


def _directives(plan: Plan, output: str, early: int) -> Iterator[str]:
    """The words behind `#SBATCH`, one a line. The plan's own options come last in each component: an option that lacks
    its value takes the next word, and there must be none of ours behind it."""
    slurm = plan.slurm
    yield _word("job-name", plan.name)
    for key in ("account", "qos", "time", "array"):
        if value := getattr(slurm, key):
            yield _word(key, value)
    yield _word("output", output)
    yield "--open-mode=append"
    yield f"--signal=B:USR1@{early}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    first = 0
    parts: tuple[Slurm | Component, ...] = slurm.components or (slurm,)
    for number, part in enumerate(parts):
        if number:
            yield "hetjob"
        count = part.nodes if isinstance(part, Component) else _count(plan)
        yield f"--nodes={count}"
        if isinstance(plan.nodes, tuple):
            yield _word("nodelist", ",".join(plan.nodes[first : first + count]))
        yield "--ntasks-per-node=1"
        for key in ("partition", "gres", "constraint"):
            if value := getattr(part, key):
                yield _word(key, value)
        if part.exclusive:
            yield "--exclusive"
        yield from map(_quoted, part.options)
        first += count


def _count(plan: Plan) -> int:
    return plan.nodes if isinstance(plan.nodes, int) else len(plan.nodes)


def _word(key: str, value: str) -> str:
    return _quoted(f"--{key}={value}")


def _quoted(word: str) -> str:
    """One word as sbatch reads it in a `#SBATCH` line; plain ones stay plain."""
    if re.fullmatch(r"[A-Za-z0-9_=/.,:@%+-]+", word) and not _HETJOB.search(word):
        return word
    escaped = re.sub(r'(["\\])', r"\\\1", word)
    return '"' + _HETJOB.sub(r"\1\\\2", escaped) + '"'


_HETJOB: Final = re.compile(r"(het|pack)(job)", re.IGNORECASE)

# --- the environment --------------------------------------------------------------------------------------------------

_KEPT: Final = re.compile(r"SLURM_(?:CONF|CONF_SERVER|JWT|DEBUG_FLAGS)|SBATCH_\w+|ALLOCD_RUNS")
_DROPPED: Final[tuple[tuple[str, str], ...]] = (
    (r"SBATCH_(?:OUTPUT|ERROR|OPEN_MODE)", "the output is the submission's: it is looked for there"),
    (r"SBATCH_(?:WAIT|DEBUG)", "sbatch answers at once, and with the id alone"),
    (r"SBATCH_SIGNAL", "the early signal fits the plan's shutdown budget"),
    (r"SBATCH_CLUSTERS", "named on the command line: the job's queries need it, too"),
    (r"VIRTUAL_ENV|VIRTUAL_ENV_PROMPT|PYTHONHOME|__PYVENV_LAUNCHER__", "the login node's Python: nodes may lack it"),
)
_GONE: Final = re.compile("|".join(f"(?:{pattern})" for pattern, _ in _DROPPED))
_SCHEDULERS: Final = (*SCHEDULER_PREFIXES, "ALLOCD_")


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """sbatch's environment, which Slurm also gives to the job.

    Nothing of an allocation or a run that this shell may be in (`SLURM_*`, `ALLOCD_*`), nothing that would change what
    we rely on (`_DROPPED`, with the reasons), and no trace of an activated virtual environment, its directory in PATH
    included. Other `SBATCH_*` variables are the user's own settings: sbatch puts them above the plan.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not _GONE.fullmatch(name) and (not name.startswith(_SCHEDULERS) or _KEPT.fullmatch(name))
    }
    if (active := environ.get("VIRTUAL_ENV")) and "PATH" in kept:
        own = f"{active.rstrip('/')}/bin"
        kept["PATH"] = ":".join(part for part in kept["PATH"].split(":") if part.rstrip("/") != own)
    return kept
