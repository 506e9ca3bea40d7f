"""allocd as a service, under a real user manager: installed, started by who connects, restarted, stopped, removed."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from supervisor.cli.asking import Refused
from supervisor.core import codes
from tests.mounts import fill, small_disk
from tests.service.running import until
from tests.systemd.manager import LIMIT, Manager
from tests.systemd.service import SERVICE, SOCKET, Service

SBATCH = "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account' >&2\nexit 1\n"


@pytest.fixture
def service(systemd: Manager) -> Service:
    return Service(systemd)


@pytest.fixture
def without_privileges() -> Iterator[Service]:
    with Manager(1000) as systemd:
        yield Service(systemd)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Where a full disk hurts the daemon's state alone. The manager sees what was mounted before it."""
    with small_disk(tmp_path / "small") as place:
        yield place


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A PATH on which Slurm refuses every job."""
    sbatch = tmp_path / "slurm bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    return {"PATH": f"{sbatch.parent}:{os.environ['PATH']}"}


def test_a_user_without_privileges_installs_it_and_the_first_who_connects_starts_it(
    without_privileges: Service, tmp_path: Path
) -> None:
    service, systemd = without_privileges, without_privileges.systemd
    odd = {"PATH": f'{os.environ["PATH"]}:/odd %h/$HOME/"x"\\', "SLURM_CONF": "/etc/slurm/ours %n.conf"}
    assert "wrote" in service.do("install", environ=odd)
    assert "wrote" not in service.do("install", environ=odd)  # once is enough
    units = [str(systemd.units / unit) for unit in (SERVICE, SOCKET)]
    verified = systemd.run("systemd-analyze", "--user", "verify", *units)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert systemd.show(SERVICE, "ActiveState") == "inactive"
    assert "starts the daemon for the first who connects" in service.do("status")
    assert systemd.show(SERVICE, "ActiveState") == "inactive"  # a look starts nothing
    modes = [stat.S_IMODE(os.lstat(path).st_mode) for path in (service.path, os.path.dirname(service.path))]
    assert modes == [0o600, 0o700]

    health = service.health()
    assert health["pid"] == service.pid()
    systemd.wait_for(SERVICE, "ActiveState", "active")
    assert systemd.show(SERVICE, "StatusText") == "no allocations"
    process = Path(f"/proc/{service.pid()}")
    environ = dict(entry.split("=", 1) for entry in (process / "environ").read_text().split("\0") if entry)
    assert {name: environ[name] for name in odd} == odd
    status = (process / "status").read_text()
    assert "NoNewPrivs:\t1\n" in status and "Seccomp:\t2\n" in status
    document = json.loads(service.do("status", "--json"))
    assert document["health"]["pid"] == service.pid() and not document["waits"]

    assert "was stopped" in service.do("stop")
    assert not process.exists() and not os.path.exists(service.path)
    service.do("status", code=codes.UNREACHABLE)
    assert "wrote" not in service.do("install", environ=odd)
    assert service.health()["pid"] == service.pid()
    assert "removed" in service.do("uninstall")
    assert systemd.show(SERVICE, "LoadState") == systemd.show(SOCKET, "LoadState") == "not-found"
    assert list(systemd.units.rglob("allocd*")) == []
    assert not os.path.exists(service.path)


def test_a_loop_that_hangs_is_started_anew_and_remembers(service: Service, slurm: dict[str, str]) -> None:
    errors = service.systemd.directory / "stderr"
    program = f"{sys.executable} {Path(__file__).with_name('blocking.py')}"
    root = Path(__file__).parents[2]
    service.drop_in(
        f"[Service]\nWatchdogSec=3\nRestartSec=0\nExecStart=\nExecStart={program}\n"
        f"StandardError=append:{errors}\nEnvironment=PYTHONPATH={root}\n"
    )
    service.do("install", environ=slurm)
    key = service.accept()["key"]
    pid = service.pid()
    os.kill(pid, signal.SIGUSR1)
    service.wait_for_another(pid)
    assert service.kept() == [key]
    assert "in hang\n" in errors.read_text()  # where it hung is told


def test_killed_it_comes_back_and_neither_its_books_nor_an_engine_is_lost(
    service: Service, slurm: dict[str, str]
) -> None:
    systemd = service.systemd
    service.drop_in("[Service]\nRestartSec=0\n")
    service.do("install", environ=slurm)
    keys = [service.accept()["key"]]
    systemd.wait_for(SERVICE, "ActiveState", "active")
    engine = subprocess.Popen(["sleep", "300"])
    try:
        systemd.take_in(SERVICE, engine.pid)
        for number in (1, 2):
            pid = service.pid()
            os.kill(pid, signal.SIGKILL)
            service.wait_for_another(pid)
            assert systemd.show(SERVICE, "NRestarts") == str(number)
            assert service.kept() == keys
            keys.append(service.accept()["key"])
        assert engine.pid in systemd.pids(SERVICE)
        service.do("stop")
        assert engine.poll() is None
        systemd.ask("start", SOCKET)
        assert service.kept() == keys
    finally:
        engine.kill()
        engine.wait()


def test_settings_are_read_again(service: Service) -> None:
    settings = service.systemd.home / ".config/allocd/allocd.toml"
    settings.parent.mkdir(parents=True)
    service.do("install")
    service.do("reload", code=codes.UNREACHABLE)
    pid = service.health()["pid"]
    for text, limit in (("limit = 7\n", 7), ("limit = 0\n", 7), ("limit = 8\n", 8)):  # wrong ones change nothing
        settings.write_text(text)
        service.do("reload")
        deadline = time.monotonic() + LIMIT
        while service.health()["limit"] != limit:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert service.health()["pid"] == pid
    service.systemd.wait_for(SERVICE, "ActiveState", "active")


def test_what_is_not_fit_is_told_to_who_connects_and_tried_again_for_the_next(service: Service) -> None:
    systemd = service.systemd
    settings = systemd.home / ".config/allocd/allocd.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("limit = 0\n")
    service.do("install")
    for _ in range(12):  # more than systemd tries at once, unless it is told to
        with pytest.raises(Refused, match=r"allocd cannot start: .*allocd\.toml: limit: found 0") as refused:
            service.health()
        assert refused.value.status == 503
    systemd.wait_for(SERVICE, "ActiveState", "failed")
    assert systemd.show(SERVICE, "ExecMainStatus") == str(codes.CONFIG)
    assert systemd.show(SERVICE, "NRestarts") == "0"
    assert systemd.show(SOCKET, "SubState") == "listening"
    told = service.do("status")
    assert "journalctl --user -u allocd" in told and "limit: found 0" in told
    waited = systemd.run(sys.executable, "-m", "supervisor.cli.main", "wait", "a0123abcd")
    assert waited.returncode == codes.UNREACHABLE and "limit: found 0; expected an integer" in waited.stderr
    assert "told by what is on the disk" in waited.stderr and "no run" in waited.stderr
    settings.write_text("limit = 5\n")
    assert service.health()["limit"] == 5


def test_a_daemon_that_nobody_can_start_is_given_up_and_how_to_go_on_is_told(service: Service) -> None:
    systemd = service.systemd
    service.drop_in("[Service]\nExecStart=\nExecStart=/bin/sh -c 'exit 78'\n[Unit]\nStartLimitBurst=5\n")
    service.do("install")
    with socket.socket(socket.AF_UNIX) as waiting, suppress(ConnectionError):
        waiting.settimeout(3 * LIMIT)
        waiting.connect(service.path)
        assert waiting.recv(1) == b""  # the socket's unit has given up
    systemd.wait_for(SOCKET, "ActiveState", "failed")
    assert "`allocctl service install` has it tried again" in service.do("status", code=codes.UNREACHABLE)
    (systemd.units / f"{SERVICE}.d" / "test.conf").unlink()
    service.do("install")
    assert service.health()["pid"] == service.pid()


def test_a_full_disk_keeps_it_from_nothing_for_ever(small: Path, systemd: Manager, slurm: dict[str, str]) -> None:
    service, state = Service(systemd), {"XDG_STATE_HOME": str(small)}
    service.drop_in("[Service]\nRestartSec=100ms\n")
    service.do("install", environ={**slurm, **state})
    key = service.accept()["key"]
    fill(small / "ballast")
    pid = service.pid()
    os.kill(pid, signal.SIGKILL)
    service.wait_for_another(pid)  # it takes up what it holds, and nothing new
    assert service.kept() == [key]
    until(lambda: "No space left" in str(service.health()["wrong"]), "health tells of the disk")
    with pytest.raises(Refused) as refused:
        service.accept()
    assert refused.value.status == 507

    service.do("stop", environ=state)
    (record,) = small.glob("allocd/hosts/*/owner.json.free")
    record.unlink()
    fill(small / "more")
    systemd.ask("start", SOCKET)
    with pytest.raises(Refused, match=r"owner\.json: No space left on device: make room there"):
        service.health()
    until(lambda: int(systemd.show(SERVICE, "NRestarts")) > 12, "it is not given up")
    told = service.do("status", code=codes.UNREACHABLE, environ=state)
    assert "owner.json: No space left on device: make room there" in told
    for ballast in ("ballast", "more"):
        (small / ballast).unlink()
    systemd.wait_for(SERVICE, "ActiveState", "active")  # by itself
    assert service.kept() == [key]
    until(lambda: not service.health()["wrong"], "nothing is wrong any more")
    assert service.accept()["key"] != key
    assert sorted(path.name for path in record.parent.iterdir()) == ["allocations", "lock", "owner.json"]


def test_somebody_elses_unit_is_not_overwritten(service: Service) -> None:
    unit = service.systemd.units / SERVICE
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/bin/false\n")
    assert "drop-in" in service.do("install", code=codes.CONFIG)
    assert unit.read_text() == "[Service]\nExecStart=/bin/false\n" and not (service.systemd.units / SOCKET).exists()
    assert "allocd.service.before-1" in service.do("install", "--force")
    pid = service.health()["pid"]
    unit.write_text(unit.read_text().replace("WatchdogSec=30", "WatchdogSec=60"))
    service.do("install", code=codes.CONFIG)
    service.do("uninstall", code=codes.CONFIG)
    assert service.health()["pid"] == pid
    service.do("uninstall", "--force")
    assert sorted(path.name for path in unit.parent.iterdir()) == [f"{SERVICE}.before-1", f"{SERVICE}.before-2"]


def test_a_new_version_takes_the_place_of_the_old_one(service: Service) -> None:
    service.do("install", environ={"SLURM_CONF": "/etc/old.conf"})
    pid = service.health()["pid"]
    assert "started again" in service.do("install", environ={"SLURM_CONF": "/etc/new.conf"})
    assert service.wait_for_another(pid)
    assert b"SLURM_CONF=/etc/new.conf\0" in Path(f"/proc/{service.pid()}/environ").read_bytes()


def test_a_daemon_that_was_started_by_hand(service: Service) -> None:
    systemd = service.systemd
    daemon = subprocess.Popen(
        [sys.executable, "-m", "supervisor.service.main"], env=systemd.environ, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + LIMIT
        while not os.path.exists(service.path):
            assert time.monotonic() < deadline and daemon.poll() is None
            time.sleep(0.02)
        assert str(daemon.pid) in service.do("install", code=codes.UNREACHABLE)  # its socket is not taken away
        assert service.health()["pid"] == daemon.pid
        assert f"process {daemon.pid}" in service.do("status")
        service.do("reload")
        assert f"process {daemon.pid}, was stopped" in service.do("stop")
        assert daemon.wait(LIMIT) == codes.OK
    finally:
        daemon.kill()
        daemon.wait()
    service.do("install")
    assert service.health()["pid"] == service.pid()


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("linger", [True, False])
def test_whether_it_ends_at_logout_is_told(uid: int, linger: bool) -> None:
    with Manager(uid, linger=linger) as systemd:
        root = Path(__file__).parents[2]
        words = (f"--working-directory={root}", sys.executable, "-m", "supervisor.cli.main", "service", "install")
        done = systemd.run_inside(*words)
    assert done.returncode == codes.OK, done.stderr
    assert ("loginctl enable-linger" in done.stdout) is not linger
