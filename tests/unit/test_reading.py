"""Reading one file: what is remembered and for how long, and large files in a process of their own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.contracts import content, reader, reading
from supervisor.contracts.child import Child
from supervisor.contracts.content import Changing, Judge, Judged, Judging, NotWhole, looks_cut
from supervisor.contracts.reader import Apart, ApartError, Task
from supervisor.contracts.reading import GRAIN, SOON, Reader, Reading
from supervisor.contracts.rules import judge_of
from supervisor.contracts.walk import Walk
from supervisor.core.artifact_table import FieldRule

LONG = 60.0  # seconds that a test would wait
HANG = "tests.judges:hang"
JUDGE: Judge = judge_of({"n": FieldRule(max=5)})


def read(root: Path, with_: Reader, judge: Judge | None = JUDGE, lines: bool = False) -> Reading:
    (found,) = [with_.read(match, judge, lines) for match in Walk().below(root, "/nowhere", ("r.json",))]
    return found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that were read, in order."""
    sizes: list[int] = []
    original = content.examine

    def counting(file: Any, size: int, *rest: Any) -> Any:
        sizes.append(size)
        return original(file, size, *rest)

    monkeypatch.setattr(reading, "examine", counting)
    return sizes


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("n", [1, 9])
def test_a_whole_file_is_read_once(tmp_path: Path, looks: list[int], n: int) -> None:
    (tmp_path / "r.json").write_text(f'{{"n": {n}}}')
    one = Reader()
    first = read(tmp_path, one)
    assert (first.answer, first.size) == ("valid" if n == 1 else "invalid", 8)
    assert [read(tmp_path, one) for _ in range(3)] == [first] * 3
    assert looks == [8]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text('{"n": 2} '),
        lambda path: os.utime(path, ns=(1, 1)),
        lambda path: (path.with_name("x").write_text('{"n": 1}'), path.with_name("x").rename(path)),
    ],
    ids=["content", "times", "another file"],
)
def test_a_file_that_changed_is_read_again(tmp_path: Path, looks: list[int], change: Callable[[Path], Any]) -> None:
    path, one = tmp_path / "r.json", Reader()
    path.write_text('{"n": 1}')
    read(tmp_path, one)
    change(path)
    assert read(tmp_path, one).answer == "valid"
    assert len(looks) == 2


def test_another_judge_reads_again(tmp_path: Path, looks: list[int]) -> None:
    one = Reader()
    (tmp_path / "r.json").write_text('{"n": 3}')
    assert read(tmp_path, one).answer == "valid"
    assert read(tmp_path, one, judge_of({"n": FieldRule(max=2)})).answer == "invalid"
    assert read(tmp_path, one, judge_of({}), lines=True).summary == {"lines": 1}
    assert len(looks) == 3


def test_what_is_forgotten_is_read_again(tmp_path: Path, looks: list[int]) -> None:
    one = Reader()
    (tmp_path / "r.json").write_text("{}")
    read(tmp_path, one, judge_of({}))
    one.forget({"r.json"})
    read(tmp_path, one, judge_of({}))
    assert len(looks) == 1
    one.forget(())
    read(tmp_path, one, judge_of({}))
    assert len(looks) == 2


def test_half_a_file_is_read_again_when_it_changes(tmp_path: Path, looks: list[int]) -> None:
    path, clock = tmp_path / "r.json", Clock()
    one = Reader(clock)
    path.write_text('{"n": ')
    assert one.again() is None
    assert read(tmp_path, one).answer == "pending"
    assert one.again() == GRAIN
    clock.now = GRAIN
    assert read(tmp_path, one).answer == "pending"
    for _ in range(3):
        one.forget({"r.json"})
        clock.now += 1
        assert read(tmp_path, one).answer == "pending"
    assert looks == [6, 6]
    assert one.again() is None
    with path.open("a") as file:
        file.write("1}")
    assert read(tmp_path, one).answer == "valid"
    assert looks == [6, 6, 8]


def test_half_a_file_that_is_completed_within_a_tick_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    """Room was made for it first; the clock of the file system stood still meanwhile."""
    path, clock = tmp_path / "r.json", Clock()
    one = Reader(clock)
    monkeypatch.setattr(reading, "signature", lambda status: status.st_size)
    path.write_bytes(bytes(8))
    assert read(tmp_path, one).answer == "pending"
    path.write_text('{"n": 1}')
    clock.now = GRAIN / 2
    assert read(tmp_path, one).answer == "valid"


def test_a_file_that_was_read_cut_short_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[int]
) -> None:
    (tmp_path / "r.json").write_text('{"n": 1}')
    clock = Clock()
    one = Reader(clock)

    def short(*_: object) -> None:
        raise Changing("found less")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "examine", short)
        for clock.now in (0.0, 3.0, 6.0):
            assert read(tmp_path, one).problems == ("r.json: found less",)
            one.forget({"r.json"})
    assert read(tmp_path, one).answer == "valid"


def test_a_file_that_vanished_since_it_was_listed_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text("{}")
    for match in Walk().below(tmp_path, "/nowhere", ("r.json",)):
        (tmp_path / "r.json").unlink()
        found = Reader().read(match, JUDGE)
    assert (found.answer, found.problems, found.sha256) == (
        "pending",
        ("r.json: found nothing any more; expected the file that was listed",),
        None,
    )


def test_the_problems_of_one_file_are_bounded(tmp_path: Path) -> None:
    rules = {str(number): FieldRule(exists=True) for number in range(100)}
    (tmp_path / "r.json").write_text("{}")
    found = read(tmp_path, Reader(), judge_of(rules))
    assert len(found.problems) == content.PROBLEMS_CAP + 1
    assert found.problems[-1] == "r.json: found more problems; only the first are told"


def test_a_look_has_an_end_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block takes a second: a look does three. Nothing is read twice."""
    content = os.urandom(25)
    (tmp_path / "r.json").write_bytes(content)
    clock, blocks = Clock(), list[int]()
    one = Reader(clock)
    monkeypatch.setattr(reading, "_BLOCK", 1)
    original = hashlib.sha256

    class Slow:
        def __init__(self) -> None:
            self.digest = original()

        def update(self, block: bytes) -> None:
            clock.now += 1
            blocks.append(len(block))
            self.digest.update(block)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Slow)
    for count in range(3, 25, 3):
        assert "still being read" in read(tmp_path, one, None).problems[0]
        assert (len(blocks), one.again()) == (count, SOON)
        assert "still being read" in read(tmp_path, one, None).problems[0], "the same look"
        one.forget({"r.json"})
    assert read(tmp_path, one, None).sha256 == original(content).hexdigest()
    assert (len(blocks), one.again()) == (25, None)


def test_a_file_that_changed_between_two_looks_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCK", 1)
    path, one = tmp_path / "r.json", Reader()
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "PATIENCE", 0.0)
        assert read(tmp_path, one, None).answer == "pending"
    one.forget({"r.json"})
    path.write_bytes(b"newer")
    assert read(tmp_path, one, None).sha256 == hashlib.sha256(b"newer").hexdigest()


# ------------------------------------------------------------------------------------------------------ JSON lines


@pytest.mark.parametrize(
    ("text", "answer", "problem"),
    [
        ('{"n": 1}\n\n{"n": 2}\n', "valid", None),
        ('{"n": 1}\n{"n": 2}', "valid", None),
        ('{"n": 1}\n{"n": ', "pending", "line 2: found no whole JSON document; expected one"),
        ('{"n": 1}\n{"n": \n', "invalid", "line 2: found no JSON; expected a JSON object or list"),
        ('{"n": 1}\n3\n', "invalid", "line 2: found 3; expected a JSON object or list"),
        ('{"n": 1}\n{"n": NaN}\n', "invalid", "line 2: found NaN; expected JSON, which has finite numbers only"),
        ('{"n": 1}\n{"n": NaN', "pending", "line 2: found no whole JSON document; expected one"),
        ('{"n": 1}\n\0\0\0\n{"n": 1}\n', "pending", "line 2: found no whole JSON document; expected one"),
        ('{"n": 9}\n{"n": 2}\n', "invalid", "line 1: n: found 9; expected a number, 5 or less"),
    ],
)
def test_json_lines(tmp_path: Path, text: str, answer: str, problem: str | None) -> None:
    (tmp_path / "r.json").write_text(text)
    found = read(tmp_path, Reader(), JUDGE, lines=True)
    assert (found.answer, found.problems) == (answer, (f"r.json: {problem}",) if problem else ())
    if answer == "valid":
        assert found.summary == {"lines": 2}
        assert found.sha256 == hashlib.sha256(text.encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------- large files


def task(size: int, judge: Judge = JUDGE) -> Task:
    return Task("r.json", None, size, judge, False)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, looks: list[int]) -> list[int]:
    """Every file is large. The sizes of files that were read in this process all the same: none."""
    monkeypatch.setattr(reading, "LARGE", 0)
    return looks


def test_a_large_file_is_judged_apart_and_once(
    tmp_path: Path, apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"n": 9, "text": "x" * 3_000_000})
    (tmp_path / "r.json").write_text(text)
    one = Reader()
    found = read(tmp_path, one)
    assert found.problems == ("r.json: n: found 9; expected a number, 5 or less",)
    assert (found.answer, found.size) == ("invalid", len(text))
    assert found.sha256 == hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert read(tmp_path, one) == found
    assert apart == []


@pytest.mark.parametrize(
    ("text", "lines", "answer", "problem"),
    [
        ('{"n": 1}\n', True, "valid", None),
        ('{"n": 1', True, "pending", "line 1: found no whole JSON document; expected one"),
        ('{"n": }', False, "pending", "found no whole JSON document; expected one"),
        ('{"n": NaN}', False, "invalid", "found NaN; expected JSON, which has finite numbers only"),
    ],
)
def test_what_a_large_file_may_be(
    tmp_path: Path, apart: list[int], text: str, lines: bool, answer: str, problem: str | None
) -> None:
    (tmp_path / "r.json").write_text(text)
    found = read(tmp_path, Reader(), JUDGE, lines)
    assert (found.answer, found.problems) == (answer, (f"r.json: {problem}",) if problem else ())
    assert apart == []


def test_a_large_file_that_is_cut_is_not_read(
    tmp_path: Path, apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    (tmp_path / "r.json").write_text('{"n": [1, 2')
    assert read(tmp_path, Reader()).problems == ("r.json: found no whole JSON document; expected one",)


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.integers() | st.text(max_size=3), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_whole_document_looks_cut(document: Any) -> None:
    data = f" {json.dumps(document)} \n".encode()
    assert not looks_cut(data[:20], data[-20:])


def test_what_looks_cut() -> None:
    assert looks_cut(b'{"a"', b"1,")
    assert looks_cut(b"[{}", b"{}")
    assert looks_cut(b"{", b"}\0\0")
    assert not looks_cut(b"   ", b"}")
    assert not looks_cut(b"{", b"    ")


def test_a_large_file_that_is_read_cut_short(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("[]")
    for size in (4, 1):
        with (tmp_path / "r.json").open("rb") as file, pytest.raises(Changing):
            Apart().examine(task(size), file.fileno(), LONG)


def test_a_file_that_cannot_be_read_apart_is_its_own_fault(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "r.json", os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            Apart().examine(task(1), descriptor, LONG)
    finally:
        os.close(descriptor)


def test_a_process_that_breaks_is_our_fault(tmp_path: Path, apart: list[int]) -> None:
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ApartError, match=r"ended with 1: .*no_such_module"):
        read(tmp_path, Reader(), ("supervisor.contracts.no_such_module:judge", {}))


class Killed(Child):
    """One that is killed, the first so many times."""

    times = 1

    def __init__(self, command: Any, *rest: Any, **more: Any) -> None:
        Killed.times -= 1
        super().__init__(["sh", "-c", "kill -KILL $$"] if Killed.times >= 0 else command, *rest, **more)


def test_a_process_that_is_killed_is_tried_once_more_and_alone(
    tmp_path: Path, apart: list[int], hanging: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "Child", Killed)
    monkeypatch.setattr(Killed, "times", 1)
    one, other = Reader(), Reader()
    assert "still being read" in read(tmp_path, one).problems[0]
    assert one.again() == SOON
    with monkeypatch.context() as patch:
        patch.setattr(reading, "PATIENCE", 0.0)
        assert "still being read" in read(tmp_path, other, hanging).problems[0]
    one.forget({"r.json"})
    assert "still being read" in read(tmp_path, one).problems[0], "the other one is at work"
    other.close()
    one.forget({"r.json"})
    assert read(tmp_path, one).answer == "invalid"


def test_a_process_that_is_killed_twice_is_told_with_what_it_needed(
    tmp_path: Path, apart: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "Child", Killed)
    monkeypatch.setattr(Killed, "times", 2)
    (tmp_path / "r.json").write_text('{"n": 1}')
    one = Reader()
    assert "still being read" in read(tmp_path, one).problems[0]
    one.forget({"r.json"})
    words = r"reads r\.json \(0 MiB\) was killed twice by signal 9: out of memory\? .* [0-9]+ MiB are available"
    with pytest.raises(ApartError, match=words):
        read(tmp_path, one)


def test_a_very_large_file_is_read_alone(
    tmp_path: Path, apart: list[int], hanging: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "ALONE", 0)
    one, other = Reader(), Reader()
    with monkeypatch.context() as patch:
        patch.setattr(reading, "PATIENCE", 0.0)
        assert "still being read" in read(tmp_path, one, hanging).problems[0]
    assert "still being read" in read(tmp_path, other).problems[0]
    one.close()
    other.forget({"r.json"})
    assert read(tmp_path, other).answer == "invalid"


def test_short_numbers_are_kept_once() -> None:
    """Else a list of them takes six times the memory of its text."""
    judging = content.Judging(("supervisor.contracts.rules:document", {"fields": {}}))
    lists: list[Any] = []

    def keep(document: Any, _: object) -> Judged:
        lists.append(document)
        return Judged()

    judging._judge = keep
    judging.say(b"[1.5, 1.5, 12345, 12345, 1.5e400]")
    judging.say(b"[1.5, 1.5, 12345, 12345, -1]")
    (found,) = lists
    assert found == [1.5, 1.5, 12345, 12345, -1]
    assert found[0] is found[1]
    assert found[2] is found[3]


@pytest.fixture
def hanging(tmp_path: Path) -> Judge:
    (tmp_path / "r.json").write_text("{}")
    os.mkfifo(tmp_path / "begun")
    return HANG, {"begun": str(tmp_path / "begun")}


def test_a_process_that_overstays_is_killed(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{}")
    os.mkfifo(tmp_path / "begun")  # nobody opens it: the judge waits for that
    with (tmp_path / "r.json").open("rb") as file, pytest.raises(ApartError, match=r"took longer than 0\.2 s"):
        Apart(0.2).examine(task(2, (HANG, {"begun": str(tmp_path / "begun")})), file.fileno(), LONG)


def test_closing_kills_the_process(tmp_path: Path, apart: list[int], hanging: Judge) -> None:
    one, failed = Reader(), list[Exception]()

    def work() -> None:
        try:
            read(tmp_path, one, hanging)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    with open(tmp_path / "begun") as file:
        pid = int(file.read())
    one.close()
    thread.join()
    assert [str(error) for error in failed] == [
        f"[Errno 10] the process that reads r.json ended with -{signal.SIGKILL.value}: no words"
    ]
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(ApartError, match="nobody waits"):
        read(tmp_path, one, hanging)


def test_a_look_does_not_wait_for_the_end(
    tmp_path: Path, apart: list[int], hanging: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file is read on while looks come and go; the second one waits for its turn, and a change ends it."""
    path = tmp_path / "r.json"
    one, other = Reader(), Reader()
    with monkeypatch.context() as patch:
        patch.setattr(reading, "PATIENCE", 0.0)
        busy = read(tmp_path, one, hanging)
        assert busy.problems == ("r.json: found 2 bytes, which are still being read; expected a moment's patience",)
        with open(tmp_path / "begun") as file:
            pid = int(file.read())
        one.forget({"r.json"})
        assert one.again() == SOON
        assert read(tmp_path, one, hanging) == busy
        assert os.path.exists(f"/proc/{pid}")
    path.write_text('{"n": 1}')
    one.forget({"r.json"})
    assert read(tmp_path, one).answer == "valid"
    assert one.again() is None
    assert not os.path.exists(f"/proc/{pid}")
    one.close()
    other.close()


def test_a_file_that_is_gone_is_not_read_on(
    tmp_path: Path, apart: list[int], hanging: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE", 0.0)
    one = Reader()
    read(tmp_path, one, hanging)
    with open(tmp_path / "begun") as file:
        pid = int(file.read())
    one.forget(())
    assert not os.path.exists(f"/proc/{pid}")


def test_many_large_files_are_read_a_few_at_a_time(
    tmp_path: Path, apart: list[int], hanging: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PATIENCE", 0.0)
    readers = [Reader() for _ in range(3)]
    for one in readers:
        assert "still being read" in read(tmp_path, one, hanging).problems[0]
    readers[0].close()
    monkeypatch.setattr(reading, "PATIENCE", LONG)
    readers[2].forget(())
    assert read(tmp_path, readers[2]).answer == "invalid"
    readers[1].close()


def test_not_whole_says_why() -> None:
    with pytest.raises(NotWhole, match="no whole JSON"):
        Judging(JUDGE).say(b"{")
