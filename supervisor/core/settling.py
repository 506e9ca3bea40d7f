"""Was it submitted? What sbatch's answer says, and how a doubt is settled before anybody submits again.

sbatch that is killed at its deadline, or says "Socket timed out", may have made a job: a controller that was busy takes
the request from its queue later, whoever has gone away meanwhile (measured: stopped for three seconds, sbatch killed,
and the job was there when it went on). So an answer is one of three:

* **submitted**: sbatch ended with 0 and printed an id, and nothing else;
* **refused**: it ended otherwise, and by its own words (`sbatch: error: ...`) the controller has answered, or was never
  reached;
* **doubtful**: anything else.

The id that sbatch prints is believed where the controller shows our script with it, or cannot be asked. Where it shows
another one (a wrapper around sbatch may print anything) the job is looked for as after a doubt.

A doubt is settled by the one thing that no other job has, the path of the batch script, which is in a directory made
for this submission alone. Three places know it:

* squeue shows each job's command (`%o`);
* accounting keeps the command line of each sbatch (`SubmitLine`), also of jobs that the controller has forgotten;
* a job that began wrote its output beside the script: `slurm-JOBID.out`.

Found in any of them is found. Not found means little at first: a snapshot can be older than the request. So absence is
believed only after several valid answers of the controller over some time (`Patience`), and even then the copy of the
plan is taken away before anybody is told: a job that comes all the same finds no plan, says so and ends. Accounting may
be off or late, so its silence neither proves nor hinders. When nobody could be asked it is unknown, until somebody asks
again.

Commands are free text of the jobs' owner. Both queries ask for one's own jobs only, and a line counts only when the
whole path stands where a command's last word stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.core.slurm import Unreadable, parse_submitted
from supervisor.core.slurm_records import NO_END
from supervisor.core.text import printable

# --- sbatch's answer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What sbatch's end says. `reached` is False when the controller certainly never got the request."""

    kind: Literal["submitted", "refused", "doubtful"]
    words: str
    jobid: str | None = None
    cluster: str | None = None
    reached: bool = True


_NOT_REACHED: Final = re.compile(r"connect failure|Could not establish a configuration source|fetch_config", re.I)
_DOUBTFUL: Final = re.compile(
    r"timed? ?out|send failure|receive failure|transmitted|send/recv|communicat|unexpected m|connection (?:re|ab|cl)",
    re.I,
)
"""What sbatch says of a conversation that broke off after it may have sent its request."""
_REFUSED: Final = re.compile(r"^sbatch\S*: (?:error|fatal): |^Try \"sbatch --help\"", re.M)
"""How sbatch begins its own words of refusal, and how it ends them where an option is wrong. Anybody's else (of a
wrapper, or of something that killed it) may come after the request."""


def read_reply(returncode: int | None, stdout: str, stderr: str, trouble: str = "") -> Reply:
    """Judge sbatch's end; `trouble` says why it did not end by itself."""
    said = _words(stderr) or _words(stdout)
    if trouble:
        return Reply("doubtful", f"{trouble}{f' ({said})' if said else ''}")
    if returncode == 0:
        try:
            jobid, cluster = parse_submitted(stdout)
        except Unreadable as error:
            return Reply("doubtful", str(error))
        return Reply("submitted", said if stderr.strip() else "", jobid, cluster)
    ended = said or f"sbatch ended with {returncode}"
    killed = returncode is None or returncode < 0 or returncode > 128
    printed_id = re.search(r"^\d+(?:;|$)", stdout, re.M)
    if killed or printed_id or not _REFUSED.search(stderr) or _DOUBTFUL.search(stderr):
        return Reply("doubtful", ended)
    return Reply("refused", ended, reached=not _NOT_REACHED.search(stderr))


def _words(text: str) -> str:
    """What was printed, on one line."""
    lines = [printable(line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)[:2000]


# --- where a job is looked for ----------------------------------------------------------------------------------------


def squeue_commands_argv(cluster: str | None) -> list[str]:
    """One's own jobs with their commands, ended ones too while the controller remembers them."""
    where = [f"--clusters={cluster}"] if cluster else []
    return ["squeue", *where, "--me", "--noheader", "--states=all", "--format=%i|%o"]


def sacct_commands_argv(uid: int, minutes: int, cluster: str | None) -> list[str]:
    """One's own jobs of the last `minutes`, with the command line of each sbatch."""
    where = [f"--clusters={cluster}"] if cluster else []
    how = ["--noheader", "--parsable2", "--allocations", "--duplicates", f"--user={uid}"]
    return ["sacct", *where, *how, f"--starttime=now-{minutes}minutes", NO_END, "--format=JobID,SubmitLine"]


def shows_another(text: str, script: str) -> bool:
    """Whether the job in scontrol's answer runs a batch script, and not this one."""
    shown = [path for path in re.findall(r"^   Command=(.*)$", text, re.M) if path != "(null)"]
    return bool(shown) and script not in shown


def ids_in_queue(text: str, script: str) -> set[str]:
    """Ids of the jobs whose command is the script: an array's or a heterogeneous job's once, by its own id."""
    return _ids(text, lambda command: command.rstrip() == script)


def ids_in_accounting(text: str, script: str) -> set[str]:
    """Ids of the jobs whose command line ends with the script."""
    return _ids(text, lambda line: line.endswith(f" {script}"))


def ids_by_output(names: Iterable[str]) -> set[str]:
    """Ids of the jobs that wrote into a submission's directory."""
    found = (re.fullmatch(r"slurm-([1-9]\d*)(?:_\d+)?\.out", name) for name in names)
    return {match[1] for match in found if match}


def _ids(text: str, is_ours: Callable[[str], bool]) -> set[str]:
    found: set[str] = set()
    for line in text.split("\n"):
        shown, mark, command = line.partition("|")
        leader = re.match(r"([1-9]\d*)(?:[_+]\S+)?$", shown.strip())
        if mark and leader and is_ours(command):
            found.add(leader[1])
    return found


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: the pause between two looks, the time and the number of looks until absence is believed, and the limit
    after which nobody is asked any more."""

    pause: float = 0.5
    absence: float = 10.0
    looks: int = 3
    limit: float = 30.0


Finding = Literal["found", "several", "absent", "open"]


class Search:
    """The looks for one submission's job, in their order. `finding` is what they say so far."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._since: float | None = None  # the first of an unbroken row of valid answers without the job
        self._last = 0.0
        self._looks = 0
        self.ids: set[str] = set()
        self.trouble = ""

    def hear(self, now: float, ids: set[str], trouble: str) -> None:
        """One look: the ids found, and why the controller could not be asked ("" if it could)."""
        self.ids |= ids
        self.trouble = trouble
        if trouble:
            self._since, self._looks = None, 0
            return
        self._since = now if self._since is None else self._since
        self._looks += 1
        self._last = now

    @property
    def finding(self) -> Finding:
        """What the looks say: a job, several of them, none, or nothing yet."""
        if self.ids:
            return "found" if len(self.ids) == 1 else "several"
        if self._since is None or self._looks < self._patience.looks:
            return "open"
        return "absent" if self._last - self._since >= self._patience.absence else "open"
