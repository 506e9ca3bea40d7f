"""`allocctl service` without systemd: what unit files hold, whose they are, and what is said where nothing can be done.
Under a real user manager: tests/systemd/test_service.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.cli import units
from supervisor.cli.main import main
from supervisor.cli.service import _how
from supervisor.core import codes

ODD = {"PATH": '/odd %h/$HOME/"x"\\:/bin', "HOME": "/root", "SLURM_CONF": ""}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a user manager."""
    for name, value in {"HOME": tmp_path, "XDG_RUNTIME_DIR": tmp_path / "run", "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path


def test_a_unit_holds_this_installation_and_the_way_to_slurm() -> None:
    lines = units.text_of(units.SERVICE, ["/opt/with blank/allocd", "$x"], ODD).splitlines()
    assert [line for line in lines if line.startswith(("ExecStart=", "Environment="))] == [
        'ExecStart="/opt/with blank/allocd" "$$x"',
        'Environment="PATH=/odd %%h/$HOME/\\"x\\"\\\\:/bin"',
    ]
    assert "Environment" not in units.text_of(units.SOCKET, ["/opt/allocd"], ODD)


def test_a_value_that_no_unit_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="control characters"):
        units.text_of(units.SERVICE, ["/opt/allocd"], {"PATH": "/bin\nExecStop=/bin/false"})


def test_the_daemon_of_this_installation_is_started() -> None:
    assert Path(units.daemon()[0]).is_absolute() and Path(units.daemon()[0]).exists()


def test_whose_a_file_is(tmp_path: Path) -> None:
    path, text = tmp_path / "units/allocd.service", units.text_of(units.SERVICE, ["/opt/allocd"], ODD)
    newer = units.text_of(units.SERVICE, ["/opt/newer/allocd"], ODD)
    assert units.found(str(path), text) == "absent"
    units.write(str(path), text)
    assert path.read_text() == text and list(path.parent.iterdir()) == [path]
    assert units.found(str(path), text) == "same"
    assert units.found(str(path), newer) == "ours"
    path.write_text(text.replace("WatchdogSec=30", "WatchdogSec=3"))
    assert units.found(str(path), text) == "foreign"
    path.unlink()
    path.symlink_to("/dev/null")
    assert units.found(str(path), text) == "foreign"


def test_what_is_set_aside_keeps_its_words(tmp_path: Path) -> None:
    path = tmp_path / "allocd.service"
    for number in (1, 2):
        path.write_text(str(number))
        assert units.set_aside(str(path)) == f"{path}.before-{number}"
    assert sorted(item.name for item in tmp_path.glob("allocd*")) == [
        "allocd.service.before-1",
        "allocd.service.before-2",
    ]
    assert Path(f"{path}.before-1").read_text() == "1"


@pytest.mark.parametrize("action", ["install", "status", "reload"])
def test_without_a_user_manager_it_says_so(action: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", action]) == codes.UNREACHABLE
    printed = capsys.readouterr()
    assert "no user manager" in printed.out + printed.err or "no daemon runs here" in printed.err
    assert not (home / ".config").exists()


def test_a_unit_is_told_in_a_line() -> None:
    shown = {"ActiveState": "active", "SubState": "running", "NRestarts": "1", "StatusText": "no allocations"}
    assert _how(shown, answers=False) == 'active (running), restarted once, "no allocations"'
    assert _how({**shown, "NRestarts": "2"}, answers=True) == "active (running), restarted 2 times"


@pytest.mark.parametrize("action", ["stop", "uninstall"])
def test_nothing_to_do_is_done(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", action, "--json"]) == codes.OK
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and len(document["told"]) == 1


def test_without_a_manager_its_files_can_be_removed_all_the_same(home: Path) -> None:
    where = home / ".config/systemd/user"
    for unit in units.UNITS:
        units.write(str(where / unit), units.text_of(unit, ["/opt/allocd"], ODD))
    (where / units.WANTS).parent.mkdir()
    (where / units.WANTS).symlink_to(where / units.SOCKET)
    assert main(["service", "uninstall"]) == codes.OK
    assert list(where.iterdir()) == []


def test_somebody_elses_file_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".config/systemd/user/allocd.service"
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    assert main(["service", "uninstall"]) == codes.CONFIG
    assert str(path) in capsys.readouterr().err and path.exists()
    assert main(["service", "uninstall", "--force"]) == codes.OK
    assert [item.name for item in path.parent.iterdir()] == ["allocd.service.before-1"]


def test_a_daemon_on_another_host_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = home / "state/allocd/hosts/login7/owner.json"
    owner.parent.mkdir(parents=True)
    owner.write_text(
        json.dumps({"host": "login7", "boot": "b", "pid": 1, "started": 1, "since": "2026-01-02T03:04:05Z"})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        assert main(["service", "status"]) == codes.UNREACHABLE
    assert "another daemon of yours is on login7, since 2026-01-02T03:04:05Z" in capsys.readouterr().out
