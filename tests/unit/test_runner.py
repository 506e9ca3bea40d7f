"""Nothing that is printed commands the runner of a CI, but our own commands."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.cli.runner import Quoted, quoted, quoted_bytes, quoting, unquoted
from tests.faults.local import ALLOCCTL, Local, role, sh
from tests.unit.test_github import obeyed

PIECES = [
    ":",
    "::",
    "#",
    "##",
    "[",
    "]",
    "error",
    "::error::x",
    "##[error]x",
    "stop-commands",
    " ",
    "\t",
    "\n",
    "\r",
    "\\",
]
UNSEEN = ["\0", "\x1b", "\u00a0", "\u00ad", "\u200b", "\u2028", "\u2060", "\u3000", "\ufeff", "\ufe0f", "\udc80"]
WORDS = st.lists(st.sampled_from(PIECES + UNSEEN) | st.text(max_size=3), max_size=12).map("".join)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    with Local(tmp_path) as it:
        yield it


def seen(text: str) -> str:
    """As a reader sees it to whom characters that cannot be seen are none."""
    return "".join(character for character in text if character not in UNSEEN or character.isspace())


@given(WORDS)
def test_no_words_are_a_command(words: str) -> None:
    assert obeyed(quoted(words)) == []
    assert obeyed(seen(quoted(words))) == []
    assert obeyed(quoted_bytes(words.encode(errors="surrogateescape")).decode(errors="replace")) == []


@settings(max_examples=30)
@given(st.recursive(WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3)))
def test_a_document_says_the_same(value: object) -> None:
    for indent in (None, 1):
        assert json.loads(quoted(json.dumps(value, ensure_ascii=False, indent=indent))) == value


def test_what_is_no_command_stays_as_it_is() -> None:
    text = "std::vector # a [b] ## c\n  rank-0.out: ::error::x\r\nallocctl: 1: success: done [exit 0, origin native]\n"
    assert quoted(text) == text


def test_every_stream_of_a_step_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with quoting({"GITHUB_ACTIONS": "true"}):
        print("  ::error::x")
        print("see ##[error]x", file=sys.stderr)
        sys.stdout.buffer.write(b"::debug::\xc3\xbc\n")
        print("::notice::ours", file=unquoted(sys.stdout))
    print("::error::x")
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["  \\u003a:error::x", "::error::x", "::notice::ours", "\\u003a:debug::ü"]
    assert err == "see #\\u0023[error]x\n"


def test_elsewhere_nothing_is_changed(tmp_path: Path) -> None:
    """Outside of a step, and on the way into a file."""
    with (
        open(tmp_path / "file", "w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        with quoting({}):
            assert not isinstance(sys.stderr, Quoted)
        with quoting({"GITHUB_ACTIONS": "true"}):
            assert isinstance(sys.stderr, Quoted)
            assert not isinstance(sys.stdout, Quoted)


@pytest.mark.slow
def test_no_verb_lets_a_job_command_its_runner(local: Local) -> None:
    """Whatever a job prints or is called, on both streams, also where they are one."""
    say = "printf '::error::a\\n ##[error]b\\nc\\r::error::d\\n' | tee /dev/stderr; exit 7"
    run = local.start(local.plan({"x": role(0, sh(say))}, coordinator=0))
    assert run.wait() == 7
    env = {**local.env, "GITHUB_ACTIONS": "true"}
    place = str(run.directory)
    for words in (
        ["explain", place],
        ["logs", place],
        ["logs", "--json", place],
        ["status", place],
        ["receipt", place],
    ):
        done = subprocess.run([ALLOCCTL, *words], env=env, stdout=-1, stderr=subprocess.STDOUT, text=True, check=True)
        assert obeyed(done.stdout) == [], words
    done = subprocess.run(
        [ALLOCCTL, "wait", "--logs=all", place], env=env, stdout=-1, stderr=-2, text=True, check=False
    )
    assert [kind for kind, _, _ in obeyed(done.stdout)] == ["error"]
    assert done.returncode == 7
