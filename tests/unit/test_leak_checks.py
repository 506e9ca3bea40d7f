"""The looks that conftest.py takes after each test see what a test leaves behind, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_TESTS = """
import asyncio, os, subprocess, threading

def test_child():
    os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)

def test_zombie():
    os.waitid(os.P_PID, os.posix_spawn("/bin/true", ["true"], os.environ), os.WEXITED | os.WNOWAIT)

def test_descriptor():
    os.pipe()

def test_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

async def test_task():
    globals()["kept"] = asyncio.create_task(asyncio.sleep(1000), name="lost")

async def test_clean():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    subprocess.run(["true"], check=True)
    await asyncio.to_thread(os.getpid)
    process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    task = asyncio.create_task(process.wait())
    await process.communicate(b"")
    await task
"""


@pytest.mark.slow
def test_each_kind_of_leak_is_an_error_of_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_leaks.py").write_text(_TESTS)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", str(_ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    errors = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")}
    assert errors == {"test_child", "test_zombie", "test_descriptor", "test_thread", "test_task"}, done.stdout
    assert "6 passed, 5 errors" in done.stdout
    for word in ("sleep 1000", "nobody waited", "pipe:", "thread forgotten", "name='lost'"):
        assert word in done.stdout
