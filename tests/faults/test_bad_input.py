"""What a person can get wrong: nothing is started, the exit code is 78 (69 where a run was named), and a sentence says
what to do. Never a traceback.

Most of this happens in the test's own process, through `main`; what is about the process itself (its user, its working
directory, its streams) starts the program.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.cli.main import VERBS, main
from tests.faults.local import ALLOCCTL, SERVE, Local, role, sh

Refused = Callable[..., str]

GOOD = """\
job = { name = "x", nodes = 2 }
coordinator = { rank = 1 }
[roles.worker]
ranks = 0
command = ["touch", "{run_dir}/../../started"]
[roles.client]
ranks = 1
command = ["touch", "{run_dir}/../../started"]
"""
SLURM = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A plan with nothing wrong in it, whose ranks would leave a trace."""
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """`allocctl` in this process, in a directory of its own: it must refuse. Returns what it said on stderr."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "ALLOCD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def call(*words: str | Path, code: int = 78) -> str:
        assert main([str(word) for word in words]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        assert not (tmp_path / "started").exists()
        assert list(tmp_path.glob("runs/*")) == []
        return said.err

    return call


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "wrong", "words"),
    [
        ("nodes = 2 }", "nodes = 2", ["x.toml:1", "TOML"]),
        ("ranks = 0", "rank = 0", ["x.toml:4", "roles.worker.rank", "unknown key", "did you mean ranks?"]),
        ("[roles.worker]", "[role.worker]", ["unknown key", "did you mean roles?"]),
        ("ranks = 0", "ranks = 1", ["rank 1, which belongs to role"]),
        ("ranks = 1\n", "ranks = 2\n", ["no role for rank 1", "ranks 0..2 without a gap"]),
        ("nodes = 2", "nodes = 1", ["1 for 2 ranks", "at least one node for each rank"]),
        ("coordinator = { rank = 1 }", "", ["coordinator", "[coordinator] table"]),
        ("coordinator = { rank = 1 }", "coordinator = { rank = 7 }", ["coordinator.rank: found 7"]),
        ("[roles.worker]", 'marker = { path = "../x" }\n[roles.worker]', ["marker.path"]),
        ("[roles.worker]", 'collect = { paths = ["a/../../x"] }\n[roles.worker]', ["collect.paths[0]"]),
        ("[roles.worker]", 'artifacts = [{ name = "a", path = "/etc/x" }]\n[roles.worker]', ["artifacts[0].path"]),
        ("[roles.worker]", 'artifacts = [{ name = "a", path = "a/../x" }]\n[roles.worker]', ["artifacts[0].path"]),
        ("{run_dir}", "{rundir}", ["{rundir}", "did you mean run_dir?"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_a_wrong_plan(refused: Refused, tmp_path: Path, change: str, wrong: str, words: list[str]) -> None:
    assert change in GOOD
    (tmp_path / "x.toml").write_text(GOOD.replace(change, wrong))
    said = refused("run", "x.toml")
    for word in words:
        assert word in said


def test_every_error_of_a_plan_is_told_at_once(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD.replace("ranks = 0", "ranks = -1\ngrase = 3").replace("nodes", "notes"))
    said = refused("run", "x.toml")
    assert {line.split(":")[1] for line in said.removeprefix("allocctl: ").splitlines()} == {"1", "4", "5"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: path.write_bytes(b"[job]\nname = '\xff'"), "x.toml:2: found bytes that are no UTF-8"),
        (lambda path: path.write_bytes(b""), "job"),
        (lambda path: path.write_bytes(b"a = " + b"[" * 100_000), "nested too deeply"),
        (lambda path: path.symlink_to(path), "symbolic links"),
    ],
    ids=["missing", "directory", "bytes", "empty", "deep", "loop"],
)
def test_no_plan(refused: Refused, tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "x.toml")
    said = refused("run", "x.toml")
    assert "x.toml" in said
    assert words in said


# --- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/proc/runs", "/dev/null", "good.toml", "\udcff", "new\nline", "a" * 300])
def test_a_run_directory_that_cannot_be_made(refused: Refused, plan: Path, place: str) -> None:
    assert "choose another place with --dir" in refused("run", "--dir", place, plan)


def test_a_directory_that_does_not_belong_to_us(tmp_path: Path, plan: Path) -> None:
    """As an ordinary user."""
    if os.geteuid() == 0:
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        # As below, through a shell: what setpriv itself executes may still be reached with root's rights.
        if not _can_run([*user, "sh", "-c", '"$0" --version', ALLOCCTL]):
            pytest.skip("another user cannot run this checkout's allocctl: its directory is closed to others")
    else:
        user = []
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # Our temporary directories are closed to others: the plan goes through a pipe, one of that user's own.
    argv = [*user, "sh", "-c", 'cat | "$0" run --dir "$1" /dev/stdin', ALLOCCTL, str(closed)]
    done = subprocess.run(argv, input=plan.read_text(), capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 78
    assert "choose another place with --dir" in done.stderr
    assert "ermission denied" in done.stderr
    assert "Traceback" not in done.stderr


def _can_run(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, cwd="/", check=False).returncode == 0


@pytest.mark.parametrize("kind", ["file", "dangling link", "directory"])
def test_outputs_that_exist_before(refused: Refused, tmp_path: Path, kind: str) -> None:
    results = tmp_path / "results"
    results.mkdir()
    output = results / "out.json"
    {"file": output.touch, "dangling link": lambda: output.symlink_to("nowhere"), "directory": output.mkdir}[kind]()
    path = tmp_path / "x.toml"
    path.write_text(f'{GOOD}[[artifacts]]\nname = "out"\nroot = "{results}"\npath = "out.json"\n')
    said = refused("run", path)
    assert f"{output}" in said
    assert "move them away first" in said
    assert os.path.lexists(output)


@pytest.mark.slow
def test_a_marker_that_a_living_run_uses(local: Local) -> None:
    marker = {"path": str(local.directory / "marker")}
    plan = local.plan({"client": role(0, SERVE)}, coordinator=0, marker=marker)
    first = local.start(plan)
    first.wait_file("up.0")
    own = local.start(local.plan({"client": role(0, SERVE)}, coordinator=0))
    inside = own.first("RunOpened")["marker"]
    for another in (plan, local.plan({"client": role(0, SERVE)}, coordinator=0, marker={"path": inside})):
        refused = local.run(another)
        assert refused.code == 78
        assert "is used by a run that lives" in refused.last_line
        assert list(refused.base.glob("local-*")) == []
    first.signal(signal.SIGTERM)
    assert first.code == 143
    assert local.run(local.plan({"client": role(0, sh("exit 3"))}, coordinator=0, marker=marker)).code == 3


# --- Slurm's environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_JOB_ID": "12"}, "no SLURM_JOB_NODELIST"),
        ({**SLURM, "SLURM_JOB_ID": "../12"}, "unset SLURM_JOB_ID, or use --local"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST cannot be read"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-99999999999]"}, "SLURM_JOB_NODELIST cannot be read"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n1"}, "ask sbatch for more (--nodes)"),
        ({**SLURM, "SLURM_RESTART_COUNT": "../1"}, "SLURM_RESTART_COUNT cannot be read"),
        ({**SLURM, "PATH": "/nonexistent"}, "no srun on PATH"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_environment_that_is_no_allocation(
    refused: Refused, plan: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert words in refused("run", plan)


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: allocctl VERB"),
        (("rnu",), "did you mean run?"),
        (("--json", "run"), "no verb '--json'"),
        (("run",), "the following arguments are required: plan"),
        (("run", "--dry", "good.toml"), "unrecognized arguments: --dry"),
        (("run", "--json", "-q", "good.toml"), "not allowed with argument"),
        (("logs", "--rank", "two"), "invalid int value"),
        (("logs", "--kind", "log"), "invalid choice"),
        (("verify", "12", "--timeout", "soon"), "--timeout"),
        (("marker",), "required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words(refused: Refused, words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


@pytest.mark.parametrize("verb", ["status", "explain", "receipt", "logs", "verify"])
@pytest.mark.parametrize("name", ["local-1", "./nowhere", "..", "x" * 5000, "\udcff/\0"[:2]])
def test_a_run_that_is_not_there(refused: Refused, verb: str, name: str) -> None:
    assert "name its run directory" in refused(verb, name, code=69)


@pytest.mark.parametrize("verb", ["status", "explain", "receipt", "logs", "verify"])
def test_no_run_named(refused: Refused, verb: str) -> None:
    assert "which" in refused(verb, code=69)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {verb} " in usage for verb in VERBS)
    for verb in VERBS:
        assert main([verb, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: allocctl {verb}")


# --- the process itself --------------------------------------------------------------------------------------------


def buffered(directory: Path) -> dict[str, str]:
    """An environment in which Python's streams have their buffers, as they usually do."""
    usual = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**usual, "XDG_STATE_HOME": str(directory / "state")}


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A shell that runs allocctl as `$A`."""
    env = {**buffered(directory), "A": ALLOCCTL}
    done = subprocess.run(["bash", "-c", script], env=env, cwd=directory, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done


@pytest.mark.slow
def test_a_working_directory_that_is_gone(tmp_path: Path, plan: Path) -> None:
    for options in ("", f"--dir {shlex.quote(str(tmp_path / 'runs'))}"):
        done = shell(f'mkdir d; cd d; rmdir ../d; "$A" run {options} {shlex.quote(str(plan))}', tmp_path)
        assert done.returncode == 78
        assert "the working directory does not exist any more: change to one that does" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(tmp_path: Path, closed: str) -> None:
    """The run is the same, and nothing that is meant for people gets into a file of the run."""
    path = tmp_path / "x.toml"
    path.write_text(
        'job = { name = "x", nodes = 1 }\ncoordinator = { rank = 0 }\n[roles.a]\nranks = 0\ncommand = ["false"]'
    )
    done = shell(f'"$A" run x.toml --json {closed}', tmp_path)
    assert done.returncode == 1
    (journal,) = tmp_path.glob("runs/*/journal.jsonl")
    assert all(line.startswith('{"seq":') for line in journal.read_text().splitlines())
    (directory,) = tmp_path.glob("runs/*")
    assert not any(path.read_bytes() for path in directory.glob("logs/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ('"$A" check good.toml --schema >/dev/full', 1),
        ('"$A" check good.toml --schema | true; exit ${PIPESTATUS[0]}', 1),
        ('"$A" --help >/dev/full', 1),
        ('"$A" run --json bad.toml >/dev/full', 1),
        ('"$A" run --json bad.toml | true; exit ${PIPESTATUS[0]}', 1),
        ('"$A" run bad.toml 2>/dev/full', 1),
        ('"$A" run bad.toml 2> >(true)', 1),
    ],
)
def test_streams_that_take_nothing(tmp_path: Path, plan: Path, script: str, code: int) -> None:
    (tmp_path / "bad.toml").write_text(plan.read_text().replace("touch", "false"))
    done = shell(script, tmp_path)
    assert done.returncode == code
    receipts = list(tmp_path.glob("runs/*/receipt.run.json"))
    assert len(receipts) == ("run" in script)


@pytest.mark.slow
def test_a_stderr_that_nobody_reads_does_not_hold_the_end(tmp_path: Path, plan: Path) -> None:
    """The pipe is full from the start: what is said is lost, the exit code is not."""
    (tmp_path / "bad.toml").write_text(plan.read_text().replace("touch", "false"))
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, bytes(4096))
        os.set_blocking(write, True)
        done = subprocess.run(
            [ALLOCCTL, "run", "bad.toml"],
            cwd=tmp_path,
            env=buffered(tmp_path),
            stderr=write,
            stdin=subprocess.DEVNULL,
            timeout=30,
            check=False,
        )
        assert done.returncode == 1
    finally:
        os.close(read)
        os.close(write)
