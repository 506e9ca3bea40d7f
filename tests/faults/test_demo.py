"""The demo that the README shows: a real load test, and the same with a server that dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_ends_as_the_readme_shows() -> None:
    allocctl = Path(sys.executable).with_name("allocctl")
    done = subprocess.run(
        ["sh", "config/demo.sh"],
        cwd=ROOT,
        env={**os.environ, "ALLOCCTL": str(allocctl)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = done.stdout + done.stderr
    for line in done.stdout.splitlines():
        if line.startswith("== Both runs are in "):
            shutil.rmtree(ROOT / line.rpartition(" ")[2])
    assert done.returncode == 0, told
    assert "0 failed" in told
    assert "[exit 0, origin native]" in told
    assert "[exit 3, origin native]" in told
    assert "fatal: device lost after 300 requests" in told
