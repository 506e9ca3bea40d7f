"""`allocctl submit` against small scripts in the place of sbatch, squeue and sacct: every way to be unsure.

The stand-ins note that they were called. What sbatch does is a piece of shell (`$SCRIPT` is the batch script); a job is
made by `job ID`, which puts it into the queue that the stand-in for squeue prints.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from supervisor import __version__
from supervisor.cli.main import main
from supervisor.core.settling import Patience
from supervisor.core.submission import Submission
from supervisor.scheduler import submit as submitting
from supervisor.scheduler.directories import write_record
from supervisor.scheduler.record import read_record
from supervisor.scheduler.submit import Sbatch, Submitter
from tests.said import Said

PLAN = """
[job]
name = "bench"
nodes = 2
[coordinator]
rank = 0
[roles.all]
ranks = "0-1"
command = ["x"]
env = { TOKEN = "secret" }
[slurm]
"""
QUICK = Patience(pause=0.01, absence=0.03, looks=3, limit=30)
NONE = replace(QUICK, limit=0.1)
"""For a controller that is away. Whoever looks for absence needs time, however slow the machine."""
LONG = "exec sleep 60"
DIES = "kill -KILL $$"


@dataclass
class Site:
    """A login node: `top` holds the stand-ins' files, the plan and the base directory."""

    top: Path
    said: Callable[..., Said]
    patience: Patience = QUICK

    @property
    def base(self) -> Path:
        return self.top / "a base"

    def write(self, name: str, text: str) -> Path:
        path = self.top / name
        path.write_text(text)
        return path

    def sbatch(self, body: str) -> None:
        """What sbatch does from now on."""
        self.write("sbatch.body", body)

    def squeue(self, body: str) -> None:
        """What squeue does before it prints the queue."""
        self.write("squeue.body", body)

    def submit(self, *words: str, slurm: str = "") -> Said:
        plan = self.write("plan.toml", PLAN + slurm)
        return self.said("submit", "--dir", str(self.base), str(plan), *words)

    @property
    def directories(self) -> list[Path]:
        return sorted(self.base.glob("submit-*"), key=lambda path: path.stat().st_mtime_ns)

    def record(self, number: int = -1) -> Submission:
        return read_record(str(self.directories[number]))

    @property
    def calls(self) -> int:
        """How often sbatch was called."""
        path = self.top / "calls"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def links(self) -> dict[str, str]:
        jobs = self.top / "state" / "allocd" / "jobs"
        return {path.name: os.readlink(path) for path in jobs.iterdir()} if jobs.exists() else {}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Site:
    top = tmp_path
    bodies = {
        "sbatch": f'echo x >>"{top}/calls"; printf "%s\\n" "$@" >"{top}/args"; env >"{top}/env"\n'
        f'for SCRIPT; do :; done\njob() {{ echo "$1|$SCRIPT" >>"{top}/queue"; }}\n. "{top}/sbatch.body"',
        "squeue": f'. "{top}/squeue.body"; cat "{top}/queue" 2>/dev/null; exit 0',
        "allocctl": f'echo "allocctl {__version__}"',
        "scontrol": f'cat "{top}/shown" 2>/dev/null || exit 1',
        "sacct": f'cat "{top}/book" 2>/dev/null || {{ echo "sacct: error: no database" >&2; exit 1; }}',
    }
    (top / "bin").mkdir()
    for name, body in bodies.items():
        (top / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (top / "bin" / name).chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "ALLOC", "VIRTUAL_ENV"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{top}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(top / "state"))
    monkeypatch.setenv("ALLOCCTL", f"{top}/bin/allocctl")
    monkeypatch.chdir(top)

    def said(*words: str) -> Said:
        capfd.readouterr()
        code = main(list(words))
        found = capfd.readouterr()
        assert "Traceback" not in found.err
        return Said(code, found.out, found.err)

    made = Site(top, said)

    def submitter(*arguments: Any, **options: Any) -> Submitter:
        return Submitter(*arguments, patience=made.patience, **options)

    monkeypatch.setattr(submitting, "Submitter", submitter)
    made.sbatch("job 12; echo 12")
    made.squeue(":")
    return made


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch gets little time."""
    monkeypatch.setattr(submitting, "Sbatch", functools.partial(Sbatch, deadline=0.5))


@pytest.fixture
def impatient(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch gets hardly any time after an interrupt."""
    monkeypatch.setattr(submitting, "Submitter", functools.partial(submitting.Submitter, last_chance=0.05))


# --- as it should be ---


def test_a_plan_becomes_a_job(site: Site) -> None:
    done = site.submit("--", "--comment=a b", "-H")
    (directory,) = site.directories
    assert (done.code, done.out) == (0, "12\n")
    assert done.err == f"allocctl: job 12 submitted; its output: {directory}/slurm-12.out\n"
    script = f"{directory}/job.sh"
    assert (site.top / "args").read_text().splitlines() == ["--parsable", "--comment=a b", "-H", script]
    record = site.record()
    assert (record.state, record.jobid, record.cluster, record.uid) == ("submitted", "12", None, os.getuid())
    assert record.argv == ("sbatch", "--parsable", "--comment=a b", "-H", script)
    assert (record.script, record.base, record.name) == (script, str(site.base), "bench")
    assert record.answered is not None and record.asked <= record.answered
    assert (directory / "plan.toml").read_text() == (site.top / "plan.toml").read_text()
    assert stat.S_IMODE((directory / "plan.toml").stat().st_mode) == 0o600
    assert "secret" not in (directory / "submission.json").read_text() + (directory / "job.sh").read_text()
    assert site.links == {"12": str(directory)}


def test_quiet_and_json(site: Site) -> None:
    assert site.submit("-q") == Said(0, "12\n", "")
    document = site.submit("--json").document
    assert (document["id"], document["exit"], document["earlier"], document["several"]) == ("12", 0, False, [])
    assert Submission.from_dict(document["submission"]) == site.record()
    assert len(site.directories) == 2  # a plan may be submitted as often as one likes


def test_a_cluster_is_asked_for_and_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.sbatch("echo '12;east'")
    done = site.submit("-M", "east")
    assert (done.code, done.out) == (0, "12;east\n")
    assert "--clusters=east" in (site.top / "args").read_text().splitlines()
    assert (site.record().jobid, site.record().cluster) == ("12", "east")
    site.submit(slurm='cluster = "west"')
    assert "--clusters=west" in (site.top / "args").read_text()
    monkeypatch.setenv("SLURM_CLUSTERS", "north")
    site.submit(slurm='cluster = "west"')
    assert "--clusters=north" in (site.top / "args").read_text()
    monkeypatch.setenv("SBATCH_CLUSTERS", "a,b")
    done = site.submit()
    assert done.code == 78 and "no single cluster: name one with --cluster" in done.err


def test_the_login_nodes_environment_does_not_leak(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.top / "venv" / "bin").mkdir(parents=True)
    monkeypatch.setenv("VIRTUAL_ENV", str(site.top / "venv"))
    monkeypatch.setenv("PATH", f"{site.top}/venv/bin:{os.environ['PATH']}")
    for name, value in {"SBATCH_WAIT": "1", "SLURM_JOB_ID": "3", "SBATCH_QOS": "q", "ALLOCD_RUN_DIR": "/x"}.items():
        monkeypatch.setenv(name, value)
    assert site.submit().code == 0
    seen = dict(line.partition("=")[::2] for line in (site.top / "env").read_text().splitlines())
    assert not seen.keys() & {"VIRTUAL_ENV", "SBATCH_WAIT", "SLURM_JOB_ID", "ALLOCD_RUN_DIR"}
    assert seen["SBATCH_QOS"] == "q" and "venv" not in seen["PATH"]
    assert "LC_ALL" not in seen or seen["LC_ALL"] == os.environ.get("LC_ALL")


def test_a_dry_run_does_nothing(site: Site) -> None:
    done = site.submit("--dry-run", "--", "--comment=a b", slurm='partition = "p"')
    first, _, *rest = done.out.splitlines()
    assert first.startswith(f"sbatch --parsable '--comment=a b' '{site.base}/submit-") and first.endswith("/job.sh'")
    assert rest[1:3] == ["#!/bin/bash", "# Made by `allocctl submit`. What runs is the plan's copy beside this script."]
    assert "#SBATCH --partition=p" in rest
    document = site.submit("--dry-run", "--json").document
    assert document["script"].startswith("#!/bin/bash\n") and document["argv"][:2] == ["sbatch", "--parsable"]
    assert site.calls == 0 and not site.base.exists()


# --- what cannot be submitted ---


def test_a_refusal_is_sbatchs_own(site: Site) -> None:
    site.sbatch('echo "sbatch: error: invalid partition specified: nope" >&2; exit 1')
    done = site.submit()
    assert (done.code, done.out) == (78, "")
    assert done.err == "allocctl: sbatch refused: invalid partition specified: nope\n"
    assert (site.record().state, site.record().jobid, site.links) == ("refused", None, {})
    assert site.submit("--json").document["submission"]["state"] == "refused"


def test_a_controller_that_was_not_reached(site: Site) -> None:
    site.sbatch('echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2; exit 1')
    done = site.submit()
    assert done.code == 69
    assert "the controller was not reached, nothing was submitted: Unable to contact" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "--wrap=x"], "sbatch's --wrap cannot be given"),
        (["--", "--nodes=1"], "--nodes=1 is too few for a plan of 2 nodes"),
        (["--", "other.sh"], "'other.sh' is no option"),
        (["--dir", "/a\\b"], "backslash"),
        (["--dir", "/a\nb"], "no printable text"),
        (["--dir", "/dev/null/x"], "nothing was submitted: /dev/null"),
        (["--allocctl", "allocctl"], "the nodes need an absolute path"),
        (["--no-such-flag"], "unrecognized arguments"),
    ],
)
def test_nothing_is_submitted_when_something_is_wrong(site: Site, words: list[str], said: str) -> None:
    done = site.submit(*words)
    assert done.code == 78 and said in done.err
    assert site.calls == 0


@pytest.mark.parametrize("name", ["job.sh", "plan.toml", "submission.json"])
def test_a_full_disk_is_named_and_nothing_is_left(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    done = site.submit()
    assert (done.code, done.out, site.calls) == (78, "", 0)
    assert re.search(rf"nothing was submitted: {site.base}/submit-\w+/{name}.*: No space left on device", done.err)
    assert site.directories == []


def test_a_wrong_plan_and_no_sbatch(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    done = site.submit(slurm="time = 0")
    assert done.code == 78 and "slurm.time: found 0; expected a time limit" in done.err
    monkeypatch.setenv("PATH", "/nowhere")
    done = site.submit()
    assert done.code == 78 and "there is no sbatch on PATH" in done.err
    assert site.submit("--json").document["exit"] == 78


# --- which allocctl ---


def program(site: Site, text: str, name: str = "allocctl") -> str:
    path = site.write(name, text)
    path.chmod(0o755)
    return str(path)


def test_the_nodes_allocctl(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f'#!/bin/sh\necho "allocctl {__version__}"\n'
    named = [program(site, ours, name) for name in ("flag", "variable", "planned")]

    def used(*words: str, slurm: str = "") -> str:
        lines = site.submit("--dry-run", *words, slurm=slurm).out.splitlines()
        return next(line for line in lines if line.startswith("allocctl="))

    monkeypatch.delenv("ALLOCCTL")
    assert used() == f"allocctl={Path(sys.executable).with_name('allocctl')}"
    planned = f'allocctl = "{named[2]}"'
    assert used(slurm=planned) == f"allocctl={named[2]}"
    monkeypatch.setenv("ALLOCCTL", named[1])
    assert used(slurm=planned) == f"allocctl={named[1]}"
    assert used("--allocctl", named[0], slurm=planned) == f"allocctl={named[0]}"
    absent = site.submit("--allocctl", "/nodes/only/allocctl")
    assert absent.code == 0 and "/nodes/only/allocctl is not there on this machine" in absent.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('#!/bin/sh\necho "allocctl 0.0.9"\n', f"says 'allocctl 0.0.9', and this is allocctl {__version__}"),
        ("#!/nowhere/python\n", "does not run: the interpreter that its first line names is not there"),
        ("#!/bin/sh\necho broken >&2; exit 3\n", "says 'broken'"),
        ("", "does not run: Exec format error"),
    ],
)
def test_an_allocctl_that_does_not_fit(site: Site, text: str, said: str) -> None:
    done = site.submit("--allocctl", program(site, text))
    assert done.code == 78 and said in done.err
    assert site.calls == 0


# --- doubts ---


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"job 12; {LONG}", "sbatch did not answer within 0.5 s"),
        (f"job 12; {DIES}", "sbatch ended with -9"),
        ("job 12; echo hello", "sbatch --parsable must print an id, found 'hello"),
        ('job 12; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1', "Socket timed out"),
    ],
)
def test_a_job_that_was_made_all_the_same_is_found(site: Site, body: str, why: str) -> None:
    site.sbatch(body)
    done = site.submit()
    assert (done.code, done.out, site.calls) == (0, "12\n", 1)
    assert why in done.err and "found by its script: job 12" in done.err
    assert (site.record().state, site.record().jobid) == ("submitted", "12")
    assert list(site.links) == ["12"]


@pytest.mark.parametrize(
    ("shown", "out", "words"),
    [
        ("/another/job.sh", "13", "sbatch has told job 1, which runs another script; found by its script: job 13"),
        ("(null)", "1", ""),
        ("$SCRIPT", "1", ""),
        ("", "1", ""),
    ],
)
def test_an_id_is_believed_unless_the_controller_shows_another_script(
    site: Site, shown: str, out: str, words: str
) -> None:
    show = f'printf "JobId=1 JobName=x\\n   Command=%s\\n" "{shown}" >"{site.top}/shown"; ' if shown else ""
    site.sbatch(f"job 13; {show}echo 1")
    done = site.submit()
    assert (done.code, done.out, site.record().words) == (0, f"{out}\n", words)
    assert list(site.links) == [out]


def test_without_a_job_of_our_script_the_id_stays_what_sbatch_told(site: Site) -> None:
    site.sbatch(f'printf "JobId=1 JobName=x\\n   Command=/another\\n" >"{site.top}/shown"; echo 1')
    assert site.submit().out == "1\n"


def test_an_end_without_sbatchs_own_words_is_a_doubt(site: Site) -> None:
    site.sbatch("job 13; exit 1")
    done = site.submit()
    assert (done.code, done.out) == (0, "13\n")
    site.sbatch("rm -f queue; echo 'our wrapper: its log is full' >&2; exit 1")
    done = site.submit()
    assert (done.code, site.record().state) == (1, "absent")
    assert "our wrapper: its log is full; there is no such job" in done.err


def test_sbatch_runs_where_one_is_and_what_asks_slurm_does_not(site: Site) -> None:
    site.squeue(f'pwd >"{site.top}/asked-in"')
    site.sbatch(f'pwd >"{site.top}/submitted-in"; job 12; exit 1')
    assert site.submit().code == 0
    assert [(site.top / name).read_text().strip() for name in ("submitted-in", "asked-in")] == [str(site.top), "/"]


def test_a_job_that_was_not_made(site: Site) -> None:
    site.sbatch(DIES)
    done = site.submit()
    assert (done.code, done.out) == (1, "")
    assert "nothing was submitted: sbatch ended with -9; there is no such job: it is safe" in done.err
    (directory,) = site.directories
    assert site.record().state == "absent"
    assert not (directory / "plan.toml").exists()  # a job that comes later runs nothing
    site.sbatch("echo 13")
    assert site.submit().out == "13\n"


def test_nobody_can_be_asked(site: Site) -> None:
    site.sbatch(f"job 12; {DIES}")
    site.squeue('echo "slurm_load_jobs error: no controller" >&2; exit 1')
    site.patience = NONE
    done = site.submit()
    assert (done.code, done.out, site.record().state) == (75, "", "unknown")
    assert "it may have been submitted: sbatch ended with -9" in done.err
    assert "squeue ended with 1: slurm_load_jobs error: no controller" in done.err
    again = site.submit("--json")
    assert (again.code, site.calls) == (75, 1)
    assert again.document["id"] is None and "it may have been submitted" in again.document["error"]
    other = site.submit(slurm='account = "x"')  # another plan is another matter
    assert (other.code, site.calls) == (75, 2)

    site.squeue(":")
    found = site.submit()
    assert (found.code, found.out, site.calls) == (0, "12\n", 2)
    assert "job 12 was submitted earlier (" in found.err and "nothing was submitted now" in found.err
    site.sbatch("echo 13")
    assert (site.submit().out, site.calls) == ("13\n", 3)


def test_an_earlier_doubt_is_settled_before_anything_is_submitted(site: Site) -> None:
    site.sbatch(DIES)
    site.squeue("exit 1")
    site.patience = NONE
    assert site.submit().code == 75
    site.patience = QUICK
    site.squeue(":")
    site.sbatch("echo 13")
    done = site.submit()
    assert (done.code, done.out, site.calls) == (0, "13\n", 2)
    assert [site.record(i).state for i in range(2)] == ["absent", "submitted"]


def test_the_other_places_where_a_job_is_seen(site: Site) -> None:
    site.squeue("exit 1")
    site.sbatch(f'echo "12|sbatch --parsable $SCRIPT" >"{site.top}/book"; {DIES}')
    assert site.submit().out == "12\n"
    site.sbatch(f'touch "${{SCRIPT%/*}}/slurm-14_3.out"; {DIES}')
    assert site.submit().out == "14\n"


def test_two_jobs_with_one_script_are_an_error(site: Site) -> None:
    site.sbatch(f"job 13; job 12; {DIES}")
    done = site.submit()
    assert (done.code, done.out) == (75, "")
    assert "jobs 12 and 13 all run" in done.err and "submitted more than once" in done.err
    assert site.submit("--json").document["several"] == ["12", "13"]


def test_a_job_that_comes_while_it_is_given_up(site: Site) -> None:
    site.sbatch(f'echo "$SCRIPT" >"{site.top}/script"; {DIES}')
    late = f'd=$(cat "{site.top}/script"); [ -e "${{d%/*}}/plan.toml" ] || echo "12|$d"'
    site.squeue(late)
    done = site.submit()
    assert (done.code, done.out) == (0, "12\n")
    assert (site.directories[0] / "plan.toml").exists()


def asked(site: Site) -> Path:
    """A submission whose owner said that it asks, and was killed."""
    site.sbatch("echo 12")
    assert site.submit().code == 0
    (directory,) = site.directories
    record = site.record().to_dict() | {"state": "asked", "jobid": None, "answered": None}
    write_record(str(directory), Submission.from_dict(record))
    return directory


def test_an_owner_that_was_killed(site: Site) -> None:
    directory = asked(site)
    site.write("queue", f"12|{directory}/job.sh\n")
    done = site.submit()
    assert (done.code, done.out, site.calls) == (0, "12\n", 1)
    assert "whoever submitted it is gone; found by its script: job 12" in done.err


def test_an_owner_that_was_killed_while_it_gave_up(site: Site) -> None:
    directory = asked(site)
    (directory / "plan.toml").rename(directory / "plan.given-up.toml")
    site.write("queue", f"12|{directory}/job.sh\n")
    assert (site.submit().out, site.calls) == ("12\n", 1)
    assert [path.name for path in directory.glob("plan*")] == ["plan.toml"], "its job runs the plan"


def test_an_owner_that_was_killed_while_it_gave_up_what_never_was(site: Site) -> None:
    directory = asked(site)
    (directory / "plan.toml").rename(directory / "plan.given-up.toml")
    assert (site.submit().out, site.calls) == ("12\n", 2)
    assert [path.name for path in directory.glob("plan*")] == ["plan.given-up.toml"]
    assert "absent" in {site.record(i).state for i in range(2)}


def test_an_owner_whose_clock_was_an_hour_ahead(site: Site) -> None:
    directory = asked(site)
    ahead = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    write_record(str(directory), replace(site.record(), asked=ahead))
    text = f'#!/bin/sh\nprintf "%s\\n" "$@" >"{site.top}/asked"\necho "12|sbatch {directory}/job.sh"\n'
    program(site, text, "bin/sacct")
    assert site.submit().out == "12\n"
    assert "--starttime=now-60minutes" in (site.top / "asked").read_text().split()


def test_an_owner_that_is_at_work(site: Site) -> None:
    """The same plan is being submitted by somebody else at the same time: two jobs are wanted."""
    directory = asked(site)
    holds = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(directory / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        site.sbatch("echo 13")
        done = site.submit()
        owner.communicate(b"\n")
    assert (done.out, site.calls, site.record(0).state) == ("13\n", 2, "asked")


def test_other_peoples_records_and_no_records(site: Site) -> None:
    directory = asked(site)
    data = site.record().to_dict() | {"uid": os.getuid() + 1}
    write_record(str(directory), Submission.from_dict(data))
    (site.base / "submit-x").mkdir()
    (site.base / "submit-y").mkdir()
    (site.base / "submit-y" / "submission.json").write_text("{")
    site.sbatch("echo 13")
    assert site.submit().out == "13\n"


# --- interrupts ---


def test_an_interrupt_gives_sbatch_a_moment(site: Site) -> None:
    site.sbatch("kill -INT $PPID; job 12; echo 12")
    done = site.submit()
    assert (done.code, done.out) == (79, "12\n")
    assert "interrupted, and the job goes on" in done.err
    assert site.record().state == "submitted"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("job", "code", "state"), [("job 12", 79, "submitted"), (":", 130, "absent")])
def test_an_interrupted_doubt_is_settled(site: Site, job: str, code: int, state: str) -> None:
    site.sbatch(f"{job}; kill -INT $PPID; {LONG}")
    done = site.submit()
    assert (done.code, site.record().state) == (code, state)
    assert "sbatch was interrupted" in done.err


@pytest.mark.usefixtures("impatient")
def test_a_second_interrupt_ends_the_asking(site: Site) -> None:
    site.sbatch(f"kill -INT $PPID; {LONG}")
    site.squeue("kill -INT $PPID")
    done = site.submit()
    assert (done.code, site.record().state) == (75, "unknown")
    assert "sbatch was interrupted; it could not be found out" in done.err


def test_an_interrupt_before_anything_was_asked_for(site: Site) -> None:
    asked(site)
    site.squeue(f'[ -e "{site.top}/once" ] || {{ touch "{site.top}/once"; kill -INT $PPID; }}')
    done = site.submit()
    assert (done.code, site.calls, done.out) == (130, 1, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("wait", "code"), [((), 0), (("--wait",), 79)])
def test_an_interrupt_between_submitting_and_waiting_hides_no_job(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int, wait: tuple[str, ...], code: int
) -> None:
    def register(_jobid: str, _directory: str) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("supervisor.runs.registry.register_job", register)
    done = site.submit(*wait)
    assert (done.code, done.out) == (code, "12\n")
    assert ("the wait was left; job 12 goes on" in done.err) == bool(wait)


def test_a_record_that_cannot_be_written_hides_no_job(site: Site) -> None:
    site.sbatch('chmod 500 "${SCRIPT%/*}"; rm -rf "${SCRIPT%/*}"; echo 12')
    done = site.submit()
    assert (done.code, done.out) == (0, "12\n")
    assert "submission.json: No such file or directory" in done.err


def test_a_directory_that_is_gone_hides_no_job(site: Site) -> None:
    site.sbatch(f'job 12; rm -rf "${{SCRIPT%/*}}"; {DIES}')
    done = site.submit()
    assert (done.code, done.out) == (0, "12\n")
    site.sbatch(f'rm -rf "${{SCRIPT%/*}}"; {DIES}')
    done = site.submit()  # nothing keeps a job that comes later from running: nobody may say that there is none
    assert (done.code, done.out) == (75, "")
    assert "it may have been submitted: sbatch ended with -9" in done.err
