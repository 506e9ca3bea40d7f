"""Slurm's words: states, exit codes, ids, lists of nodes, times, and the variables that steps inherit.

Everything is read whole: `CANCELLED by 1000` is CANCELLED, a word that is not in the table is unknown, and
unknown is never a success. Times are seconds since the epoch (queries are made with `SLURM_TIME_FORMAT=%s`,
see `query_environment`); an ISO time, as printed without that variable, is read as local time. Durations are
seconds. The parsers of whole answers are in `slurm_records.py`. Nothing here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Final, Literal

from supervisor.core import codes


class Unreadable(ValueError):
    """Slurm's answer cannot be trusted or understood; the message is a sentence for people."""


# --- states -------------------------------------------------------------------------------------------------

Phase = Literal["waiting", "running", "ending", "ended", "unknown"]


@dataclass(frozen=True, slots=True)
class State:
    """One word for a job's or a step's state.

    `code` is our exit code for a job that ended so; None says that the record's own ExitCode counts.
    `returns` marks ends after which the site's rules may put the job back into the queue under the same id.
    """

    word: str
    short: str
    phase: Phase
    code: int | None = None
    returns: bool = False

    @property
    def terminal(self) -> bool:
        """Whether a job in this state is over."""
        return self.phase == "ended"


STATES: Final[tuple[State, ...]] = (
    # Base states: squeue(1), sacct(1).
    State("PENDING", "PD", "waiting"),
    State("RUNNING", "R", "running"),
    State("SUSPENDED", "S", "running"),
    State("COMPLETED", "CD", "ended", None),
    State("FAILED", "F", "ended", None),
    State("CANCELLED", "CA", "ended", codes.CANCELLED),
    State("TIMEOUT", "TO", "ended", codes.DEADLINE),
    State("DEADLINE", "DL", "ended", codes.DEADLINE),
    State("OUT_OF_MEMORY", "OOM", "ended", codes.FAILED),
    State("PREEMPTED", "PR", "ended", codes.FAILED, returns=True),
    State("NODE_FAIL", "NF", "ended", codes.FAILED, returns=True),
    State("BOOT_FAIL", "BF", "ended", codes.FAILED, returns=True),
    # Flags that are shown in place of a base state: squeue(1); REQUEUED, RESIZING and REVOKED also sacct(1).
    State("CONFIGURING", "CF", "waiting"),
    State("REQUEUED", "RQ", "waiting"),
    State("REQUEUE_FED", "RF", "waiting"),
    State("REQUEUE_HOLD", "RH", "waiting"),
    State("RESV_DEL_HOLD", "RD", "waiting"),
    State("SPECIAL_EXIT", "SE", "waiting"),
    State("STOPPED", "ST", "running"),
    State("RESIZING", "RS", "running"),
    State("SIGNALING", "SI", "running"),
    State("COMPLETING", "CG", "ending"),
    State("STAGE_OUT", "SO", "ending"),
    State("REVOKED", "RV", "ended", codes.UNVERIFIABLE),
    # Flags of the page "Job State Codes" that stand beside a base state, in JSON and in logs, and in no text.
    State("POWER_UP_NODE", "", "waiting"),
    State("EXPEDITING", "", "waiting"),
    State("LAUNCH_FAILED", "", "ending"),
    State("RECONFIG_FAIL", "", "ending"),
    State("UPDATE_DB", "", "ending"),
)
"""Every state word of Slurm 21.08 to 25.05 (EXPEDITING: 25.11).

Sources: "JOB STATE CODES" of squeue(1) and sacct(1), and Slurm's page "Job State Codes". Words of the last
group have no short code, and none of them says that a job is over: after LAUNCH_FAILED it is commonly queued
again and held (measured with a failing prolog: PENDING). REQUEUED and SPECIAL_EXIT are no ends either: the job
waits again under the same id. REVOKED is the end of a federation's duplicate: the truth is on another cluster,
so it proves nothing here. OUT_OF_MEMORY and the losses of nodes carry no usable code of their own.
"""

_BY_WORD: Final[dict[str, State]] = {
    **{state.short: state for state in STATES if state.short},
    **{state.word: state for state in STATES},
}
_SUFFIX: Final = re.compile(r"(?: by \d+|\+)$")


def parse_state(text: str) -> State:
    """The state that `text` names (word or short code); the suffixes ` by UID` and `+` are dropped.

    An unknown word comes back as a `State` of phase "unknown", which is neither an end nor a success.
    """
    word = _SUFFIX.sub("", text.strip())
    return _BY_WORD.get(word) or State(word, "", "unknown")


# --- exit codes ---------------------------------------------------------------------------------------------

Source = Literal["sacct", "scontrol"]

FOLD: Final = 128
"""sacct keeps seven bits of a code: a script's 137 is shown as 9:0, 128 as 0:0. scontrol keeps the whole
code.
"""


@dataclass(frozen=True, slots=True)
class ExitCode:
    """Slurm's pair `code:signal`."""

    code: int
    signal: int

    def __str__(self) -> str:
        return f"{self.code}:{self.signal}"

    @property
    def zero(self) -> bool:
        """Exactly 0:0."""
        return self.code == 0 and self.signal == 0

    @property
    def shell(self) -> int:
        """The one number a shell would give: the code, or 128 + signal where only a signal is recorded."""
        return codes.SIGNAL_BASE + self.signal if self.signal and not self.code else self.code


def parse_exit_code(text: str) -> ExitCode:
    """Read `7:0`; anything else raises `Unreadable`."""
    found = re.fullmatch(r"(\d{1,5}):(\d{1,3})", text.strip())
    if not found:
        raise Unreadable(f"an exit code must read CODE:SIGNAL, found {text!r}")
    return ExitCode(int(found[1]), int(found[2]))


def agrees(native: int, recorded: ExitCode, source: Source) -> bool:
    """Whether a code that was seen natively (0..255, 128 + N for signal N) can be what Slurm recorded.

    Agreement is no proof: accounting shows a native 128 as 0:0, and the two agree.
    """
    if recorded.signal and native == codes.SIGNAL_BASE + recorded.signal:
        return True
    if recorded.signal and not recorded.code:
        return False
    if source == "sacct":
        return native % FOLD == recorded.code % FOLD
    return native == recorded.code


# --- job and step ids ---------------------------------------------------------------------------------------

_JOB_ID: Final = re.compile(
    r"(?P<job>[1-9]\d*)(?:_(?P<task>\d+)|\+(?P<offset>\d+))?(?:\.(?P<step>\d+|batch|extern|interactive))?"
)


@dataclass(frozen=True, slots=True)
class JobId:
    """`123`, array task `123_4`, heterogeneous component `123+1`, each perhaps with a step (`.batch`)."""

    job: int
    task: int | None = None
    offset: int | None = None
    step: str | None = None

    @property
    def allocation(self) -> str:
        """The id without its step."""
        if self.task is not None:
            return f"{self.job}_{self.task}"
        return f"{self.job}+{self.offset}" if self.offset is not None else str(self.job)

    def __str__(self) -> str:
        return f"{self.allocation}.{self.step}" if self.step is not None else self.allocation


def parse_job_id(text: str) -> JobId:
    """Read a job or step id as people type it; raises `ValueError` for anything else (`0`, `-1`,
    `1;cluster`).
    """
    found = _JOB_ID.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no Slurm job id: expected 123, 123_4, 123+1 or one of these with .STEP")
    part = found.groupdict()
    return JobId(
        int(found["job"]),
        None if part["task"] is None else int(part["task"]),
        None if part["offset"] is None else int(part["offset"]),
        part["step"],
    )


def parse_submitted(text: str) -> tuple[str, str | None]:
    """The answer of `sbatch --parsable` (`id` or `id;cluster`) as (id, cluster or None)."""
    found = re.fullmatch(r"([1-9]\d*)(?:;([\w.-]+))?", text.strip())
    if not found:
        raise Unreadable(f"sbatch --parsable must print an id, found {text!r}")
    return found[1], found[2]


# --- hostlists ----------------------------------------------------------------------------------------------

MAX_HOSTS: Final = 65_536
_NO_NODES: Final = frozenset({"", "(null)", "None", "None assigned", "N/A"})
_COMMA_OUTSIDE: Final = re.compile(r",(?![^\[\]]*\])")
_BRACKET: Final = re.compile(r"\[([^\[\]]*)\]")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """The names in `node[1-3,5],gpu[01-04]`, in order; () for Slurm's ways of saying none.

    Zeros in front are kept, several brackets multiply. Raises `ValueError` for an expression that is
    malformed or names more than `MAX_HOSTS` nodes.
    """
    text = text.strip()
    if text in _NO_NODES:
        return ()
    names: list[str] = []
    for item in _COMMA_OUTSIDE.split(text):
        pieces = _BRACKET.split(item)
        if not item or any(c in "[] \t\n" for c in "".join(pieces[::2])):
            raise ValueError(f"malformed hostlist {text!r}")
        spans = [_expand_span(p) if i % 2 else (p,) for i, p in enumerate(pieces)]
        size = len(names)
        for span in spans:
            size = max(size, 1) * len(span)
            if size > MAX_HOSTS:
                raise ValueError(f"hostlist {text!r} names more than {MAX_HOSTS} nodes")
        names.extend("".join(choice) for choice in product(*spans))
    return tuple(names)


def _expand_span(text: str) -> tuple[str, ...]:
    """`1-3,5` as its numbers, each as wide as its lower end was written."""
    numbers: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        if not found:
            raise ValueError(f"malformed range {text!r} in a hostlist")
        low, high = int(found[1]), int(found[2] or found[1])
        if high < low or high - low >= MAX_HOSTS:
            raise ValueError(f"impossible range {text!r} in a hostlist")
        numbers.extend(str(n).zfill(len(found[1])) for n in range(low, high + 1))
    return tuple(numbers)


def compress_hostlist(names: Iterable[str]) -> str:
    """A hostlist expression that expands to exactly these names, in this order."""
    groups: list[tuple[str, list[tuple[int, str]]]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if groups and groups[-1][0] == stem and digits and groups[-1][1]:
            groups[-1][1].append((int(digits), digits))
        else:
            groups.append((stem, [(int(digits), digits)] if digits else []))
    return ",".join(stem + _compress_numbers(numbers) for stem, numbers in groups)


def _compress_numbers(numbers: list[tuple[int, str]]) -> str:
    if len(numbers) <= 1:
        return "".join(digits for _, digits in numbers)
    runs: list[list[tuple[int, str]]] = []
    for value, digits in numbers:
        # A run keeps the width of its first number, so only the text that this width would give may join it.
        if runs and value == runs[-1][-1][0] + 1 and digits == str(value).zfill(len(runs[-1][0][1])):
            runs[-1].append((value, digits))
        else:
            runs.append([(value, digits)])
    return "[" + ",".join(r[0][1] if len(r) == 1 else f"{r[0][1]}-{r[-1][1]}" for r in runs) + "]"


# --- times --------------------------------------------------------------------------------------------------


def parse_time(text: str) -> float | None:
    """Seconds since the epoch; None for `Unknown`, `N/A`, `None`, `(null)` and the like."""
    text = text.strip()
    if re.fullmatch(r"\d{1,12}", text):
        return float(text) or None
    if not re.match(r"\d{4}-", text):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_duration(text: str) -> float | None:
    """Seconds in `[D-]HH:MM:SS` or `MM:SS`; None for `UNLIMITED`, `Partition_Limit` and anything else."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


# --- environments -------------------------------------------------------------------------------------------

_COMPONENTS: Final = re.compile(r"SLURM_HET_SIZE|SLURM_JOB_\w+_HET_GROUP_\d+")

CONFIGURATION: Final = ("SLURM_CONF", "SLURM_CONF_SERVER")
HOW_TO_REACH: Final = (*CONFIGURATION, "SLURM_JWT")

JOB_SCOPED: Final[tuple[tuple[str, str], ...]] = (
    ("|".join(HOW_TO_REACH), "how to reach the cluster"),
    (r"SLURM_WORKING_CLUSTER|SLURM_CLUSTER_NAME", "which cluster the allocation is on"),
    (r"SLURM_JOB_ID|SLURM_JOBID", "which allocation the step belongs to"),
    (r"SLURM_JOB_(?:NODELIST|NUM_NODES|CPUS_PER_NODE|START_TIME|END_TIME|LICENSES|RESERVATION|DEPENDENCY)",
     "what the allocation consists of; --nodes is always given, so NUM_NODES cannot widen the step"),
    (r"SLURM_NODELIST", "the older name of SLURM_JOB_NODELIST, which scripts still read"),
    (r"SLURM_JOB_(?:NAME|ACCOUNT|PARTITION|QOS|USER|UID|GROUP|GID|COMMENT)", "who asked for it, and where"),
    (r"SLURM_SUBMIT_(?:DIR|HOST)", "where it was submitted"),
    (r"SLURM_RESTART_COUNT", "which attempt this is"),
    (r"SLURM_ARRAY_\w+", "which array, and which of its tasks"),
    (_COMPONENTS.pattern, "the components of a heterogeneous job"),
)  # fmt: skip
"""Variables that srun and the ranks keep: facts about the allocation, equal on all of its nodes, with the
reason.

Everything else that begins with a prefix of `SCHEDULER_PREFIXES` goes. Source: the input and output variables
in srun(1) and sbatch(1). What goes, and why: options of another srun or of sbatch that would silently become
options of this step (SLURM_NTASKS*, SLURM_CPUS_PER_*, SLURM_MEM_PER_*, SLURM_CPU_BIND*, SLURM_GPUS*,
SLURM_TRES_PER_TASK, SLURM_DISTRIBUTION, SLURM_EXPORT_ENV, SLURM_WAIT, SRUN_*, SBATCH_*, SALLOC_*); options
that soil or move the control channel (SLURM_LABELIO, SLURM_STDOUTMODE, SLURM_UNBUFFEREDIO, SLURM_OPEN_MODE);
facts about another step, task or node (SLURM_STEP_*, SLURM_PROCID, SLURM_NODEID, SLURM_JOB_GPUS,
SLURMD_NODENAME, PMI*, PMIX*), which Slurm sets anew.
"""

SCHEDULER_PREFIXES: Final = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_JOB_SCOPED: Final = re.compile("|".join(f"(?:{pattern})" for pattern, _ in JOB_SCOPED))

NODE_BOUND: Final = frozenset({"VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT"})
"""The virtual environment of the shell that started us: it need not exist on the nodes, and a tool that
believes in it (uv, pip) would fail or install there. PATH, PYTHONPATH and PYTHONHOME are the user's and stay:
a directory that is missing in PATH is skipped, and the agent runs isolated (`python -I`).
"""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """srun's own environment: the user's variables, and of the scheduler's those that describe the
    allocation.

    A plain job that was submitted by a heterogeneous one inherits its components' variables, with which srun
    refuses to start anything ("No directives to start application on any available hetjob components").
    """
    foreign = environ.get("SLURM_JOB_ID_HET_GROUP_0") != environ.get("SLURM_JOB_ID")
    return {
        name: value
        for name, value in environ.items()
        if name not in NODE_BOUND
        and (not name.startswith(SCHEDULER_PREFIXES) or _JOB_SCOPED.fullmatch(name))
        and not (foreign and _COMPONENTS.fullmatch(name))
    }


_QUERY_KEEPS: Final = frozenset({*HOW_TO_REACH, "SLURM_CLUSTERS"})
_QUERY_PREFIXES: Final = (*SCHEDULER_PREFIXES, "SACCT_", "SQUEUE_", "SCONTROL_", "SCANCEL_")


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sacct, scontrol, squeue and scancel.

    Variables such as SQUEUE_PARTITION or SCANCEL_STATE are filters that nobody would see in the command line,
    and SACCT_FORMAT or SLURM_TIME_FORMAT change the answer's shape: they go. Messages are in English, times
    are epochs, lists of an array's tasks are not cut short (after 64 characters: SLURM_BITSTR_LEN in squeue(1)).
    """
    kept = {
        name: value for name, value in environ.items() if name in _QUERY_KEEPS or not name.startswith(_QUERY_PREFIXES)
    }
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
