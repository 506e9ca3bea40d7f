"""File systems for tests: one directory, mounted twice (what is written through one mount raises no event on the other,
as on NFS); and a small one, that is soon full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def two_mounts(directory: Path, **timeouts: float) -> Iterator[tuple[Path, Path]]:
    """A directory, here and through a client that remembers missing names for 20 s. Skips where FUSE is not to be had.
    `timeouts`: others than 20 s, by FUSE's names (attr_timeout=0.2)."""
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    here, there = directory / "here", directory / "there"
    here.mkdir()
    there.mkdir()
    cached = {"negative_timeout": 20, "entry_timeout": 20, "attr_timeout": 20, **timeouts}
    options = ",".join(f"{name}={seconds:g}" for name, seconds in cached.items())
    if subprocess.run(["bindfs", "-o", options, here, there], check=False).returncode:
        pytest.skip("this user may not mount")
    try:
        yield here, there
    finally:
        subprocess.run(["fusermount", "-u", "-z", there], check=True)


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of a megabyte, there. Skips where none can be mounted."""
    if os.geteuid():
        pytest.skip("only root mounts a file system")
    place.mkdir(mode=0o700)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "allocd-test", str(place)]
    done = subprocess.run(mounting, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], timeout=30, check=True)


def fill(path: Path) -> None:
    """Make a file that takes what is left, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
