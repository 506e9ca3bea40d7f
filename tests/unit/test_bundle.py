"""The archive of a run: what is in it, what is told of what is not, and that it is whole or not there."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.copying import Limits, opened_file
from supervisor.engine import bundle as bundling
from supervisor.engine.bundle import bundle


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    root = tmp_path / "runs/7"
    for name in (
        "plan.toml",
        ".bench_done.7",
        "journal.jsonl",
        "logs/rank-0.out",
        "collected/a/.b",
        "receipt.run.json",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def make(run_dir: Path, size: int = 1 << 30, seconds: float = 60.0) -> tuple[dict[str, Any], dict[str, str]]:
    trouble: dict[str, str] = {}
    return bundle(str(run_dir), str(run_dir / "all.tgz"), Limits(size, seconds), trouble.__setitem__), trouble


def members(run_dir: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(run_dir / "all.tgz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            found[member.name] = content.read()
    return found


WHOLE = {f"7/{name}": name.encode() for name in (".bench_done.7", "logs/rank-0.out", "collected/a/.b")}


def test_what_is_in_it(run_dir: Path) -> None:
    fact, trouble = make(run_dir)
    path = run_dir / "all.tgz"
    assert (members(run_dir), trouble) == (WHOLE, {})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert fact == {"path": str(path), "source": str(path), "size": path.stat().st_size, "sha256": digest}
    assert make(run_dir)[0]["path"] == str(path), "an older one is replaced"


def test_what_is_no_plain_file_is_not_in_it(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (run_dir / "logs/link").symlink_to(tmp_path / "secret")
    (run_dir / "collected/away").symlink_to(tmp_path)
    os.mkfifo(run_dir / "logs/fifo")
    _, trouble = make(run_dir)
    assert members(run_dir) == WHOLE
    assert trouble == {
        str(run_dir / "logs/link"): "not in the archive: a symbolic link, not followed",
        str(run_dir / "collected/away"): "not in the archive: a symbolic link, not followed",
        str(run_dir / "logs/fifo"): "not in the archive: not a regular file",
    }


def test_its_size_is_limited(run_dir: Path) -> None:
    (run_dir / "logs/rank-0.out").write_bytes(b"x" * 1000)
    _, trouble = make(run_dir, size=100)
    assert trouble == {
        str(run_dir / "logs/rank-0.out"): "not in the archive: 1000 bytes, but only 87 more may be copied"
    }
    assert members(run_dir) == {name: data for name, data in WHOLE.items() if not name.endswith(".out")}


def test_past_its_time_there_is_none(run_dir: Path) -> None:
    with pytest.raises(OSError, match="the time for collecting was over"):
        make(run_dir, seconds=-1.0)
    assert not [path for path in run_dir.iterdir() if "all.tgz" in path.name]


@pytest.mark.parametrize(
    ("meddle", "content", "told"),
    [
        (
            lambda path: os.truncate(path, 4),
            b"logs" + bytes(11),
            "damaged in the archive: it became shorter while it was read",
        ),
        (lambda path: path.write_bytes(b"logs/rank-0.out and more"), b"logs/rank-0.out", ""),
    ],
)
def test_a_log_that_changes_meanwhile_does_not_break_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, meddle: Callable[[Path], Any], content: bytes, told: str
) -> None:
    path, real = run_dir / "logs/rank-0.out", opened_file

    def meddled(name: str, directory: int | None = None) -> Any:
        found = real(name, directory)
        if name != path.name:
            return found
        return Meddling(found, lambda: meddle(path))

    monkeypatch.setattr(bundling, "opened_file", meddled)
    _, trouble = make(run_dir)
    assert members(run_dir) == {**WHOLE, "7/logs/rank-0.out": content}
    assert trouble == ({str(path): told} if told else {})


class Meddling:
    """An open file that somebody changes as soon as it is open."""

    def __init__(self, found: Any, meddle: Callable[[], Any]) -> None:
        self.found, self.meddle = found, meddle

    def __enter__(self) -> Any:
        opened = self.found.__enter__()
        self.meddle()
        return opened

    def __exit__(self, *error: Any) -> None:
        self.found.__exit__(*error)
