"""Collecting: what a pattern means, whole copies with their checksums, and nothing that a job could trick us into."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.agent.copying import Limits
from supervisor.core.layout import Layout
from supervisor.core.plan import parse_plan
from supervisor.engine.collect import collect, collect_shared
from supervisor.engine.promised import Collection, Promised
from tests.mounts import two_mounts

LIMIT = 60.0  # seconds


def layout(run_dir: Path, *patterns: str) -> Layout:
    plan = parse_plan(
        {
            "job": {"name": "x", "nodes": 1},
            "coordinator": {"rank": 0},
            "roles": {"client": {"ranks": 0, "command": ["true"]}},
            "collect": {"paths": list(patterns)},
        },
        "plan.toml",
    )
    return Layout(plan, "run-1", "job-1", str(run_dir), ("n1",), "nonce")


class Collected:
    """What came of collecting `patterns` in a run directory."""

    def __init__(self, run_dir: Path, *patterns: str, promised: Sequence[Promised] = (), size_max: int = 1 << 30):
        self.run_dir = run_dir
        self.done = Collection()
        collect_shared(layout(run_dir, *patterns), promised, Limits(size_max, LIMIT), self.done)

    @property
    def files(self) -> list[dict[str, Any]]:
        return self.done.files

    @property
    def errors(self) -> list[str]:
        return self.done.errors

    @property
    def sources(self) -> list[str]:
        """The files that were taken, as paths relative to the run directory."""
        return sorted(os.path.relpath(item["source"], self.run_dir) for item in self.files)


def facts(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return {"path": str(path), "source": str(path), "size": len(content), "sha256": digest}


def write(path: Path, content: bytes = b"content") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run[1]*"  # a name that would be a pattern
    path.mkdir()
    return path


def test_copies_are_whole_and_their_facts_are_right(run_dir: Path) -> None:
    content = os.urandom(3 * 1024 * 1024 + 1)
    source = write(run_dir / "out/result.bin", content)
    source.chmod(0o4640)
    done = Collected(run_dir, "out/*.bin")
    assert done.errors == []
    target = run_dir / "collected/out/result.bin"
    digest = hashlib.sha256(content).hexdigest()
    assert done.files == [{"path": str(target), "source": str(source), "size": len(content), "sha256": digest}]
    assert target.read_bytes() == content
    assert stat.S_IMODE(target.stat().st_mode) == 0o640  # who may read it, but not as whom it runs
    assert [path.name for path in target.parent.iterdir()] == ["result.bin"]


def test_contract_files_are_checksummed_where_they_are(run_dir: Path) -> None:
    path = write(run_dir / "result.json")
    done = Collected(run_dir, promised=[Promised("result", str(run_dir), "result.json")] * 2)
    assert done.files == [facts(path)]
    assert not (run_dir / "collected").exists()


def test_a_checksum_that_a_look_has_made_is_not_made_again(run_dir: Path) -> None:
    """As long as the file has the size and the time that it had then."""
    path = write(run_dir / "deep/result.json")
    status = path.stat()
    known = Promised("result", str(run_dir), "deep/result.json", status.st_size, status.st_mtime_ns, "ab" * 32)
    assert Collected(run_dir, promised=[known]).files == [{**facts(path), "sha256": "ab" * 32}]
    for other in (replace(known, size=6), replace(known, mtime_ns=1), replace(known, sha256=None)):
        assert Collected(run_dir, promised=[other]).files == [facts(path)]


def test_a_contracts_file_that_is_copied_is_read_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(run_dir / "result.json")
    opened = []
    real = os.open

    def counting(path: Any, *args: Any, **more: Any) -> int:
        opened.append(path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", counting)
    done = Collected(run_dir, "*.json", promised=[Promised("result", str(run_dir), "result.json")])
    assert opened.count("result.json") == 2  # once to ask how it is, and once to read it
    copied = {**facts(path), "path": str(run_dir / "collected/result.json")}
    assert done.files == [copied, facts(path)]


def test_a_contracts_root_that_became_a_link_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "secret/result.json")
    (run_dir / "out").symlink_to(path.parent)
    status = path.stat()
    known = Promised("result", str(run_dir / "out"), "result.json", status.st_size, status.st_mtime_ns, "ab" * 32)
    why = f"{run_dir}/out: Not a directory"
    for item in (known, replace(known, sha256=None)):
        done = Collected(run_dir, promised=[item])
        assert (done.files, done.errors) == ([], [f"collect: {item.where}: {why}"])


@pytest.mark.parametrize("name", ["gone.json", "link.json", "away/key", "fifo"])
def test_a_contracts_file_that_is_none_any_more(run_dir: Path, tmp_path: Path, name: str) -> None:
    secret = write(tmp_path / "secret/key")
    (run_dir / "link.json").symlink_to(secret)
    (run_dir / "away").symlink_to(secret.parent)
    os.mkfifo(run_dir / "fifo")
    done = Collected(run_dir, promised=[Promised("result", str(run_dir), name)])
    why = {
        "gone.json": "found nothing any more",
        "link.json": "found a symbolic link; expected a file",
        "away/key": "away: found a symbolic link; expected a directory",
        "fifo": "found a FIFO; expected a file",
    }[name]
    assert done.files == []
    assert done.errors == [f"collect: {run_dir}/{name}: {why}"]


def judged(run_dir: Path, name: str, content: bytes = b"content") -> Promised:
    """A file that a look has judged: its facts as they are now."""
    status = write(run_dir / name, content).stat()
    digest = hashlib.sha256(content).hexdigest()
    return Promised("result", str(run_dir), name, status.st_size, status.st_mtime_ns, digest)


def test_what_is_as_it_was_judged_is_not_told(run_dir: Path) -> None:
    """Nor is a file that was written again with the same bytes."""
    files = [judged(run_dir, f"out/{number}.json") for number in range(3)]
    os.utime(run_dir / "out/1.json", ns=(1, 1))
    done = Collected(run_dir, promised=files).done
    assert (done.compared, done.differing) == (["result"], {})


def test_what_is_not_as_it_was_judged(run_dir: Path) -> None:
    names = ("gone", "other", "link", "longer", "moved/x")
    files = {name: judged(run_dir, name) for name in names}
    (run_dir / "gone").unlink()
    write(run_dir / "other", b"CONTENT")
    os.utime(run_dir / "other", ns=(1, 1))
    (run_dir / "link").unlink()
    (run_dir / "link").symlink_to("other")
    write(run_dir / "longer", b"contents")
    (run_dir / "moved").rename(run_dir / "away")
    (run_dir / "moved").symlink_to("away")
    done = Collected(run_dir, promised=list(files.values())).done
    found = {item["path"]: (item["found"], item["sha256"]) for item in done.event().differing}
    other, longer = (hashlib.sha256(content).hexdigest() for content in (b"CONTENT", b"contents"))
    assert found == {
        "gone": ("nothing", None),
        "other": ("a file", other),
        "link": ("a symbolic link", None),
        "longer": ("a file", longer),
        "moved/x": ("nothing", None),
    }
    assert done.compared == ["result"]


def test_what_another_node_has_changed_is_seen_through_a_client_that_remembers(run_dir: Path, tmp_path: Path) -> None:
    with two_mounts(tmp_path) as (here, there):
        write(here / "r.json", b"old")
        known = (there / "r.json").stat()
        digest = hashlib.sha256(b"old").hexdigest()
        item = Promised("result", str(there), "r.json", known.st_size, known.st_mtime_ns, digest)
        write(here / "r.json", b"other content")
        done = Collected(run_dir, promised=[item])
        assert [fact["sha256"] for fact in done.files] == [hashlib.sha256(b"other content").hexdigest()]
        assert [told["size"] for told in done.done.event().differing] == [13]


def test_copies_are_whole_through_a_client_that_remembers(run_dir: Path, tmp_path: Path) -> None:
    with two_mounts(tmp_path) as (here, there):
        write(here / "log", b"short")
        assert (there / "log").stat().st_size == 5
        write(here / "log", b"longer by now")
        done = Collected(run_dir, f"{there}/*")
        assert (done.errors, [fact["size"] for fact in done.files]) == ([], [13])


def test_directories_are_listed_once_however_many_files_are_promised(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [judged(run_dir, f"out/{number}.json") for number in range(200)]
    files += [replace(judged(run_dir, f"new/{number}.json"), sha256=None) for number in range(200)]
    listed: list[Any] = []
    real = os.listdir

    def counting(path: Any) -> list[str]:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", counting)
    done = Collected(run_dir, promised=files)
    assert (len(done.files), done.errors) == (400, [])
    assert len(listed) == 2 * 3  # two levels, twice compared and once read


def test_checksums_that_nobody_needs_are_not_made_of_what_is_large(run_dir: Path) -> None:
    """It comes after what the plan asks for, and says so."""
    with write(run_dir / "huge.bin").open("r+b") as file:
        file.truncate(100 << 30)
    status = (run_dir / "huge.bin").stat()
    huge = Promised("result", str(run_dir), "huge.bin", status.st_size, status.st_mtime_ns, None)
    write(run_dir / "a.txt")
    done = Collected(run_dir, "*.txt", promised=[huge])
    assert done.errors == []
    assert [(os.path.basename(item["source"]), bool(item["sha256"])) for item in done.files] == [
        ("a.txt", True),
        ("huge.bin", False),
    ]
    assert "are read at the end" in done.files[1]["remark"]


@pytest.mark.parametrize(
    ("patterns", "sources"),
    [
        (["a.txt"], ["a.txt"]),
        (["*.txt"], ["a.txt"]),
        (["**/*.txt"], ["a.txt", "deep/b.txt", "deep/er/c.txt"]),
        (["deep/*"], ["deep/b.txt"]),
        (["deep/[ab].txt"], ["deep/b.txt"]),
        (["{run_dir}/a.txt"], ["a.txt"]),
        (["job-1.{jobid}"], ["job-1.job-1"]),
        (["a.txt", "*.txt", "**/a.txt"], ["a.txt"]),
        ([".hidden"], [".hidden"]),
    ],
)
def test_patterns(run_dir: Path, patterns: list[str], sources: list[str]) -> None:
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", "job-1.job-1", ".hidden"):
        write(run_dir / name)
    done = Collected(run_dir, *patterns)
    assert (done.sources, done.errors) == (sources, [])


def test_what_is_collected_is_not_collected_again(run_dir: Path) -> None:
    write(run_dir / "a.txt")
    done = Collected(run_dir, "a.txt", "**/*.txt")
    assert (done.sources, done.errors) == (["a.txt"], [])


def test_what_matches_nothing_is_an_error_for_each_pattern(run_dir: Path) -> None:
    (run_dir / "empty").mkdir()
    done = Collected(run_dir, "*.json", "empty/*", "empty")
    assert done.errors == [f"collect: nothing matches {pattern}" for pattern in ("*.json", "empty/*", "empty")]


def test_files_elsewhere(run_dir: Path, tmp_path: Path) -> None:
    """They go below `collected` by their whole path; a link on the way that the plan names is the site's."""
    write(tmp_path / "scratch/job/a.txt")
    (tmp_path / "site").symlink_to("scratch")
    done = Collected(run_dir, f"{tmp_path}/site/job/*.txt")
    assert done.errors == []
    (item,) = done.files
    assert item["path"] == f"{run_dir}/collected{tmp_path}/site/job/a.txt"


def test_two_files_of_one_name(run_dir: Path, tmp_path: Path) -> None:
    """The first stays as it is, the second is an error."""
    outside = write(tmp_path / "a.txt", b"second")
    write(run_dir / str(outside).lstrip("/"), b"first")
    done = Collected(run_dir, str(outside).lstrip("/"), str(outside))
    target = run_dir / "collected" / str(outside).lstrip("/")
    assert target.read_bytes() == b"first"
    assert done.errors == [f"collect: {outside}: another file was collected as {target}"]


def test_no_link_is_followed(run_dir: Path, tmp_path: Path) -> None:
    """Neither a file's, nor a directory's before it, nor a dangling one, nor one that leads in circles; each is told
    once."""
    secret = write(tmp_path / "secret/key")
    (run_dir / "link").symlink_to(secret)
    (run_dir / "dangling").symlink_to("nowhere")
    (run_dir / "away").symlink_to(secret.parent)
    (run_dir / "circle").symlink_to(".")
    write(run_dir / "plain")
    done = Collected(run_dir, "**")
    assert done.sources == ["plain"]
    named = {error.removeprefix("collect: ").removesuffix(": a symbolic link, not followed") for error in done.errors}
    assert named == {str(run_dir / name) for name in ("link", "dangling", "away", "circle")}
    assert len(done.errors) == 4
    for pattern in ("link", "away/key", f"{run_dir}/away/*"):
        done = Collected(run_dir, pattern)
        assert done.files == []
        assert len(done.errors) == 1


def test_a_link_that_a_wildcard_finds_elsewhere_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret/key")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a").symlink_to(tmp_path / "secret")
    done = Collected(run_dir, f"{tmp_path}/out/*/key")
    assert done.files == []
    assert done.errors == [f"collect: {tmp_path}/out/a: a symbolic link, not followed"]


def test_what_is_no_plain_file_is_not_waited_for(run_dir: Path) -> None:
    os.mkfifo(run_dir / "fifo")
    done = Collected(run_dir, "fifo")
    assert done.errors == [f"collect: {run_dir}/fifo: not a regular file"]


def test_a_file_that_cannot_be_read_hides_no_other(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_dir / "a"), write(run_dir / "b")
    real = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> int:
        if path == "a":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    done = Collected(run_dir, "*")
    assert done.sources == ["b"]
    assert done.errors == [f"collect: {run_dir}/a: Permission denied"]


def test_a_copy_that_breaks_off_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_dir / "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    done = Collected(run_dir, "a")
    assert done.errors == [f"collect: {run_dir}/a: No space left on device"]
    assert list((run_dir / "collected").iterdir()) == []


# --- all of it, within a limit -----------------------------------------------------------------------------------


class Nodes:
    """A way to the nodes: what it answers, and what it was asked for."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    async def __call__(self, rank: int, limit: float) -> str:
        self.asked.append(rank)
        return self.answers[len(self.asked) - 1]


def node_layout(run_dir: Path, ranks: int, *patterns: str) -> Layout:
    data: dict[str, Any] = {
        "job": {"name": "x", "nodes": ranks},
        "coordinator": {"rank": 0},
        "roles": {"all": {"ranks": f"0-{ranks - 1}", "command": ["true"]}},
        "collect": {"nodes": ["/tmp/x/*"], "paths": list(patterns), "size_max": 100},
    }
    return Layout(parse_plan(data, "plan.toml"), "run-1", "job-1", str(run_dir), ("n1", "n2", "n3")[:ranks], "nonce")


def told_by_node(run_dir: Path, rank: int, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write(run_dir / f"collected/nodes/{rank}.jsonl", text.encode())


BEGIN, END = {"begin": 1}, {"end": 1}
FACT = {"path": "/c/a", "source": "/a", "size": 10, "sha256": "00"}


async def test_only_nodes_that_are_not_done_are_fetched_from(run_dir: Path) -> None:
    told_by_node(run_dir, 0, BEGIN, FACT, {"error": "/b: why"}, END)
    told_by_node(run_dir, 1, BEGIN, FACT)
    nodes = Nodes("")
    done = await collect(node_layout(run_dir, 3), nodes, 5.0, promised=(), started=[0, 1])
    assert nodes.asked == [1]
    assert done.files == [{**FACT, "rank": 0}, {**FACT, "rank": 1}]
    assert done.errors == [
        "collect: rank 0 on n1: /b: why",
        "collect: rank 1 on n2: not everything was fetched: its fetching was cut off",
        "collect: rank 2 on n3: not everything was fetched: it was never started",
    ]


async def test_each_try_to_fetch_begins_anew_and_copies_stay(run_dir: Path) -> None:
    told_by_node(run_dir, 0, BEGIN, FACT, {"error": "/b: why"}, END, BEGIN)
    nodes = Nodes("")
    done = await collect(node_layout(run_dir, 1), nodes, 5.0, promised=(), started=[0])
    assert nodes.asked == [0], "the last try was cut off"
    assert done.files == [{**FACT, "rank": 0}]
    assert done.errors == ["collect: rank 0 on n1: not everything was fetched: its fetching was cut off"]


async def test_fetching_again_from_every_node(run_dir: Path) -> None:
    told_by_node(run_dir, 0, BEGIN, FACT, END)
    nodes = Nodes("no step could be made")
    done = await collect(node_layout(run_dir, 1), nodes, 5.0, promised=(), started=[0], again=True)
    assert nodes.asked == [0]
    assert done.files == [{**FACT, "rank": 0}], "what was fetched before is there"
    assert done.errors == ["collect: rank 0 on n1: not everything was fetched: no step could be made"]


async def test_what_the_nodes_have_filled_is_not_there_for_others(run_dir: Path) -> None:
    """Of 100 bytes, 40 are fetched; one that may still fetch keeps its third."""
    told_by_node(run_dir, 0, BEGIN, {**FACT, "size": 40}, END)
    write(run_dir / "a", b"x" * 27), write(run_dir / "b", b"x" * 27)
    done = await collect(node_layout(run_dir, 2, "*"), Nodes(""), 5.0, promised=(), started=[0, 1])
    assert [item["path"] for item in done.files if "rank" not in item] == [str(run_dir / "collected/a")]
    assert done.errors[0] == f"collect: {run_dir}/b: 27 bytes, but only 0 more may be copied"


async def test_facts_that_cannot_be_read_are_told(run_dir: Path) -> None:
    (run_dir / "collected/nodes/0.jsonl").mkdir(parents=True)
    done = await collect(node_layout(run_dir, 1), Nodes(""), 5.0, promised=(), started=[0])
    assert any("what was fetched is not known" in text for text in done.errors)


async def test_the_archive_is_part_of_it(run_dir: Path) -> None:
    write(run_dir / "logs/rank-0.out")
    path = run_dir / "all.tgz"
    done = await collect(layout(run_dir), Nodes(), 5.0, promised=(), started=[0], archive=str(path))
    assert done.files == [facts(path)]
    assert done.errors == []


async def test_what_was_done_so_far_is_had_when_the_rest_hangs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run_dir / "a"), write(run_dir / "b")
    answer = threading.Event()
    real = os.open

    def hang(path: Any, *args: Any, **more: Any) -> int:
        if path == "b":
            answer.wait(10)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", hang)
    try:
        everything = await collect(
            layout(run_dir, "*"), Nodes(), 0.3, promised=(), started=[0], archive=str(run_dir / "x.tgz")
        )
    finally:
        answer.set()
    assert [item["source"] for item in everything.files] == [str(run_dir / "a")]
    assert everything.errors[0] == "collect: copying did not end within the time for collecting"
    assert not (run_dir / "x.tgz").exists()
