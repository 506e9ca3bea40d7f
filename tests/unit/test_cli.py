"""What people and programs type: every verb on runs that ended, on one that is under way, and what a verb imports.

Two runs are made once: one that succeeds with a contract, one whose coordinator ends with 7. The verbs are called in
the test's own process; a living run is a real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from supervisor.cli import explain
from supervisor.cli.main import main
from tests.faults.local import SERVE, Local, Run, await_files, role, sh, until
from tests.said import Said

RUN_VERBS = ("status", "explain", "logs", "receipt", "verify")


Call = Callable[..., Said]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """`allocctl` in this process, outside of any job, in an empty directory."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "ALLOCD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def said(*words: str | Path) -> Said:
        capfd.readouterr()
        code = main([str(word) for word in words])
        found = capfd.readouterr()
        assert "Traceback" not in found.err
        return Said(code, found.out, found.err)

    return said


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """The two runs, by their outcome."""
    with Local(tmp_path_factory.mktemp("ended")) as local:
        result = 'echo "a line"; cd "$ALLOCD_RUN_DIR"; echo \'{"ok": true}\' >new; mv new result.json'
        success = local.plan(
            {"worker": role(0, SERVE), "client": role(1, sh(f"{await_files('up', 0)}; {result}"))},
            coordinator=1,
            artifacts=[{"name": "result", "path": "result.json", "format": "json"}],
        )
        failure = local.plan(
            {"worker": role("0,1", SERVE), "client": role(2, sh(f"{await_files('up', 0, 1)}; echo why >&2; exit 7"))},
            coordinator=2,
        )
        runs = {"success": local.start(success), "failure": local.start(failure)}
        for run in runs.values():
            run.wait()
        yield runs.__getitem__


# --- runs that ended -----------------------------------------------------------------------------------------------


def test_status(call: Call, ended: Callable[[str], Run]) -> None:
    said = call("status", ended("failure").directory)
    first, state, *ranks = said.out.splitlines()
    assert said.code == 0
    assert first.endswith(str(ended("failure").directory))
    assert state.startswith("failure, exit code 7 (native): rank 2 (client)")
    assert [line.split()[1] for line in ranks] == ["0", "1", "2"]
    assert "artifact result: complete" in call("status", ended("success").directory).out


def test_status_for_programs(call: Call, ended: Callable[[str], Run]) -> None:
    document = call("status", "--json", ended("failure").directory).document
    assert (document["phase"], document["over"], document["engine"]) == ("ended", True, None)
    assert (document["verdict"]["code"], document["verdict"]["origin"]) == (7, "native")
    assert document["first_failure"]["rank"] == 2
    assert [rank["end"]["code"] for rank in document["ranks"]] == [0, 0, 7]
    document = call("status", "--json", ended("success").directory).document
    assert document["artifacts"] == [{"contract": "result", "state": "complete"}]
    assert document["verdict"]["outcome"] == "success"


def test_the_journal_tells_which_file_the_plan_is_from(ended: Callable[[str], Run]) -> None:
    directory = ended("success").directory
    with (directory / "journal.jsonl").open() as journal:
        plan = Path(json.loads(journal.readline())["plan_file"])
    assert plan.is_absolute() and plan.parent != directory
    assert plan.read_bytes() == (directory / "plan.toml").read_bytes()


def test_explain_says_each_thing_once(call: Call, ended: Callable[[str], Run]) -> None:
    said = call("explain", ended("failure").directory)
    assert said.code == 0
    *story, end = said.out.splitlines()
    assert story[0].endswith("failed: exit code 7, a rank's own.")
    assert story[1].startswith("  rank 2 (client)")
    text = ended("failure").receipt()["first_failure"]["text"]
    assert said.out.count(text) == 1
    sentences = [line.strip().rstrip(".") for line in story]
    assert len(sentences) == len(set(sentences))
    assert "  why" in story  # the end of its stderr
    assert "  ranks 0-1 (worker): ended with code 0" in story
    assert said.out.count("<- the first failure") == 1
    assert end == f"Everything is in {ended('failure').directory}"
    assert len(story) < 30


def test_explain_of_a_success_is_short(call: Call, ended: Callable[[str], Run]) -> None:
    said = call("explain", ended("success").directory)
    assert "succeeded: exit code 0" in said.out
    assert "result: complete" in said.out
    assert "first failure" not in said.out
    assert "Ended because" not in said.out
    everything = call("explain", "--all", ended("success").directory)
    assert len(everything.out.splitlines()) >= len(said.out.splitlines())
    assert "`--all`" not in everything.out


def test_explain_keeps_words_of_several_lines_together(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "find_run", lambda name: name)
    monkeypatch.setattr(explain, "run_document", lambda path: ({}, True))
    monkeypatch.setattr(explain, "story", lambda *_: iter(["Timeline:", "  srun: one\nerror: two\x07"]))
    assert call("explain", "7").out == "Timeline:\n  srun: one\n    error: two\\x07\n"


@pytest.mark.parametrize("verb", ["wait", "status", "logs"])
@pytest.mark.parametrize("word", ["0", "-1"])
def test_what_is_no_jobs_id(call: Call, verb: str, word: str) -> None:
    done = call(verb, word)
    assert done.code == 69 and f"{word!r} is no job's id: those are whole numbers from 1 on" in done.err


def test_explain_for_programs(call: Call, ended: Callable[[str], Run]) -> None:
    document = call("explain", "--json", ended("failure").directory).document
    assert [item["rank"] for item in document["consequences"]] == [0, 1]
    assert document["timeline"][0]["after"] == 0.0


def test_receipt(call: Call, ended: Callable[[str], Run]) -> None:
    """Printed byte for byte, in any case JSON."""
    run = ended("success")
    path = run.directory / "receipt.run.json"
    for words in (["receipt"], ["receipt", "--json"]):
        assert call(*words, run.directory).out == path.read_text()
    assert call("receipt", "--path", run.directory).out == f"{path}\n"


def test_a_sealed_receipt_comes_first(call: Call, ended: Callable[[str], Run], tmp_path: Path) -> None:
    run = ended("success").receipt()
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "receipt.run.json").write_text(json.dumps(run))
    denied = {**run["verdict"], "outcome": "failure", "code": 1, "origin": "slurm", "summary": "Slurm says FAILED"}
    digest = hashlib.sha256((tmp_path / "receipt.run.json").read_bytes()).hexdigest()
    sealed = {"run_id": run["run_id"], "run_sha256": digest, "run": run, "verdict": denied, "slurm": None}
    (tmp_path / "receipt.json").write_text(json.dumps(sealed))
    assert call("receipt", "--path", ".").out == f"{tmp_path}/receipt.json\n"
    assert "failure, exit code 1 (slurm): Slurm says FAILED" in call("status", ".").out
    assert "failed: exit code 1, by Slurm's record" in call("explain", ".").out


@pytest.mark.parametrize("verb", ["status", "explain", "receipt", "logs", "verify"])
def test_who_asks_for_json_gets_a_document_also_when_refused(call: Call, verb: str) -> None:
    said = call(verb, "--json", "no-such-run")
    assert said.code == 69
    document = json.loads(said.out)
    assert (document["schema_version"], document["exit"]) == (1, 69)
    assert document["error"] in said.err


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\\xff"])
@pytest.mark.parametrize("verb", ["status", "explain"])
def test_a_receipt_that_is_no_receipt(call: Call, tmp_path: Path, verb: str, content: str) -> None:
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "receipt.run.json").write_text(content)
    said = call(verb, ".")
    assert said.code == 69
    assert "receipt.run.json" in said.err


@pytest.mark.parametrize(
    "content", ["", "{}\n", "garbage\n", '{"seq": 1}\nmore\n', '{"seq":1,"utc":"","at":0,"event":"Noted","text":"x"}\n']
)
@pytest.mark.parametrize("verb", ["status", "explain", "verify"])
def test_a_journal_that_tells_nothing(call: Call, tmp_path: Path, verb: str, content: str) -> None:
    (tmp_path / "journal.jsonl").write_text(content)
    said = call(verb, ".")
    assert said.code in (69, 75)
    assert "journal.jsonl" in said.err


def test_verify_of_a_local_run_is_its_own_word(call: Call, ended: Callable[[str], Run]) -> None:
    assert call("verify", ended("success").directory).code == 0
    said = call("verify", "--json", ended("failure").directory)
    assert said.code == 7
    assert said.document["verdict"]["final"] is True


# --- which run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_a_run_is_found_by_its_id_and_in_its_environment(
    call: Call, ended: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """By its registry's link, in $ALLOCD_RUNS, and as the run of this rank."""
    run = ended("success")
    words = call(verb, run.directory).out
    assert words
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(run.base.parent / "state"))
        assert call(verb, run.directory.name).out == words
    with monkeypatch.context() as patch:
        patch.setenv("ALLOCD_RUNS", str(run.base))
        assert call(verb, run.directory.name).out == words
    if verb != "verify":
        monkeypatch.setenv("ALLOCD_RUN_DIR", str(run.directory))
        assert call(verb).out == words


def test_the_default_is_this_attempt_of_this_job(
    call: Call, ended: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/12").symlink_to(ended("failure").directory)
    (tmp_path / "runs/12.r1").symlink_to(ended("success").directory)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert "failure" in call("status").out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "success" in call("status").out


def test_a_run_directory_that_moved(call: Call, ended: Callable[[str], Run], tmp_path: Path) -> None:
    """A dangling link in the registry is no run, and is not the end of the search."""
    registry = tmp_path / "state/allocd/runs"
    registry.mkdir(parents=True)
    (registry / "local-1").symlink_to(tmp_path / "gone")
    assert call("status", "local-1").code == 69
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/local-1").symlink_to(ended("success").directory)
    assert call("status", "local-1").code == 0


# --- a run that is under way ---------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    with Local(tmp_path) as mine:
        yield mine


def test_a_run_that_is_under_way(call: Call, local: Local) -> None:
    run = local.start(local.plan({"worker": role("0,1", SERVE), "client": role(2, SERVE)}, coordinator=2))
    run.wait_file("up.0", "up.1", "up.2")
    until(lambda: len(run.events("RankStarted")) == 3, f"the news of three ranks{run}")

    document = call("status", "--json", run.directory).document
    assert (document["over"], document["engine"], document["phase"]) == (False, "alive", "running")
    assert document["verdict"] is None
    assert [rank["phase"] for rank in document["ranks"]] == ["running"] * 3
    assert call("status", run.directory).out.splitlines()[1] == "running"
    assert "is not over: running." in call("explain", run.directory).out

    said = call("receipt", run.directory)
    assert said.code == 75
    assert "not over" in said.err
    said = call("verify", "--json", run.directory)
    assert said.code == 75
    assert said.document["verdict"]["outcome"] == "unverifiable"

    run.signal(signal.SIGTERM)
    assert run.wait() == 143


@pytest.mark.slow
def test_a_dry_run_prints_what_is_executed(call: Call, local: Local) -> None:
    """Word for word, but for what each run has of its own: its id and its nonce."""
    plan = local.plan(
        {"worker": role(0, SERVE, agent="off"), "client": role(1, ["sleep", "{rank}000"])},
        coordinator=1,
    )
    base = local.base()
    printed = call("run", "--dry-run", "--dir", base, plan).out.splitlines()
    document = call("run", "--dry-run", "--json", "--dir", base, plan).document
    assert list(base.iterdir()) == []
    run = local.start(plan, base=base)
    run.wait_file("up.0")
    run.first("RankStarted", rank=1)

    def neutral(words: list[str], directory: str) -> list[str]:
        return [re.sub(r"^[0-9a-f]{16}$", "NONCE", word.replace(directory, "DIR")) for word in words]

    for step in document["steps"]:
        pid = run.first("StepSpawned", rank=step["rank"])["pid"]
        real = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        assert neutral(step["step"], document["run_dir"]) == neutral(real, str(run.directory))
    assert [line.split(":")[0] for line in printed[::2]] == ["# rank 0 on 127.0.0.1", "# rank 1 on 127.0.0.2"]
    command = Path(f"/proc/{run.first('RankStarted', rank=1)['pid']}/cmdline").read_bytes().decode().split("\0")[:-1]
    assert command == document["steps"][1]["command"]
    run.signal(signal.SIGTERM)
    assert run.wait() == 143


# --- what it costs -------------------------------------------------------------------------------------------------


def imported(program: str, *words: str) -> set[str]:
    """The modules that a program has imported at its end."""
    argv = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules, file=sys.stderr)", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.slow
def test_quick_verbs_import_little(ended: Callable[[str], Run]) -> None:
    assert imported("import supervisor") - imported("pass") == {"supervisor"}
    for verb in ("status", "explain", "receipt", "logs"):
        call = f"from supervisor.cli.main import main; main(['{verb}', '{ended('failure').directory}'])"
        found = imported(call)
        assert f"supervisor.cli.{verb}" in found
        ours = {name for name in found if name.startswith("supervisor.")} - {
            "supervisor.cli",
            "supervisor.core",
            "supervisor.runs",
        }
        verbs = {"main", "output", "arguments", "held", "runner", "status", "explain", "receipt", "logs", "check"}
        read = {f"supervisor.runs.{name}" for name in ("registry", "papers", "saved", "growing")}
        below = {"supervisor.core.codes", "supervisor.core.text", "supervisor.loop", "supervisor.loop.files", *read}
        assert ours <= {f"supervisor.cli.{name}" for name in verbs} | below
        assert not found & {"asyncio", "anyio", "subprocess", "typing_extensions", "importlib.metadata"}
