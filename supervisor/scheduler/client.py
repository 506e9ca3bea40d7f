"""The questions to Slurm, asked for real: one process each, with a deadline, and never an exception for
Slurm's trouble.

A slurmctld that is down keeps squeue, scontrol and scancel for eight to ten seconds each, so every call has a
deadline of its own (default 5 s) after which its process is killed. What a command prints is bounded: an
answer beyond the limit is no answer. Command lines are argument lists, made in `core`; ids are checked before
they become arguments. The environment is `query_environment`: no filter or format can slip in through a
variable. They run in `/`: the directory that whoever asks was started in may be gone.

Trouble (a command that is missing, late, too talkative, or that fails) comes back inside the `Answer`, or as
None or False where the answer is simple. A `ValueError` means that the caller's id or signal is malformed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final

from supervisor.core.answers import Answer, read_answer, says_unknown_job
from supervisor.core.slurm import JobId, Source, Unreadable, parse_job_id, query_environment
from supervisor.core.slurm_queue import (
    QueueRow,
    parse_squeue_jobs,
    parse_squeue_steps,
    squeue_jobs_argv,
    squeue_steps_argv,
)
from supervisor.core.slurm_records import (
    parse_sacct_ids,
    sacct_argv,
    scontrol_argv,
    share_sacct,
)

DEADLINE: Final = 5.0
MAX_OUTPUT: Final = 4 * 1024 * 1024
_CHUNK: Final = 65_536

QUEUED_AT_ONCE: Final = 1000
BOOKED_AT_ONCE: Final = 200
"""So many ids go into one call of squeue (one argument may hold 131,071 bytes, and the id of an array's task up to 21)
and of sacct (which prints a line for every step: `MAX_OUTPUT` has to hold them).
"""


def utc_now() -> datetime:
    """The wall clock, for the `at` of an answer."""
    return datetime.now(UTC)


def slurm_is_here() -> bool:
    """Whether any command that can be asked is on PATH: one that is not there does not come while one waits."""
    return any(map(shutil.which, ("squeue", "sacct", "scontrol")))


@dataclass(frozen=True, slots=True)
class Printed:
    """How a command ended: `returncode` is None, and `trouble` a sentence, when it did not end by itself."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """What squeue said about several jobs: `rows` by display id, or the `problem` with the question ("" if none).

    A job without a row is not in the controller's memory, or has two rows there. `argv`, `at` (UTC in ISO 8601),
    `returncode`, `stdout` and `stderr` are the evidence; where many ids took several calls, of the last one.
    """

    argv: tuple[str, ...]
    at: str
    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    rows: Mapping[str, QueueRow] = field(default_factory=dict)


class SlurmClient:
    """Slurm's commands as found on PATH of `environ` (default: this process's), on one cluster (default: its
    own).

    `deadline` is in seconds a call, `max_output` in bytes for each of stdout and stderr, `cwd` where they run. The
    attribute `calls` counts the commands that were run, by name, and `errors` those of them that did not start, did not
    end in time or ended with another code than 0 (squeue's for a job that it does not know among them).
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        cluster: str | None = None,
        deadline: float = DEADLINE,
        max_output: int = MAX_OUTPUT,
        cwd: str = "/",
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._environ = query_environment(os.environ if environ is None else environ)
        self._cluster = cluster
        self._deadline = deadline
        self._max_output = max_output
        self._cwd = cwd
        self._now = now
        self.calls: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def sacct(self, jobid: str) -> Answer:
        """What accounting says about a job, its steps included."""
        parse_job_id(jobid)
        answer = await self._ask("sacct", jobid, sacct_argv([jobid], self._cluster))
        return (await self._shared_rows({jobid: answer}))[jobid]

    async def show_job(self, jobid: str) -> Answer:
        """What the controller says: state, nodes, start, end (a running job's time limit), restarts, batch
        host.
        """
        parse_job_id(jobid)
        return await self._ask("scontrol", jobid, scontrol_argv(jobid, self._cluster))

    async def queue(self, jobids: Collection[str]) -> Queue:
        """What squeue shows of these jobs, in one call; of more than `QUEUED_AT_ONCE`, in several, one after another,
        of which the first that fails is the answer.
        """
        answer = Queue(argv=("squeue",), at=self._moment(), returncode=0)
        rows: dict[str, QueueRow] = {}
        for some in _cut(jobids, QUEUED_AT_ONCE):
            argv, at = squeue_jobs_argv(some, self._cluster), self._moment()
            printed = await self.run(argv)
            answer = Queue(tuple(argv), at, printed.returncode, printed.stdout, printed.stderr)
            try:
                found = _rows(printed)
            except Unreadable as error:
                return replace(answer, problem=str(error))
            rows |= found
        return replace(answer, rows=rows)

    async def accounting(self, jobids: Collection[str]) -> dict[str, Answer]:
        """What accounting says about each of these jobs, in one call; of more than `BOOKED_AT_ONCE`, in several, one
        after another. An answer holds the command line of the whole call, and its own job's lines of what it printed.
        """
        answers: dict[str, Answer] = {}
        for some in _cut(jobids, BOOKED_AT_ONCE):
            answers |= await self._book(some, some)
        return await self._shared_rows(answers)

    async def _shared_rows(self, answers: dict[str, Answer]) -> dict[str, Answer]:
        """The same, with an array's tasks that accounting does not list by themselves asked for once more: those that
        never began have one row together, which sacct shows for the array's id alone.
        """
        tasks = {jobid: parse_job_id(jobid) for jobid, answer in answers.items() if answer.outcome == "absent"}
        unlisted = [jobid for jobid, job in tasks.items() if job.task is not None]
        arrays = sorted({str(tasks[jobid].job) for jobid in unlisted})
        return answers | (await self._book(arrays, unlisted, steps=False) if unlisted else {})

    async def _book(self, asked: Sequence[str], jobids: Sequence[str], *, steps: bool = True) -> dict[str, Answer]:
        argv, at = sacct_argv(asked, self._cluster, steps=steps), self._moment()
        printed = await self.run(argv)
        shares = share_sacct(printed.stdout, jobids)
        return {jobid: _read("sacct", jobid, argv, at, replace(printed, stdout=shares[jobid])) for jobid in jobids}

    async def part_ids(self, jobid: str) -> tuple[str, ...] | None:
        """The display ids of accounting's rows for a job that is called by its plain id: of its tasks or components.
        None when accounting could not be asked.
        """
        parse_job_id(jobid)
        printed = await self.run(sacct_argv([jobid], self._cluster, steps=False))
        if printed.returncode != 0:
            return None
        try:
            return parse_sacct_ids(printed.stdout)
        except Unreadable:
            return None

    async def cancel_job(self, jobid: str) -> str:
        """Cancel a whole job, array task or component, because a person asked for it: why that failed, or "".

        "" says that the request was taken; scancel says nothing of a job that is over or unknown (22.05).
        """
        if (job := parse_job_id(jobid)).step is not None:
            raise ValueError(f"{jobid!r} is a step, and a whole job was to be cancelled: {job.allocation}")
        printed = await self.run(["scancel", *self._clusters(), jobid])
        return printed.trouble or ("" if printed.returncode == 0 else _complaint("scancel", printed))

    async def steps_by_name(self, jobid: str) -> dict[str, str] | None:
        """Ids of the job's living steps by name; {} when it has none, None when Slurm could not be asked."""
        parse_job_id(jobid)
        printed = await self.run(squeue_steps_argv(jobid, self._cluster))
        if printed.returncode == 0:
            return parse_squeue_steps(printed.stdout)
        return {} if says_unknown_job(printed.returncode, printed.stderr) else None

    async def signal_step(self, step: str, signame: str) -> bool:
        """Ask Slurm to send a signal (`TERM`) to every task of a step (`123.0`).

        True says that the request was taken, not that anything received it: scancel also ends with 0 for a
        step that is already gone. By itself scancel asks every node of the *job*, and ends with 225 ("Invalid job
        id") when one of them does not have the step (22.05), although the step's own nodes were reached; the
        controller (`--ctld`) asks these only.
        """
        if not _is_step(parse_job_id(step)):
            raise ValueError(f"{step!r} is no step that can be signalled: expected JOB.NUMBER")
        if not re.fullmatch(r"[A-Z][A-Z0-9]{1,9}", signame):
            raise ValueError(f"{signame!r} is no signal's name")
        printed = await self.run(["scancel", *self._clusters(), "--ctld", f"--signal={signame}", step])
        return printed.returncode == 0

    async def signal_batch(self, jobid: str, signame: str) -> str:
        """Ask Slurm to send a signal (`TERM`) to the batch script's own process, which is the engine where the script
        has execed it: why that failed, or "".
        """
        parse_job_id(jobid)
        printed = await self.run(["scancel", *self._clusters(), "--batch", f"--signal={signame}", jobid])
        return printed.trouble or ("" if printed.returncode == 0 else _complaint("scancel", printed))

    async def cancel_step(self, step: str) -> bool:
        """Ask Slurm to end a step (`123.0`) at once: its tasks are killed, no handler of theirs runs. True says that
        the request was taken."""
        if not _is_step(parse_job_id(step)):
            raise ValueError(f"{step!r} is no step that can be ended: expected JOB.NUMBER")
        return (await self.run(["scancel", *self._clusters(), step])).returncode == 0

    async def _ask(self, source: Source, jobid: str, argv: Sequence[str]) -> Answer:
        at = self._moment()
        return _read(source, jobid, argv, at, await self.run(argv))

    def _moment(self) -> str:
        return self._now().isoformat(timespec="milliseconds")

    def _clusters(self) -> list[str]:
        return [f"--clusters={self._cluster}"] if self._cluster else []

    async def run(self, argv: Sequence[str]) -> Printed:
        """Run one command to its end, to the deadline, or to the limit of its output; it is gone when this
        returns.
        """
        self.calls[argv[0]] += 1
        printed = await self._run(argv)
        if printed.returncode != 0:
            self.errors[argv[0]] += 1
        return printed

    async def _run(self, argv: Sequence[str]) -> Printed:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environ,
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            where = f" in {self._cwd}" if error.filename == self._cwd else ""
            return Printed(None, trouble=f"{argv[0]} cannot be started{where}: {error.strerror or error}")
        out, err = bytearray(), bytearray()
        trouble = ""
        try:
            async with asyncio.timeout(self._deadline):
                trouble = await self._collect(process, out, err)
        except TimeoutError:
            trouble = f"did not answer within {self._deadline:g} s"
        finally:
            await _end(process)
        # Bytes that are no UTF-8 come from a name; they stay visible, and the text stays fit for JSON.
        stdout, stderr = (bytes(data).decode("utf-8", "backslashreplace") for data in (out, err))
        if trouble:
            return Printed(None, stdout, stderr, f"{argv[0]} {trouble}")
        return Printed(process.returncode, stdout, stderr)

    async def _collect(self, process: asyncio.subprocess.Process, out: bytearray, err: bytearray) -> str:
        """Read both streams to their end, or to the limit of one; returns the trouble with them."""

        async def read(stream: asyncio.StreamReader | None, into: bytearray) -> None:
            while stream is not None and (data := await stream.read(_CHUNK)):
                into += data[: self._max_output + 1 - len(into)]
                if len(into) > self._max_output:
                    _kill(process)  # ends the other stream too

        await asyncio.gather(read(process.stdout, out), read(process.stderr, err))
        await process.wait()
        if max(len(out), len(err)) > self._max_output:
            return f"printed more than {self._max_output} bytes"
        return ""


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the command's process group: sites wrap Slurm's commands in scripts, whose children hold the
    pipes.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process if it still lives, and reap it; also when the caller is being cancelled."""
    if process.returncode is None:
        _kill(process)
        await asyncio.shield(process.wait())


def _read(source: Source, jobid: str, argv: Sequence[str], at: str, printed: Printed) -> Answer:
    return read_answer(
        source=source,
        jobid=jobid,
        argv=argv,
        at=at,
        returncode=printed.returncode,
        stdout=printed.stdout,
        stderr=printed.stderr,
        trouble=printed.trouble,
    )


def _rows(printed: Printed) -> dict[str, QueueRow]:
    """The rows of one squeue call by display id; `Unreadable` says why there are none."""
    if says_unknown_job(printed.returncode, printed.stderr):  # one id alone, and it is unknown
        return {}
    if printed.returncode != 0:
        raise Unreadable(printed.trouble or _complaint("squeue", printed))
    rows = parse_squeue_jobs(printed.stdout)
    seen = Counter(row.display for row in rows)
    return {row.display: row for row in rows if seen[row.display] == 1}


def _complaint(command: str, printed: Printed) -> str:
    lines = printed.stderr.strip().splitlines() or ["no message"]
    return f"{command} ended with {printed.returncode}: {lines[-1][:300]}"


def _cut(jobids: Collection[str], size: int) -> Iterator[list[str]]:
    """The ids, checked, each once, in lists that one call can take."""
    every = list(dict.fromkeys(jobids))
    for jobid in every:
        parse_job_id(jobid)
    for begin in range(0, len(every), size):
        yield every[begin : begin + size]


def _is_step(job: JobId) -> bool:
    return job.step is not None and job.step.isdecimal()
