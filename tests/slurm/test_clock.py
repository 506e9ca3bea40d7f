"""A login node whose wall clock is set an hour ahead and an hour behind while allocations run, and then right again.

The daemon, munge there, the clients of Slurm and the engines see that time. Slurm's daemons keep theirs, and take no
credential of a host that is so far off: to it Slurm is away until its clock is right.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import datetime
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster_files import daemon_env
from tests.service.host import Host
from tests.slurm.gate import Gate
from tests.slurm.jobs import ALLOCCTL, SERVE, Jobs, role, until

SOURCE = Path(__file__).with_name("shifted.c")


class Clock:
    """What it adds to the time, in seconds, may be set at any moment. `environ`: for whom it is to count."""

    def __init__(self, library: Path, path: Path) -> None:
        self._path = path
        path.write_bytes(bytes(8))
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(path)}

    def set(self, seconds: int) -> None:
        with self._path.open("r+b", buffering=0) as file:  # in place: it is mapped into memory
            file.write(seconds.to_bytes(8, "little", signed=True))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for a clock that can be set")
    library = tmp_path / "shifted.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return Clock(library, tmp_path / "clock")


@pytest.fixture
def munge(cluster: Cluster, clock: Clock) -> Iterator[Path]:
    """The slurm.conf of a host whose munge has that clock."""
    with tempfile.TemporaryDirectory(prefix="munge-", dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)  # munge refuses a socket in a directory that others cannot enter
        files = (f"--pid-file={name}/pid", f"--log-file={name}/log", f"--seed-file={name}/seed")
        daemon = subprocess.Popen(
            [
                "munged",
                "--foreground",
                "--force",
                f"--key-file={cluster.directory}/munge.key",
                f"--socket={name}/s",
                *files,
            ],
            env={**cluster.env, "PATH": daemon_env()["PATH"], **clock.environ},
            stderr=subprocess.DEVNULL,
        )
        with daemon:
            try:
                until((place / "s").exists, "munge")
                conf = (cluster.directory / "slurm.conf").read_text()
                (place / "slurm.conf").write_text(conf.replace(f"{cluster.directory}/munge/s", f"{name}/s"))
                yield place / "slurm.conf"
            finally:
                daemon.terminate()


class Shifted(Host):
    """A login node with such a clock; the jobs that are submitted there bring it along."""

    @property
    def variables(self) -> dict[str, str]:
        return {**super().variables, **{name: self.environ[name] for name in ("LD_PRELOAD", "CLOCK_SHIFT")}}


@pytest.fixture
def host(jobs: Jobs, clock: Clock, munge: Path) -> Iterator[Shifted]:
    with tempfile.TemporaryDirectory(prefix="allocd-") as run:  # a socket's path is short
        own = {"XDG_RUNTIME_DIR": run, "XDG_CONFIG_HOME": str(jobs.directory / "config"), "SLURM_CONF": str(munge)}
        host = Shifted(jobs.directory, {**jobs.env, **own, **clock.environ}, Path(run, "allocd/ctl.sock"))
        yield host
        if host.process is not None:
            host.end(signal.SIGKILL)


@pytest.mark.slow
def test_nothing_ends_and_every_verdict_is_right(jobs: Jobs, host: Shifted, clock: Clock) -> None:
    held = jobs.hold(2)
    host.start()
    with ExitStack() as stack:
        gates: list[Gate] = []
        codes: dict[str, int] = {}

        def begin(code: int, **adopted: str) -> str:
            """An allocation that ends with this code when its gate opens. Its key."""
            gates.append(stack.enter_context(closing(Gate(jobs.directory / f"gate-{len(gates)}"))))
            roles = {"server": role(0, SERVE), "client": role(1, gates[-1].then(f"exit {code}"))}
            plan = jobs.plan(roles, coordinator=1, nodes=2, slurm={"time": "00:10:00"}).read_text()
            what, more = ("adoptions", adopted) if adopted else ("allocations", {"allocctl": ALLOCCTL})
            key = host.accept(what, {"plan": plan, **more}, f"request-{len(gates)}")
            codes[key] = code
            return key

        before = [begin(0), begin(7), begin(0), begin(0, jobid=str(held.jobid))]
        for key in before:
            host.until(key, "running")
        until(lambda: len(list(jobs.directory.glob("base/*/up.*"))) == 2 * len(before), "their ranks")
        clock.set(3600)
        early = begin(5)
        for gate in (gates[0], gates[1], gates[3]):
            gate.open()
        until(lambda: "Slurm cannot be asked" in (host.get(before[0])["trouble"] or ""), "that Slurm is away is told")
        clock.set(-3600)
        late = begin(6)
        moments = [datetime.fromisoformat(host.get(key)["created"]) for key in (before[0], early, late)]
        hours = [round((moment - moments[0]).total_seconds() / 3600) for moment in moments]
        assert hours == [0, 1, -1]  # the daemon has seen it
        assert host.get(before[2])["state"] == "running"
        clock.set(0)
        for gate in (gates[2], *gates[4:]):
            gate.open()
        for key, code in codes.items():
            end = host.until(key, "ended")
            assert (end["verdict"]["code"], end["verdict"]["origin"]) == (code, "native"), end["verdict"]
        assert host.ask("GET", "/v1/health")["wrong"] == []
        assert host.end()[0] == 0
        host.start()  # times that went back are no damage
        assert host.ask("GET", "/v1/health")["wrong"] == []
        assert {each["key"] for each in host.ask("GET", "/v1/allocations")["allocations"]} == set(codes)
