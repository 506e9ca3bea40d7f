"""A program that judges an artifact: when it is asked, what it is told, and what its answers mean."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.contracts import SOON, CheckerBroke, Place, checker, examiner
from supervisor.contracts.checker import Checked
from supervisor.contracts.files import Files
from supervisor.core.artifact_table import Artifact, FieldRule
from supervisor.core.artifacts import Finding, Instance

LONG = 60.0  # seconds that a test would wait


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Case:
    """An artifact `r*.json` in a directory, its checker, and whoever asks it, which is counted."""

    def __init__(self, root: Path, *command: str, **rules: Any) -> None:
        self.root, self.clock = root, Clock()
        artifact = Artifact("result", "r*.json", format="json", checker=command, **{"checker_timeout": LONG, **rules})
        values = {"run_dir": str(root), "node": "n1", "rank": "1"}
        self.place = Place(Instance("result@1", artifact, 1), root, values)
        self.checked = Checked(Files([self.place]), self.clock)

    def look(self) -> Finding:
        return self.checked.look(self.place)

    def put(self, text: str = '{"n": 1}', name: str = "r.json") -> None:
        (self.root / name).write_text(text)

    @property
    def asked(self) -> int:
        count = self.root / "asked"
        return len(count.read_text()) if count.exists() else 0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Any]:
    """Makes cases whose checker is a piece of shell."""
    made: list[Case] = []

    def make(script: str, **rules: Any) -> Case:
        made.append(Case(tmp_path, "sh", "-c", f"printf x >> asked; {script}", **rules))
        return made[-1]

    yield make
    for case in made:
        case.checked.close()


def test_ready(shell: Any) -> None:
    case = shell("exit 0")
    case.put()
    for _ in range(3):
        finding = case.look()
        assert (finding.answer, finding.problems) == ("valid", ())
        assert [fact.path for fact in finding.files] == ["r.json"]
    assert case.asked == 1


def test_it_is_asked_only_about_what_the_rules_let_through(shell: Any) -> None:
    case = shell("exit 0", fields={"n": FieldRule(equals=1)})
    assert case.look().answer == "pending"
    case.put('{"n": ')
    assert case.look().answer == "pending"
    case.put('{"n": 22}')
    assert case.look().answer == "invalid"
    assert case.asked == 0


def test_invalid(shell: Any) -> None:
    case = shell("echo; echo 'too few \033[2J requests'; echo more; exit 20")
    case.put()
    for _ in range(2):
        finding = case.look()
        assert (finding.answer, finding.problems) == ("invalid", ("checker sh: too few  [2J requests",))
    assert case.asked == 1
    case.put('{"n": 222}')
    assert case.look().answer == "invalid"
    assert case.asked == 2


def test_wait_is_asked_again_with_pauses_that_grow(shell: Any) -> None:
    case = shell("echo r2.json is missing >&2; exit 10")
    case.put()
    asked_at, pauses = [], []
    for case.clock.now in range(100):
        before = case.asked
        finding = case.look()
        assert (finding.answer, finding.problems) == ("pending", ("checker sh: r2.json is missing",))
        if case.asked > before:
            asked_at.append(case.clock.now)
            pauses.append(case.checked.again(case.place))
    assert asked_at == [0, 1, 3, 7, 15, 31, 61, 91]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_change_is_asked_about_at_once(shell: Any) -> None:
    case = shell("test -f r2.json || exit 10")
    case.put()
    assert case.look().problems == ("checker sh: found something missing, without a word; expected a reason",)
    case.put(name="r2.json")
    assert case.look().answer == "valid"
    assert case.asked == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no such option; exit 2", "sh: ended with 2; expected 0, 10 or 20: no such option"),
        ("exit 1", "sh: ended with 1; expected 0, 10 or 20"),
        ("kill -SEGV $$", f"sh: was killed by signal {signal.SIGSEGV.value}; expected 0, 10 or 20"),
    ],
)
def test_what_is_no_answer_is_a_fault(shell: Any, script: str, words: str) -> None:
    case = shell(script)
    case.put()
    for _ in range(2):
        with pytest.raises(CheckerBroke) as broke:
            case.look()
        assert str(broke.value) == words
    assert case.asked == 1


def test_a_program_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    case = Case(tmp_path, "no-such-program")
    case.put()
    for _ in range(2):
        with pytest.raises(CheckerBroke, match="no-such-program: cannot be started: No such file or directory"):
            case.look()


def test_one_that_takes_too_long_is_a_fault(shell: Any) -> None:
    case = shell("sleep 1000 & wait", checker_timeout=0.2)
    case.put()
    with pytest.raises(CheckerBroke, match=r"sh: took longer than 0\.2 s"):
        case.look()


def test_a_look_does_not_wait_for_its_answer(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = shell("read line < go; exit 0")
    os.mkfifo(case.root / "go")
    case.put()
    with monkeypatch.context() as patch:
        patch.setattr(checker, "PATIENCE", 0.0)
        for _ in range(2):
            assert case.look().problems == ("checker sh: found it still at work; expected its answer",)
            assert case.checked.again(case.place) == SOON
    (case.root / "go").write_text("on\n")
    assert case.look().answer == "valid"
    assert case.checked.again(case.place) is None
    assert case.asked == 1


def test_one_that_judges_files_of_the_past_is_ended(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = shell('echo $$ > pid; test "$ALLOCD_FILES" = r.json || exit 0; : > begun; read line < go')
    for name in ("go", "begun"):
        os.mkfifo(case.root / name)
    case.put()
    with monkeypatch.context() as patch:
        patch.setattr(checker, "PATIENCE", 0.0)
        assert case.look().answer == "pending"
    (case.root / "begun").read_text()
    pid = int((case.root / "pid").read_text())
    case.put(name="r2.json")
    assert case.look().answer == "valid"
    assert not os.path.exists(f"/proc/{pid}")


def test_what_it_is_told(tmp_path: Path) -> None:
    tell = "import json,os,sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])); sys.exit(20)"
    case = Case(tmp_path, sys.executable, "-c", tell, "{rank}", "{{node}} {node}", "{run_dir}")
    case.put()
    case.put(name="r2.json")
    (problem,) = case.look().problems
    line = problem.removeprefix(f"checker {sys.executable}: ")
    assert len(line) == checker.LINE_CAP
    assert line.startswith(json.dumps([["1", "{node} n1", str(tmp_path)], str(tmp_path)])[:-1])


def test_the_words_in_its_environment(shell: Any) -> None:
    case = shell('printf "%s|" "$ALLOCD_CONTRACT" "$ALLOCD_ROOT" $ALLOCD_FILES "$HOME"; exit 20')
    case.put()
    case.put(name="r2.json")
    home = os.environ.get("HOME", "")
    assert case.look().problems == (f"checker sh: result@1|{case.root}|r.json|r2.json|{home}|",)


def test_more_files_than_a_program_can_be_told(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "FILES_CAP", 5)
    case = shell('echo "${{ALLOCD_FILES-unset}}"; exit 20')
    case.put()
    assert case.look().problems == ("checker sh: unset",)


def test_it_reads_nothing(shell: Any) -> None:
    case = shell("cat && exit 0")
    case.put()
    assert case.look().answer == "valid"


def test_closing_ends_it_in_whatever_thread(shell: Any) -> None:
    case, broke = shell(": > begun; sleep 1000"), list[str]()
    os.mkfifo(case.root / "begun")
    case.put()

    def work() -> None:
        try:
            case.look()
        except CheckerBroke as error:
            broke.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    (case.root / "begun").read_text()
    case.checked.close()
    thread.join()
    assert broke == [f"sh: was killed by signal {signal.SIGKILL.value}; expected 0, 10 or 20"]


def test_none_is_begun_after_the_end(shell: Any) -> None:
    case = shell("sleep 1000")
    case.put()
    case.checked.close()
    with pytest.raises(CheckerBroke):
        case.look()


def test_an_artifact_with_a_checker_is_asked_about(tmp_path: Path) -> None:
    case = Case(tmp_path, "sh", "-c", "echo no; exit 20")
    case.put()
    assert examiner([case.place]).look(case.place).answer == "invalid"
