"""A corpus of what Slurm printed, and what was true of the job: the form in which a case is kept, read and written.

A case is a directory with

* `case.toml`: what the case is, how it was made (`real`: on a cluster, by record.py; `text`: written after Slurm's
  manual pages, where the test cluster cannot make it), the questions in the order in which they were asked, and what
  has to be concluded from them;
* one text file for each answer, exactly as printed: `3.sacct.txt` is what sacct said at the third moment. These are
  fit to be edited, and to be given to `allocctl verify --from-files`.

An expectation (`[[expect]]`) names a job, the moments whose answers are known (`since` .. `upto`, both included), and
the truth: `standing`, `state` (as Slurm words it; "" where no record is left), `code` (of allocctl), `outcome` (the
whole line for the outcome file) and `doubt` (a part of the sentence; "" where the end is proven). It is what a person
says who knows what was done to the job; what the code concludes is never copied into it. An expectation with `open`,
a sentence, is one that is not met yet.

`queue` of a moment's squeue answer is the state word of each job that squeue shows, by its display id.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.core.answers import Answer
from supervisor.core.slurm import Source

HERE: Final = Path(__file__).parent
SOURCES: Final[tuple[Source, ...]] = ("sacct", "scontrol")


@dataclass(frozen=True)
class Said:
    """One answer: `who` is sacct, scontrol or squeue, `jobid` what was asked for (squeue: several, with commas)."""

    moment: int
    who: str
    jobid: str
    at: str
    argv: tuple[str, ...]
    returncode: int | None
    stdout: str
    stderr: str = ""
    trouble: str = ""
    queue: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """In the form of `Answer.to_dict`, for sacct and scontrol; what is concluded from the text is not in it."""
        return {
            "source": self.who,
            "jobid": self.jobid,
            "argv": list(self.argv),
            "at": self.at,
            "returncode": self.returncode,
            "stdout": self.stdout,
            "stderr": self.stderr,
            "trouble": self.trouble,
        }


@dataclass(frozen=True)
class Expectation:
    """What has to be concluded about one job from the answers of some moments."""

    jobid: str
    upto: int
    standing: str
    state: str
    code: int
    outcome: str
    doubt: str = ""
    since: int = 1
    open: str = ""


@dataclass
class Case:
    """One directory; see the top. `slurm` is the version that printed it, "" for a text."""

    name: str
    what: str
    made: str
    slurm: str = ""
    answers: list[Said] = field(default_factory=list)
    expect: list[Expectation] = field(default_factory=list)

    def known(self, expected: Expectation) -> list[Answer]:
        """The answers that an expectation is about, read again from what was printed."""
        moments = range(expected.since, expected.upto + 1)
        mine = [said for said in self.answers if said.jobid == expected.jobid and said.moment in moments]
        return [Answer.from_dict(said.to_dict()) for said in mine if said.who in SOURCES]

    def queues(self) -> list[Said]:
        """What squeue said."""
        return [said for said in self.answers if said.who == "squeue"]


def read_all(top: Path = HERE) -> list[Case]:
    """Every case, by name."""
    return [read(path.parent) for path in sorted(top.glob("*/case.toml"))]


def read(directory: Path) -> Case:
    """One case; a malformed one raises what tomllib or the missing key raises."""
    data = tomllib.loads((directory / "case.toml").read_text())
    answers = []
    for entry in data["answers"]:
        name = entry.pop("file")
        moment, who, *_ = name.split(".")
        # Bytes and not read_text: an answer's line ends are a part of it.
        stdout = (directory / name).read_bytes().decode()
        code = entry.pop("returncode", None)  # TOML has no word for none: a command that did not end by itself
        argv = tuple(entry.pop("argv"))
        answers.append(Said(moment=int(moment), who=who, returncode=code, argv=argv, stdout=stdout, **entry))
    expect = [Expectation(**entry) for entry in data["expect"]]
    return Case(directory.name, data["what"], data["made"], data.get("slurm", ""), answers, expect)


def write(case: Case, top: Path = HERE) -> None:
    """Write a case in place of the one with its name."""
    directory = top / case.name
    directory.mkdir(exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    lines = [f"what = {_toml(case.what)}", f"made = {_toml(case.made)}"]
    if case.slurm:
        lines.append(f"slurm = {_toml(case.slurm)}")
    for said in case.answers:
        name = file_name(said)
        (directory / name).write_bytes(said.stdout.encode())
        lines += ["", "[[answers]]", f"file = {_toml(name)}"]
        for key in ("jobid", "at", "argv", "returncode", "stderr", "trouble", "queue"):
            value = getattr(said, key)
            if value or value == 0:
                lines.append(f"{key} = {_toml(value)}")
    for expected in case.expect:
        lines += ["", "[[expect]]", f"jobid = {_toml(expected.jobid)}"]
        if expected.since > 1:
            lines.append(f"since = {expected.since}")
        for key in ("upto", "standing", "state", "code", "outcome", "doubt", "open"):
            value = getattr(expected, key)
            if key not in ("doubt", "open") or value:
                lines.append(f"{key} = {_toml(value)}")
    (directory / "case.toml").write_text("\n".join(lines) + "\n")


def file_name(said: Said) -> str:
    """`3.sacct.txt`; where a moment asks for several jobs, `3.sacct.12_4.txt`."""
    job = "" if said.who == "squeue" else f".{said.jobid}"
    return f"{said.moment}.{said.who}{job}.txt"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)  # strings, integers and their lists are written alike in TOML
