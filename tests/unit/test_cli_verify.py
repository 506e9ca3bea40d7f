"""`allocctl verify` against a Slurm that answers as no cluster can be made to: late, stale, torn, at odds."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.main import main
from supervisor.core import events as ev
from supervisor.core.layout import Layout
from supervisor.core.plan import parse_plan
from supervisor.core.receipt import run_receipt
from supervisor.core.run import fold
from supervisor.core.state import Failure
from supervisor.core.submission import Submission
from supervisor.engine import receipts
from supervisor.runs.registry import register
from supervisor.runs.sealing import seal_job
from supervisor.scheduler.client import SlurmClient
from supervisor.scheduler.verify import verify_job

pytestmark = pytest.mark.slow  # real programs, one after the other

Document = dict[str, Any]
REFUSED = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
UNKNOWN = (1, "", "slurm_load_jobs error: Invalid job id specified")
NOTHING = (0, "", "")
Answer = str | tuple[int, str, str]

PLAN: Document = {
    "job": {"name": "bench", "nodes": 1},
    "coordinator": {"rank": 0},
    "roles": {"client": {"ranks": 0, "command": ["true"]}},
}


def row(
    state: str, code: str = "0:0", *, job: str = "7", display: str = "", submit: int = 1000, end: str = "1002"
) -> str:
    """A job's row as sacct is asked for it."""
    return f"{job}|{state}|{code}|0:0|{display or job}|{submit}|1001|{end}|user|cluster|node1\n"


def shown(
    state: str, code: str = "0:0", *, head: str = "JobId=7 ", name: str = "x", exits: str = "", submit: int = 1000
) -> str:
    """A job's record as scontrol prints it. `exits`: the line with the codes, as it is."""
    return (
        f"{head}JobName={name}\n   UserId=user(1000) GroupId=user(1000) MCS_label=N/A\n"
        f"   JobState={state} Reason=None Dependency=(null)\n"
        f"   {exits or f'Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}'}\n"
        f"   SubmitTime={submit} EligibleTime=1000\n   StartTime=1001 EndTime=1002 Deadline=N/A\n"
        "   NodeList=node1\n   BatchHost=node1\n\n"
    )


class Slurm:
    """Executables `sacct`, `scontrol` and `squeue` that give the answers they were told, the last one for ever."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def sacct(self, *answers: Answer) -> None:
        self._answer("sacct", answers)

    def scontrol(self, *answers: Answer) -> None:
        self._answer("scontrol", answers)

    def squeue(self, *answers: Answer) -> None:
        self._answer("squeue", answers)

    def asked(self, command: str) -> int:
        """How often."""
        counter = self.directory / f"{command}.asked"
        return len(counter.read_text()) if counter.exists() else 0

    def _answer(self, command: str, answers: tuple[Answer, ...]) -> None:
        """Nothing but what a shell has built in: nothing else is on PATH."""
        lines = [
            "#!/bin/sh",
            f"printf x >>{self.directory}/{command}.asked",
            f"read -r asked <{self.directory}/{command}.asked",
        ]
        for number, answer in enumerate(answers, 1):
            code, out, err = (0, answer, "") if isinstance(answer, str) else answer
            limit = f"[ ${{#asked}} -le {number} ]" if number < len(answers) else "true"
            said = f"printf %s {shlex.quote(out)}; printf %s {shlex.quote(err)} >&2; exit {code}"
            lines.append(f"if {limit}; then {said}; fi")
        path = self.directory / command
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o755)


@dataclass
class Bench:
    """A directory to work in, a fake Slurm, and what `allocctl verify` prints there."""

    directory: Path
    slurm: Slurm
    capsys: pytest.CaptureFixture[str]
    stderr: str = ""

    def run(self, *arguments: str) -> tuple[int, str]:
        code = main(["verify", *arguments])
        out, self.stderr = self.capsys.readouterr()
        return code, out

    def verify(self, *arguments: str) -> Document:
        """The document; its code is the exit code."""
        code, out = self.run("--json", "--patience", "0.5", *(arguments or ("7",)))
        document: Document = json.loads(out)
        assert code == document["verdict"]["code"], self.stderr
        return document

    def outcome(self, where: Path | None = None) -> str:
        return ((where or self.directory) / "slurm_job_7_outcome.txt").read_text()

    def make_run(
        self,
        run_id: str = "7",
        *,
        failures: tuple[Failure, ...] = (),
        receipt: bool = True,
        host: str = "gone.example",
        pid: int = 1,
        jobid: str = "7",
        cluster: str = "cluster",
        opened: str = "1970-01-01T00:16:41.000Z",  # when the job of `row` and `shown` began
    ) -> Path:
        """A run directory in `runs`: a journal that was opened, and (`receipt`) a run receipt: completed, or failed."""
        run_dir = self.directory / "runs" / run_id
        run_dir.mkdir(parents=True)
        launcher = "slurm" if jobid[0].isdecimal() else "local"
        opening = ev.RunOpened(
            *(run_id, jobid, str(run_dir), f"{run_dir}/.marker", ["node1"], launcher, host, pid, PLAN),
            {"allocd": "1"},
            cluster,
        )
        record = ev.Record(1, 1.0, opened, opening)
        line = {"seq": record.seq, "utc": record.utc, "at": record.at, **ev.encode(opening)}
        (run_dir / "journal.jsonl").write_text(json.dumps(line) + "\n")
        if receipt:
            layout = Layout(parse_plan(PLAN, "plan"), run_id, jobid, str(run_dir), ("node1",), "")
            document = run_receipt(fold([record]), [record], layout, versions={})
            facts = {"completed": not failures, "failures": [asdict(failure) for failure in failures]}
            receipts.write_run_receipt(run_dir, {**document, **facts})
        return run_dir


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    slurm = Slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(slurm.directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith(("SLURM_", "ALLOCD_", "GITHUB_"))]:
        monkeypatch.delenv(name)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Bench(work, slurm, capsys)


def failed(code: int, *, what: str = "exit", provisional: bool = False) -> Failure:
    return Failure(5, 2.0, 0, what, code, "native", f"rank 0 (client) on node1 ended with code {code}", provisional)


TERMED = failed(143, what="signal", provisional=True)


# --- whose record decides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exits",
    [
        "Requeue=1 Restarts=0 DerivedExitCode=0:0 ExitCode=7:0",
        "Requeue=1 Restarts=0 ExitCode=7:0 DerivedExitCode=0:0",
        "Requeue=1 Restarts=0 ExitCode=7:0\n   DerivedExitCode=0:0",
    ],
)
def test_fields_are_parsed_whole_in_either_order(bench: Bench, exits: str) -> None:
    bench.slurm.sacct(NOTHING)
    bench.slurm.scontrol(shown("FAILED", exits=exits))
    assert bench.verify()["verdict"]["code"] == 7
    assert bench.verify()["slurm"]["exit_code"] == "7:0"


@pytest.mark.parametrize(
    ("state", "code", "exit_code"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "5:0", 5),
        ("FAILED", "0:9", 137),
        ("FAILED", "0:0", 1),  # 128, folded away
        ("CANCELLED by 1000", "0:15", 130),
        ("TIMEOUT", "0:0", 124),
        ("DEADLINE", "0:0", 124),
        ("OUT_OF_MEMORY", "0:125", 1),
        ("NODE_FAIL", "0:0", 1),
    ],
)
def test_every_end_has_its_code(bench: Bench, state: str, code: str, exit_code: int) -> None:
    bench.slurm.sacct(row(state, code))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert document["verdict"]["code"] == exit_code
    assert document["verdict"]["outcome"] == ("failure" if exit_code else "success")
    assert bench.outcome() == row(state, code)


@pytest.mark.parametrize(
    ("sacct", "scontrol", "says"),
    [
        (row("RUNNING", end="Unknown"), UNKNOWN, "accounting still says RUNNING 0:0"),
        (REFUSED, REFUSED, "Slurm could not be asked"),
        (REFUSED, UNKNOWN, "the controller does not know the job (any more)"),
        (NOTHING, REFUSED, "Slurm could not be asked"),
        (NOTHING, UNKNOWN, "neither sacct nor scontrol knows the job"),
        (row("COMPLETED", "1:0"), UNKNOWN, "a record contradicts itself"),
        (row("COMPLETED"), shown("FAILED", "3:0"), "Slurm's two books differ"),
        (row("VANISHED"), UNKNOWN, "accounting still says VANISHED"),
        (row("REVOKED"), UNKNOWN, "another cluster"),
        (row("PREEMPTED"), REFUSED, "may be queued again"),
        (row("COMPLETED") + "7|COMPLETED\n", UNKNOWN, "Slurm could not be asked"),
        (row("COMPLETED"), shown("COMPLETED", head="JobId=7 ArrayJobId=7 ArrayTaskId=1 "), "several parts"),
        (
            row("COMPLETED"),
            shown("COMPLETED", head="JobId=7 ArrayJobId=7 ArrayTaskId=1 ")
            + shown("RUNNING", head="JobId=8 ArrayJobId=7 ArrayTaskId=0 "),
            "several parts",
        ),
        (NOTHING, shown("COMPLETED", name="x\n   JobState=FAILED Reason=None"), "Slurm could not be asked"),
    ],
    ids=[
        "a stale row", "nobody answers", "no accounting, forgotten", "no row, no controller", "unknown",
        "contradiction", "two books", "an unknown state", "revoked", "preempted", "a torn row",
        "an array", "a young array", "imitation",
    ],
)  # fmt: skip
def test_what_is_not_proven_is_claimed_by_nobody(bench: Bench, sacct: Answer, scontrol: Answer, says: str) -> None:
    bench.slurm.sacct(sacct)
    bench.slurm.scontrol(scontrol)
    run_dir = bench.make_run()
    document = bench.verify()
    verdict = document["verdict"]
    assert (verdict["code"], verdict["outcome"], verdict["origin"]) == (75, "unverifiable", "allocd")
    assert says in verdict["summary"], verdict["summary"]
    assert bench.outcome() == bench.outcome(run_dir) == "7|UNVERIFIABLE|\n"
    assert not (run_dir / "receipt.json").exists()


@pytest.mark.parametrize(
    ("sacct", "code", "note"),
    [
        (REFUSED, 0, "accounting could not be asked; the controller's record decides"),
        (NOTHING, 0, "accounting has no row of the job; the controller's record decides"),
        (row("RUNNING", end="Unknown"), 0, "accounting's row is stale"),
        (row("FAILED", "4:0", submit=900), 0, "of an earlier incarnation"),
    ],
)
def test_the_controller_decides_where_accounting_does_not(bench: Bench, sacct: Answer, code: int, note: str) -> None:
    bench.slurm.sacct(sacct)
    bench.slurm.scontrol(shown("COMPLETED"))
    document = bench.verify()
    assert (document["verdict"]["code"], document["slurm"]["source"]) == (code, "scontrol")
    assert note in " ".join(document["slurm"]["notes"])
    assert bench.outcome().startswith("JobId=7 ")
    assert bench.run("--patience", "0.5", "7")[1].count(note) == 1


def test_an_end_that_is_corrected_is_read_again(bench: Bench) -> None:
    bench.slurm.sacct(row("FAILED", end="Unknown"), row("FAILED", "9:0"), row("FAILED", "4:0"))
    bench.slurm.scontrol(UNKNOWN)
    code, _ = bench.run("7")
    assert (code, bench.outcome()) == (4, row("FAILED", "4:0"))


def test_a_folded_code_is_told_as_what_it_may_be(bench: Bench) -> None:
    bench.slurm.sacct(row("FAILED", "9:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert document["verdict"]["code"] == 9
    assert "9:0 may stand for 137" in " ".join(document["slurm"]["notes"])
    bench.make_run(failures=(failed(137),))
    assert bench.verify()["verdict"]["code"] == 137


def test_commands_that_are_not_there_are_not_waited_for(bench: Bench) -> None:
    begun = time.monotonic()
    code, out = bench.run("7")
    assert code == 75 and time.monotonic() - begun < 10
    assert "sacct cannot be started: No such file or directory" in out


# --- what the run saw, and what Slurm says -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "state", "code", "verdict", "because"),
    [
        ((), "COMPLETED", "0:0", ("success", 0, "native"), "says COMPLETED 0:0"),
        ((), "FAILED", "3:0", ("failure", 3, "slurm"), "which Slurm's record denies"),
        ((), "CANCELLED by 0", "0:0", ("failure", 130, "slurm"), "CANCELLED"),
        ((failed(7),), "FAILED", "7:0", ("failure", 7, "native"), "first failure: rank 0"),
        ((failed(7),), "COMPLETED", "0:0", ("failure", 7, "native"), "the job's own exit code is another"),
        ((failed(7),), "CANCELLED by 0", "0:0", ("failure", 7, "native"), "first failure: rank 0"),
        ((TERMED,), "CANCELLED by 0", "0:15", ("failure", 130, "slurm"), "explained"),
        ((TERMED,), "TIMEOUT", "0:0", ("failure", 124, "slurm"), "explained"),
        ((TERMED,), "FAILED", "15:0", ("failure", 143, "native"), "first failure"),
    ],
)  # fmt: skip
def test_the_run_and_slurm_must_agree(
    bench: Bench, failures: tuple[Failure, ...], state: str, code: str, verdict: tuple[str, int, str], because: str
) -> None:
    bench.slurm.sacct(row(state, code))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(failures=failures)
    document = bench.verify()
    found = document["verdict"]
    assert (found["outcome"], found["code"], found["origin"]) == verdict
    assert found["final"] is True and because in " ".join(found["because"])
    assert json.loads((run_dir / "receipt.json").read_text()) == document
    assert bench.run("--json", "--replay", str(run_dir / "receipt.json"))[0] == verdict[1]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"cluster": "far"}, "was on cluster far"),
        ({"opened": "2026-01-01T00:00:00.000Z"}, "after the job of the record had ended"),
    ],
)
def test_a_run_of_another_job_with_the_same_id_is_not_sealed(bench: Bench, other: dict[str, Any], why: str) -> None:
    run_dir = bench.make_run(**other)
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(shown("COMPLETED"))
    document = bench.verify()
    assert document["run"] is None
    assert why in document["disagreements"][0]
    assert not (run_dir / "receipt.json").exists()


def test_an_id_that_came_again_is_not_answered_by_the_old_jobs_receipt(bench: Bench) -> None:
    run_dir = bench.make_run()
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(shown("COMPLETED"))
    assert bench.verify()["run"] is not None
    bench.slurm.sacct(row("FAILED", "4:0").replace("|1001|1002|", "|9001001|9001002|"))
    bench.slurm.scontrol(UNKNOWN)
    assert bench.verify()["verdict"]["code"] == 4
    assert bench.verify(str(run_dir))["verdict"]["code"] == 0  # that very run is what it was


def test_a_run_without_a_receipt_is_never_a_success(bench: Bench) -> None:
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(receipt=False, host=socket.gethostname(), pid=2**22 - 1)
    document = bench.verify()
    assert document["verdict"]["outcome"] == "unverifiable"
    assert (
        "the engine was lost: it left no run receipt, and its journal ends at 1970-01-01T00:16:41.000Z"
        in document["verdict"]["summary"]
    )
    assert (document["run"]["engine_lost"], document["run_sha256"]) == (True, None)
    assert json.loads((run_dir / "receipt.json").read_text()) == document


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[str]]:
    """A process that passes for an engine on this host."""
    program = "import os; os.open(input(), os.O_RDONLY); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def hold(engine: subprocess.Popen[str], run_dir: Path) -> None:
    """Let the engine hold the run directory, by which it is known."""
    assert engine.stdin is not None and engine.stdout is not None
    engine.stdin.write(f"{run_dir}\n")
    engine.stdin.flush()
    assert engine.stdout.readline() == "\n"


def test_nothing_is_sealed_while_the_engine_lives(bench: Bench, engine: subprocess.Popen[str]) -> None:
    """A batch script that does not exec its engine can end before it."""
    bench.slurm.sacct(row("FAILED", "0:15"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(receipt=False, host=socket.gethostname(), pid=engine.pid)
    hold(engine, run_dir)
    document = bench.verify()
    assert (document["verdict"]["code"], document["verdict"]["final"]) == (75, False)
    assert "the engine of run 7 still lives" in document["verdict"]["summary"]
    assert not (run_dir / "receipt.json").exists()
    assert bench.outcome() == row("FAILED", "0:15")
    engine.kill()
    engine.wait()
    assert bench.verify()["run"]["engine_lost"] is True
    assert (run_dir / "receipt.json").exists()


def test_the_receipt_of_a_living_engine_is_waited_for(bench: Bench, engine: subprocess.Popen[str]) -> None:
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    saved = bench.make_run("7.s2").rename(bench.directory / "saved")
    run_dir = bench.make_run("7.s2", receipt=False, host=socket.gethostname(), pid=engine.pid)
    hold(engine, run_dir)
    argv = [sys.executable, "-m", "supervisor.cli.main", "verify", "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as verify:
        deadline = time.monotonic() + 20
        while bench.slurm.asked("sacct") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        own = {**json.loads((saved / "receipt.run.json").read_text()), "host": socket.gethostname()}
        receipts.write_run_receipt(run_dir, own)
        out, _ = verify.communicate(timeout=20)
    assert verify.returncode == 0, out
    assert out.startswith("7.s2: success 0 (native)")


# --- papers of other runs ------------------------------------------------------------------------------------------


def copy_of_a_success(bench: Bench, run_id: str = "3", **other: Any) -> Path:
    """A run that succeeded, sealed, as somebody keeps it elsewhere."""
    bench.slurm.sacct(row("COMPLETED", job=run_id))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(run_id, jobid=run_id, **other)
    assert bench.verify(run_id)["verdict"]["code"] == 0
    (bench.directory / "kept").mkdir()
    return run_dir.rename(bench.directory / "kept" / run_id)


@pytest.mark.parametrize("files", [("receipt.json",), ("receipt.json", "receipt.run.json")])
@pytest.mark.parametrize(
    ("run_id", "other"),
    [("3", {}), ("7", {"host": "old.example"})],
    ids=["of another job", "of an old job with the same id"],
)
def test_receipts_of_another_run_are_no_evidence(
    bench: Bench, files: tuple[str, ...], run_id: str, other: dict[str, Any]
) -> None:
    """A rank has copied an old run into its own run's directory, and fails."""
    old = copy_of_a_success(bench, run_id, **other)
    run_dir = bench.make_run(failures=(failed(7),))
    ours = (run_dir / "receipt.run.json").read_bytes()
    for name in files:
        (run_dir / name).write_bytes((old / name).read_bytes())
    bench.slurm.sacct(row("FAILED", "7:0"))
    document = bench.verify()
    assert (document["verdict"]["code"], document["run_id"]) == (7, "7")
    assert "is not of this run (7) and does not count" in " ".join(document["disagreements"])
    assert (run_dir / "receipt.json.not-ours").read_bytes() == (old / "receipt.json").read_bytes()
    assert json.loads((run_dir / "receipt.json").read_text())["verdict"] == document["verdict"]
    if len(files) == 1:
        assert (run_dir / "receipt.run.json").read_bytes() == ours
    else:  # the engine never wrote its own again: it was lost, and Slurm's code counts
        assert document["run"]["engine_lost"] is True
        assert (run_dir / "receipt.run.json.not-ours").exists()
    assert bench.verify()["verdict"] == document["verdict"]
    assert bench.verify(str(run_dir))["verdict"] == document["verdict"]


def test_github_is_told_of_no_receipt_of_another_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    old, run_dir = copy_of_a_success(bench), bench.make_run(failures=(failed(7),))
    (run_dir / "receipt.json").write_bytes((old / "receipt.json").read_bytes())
    bench.slurm.sacct(REFUSED)
    bench.slurm.scontrol(REFUSED)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_OUTPUT", str(bench.directory / "outputs"))
    assert bench.run("7", "--patience", "0.2")[0] == 75
    assert f"{run_dir}/receipt.run.json" in (bench.directory / "outputs").read_text()
    assert f"{run_dir}/receipt.json\n" not in (bench.directory / "outputs").read_text()


def test_where_every_paper_is_another_runs_nothing_is_claimed(bench: Bench) -> None:
    old = copy_of_a_success(bench)
    run_dir = bench.make_run(receipt=False)
    for path in old.iterdir():
        (run_dir / path.name).write_bytes(path.read_bytes())
    for state, code in (("FAILED", "7:0"), ("COMPLETED", "0:0")):
        bench.slurm.sacct(row(state, code))
        assert bench.run("7")[0] == 75
        assert f"{run_dir}/journal.jsonl is not of this run (7) and does not count: it is of run 3" in bench.stderr
    for verb in ("status", "explain", "receipt"):
        assert main([verb, "7"]) in (69, 75)
        assert "success" not in bench.capsys.readouterr().out


def test_a_journal_that_was_written_over_does_not_hide_the_engines_receipt(bench: Bench) -> None:
    old = copy_of_a_success(bench)
    run_dir = bench.make_run(failures=(failed(7),))
    (run_dir / "journal.jsonl").write_bytes((old / "journal.jsonl").read_bytes())
    bench.slurm.sacct(row("FAILED", "7:0"))
    document = bench.verify()
    assert (document["verdict"]["code"], document["verdict"]["origin"], document["run_id"]) == (7, "native", "7")
    assert "journal.jsonl is not of this run (7)" in document["disagreements"][-1]
    assert (run_dir / "receipt.json").exists()


def test_a_seal_that_slurm_denies_is_no_answer(bench: Bench) -> None:
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run()
    assert bench.verify()["verdict"]["code"] == 0
    bench.slurm.scontrol(shown("COMPLETING"))
    assert bench.verify(str(run_dir))["verdict"]["code"] == 0, "an epilog that still runs denies nothing"
    bench.slurm.sacct(NOTHING)
    bench.slurm.scontrol(shown("RUNNING"))
    assert bench.verify(str(run_dir))["verdict"]["code"] == 75
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify(str(run_dir))
    assert document["verdict"]["code"] == 7
    assert "it was sealed with COMPLETED 0:0, and Slurm's record says FAILED 7:0" in " ".join(document["disagreements"])
    assert json.loads((run_dir / "receipt.json.not-ours").read_text())["verdict"]["code"] == 0
    bench.slurm.sacct(REFUSED)
    bench.slurm.scontrol(REFUSED)
    assert bench.verify()["verdict"]["code"] == 7, "what is sealed stands when nobody can be asked"


def test_codes_that_accounting_folds_deny_no_seal(bench: Bench) -> None:
    bench.slurm.sacct(NOTHING)
    bench.slurm.scontrol(shown("FAILED", "137:0"))
    run_dir = bench.make_run(failures=(failed(137),))
    before = bench.verify()
    bench.slurm.sacct(row("FAILED", "9:0"))
    bench.slurm.scontrol(UNKNOWN)
    assert bench.verify() == before
    assert not (run_dir / "receipt.json.not-ours").exists()


def test_a_run_directory_that_is_gone_is_told_and_slurm_decides(bench: Bench, tmp_path: Path) -> None:
    run_dir = bench.make_run()
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    truth = asyncio.run(verify_job(SlurmClient(), "7", False, 5.0))
    run_dir.rename(bench.directory / "away")
    sealed = seal_job("7", [truth], 0.5, run_dirs=[str(run_dir)])
    assert (sealed.code, sealed.document["run"]) == (7, None)
    assert f"the run directory {run_dir} is gone" in sealed.document["disagreements"][0]


def test_a_copy_under_a_name_of_its_own_is_no_run_of_the_job(bench: Bench) -> None:
    old, run_dir = bench.make_run(), bench.directory / "runs/7.old"
    old.rename(run_dir)
    bench.make_run(failures=(failed(7),))
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert (document["kind"], document["verdict"]["code"]) == ("sealed", 7)
    assert not (run_dir / "receipt.json").exists()


def test_a_run_that_was_registered_and_is_gone_is_told(bench: Bench, tmp_path: Path) -> None:
    submitted(bench, "7")
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    register("7", "/nowhere/7")
    document = bench.verify()
    assert (document["verdict"]["code"], len(document["disagreements"])) == (7, 1)
    assert "the run directory /nowhere/7 is gone" in document["disagreements"][0]
    bench.make_run(failures=(failed(7),))
    assert bench.verify()["disagreements"] == []


def test_a_requeued_job_is_not_judged_by_the_run_of_an_earlier_attempt(bench: Bench) -> None:
    bench.slurm.sacct(row("NODE_FAIL", submit=900) + row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    earlier = bench.make_run(failures=(failed(7),))
    document = bench.verify()
    assert (document["verdict"]["code"], document["run"]) == (0, None)
    assert "are of earlier attempts and tell nothing about this end" in document["disagreements"][0]
    assert not (earlier / "receipt.json").exists()
    bench.make_run("7.r1", failures=(failed(8),))
    document = bench.verify()
    assert (document["verdict"]["code"], document["run_id"]) == (8, "7.r1")


def test_a_requeued_jobs_id_means_its_last_attempt(bench: Bench) -> None:
    first, last = bench.make_run(failures=(failed(7),)), bench.make_run("7.r1", failures=(failed(8),))
    os.utime(first / "journal.jsonl", (1000, 1000))

    def said(*words: str) -> str:
        assert main([*words]) == 0
        out, err = bench.capsys.readouterr()
        return str(out + err)

    assert said("receipt", "--path", "7") == f"{last}/receipt.run.json\n"
    assert said("receipt", "--path", "7.r0") == said("receipt", "--path", str(first)) == f"{first}/receipt.run.json\n"
    told = said("status", "7")
    assert told.startswith("7.r1 ") and "attempt 2 of job 7; an earlier one by its own id, as 7.r0" in told
    assert "`allocctl verify` seals it" in told
    assert json.loads(said("status", "--json", "7"))["last_attempt"] is None
    assert json.loads(said("status", "--json", "7.r0"))["last_attempt"] == "7.r1"
    for name in ("7.r0", str(first)):
        told = said("status", name)
        assert told.startswith("7 ") and "an earlier attempt of job 7: the last one is 7.r1" in told
        assert "seals it" not in told and "seals this" not in said("explain", name)
        assert "This is an earlier attempt of job 7, which went on: the last attempt is 7.r1." in said("explain", name)
    assert main(["logs", "7"]) == 69
    assert f"there are no such logs in {last}/logs" in bench.capsys.readouterr().err
    bench.slurm.sacct(row("NODE_FAIL", submit=900) + row("FAILED", "8:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify(str(first))
    assert (document["verdict"]["code"], document["run_id"]) == (8, "7.r1")
    assert "7 is an earlier attempt of its job, whose last attempt is 7.r1: that one is judged" in bench.stderr
    assert not (first / "receipt.json").exists()


def test_an_attempt_of_an_old_job_with_the_same_id_is_not_the_last_one(bench: Bench) -> None:
    old, run_dir = bench.make_run("7.r1"), bench.make_run()
    os.utime(old / "journal.jsonl", (1000, 1000))
    assert main(["receipt", "--path", "7"]) == 0
    assert bench.capsys.readouterr().out == f"{run_dir}/receipt.run.json\n"


def test_a_job_of_several_runs_is_as_good_as_the_worst(bench: Bench) -> None:
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    runs = [bench.make_run("7", failures=(failed(7),)), bench.make_run("7.s2", failures=(failed(9),))]
    document = bench.verify()
    assert (document["kind"], document["verdict"]["code"]) == ("job", 7)
    assert [item["verdict"]["code"] for item in document["receipts"]] == [7, 9]
    assert all((run_dir / "receipt.json").exists() for run_dir in runs)
    code, out = bench.run("7")
    assert code == 7
    assert [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")] == ["7", "7.s2"]
    assert bench.verify("7.s2")["verdict"]["code"] == 9


# --- whole arrays --------------------------------------------------------------------------------------------------


def tasks(*states: str) -> str:
    """Rows of the tasks of array 6, from number 1 on, raw ids from 7 on."""
    return "".join(
        row(*(word, code or "0:0"), job=str(6 + number), display=f"6_{number}")
        for number, (word, _, code) in enumerate((state.partition(" ") for state in states), 1)
    )


def test_a_whole_array_is_judged_task_by_task(bench: Bench) -> None:
    bench.slurm.sacct(
        tasks("COMPLETED", "FAILED 5:0", "TIMEOUT", "COMPLETED") + row("RUNNING", job="6", display="6_[5]")
    )
    bench.slurm.scontrol(UNKNOWN)
    bench.slurm.squeue(UNKNOWN)
    bench.make_run("6_1", jobid="6_1")
    failing = bench.make_run("6_2", jobid="6_2", failures=(failed(5),))
    document = bench.verify("6")
    assert (document["kind"], document["verdict"]["code"]) == ("job", 5)
    assert document["verdict"]["summary"].startswith("2 of 5 tasks succeeded; first failure 6_2: rank 0 (client)")
    assert document["counts"] == {"parts": 5, "success": 2, "failure": 2, "unverifiable": 1}
    assert [item["verdict"]["code"] for item in document["receipts"]] == [0, 5, 124, 0, 75]
    assert json.loads((failing / "receipt.json").read_text()) == document["receipts"][1]
    lines = (bench.directory / "slurm_job_6_outcome.txt").read_text().splitlines()
    assert [line.split("|")[:2] for line in lines] == [
        ["7", "COMPLETED"], ["8", "FAILED"], ["9", "TIMEOUT"], ["10", "COMPLETED"], ["6_5", "UNVERIFIABLE"],
    ]  # fmt: skip
    assert (bench.directory / "slurm_job_6_3_outcome.txt").read_text() == lines[2] + "\n"
    code, out = bench.run("6", "--patience", "0.5")
    assert code == 5
    shown = [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert shown == ["6_1", "6_2", "6_3", "6_4", "6_5", "6"]


def test_an_array_of_successes_is_one_unless_something_may_be_missing(bench: Bench) -> None:
    bench.slurm.sacct(tasks("COMPLETED", "COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    bench.slurm.squeue(UNKNOWN)
    assert bench.verify("6_[1-2]")["verdict"]["summary"] == "2 of 2 tasks succeeded"
    bench.slurm.sacct(tasks("COMPLETED", "COMPLETED") + row("COMPLETED", job="6", display="6_3"))
    assert bench.verify("6")["counts"]["success"] == 3
    bench.slurm.squeue(REFUSED)
    document = bench.verify("6")
    assert (document["verdict"]["code"], document["counts"]["success"]) == (75, 3)
    assert "the controller could not be asked which parts the job has" in document["verdict"]["summary"]


def submitted(bench: Bench, jobid: str, **more: Any) -> Path:
    """The record of a submission at the time of `row`, as `allocctl submit` registers it."""
    directory = bench.directory / f"submit-{jobid}"
    directory.mkdir()
    record = Submission(
        token="t", state="submitted", jobid=jobid, cluster=None, user="user", uid=1, name="x",
        asked="1970-01-01T00:16:39Z", answered="1970-01-01T00:16:40Z", argv=("sbatch",),
        base=str(bench.directory / "runs"), plan="plan.toml", script=f"{directory}/job.sh", output="slurm-%j.out",
        tasks=None, components=None,
    )  # fmt: skip
    (directory / "submission.json").write_text(json.dumps({**record.to_dict(), **more}))
    links = bench.directory.parent / "state" / "allocd" / "jobs"
    links.mkdir(parents=True, exist_ok=True)
    (links / jobid).symlink_to(directory)
    return directory


def told(bench: Bench, *words: str) -> tuple[int, str]:
    """What a verb prints, on stdout and stderr."""
    code = main([*words])
    out, err = bench.capsys.readouterr()
    return code, out + err


def test_a_job_without_a_run_is_told_from_its_submission(bench: Bench) -> None:
    directory = submitted(bench, "7")
    assert told(bench, "receipt", "7")[0] == 75
    for verb in ("status", "explain"):
        code, text = told(bench, verb, "7")
        assert code == 0 and text.startswith("7  x  submitted 1970-01-01T00:16:39Z by user")
        assert "no run is known here" in text and "`allocctl verify 7` tells the end" in text
    bench.slurm.sacct(row("CANCELLED by 1000", "0:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert document["verdict"]["code"] == 130
    kept = Path(json.loads((directory / "submission.json").read_text())["script"]).parent / "receipt-7.json"
    assert json.loads(kept.read_text()) == document
    bench.slurm.sacct(NOTHING)
    assert bench.verify() == document, "what is kept stands when Slurm has forgotten the job"
    assert bench.outcome() == row("CANCELLED by 1000", "0:0")
    assert told(bench, "receipt", "--path", "7") == (0, f"{kept}\n")
    assert "failure, exit code 130 (slurm)" in told(bench, "status", "7")[1]
    assert json.loads(told(bench, "status", "--json", "7")[1])["verdict"]["code"] == 130
    assert "testsuites" in told(bench, "receipt", "7", "--junit", "report.xml")[1] or Path("report.xml").exists()


def test_github_is_told_where_the_receipt_of_a_job_without_a_run_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(bench, "7")
    bench.slurm.sacct(row("FAILED", "5:0"))
    bench.slurm.scontrol(UNKNOWN)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_OUTPUT", str(bench.directory / "outputs"))
    assert bench.run("7")[0] == 5
    assert f"{bench.directory}/submit-7/receipt-7.json" in (bench.directory / "outputs").read_text()


def test_a_whole_array_is_told_task_by_task(bench: Bench) -> None:
    submitted(bench, "6", tasks=[1, 2])
    bench.slurm.sacct(tasks("COMPLETED", "CANCELLED 0:0"))
    bench.slurm.scontrol(UNKNOWN)
    bench.slurm.squeue(UNKNOWN)
    bench.make_run("6_1", jobid="6_1")
    assert "  6_2: no run is known here" in told(bench, "status", "6")[1]
    assert told(bench, "receipt", "6")[0] == 75
    assert bench.verify("6")["verdict"]["code"] == 130
    lines = told(bench, "status", "6")[1].splitlines()
    assert [line[:20] for line in lines[1:]] == ["  6_1: success, exit", "  6_2: failure, exit"]
    assert told(bench, "receipt", "--path", "6")[1].splitlines() == [
        f"{bench.directory}/runs/6_1/receipt.json",
        f"{bench.directory}/submit-6/receipt-6_2.json",
    ]


def test_tasks_that_left_no_trace_are_known_from_the_submission(bench: Bench) -> None:
    submitted(bench, "6", tasks=[1, 2, 3])
    bench.slurm.sacct(tasks("COMPLETED") + row("COMPLETED", job="6", display="6_3"))
    bench.slurm.scontrol(UNKNOWN)
    bench.slurm.squeue(UNKNOWN)
    document = bench.verify("6")
    assert (document["verdict"]["code"], document["counts"]["success"]) == (75, 2)
    assert document["receipts"][1]["slurm"]["standing"] == "absent"
    assert document["receipts"][1]["verdict"]["summary"] == (
        "task 6_2 is in neither of Slurm's books: cancelled before it began, or never made; Slurm keeps no record"
    )
    assert document["receipts"][0]["known"]["user"] == "user"


def test_a_record_from_before_the_submission_is_not_believed(bench: Bench) -> None:
    """The id has come again, and accounting does not know the new job yet."""
    submitted(bench, "7", asked="2026-01-01T00:00:00+00:00", answered="2026-01-01T00:00:01+00:00")
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert (document["verdict"]["code"], document["slurm"]["code"]) == (75, 0)
    assert "submitted before this one was asked for" in document["verdict"]["summary"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"user": "ann"}, "it was of user ann, the record is of user"),
        ({"asked": "1969-01-01T00:00:00+00:00", "answered": "1969-01-01T00:00:01+00:00"}, "submitted long after it"),
    ],
)
def test_a_submission_of_another_job_with_the_same_id_is_history(bench: Bench, more: Document, why: str) -> None:
    submitted(bench, "7", **more)
    bench.slurm.sacct(row("FAILED", "4:0"))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert document["verdict"]["code"] == 4
    assert (
        "the submission 't' is of another job" in document["disagreements"][0] and why in document["disagreements"][0]
    )


def test_a_job_that_was_started_anew_is_not_answered_by_what_was_sealed_before(bench: Bench) -> None:
    bench.make_run(failures=(failed(7),))
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(shown("FAILED", "7:0"))
    assert bench.verify()["verdict"]["code"] == 7
    bench.slurm.sacct(row("FAILED", "7:0") + row("COMPLETED", submit=2000))
    bench.slurm.scontrol(UNKNOWN)
    document = bench.verify()
    assert (document["verdict"]["code"], document["run"]) == (0, None)
    assert "earlier attempts" in document["disagreements"][0]


# --- saved text ----------------------------------------------------------------------------------------------------


def test_saved_text_is_judged_without_asking_anybody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct, scontrol = bench.directory / "sacct.txt", bench.directory / "scontrol.txt"
    sacct.write_text(row("FAILED", "4:0"))
    scontrol.write_text(shown("FAILED", "4:0"))
    for arguments in (
        ("--from-files", "sacct.txt", "scontrol.txt", "7"),
        ("7", "--from-files", "scontrol.txt", "sacct.txt"),
        ("--from-files", "sacct.txt", "7"),  # it had ended half a century before
    ):
        document = bench.verify(*arguments)
        assert (document["verdict"]["code"], document["verdict"]["origin"]) == (4, "slurm")
        assert len(document["evidence"]) == len(arguments) - 2
    os.utime(sacct, (1010, 1010))
    assert bench.verify("--from-files", "sacct.txt", "7")["verdict"]["code"] == 75
    assert not list(bench.directory.glob("slurm_job_*"))
    assert bench.verify("--outcome", "--from-files", "sacct.txt", "scontrol.txt", "7")["verdict"]["code"] == 4
    assert bench.outcome() == row("FAILED", "4:0")
    code, out = bench.run("--from-files", "sacct.txt", "scontrol.txt", "7")
    assert code == 4 and "scontrol.txt (scontrol): FAILED 4:0" in out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(scontrol.read_bytes())))
    assert bench.verify("--from-files", "sacct.txt", "-", "7")["verdict"]["code"] == 4
    assert bench.slurm.asked("sacct") == bench.slurm.asked("scontrol") == 0


def test_a_saved_array_is_judged_task_by_task(bench: Bench) -> None:
    (bench.directory / "sacct.txt").write_text(tasks("COMPLETED", "FAILED 5:0"))
    document = bench.verify("--outcome", "--from-files", "sacct.txt", "6")
    assert (document["verdict"]["code"], document["counts"]["parts"]) == (5, 2)
    assert len((bench.directory / "slurm_job_6_outcome.txt").read_text().splitlines()) == 2
    assert bench.verify("--from-files", "sacct.txt", "6_1")["verdict"]["code"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("a.txt", "b.txt"), "'b.txt' is no Slurm job id"),
        (("a.txt",), "name the files, and the job's id behind them"),
        (("nowhere.txt", "7"), "nowhere.txt: No such file"),
        (("b.txt", "7"), "b.txt is neither"),
        (("a.txt", "./a.txt", "7"), "one file given twice"),
    ],
)
def test_files_that_cannot_be_judged_are_a_configuration_error(
    bench: Bench, arguments: tuple[str, ...], says: str
) -> None:
    (bench.directory / "a.txt").write_text(row("COMPLETED"))
    (bench.directory / "b.txt").write_text("nothing\n")
    assert bench.run("--from-files", *arguments) == (78, "")
    assert says in bench.stderr


# --- what is written, and what is not ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_run", [True, False])
def test_a_record_that_decided_is_not_overwritten_by_a_doubt(bench: Bench, with_run: bool) -> None:
    bench.slurm.sacct(row("FAILED", "7:0"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(receipt=False) if with_run else None
    before = bench.verify()
    bench.slurm.sacct(REFUSED)
    bench.slurm.scontrol(REFUSED)
    assert bench.verify()["verdict"]["code"] == (before["verdict"]["code"] if with_run else 75)
    assert bench.outcome() == row("FAILED", "7:0")
    bench.slurm.sacct(row("FAILED", "8:0"))
    bench.slurm.scontrol(UNKNOWN)
    assert bench.verify()["verdict"]["code"] == 8
    assert bench.outcome() == bench.outcome(run_dir) == row("FAILED", "8:0")


@pytest.mark.parametrize(
    ("sacct", "scontrol", "known", "written"),
    [
        (NOTHING, UNKNOWN, False, False),
        (NOTHING, UNKNOWN, True, True),
        (NOTHING, shown("PENDING"), True, False),
        (row("RUNNING"), shown("RUNNING"), True, False),
        (REFUSED, REFUSED, False, True),
    ],
    ids=["nobody's id", "ours, and gone", "pending", "running", "nobody can be asked"],
)
def test_only_what_is_over_has_an_outcome(
    bench: Bench, sacct: Answer, scontrol: Answer, known: bool, written: bool
) -> None:
    bench.slurm.sacct(sacct)
    bench.slurm.scontrol(scontrol)
    if known:
        submitted(bench, "7")
    assert bench.verify()["verdict"]["code"] == 75
    assert (bench.directory / "slurm_job_7_outcome.txt").exists() == written


def test_tasks_that_go_on_have_no_line_yet(bench: Bench) -> None:
    bench.slurm.sacct(tasks("COMPLETED", "RUNNING"))
    bench.slurm.scontrol(shown("RUNNING", head="JobId=8 ArrayJobId=6 ArrayTaskId=2 "))
    bench.verify("6_[1-2]")
    assert (bench.directory / "slurm_job_6_outcome.txt").read_text() == tasks("COMPLETED")


def test_an_outcome_of_an_old_job_with_the_same_id_is_overwritten_by_a_doubt(bench: Bench) -> None:
    submitted(bench, "7")
    path = bench.directory / "slurm_job_7_outcome.txt"
    path.write_text(row("COMPLETED"))
    bench.slurm.sacct(REFUSED)
    bench.slurm.scontrol(REFUSED)
    bench.verify()
    assert bench.outcome() == row("COMPLETED")
    os.utime(path, (100, 100))
    bench.verify()
    assert bench.outcome() == "7|UNVERIFIABLE|\n"


def test_a_doubt_about_a_task_leaves_the_arrays_other_lines(bench: Bench) -> None:
    bench.slurm.sacct(tasks("COMPLETED", "FAILED 5:0"))
    bench.slurm.scontrol(UNKNOWN)
    bench.verify("6_[1-2]")
    path = bench.directory / "slurm_job_6_outcome.txt"
    before = path.read_text()
    bench.slurm.sacct(tasks("COMPLETED") + row("TIMEOUT", job="9", display="6_3"))
    assert bench.verify("6_[1-3]")["counts"]["unverifiable"] == 1
    assert path.read_text() == before + row("TIMEOUT", job="9", display="6_3")


def test_what_is_sealed_needs_no_saving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    bench.make_run()
    assert bench.verify()["verdict"]["code"] == 0

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(receipts, "replace", read_only)
    assert bench.run("7")[0] == 0
    assert bench.stderr == ""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(bench.directory / "nowhere"))
    for verb in ("verify", "wait"):
        assert main([verb, "7"]) == 0
        assert "the outcome file could not be written" in bench.capsys.readouterr().err


# --- what cannot be saved, and what cannot be read -----------------------------------------------------------------


@pytest.mark.parametrize(("state", "code", "expected"), [("COMPLETED", "0:0", 125), ("FAILED", "5:0", 5)])
def test_a_success_that_cannot_be_told_is_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str, code: str, expected: int
) -> None:
    bench.slurm.sacct(row(state, code))
    bench.slurm.scontrol(UNKNOWN)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(bench.directory / "nowhere"))
    assert bench.run("7")[0] == expected
    assert f"the outcome file could not be written in {bench.directory}/nowhere: No such file" in bench.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "is not a receipt: it is nested too deeply"),
        ("{", "is not a receipt: Expecting property name"),
        ("[]", "is not a receipt: no JSON object"),
        ("{}", "is not a receipt: it lacks 'kind'"),
        (
            '{"kind": "run", "verdict": {}, "launcher": "slurm"}',
            "the run's evidence cannot be read: it lacks 'failures'",
        ),
    ],
)
def test_what_is_no_receipt_is_said(bench: Bench, text: str, said: str) -> None:
    path = bench.directory / "receipt.json"
    path.write_text(text)
    code, out = bench.run("--json", "--replay", str(path))
    assert (code, json.loads(out)["exit"]) == (78, 78)
    assert said in bench.stderr and str(path) in bench.stderr and "Traceback" not in bench.stderr


def test_github_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.slurm.sacct(row("FAILED", "5:0"))
    bench.slurm.scontrol(UNKNOWN)
    outputs = bench.directory / "outputs"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_OUTPUT", str(outputs))
    code, out = bench.run("7")
    assert code == 5
    assert "::error title=allocd%3A 7%3A failure%2C exit code 5::" in out
    assert {"verdict", "exit_code"} <= {line.partition("<<")[0] for line in outputs.read_text().splitlines()}
    monkeypatch.setenv("GITHUB_OUTPUT", str(bench.directory / "nowhere" / "outputs"))
    assert bench.run("7")[0] == 5
    assert "step outputs could not be written" in bench.stderr


def test_a_success_whose_proof_cannot_be_saved_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run()
    monkeypatch.setattr(receipts, "seal", full)
    code, out = bench.run("7")
    assert (code, out.splitlines()[0].split(":")[1]) == (125, " success 0 (native)")
    assert f"the receipt could not be sealed in {run_dir}: No space left on device" in bench.stderr


@pytest.mark.parametrize("name", ["receipt.json", "receipt.run.json", "journal.jsonl"])
def test_a_damaged_file_proves_nothing(bench: Bench, name: str) -> None:
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run(receipt=name == "receipt.run.json")
    (run_dir / name).write_bytes(b'{"kind": \0')
    code, out = bench.run("7", "--patience", "0.2")
    assert (code, out) == (75, "")
    assert str(run_dir / name) in bench.stderr


def test_a_local_run_is_answered_without_slurm(bench: Bench) -> None:
    bench.make_run("local-1", failures=(failed(7),), jobid="local-1")
    receipt = bench.directory / "runs/local-1/receipt.run.json"
    document = json.loads(receipt.read_text())
    document["verdict"]["code"] = 7
    receipt.write_text(json.dumps(document))
    assert bench.run("local-1")[0] == 7
    assert bench.slurm.asked("sacct") == 0


# --- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 69, "which job?"),
        (("7.s9",), 69, "no run '7.s9'"),
        (("0",), 69, "'0' is no job's id"),
        (("--run", "nowhere/7"), 69, "nowhere/7"),
        (("--replay", "nowhere.json"), 78, "nowhere.json"),
    ],
)
def test_what_is_not_known_is_said(bench: Bench, arguments: tuple[str, ...], code: int, says: str) -> None:
    assert bench.run(*arguments) == (code, "")
    assert says in bench.stderr


@pytest.mark.parametrize("option", ["--timeout=nan", "--timeout=-1", "--patience=inf", "--patience=x", "--nonsense"])
def test_wrong_words_are_a_configuration_error(bench: Bench, option: str) -> None:
    assert bench.run("7", option)[0] == 78
    assert option.partition("=")[0] in bench.stderr


def test_a_step_or_the_allocations_variable_names_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.slurm.sacct(row("FAILED", "5:0"))
    bench.slurm.scontrol(UNKNOWN)
    assert bench.verify("7.0")["jobid"] == "7"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert bench.run()[0] == 5


def test_an_array_task_is_found_by_its_own_number(bench: Bench) -> None:
    bench.slurm.sacct(row("FAILED", "5:0", job="7", display="6_1"))
    bench.slurm.scontrol(UNKNOWN)
    run_dir = bench.make_run("6_1", jobid="6_1", failures=(failed(5),))
    document = bench.verify()
    assert (document["jobid"], document["run_id"], document["verdict"]["code"]) == ("6_1", "6_1", 5)
    assert (run_dir / "receipt.json").exists()


def test_what_is_waited_for_is_said_once_unless_one_is_quiet(bench: Bench) -> None:
    bench.slurm.sacct(REFUSED)
    bench.slurm.scontrol(REFUSED)
    assert bench.run("7", "--patience", "0.5")[0] == 75
    assert bench.stderr.splitlines() == [
        f"allocctl: {command} ended with 1: {REFUSED[2]}: asking again, for up to 0.5 s"
        for command in ("sacct", "scontrol")
    ]
    assert bench.run("7", "--patience", "0.5", "-q")[0] == 75
    assert bench.stderr == ""


def test_a_cluster_is_named_by_an_option_or_in_the_id(bench: Bench) -> None:
    bench.slurm.sacct(row("FAILED", "5:0"))
    bench.slurm.scontrol(UNKNOWN)
    for arguments in (("7;east",), ("7", "-M", "east"), ("7", "--cluster=east")):
        document = bench.verify(*arguments)
        assert (document["jobid"], document["verdict"]["code"]) == ("7", 5)
        assert all("--clusters=east" in answer["argv"] for answer in document["slurm"]["answers"])


def test_what_is_sealed_on_one_cluster_is_no_answer_for_another(bench: Bench) -> None:
    bench.make_run()
    bench.slurm.sacct(row("COMPLETED"))
    bench.slurm.scontrol(UNKNOWN)
    assert bench.verify("7;cluster")["run_id"] == "7"
    bench.slurm.sacct(NOTHING)
    bench.slurm.scontrol(REFUSED)
    assert bench.verify("7")["verdict"]["code"] == bench.verify("7;cluster")["verdict"]["code"] == 0
    assert bench.verify("7;west")["verdict"]["code"] == 75


def test_an_interrupted_wait_says_that_the_job_goes_on(bench: Bench) -> None:
    bench.slurm.sacct(NOTHING)
    bench.slurm.scontrol(shown("RUNNING"))
    argv = [sys.executable, "-m", "supervisor.cli.main", "verify", "--wait", "7"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as verify:
        deadline = time.monotonic() + 20
        while bench.slurm.asked("scontrol") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        verify.send_signal(signal.SIGINT)
        _, said = verify.communicate(timeout=20)
    assert (verify.returncode, "the job goes on" in said, "Traceback" in said) == (79, True, False), said
    assert not (bench.directory / "slurm_job_7_outcome.txt").exists()
