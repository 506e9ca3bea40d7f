"""Runs on this machine for the tests here: see local.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.local import Local


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    """Plans and runs of one test."""
    with Local(tmp_path) as mine:
        yield mine
