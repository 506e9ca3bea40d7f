"""marker.sh, under every POSIX shell of this machine, with the options careful scripts set."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.core.marker import MAX_BYTES, Foreign, Garbage, Marker, NotYet, Reading, attempt_from
from supervisor.engine import markers

pytestmark = pytest.mark.slow  # real programs, one after the other

SOURCE = Path(markers.__file__).parents[1] / "agent" / "marker.sh"
SHELLS = [shell for shell in (["dash"], ["busybox", "sh"], ["bash"]) if shutil.which(shell[0])]
if not SHELLS:
    pytest.skip("no POSIX shell here", allow_module_level=True)

Done = subprocess.CompletedProcess[str]
Script = Callable[..., Done]


def _run(shell: list[str], script: str, directory: Path, **variables: str) -> Done:
    environment = {
        "PATH": os.environ["PATH"],
        "ALLOCD_SH": str(SOURCE),
        "ALLOCD_MARKER": str(directory / ".bench_done.7"),
        "ALLOCD_RUN_ID": "7",
        "ALLOCD_MARKER_POLL": "0.05",
        "ALLOCD_MARKER_RECHECK": "0",
        **variables,
    }
    return subprocess.run(
        [*shell, "-c", f'set -eu\n. "$ALLOCD_SH"\n{script}'],
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.fixture(params=SHELLS, ids=" ".join)
def script(request: pytest.FixtureRequest, path: Path) -> Script:
    shell: list[str] = request.param

    def script(text: str, **variables: str) -> Done:
        return _run(shell, text, path.parent, **variables)

    return script


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "a 'b' $c *\\ d"  # everything is quoted
    directory.mkdir()
    return directory / ".bench_done.7"


def _code(reading: Reading) -> int:
    assert isinstance(reading, Marker), reading
    return reading.code


# One protocol, two programs


@pytest.mark.parametrize("variables", [{}, {"ALLOCD_RANK": "2"}, {"SLURMD_NODENAME": "n7"}])
def test_python_reads_what_sh_writes(script: Script, path: Path, variables: dict[str, str]) -> None:
    done = script("allocd_marker_publish 3", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = markers.read(path, "7")
    assert isinstance(found, Marker)
    assert (found.code, found.attempt, found.by) == (3, "7", "coordinator")
    assert found.rank == (2 if "ALLOCD_RANK" in variables else None)
    assert found.host == variables.get("SLURMD_NODENAME", os.uname().nodename)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.at or "")
    assert os.listdir(path.parent) == [path.name]


def test_sh_reads_what_python_writes(script: Script, path: Path) -> None:
    markers.publish(path, Marker(201, "7", 1, "n", "supervisor", "now"))
    done = script("allocd_marker_read; allocd_marker_wait")
    assert (done.returncode, done.stdout) == (201, "201\n")


SIMPLE = st.sampled_from(
    [b"0", b"7", b"42", b"255", b"256", b"\n", b"\n", b" ", b"\r", b"\0", b"\1", b"-", b"x", b"\xc3\xa9", b"\xff"]
)
LINES = st.sampled_from(
    [
        *(b"attempt=7", b"attempt=8", b"attempt=", b"attempt= 7", b"attempt=8 ", b"attempt=8 9", b"attempt=\t"),
        *(b"attempt=\xff", b"attempt=a\x7f", b"attempt", b"rank=3", b"attempt=" + b"y" * 512, b"*", b"\\n"),
        *(b"attempt=" + b"y" * 513, b" attempt=8", b"attempt=8\r", b"attempt=8\0", b"x"),
    ]
)
CONTENTS = st.lists(SIMPLE, max_size=4).map(b"".join) | st.builds(
    lambda code, lines, end: code + b"\n" + b"\n".join(lines) + end,
    st.sampled_from([b"0", b"3", b"255", b"256", b""]),
    st.lists(LINES, max_size=4),
    st.sampled_from([b"", b"\n"]),
)
TABLE = [
    *(b"", b"1", b"12\n", b"abc\n", b"300\n", b"-1\n", b"+1\n", b" 7\n", b"7 \n", b"7\r\n", b"007\n", b"\n7\n"),
    *(b"x" * 16, b"x" * 17, b"1" * 17, b"\0" * 40, b"\0\n", b"\1" * 17, b"7\0\n", b"7\n\0", b"*\n", b"?\n"),
    *(b"7\n" + b"#" * (MAX_BYTES - 2), b"7\n" + b"#" * (MAX_BYTES - 1), b"7\n" + b"#" * 50_000),
    *("٧\n".encode(), "７\n".encode(), b"\xef\xbb\xbf7\n", b"0\n1\n", b"3\nattempt=8\nattempt=7\n"),
]


def _answers(shell: list[str], directory: Path, contents: list[bytes], attempt: str) -> tuple[list[str], list[str]]:
    """What the two programs say about each content."""
    for number, content in enumerate(contents):
        (directory / f"m{number}").write_bytes(content)
    script = (
        f"n=0; while [ $n -lt {len(contents)} ]; do ALLOCD_MARKER=m$n\n"
        "allocd_marker_read 2>/dev/null || echo exit $?; n=$((n + 1)); done"
    )
    done = _run(shell, script, directory, ALLOCD_RUN_ID=attempt)
    expected = []
    for number in range(len(contents)):
        match markers.read(directory / f"m{number}", attempt or None):
            case Marker(code=code):
                expected.append(str(code))
            case Garbage():
                expected.append("exit 65")
            case NotYet() | Foreign():
                expected.append("exit 75")
    return done.stdout.splitlines(), expected


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@pytest.mark.parametrize("attempt", ["7", ""])
def test_the_two_agree_about_odd_files(shell: list[str], tmp_path: Path, attempt: str) -> None:
    said, expected = _answers(shell, tmp_path, TABLE, attempt)
    assert dict(zip(TABLE, said, strict=True)) == dict(zip(TABLE, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
@settings(max_examples=8, deadline=None)
@given(contents=st.lists(CONTENTS, min_size=20, max_size=20), attempt=st.sampled_from(["7", "8", ""]))
def test_the_two_agree_about_any_file(
    shell: list[str], tmp_path_factory: pytest.TempPathFactory, contents: list[bytes], attempt: str
) -> None:
    said, expected = _answers(shell, tmp_path_factory.mktemp("m"), contents, attempt)
    assert list(zip(contents, said, strict=True)) == list(zip(contents, expected, strict=True))


# Publishing


def test_the_first_publish_counts(script: Script, path: Path) -> None:
    assert script("allocd_marker_publish 3; allocd_marker_publish 0; allocd_marker_read").stdout == "3\n"


def test_of_many_publishers_one_wins(script: Script, path: Path) -> None:
    codes = "for code in 1 2 3 4 5 6 7 8; do allocd_marker_publish $code & done; wait; allocd_marker_read"
    done = script(codes)
    assert done.stdout == f"{_code(markers.read(path, '7'))}\n", done.stderr
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("content", ["", "12", "abc\n"])
def test_a_void_file_is_left_alone(script: Script, path: Path, content: str) -> None:
    path.write_text(content)
    done = script("allocd_marker_publish 3")
    assert done.returncode == 65
    assert "holds no marker" in done.stderr
    assert path.read_text() == content
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("kind", ["directory", "dangling", "fifo"])
def test_what_is_no_file_is_garbage(script: Script, path: Path, kind: str) -> None:
    makers: dict[str, Callable[[], None]] = {
        "directory": path.mkdir,
        "dangling": lambda: path.symlink_to("x"),
        "fifo": lambda: os.mkfifo(path),
    }
    makers[kind]()
    assert script("allocd_marker_publish 3").returncode == 65
    assert script("allocd_marker_read").returncode == 65
    assert os.listdir(path.parent) == [path.name]


def test_a_marker_of_an_earlier_attempt_makes_way(script: Script, path: Path) -> None:
    markers.publish(path, Marker(9, "6"))
    assert script("allocd_marker_read").returncode == 75
    assert script("allocd_marker_publish 3").returncode == 0
    assert markers.read(path, "7") != markers.read(path, "6")
    assert _code(markers.read(path, "7")) == 3


def test_the_attempt_comes_from_slurm_where_no_engine_gave_one(script: Script, path: Path) -> None:
    requeued = {"ALLOCD_RUN_ID": "", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert script("allocd_marker_publish 3", **requeued).returncode == 0
    assert _code(markers.read(path, "7.r2")) == 3
    assert script("allocd_marker_read", **{**requeued, "SLURM_RESTART_COUNT": "3"}).returncode == 75
    assert script("allocd_marker_read", ALLOCD_RUN_ID="").stdout == "3\n"


@pytest.mark.parametrize("array", ["", "7", "x"])
@pytest.mark.parametrize("task", ["", "0", "12", "-"])
@pytest.mark.parametrize("restarts", ["", "0", "2"])
def test_the_shell_makes_the_same_attempt_of_slurms_variables(
    script: Script, path: Path, array: str, task: str, restarts: str
) -> None:
    slurm = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": task, "SLURM_RESTART_COUNT": restarts}
    environ = {"ALLOCD_RUN_ID": "", "SLURM_JOB_ID": "8", **slurm}
    assert script("allocd_marker_publish 3", **environ).returncode == 0
    reading = markers.read(path, None)
    assert isinstance(reading, Marker)
    assert reading.attempt == attempt_from(environ)


def test_links_refused(script: Script, path: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "bin"
    refusing.mkdir()
    (refusing / "ln").write_text("#!/bin/sh\nexit 1\n")
    (refusing / "ln").chmod(0o755)
    # busybox would run its own ln: as a function, ours is found first in every shell
    call = 'ln() { "$LN" "$@"; }; allocd_marker_publish 3; allocd_marker_publish 0; allocd_marker_read'
    done = script(call, LN=str(refusing / "ln"))
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_may_not_grow_leaves_no_marker(script: Script, path: Path) -> None:
    done = script("ulimit -f 0; allocd_marker_publish 3")
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert os.listdir(path.parent) == []
    assert script("ulimit -f 0; allocd_marker_note 3").returncode == 1
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_full_disk_leaves_no_marker(shell: list[str], tmp_path: Path) -> None:
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs "$0" && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False).returncode:
        pytest.skip("a mount of one's own needs privileges")
    script = (
        "cd ..; cd - >/dev/null\n"  # into the mount
        "head -c 4096 /dev/zero >big; allocd_marker_publish 3 2>/dev/null || echo refused $?\n"
        "echo $(ls -A); rm big; allocd_marker_publish 3; echo $(ls -A)"
    )
    done = _run([*mount, *shell], script, tmp_path)
    assert done.stdout == "refused 1\nbig\n.bench_done.7\n", done.stderr


def test_a_directory_that_does_not_exist(script: Script, path: Path) -> None:
    elsewhere = {"ALLOCD_MARKER": str(path.parent / "no" / "m")}
    assert script("allocd_marker_publish 3", **elsewhere).returncode == 1
    assert script("allocd_marker_read", **elsewhere).returncode == 75


@pytest.mark.parametrize("name", ["m", "-m", "./m", "-"])
def test_names_relative_to_the_working_directory(script: Script, path: Path, name: str) -> None:
    assert script("allocd_marker_publish 3; allocd_marker_read", ALLOCD_MARKER=name).stdout == "3\n"
    assert os.listdir(path.parent) == [name.removeprefix("./")]


# Notes


def test_the_first_failure_noted_is_published(script: Script, path: Path) -> None:
    sweep = "for part in 0 4 0 6; do (exit $part) || allocd_marker_note $?; done; allocd_marker_publish 0"
    assert script(sweep).returncode == 0
    assert _code(markers.read(path, "7")) == 4
    assert markers.noted(path, "7") == 4


def test_a_note_of_python_is_published_by_sh(script: Script, path: Path) -> None:
    markers.note(path, 4, "7")
    assert script("allocd_marker_note 5; allocd_marker_publish 0; allocd_marker_read").stdout == "4\n"


def test_a_note_of_another_attempt_counts_for_nothing(script: Script, path: Path) -> None:
    markers.note(path, 4, "6")
    assert script("allocd_marker_note 0; allocd_marker_publish 0; allocd_marker_read").stdout == "0\n"
    assert script("allocd_marker_note 9").returncode == 0
    assert markers.noted(path, "7") == 9


@pytest.mark.parametrize("content", ["", "abc\n"])
def test_a_note_that_makes_no_sense_is_still_a_failure(script: Script, path: Path, content: str) -> None:
    markers.note_path(path).write_text(content)
    assert script("allocd_marker_note 4; allocd_marker_publish 0; allocd_marker_read").stdout == "1\n"


# Waiting


def test_a_wait_ends_with_the_marker(script: Script) -> None:
    assert script("(sleep 0.1; allocd_marker_publish 9) & allocd_marker_wait").returncode == 9


@pytest.mark.parametrize("pid", ["$!", ""])
def test_a_wait_for_a_process_that_publishes(script: Script, pid: str) -> None:
    assert script(f"(sleep 0.1; allocd_marker_publish 9) & allocd_marker_wait {pid}").returncode == 9


def test_a_wait_gives_up_after_the_process(script: Script) -> None:
    done = script("sleep 0.1 & allocd_marker_wait $!")
    assert done.returncode == 1
    assert "absent" in done.stderr


def test_a_process_that_nobody_waited_for_is_gone(script: Script) -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert script(f"allocd_marker_wait {process.pid}", ALLOCD_MARKER_TIMEOUT="20").returncode == 1


def test_the_second_look_finds_what_became_visible_late(script: Script) -> None:
    late = "true & p=$!; wait $p; (sleep 0.3; allocd_marker_publish 9) & allocd_marker_wait $p"
    assert script(late, ALLOCD_MARKER_RECHECK="20").returncode == 9


def test_a_wait_has_a_deadline(script: Script, path: Path) -> None:
    markers.publish(path, Marker(0, "6"))
    done = script("allocd_marker_wait", ALLOCD_MARKER_TIMEOUT="0")
    assert done.returncode == 124
    assert "attempt 6" in done.stderr


@pytest.mark.slow
def test_garbage_that_stays(script: Script, path: Path) -> None:
    path.write_text("abc\n")
    assert script("allocd_marker_wait").returncode == 65


@pytest.mark.slow
def test_a_wait_without_fractions_of_seconds(script: Script) -> None:
    """A sleep that fails must not become a loop that burns a core."""
    counted = "sleep() { echo $1 >>slept; case $1 in 1) command sleep 1 ;; *) return 1 ;; esac; }"
    assert script(f"{counted}; sleep 0 & allocd_marker_wait", ALLOCD_MARKER_TIMEOUT="2").returncode == 124


# Workers


def test_a_worker_ends_with_the_marker(script: Script) -> None:
    engine = "sh -c 'trap \"echo stopped; exit 5\" TERM; echo up >up; while :; do sleep 0.05; done' & p=$!\n"
    coordinator = "(while ! [ -e up ]; do sleep 0.05; done; allocd_marker_publish 9) &\n"
    done = script(f"{engine}{coordinator}allocd_worker $p || echo code $?; kill -0 $p 2>/dev/null || echo gone")
    assert done.stdout == "stopped\ncode 9\ngone\n", done.stderr


def test_a_worker_ends_normally_with_a_marker_0(script: Script, path: Path) -> None:
    markers.publish(path, Marker(0, "7"))
    done = script("sleep 100 & allocd_worker $!; echo code $?")
    assert (done.returncode, done.stdout) == (0, "code 0\n"), done.stderr


def test_an_engine_that_ignores_the_stop_is_killed(script: Script, path: Path) -> None:
    markers.publish(path, Marker(9, "7"))
    engine = "sh -c 'trap \"\" TERM; echo up >up; while :; do sleep 0.05; done' & p=$!\n"
    up = "while ! [ -e up ]; do sleep 0.05; done\n"
    done = script(f"{engine}{up}allocd_worker $p || echo code $?; kill -0 $p || echo gone", ALLOCD_MARKER_GRACE="1")
    assert done.stdout == "code 9\ngone\n", done.stderr


def test_the_group_of_an_engine_is_stopped_after_its_leader(script: Script, path: Path) -> None:
    markers.publish(path, Marker(9, "7"))
    child = "sh -c 'trap \"\" TERM; echo $$ >child.new; mv child.new child; while :; do sleep 0.05; done'"
    engine = 'setsid sh -c "$CHILD & wait" & p=$!\n'
    up = "while ! [ -e child ]; do sleep 0.05; done\n"
    done = script(f"{engine}{up}allocd_worker $p || echo code $?", CHILD=child, ALLOCD_MARKER_GRACE="1")
    assert done.stdout == "code 9\n", done.stderr
    status = Path("/proc") / (path.parent / "child").read_text().strip() / "status"
    deadline = time.monotonic() + 10  # it was killed; how soon the kernel is done with it is another matter
    while status.exists() and not re.search(r"State:\s+[ZX]", status.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("end", "code"), [("exit 0", 1), ("exit 3", 3), ("kill -9 $$", 137)])
def test_an_engine_that_dies_first_is_a_failure(script: Script, end: str, code: int) -> None:
    done = script(f"sh -c '{end}' & allocd_worker $! || echo code $?")
    assert done.stdout == f"code {code}\n", done.stderr


def test_an_engine_that_dies_as_the_marker_comes_is_none(script: Script) -> None:
    late = "sh -c 'exit 3' & p=$!; (sleep 0.3; allocd_marker_publish 0) & allocd_worker $p; echo code $?"
    assert script(late, ALLOCD_MARKER_RECHECK="20").stdout == "code 0\n"


def test_a_worker_at_the_deadline_stops_its_engine(script: Script) -> None:
    worker = "sleep 100 & p=$!; allocd_worker $p || echo code $?; kill -0 $p || echo gone"
    done = script(worker, ALLOCD_MARKER_TIMEOUT="0")
    assert done.stdout == "code 124\ngone\n", done.stderr


@pytest.mark.parametrize("code", [0, 9, None])
@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_worker_that_is_told_to_stop(shell: list[str], path: Path, code: int | None) -> None:
    """By its supervisor, whose TERM goes to the whole group; the marker may come a moment later."""
    wait_then_serve = "until [ -e waits ]; do sleep 0.05; done; echo up; while :; do sleep 0.05; done"
    engine = f"trap 'echo stopped; exit 5' TERM; {wait_then_serve}"
    worker = (
        'set -eu; . "$ALLOCD_SH"; trap : TERM; sleep() { : >waits; command sleep "$@"; }\n'
        'sh -c "$ENGINE" & allocd_worker $!'
    )
    environment = {
        "PATH": os.environ["PATH"],
        "ALLOCD_SH": str(SOURCE),
        "ALLOCD_MARKER": str(path),
        "ALLOCD_RUN_ID": "7",
        "ALLOCD_MARKER_POLL": "0.05",
        "ALLOCD_MARKER_RECHECK": "0" if code is None else "20",
        "ENGINE": engine,
    }
    command = [*shell, "-c", worker]
    with subprocess.Popen(
        command, env=environment, cwd=path.parent, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        if code is not None:
            markers.publish(path, Marker(code, "7"))
        assert process.wait(20) == (143 if code is None else code)


# Manners


@pytest.mark.parametrize(
    "call",
    [
        *("allocd_marker_publish", "allocd_marker_publish 256", "allocd_marker_publish '1 2'"),
        *("allocd_marker_note -1", "allocd_marker_wait x", "allocd_worker", "allocd_worker x"),
        *("ALLOCD_MARKER=; allocd_marker_read", "unset ALLOCD_MARKER; allocd_marker_publish 0"),
        *("unset ALLOCD_MARKER; allocd_marker_wait", "ALLOCD_MARKER_RECHECK=x; allocd_marker_wait"),
    ],
)
def test_misuse(script: Script, path: Path, call: str) -> None:
    done = script(call)
    assert done.returncode == 78
    assert done.stderr
    assert os.listdir(path.parent) == []


def test_the_script_keeps_its_options_variables_and_separator(script: Script, path: Path) -> None:
    calls = (
        "allocd_marker_note 4; allocd_marker_publish 0; allocd_marker_read >/dev/null; allocd_marker_wait || :\n"
        "sleep 100 & allocd_worker $! || :\n"
    )
    # Names alone, for values such as the last argument move; `options` shows what `set` changed.
    names = "set | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p' | sort -u"
    done = script(f'IFS=:; set -f; options=$-; {names} >b\n{calls}[ "$options:$IFS" = "$-::" ]; {names} >a; umask')
    assert done.returncode == 0, done.stderr
    before, after = ((path.parent / name).read_text().split() for name in "ba")
    mine = set(after) - set(before) - {"_", "PIPESTATUS", "BASHPID", "LINENO"}
    assert {name for name in mine if not name.startswith("allocd_")} == set()


def test_only_names_of_ours_are_defined() -> None:
    defined = re.findall(r"^\s*([A-Za-z_][A-Za-z0-9_]*)\s*\(\)", SOURCE.read_text(), re.MULTILINE)
    assert {"allocd_marker_publish", "allocd_marker_note", "allocd_worker"} <= set(defined)
    assert [name for name in defined if not name.startswith("allocd_")] == []


def test_sourcing_prints_nothing_and_needs_nothing(script: Script) -> None:
    done = script('unset ALLOCD_MARKER ALLOCD_RUN_ID; . "$ALLOCD_SH"; echo ok')
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    subprocess.run(["shellcheck", "-s", "sh", SOURCE], check=True, stdout=sys.stderr)
