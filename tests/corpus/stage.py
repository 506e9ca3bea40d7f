"""What a scene of the recorder stands on: a cluster, the project's own client, and a case that is being written."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from supervisor.core.slurm import parse_state
from supervisor.core.slurm_queue import squeue_jobs_argv
from supervisor.scheduler.client import SlurmClient, utc_now
from tests.cluster import Cluster
from tests.corpus.files import Case, Expectation, Said

LIMIT: Final = 240.0
"""Seconds for anything that a scene waits for: a time limit of a minute, a requeued job that starts again."""


@dataclass
class Scene:
    """One case in the making. Expectations are about the moments that have been looked at so far."""

    cluster: Cluster
    case: Case
    deadline: float = 5.0
    _moment: int = 0

    # ---- doing ---------------------------------------------------------------------------------------------

    def submit(self, script: str, *options: str) -> str:
        """Submit a script whose output nobody needs; its id."""
        return str(self.cluster.sbatch(script, "--output=/dev/null", *options))

    def do(self, *argv: str) -> None:
        """A command that must work."""
        self.cluster.run(list(argv), check=True)

    def file(self, name: str) -> str:
        """A path that scripts and scenes share, quoted for a shell."""
        return shlex.quote(str(self.cluster.directory / "jobs" / f"{self.case.name}.{name}"))

    def touch(self, name: str) -> None:
        """Let a script go on that waits for `file(name)`."""
        (self.cluster.directory / "jobs" / f"{self.case.name}.{name}").touch()

    def files(self) -> set[str]:
        """Names that exist of those that `file` gave."""
        prefix = f"{self.case.name}."
        return {path.name.removeprefix(prefix) for path in (self.cluster.directory / "jobs").glob(f"{prefix}*")}

    # ---- waiting -------------------------------------------------------------------------------------------

    async def until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait without holding up the other scenes."""
        deadline = time.monotonic() + LIMIT
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.case.name}: waited {LIMIT:g} s for {what}")
            await asyncio.sleep(0.1)

    async def state(self, jobid: str, *words: str) -> None:
        """Wait until the controller's word for a job is one of these."""

        def reached() -> bool:
            text = self.cluster.run(["scontrol", "show", "job", jobid]).stdout
            found = re.search(r"^   JobState=(\S+)", text, re.MULTILINE)
            return found is not None and found[1] in words

        await self.until(reached, f"job {jobid} to be {' or '.join(words)}")

    async def ended(self, *jobids: str) -> None:
        """Wait until both books are complete: the controller is done, and accounting has the end of every row."""
        for jobid in jobids:
            await self.until(partial(self._over, jobid), f"the end of job {jobid} in both books")

    def _over(self, jobid: str) -> bool:
        shown = self.cluster.run(["scontrol", "show", "job", jobid]).stdout
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={jobid}", "--format=State,End"]
        rows = [row.split("|") for row in self.cluster.run(argv).stdout.splitlines()]
        states = re.findall(r"^   JobState=(\S+)", shown, re.MULTILINE)
        return (
            bool(rows)
            and all(parse_state(state).terminal for state in states)
            and all(parse_state(state).terminal and end != "Unknown" for state, end in rows)
        )

    async def forgotten(self, jobid: str) -> None:
        """Wait until the controller has forgotten a job."""
        gone = "Invalid job id"
        await self.until(
            lambda: gone in self.cluster.run(["scontrol", "show", "job", jobid]).stderr, f"{jobid} forgotten"
        )

    # ---- what several scenes show ----------------------------------------------------------------------------

    async def waits_again(self, job: str) -> None:
        """It is queued once more: looked at twice, and no end."""
        for _ in range(2):
            await self.look(job, queue={job: "PENDING"})
        self.expect(job, "running", "PENDING", 75)

    async def has_succeeded(self, job: str) -> None:
        """It ends with 0, by accounting's word."""
        await self.ended(job)
        await self.look(job, queue={job: "COMPLETED"})
        self.expect(job, "settled", "COMPLETED", 0, line="sacct")

    # ---- writing down --------------------------------------------------------------------------------------

    async def look(self, *jobids: str, queue: dict[str, str] | None = None) -> None:
        """One moment: squeue about all jobs together, then both books about each. `queue`: what squeue must say."""
        self._moment += 1
        client = SlurmClient(environ=self.cluster.env, deadline=self.deadline)
        argv = squeue_jobs_argv(jobids)
        at = utc_now().isoformat(timespec="milliseconds")
        rows = await client.run(argv)
        self._add("squeue", ",".join(jobids), at, argv, rows.returncode, rows.stdout, rows.stderr, rows.trouble, queue)
        for jobid in jobids:
            for a in (await client.sacct(jobid), await client.show_job(jobid)):
                self._add(a.source, jobid, a.at, a.argv, a.returncode, a.stdout, a.stderr, a.trouble, None)

    def _add(
        self,
        who: str,
        jobid: str,
        at: str,
        argv: list[str] | tuple[str, ...],
        returncode: int | None,
        stdout: str,
        stderr: str,
        trouble: str,
        queue: dict[str, str] | None,
    ) -> None:
        plain = self._plain
        question = tuple(map(plain, argv))
        said = (plain(stdout), plain(stderr), plain(trouble))
        self.case.answers.append(Said(self._moment, who, jobid, at, question, returncode, *said, queue or {}))

    def _plain(self, text: str) -> str:
        """Without this machine's names: its directory, its cluster, its host."""
        text = text.replace(str(self.cluster.directory), "/cluster").replace(self.cluster.directory.name, "c1")
        text = text.replace(self.cluster.name, "c1")
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "login", text)

    def expect(
        self,
        jobid: str,
        standing: str,
        state: str,
        code: int,
        *,
        line: str = "",
        doubt: str = "",
        since: int = 1,
        open: str = "",
    ) -> None:
        """What has to be concluded now. `line`: whose last record is the outcome line ("": it is unverifiable)."""
        outcome = self._outcome(line, jobid) if line else f"{jobid}|UNVERIFIABLE|"
        self.case.expect.append(
            Expectation(jobid, self._moment, standing, state, code, outcome, doubt, since=since, open=open)
        )

    def _outcome(self, who: str, jobid: str) -> str:
        """The last line about the job in a book's last answer, found without the project's parsers."""
        said = [s for s in self.case.answers if (s.who, s.jobid) == (who, jobid) and s.stdout.strip()]
        text = said[-1].stdout
        if who == "sacct":
            return [row for row in text.splitlines() if jobid in row.split("|")[0:5:4]][-1]
        wanted = "UserId JobState Requeue ExitCode DerivedExitCode RunTime SubmitTime StartTime NodeList BatchHost"
        lines = [line[3:] for line in text.splitlines() if line.startswith("   ")]
        kept = [line for line in lines if line.split("=")[0] in wanted.split()]
        return text.split(" ")[0] + " " + " ".join(kept)
