"""sbatch's own words: which options allocd lets through, and what their values mean.

Options reach sbatch from three places, and sbatch itself says which one wins: its command line over the `SBATCH_*`
variables over the script's `#SBATCH` lines. A plan's `[slurm]` table becomes such lines, so what a user exports, or
writes after `allocctl submit ... --`, wins over the plan without any rule of ours.

Some options are refused wherever they come from (`TAKEN`): they would hide the job's id, move its output, put another
script in the place of ours, or change the signal that announces the time limit. Options that have a place of their own
in a plan (`PLACED`) are refused in its `options` list only. sbatch reads its command line with getopt_long, which takes
an unambiguous beginning for the whole word (`--outp=x` is `--output=x`) and several letters at once (`-HQ`): both are
read here in the same way, for a guard that can be walked around is none.

Source: sbatch(1) of 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

TAKEN: Final[dict[str, str]] = {
    "parsable": "allocctl asks for it itself, to read the job's id",
    "output": "the job's output belongs in the submission's directory, where it is looked for",
    "error": "the job's output belongs in one file, in the submission's directory",
    "open-mode": "the output of a requeued job is appended, for the first attempt's must stay",
    "wrap": "the batch script is allocctl's: what runs is the plan",
    "wait": "sbatch would not answer before the job's end: use `allocctl submit --wait`",
    "test-only": "nothing would be submitted: use `allocctl submit --dry-run`",
    "signal": "its time is the plan's shutdown budget: change graces or deadlines",
    "clusters": "allocctl must know the cluster, to ask it: use --cluster, or slurm.cluster in the plan",
    "uid": "the job would be another user's, and could not be followed",
    "gid": "the job would be another group's, and could not write where it must",
    "quiet": "allocctl has a -q of its own",
    "help": "it submits nothing",
    "usage": "it submits nothing",
    "version": "it submits nothing",
}
"""Options that nobody may give, and why."""

PLACED: Final[dict[str, str]] = {
    "job-name": "job.name",
    "nodes": "job.nodes",
    "nodelist": "job.nodes, as a list of names",
    "ntasks": "job.nodes: allocd starts one rank a node",
    "ntasks-per-node": "job.nodes: allocd starts one rank a node",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "time": "slurm.time",
    "gres": "slurm.gres",
    "constraint": "slurm.constraint",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "array": "slurm.array",
}
"""Options that have a place of their own in a plan."""

SHORT: Final[dict[str, str]] = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
"""Letters that take a value."""
_FLAGS: Final[dict[str, str]] = {
    "H": "hold", "h": "help", "k": "no-kill", "O": "overcommit", "Q": "quiet", "s": "oversubscribe", "V": "version",
    "v": "verbose", "W": "wait",
}  # fmt: skip

FROM_ENVIRONMENT: Final[dict[str, str]] = {
    "array": "SBATCH_ARRAY_INX",
    "job-name": "SBATCH_JOB_NAME",
    "time": "SBATCH_TIMELIMIT",
}
"""The variables of those options whose value allocctl must know."""


class Misfit(ValueError):
    """An option that cannot be given to sbatch; the message says why, and what to do."""


class Option(NamedTuple):
    """One option by its long name; `value` is None when it has none (or stands in a word of its own: see `read`)."""

    name: str
    value: str | None


def read_options(words: Sequence[str]) -> list[Option]:
    """What the words after `--` ask of sbatch. Raises Misfit for one that is taken, cut short or no option at all."""
    found: list[Option] = []
    rest = iter(words)
    for word in rest:
        for option in _options_in(word, rest):
            if why := TAKEN.get(option.name):
                raise Misfit(f"{word}: sbatch's --{option.name} cannot be given: {why}")
            found.append(option)
    return found


def in_one_piece(words: Sequence[str]) -> list[str]:
    """The same options, each with its value in one word (`-p debug` is `-pdebug`). Raises Misfit."""
    pieces, left = [], list(words)
    while left:
        word = left.pop(0)
        behind = iter(left[:1])
        list(_options_in(word, behind))
        taken = left and next(behind, None) is None
        pieces.append(word + left.pop(0) if taken else word)
    return pieces


def refusal_in_plan(word: str) -> str | None:
    """Why `word` cannot stand in a plan's list of options; None when it can."""
    try:
        options = read_options([word])
    except Misfit as error:
        return str(error)
    placed = next((option.name for option in options if option.name in PLACED), None)
    if placed:
        return f"--{placed} has its own place in a plan: {PLACED[placed]}"
    if not word.startswith("--") and any(option.value is None and option.name in SHORT.values() for option in options):
        return f"{word} lacks its value: write both in one piece ({word}VALUE)"
    return None


def _options_in(word: str, rest: Iterator[str]) -> Iterator[Option]:
    """The options of one word; a letter may take its value from the word after it (`-p debug`)."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise Misfit(f"{word!r} is no option of sbatch")
        meant = next((known for known in (*TAKEN, *PLACED) if known.startswith(name) and known != name), None)
        if meant and name not in TAKEN and name not in PLACED:
            raise Misfit(f"{word}: write options out (--{meant})")
        yield Option(name, value if equals else None)
        return
    if not word.startswith("-") or word == "-":
        raise Misfit(f"{word!r} is no option: what belongs to one is written --name=value, or -x value")
    for i, letter in enumerate(word[1:], 2):
        if letter in SHORT:
            yield Option(SHORT[letter], word[i:] or next(rest, None))
            return
        if letter not in _FLAGS:
            raise Misfit(f"{word}: sbatch has no option -{letter} that allocctl knows: write it out")
        yield Option(_FLAGS[letter], None)


def effective(name: str, options: Sequence[Option], environ: Mapping[str, str], planned: str | None) -> str | None:
    """The value that sbatch will use for an option of `FROM_ENVIRONMENT`: the command line's, the environment's, the
    plan's."""
    given = [option.value for option in options if option.name == name]
    return given[-1] if given else environ.get(FROM_ENVIRONMENT[name], planned)


# --- values -----------------------------------------------------------------------------------------------------------

MAX_TASKS: Final = 100_000
"""Tasks of one array that allocctl keeps count of; sites allow 1,001 unless they say otherwise (MaxArraySize)."""

_TIME: Final = re.compile(
    r"(?P<minutes>\d{1,8})(?::(?P<seconds>\d{1,2}))?"
    r"|(?P<h>\d{1,6}):(?P<m>\d{1,2}):(?P<s>\d{1,2})"
    r"|(?P<days>\d{1,5})-(?P<dh>\d{1,2})(?::(?P<dm>\d{1,2})(?::(?P<ds>\d{1,2}))?)?",
    re.ASCII,
)
_RANGE: Final = r"\d{1,7}(?:-\d{1,7}(?::[1-9]\d{0,6})?)?"
_ARRAY: Final = re.compile(rf"({_RANGE}(?:,{_RANGE})*)(?:%[1-9]\d*)?", re.ASCII)


_NODES: Final = re.compile(r"(?:\d{1,7}[kKmM]?-)?(\d{1,7})([kKmM]?)", re.ASCII)


def most_nodes(text: str) -> int | None:
    """The most nodes that `N` or `MIN-MAX` asks for, each number perhaps with k (1024) or m. None for anything else."""
    found = _NODES.fullmatch(text.strip())
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else None


def time_limit(text: str) -> float | None:
    """Seconds in one of sbatch's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None for anything else, and for no limit
    (0, UNLIMITED)."""
    found = _TIME.fullmatch(text.strip())
    if not found:
        return None
    part = {name: int(digits or 0) for name, digits in found.groupdict().items()}
    minutes = part["minutes"] + part["m"] + part["dm"] + 60 * (part["h"] + part["dh"] + 24 * part["days"])
    return float(60 * minutes + part["seconds"] + part["s"] + part["ds"]) or None


def array_tasks(text: str) -> tuple[int, ...] | None:
    """The task numbers of `0-7`, `1,3,5`, `0-15:4`, each perhaps with `%LIMIT`, sorted. None for anything else, and for
    more than `MAX_TASKS`."""
    found = _ARRAY.fullmatch(text.strip())
    if not found:
        return None
    tasks: set[int] = set()
    for part in found[1].split(","):
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        span = range(int(first), int(last or first) + 1, int(step or 1))
        if not span or len(span) + len(tasks) > MAX_TASKS:
            return None
        tasks.update(span)
    return tuple(sorted(tasks))
