"""Plans, jobs and runs for the tests on the real cluster, and how to look at what became of them.

    def test_something(jobs: Jobs) -> None:
        plan = jobs.plan({"worker": role("0,1,3", SERVE), "client": role(2, sh("exit 7"))}, coordinator=2)
        run = jobs.submit(plan)                     # sbatch of a script that execs `allocctl run`
        assert run.job_end()["JobState"] == "FAILED"
        assert run.first("RankEnded", rank=2)["code"] == 7

A run can also be started from the test inside an allocation that a sleeping job holds: `jobs.hold()`, then
`jobs.start(plan, allocation)`. Several runs share one allocation so, and a start costs no scheduling.

Nothing here sleeps for luck: `until` asks every few milliseconds and fails at its deadline with what it waited for.
Ranks tell what they do by files in the run directory, see `up` and `SERVE`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from supervisor.engine.journal import JournalRead, read_journal
from tests.cluster import Cluster
from tests.run_files import Event as Event
from tests.run_files import RunFiles

T = TypeVar("T")

ALLOCCTL: Final = str(Path(sys.executable).with_name("allocctl"))
LIMIT: Final = 30.0  # seconds for anything to happen; what is waited for takes a fraction of one
TERMINAL: Final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
OF_AN_ALLOCATION: Final = ("SLURM", "ENVIRONMENT")


def until(happened: Callable[[], T], what: str, limit: float = LIMIT, about: object = "") -> T:
    """The first answer that is true. AssertionError after `limit` seconds, with `what` was waited for and all that is
    known then `about` it: a run."""
    deadline = time.monotonic() + limit
    while not (answer := happened()):
        assert time.monotonic() < deadline, f"waited {limit:g} s in vain for {what}{about}"
        time.sleep(0.005)
    return answer


# --- ranks ---------------------------------------------------------------------------------------------------------


def sh(script: str) -> list[str]:
    """A role's command: a POSIX shell script (its braces are its own, nothing is substituted)."""
    return ["sh", "-c", script.replace("{", "{{").replace("}", "}}")]


def py(program: str) -> list[str]:
    """A role's command: a Python program (its braces are its own)."""
    return [sys.executable, "-S", "-c", program.replace("{", "{{").replace("}", "}}")]


def touch(name: str) -> str:
    """Shell: make a file `name.RANK` in the run directory (`Run.file` and `Run.wait_file` see it)."""
    return f': >"$ALLOCD_RUN_DIR/{name}.$ALLOCD_RANK"'


def await_files(name: str, *ranks: int) -> str:
    """Shell: wait until each rank has made its file `name`."""
    there = " && ".join(f'[ -e "$ALLOCD_RUN_DIR/{name}.{rank}" ]' for rank in ranks)
    return f"until {there}; do sleep 0.05; done"


UP: Final = touch("up")
SLEEP: Final = "sleep 1000 >/dev/null 2>&1 & wait; sleep 1 >/dev/null 2>&1 & wait"
"""Shell: sleep until a trap ends it. The trap runs at once, for `wait` returns where a sleep in the foreground would
not. The second one is for a trap that comes after the first sleep has got the signal: Slurm signals one by one."""
SERVE: Final = sh(f"trap '{touch('ended')}; exit 0' TERM; {UP}; {SLEEP}")
"""A worker as it should be: says `up`, and on TERM says `ended` and exits 0."""


def role(ranks: int | str | list[int], command: list[str], **options: Any) -> Event:
    """A role's table of the plan; one rank is `2`, several `"0-1,3"` or `[0, 1, 3]`. A grace of 5 s unless given."""
    listed = [ranks] if isinstance(ranks, int) else ranks
    return {"ranks": listed, "command": command, "grace": 5, **options}


def toml(value: Any) -> str:
    """A value in TOML; tables are written inline."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


# --- runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Run(RunFiles):
    """One run of a plan: its job, and everything that it leaves. `base` is where its directory is made."""

    jobs: Jobs
    jobid: int
    base: Path
    process: subprocess.Popen[bytes] | None = None  # the engine, where the test started it
    _found: list[Path] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The run directory. Waits for the journal in it: a run without one has not begun."""
        if not self._found:
            self._found = self.until(self._find, f"a run in {self.base}")
        return self._found[0]

    def _find(self) -> list[Path]:
        opened = {path.parent: path.read_bytes().partition(b"\n") for path in self.base.glob("*/journal.jsonl")}
        return [
            directory
            for directory, (line, complete, _) in opened.items()
            if complete and (self.process is None or json.loads(line)["pid"] == self.process.pid)
        ]

    @property
    def engine(self) -> int:
        """The engine's pid, wherever it was started."""
        return int(self.first("RunOpened")["pid"])

    def until(self, happened: Callable[[], T], what: str, limit: float = LIMIT) -> T:
        """`until`, and when it is in vain, what is known of the run: where its engine is, too."""
        return until(happened, what, limit, _Where(self))

    def wait_file(self, *names: str, limit: float = LIMIT) -> None:
        """Wait for files in the run directory."""
        self.until(lambda: all((self.directory / name).exists() for name in names), ", ".join(names), limit)

    def log(self, rank: int, kind: str) -> str:
        """A rank's log: out, err or srun."""
        (path,) = self.directory.glob(f"logs/rank-{rank}.*.{kind}")
        return path.read_text(errors="replace")

    # the journal

    def journal(self) -> JournalRead:
        """The journal as the project itself reads it."""
        return read_journal(self.directory / "journal.jsonl")

    def first(self, name: str, **wanted: Any) -> Event:
        """The first such event or command, waited for."""
        return self.wait_events(name, 1, **wanted)[0]

    def wait_events(self, name: str, count: int, limit: float = LIMIT, **wanted: Any) -> list[Event]:
        """Wait for that many of them."""

        def enough() -> list[Event]:
            found = self.events(name, **wanted)
            return found if len(found) >= count else []

        return self.until(enough, f"{count} x {name} {wanted or ''}", limit)

    # the end

    def wait(self, limit: float = LIMIT) -> int:
        """The exit code of an engine that the test started."""
        assert self.process is not None
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"allocctl run has not ended within {limit:g} s{_Where(self)}") from None

    def job_end(self, *states: str, limit: float = LIMIT) -> dict[str, str]:
        """Wait for the job to be over (or in one of `states`): its record as scontrol shows it."""
        return self.jobs.cluster.wait_state(self.jobid, states or TERMINAL, limit)

    def outcome(self) -> str | None:
        """What the outcome file says, without its newline."""
        text = self.file(f"slurm_job_{self.jobid}_outcome.txt")
        return None if text is None else text.rstrip("\n")

    def verify(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`allocctl verify JOBID`."""
        return self.jobs.allocctl("verify", str(self.jobid), *options)

    def steps(self) -> dict[str, tuple[str, str]]:
        """Accounting's rows of the run's own steps, by their names: (state, exit code)."""
        argv = ["sacct", "--noheader", "--parsable2", f"--jobs={self.jobid}", "--format=JobName%200,State,ExitCode"]
        rows = (line.split("|") for line in self.jobs.cluster.run(argv).stdout.splitlines())
        return {name: (state, code) for name, state, code in rows if name.startswith("allocd-")}

    def ended_steps(self, count: int) -> dict[int, tuple[str, str]]:
        """The same by rank, once accounting has the ends of `count` of them."""

        def ended() -> dict[int, tuple[str, str]]:
            rows = {int(name.rpartition("-r")[2]): row for name, row in self.steps().items()}
            over = {rank: row for rank, row in rows.items() if row[0] not in ("RUNNING", "PENDING")}
            return over if len(over) >= count else {}

        return self.until(ended, f"the ends of {count} steps in accounting")

    # what is left

    def processes(self) -> list[int]:
        """Every living process of this run by command line or environment: agents, sruns, ranks, their children. Not
        the engine."""
        return [pid for pid in self.jobs.cluster.processes_with(f"{self.directory}/") if alive(pid)]

    def wait_gone(self, limit: float = LIMIT) -> None:
        """Wait until no process of this run is left."""
        self.until(lambda: not self.processes(), f"the end of {self.jobs.describe(self.processes())}", limit)

    def __str__(self) -> str:
        """For messages of failed waits: what is known of the run."""
        found = [path for path in (self.base / "engine.log", self.jobs.output(self.jobid)) if path.exists()]
        words = "".join(f"\n--- {path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in found)
        journals = "".join(path.read_text()[-3000:] for path in self.base.glob("*/journal.jsonl"))
        return f"{words}\n--- the end of the journal:\n{journals}"


class _Where:
    """A run whose engine is made to say where it is, which ends it: see PYTHONFAULTHANDLER."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __str__(self) -> str:
        if self.run.process is not None and self.run.process.poll() is None:
            self.run.process.send_signal(signal.SIGABRT)
            self.run.process.wait(LIMIT)
        return str(self.run)


def alive(pid: int) -> bool:
    """Whether a process runs: one that only waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


@dataclass(frozen=True)
class Allocation:
    """Nodes that a sleeping batch job holds, and that job's environment."""

    jobid: int
    env: Mapping[str, str]


@dataclass
class Jobs:
    """What one test submits and starts; everything of it lies in `directory`. Make it by the fixture `jobs`."""

    cluster: Cluster
    directory: Path
    runs: list[Run] = field(default_factory=list)
    _others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    @property
    def env(self) -> dict[str, str]:
        """The cluster's environment, with the registry of runs in the test's own directory."""
        return {**self.cluster.env, "XDG_STATE_HOME": str(self.directory / "state")}

    def plan(
        self, roles: Mapping[str, Event], *, coordinator: int | None = None, nodes: int = 4, **tables: Any
    ) -> Path:
        """Write a plan; further tables by their names: `run={"start": "each"}`, `deadlines={"hello": 3}`."""
        data = {"job": {"name": "scenario", "nodes": nodes}, "roles": roles, **tables}
        if coordinator is not None:
            data["coordinator"] = {"rank": coordinator}
        path = self.directory / f"plan-{next(self._numbers)}.toml"
        path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in data.items()))
        return path

    def submit(
        self, plan: Path, *options: str, nodes: int = 4, before: str = "", after: str = "", arguments: str = ""
    ) -> Run:
        """Submit a batch script that execs `allocctl run`. `before` is put before that line, `after` behind it (then
        there is no exec), `options` are sbatch's, `arguments` are for allocctl."""
        base = self._base()
        how = "" if after else "exec "
        command = f"{how}{ALLOCCTL} run {arguments} --dir {shlex.quote(str(base))} {shlex.quote(str(plan))}"
        script = self._script(f"{before}\n{command}\n{after}\n")
        return self._keep(Run(self, self._sbatch(script, nodes, options), base))

    def batch(self, text: str, *options: str, nodes: int = 4) -> int:
        """Submit a script as it is, for what is more than one run: an array. The job's id."""
        return self._sbatch(self._script(text), nodes, options)

    def hold(self, nodes: int = 4, *options: str) -> Allocation:
        """An allocation that is held until the test ends."""
        file = self.directory / f"environment-{next(self._numbers)}"
        script = self._script(f"env -0 >{file}.new && mv {file}.new {file}\nexec sleep 1000\n")
        jobid = self._sbatch(script, nodes, options)
        until(file.exists, f"job {jobid} to run: {self.cluster.job(jobid)}")
        pairs = (item.partition("=") for item in file.read_text().split("\0") if item)
        return Allocation(jobid, {name: text for name, _, text in pairs if name.startswith(OF_AN_ALLOCATION)})

    def start(
        self,
        plan: Path,
        allocation: Allocation,
        *options: str,
        env: Mapping[str, str] | None = None,
        base: Path | None = None,
    ) -> Run:
        """Start `allocctl run` from the test, inside an allocation."""
        base = base or self._base()
        with (base / "engine.log").open("ab") as log:
            process = subprocess.Popen(
                [ALLOCCTL, "run", *options, "--dir", str(base), str(plan)],
                env={**self.env, "PYTHONFAULTHANDLER": "1", **allocation.env, **(env or {})},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._keep(Run(self, allocation.jobid, base, process))

    def outside(self, plan: Path, jobid: int | str, *, env: Mapping[str, str] | None = None) -> Run:
        """Start `allocctl run --jobid` from the test, as on a login node."""
        number = int(str(jobid).partition("_")[0])
        return self.start(plan, Allocation(number, {}), f"--jobid={jobid}", env=env)

    def background(self, argv: list[str], allocation: Allocation) -> subprocess.Popen[bytes]:
        """Start another program inside an allocation, its output to nobody; it is ended with the test."""
        process = subprocess.Popen(
            argv,
            env={**self.env, **allocation.env},
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._others.append(process)
        return process

    def allocctl(self, *arguments: str, timeout: float = LIMIT) -> subprocess.CompletedProcess[str]:
        """`allocctl` as a person on the login node types it."""
        return self.cluster.run([ALLOCCTL, *arguments], env=self.env, cwd=self.directory, timeout=timeout)

    def srun_wrapper(self, script: str) -> dict[str, str]:
        """An environment in which `srun` is a script: in it `$SRUN` is the real one, `$RANK` the rank whose step is
        started (empty for other steps)."""
        real = self.cluster.run(["sh", "-c", "command -v srun"], check=True).stdout.strip()
        tools = self.directory / f"bin-{next(self._numbers)}"
        tools.mkdir()
        rank = 'RANK=; for word; do case $word in --job-name=allocd-*) RANK="${word##*-r}";; esac; done'
        (tools / "srun").write_text(f"#!/bin/sh\nSRUN={real}\n{rank}\n{script}\n")
        (tools / "srun").chmod(0o755)
        return {"PATH": os.pathsep.join([str(tools), self.env["PATH"]])}

    def output(self, jobid: int) -> Path:
        """Where a job's batch script writes."""
        return self.directory / f"slurm-{jobid}.out"

    @staticmethod
    def describe(pids: list[int]) -> str:
        """Processes by their command lines, for messages."""
        words = []
        for pid in pids:
            with contextlib.suppress(OSError):
                words.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()!r}")
        return "; ".join(words)

    def close(self) -> None:
        """End what was started here and still runs."""
        engines = [run.process for run in self.runs if run.process is not None]
        for process in (*self._others, *engines):
            process.kill()
            process.wait(LIMIT)

    def _keep(self, run: Run) -> Run:
        self.runs.append(run)
        return run

    def _base(self) -> Path:
        base = self.directory / f"runs-{next(self._numbers)}"
        base.mkdir()
        return base

    def _script(self, text: str) -> Path:
        path = self.directory / f"script-{next(self._numbers)}.sh"
        path.write_text(f"#!/bin/sh\n{text}")
        return path

    def _sbatch(self, script: Path, nodes: int, options: tuple[str, ...]) -> int:
        argv = ["sbatch", "--parsable", f"--nodes={nodes}", *options, str(script)]
        done = self.cluster.run(argv, env=self.env, cwd=self.directory, check=True)
        return int(done.stdout.split(";")[0])
