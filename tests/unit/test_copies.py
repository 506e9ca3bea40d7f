"""Copies of a run: what belongs to it, regular files only, and trouble with one file that hinders no other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from supervisor.runs.copies import copy_file, copy_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs/7"
    (directory / "logs").mkdir(parents=True)
    (directory / "collected/a/b").mkdir(parents=True)
    for name in (
        "receipt.json",
        "journal.jsonl",
        "logs/rank-0.a.out",
        "collected/a/b/result.json",
        "plan.toml",
        "agent.pyz",
        "up.0",
    ):
        (directory / name).write_text(name)
    (directory / "slurm_job_7_outcome.txt").write_text("7|COMPLETED|0:0\n")
    return directory


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def test_what_belongs_to_a_run(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "there/and/there"
    assert copy_run(str(run), str(target)) == []
    assert files(target) == [
        "7/collected/a/b/result.json",
        "7/journal.jsonl",
        "7/logs/rank-0.a.out",
        "7/receipt.json",
        "7/slurm_job_7_outcome.txt",
    ]
    assert (target / "7/receipt.json").read_text() == "receipt.json"
    (run / "receipt.json").write_text("newer")
    assert copy_run(str(run), str(target)) == []
    assert (target / "7/receipt.json").read_text() == "newer"


def test_what_a_job_may_have_put_there_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("secret")
    (run / "collected/link").symlink_to(tmp_path / "secret/key")
    (run / "collected/links").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "logs/fifo")
    trouble = copy_run(str(run), str(tmp_path / "there"))
    assert sorted(trouble) == [
        "'7/collected/link' could not be copied: a symbolic link, not followed",
        "'7/collected/links' could not be copied: a symbolic link, not followed",
        "'7/logs/fifo' could not be copied: not a regular file",
    ]
    assert len(files(tmp_path / "there")) == 5


def test_a_link_in_the_target_is_replaced_and_not_written_through(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there/7").mkdir(parents=True)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "there/7/receipt.json").symlink_to(tmp_path / "precious")
    assert copy_run(str(run), str(tmp_path / "there")) == []
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "there/7/receipt.json").is_symlink()


def test_trouble_with_one_file_hinders_no_other(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there/7/journal.jsonl").mkdir(parents=True)
    (trouble,) = copy_run(str(run), str(tmp_path / "there"))
    assert trouble.startswith("'7/journal.jsonl' could not be copied")
    assert files(tmp_path / "there") == [
        "7/collected/a/b/result.json",
        "7/logs/rank-0.a.out",
        "7/receipt.json",
        "7/slurm_job_7_outcome.txt",
    ]


def test_a_run_that_is_not_there_and_a_place_that_cannot_be_made(run: Path, tmp_path: Path) -> None:
    assert "could not be copied: No such file" in copy_run(str(tmp_path / "8"), str(tmp_path / "there"))[0]
    (tmp_path / "file").touch()
    assert "could not be copied" in copy_run(str(run), str(tmp_path / "file"))[0]


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "slurm-7.out").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "slurm-7.out")
    assert copy_file(str(tmp_path / "slurm-7.out"), str(tmp_path / "there")) == []
    assert copy_file(str(tmp_path / "link"), str(tmp_path / "there")) != []
    assert files(tmp_path / "there") == ["slurm-7.out"]
