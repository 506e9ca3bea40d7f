"""The marker: format, files, waiting, and `allocctl marker`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli import marker as verb
from supervisor.core.marker import (
    MAX_BYTES,
    Foreign,
    Garbage,
    Marker,
    MarkerError,
    NotYet,
    Patience,
    Reading,
    attempt_from,
    effective,
    judge,
    parse,
    render,
)
from supervisor.engine import markers
from supervisor.engine.markers import Naming
from supervisor.watch import inotify
from supervisor.watch.inotify import Inotify
from tests.mounts import two_mounts

VALUES = st.none() | st.from_regex(r"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)
MARKERS = st.builds(
    Marker,
    code=st.integers(0, 255),
    attempt=VALUES,
    rank=st.none() | st.integers(0, 10**9 - 1),
    host=VALUES,
    by=VALUES,
    at=VALUES,
)


# The format


@given(MARKERS)
def test_what_is_rendered_reads_back_equal(marker: Marker) -> None:
    assert parse(render(marker)) == marker


@given(MARKERS)
def test_the_first_line_alone_is_enough_for_a_simple_reader(marker: Marker) -> None:
    assert render(marker).split(b"\n")[0] == str(marker.code).encode()


@given(MARKERS)
def test_no_prefix_says_anything_else_than_the_whole(marker: Marker) -> None:
    data = render(marker)
    seal = data.index(b"\n")
    for length in range(len(data)):
        reading = parse(data[:length])
        if length <= seal:
            assert isinstance(reading, NotYet)
        else:
            assert isinstance(reading, Marker)
            assert reading.code == marker.code
            assert reading.attempt in (None, marker.attempt)


@given(MARKERS.filter(lambda marker: marker.attempt is not None), st.data())
def test_a_torn_line_never_passes_for_an_attempt(marker: Marker, draw: st.DataObject) -> None:
    """Unless it is cut exactly after the code, where no reader can know that more will come."""
    data = render(marker)
    first = data.index(b"\n") + 1
    attempt = str(marker.attempt)
    other = draw.draw(st.sampled_from([attempt[: length + 1] for length in range(len(attempt) - 1)] + ["another one"]))
    for length in range(len(data)):
        if length != first:
            assert isinstance(judge(data[:length], other), NotYet | Foreign)


@given(st.binary(max_size=40) | st.binary(max_size=3).map(lambda code: code + b"\n"))
def test_any_bytes_are_judged_and_only_numbers_count(data: bytes) -> None:
    reading = parse(data)
    if isinstance(reading, Marker):
        assert data.split(b"\n")[0] == str(reading.code).encode()
        assert 0 <= reading.code <= 255


@given(st.integers(0, 400), st.binary(max_size=50))
def test_a_number_and_a_newline_count_whatever_follows(number: int, rest: bytes) -> None:
    reading = parse(f"{number}\n".encode() + rest)
    assert isinstance(reading, Marker if number <= 255 else Garbage)


@pytest.mark.parametrize(
    "data",
    [
        *(b"abc\n", b"300\n", b"256\n", b"-1\n", b"+1\n", b" 7\n", b"7 \n", b"7\r\n", b"007\n", b"00\n"),
        *(b"\n", b"\n7\n", b"7\t\n", b"7 # done\n", b"0x7\n", b"1e1\n", b"7.0\n", b"1_0\n", b"\0007\n", b"7\0\n"),
        *("٧\n".encode(), "７\n".encode(), b"\xef\xbb\xbf7\n", b"\xff\n", b"7" * 17, b"x" * 17),
        b"7\n" + b"#" * MAX_BYTES,
    ],
)
def test_garbage(data: bytes) -> None:
    reading = parse(data)
    assert isinstance(reading, Garbage)
    assert reading.reason


@pytest.mark.parametrize("data", [b"", b"1", b"12", b"abc", b"\0", b"\0" * 200, b"x" * 16])
def test_not_yet(data: bytes) -> None:
    assert isinstance(parse(data), NotYet)


def test_lines_that_do_not_inform_are_skipped_and_the_first_of_a_key_counts() -> None:
    data = b"3\nhello\nattempt=\nattempt= x\nattempt=9\nattempt=8\nrank=-2\nrank=x\nby=super\x07visor\nhost=n\xff\n"
    assert parse(data) == Marker(3, attempt="9")


@pytest.mark.parametrize(
    "marker",
    [
        *(Marker(-1), Marker(256), Marker(0, rank=-1), Marker(0, rank=10**9)),
        *(Marker(0, attempt=""), Marker(0, attempt="a\n0"), Marker(0, host=" n"), Marker(0, by="é")),
        Marker(0, at="x" * 513),
    ],
)
def test_what_would_not_read_back_is_not_rendered(marker: Marker) -> None:
    with pytest.raises(MarkerError):
        render(marker)


def test_the_largest_marker_is_within_the_cap() -> None:
    long = "x" * 512
    marker = Marker(255, long, 10**9 - 1, long, long, long)
    assert len(render(marker)) <= MAX_BYTES
    assert parse(render(marker)) == marker


@pytest.mark.parametrize(
    ("data", "attempt", "expected"),
    [
        (b"3\nattempt=9\n", "9", Marker),
        (b"3\nattempt=9\n", None, Marker),
        (b"3\nattempt=9\n", "9.r1", Foreign),
        (b"3\n", "9", Marker),
        (b"3\nattempt=9", "9", NotYet),
        (b"3\nattempt=9", None, Marker),
        (b"3\nattempt=9\nrank=", "9", Marker),
        (b"x\nattempt=9\n", "9", Garbage),
    ],
)
def test_a_marker_counts_for_its_attempt(data: bytes, attempt: str | None, expected: type) -> None:
    assert isinstance(judge(data, attempt), expected)


def test_the_first_failure_is_kept() -> None:
    assert [effective(0, 0), effective(0, 3), effective(5, 0), effective(5, 3)] == [0, 3, 5, 3]


@pytest.mark.parametrize(
    ("environ", "attempt"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}, "7"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7.r2"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "7_3"),
        ({"SLURM_JOB_ID": "7", "ALLOCD_RUN_ID": "7.s2"}, "7.s2"),
    ],
)
def test_the_attempt_of_a_process(environ: dict[str, str], attempt: str | None) -> None:
    assert attempt_from(environ) == attempt


# Patience

ABSENT = NotYet("absent", present=False)
BAD = Garbage("bad")
Look = tuple[float, Reading, bool]


@pytest.mark.parametrize(
    ("looks", "outcome", "code"),
    [
        ([(1.0, Marker(3), True)], "marker", 3),
        ([(1.0, Marker(3), False)], "marker", 3),
        ([(1.0, ABSENT, True), (99.0, ABSENT, True)], None, None),
        ([(1.0, ABSENT, False)], None, None),
        ([(1.0, ABSENT, False), (6.0, ABSENT, False)], "dead", 1),
        ([(1.0, ABSENT, False), (5.9, ABSENT, False)], None, None),
        ([(1.0, ABSENT, False), (5.9, Marker(0), False)], "marker", 0),
        ([(1.0, BAD, True), (2.9, BAD, True)], None, None),
        ([(1.0, BAD, True), (3.0, BAD, True)], "garbage", 65),
        ([(1.0, BAD, True), (2.0, ABSENT, True), (3.0, BAD, True)], None, None),
        ([(1.0, ABSENT, False), (6.0, BAD, False)], "garbage", 65),
        ([(100.0, ABSENT, True)], "deadline", 124),
        ([(100.0, Foreign(Marker(0, "1"), "2"), True)], "deadline", 124),
        ([(100.0, Marker(9), True)], "marker", 9),
    ],
)
def test_when_a_wait_ends(looks: list[Look], outcome: str | None, code: int | None) -> None:
    patience = Patience(0.0, recheck=5.0, timeout=100.0, settle=2.0)
    *before, last = [patience.decide(reading, alive, now) for now, reading, alive in looks]
    assert before == [None] * len(before)
    assert (last and last.outcome, last and last.code) == (outcome, code)


def test_no_second_look_after_a_death_where_none_is_wanted() -> None:
    ended = Patience(0.0, recheck=0.0).decide(ABSENT, False, 1.0)
    assert ended is not None
    assert ended.outcome == "dead"


@given(st.lists(st.tuples(st.sampled_from([ABSENT, BAD]), st.booleans()), min_size=1, max_size=30))
def test_a_wait_looks_every_second_and_always_ends(looks: list[tuple[Reading, bool]]) -> None:
    patience, now = Patience(0.0, timeout=len(looks) / 2), 0.0
    for reading, alive in looks * 10:
        if patience.decide(reading, alive, now):
            break
        following = patience.next_look(now)
        assert now < following <= now + 1
        now = following
    assert now <= len(looks) / 2


# Files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".bench_done.7"


class LinkRefused(Naming):
    """FAT, some FUSE file systems, some object stores."""

    def __init__(self, code: int = errno.EPERM) -> None:
        self.code = code

    def link(self, source: str, target: str, directory: int) -> None:
        raise OSError(self.code, os.strerror(self.code))


class AnswersLost(Naming):
    """A network client that repeats a request which had worked."""

    def link(self, source: str, target: str, directory: int) -> None:
        super().link(source, target, directory)
        raise FileExistsError(errno.EEXIST, "File exists")

    def rename(self, source: str, target: str, directory: int) -> None:
        super().rename(source, target, directory)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")


class LinkRefusedAnswersLost(AnswersLost):
    def link(self, source: str, target: str, directory: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")


EVERY_NAMING = [
    Naming(),
    *map(LinkRefused, sorted(markers.LINK_REFUSED)),
    AnswersLost(),
    LinkRefusedAnswersLost(),
]


@pytest.mark.parametrize("naming", EVERY_NAMING, ids=lambda naming: type(naming).__name__)
def test_published_once_and_nothing_else_is_left(path: Path, naming: Naming) -> None:
    first, second = Marker(3, "7", 0, "n1", "coordinator", "now"), Marker(0, "7")
    assert markers.publish(path, first, naming=naming) == markers.Published("written", first)
    assert markers.publish(path, second, naming=naming) == markers.Published("already", first)
    assert path.read_bytes() == render(first)
    assert os.listdir(path.parent) == [path.name]


VOID = {"empty": b"", "half": b"12", "garbage": b"abc\n", "foreign": b"0\nattempt=6\n"}


@pytest.mark.parametrize("naming", EVERY_NAMING, ids=lambda naming: type(naming).__name__)
@pytest.mark.parametrize("void", VOID)
def test_a_void_file_stays_until_it_is_replaced(path: Path, void: str, naming: Naming) -> None:
    path.write_bytes(VOID[void])
    marker = Marker(3, "7")
    published = markers.publish(path, marker, naming=naming)
    assert published.outcome == "already"
    assert not isinstance(published.found, Marker)
    assert path.read_bytes() == VOID[void]
    assert markers.replace(path, marker, naming=naming) == markers.Published("written", marker)
    assert path.read_bytes() == render(marker)
    assert os.listdir(path.parent) == [path.name]


def test_a_valid_marker_of_the_attempt_is_not_replaced(path: Path) -> None:
    markers.publish(path, Marker(3, "7"))
    assert markers.replace(path, Marker(0, "7")) == markers.Published("already", Marker(3, "7"))


def test_a_marker_is_given_where_none_was(path: Path) -> None:
    assert markers.replace(path, Marker(3, "7")).outcome == "written"


def test_a_link_that_fails_otherwise_is_an_error_and_leaves_nothing(path: Path) -> None:
    with pytest.raises(OSError, match="Input/output") as caught:
        markers.publish(path, Marker(0), naming=LinkRefused(errno.EIO))
    assert caught.value.errno == errno.EIO
    assert os.listdir(path.parent) == []


def test_a_rename_that_really_failed_is_an_error(path: Path) -> None:
    class Failing(Naming):
        def rename(self, source: str, target: str, directory: int) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    path.write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        markers.replace(path, Marker(0), naming=Failing())
    assert path.read_bytes() == b""
    assert os.listdir(path.parent) == [path.name]


def test_of_many_publishers_one_wins_and_all_agree(path: Path) -> None:
    results: list[markers.Published] = []
    barrier = threading.Barrier(8)

    def publish(code: int) -> None:
        barrier.wait()
        results.append(markers.publish(path, Marker(code, "7")))

    threads = [threading.Thread(target=publish, args=(code,)) for code in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.outcome for result in results) == ["already"] * 7 + ["written"]
    assert {result.found for result in results} == {markers.read(path, "7")}


WATCH_BYTES = """
import pathlib, select, sys
path, whole = pathlib.Path(sys.argv[1]), [word.encode() for word in sys.argv[2:]]
print("ready", flush=True)
seen, torn = 0, 0
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        continue
    seen, torn = seen + (data in whole), torn + (data not in whole)
print(seen, torn)
"""


@pytest.mark.slow
@pytest.mark.parametrize("naming", [Naming(), LinkRefused()], ids=["link", "rename"])
def test_no_reader_ever_sees_a_part(path: Path, naming: Naming) -> None:
    mine, other = Marker(3, "7", 0, "n" * 500, "coordinator"), Marker(200, "8", 1, "m" * 400)
    words = [sys.executable, "-c", WATCH_BYTES, str(path), render(mine).decode(), render(other).decode()]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        for _ in range(300):
            markers.publish(path, mine, naming=naming)
            markers.replace(path, other, naming=naming)
            path.unlink()
        markers.publish(path, mine, naming=naming)
        reader.stdin.close()
        seen, torn = map(int, reader.stdout.readline().split())
    assert torn == 0
    assert seen > 0


def _publish_in_a_process(code: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    """Run Python statements with the project importable; a failed publish exits with its errno."""
    program = (
        "import os, sys, resource\n"
        "from supervisor.core.marker import Marker\n"
        "from supervisor.engine import markers\n"
        f"try:\n    {code}\nexcept OSError as error:\n    sys.exit(error.errno)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [*prefix, sys.executable, "-c", program]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=30, check=False)


def test_a_file_that_may_not_grow_leaves_no_marker(path: Path) -> None:
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, (10, {resource.RLIM_INFINITY}))"
    done = _publish_in_a_process(f"{limit}; markers.publish({str(path)!r}, Marker(3, '7.r1'))")
    assert done.returncode == errno.EFBIG, done.stderr
    assert os.listdir(path.parent) == []


def test_a_full_disk_leaves_no_marker(tmp_path: Path) -> None:
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs "$0" && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False).returncode:
        pytest.skip("a mount of one's own needs privileges")
    path = tmp_path / "m"
    fill = f"open({str(tmp_path / 'big')!r}, 'wb').write(b'x' * 4096)"
    publish = f"markers.publish({str(path)!r}, Marker(3, '7'))"
    done = _publish_in_a_process(f"{fill}; {publish}", *mount)
    assert done.returncode == errno.ENOSPC, done.stderr
    listing = f"print(os.listdir({str(tmp_path)!r}))"
    refused = f"{fill}\n    try: {publish}\n    except OSError: {listing}"
    assert _publish_in_a_process(refused, *mount).stdout == "['big']\n"
    assert _publish_in_a_process(f"{publish}; {listing}", *mount).stdout == "['m']\n"


# Reading


def test_absent(path: Path) -> None:
    assert markers.read(path) == NotYet("absent", present=False)
    assert isinstance(markers.read(path / "no" / "directory"), NotYet)


def test_an_empty_file_is_not_yet(path: Path) -> None:
    path.touch()
    assert markers.read(path) == NotYet("empty")


def test_another_attempt_is_ignored(path: Path) -> None:
    path.write_text("0\nattempt=7\n")
    assert markers.read(path, "7.r1") == Foreign(Marker(0, "7"), "7.r1")
    assert markers.read(path, "7") == Marker(0, "7")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path.parent / "good", path)])
def test_what_is_no_file_is_garbage_and_blocks_nobody(path: Path, make: Callable[[Path], None]) -> None:
    (path.parent / "good").write_text("0\n")
    make(path)
    assert isinstance(markers.read(path), Garbage)


def test_a_large_file_is_garbage_and_not_read_whole(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"0\n")
        file.truncate(1 << 40)
    assert isinstance(markers.read(path), Garbage)


def test_a_name_is_needed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="file name"):
        markers.publish("/", Marker(0))


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    with two_mounts(tmp_path) as both:
        yield both


def test_a_client_that_remembers_missing_names_is_not_believed(mounts: tuple[Path, Path]) -> None:
    here, there = mounts
    assert not (there / "asked").exists()
    assert markers.read(there / "m", "7") == NotYet("absent", present=False)
    markers.publish(here / "asked", Marker(3))
    markers.publish(here / "m", Marker(3, "7"))
    assert not (there / "asked").exists(), "this mount forgets: the test shows nothing"
    assert markers.read(there / "m", "7") == Marker(3, "7")
    assert markers.publish(there / "n", Marker(4, "7")).outcome == "written"
    assert markers.read(here / "n", "7") == Marker(4, "7")


# Notes


def test_the_first_failure_noted_stays(path: Path) -> None:
    assert markers.noted(path, "7") == 0
    assert markers.note(path, 0, "7") == 0
    assert not markers.note_path(path).exists()
    assert markers.note(path, 4, "7") == 4
    assert markers.note(path, 5, "7") == 4
    assert markers.note(path, 0, "7") == 4
    assert markers.noted(path, "7") == 4


def test_a_note_of_another_attempt_counts_for_nothing(path: Path) -> None:
    markers.note(path, 4, "7")
    assert markers.noted(path, "7.r1") == 0
    assert markers.note(path, 6, "7.r1") == 6
    assert markers.noted(path, "7.r1") == 6


@pytest.mark.parametrize("content", [b"", b"12", b"abc\n"])
def test_a_note_that_makes_no_sense_is_still_a_failure(path: Path, content: bytes) -> None:
    markers.note_path(path).write_bytes(content)
    assert markers.noted(path, "7") == 1


def test_a_note_is_an_exit_code(path: Path) -> None:
    with pytest.raises(MarkerError):
        markers.note(path, 256)


# Waiting


def _later(action: Callable[[], object]) -> threading.Thread:
    """Act once another thread sleeps in its poll, or a little earlier; either must work."""
    thread = threading.Timer(0.05, action)
    thread.start()
    return thread


def test_a_wait_ends_with_the_marker(path: Path) -> None:
    writer = _later(lambda: markers.publish(path, Marker(3, "7")))
    waited = markers.wait(path, "7", timeout=30)
    writer.join()
    assert (waited.outcome, waited.code, waited.marker) == ("marker", 3, Marker(3, "7"))


@pytest.mark.slow
def test_a_wait_sees_a_directory_that_comes_later(path: Path) -> None:
    late = path.parent / "later" / "m"

    def make() -> None:
        late.parent.mkdir()
        markers.publish(late, Marker(3))

    writer = _later(make)
    assert markers.wait(late, timeout=30).code == 3
    writer.join()


@pytest.mark.slow
def test_a_wait_goes_on_without_hints(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_self: Inotify) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Inotify, "__init__", refused)
    writer = _later(lambda: markers.publish(path, Marker(3)))
    assert markers.wait(path, timeout=30).code == 3
    writer.join()


@pytest.fixture(params=[True, False], ids=["pidfd", "without"])
def pidfd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pidfds, and on a system that has none."""

    def refused(_pid: int, _flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not request.param:
        monkeypatch.setattr(os, "pidfd_open", refused)


@pytest.mark.slow
@pytest.mark.usefixtures("pidfd")
def test_a_wait_gives_up_after_the_process(path: Path) -> None:
    """A process that ended counts as gone, whether or not its parent has waited for it."""
    with subprocess.Popen(["sleep", "0.05"]) as process:
        waited = markers.wait(path, pid=process.pid, recheck=0.0, timeout=30)
    assert (waited.outcome, waited.code) == ("dead", 1)


@pytest.mark.usefixtures("pidfd")
def test_a_process_that_is_gone_already(path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert markers.wait(path, pid=process.pid, recheck=0.0).outcome == "dead"
    markers.publish(path, Marker(0))
    assert markers.wait(path, pid=process.pid, recheck=0.0).outcome == "marker"


def test_the_second_look_finds_what_became_visible_late(path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    writer = _later(lambda: markers.publish(path, Marker(0)))
    assert markers.wait(path, pid=process.pid, recheck=30.0).outcome == "marker"
    writer.join()


def test_a_wait_has_a_deadline(path: Path) -> None:
    path.write_text("0\nattempt=6\n")
    waited = markers.wait(path, "7", timeout=0.05)
    assert (waited.outcome, waited.code) == ("deadline", 124)
    assert "attempt 6" in waited.reason


# inotify


def test_names_that_appear(tmp_path: Path) -> None:
    with Inotify() as watch:
        watch.add(tmp_path)
        assert watch.read() == []
        (tmp_path / "a").touch()
        os.rename(tmp_path / "a", tmp_path / "b")
        events = watch.read()
    assert (inotify.IN_CREATE, "a") in events
    assert (inotify.IN_MOVED_TO, "b") in events
    assert watch.fileno() == -1


def test_watches_are_told_apart_and_removed(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    with Inotify() as watch:
        numbers = {watch.add(first): first, watch.add(second): second}
        (second / "x").touch()
        assert {numbers[event.watch] for event in watch.events()} == {second}
        for number in numbers:
            watch.remove(number)
        with pytest.raises(OSError, match="Invalid argument"):
            watch.remove(next(iter(numbers)))


@pytest.mark.parametrize(("name", "code"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_only_directories_are_watched(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "file").touch()
    with Inotify() as watch, pytest.raises(OSError) as caught:
        watch.add(tmp_path / name)
    assert caught.value.errno == code


def test_an_overflow_is_told(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("this machine's queue is too long to fill here")
    with Inotify() as watch:
        watch.add(tmp_path, inotify.IN_CLOSE_WRITE)
        for number in range(limit + 10):  # two names in turn: equal neighbours would be merged
            os.close(os.open(tmp_path / str(number % 2), os.O_WRONLY | os.O_CREAT))
        while watch.read():
            pass
        assert watch.overflowed


async def test_an_event_loop_is_woken(tmp_path: Path) -> None:
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    with Inotify() as watch:
        watch.add(tmp_path)
        loop.add_reader(watch.fileno(), seen.set)
        (tmp_path / "a").touch()
        await asyncio.wait_for(seen.wait(), 10)
        loop.remove_reader(watch.fileno())
        assert (inotify.IN_CREATE, "a") in watch.read()


# allocctl marker


@pytest.fixture
def call(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALLOCD_MARKER", str(path))
    monkeypatch.setenv("ALLOCD_RUN_ID", "7")
    monkeypatch.setenv("ALLOCD_RANK", "2")
    parser = argparse.ArgumentParser()
    verb.add(parser.add_subparsers())

    def call(*words: str) -> int:
        return verb.run(parser.parse_args(["marker", *words]))

    return call


Call = Callable[..., int]
Captured = pytest.CaptureFixture[str]


def test_publish_read_wait(call: Call, path: Path, capsys: Captured) -> None:
    assert call("read") == 75
    assert call("publish", "3") == 0
    assert call("publish", "0") == 0
    assert capsys.readouterr().out == ""
    assert call("read") == 0
    assert capsys.readouterr().out == "3\n"
    assert call("wait") == 3
    assert "exit 3 (native)" in capsys.readouterr().err
    found = markers.read(path, "7")
    assert isinstance(found, Marker)
    assert (found.code, found.rank, found.by) == (3, 2, "coordinator")


def test_a_noted_failure_is_published(call: Call, path: Path) -> None:
    assert [call("note", code) for code in ("0", "4", "0", "6")] == [0, 0, 0, 0]
    assert call("publish", "0") == 0
    found = markers.read(path, "7")
    assert isinstance(found, Marker)
    assert found.code == 4


def test_a_marker_of_an_earlier_attempt_makes_way(call: Call, path: Path) -> None:
    path.write_text("9\nattempt=6\n")
    assert call("read") == 75
    assert call("wait", "--timeout", "0") == 124
    assert call("publish", "3") == 0
    assert call("wait") == 3
    assert call("wait", "--attempt", "") == 3


@pytest.mark.parametrize("content", ["", "12", "abc\n"])
def test_a_void_file_is_replaced_only_on_demand(call: Call, path: Path, content: str, capsys: Captured) -> None:
    path.write_text(content)
    assert call("publish", "3") == 65
    assert "--replace" in capsys.readouterr().err
    assert path.read_text() == content
    assert call("publish", "3", "--replace") == 0
    assert call("publish", "0", "--replace") == 0
    assert call("wait") == 3


@pytest.mark.slow
def test_garbage_that_stays(call: Call, path: Path) -> None:
    path.write_text("abc\n")
    assert call("read") == 65
    assert call("wait", "--timeout", "30") == 65


def test_a_process_that_leaves_no_marker(call: Call) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert call("wait", "--pid", str(process.pid), "--recheck", "0") == 1


@pytest.mark.parametrize(
    "words",
    [
        *(["publish", "256"], ["publish", "-0"], ["publish", "x"], ["note", "1000"], ["publish", "٧"]),
        *(["wait", "--pid", "0"], ["wait", "--pid", "x"], ["wait", "--recheck", "61"]),
        *(["wait", "--timeout", "nan"], ["wait", "--timeout", "-1"], ["publish", "0", "--attempt", "a\nb"]),
    ],
)
def test_misuse(call: Call, path: Path, words: list[str]) -> None:
    words = [*words[:1], "--", words[1]] if words[1] == "-0" else words
    assert call(*words) == 78
    assert os.listdir(path.parent) == []


def test_no_file_named(call: Call, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.delenv("ALLOCD_MARKER")
    assert call("read") == 78
    assert "ALLOCD_MARKER" in capsys.readouterr().err


def test_a_file_system_that_refuses(call: Call, path: Path, capsys: Captured) -> None:
    assert call("publish", "0", "--file", str(path / "no" / "directory")) == 1
    assert "No such file" in capsys.readouterr().err


def test_json_says_where_a_code_comes_from(call: Call, path: Path, capsys: Captured) -> None:
    call("wait", "--json", "--timeout", "0")
    call("publish", "--json", "124")
    call("wait", "--json")
    call("read", "--json")
    call("note", "--json", "5")
    waited, published, found, read, noted = map(json.loads, capsys.readouterr().out.splitlines())
    assert (waited["exit_code"], waited["origin"], waited["outcome"]) == (124, "allocd", "deadline")
    assert (published["outcome"], published["marker"]["code"]) == ("written", 124)
    assert (found["exit_code"], found["origin"], found["outcome"]) == (124, "native", "marker")
    assert (read["exit_code"], read["marker"]["attempt"]) == (0, "7")
    assert noted["noted"] == 5
    assert {document["schema_version"] for document in (waited, published, found, read, noted)} == {1}
