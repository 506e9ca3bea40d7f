"""Finding and copying files: what a pattern means, what is refused, and copies that are whole or not there."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent import copying
from supervisor.agent.copying import Copy, Gatherer, Limits, checksum, copy, escape, made, opened, search, split

PLENTY = 1 << 40


def limits(size: int = PLENTY, seconds: float = 60.0) -> Limits:
    return Limits(size, seconds)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def copied(source: Path, target: Path, within: Limits | None = None) -> Copy:
    with opened(str(source.parent), copying.ROOT) as directory, made(str(target), []) as place:
        return copy(directory, source.name, place, within or limits())


def found(pattern: str, hidden: bool = False) -> list[str]:
    return [match.path for match in search(*split(pattern), hidden=hidden) if not match.problem]


def problems(pattern: str) -> dict[str, str]:
    return {match.path: match.problem for match in search(*split(pattern)) if match.problem}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree[1]"
    for name in ("a.txt", "b.log", ".hidden/x.txt", "deep/c.txt", "deep/er/d.txt", "deep/er/[x]"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.txt", ["a.txt"]),
        ("./a.txt", ["a.txt"]),
        ("*", ["a.txt", "b.log"]),
        ("**", ["a.txt", "b.log", "deep/c.txt", "deep/er/[x]", "deep/er/d.txt"]),
        ("**/*.txt", ["a.txt", "deep/c.txt", "deep/er/d.txt"]),
        ("**/er/*", ["deep/er/[x]", "deep/er/d.txt"]),
        ("*/*/d.txt", ["deep/er/d.txt"]),
        (".hidden/*", [".hidden/x.txt"]),
        ("deep/er/[[]x]", ["deep/er/[x]"]),
        ("deep", []),
        ("a.txt/b", []),
        ("missing/*", []),
    ],
)
def test_patterns(tree: Path, pattern: str, names: list[str]) -> None:
    assert found(f"{escape(str(tree))}/{pattern}") == [str(tree / name) for name in names]


def test_hidden_names_are_found_where_all_is_wanted(tree: Path) -> None:
    (tree / ".12.0123abcd.tmp").write_text("half of a copy that was cut off")
    everything = found(f"{escape(str(tree))}/**", hidden=True)
    assert [os.path.relpath(path, tree) for path in everything if "/." in path] == [".hidden/x.txt"]


@pytest.mark.parametrize(
    ("pattern", "root", "parts"),
    [
        ("/a/b/c.txt", "/a/b", ["c.txt"]),
        ("/a/*/c.txt", "/a", ["*", "c.txt"]),
        ("/a/[[]b]/c", "/a/[b]", ["c"]),
        ("//a/./b", "/a", ["b"]),
        ("/a", "/", ["a"]),
    ],
)
def test_the_literal_part_of_a_pattern(pattern: str, root: str, parts: list[str]) -> None:
    assert split(pattern) == (root, parts)


def test_what_stands_in_the_way_is_told(tree: Path) -> None:
    (tree / "link").symlink_to("a.txt")
    (tree / "away").symlink_to("/")
    os.mkfifo(tree / "fifo")
    told = problems(f"{escape(str(tree))}/*")
    assert told == {
        str(tree / "away"): copying.LINK,
        str(tree / "link"): copying.LINK,
        str(tree / "fifo"): copying.SPECIAL,
    }
    assert problems(f"{escape(str(tree))}/*/*.txt") == {str(tree / "away"): copying.LINK}


def test_a_directory_that_may_be_entered_but_not_listed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert found(f"{escape(str(tree))}/deep/c.txt") == [str(tree / "deep/c.txt")]
    assert problems(f"{escape(str(tree))}/deep/*") == {str(tree / "deep"): "Permission denied"}


# --- one copy ----------------------------------------------------------------------------------------------------


def test_a_copy_replaces_an_older_one_and_writes_through_no_link(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "there"
    source.write_bytes(b"new")
    target.mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (target / "source").symlink_to(precious)
    done = copied(source, target)
    assert (done.size, done.sha256, done.remark) == (3, sha256(b"new"), "")
    assert (target / "source").read_bytes() == b"new" and not (target / "source").is_symlink()
    assert precious.read_bytes() == b"precious"


def test_a_file_copied_onto_itself_is_only_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"here already")
    before = source.stat()
    assert copied(source, tmp_path).sha256 == sha256(b"here already")
    os.link(source, tmp_path / "there")
    assert source.stat().st_ino == before.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]


def test_the_longest_name(tmp_path: Path) -> None:
    source = tmp_path / ("n" * 255)
    source.write_bytes(b"x")
    assert copied(source, tmp_path / "there").size == 1


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_swapped_in_after_the_listing_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "source")
    with pytest.raises(OSError, match=r"not followed|not a regular file"):
        copied(tmp_path / "source", tmp_path / "there")
    with pytest.raises(OSError, match=r"not followed|not a regular file"):
        checksum(str(tmp_path / "source"), limits())


class Meddled:
    """`os.read` that lets a writer meddle with the file after its first block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meddle: Callable[[], Any]) -> None:
        self.meddle, self.real, self.done = meddle, os.read, False
        monkeypatch.setattr(copying, "BLOCK", 4)
        monkeypatch.setattr(os, "read", self)

    def __call__(self, descriptor: int, size: int) -> bytes:
        block = self.real(descriptor, size)
        if not self.done:
            self.done = True
            self.meddle()
        return block


def test_a_file_that_grows_is_copied_as_long_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast its writer is, the copy ends; and it is said that this is not all."""
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")

    def append() -> None:
        with source.open("ab") as file:
            file.write(b"more")

    Meddled(monkeypatch, append)
    done = copied(source, tmp_path / "there")
    assert done.remark == "it changed while it was read: these are its first 10 bytes"
    assert (tmp_path / "there/source").read_bytes() == b"0123456789"
    assert done.sha256 == sha256(b"0123456789")


def test_holes_stay_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one at the end; and the checksum is that of zeros."""
    monkeypatch.setattr(copying, "BLOCK", 1 << 16)
    source, there = tmp_path / "source", tmp_path / "there/source"
    with source.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"middle" * 20_000)
        file.truncate(4 << 20)
    done = copied(source, there.parent)
    assert there.read_bytes() == source.read_bytes()
    assert (done.size, done.sha256) == (4 << 20, sha256(source.read_bytes()))
    assert there.stat().st_blocks * 512 < 1 << 20
    (tmp_path / "zeros").write_bytes(bytes(1 << 20))
    copied(tmp_path / "zeros", there.parent)
    assert there.with_name("zeros").stat().st_blocks == (tmp_path / "zeros").stat().st_blocks


def test_a_file_that_becomes_shorter_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    Meddled(monkeypatch, lambda: os.truncate(source, 5))
    with pytest.raises(OSError, match="it became shorter"):
        copied(source, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_bytes_are_limited_over_all_copies(tmp_path: Path) -> None:
    within = limits(10)
    (tmp_path / "a").write_bytes(b"1234567")
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"123")
    assert copied(tmp_path / "a", tmp_path / "there", within).size == 7
    with pytest.raises(OSError, match="5 bytes, but only 3 more may be copied"):
        copied(tmp_path / "b", tmp_path / "there", within)
    assert copied(tmp_path / "c", tmp_path / "there", within).size == 3
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["a", "c"]


def test_a_copy_ends_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    within = limits()

    def late() -> None:
        within.end = time.monotonic() - 1

    Meddled(monkeypatch, late)
    with pytest.raises(OSError, match="the time for collecting was over"):
        copied(source, tmp_path / "there", within)
    assert list((tmp_path / "there").iterdir()) == []


# --- many --------------------------------------------------------------------------------------------------------


def gathered(target: Path, base: str, *patterns: str) -> tuple[list[dict[str, Any]], dict[str, str], list[bool]]:
    files: list[dict[str, Any]] = []
    trouble: dict[str, str] = {}
    gatherer = Gatherer(str(target.parent), target.name, base, limits(), files.append, trouble.__setitem__)
    return files, trouble, [gatherer.gather(*split(pattern)) for pattern in patterns]


def test_files_below_the_base_keep_their_path_from_there(tree: Path, tmp_path: Path) -> None:
    target, pattern = tmp_path / "there", escape(str(tree))
    files, trouble, any_found = gathered(target, str(tree), f"{pattern}/deep/*", f"{pattern}/**/c.txt", f"{pattern}/no")
    assert (trouble, any_found) == ({}, [True, True, False])
    (fact,) = files
    assert fact["path"] == str(target / "deep/c.txt")
    files, _, _ = gathered(target, "/", f"{pattern}/a.txt")
    assert files[0]["path"] == f"{target}{tree}/a.txt"


@pytest.mark.parametrize("whole", [True, False])
def test_a_link_in_the_way_to_the_target_is_not_followed(tree: Path, tmp_path: Path, whole: bool) -> None:
    target, away = tmp_path / "there", tmp_path / "away"
    away.mkdir()
    if whole:
        target.symlink_to(away)
    else:
        target.mkdir()
        (target / "deep").symlink_to(away)
    files, trouble, _ = gathered(target, str(tree), f"{escape(str(tree))}/deep/c.txt")
    assert files == []
    assert list(trouble) == [str(tree / "deep/c.txt")]
    assert list(away.iterdir()) == []


def test_the_mode_says_who_may_read_but_not_as_whom_it_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    source.chmod(0o4750)
    copied(source, tmp_path / "there")
    assert stat.S_IMODE((tmp_path / "there/source").stat().st_mode) == 0o750
