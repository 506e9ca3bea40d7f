"""The agent as its engine meets it: the real archive, run by a real interpreter, spoken to over pipes.

Every wait has a deadline; what a test starts carries that test's tag and is swept when the test is over. Set
ALLOCD_TEST_PYTHON to try another interpreter than the one that runs the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.agent import agent, channel, processes
from supervisor.agent.build import HERE, agent_archive

pytestmark = pytest.mark.slow  # real programs, one after the other

PYTHON = os.environ.get("ALLOCD_TEST_PYTHON", sys.executable)
NONCE = "f00d"
PATIENCE = 20.0  # seconds: a deadline for what should take milliseconds, on a machine that may be busy
Event = dict[str, Any]
CHANGED = (  # a program: the agent from its source, with a change
    f"import sys; sys.path.insert(0, {str(HERE.parents[1])!r}); from supervisor.agent import agent\n"
    "{change}\n"
    "sys.exit(agent.main(sys.argv[2:]))\n"
)


def wait_for(condition: Callable[[], object], what: str, limit: float = PATIENCE) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit} s"
        time.sleep(0.002)


def alive(pid: int) -> bool:
    seen = processes.process(pid)
    return seen is not None and seen.alive


def status_of(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


class Engine:
    """The other end of one agent's channel, and the files of its rank."""

    def __init__(self, archive: Path, root: Path, command: list[str] | None = None, **popen: Any) -> None:
        self.archive, self.root = archive, root
        self.out, self.err = root / "rank.out", root / "rank.err"
        self.tag = uuid.uuid4().hex
        self.events: list[Event] = []
        self.buffer = b""
        argv = [*(command or [PYTHON, "-I", "-S"]), str(archive), "run", NONCE, "3"]
        settings: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, **popen}
        self.process = subprocess.Popen(argv, **settings)

    # commands

    def raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def say(self, command: str, **fields: Any) -> None:
        self.raw(json.dumps({"n": NONCE, "c": command, **fields}).encode() + b"\n")

    def spec(self, argv: list[str], **fields: Any) -> None:
        document = {"argv": argv, "tag": self.tag, "out": str(self.out), "err": str(self.err), **fields}
        text = json.dumps(document)
        pieces = [text[at : at + 400] for at in range(0, len(text), 400)]
        for at, piece in enumerate(pieces):
            self.say("spec", part=piece, more=at + 1 < len(pieces))

    def start(self, argv: list[str], **fields: Any) -> int:
        """Start a rank and return its main process's pid, which `started` told."""
        self.spec(argv, **fields)
        self.say("start")
        return int(self.until("started")["pid"])

    def python(self, code: str, **fields: Any) -> int:
        """Start a rank that is a Python program, and wait until it has printed its first line."""
        pid = self.start([sys.executable, "-I", "-S", "-u", "-c", code], **fields)
        wait_for(lambda: self.lines() or not alive(pid), "the rank's first line")
        assert alive(pid) or self.lines(), self.err.read_text()
        return pid

    def lines(self) -> list[str]:
        return self.out.read_text().splitlines()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    # events

    def line(self, limit: float = PATIENCE) -> bytes:
        assert self.process.stdout is not None
        end = time.monotonic() + limit
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the agent is silent after {self.events}"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the agent has closed its output after {self.events}"
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    def closed(self) -> None:
        """Wait until the agent has left: then its output is closed."""
        assert self.process.stdout is not None
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLHUP)
        while poller.poll(PATIENCE * 1000)[0][1] & select.POLLHUP == 0:
            os.read(self.process.stdout.fileno(), 65536)

    def next(self, limit: float = PATIENCE) -> Event:
        line = self.line(limit)
        assert len(line) < channel.LINE_LIMIT
        event: Event = json.loads(line)
        assert event["n"] == NONCE
        self.events.append(event)
        return event

    def until(self, name: str, limit: float = PATIENCE) -> Event:
        while (event := self.next(limit))["e"] != name:
            pass
        return event

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event["e"] == name]

    def story(self) -> list[str]:
        return [event["e"] for event in self.events]

    def wait(self, limit: float = PATIENCE) -> int:
        return self.process.wait(limit)

    def sweep(self) -> tuple[int, Event]:
        done = subprocess.run(
            [PYTHON, "-I", "-S", str(self.archive), "sweep", self.tag],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stderr == b""
        return done.returncode, json.loads(done.stdout)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        for left in processes.marked(self.tag.encode(), set()):
            processes.send(left, signal.SIGKILL)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.pyz"
    path.write_bytes(agent_archive())
    return path


@pytest.fixture
def hire(archive: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts agents: `hire(command=None, **popen)`."""
    with contextlib.ExitStack() as stack:

        def start(command: list[str] | None = None, **popen: Any) -> Engine:
            engine = Engine(archive, tmp_path, command, **popen)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def engine(hire: Callable[..., Engine]) -> Engine:
    return hire()


# -- the story ------------------------------------------------------------------------------------------


def test_hello_comes_first_and_unasked(hire: Callable[..., Engine]) -> None:
    slurm = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "4", "SLURMD_NODENAME": "n7", "SLURM_RESTART_COUNT": "2"}
    engine = hire(env={**os.environ, **slurm})
    hello = engine.next()
    assert hello.pop("python").count(".") == 2
    assert hello == {
        "n": NONCE,
        "e": "hello",
        "host": os.uname().nodename,
        "pid": engine.process.pid,
        "node": "n7",
        "step": "12.4",
        "attempt": 2,
        "rank": 3,
    }


def test_a_step_on_a_component_is_called_by_the_components_own_id(hire: Callable[..., Engine]) -> None:
    slurm = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "4", "ALLOCD_STEP_JOB": "13"}
    assert hire(env={**os.environ, **slurm}).next()["step"] == "13.4"


def test_hello_without_slurm(hire: Callable[..., Engine]) -> None:
    engine = hire(env={"PATH": os.environ["PATH"]})
    hello = engine.next()
    assert (hello["node"], hello["step"], hello["attempt"]) == (os.uname().nodename, None, 0)


@pytest.mark.parametrize("code", [0, 3, 143, 255])
def test_a_rank_from_hello_to_bye(engine: Engine, code: int) -> None:
    pid = engine.start(["sh", "-c", f"echo out; echo err >&2; exit {code}"])
    assert engine.until("ended") == {"n": NONCE, "e": "ended", "code": code, "signal": None, "core": False}
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 0, "left": 0}
    assert not alive(pid)
    assert engine.story() == ["hello", "started", "ended", "gone"]
    assert (engine.out.read_text(), engine.err.read_text()) == ("out\n", "err\n")
    engine.say("bye", exit=17)
    assert engine.wait() == 17


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("kill -SEGV $$", 139)])
def test_without_bye_the_exit_code_is_the_ranks_own(engine: Engine, script: str, code: int) -> None:
    engine.start(["sh", "-c", f"ulimit -c 0; {script}"])
    ended = engine.until("ended")
    assert (ended["code"], ended["signal"]) == ((7, None) if code < 128 else (None, code - 128))
    engine.until("gone")
    engine.hang_up()  # after `gone` the end of the channel is a farewell like any other
    assert engine.wait() == code


def test_core_is_what_the_kernel_says(engine: Engine, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; ulimit -c unlimited 2>/dev/null; kill -ABRT $$"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], dict(os.environ))
    core = os.WCOREDUMP(os.waitpid(pid, 0)[1])
    engine.start(["sh", "-c", script])
    ended = engine.until("ended")
    assert (ended["signal"], ended["core"]) == (signal.SIGABRT, core)


def test_bye_before_the_start_is_a_farewell(engine: Engine) -> None:
    engine.say("bye", exit=0)
    assert engine.until("gone")["killed"] == 0
    assert engine.wait() == 0


@pytest.mark.parametrize("argv", [["false"], ["/nonexistent/program"]])
def test_after_a_failure_the_report_has_the_cpu_to_itself(engine: Engine, argv: list[str]) -> None:
    engine.spec(argv)
    engine.say("start")
    while engine.next()["e"] not in ("ended", "refused"):
        pass
    then = time.monotonic()
    engine.say("bye", exit=0)
    assert engine.wait() == 0
    assert time.monotonic() - then > 0.8 * agent.LINGER


@pytest.mark.parametrize(("own", "ordered", "pause"), [(0, 0, 0.0), (1, 15, 0.0), (1, 0, agent.LINGER)])
def test_only_a_failure_that_was_not_ordered_is_waited_for(own: int, ordered: int, pause: float) -> None:
    keeper = agent.Agent(NONCE, 0)
    keeper.codes["own"], keeper.ordered, keeper.told_at = own, ordered, time.monotonic() + 1000
    keeper.leave_soon()
    assert keeper.due == {keeper.leave: keeper.told_at + pause}


def test_an_agent_that_nobody_dismisses_leaves_in_the_end(hire: Callable[..., Engine]) -> None:
    engine = hire([PYTHON, "-B", "-I", "-S", "-c", CHANGED.format(change="agent.FAREWELL = 0.3")])
    engine.start(["sh", "-c", "exit 7"])
    engine.until("gone")
    assert engine.wait() == 7


# -- two phases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["stop", "kill"])
def test_stop_before_start_means_that_nothing_is_ever_started(engine: Engine, command: str) -> None:
    engine.spec(["touch", str(engine.root / "ran")])
    engine.say(command, signal=15, grace=5, exit=9)
    engine.say("start")
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 0, "left": 0}
    assert "start came while gone" in engine.until("note")["text"]
    engine.hang_up()
    assert engine.wait() == 9
    assert engine.story() == ["hello", "gone", "note"]
    assert not (engine.root / "ran").exists()


def test_signal_before_start_means_the_same(engine: Engine) -> None:
    engine.next()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.next() == {"n": NONCE, "e": "signalled", "signal": 15}
    assert engine.next()["e"] == "gone"
    engine.hang_up()
    assert engine.wait() == 143


def test_a_stop_right_behind_the_start_finds_the_rank_and_not_its_fork(engine: Engine) -> None:
    """Whatever the moment, the stop is delivered after exec: a fork with our handlers would swallow it."""
    engine.spec(["sleep", "300"], grace=30)
    engine.raw(
        json.dumps({"n": NONCE, "c": "start"}).encode()
        + b"\n"
        + json.dumps({"n": NONCE, "c": "stop", "signal": 15, "grace": 30, "exit": 1}).encode()
        + b"\n"
    )
    assert engine.until("ended")["signal"] == signal.SIGTERM
    assert engine.story() == ["hello", "started", "ended"]


def test_a_kill_right_behind_the_start(engine: Engine) -> None:
    engine.spec(["sleep", "300"])
    engine.raw(b'{"n":"f00d","c":"start"}\n{"n":"f00d","c":"kill","exit":5}\n')
    engine.until("gone")
    assert engine.story() in (["hello", "refused", "gone"], ["hello", "started", "ended", "gone"])
    engine.say("bye")
    assert engine.wait() == 5


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to break system calls")


def traced(*injections: str) -> list[str]:
    """A command that runs the agent with failing or slow system calls, see strace(1)."""
    return ["strace", "-f", "-o", os.devnull, *(f"--inject={each}" for each in injections), PYTHON, "-I", "-S"]


def unborn(engine: Engine) -> int:
    """The pid of the child that has been forked and hangs before its exec."""
    pid = engine.next()["pid"]
    path = Path(f"/proc/{pid}/task/{pid}/children")
    wait_for(path.read_text, "the child")
    return int(path.read_text())


@needs_strace
def test_a_stop_between_fork_and_exec_waits_for_the_exec(hire: Callable[..., Engine]) -> None:
    engine = hire(traced("chdir:delay_enter=500000"))
    engine.spec(["sleep", "300"], cwd="/")
    engine.say("start")
    unborn(engine)
    engine.say("stop", signal=15, grace=60, exit=0)
    assert engine.until("ended")["signal"] == signal.SIGTERM
    assert engine.story() == ["hello", "started", "ended"]


@needs_strace
def test_a_rank_that_dies_between_fork_and_exec_never_started(hire: Callable[..., Engine]) -> None:
    engine = hire(traced("chdir:delay_enter=3000000"))
    engine.spec(["sleep", "300"], cwd="/")
    engine.say("start")
    unborn(engine)
    engine.say("kill", exit=5)
    assert "before exec" in engine.until("refused")["error"]
    assert engine.until("gone")["killed"] == 1
    assert engine.story() == ["hello", "refused", "gone"]


@needs_strace
def test_a_signal_to_the_unborn_is_not_taken_for_one_to_the_agent(hire: Callable[..., Engine]) -> None:
    """Its handlers and its wakeup pipe are still the agent's own."""
    engine = hire(traced("setsid:delay_enter=500000"))
    engine.spec(["sleep", "300"])
    engine.say("start")
    os.kill(unborn(engine), signal.SIGTERM)
    assert "before exec" in engine.until("refused")["error"]
    engine.until("gone")
    assert engine.story() == ["hello", "refused", "gone"]


@needs_strace
def test_a_main_process_that_dies_while_orphans_are_collected(hire: Callable[..., Engine]) -> None:
    """Alive when it was asked for, dead when any child was: its status comes with the second question."""
    engine = hire(traced("wait4:delay_exit=300000"))
    engine.start(["sleep", "0.1"])
    assert engine.until("ended")["code"] == 0
    assert engine.until("gone")["left"] == 0


def test_start_needs_a_whole_spec(engine: Engine) -> None:
    engine.say("spec", part='{"argv":', more=True)
    engine.say("start")
    assert engine.until("refused")["phase"] == "spec"
    engine.until("gone")


def test_a_big_spec_travels_in_pieces(engine: Engine) -> None:
    values = {f"BIG{at}": chr(0x3B1 + at) * 20_000 for at in range(8)}
    code = "import os; print(*(len(os.environ[f'BIG{at}']) for at in range(8)))"
    engine.start([sys.executable, "-X", "utf8", "-c", code], env=values)
    engine.until("gone")
    assert engine.lines() == [" ".join(["20000"] * 8)]


REFUSALS: list[tuple[str, Mapping[str, Any], str, int, int]] = [
    ("no such program", {"argv": ["/nonexistent/program"]}, "exec", errno.ENOENT, 127),
    ("not on PATH", {"argv": ["no-such-program-anywhere"]}, "exec", errno.ENOENT, 127),
    ("not executable", {"argv": ["{root}/plain"]}, "exec", errno.EACCES, 126),
    ("a directory", {"argv": ["/"]}, "exec", errno.EACCES, 126),
    ("no interpreter named", {"argv": ["{root}/headless"]}, "exec", errno.ENOEXEC, 126),
    ("bad name in env", {"argv": ["true"], "env": {"A=B": "1"}}, "exec", 0, 126),
    ("cwd missing", {"argv": ["true"], "cwd": "/nonexistent"}, "cwd", errno.ENOENT, 126),
    ("cwd no directory", {"argv": ["true"], "cwd": "{root}/plain"}, "cwd", errno.ENOTDIR, 126),
    ("out cannot be made", {"argv": ["true"], "out": "/nonexistent/x"}, "out", errno.ENOENT, 126),
    ("err is a directory", {"argv": ["true"], "err": "/"}, "err", errno.EISDIR, 126),
    ("too long for the kernel", {"argv": ["true", "x" * 200_000]}, "exec", errno.E2BIG, 126),
    ("NUL", {"argv": ["true", "a\0b"]}, "spec", 0, 126),
    ("no argv", {"argv": []}, "spec", 0, 126),
    ("argv a string", {"argv": "true"}, "spec", 0, 126),
    ("no tag", {"argv": ["true"], "tag": ""}, "spec", 0, 126),
    ("env a list", {"argv": ["true"], "env": ["A=1"]}, "spec", 0, 126),
    ("grace not finite", {"argv": ["true"], "grace": float("nan")}, "spec", 0, 126),
    ("a boolean signal", {"argv": ["true"], "stop_signal": True}, "spec", 0, 126),
]


@pytest.mark.parametrize(("spec", "phase", "number", "code"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(engine: Engine, spec: Mapping[str, Any], phase: str, number: int, code: int) -> None:
    (engine.root / "plain").write_text("")
    (engine.root / "headless").write_text("true\n")
    (engine.root / "headless").chmod(0o755)
    engine.spec(**json.loads(json.dumps(spec).replace("{root}", str(engine.root))))
    engine.say("start")
    refused = engine.until("refused")
    assert (refused["phase"], refused["errno"]) == (phase, number)
    assert refused["error"]
    engine.until("gone")
    assert not engine.seen("started")
    assert not engine.seen("ended")
    engine.hang_up()
    assert engine.wait() == code


# -- what a rank is given -------------------------------------------------------------------------------


def test_environment(hire: Callable[..., Engine]) -> None:
    engine = hire(env={"PATH": os.environ["PATH"], "KEEP": "1", "DROP": "2", "CHANGE": "3"})
    engine.start(["env", "-0"], unset=["DROP", "NEVER_THERE"], env={"CHANGE": "4", "RAW": "\udcff", "EMPTY": ""})
    engine.until("gone")
    given = dict(item.split(b"=", 1) for item in engine.out.read_bytes().split(b"\0")[:-1])
    assert {name: given.get(name) for name in (b"KEEP", b"DROP", b"CHANGE", b"RAW", b"EMPTY")} == {
        b"KEEP": b"1",
        b"DROP": None,
        b"CHANGE": b"4",
        b"RAW": b"\xff",
        b"EMPTY": b"",
    }
    assert given[b"ALLOCD_TAG"] == engine.tag.encode()


SPOIL = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_signals_are_reset_whatever_the_agent_was_given(hire: Callable[..., Engine]) -> None:
    engine = hire([sys.executable, "-c", SPOIL, PYTHON, "-I", "-S"])
    engine.start(["cat", "/proc/self/status"])
    engine.until("gone")
    status = dict(line.split(":\t") for line in engine.lines())
    library = (
        1 << 31 | 1 << 32
    )  # 32 and 33 are the C library's own: it lets nobody set them, and inherits them as they were
    assert [int(status[name], 16) & ~library for name in ("SigBlk", "SigIgn", "SigCgt")] == [0, 0, 0]


def test_a_spoilt_agent_still_hears_signals(hire: Callable[..., Engine]) -> None:
    engine = hire([sys.executable, "-c", SPOIL, PYTHON, "-I", "-S"])
    engine.next()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.next() == {"n": NONCE, "e": "signalled", "signal": 15}


def test_only_three_descriptors_are_inherited(hire: Callable[..., Engine]) -> None:
    reader, writer = os.pipe()
    try:
        engine = hire(pass_fds=(reader, writer))
        code = (
            "import os\n"
            "for fd in range(256):\n"
            "    try: os.fstat(fd)\n"
            "    except OSError: continue\n"
            "    print(fd, os.readlink(f'/proc/self/fd/{fd}'))\n"
        )
        engine.start([sys.executable, "-I", "-S", "-c", code])
        engine.until("gone")
    finally:
        os.close(reader)
        os.close(writer)
    assert engine.lines() == ["0 /dev/null", f"1 {engine.out}", f"2 {engine.err}"]


def test_a_session_of_its_own_in_the_directory_it_asked_for(engine: Engine) -> None:
    code = "import os; print(os.getpid() == os.getsid(0) == os.getpgid(0), os.getcwd())"
    engine.start([sys.executable, "-I", "-S", "-c", code], cwd=str(engine.root))
    engine.until("gone")
    assert engine.lines() == [f"True {engine.root}"]


def test_logs_are_appended_to(engine: Engine) -> None:
    engine.out.write_text("before\n")
    mask = os.umask(0o022)
    os.umask(mask)
    engine.start(["sh", "-c", "echo one; echo two >&2; echo three"], err=str(engine.out))
    engine.until("gone")
    assert engine.lines() == ["before", "one", "two", "three"]
    assert not engine.err.exists()


def test_the_umask_decides_on_a_logs_mode(hire: Callable[..., Engine]) -> None:
    engine = hire(umask=0o027)
    engine.start(["true"])
    engine.until("gone")
    assert stat.S_IMODE(engine.out.stat().st_mode) == 0o640


# -- stopping -------------------------------------------------------------------------------------------

COUNTING = """
import os, signal, time
def say(line):
    os.write(1, line.encode() + b"\\n")  # in one piece, whatever signal comes
signal.signal(signal.SIGTERM, lambda number, frame: say(f"heard {number}"))
signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
say("ready")
while True:
    time.sleep(60)
"""


def test_stop_is_a_signal_and_its_exit_is_the_agents(engine: Engine) -> None:
    engine.python(COUNTING)
    engine.say("stop", signal=signal.SIGUSR1, grace=60, exit=42)
    assert engine.until("ended")["code"] == 9
    assert engine.until("gone")["killed"] == 0
    engine.hang_up()
    assert engine.wait() == 42


def test_a_rank_that_ignores_term_is_killed_after_the_grace(engine: Engine) -> None:
    pid = engine.python(COUNTING)
    then = time.monotonic()
    engine.say("stop", signal=15, grace=0.3, exit=1)
    assert engine.until("ended")["signal"] == signal.SIGKILL
    assert time.monotonic() - then >= 0.3
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 1, "left": 0}
    assert engine.lines() == ["ready", "heard 15"]
    assert not alive(pid)


@pytest.mark.parametrize("graces", [(60.0, 1.0), (1.0, 60.0)])  # seconds: the shorter is for the handler
def test_a_second_stop_can_only_hasten_and_is_not_heard_twice(engine: Engine, graces: tuple[float, float]) -> None:
    engine.python(COUNTING)
    for exit_code, grace in enumerate(graces, 20):
        engine.say("stop", signal=15, grace=grace, exit=exit_code)
    assert engine.until("ended", limit=10)["signal"] == signal.SIGKILL
    assert engine.lines() == ["ready", "heard 15"]
    engine.until("gone")
    engine.hang_up()
    assert engine.wait() == 21


def test_a_stop_with_a_wrong_detail_still_stops(engine: Engine) -> None:
    engine.python(COUNTING, stop_signal=int(signal.SIGUSR1), grace=60)
    engine.say("stop", signal="TERM", grace=-1, exit=1000)
    assert engine.until("ended")["code"] == 9
    assert len(engine.seen("note")) == 3
    engine.until("gone")
    engine.hang_up()
    assert engine.wait() == processes.EXIT_FAULT


def test_kill_takes_the_whole_tree_at_once(engine: Engine) -> None:
    engine.start(["sh", "-c", "setsid sleep 300 & sleep 300 & echo $!; wait"], grace=60)
    wait_for(engine.lines, "the rank's children")
    engine.say("kill", exit=3)
    assert engine.until("ended")["signal"] == signal.SIGKILL
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 3, "left": 0}


def test_a_suspended_rank_hears_the_stop(engine: Engine) -> None:
    pid = engine.python(COUNTING)
    os.kill(pid, signal.SIGSTOP)
    engine.say("stop", signal=signal.SIGUSR1, grace=5, exit=0)
    assert engine.until("ended")["code"] == 9


def test_a_signal_to_the_agent_stops_the_rank_as_the_spec_says(engine: Engine) -> None:
    engine.python(COUNTING, stop_signal=int(signal.SIGUSR1), grace=60)
    engine.process.send_signal(signal.SIGINT)
    assert engine.until("signalled")["signal"] == signal.SIGINT
    assert engine.until("ended")["code"] == 9
    engine.until("gone")
    engine.hang_up()
    assert engine.wait() == 9


def test_slurms_user_signals_are_reported_and_harm_nobody(engine: Engine) -> None:
    pid = engine.start(["sleep", "300"])
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        engine.process.send_signal(number)
        assert engine.until("signalled")["signal"] == number
    engine.say("ping")
    assert engine.next()["e"] == "pong"
    assert alive(pid)


# -- a rank is a tree -----------------------------------------------------------------------------------

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid())
    time.sleep(300)
os.wait()
while not os.fstat(1).st_size:
    time.sleep(0.002)
if "stay" in sys.argv:
    time.sleep(300)
os._exit(4)
"""


def daemon(engine: Engine, *manners: str, **spec: Any) -> int:
    """A rank with a descendant that went through setsid and two forks; returns that one's pid."""
    engine.start([sys.executable, "-I", "-S", "-u", "-c", DAEMON, *manners], **spec)
    wait_for(engine.lines, "the daemon's pid")
    return int(engine.lines()[0])


def test_what_the_main_process_leaves_behind_gets_term(engine: Engine) -> None:
    engine.start(["sh", "-c", "sleep 300 & echo $!; exit 4"], grace=60)
    assert engine.until("ended")["code"] == 4
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 0, "left": 0}
    assert not alive(int(engine.lines()[0]))


def test_a_daemon_gets_term_too(engine: Engine) -> None:
    pid = daemon(engine, grace=60)
    assert engine.until("gone")["killed"] == 0
    assert not alive(pid)
    assert engine.story() == ["hello", "started", "ended", "gone"]


def test_a_deaf_daemon_is_killed_after_the_grace(engine: Engine) -> None:
    pid = daemon(engine, "deaf", grace=0.2)
    engine.until("ended")
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 1, "left": 0}
    assert not alive(pid)


def test_a_stop_takes_the_daemon_along(engine: Engine) -> None:
    pid = daemon(engine, "deaf", "stay")
    engine.say("stop", signal=15, grace=0.2, exit=0)
    assert engine.until("ended")["signal"] == signal.SIGTERM
    assert engine.until("gone")["killed"] == 1
    assert not alive(pid)


def test_what_heard_the_stop_does_not_hear_it_again_as_a_leftover(engine: Engine) -> None:
    """The shell dies of the TERM that its group gets; its child, in the same group, hears it once."""
    child = f"{sys.executable} -I -S -u -c '{COUNTING}'"
    engine.start(["sh", "-c", f"{child} & wait"])
    wait_for(engine.lines, "the child")
    engine.say("stop", signal=15, grace=0.3, exit=0)
    engine.until("gone")
    assert engine.lines() == ["ready", "heard 15"]
    assert engine.events[-1]["killed"] == 1


def test_the_grace_of_leftovers_is_shortened_by_a_stop(engine: Engine) -> None:
    pid = daemon(engine, "deaf", grace=3600)
    engine.until("ended")
    engine.say("stop", signal=15, grace=0, exit=0)
    assert engine.until("gone", limit=10)["killed"] == 1
    assert not alive(pid)


def test_one_that_got_away_is_known_by_its_tag(engine: Engine) -> None:
    """Not a descendant: started by somebody else (a container daemon) with the rank's environment."""
    stray = subprocess.Popen(["sleep", "300"], env={**os.environ, "ALLOCD_TAG": engine.tag})
    other = subprocess.Popen(["sleep", "300"], env={**os.environ, "ALLOCD_TAG": engine.tag + "0"})
    try:
        engine.start(["true"], grace=60)
        engine.until("ended")
        assert stray.wait(PATIENCE) == -signal.SIGTERM
        assert engine.until("gone")["killed"] == 0
        assert other.poll() is None
    finally:
        for each in (stray, other):
            each.kill()
            each.wait(PATIENCE)


def test_a_thread_that_outlives_the_first_one_is_alive(engine: Engine) -> None:
    """Its process looks like a zombie in /proc, and is none."""
    code = (
        "import ctypes, os, signal, threading, time\n"
        "if os.fork():\n"
        "    while not os.fstat(1).st_size: time.sleep(0.002)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "def go_on():\n"
        "    while open('/proc/self/stat').read().split()[2] != 'Z': time.sleep(0.002)\n"
        "    print(os.getpid())\n"
        "    time.sleep(300)\n"
        "threading.Thread(target=go_on).start()\n"
        "exit_thread = ctypes.PyDLL(None).syscall if os.uname().machine != 'x86_64' else ctypes.CDLL(None).syscall\n"
        "exit_thread(60, 0)\n"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2) is x86_64's")
    engine.start([sys.executable, "-I", "-S", "-u", "-c", code], grace=0.2)
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 1, "left": 0}
    assert not alive(int(engine.lines()[0]))


@pytest.mark.slow
def test_a_zombie_is_not_alive(engine: Engine) -> None:
    """A debugger holds a dead process: nobody else can reap it, and nothing of it runs any more."""
    seize, libc = 0x4206, ctypes.CDLL(None, use_errno=True)
    pid = daemon(engine, "deaf", "stay")
    if libc.ptrace(seize, pid, None, None):
        pytest.skip(f"ptrace is not permitted here: {os.strerror(ctypes.get_errno())}")
    engine.say("stop", signal=15, grace=0.1, exit=0)
    assert engine.until("gone") == {"n": NONCE, "e": "gone", "killed": 1, "left": 0}
    seen = processes.process(pid)
    assert seen is not None
    assert not seen.alive
    os.waitpid(pid, 0x40000000)  # __WALL


def test_a_rank_that_forks_faster_than_one_looks(engine: Engine) -> None:
    """Every generation is a new process, and most live for a shorter time than one look at /proc takes."""
    if not Path("/proc/self/task", str(os.getpid()), "children").exists():
        pytest.skip("the kernel keeps no list of children")
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('off')\n"
        "while True:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
    )
    engine.start([sys.executable, "-I", "-S", "-u", "-c", code], grace=0.1)
    engine.until("ended")
    gone = engine.until("gone", limit=agent.KILL_LIMIT - 2)  # found, and not given up
    assert (gone["left"], gone["killed"] > 0) == (0, True)


NOBODY = 65534


def nobodys_python() -> str | None:
    """An interpreter that an ordinary user may run; root's own may be hidden in root's home."""
    for python in (PYTHON, sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            done = subprocess.run([python, "-I", "-S", "-c", ""], user=NOBODY, capture_output=True, check=False)
            if done.returncode == 0:
                return os.path.realpath(python)
    return None


BECOME_ROOT = """
import os, time
os.setresuid(0, 0, 0)
if os.fork():
    time.sleep(300)
os.setsid()
print(os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def untouchable() -> Iterator[Engine]:
    """An ordinary user's agent whose rank has two processes that became root's."""
    python = nobodys_python() if os.getuid() == 0 else None
    if python is None:
        pytest.skip("needs root, and an interpreter that nobody may run")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        root = Path(name)
        root.chmod(0o777)
        (root / "agent.pyz").write_bytes(agent_archive())
        become_root = root / "python"
        shutil.copy(python, become_root)
        become_root.chmod(0o4755)
        engine = Engine(root / "agent.pyz", root, [python, "-I", "-S"], user=NOBODY, group=NOBODY, extra_groups=[])
        try:
            rank = ["sh", "-c", '"$0" -S -c "$1" & wait', str(become_root), BECOME_ROOT]
            main = engine.start(rank, env={"PYTHONHOME": str(Path(python).parents[1])})
            wait_for(lambda: engine.lines() or not alive(main), "root's process")
            yield engine
        finally:
            engine.close()


@pytest.mark.slow
def test_another_users_processes_are_reported_and_given_up_after_ten_seconds(untouchable: Engine) -> None:
    then = time.monotonic()
    untouchable.say("stop", signal=15, grace=0.1, exit=0)
    gone = untouchable.until("gone")
    assert 9 < time.monotonic() - then < 15
    assert (gone["killed"], gone["left"]) == (0, 2)
    notes = [note["text"] for note in untouchable.seen("note")]
    assert len([text for text in notes if "belongs to another user" in text]) == 2
    assert "given up" in notes[-1]
    untouchable.say("bye", exit=4)
    assert untouchable.wait() == 4


def test_another_users_processes_cannot_hold_an_agent_without_an_engine(untouchable: Engine) -> None:
    then = time.monotonic()
    untouchable.hang_up()
    untouchable.closed()
    assert time.monotonic() - then < 2.2  # the budget, and a moment for a busy machine
    assert untouchable.wait() == 70


# -- the channel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("manners", [("stay",), ("deaf", "stay")])
def test_the_end_of_the_channel_ends_everything_within_two_seconds(engine: Engine, manners: tuple[str, ...]) -> None:
    pid = daemon(engine, *manners, grace=3600)
    then = time.monotonic()
    engine.hang_up()
    engine.closed()
    assert time.monotonic() - then < 2.0
    assert engine.wait() == 70
    assert not alive(pid)
    assert engine.sweep() == (0, {"e": "swept", "killed": 0, "left": 0})


def test_an_engine_that_says_nothing_for_too_long_counts_as_gone(engine: Engine) -> None:
    pid = engine.start(["sleep", "300"], lease=0.5)
    assert engine.until("ended")["signal"] == signal.SIGTERM
    assert engine.wait() == processes.EXIT_LOST
    assert "no word from the engine" in engine.seen("note")[0]["text"]
    assert not alive(pid)


def test_every_ping_renews_the_lease(engine: Engine) -> None:
    engine.start(["sleep", "300"], lease=1.0)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        engine.say("ping")
        assert engine.next()["e"] == "pong"
        with pytest.raises(AssertionError, match="silent"):
            engine.line(0.1)
    assert engine.until("ended")["signal"] == signal.SIGTERM


def test_the_end_of_the_channel_is_term_at_first(engine: Engine) -> None:
    engine.python(COUNTING, stop_signal=int(signal.SIGUSR1), grace=3600)
    engine.hang_up()
    assert engine.wait() == 70
    assert engine.lines() == ["ready", "heard 15"]


def test_the_end_of_the_channel_before_the_start(engine: Engine) -> None:
    engine.spec(["touch", str(engine.root / "ran")])
    engine.raw(b'{"n":"f00d","c":"start"}')  # torn: no newline
    engine.hang_up()
    assert engine.wait() == 70
    assert not (engine.root / "ran").exists()


def test_a_channel_that_is_no_pipe(hire: Callable[..., Engine]) -> None:
    engine = hire(stdin=subprocess.DEVNULL)
    assert engine.wait() == 70
    assert engine.next()["e"] == "hello"


def test_a_reader_that_went_away_ends_everything_too(engine: Engine) -> None:
    pid = engine.start(["sleep", "300"])
    assert engine.process.stdout is not None
    engine.process.stdout.close()
    engine.say("ping")
    assert engine.wait() == 70
    assert not alive(pid)


def test_a_reader_that_does_not_read_cannot_hold_up_a_stop(engine: Engine) -> None:
    pid = engine.start(["sleep", "300"])
    assert engine.process.stdin is not None
    assert engine.process.stdout is not None
    os.set_blocking(engine.process.stdin.fileno(), False)
    ping = json.dumps({"n": NONCE, "c": "ping"}).encode() + b"\n"
    flood, sent = ping * 20_000, 0  # 440 kB of pongs: the pipe takes 64
    while sent < len(flood):
        select.select([], [engine.process.stdin], [], PATIENCE)
        sent += os.write(engine.process.stdin.fileno(), flood[sent : sent + 4096])
    os.set_blocking(engine.process.stdin.fileno(), True)
    engine.say("stop", signal=15, grace=60, exit=6)
    wait_for(lambda: not alive(pid), "the rank's end")
    assert engine.until("ended")["signal"] == 15
    assert engine.until("gone")["left"] == 0
    assert 1000 < len(engine.seen("pong")) < 20_000
    engine.say("bye", exit=6)
    assert engine.wait() == 6


def test_foreign_lines_are_nobodys_business(engine: Engine) -> None:
    engine.next()
    for line in (
        b"",
        b"Welcome to node n7!",
        b"\xff\xfe\x00",
        b"[" * 900,
        b"null",
        b'"f00d"',
        b'["f00d"]',
        b'{"c":"kill","exit":1}',
        b'{"n":"beef","c":"kill","exit":1}',
        b'{"n":["f00d"],"c":"kill","exit":1}',
        b"x" * 100_000,
    ):
        engine.raw(line + b"\n")
    engine.say("ping")
    assert engine.next()["e"] == "pong"


def test_a_command_in_crumbs(engine: Engine) -> None:
    engine.next()
    for byte in b'{"n":"f00d","c":"ping"}\r\n{"n":"f00d","c":"ping"}\n':
        engine.raw(bytes([byte]))
    assert [engine.next()["e"], engine.next()["e"]] == ["pong", "pong"]


def test_what_it_does_not_understand_is_noted(engine: Engine) -> None:
    engine.next()
    engine.say("dance")
    assert "'dance'" in engine.next()["text"]
    engine.raw(b'{"n":"f00d"}\n')
    assert "None" in engine.next()["text"]
    engine.raw(b'{"n":"f00d","c":["stop"]}\n')
    assert "stop" in engine.next()["text"]
    engine.say("start" + "x" * 800)
    assert "unknown command" in engine.next()["text"]


def test_the_line_limit(engine: Engine) -> None:
    engine.next()
    for size, answer in ((channel.LINE_LIMIT, "pong"), (channel.LINE_LIMIT + 1, "note"), (300_000, "note")):
        line = json.dumps({"n": NONCE, "c": "ping", "pad": ""}).encode()
        engine.raw(line.replace(b'""', b'"' + b"x" * (size - len(line)) + b'"') + b"\n")
        assert engine.next()["e"] == answer


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["text", "error", "host", "pid"]), st.text(max_size=4000) | st.integers()),
    st.sampled_from(["note", "hello"]),
)
def test_no_line_is_longer_than_the_limit(fields: dict[str, Any], name: str) -> None:
    line = channel.encode({"n": NONCE, "e": name, **fields})
    assert len(line) <= channel.LINE_LIMIT
    assert line.index(b"\n") == len(line) - 1
    told = json.loads(line)
    assert (told.pop("n"), told.pop("e"), set(told)) == (NONCE, name, set(fields))
    assert all(str(fields[key]).startswith(str(value)) for key, value in told.items())


@settings(deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=6), st.integers(min_value=1, max_value=700))
def test_lines_do_not_depend_on_how_they_arrive(texts: list[bytes], step: int) -> None:
    texts = [text.replace(b"\n", b"") for text in texts]
    stream = b"".join(text + b"\n" for text in texts) + b"rest"
    cutter = channel.Lines()
    found = [line for at in range(0, len(stream), step) for line in cutter.feed(stream[at : at + step])]
    assert found == [text[: channel.LINE_LIMIT + 1] for text in texts]


# -- when the agent itself dies -------------------------------------------------------------------------


def test_a_killed_agent_takes_the_main_process_along_and_sweep_does_the_rest(engine: Engine) -> None:
    pid = daemon(engine, "deaf", "stay")
    main = engine.until("started")["pid"] if not engine.seen("started") else engine.seen("started")[0]["pid"]
    engine.process.kill()
    engine.wait()
    wait_for(lambda: not alive(main), "the main process's end")
    assert alive(pid)
    assert engine.sweep() == (0, {"e": "swept", "killed": 1, "left": 0})
    assert not alive(pid)


def test_sweep_spares_other_tags(engine: Engine) -> None:
    other = subprocess.Popen(["sleep", "300"], env={**os.environ, "ALLOCD_TAG": engine.tag + "0"})
    unnamed = subprocess.Popen(["sleep", "300"], env={**os.environ, "X_ALLOCD_TAG": engine.tag})
    try:
        assert engine.sweep() == (0, {"e": "swept", "killed": 0, "left": 0})
        assert (other.poll(), unnamed.poll()) == (None, None)
    finally:
        for each in (other, unnamed):
            each.kill()
            each.wait(PATIENCE)


def test_a_defect_of_the_agent_leaves_no_rank_behind(hire: Callable[..., Engine]) -> None:
    broken = CHANGED.format(change="agent.COMMANDS['ping'] = lambda *_: 1 / 0")
    engine = hire([PYTHON, "-B", "-I", "-S", "-c", broken], stderr=subprocess.PIPE)
    pid = daemon(engine, "deaf", "stay")
    engine.say("ping")
    assert engine.wait() == processes.EXIT_FAULT
    assert engine.process.stderr is not None
    assert b"ZeroDivisionError" in engine.process.stderr.read()
    wait_for(lambda: not alive(pid), "the daemon's end")


@pytest.mark.parametrize("arguments", [[], ["run", "a"], ["run", "a", "b"], ["run", "", "1"], ["sweep"], ["sweep", ""]])
def test_usage(archive: Path, arguments: list[str]) -> None:
    done = subprocess.run(
        [PYTHON, "-I", "-S", str(archive), *arguments], capture_output=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (processes.EXIT_USAGE, b"")
    assert done.stderr.startswith(b"usage: ")


# -- processes ------------------------------------------------------------------------------------------


def stat_line(pid: int, parent: int, name: str = "sh", state: str = "S", threads: int = 1) -> processes.Process:
    fields = [state, parent, 7, 7, 0, -1, 0, *[0] * 10, threads, 0, 999, 0]
    return processes.Process(pid, f"{pid} ({name}) {' '.join(map(str, fields))}\n".encode())


@pytest.mark.parametrize("name", ["sh", "a b", ") Z 1 (", "((", ")\n("])
def test_a_process_may_have_any_name(name: str) -> None:
    seen = stat_line(40, 30, name)
    assert (seen.parent, seen.group, seen.alive, seen.identity) == (30, 7, True, (40, 999))


def test_descendants_are_found_without_loops_or_strangers() -> None:
    chain = [
        stat_line(pid, parent) for pid, parent in ((12, 11), (10, 1), (11, 10), (20, 1), (13, 10), (30, 31), (31, 30))
    ]
    assert [each.pid for each in processes.descendants(chain, 10)] == [11, 13, 12]
    assert [each.pid for each in processes.descendants(chain, 30)] == [31, 30]


def test_a_number_that_was_reused_is_not_signalled() -> None:
    child = subprocess.Popen(["sleep", "300"])
    try:
        seen = processes.process(child.pid)
        assert seen is not None
        seen.identity = (child.pid, seen.identity[1] - 1)  # as if seen before this process was born
        assert processes.send(seen, signal.SIGKILL) is False
        assert child.poll() is None
        again = processes.process(child.pid)
        assert again is not None
        assert processes.send(again, signal.SIGTERM) is True
        assert child.wait(PATIENCE) == -signal.SIGTERM
        assert processes.send(again, signal.SIGTERM) is False
    finally:
        child.kill()
        child.wait(PATIENCE)


def test_what_was_struck_counts_until_it_has_ended() -> None:
    """Also without its environment, which a dying process loses first."""
    child = subprocess.Popen(["sleep", "300"])
    try:
        seen = processes.process(child.pid)
        assert seen is not None
        assert [each.pid for each in processes.marked(b"no such tag", {seen.identity})] == [child.pid]
        assert processes.marked(b"no such tag", {(child.pid, seen.identity[1] - 1)}) == []
        child.kill()
        wait_for(lambda: not alive(child.pid), "the child's end")
        assert processes.marked(b"no such tag", {seen.identity}) == []
    finally:
        child.kill()
        child.wait(PATIENCE)


def test_kernels_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    child = subprocess.Popen(["sleep", "300"])
    try:
        seen = processes.process(child.pid)
        assert seen is not None
        assert processes.send(seen, signal.SIGTERM) is True
        assert child.wait(PATIENCE) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait(PATIENCE)


# -- hints ----------------------------------------------------------------------------------------------


def watching(engine: Engine, *trees: tuple[Path, int]) -> None:
    """Start a rank, and wait for the hint that says that its directories are watched."""
    engine.start(["sleep", "300"], watch=[[str(engine.root), str(directory), depth] for directory, depth in trees])
    engine.until("hint")
    quiet(engine)


def quiet(engine: Engine) -> None:
    """No hint is on its way: an answer that was asked for later than the longest pause between two has come first."""
    while True:
        before = len(engine.seen("hint"))
        time.sleep(2 * agent.HINT_PAUSE)
        engine.say("ping")
        engine.until("pong")
        if len(engine.seen("hint")) == before:
            return


def test_a_file_that_appears_is_a_hint(engine: Engine, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    watching(engine, (place, 0))
    for number in range(10):
        (place / f"{number}.tmp").write_text("x")
        engine.until("hint")
        quiet(engine)
        (place / f"{number}.tmp").rename(place / f"{number}.json")
        engine.until("hint")
        quiet(engine)


def test_many_events_are_few_hints_and_the_last_is_among_them(engine: Engine, tmp_path: Path) -> None:
    place = tmp_path / "out"
    place.mkdir()
    watching(engine, (place, 0))
    before, begun = len(engine.seen("hint")), time.monotonic()
    for number in range(2000):
        (place / f"{number}.json").touch()
    engine.until("hint")
    quiet(engine)
    assert 1 <= len(engine.seen("hint")) - before <= 2 + (time.monotonic() - begun) / agent.HINT_PAUSE


def test_a_directory_may_be_late_and_deep_and_replaced(engine: Engine, tmp_path: Path) -> None:
    place = tmp_path / "a/b"
    watching(engine, (place, 1))
    place.mkdir(parents=True)
    engine.until("hint")
    quiet(engine)
    (place / "n0").mkdir()
    engine.until("hint")
    quiet(engine)
    (place / "n0/rank.json").touch()
    engine.until("hint")
    quiet(engine)
    place.rename(tmp_path / "a/old")
    place.mkdir()
    engine.until("hint")
    quiet(engine)
    (place / "rank.json").touch()
    engine.until("hint")


def test_an_agent_that_cannot_watch_says_so_and_works(hire: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    changed = CHANGED.format(change="from supervisor.watch import trees\ntrees.LIMIT = 1")
    engine = hire(command=[PYTHON, "-I", "-S", "-c", changed])
    engine.start(["sleep", "300"], watch=[[str(tmp_path), str(tmp_path / "d"), 1]])
    assert "more than 1 directories" in engine.until("note")["text"]
    engine.say("kill", exit=5)
    engine.until("gone")
    engine.say("bye")
    assert engine.wait() == 5


def test_a_file_system_that_does_not_answer_holds_the_hints_only(hire: Callable[..., Engine], tmp_path: Path) -> None:
    hangs = (
        "from supervisor.watch import trees; import os, time\n"
        f"trees.Trees.settle = lambda *_: (os.mkdir({str(tmp_path / 'hangs')!r}), time.sleep(300))"
    )
    engine = hire(command=[PYTHON, "-I", "-S", "-c", CHANGED.format(change=hangs)])
    engine.start(["sleep", "300"], watch=[[str(tmp_path), str(tmp_path), 0]])
    wait_for((tmp_path / "hangs").exists, "the thread that hangs")
    engine.say("ping")
    engine.until("pong")
    engine.say("stop", signal=15, grace=5, exit=4)
    engine.until("gone")
    engine.say("bye")
    assert engine.wait() == 4


@pytest.mark.parametrize(
    "watch", ["x", [["/tmp", "/tmp"]], [["/", 1, 2]], [["/tmp", "/tmp", -1]], [["/", "tmp", 0]], ["/tmp"]]
)
def test_a_watch_that_is_none_is_refused(engine: Engine, watch: Any) -> None:
    engine.spec(["true"], watch=watch)
    assert engine.until("refused")["phase"] == "spec"


# -- what it costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("trees", [0, 100])
def test_an_idle_agent_does_not_wake_up(engine: Engine, tmp_path: Path, trees: int) -> None:
    """Measured over a time in which any tick of any thread would show."""
    engine.start(
        ["sleep", "300"], watch=[[str(tmp_path), str(tmp_path / "d" / str(number)), 3] for number in range(trees)]
    )
    if trees:
        engine.until("hint")
        quiet(engine)
    engine.say("ping")
    engine.until("pong")
    wait_for(lambda: status_of(engine.process.pid)["State"].strip().startswith("S"), "the agent's rest")
    tasks = os.listdir(f"/proc/{engine.process.pid}/task")
    assert len(tasks) == (2 if trees else 1)

    def wakes() -> list[str]:
        return [status_of(int(task))["voluntary_ctxt_switches"] for task in tasks]

    before = wakes()
    time.sleep(1.2)
    assert wakes() == before


@pytest.mark.parametrize("watch", [False, True])
def test_memory(engine: Engine, tmp_path: Path, watch: bool) -> None:
    engine.start(["sleep", "300"], watch=[[str(tmp_path), str(tmp_path), 0]] if watch else [])
    for _ in range(500):
        engine.say("ping")
        engine.until("pong")
    size = int(status_of(engine.process.pid)["VmHWM"].split()[0])
    print(f"\nthe agent takes {size} kB")
    if sys.executable == PYTHON:  # another version has to compile the source first
        assert size < 12 * 1024


# -- logs on the disk -----------------------------------------------------------------------------------


@needs_strace
def test_logs_that_do_not_reach_the_disk_are_noted(hire: Callable[..., Engine]) -> None:
    engine = hire(traced("fsync:error=EIO"))
    engine.start(["true"])
    engine.until("gone")
    assert engine.story() == ["hello", "started", "ended", "note", "gone"]
    assert os.strerror(errno.EIO) in engine.seen("note")[0]["text"]


@needs_strace
@pytest.mark.slow
def test_a_dead_file_system_does_not_silence_the_agent(hire: Callable[..., Engine]) -> None:
    engine = hire(traced("fsync:delay_enter=8000000"))
    engine.start(["true"])
    engine.until("ended")
    engine.say("ping")
    assert engine.until("pong", limit=2)
    then = time.monotonic()
    engine.until("gone", limit=agent.FLUSH_LIMIT + 2)
    assert time.monotonic() - then > agent.FLUSH_LIMIT - 2
    assert "in time" in engine.seen("note")[0]["text"]


# -- the archive ----------------------------------------------------------------------------------------


def repack(data: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return out.getvalue()


def greets(archive: Path, root: Path, python: str) -> bool:
    engine = Engine(archive, root, [python, "-I", "-S"])
    try:
        engine.start(["sh", "-c", "sleep 300 & exit 5"])
        ended = engine.until("ended")["code"] == 5
        engine.until("gone")
        engine.say("bye", exit=11)
        return ended and engine.wait() == 11
    finally:
        engine.close()


def test_the_archive_is_the_same_every_time() -> None:
    code = "import sys; from supervisor.agent.build import agent_archive as a; sys.stdout.buffer.write(a())"
    root = str(HERE.parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=root, timeout=PATIENCE, check=True)
    assert agent_archive() == agent_archive() == done.stdout


def test_the_archive_starts_without_compiling(tmp_path: Path) -> None:
    path = tmp_path / "a.pyz"
    path.write_bytes(repack(agent_archive(), lambda name, data: data if name.endswith(".pyc") else b"1 / 0\n"))
    assert greets(path, tmp_path, sys.executable)


def test_the_archive_of_another_version_starts_too(tmp_path: Path) -> None:
    path = tmp_path / "a.pyz"
    path.write_bytes(
        repack(agent_archive(), lambda name, data: b"\0\0\r\n" + data[4:] if name.endswith(".pyc") else data)
    )
    assert greets(path, tmp_path, PYTHON)


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_other_interpreters(archive: Path, tmp_path: Path, version: str) -> None:
    python = shutil.which("python" + version)
    if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
        pytest.skip(f"no Python {version} here")
    assert greets(archive, tmp_path, python)
