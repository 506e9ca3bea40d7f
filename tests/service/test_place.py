"""The state directory: whose it is, who holds it, and who does not get it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from supervisor.core import codes
from supervisor.runs.registry import registry
from supervisor.service import place
from supervisor.service.place import (
    OWNER,
    Owner,
    StateDirectory,
    Unusable,
    held_for,
    own_directory,
    owners,
    read_owner,
    state_directory,
    this_process,
)

HOLD = """
import sys
from supervisor.service.place import StateDirectory
held = StateDirectory(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "host"


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that holds it, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def write_owner(path: Path, **changes: object) -> Path:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    (path / OWNER).write_text(json.dumps({**asdict(this_process()), **changes}))
    return path / OWNER


def test_it_is_closed_to_others_and_given_back(path: Path) -> None:
    with closing(StateDirectory(str(path))) as held:
        assert path.stat().st_mode & 0o777 == 0o700
        assert json.loads((path / OWNER).read_text()) == asdict(held.owner)
        assert held.owner.alive
    assert not (path / OWNER).exists()


def test_one_daemon_at_a_time(path: Path) -> None:
    other = hold(path)
    try:
        with pytest.raises(Unusable, match=f"held by an allocd already: process {other.pid} on") as refused:
            StateDirectory(str(path))
        assert refused.value.code == codes.UNREACHABLE
    finally:
        kill(other)
    with closing(StateDirectory(str(path))) as held:  # its record is stale
        assert held.owner.pid == os.getpid()


@pytest.mark.parametrize("changes", [{"boot": "another"}, {"started": 1}, {"pid": 1 << 22}])
def test_a_stale_record_is_replaced(path: Path, changes: dict[str, object]) -> None:
    write_owner(path, **changes)
    with closing(StateDirectory(str(path))) as held:
        assert json.loads((path / OWNER).read_text()) == asdict(held.owner)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_record_that_says_nothing_is_replaced(path: Path, text: str) -> None:
    write_owner(path).write_text(text)
    StateDirectory(str(path)).close()


def test_another_hosts_record_is_never_touched(path: Path) -> None:
    record = write_owner(path, host="login7")
    before = record.read_text()
    with pytest.raises(Unusable, match=rf"held by the allocd on login7 .*remove {record}"):
        StateDirectory(str(path))
    assert record.read_text() == before


@pytest.mark.parametrize("before", [None, "{", "stale"])
def test_a_record_that_another_one_puts_there_meanwhile_is_left(
    path: Path, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system knows no locks."""
    path.mkdir(parents=True, mode=0o700)
    if before:
        write_owner(path, boot="another") if before == "stale" else (path / OWNER).write_text(before)
    winner, read, read_once = replace(this_process(), since="now"), read_owner, iter([True])

    def slow(name: str, directory: int | None = None) -> Owner | None:
        found = read(name, directory)
        if next(read_once, False):
            (path / "new").write_text(json.dumps(asdict(winner)))
            (path / "new").rename(path / OWNER)
        return found

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(place, "read_owner", slow)
    with pytest.raises(Unusable, match=r"held by an allocd already: process .*, since now") as refused:
        StateDirectory(str(path))
    assert refused.value.code == codes.UNREACHABLE
    assert json.loads((path / OWNER).read_text()) == asdict(winner)
    assert sorted(os.listdir(path)) == ["lock", OWNER]


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to("elsewhere")
    with pytest.raises(Unusable, match="is a symbolic link"):
        StateDirectory(str(tmp_path / "state"))
    (tmp_path / "file").touch()
    with pytest.raises(Unusable, match="is no directory"):
        StateDirectory(str(tmp_path / "file"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_links_in_it_are_not_followed(path: Path, tmp_path: Path) -> None:
    path.mkdir(parents=True)
    (path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(Unusable, match=f"{path}/lock: .*symbolic links") as refused:
        StateDirectory(str(path))
    assert refused.value.code == codes.CONFIG
    (path / "lock").unlink()
    (tmp_path / "victim").write_text("{}")
    (path / OWNER).symlink_to(tmp_path / "victim")
    StateDirectory(str(path)).close()
    assert (tmp_path / "victim").read_text() == "{}"


@pytest.mark.parametrize("name", ["allocd", "allocd/hosts", "allocd/hosts/HOST"])
def test_a_link_in_place_of_a_directory_of_our_own_is_refused_and_one_above_is_followed(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "home").symlink_to("scratch")  # as on many a cluster
    environ = {"XDG_STATE_HOME": str(tmp_path / "home")}
    held_for(environ).close()
    link = tmp_path / "scratch" / name.replace("HOST", socket.gethostname())
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unusable, match=f"{link} is a symbolic link"):
        held_for(environ)
    (tmp_path / "given").mkdir()
    (tmp_path / "here").symlink_to("given")
    held_for({"STATE_DIRECTORY": f"{tmp_path}/here/state/:/other"}).close()  # a path that was given whole
    with pytest.raises(Unusable, match="here is a symbolic link"):
        held_for({"STATE_DIRECTORY": f"{tmp_path}/here"})


def test_nobody_else_can_exchange_what_is_in_a_directory_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "allocd").mkdir()
    (tmp_path / "allocd").chmod(0o775)
    with closing(held_for({"XDG_STATE_HOME": str(tmp_path)})) as held:
        assert (tmp_path / "allocd").stat().st_mode & 0o777 == 0o755
        (Path(held.path) / "allocations").symlink_to("/tmp")
        with pytest.raises(Unusable, match=f"{held.path}/allocations is a symbolic link"):
            own_directory(held.descriptor, "allocations")


class Full:
    """A disk on which no file can be made that is not there, as `os` shows it."""

    def __init__(self, error: int) -> None:
        self.error = error

    def open(self, path: str, flags: int, *args: int, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and dir_fd is not None and path not in os.listdir(dir_fd):
            raise OSError(self.error, os.strerror(self.error), path)
        return os.open(path, flags, *args, dir_fd=dir_fd)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.mark.parametrize("killed", [True, False])
def test_on_a_full_disk_the_next_one_has_a_file_for_its_record(
    path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if killed:
        kill(hold(path))
        os.link(path / OWNER, path / f"{OWNER}.abcd")  # killed before it could remove that name
    else:
        StateDirectory(str(path)).close()
    (path / f"{OWNER}.0123").write_text("{")
    monkeypatch.setattr(place, "os", Full(errno.ENOSPC))
    with closing(StateDirectory(str(path))) as held:
        assert json.loads((path / OWNER).read_text()) == asdict(held.owner)
        assert sorted(os.listdir(path)) == ["lock", OWNER]


@pytest.mark.parametrize(("error", "code"), [(errno.ENOSPC, 1), (errno.EIO, 1), (errno.EROFS, 78)])
def test_what_time_may_mend_is_told_from_what_somebody_must(
    path: Path, error: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(place, "os", Full(error))
    with pytest.raises(Unusable, match=f"{path}/lock: {os.strerror(error)}") as refused:
        StateDirectory(str(path))
    assert refused.value.code == code
    assert ("make room" in str(refused.value)) is (error == errno.ENOSPC)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    os.chown(path, 65534, 65534)
    with pytest.raises(Unusable, match="belongs to user 65534"):
        StateDirectory(str(path))


def test_where_it_is(tmp_path: Path) -> None:
    host = socket.gethostname()
    assert state_directory({"STATE_DIRECTORY": "/a:/b", "XDG_STATE_HOME": "/x"}) == "/a"
    assert state_directory({"XDG_STATE_HOME": "/x"}) == f"/x/allocd/hosts/{host}"
    assert state_directory({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == f"/h/.local/state/allocd/hosts/{host}"


def test_who_holds_what(tmp_path: Path) -> None:
    """A verb on the wrong login node can name the right one."""
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    hosts = tmp_path / "allocd" / "hosts"
    assert owners(environ) == []
    write_owner(hosts / "login7", host="login7")
    write_owner(hosts / socket.gethostname(), boot="another")
    assert [owner.host for owner in owners(environ)] == ["login7"]
    with closing(StateDirectory(state_directory(environ))) as held:
        assert owners(environ) == [held.owner, replace(held.owner, host="login7")]


def test_a_relative_state_home_does_not_count_for_runs_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    monkeypatch.setenv("HOME", "/home/ann")
    assert registry() == "/home/ann/.local/state/allocd/runs"
