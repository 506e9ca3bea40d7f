"""The state directory: whose it is, who holds it, and who does not get it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from supervisor.service.place import OWNER, StateDirectory, Unusable, owners, state_directory, this_process

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
        with pytest.raises(Unusable, match=f"held by an allocd already: process {other.pid} on"):
            StateDirectory(str(path))
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
    with pytest.raises(OSError, match="symbolic links"):
        StateDirectory(str(path))
    (path / "lock").unlink()
    (tmp_path / "victim").write_text("{}")
    (path / OWNER).symlink_to(tmp_path / "victim")
    StateDirectory(str(path)).close()
    assert (tmp_path / "victim").read_text() == "{}"


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
