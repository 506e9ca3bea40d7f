"""Tests under a real user manager of systemd: slow ones, and skipped with the reason where none can run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import Jobs
from tests.systemd import manager
from tests.systemd.manager import Manager

_HERE = Path(__file__).parent


@functools.cache
def _missing() -> str | None:
    return manager.missing()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this directory is marked `systemd` and `slow`."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("systemd")
            item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips where no manager can run."""
    if item.path.is_relative_to(_HERE) and (reason := _missing()):
        pytest.skip(reason)


@pytest.fixture
def systemd() -> Iterator[Manager]:
    """A user manager of its own for a test."""
    with Manager() as running:
        yield running


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    """Jobs of one test on the real cluster, which is whole again afterwards."""
    mine = Jobs(cluster, tmp_path)
    yield mine
    mine.close()
    cluster.heal()
