"""A real Slurm cluster in one directory: munge, MariaDB, slurmdbd, slurmctld and four slurmd.

Everything comes from Debian's packages (Slurm 22.05 of Debian 12 and 24.11 of Debian 13). Installing them is
all that needs root: the daemons run as whoever runs the tests, read nothing in /etc, listen on free ports of
the loopback address, and several clusters run side by side.

    with Cluster() as cluster:
        job = cluster.sbatch("srun -l hostname", "--nodes=4")
        assert cluster.wait_state(job, "COMPLETED")["ExitCode"] == "0:0"

What differs from a cluster of four machines:

* `hostname` is the same everywhere, and so are the file system, the process table and the pids:
  SLURMD_NODENAME tells the node (node1 .. node4, each with 8 CPUs and 4,000 MB by configuration; partitions
  main, and low and high for preemption).
* Processes are tracked by their parents (proctrack/linuxproc): what leaves its session outlives its job.
* Times are short: KillWait 3 s, MinJobAge 10 s, SlurmdTimeout 10 s, and a requeued job starts again after
  some 10 s.

A file `noisy` in the cluster's directory makes every task's prolog print its lines.

The daemons are held by `keeper.py`, which takes them down with whatever the jobs left behind, also when the
process that made the cluster is killed. `cluster_files.py` has the configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import cluster_files, keeper
from tests.cluster_files import NODES

__all__ = ["NODES", "Cluster", "ClusterError"]

_START_LIMIT = 30.0  # seconds for each daemon to answer; a loaded machine with two cores needs a fraction
_STOP_LIMIT = 70.0  # seconds for the keeper to kill everything; it gives up by itself before
_USABLE = frozenset({"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "IDLE+COMPLETING", "MIXED+COMPLETING"})
_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SACCT", "SQUEUE", "SCANCEL", "SINFO")  # settings of another cluster


class ClusterError(Exception):
    """The cluster did not do in time what a test needs; the message carries records and the tails of logs."""


class Cluster:
    """Four nodes of Slurm with accounting; see the module's text.

    `extra` is added to slurm.conf as it is. Attributes of a started cluster: `directory` (everything is in
    it; gone after stop), `name` (ClusterName), `env` (for clients and for programs under test).
    """

    directory: Path
    name: str
    env: dict[str, str]

    def __init__(self, *, extra: str = "") -> None:
        self._extra = extra
        self._keeper: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()
        self._ports = range(0)

    @staticmethod
    def missing() -> str | None:
        """Why no cluster can run here, naming the Debian packages to install; None when it can."""
        return cluster_files.missing()

    # ---- up and down ---------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Brings everything up, all nodes idle: a few seconds. ClusterError when a daemon does not come."""
        if self._keeper is not None:
            raise ClusterError("this cluster is running")
        # The sockets of munge and MariaDB are in it, and a socket's path holds 107 bytes: no deep TMPDIR.
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.directory.chmod(0o755)  # munge refuses a socket in a directory that others cannot enter
        self.name = self.directory.name.replace("_", "x")
        self.env = self._client_env()
        try:
            self._ports, lock = cluster_files.reserve_ports()
            self._keeper = _start_keeper(self.directory, lock)
        except BaseException:
            shutil.rmtree(self.directory)
            raise
        try:
            cluster_files.write_files(self.directory, self.name, self._ports, self._extra)
            self._start_munge()
            self._start_database()
            self.start_slurmdbd()
            self.run(["sacctmgr", "-i", "add", "cluster", self.name], check=True)
            self.start_slurmctld()
            for node in NODES:
                self._start_slurmd(node)
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kills all that belongs to the cluster, jobs included, and removes its directory; idempotent."""
        if self._keeper is None:
            return
        process, self._keeper = self._keeper, None
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            process.stdin.close()
            code = process.wait(_STOP_LIMIT)
        if code != 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise ClusterError(f"the keeper of {self.directory} ended with {code}; its reason is on stderr")

    @property
    def keeper_pid(self) -> int | None:
        """The one child process that a running cluster is to whoever started it; None when it is down."""
        return None if self._keeper is None else self._keeper.pid

    def _client_env(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        tools = os.path.dirname(sys.executable)  # the commands of the environment under test
        env["PATH"] = os.pathsep.join([tools, cluster_files.daemon_env()["PATH"]])
        env["SLURM_CONF"] = str(self.directory / "slurm.conf")
        return env

    def _start_munge(self) -> None:
        top = self.directory
        sock = str(top / "munge" / "s")
        files = [f"--key-file={top}/munge.key", f"--socket={sock}", f"--pid-file={top}/run/munged.pid"]
        logs = [f"--log-file={top}/log/munged.log", f"--seed-file={top}/run/munged.seed"]
        self._start_daemon("munged", ["--foreground", "--force", *files, *logs])
        self._wait_daemon("munged", lambda: _connects(socket.AF_UNIX, sock))

    def _start_database(self) -> None:
        top, port = self.directory, self._ports[0]
        # A server removes what others have in its temporary directory, when it starts: one for each.
        places = [f"--datadir={top}/db", f"--tmpdir={top}/tmp", f"--user={cluster_files.user()}"]
        options = ["--no-defaults", *places, *cluster_files.DATABASE_OPTIONS]
        # As for an RPM: else it gives the system's PAM plugin to --user, and wants the host's name resolved.
        how = ["--rpm", "--auth-root-authentication-method=normal", "--skip-test-db"]
        self.run(["mariadb-install-db", *options, *how], timeout=60, check=True)
        where = [f"--socket={top}/db/s", f"--pid-file={top}/run/mariadbd.pid", "--bind-address=127.0.0.1"]
        first = f"--init-file={top}/database.sql"
        self._start_daemon("mariadbd", [*options, *where, f"--port={port}", first])
        self._wait_daemon("mariadbd", lambda: _connects(socket.AF_INET, ("127.0.0.1", port)))

    # ---- faults: single daemons ----------------------------------------------------------------------------

    def start_slurmdbd(self) -> None:
        """Starts slurmdbd and returns when it accepts connections."""
        self._start_daemon("slurmdbd", ["-D"])
        self._wait_daemon("slurmdbd", lambda: _connects(socket.AF_INET, ("127.0.0.1", self._ports[1])))

    def stop_slurmdbd(self) -> None:
        """Ends slurmdbd as an administrator does (TERM), returns when it is gone: sacct fails from now on."""
        self._end_daemon("slurmdbd", signal.SIGTERM)

    def start_slurmctld(self) -> None:
        """Starts slurmctld with the state that an earlier one saved; returns when it answers clients.

        It knows its nodes' states again some seconds later: see `wait_ready`.
        """
        self._start_daemon("slurmctld", ["-D"])
        self._wait_daemon("slurmctld", lambda: " UP" in self.run(["scontrol", "ping"]).stdout)

    def stop_slurmctld(self) -> None:
        """Ends slurmctld (TERM: it saves its state, and running jobs go on); returns when it is gone."""
        self._end_daemon("slurmctld", signal.SIGTERM)

    def kill_slurmctld(self) -> None:
        """KILL to slurmctld: what it has not saved is lost. Returns when it is gone."""
        self.kill_daemon("slurmctld")

    def kill_daemon(self, name: str) -> None:
        """KILL to any of them; returns when it is gone."""
        self._end_daemon(name, signal.SIGKILL)

    def start_slurmd(self, node: str) -> None:
        """Starts a node's slurmd and returns when slurmctld can use the node."""
        self._start_slurmd(node)
        self.wait_ready([node])

    def kill_slurmd(self, node: str) -> None:
        """KILL to a node's slurmd: its steps live on, NODE_FAIL follows some SlurmdTimeout (10 s) later."""
        self._end_daemon(node, signal.SIGKILL)

    def heal(self) -> None:
        """Makes the cluster whole after a test: all daemons run, no job is left, the nodes are usable."""
        (self.directory / "noisy").unlink(missing_ok=True)
        ended = self._ask(do="ended")["ended"]
        for name, start in (("slurmdbd", self.start_slurmdbd), ("slurmctld", self.start_slurmctld)):
            if name in ended:
                start()
        for node in NODES:
            if node in ended:
                self._start_slurmd(node)
        if self._queue():
            self.run(["scancel", f"--user={cluster_files.user()}"], check=True)
            self.wait_for(lambda: not self._queue(), "the queue to be empty")
        states = self._node_states().items()
        if unfit := [node for node, state in states if "DRAIN" in state or "FAIL" in state or state == "DOWN"]:
            self.run(["scontrol", "update", f"NodeName={','.join(unfit)}", "State=RESUME"], check=True)
        self.wait_ready()

    def wait_ready(self, nodes: Iterable[str] = NODES, timeout: float = _START_LIMIT) -> None:
        """Returns when slurmctld can use the nodes: they are idle, or run something."""
        wanted = set(nodes)
        self.wait_for(
            lambda: {node for node, state in self._node_states().items() if state in _USABLE} >= wanted,
            f"usable nodes {sorted(wanted)}",
            timeout,
        )

    def _queue(self) -> str:
        return self.run(["squeue", "--noheader"], check=True).stdout

    def _node_states(self) -> dict[str, str]:
        listing = self.run(["scontrol", "--oneliner", "show", "node"]).stdout
        return {node["NodeName"]: node["State"] for node in map(_fields, listing.splitlines()) if "State" in node}

    # ---- the clients' side ---------------------------------------------------------------------------------

    def run(
        self,
        argv: list[str],
        *,
        timeout: float = 30.0,
        check: bool = False,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` in the cluster's environment (`env` is added to it), output captured, stdin empty.

        Raises ClusterError after `timeout` seconds (the process is killed then), and with `check` also when
        the exit code is not 0.
        """
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("cwd", self.directory / "jobs")
        options |= {"timeout": timeout, "env": {**self.env, **(env or {})}}
        program = shutil.which(argv[0], path=options["env"]["PATH"]) or argv[0]
        try:
            done = subprocess.run([program, *argv[1:]], capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired as late:
            said = f"{late.output!r} {late.stderr!r}"
            raise ClusterError(f"{argv}: no end within {timeout} s; so far {said}{self._tails()}") from late
        if check and done.returncode != 0:
            raise ClusterError(f"{argv}: exit {done.returncode}: {done.stdout}{done.stderr}{self._tails()}")
        return done

    def sbatch(self, script: str, *options: str) -> int:
        """Submits a script (`#!/bin/sh` is put before one without such a line) and returns the job's id.

        The job works in `directory/jobs`, where its output is `slurm-ID.out`; see `output`.
        """
        text = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
        done = self.run(["sbatch", "--parsable", *options], input=text, check=True)
        return int(done.stdout.split(";")[0])

    def output(self, jobid: int) -> str:
        """What a job's batch script has written so far; "" when it has not begun."""
        path = self.directory / "jobs" / f"slurm-{jobid}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, jobid: int) -> dict[str, str]:
        """The job's record as scontrol shows it, by field; {} when slurmctld does not know the job."""
        return _fields(self.run(["scontrol", "--oneliner", "show", "job", str(jobid)]).stdout)

    def sacct(self, jobid: int) -> dict[str, tuple[str, str]]:
        """Accounting's rows: JobIDRaw (`7`, `7.batch`, `7.0`) -> (State, ExitCode); {} without rows."""
        argv = ["sacct", "--noheader", "--parsable2", f"--jobs={jobid}", "--format=JobIDRaw,State,ExitCode"]
        rows = (line.split("|") for line in self.run(argv).stdout.splitlines())
        return {raw: (state, code) for raw, state, code in rows}

    def wait_state(self, jobid: int, states: str | Iterable[str], timeout: float = 30.0) -> dict[str, str]:
        """Returns the job's record once its JobState is one of `states`.

        Of a job that slurmctld forgot, accounting's JobState and ExitCode. Raises ClusterError after
        `timeout` seconds, with the record, the job's output and the end of slurmctld's log.
        """
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while True:
            record = self.job(jobid)
            if not record and (row := self.sacct(jobid).get(str(jobid))):
                record = {"JobId": str(jobid), "JobState": row[0].split()[0], "ExitCode": row[1]}
            if record.get("JobState") in wanted:
                return record
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"job {jobid} is not {' or '.join(sorted(wanted))} after {timeout} s: {record}"
                    f"\nits output: {self.output(jobid)[-2000:]!r}{self._tails()}"
                )
            time.sleep(0.05)

    def wait_for(self, happened: Callable[[], bool], what: str, timeout: float = 30.0) -> None:
        """Asks `happened` every 50 ms until it says yes; ClusterError that names `what` after `timeout` s."""
        deadline = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > deadline:
                nodes = self._node_states()
                raise ClusterError(f"waited {timeout} s in vain for {what}; nodes {nodes}{self._tails()}")
            time.sleep(0.05)

    def processes_with(self, text: str) -> list[int]:
        """Pids of this user's processes whose command line or initial environment contains `text`."""
        return keeper.processes_with(text)

    # ---- daemons, through the keeper -----------------------------------------------------------------------

    def _start_slurmd(self, node: str) -> None:
        self._start_daemon(node, ["-D", "-N", node], program="slurmd")

    def _start_daemon(self, name: str, arguments: list[str], program: str | None = None) -> None:
        self._ask(
            do="start",
            name=name,
            argv=[cluster_files.which(program or name) or name, *arguments],
            env=cluster_files.daemon_env() | {"SLURM_CONF": self.env["SLURM_CONF"]},
            cwd=str(self.directory),
            log=str(self.directory / "log" / f"{name}.stderr"),
        )

    def _end_daemon(self, name: str, signum: int) -> None:
        self._ask(do="end", name=name, signal=int(signum), seconds=10)

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._keeper is None:
            raise ClusterError("this cluster is not running")
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with self._asking:
            self._keeper.stdin.write(json.dumps(request).encode() + b"\n")
            self._keeper.stdin.flush()
            line = self._keeper.stdout.readline()
        answer: dict[str, Any] = json.loads(line or b'{"error": "the keeper is gone"}')
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer

    def _wait_daemon(self, name: str, ready: Callable[[], bool]) -> None:
        """Until a daemon answers; an end before that is reported at once, with its last words."""
        deadline = time.monotonic() + _START_LIMIT
        while not ready():
            if (code := self._ask(do="ended")["ended"].get(name)) is not None:
                raise ClusterError(f"{name} ended with {code} instead of starting{self._tails(name)}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{name} does not answer after {_START_LIMIT} s{self._tails(name)}")
            time.sleep(0.01)

    def _tails(self, name: str = "slurmctld", lines: int = 25) -> str:
        text = ""
        for path in sorted((self.directory / "log").glob(f"{name}.*")):
            with contextlib.suppress(OSError), path.open(errors="replace") as log:
                text += f"\n--- the end of {path.name}:\n" + "".join(deque(log, lines))
        return text


def _fields(line: str) -> dict[str, str]:
    """A record of `scontrol --oneliner`: words with `=` begin a field, others belong to the one before."""
    record: dict[str, str] = {}
    key = ""
    for word in line.split():
        name, equals, value = word.partition("=")
        if equals:
            key, record[name] = name, value
        elif key:
            record[key] += f" {word}"
    return record


def _connects(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(address) == 0


def _start_keeper(directory: Path, lock: socket.socket) -> subprocess.Popen[bytes]:
    """The keeper, in a session of its own (a terminal's Ctrl-C is for the tests), holding the ports' lock."""
    with lock:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(directory), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )
