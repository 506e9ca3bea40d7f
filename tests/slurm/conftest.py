"""Tests on the real cluster: marked as such, each on a cluster that is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.slurm.jobs import Jobs

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this directory is marked `slurm`."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("slurm")


@pytest.fixture(autouse=True)
def _whole_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the cluster: faults are mended and jobs ended, so that none hurts the next."""
    yield
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        cluster.heal()


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    """Plans, jobs and runs of one test: see jobs.py."""
    mine = Jobs(cluster, tmp_path)
    yield mine
    mine.close()
