"""The manager itself: it has a world of its own, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.systemd.manager import Manager


def groups(process: str) -> str:
    return Path(f"/proc/{process}/cgroup").read_text()


@pytest.mark.parametrize("uid", [0, 1000])
def test_it_moves_nobody_and_leaves_nothing(uid: int) -> None:
    before = groups("1"), groups("self"), os.listdir("/run/systemd") if os.path.isdir("/run/systemd") else None
    with Manager(uid) as systemd:
        started = systemd.run("systemd-run", "--user", "--unit=sleeper", "sh", "-c", "sleep 300 & exec sleep 300")
        assert started.returncode == 0, started.stderr
        group = systemd.show("sleeper.service", "ControlGroup")
        pids = systemd.pids("sleeper.service")
        assert len(pids) == 2 and group.startswith("/app.slice/")
        assert (groups("1"), groups("self")) == before[:2]
        directory = systemd.directory
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not directory.exists()
    after = groups("1"), groups("self"), os.listdir("/run/systemd") if os.path.isdir("/run/systemd") else None
    assert after == before


def test_without_privileges_means_without() -> None:
    with Manager(1000) as systemd:
        assert systemd.run_inside("grep", "CapEff", "/proc/self/status").stdout.split() == ["CapEff:", "0" * 16]
