"""Receipts on the disk: whole or not there, sealed once, and nothing left of what failed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.engine import receipts
from supervisor.runs.papers import Unreadable, read_with_digest

DOCUMENT = {"schema_version": 1, "text": "Größe", "name": "strange \udcff"}


def test_what_is_written_is_read_back_with_its_checksum(tmp_path: Path) -> None:
    path = receipts.write_run_receipt(tmp_path, DOCUMENT)
    assert read_with_digest(str(tmp_path), "receipt.run.json") == (
        DOCUMENT,
        hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    assert "Größe" in path.read_text()
    assert os.listdir(tmp_path) == ["receipt.run.json"]


def test_a_second_one_takes_the_place_of_the_first(tmp_path: Path) -> None:
    receipts.write_run_receipt(tmp_path, DOCUMENT)
    receipts.write_run_receipt(tmp_path, {"second": 2})
    found = read_with_digest(str(tmp_path), "receipt.run.json")
    assert found is not None
    assert found[0] == {"second": 2}


def test_no_receipt_and_what_is_none(tmp_path: Path) -> None:
    assert read_with_digest(str(tmp_path), "receipt.run.json") is None
    for content in (b"", b"{", b"[]", b"\xff"):
        (tmp_path / "receipt.run.json").write_bytes(content)
        with pytest.raises(Unreadable, match=r"receipt\.run\.json"):
            read_with_digest(str(tmp_path), "receipt.run.json")


def test_the_first_seal_stays(tmp_path: Path) -> None:
    assert receipts.seal(tmp_path, {"first": 1})
    assert not receipts.seal(tmp_path, {"second": 2})
    assert json.loads((tmp_path / "receipt.json").read_text()) == {"first": 1}
    assert os.listdir(tmp_path) == ["receipt.json"]


def test_a_seal_is_not_put_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "receipt.json").symlink_to("elsewhere")
    assert not receipts.seal(tmp_path, DOCUMENT)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("call", ["fsync", "replace", "link"])
def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    (tmp_path / "receipt.run.json").write_text("before")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    if call == "link":
        with pytest.raises(OSError, match="No space left"):
            receipts.seal(tmp_path, DOCUMENT)
    else:
        with pytest.raises(OSError, match="No space left"):
            receipts.write_run_receipt(tmp_path, DOCUMENT)
    assert os.listdir(tmp_path) == ["receipt.run.json"]
    assert (tmp_path / "receipt.run.json").read_text() == "before"


def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    receipts.write_run_receipt(tmp_path, DOCUMENT)
    assert read_with_digest(str(tmp_path), "receipt.run.json") is not None


def test_the_outcome_file_in_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    written = receipts.write_outcome([".", tmp_path, other], "12", "12|COMPLETED|0:0\n")
    assert written == [tmp_path / "slurm_job_12_outcome.txt", other / "slurm_job_12_outcome.txt"]
    assert {path.read_text() for path in written} == {"12|COMPLETED|0:0\n"}
    receipts.write_outcome([other], "12", "12|FAILED|1:0")
    assert written[1].read_text() == "12|FAILED|1:0\n"
