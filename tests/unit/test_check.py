"""Loading plan files, and `allocctl check`."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli import check
from supervisor.core import codes
from supervisor.core.fields import PlanErrors, join
from supervisor.core.plan import schema
from supervisor.runs.plans import key_lines, load_plan

GOOD = """\
[job]
name = "bench"
nodes = 5
[coordinator]
role = "client"
[roles.client]
ranks = 0
command = ["client"]
[roles.server]
ranks = "1-2,4"
command = ["server"]
[roles.extra]
ranks = 3
command = ["extra"]
[[artifacts]]
name = "result"
path = "r.json"
format = "json"
[[artifacts]]
name = "trace"
path = "t_{rank}"
per = "node"
roles = ["server"]
required = false
"""

BAD = '''\
# a comment with [brackets] and """quotes
[job]
name = """
[not.a.header]
key = 1
"""
nodes = 1.5
[roles.client]
ranks = [
  0,  # ]
  1,
]
grace = true
command = ["a", "{rnak}"]
env = { A = 1 }
[roles."se rver"]
ranks = 2
command = ['x']
[[artifacts]]
name = "r"
path = "r"
[[artifacts]]
name = "q"
path = "../q"
[artifacts.fields."a.b"]
minimum = 1
'''


def write(directory: Path, text: str | bytes) -> str:
    path = directory / "plan.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def told(path: str | Path) -> list[str]:
    with pytest.raises(PlanErrors) as caught:
        load_plan(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}") for line in lines)
    return [line.removeprefix(f"{path}") for line in lines]


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    check.add(parser.add_subparsers())
    return check.run(parser.parse_args(["check", *argv]))


# --------------------------------------------------------------------------------------------------------- loading


def test_a_good_file(tmp_path: Path) -> None:
    assert load_plan(write(tmp_path, GOOD)).coordinator == 0
    assert load_plan(tmp_path / "plan.toml").size == 5


def test_errors_have_lines_and_come_in_their_order(tmp_path: Path) -> None:
    errors = told(write(tmp_path, BAD))
    places = [error.split(": ")[:2] for error in errors]
    assert places == [
        ["", "coordinator"],
        [":3", "job.name"],
        [":7", "job.nodes"],
        [":13", "roles.client.grace"],
        [":14", "roles.client.command[1]"],
        [":15", "roles.client.env.A"],
        [":16", 'roles."se rver"'],
        [":24", "artifacts[1].path"],
        [":25", "artifacts[1].fields"],
        [":26", 'artifacts[1].fields."a.b".minimum'],
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[job\n", ":1: found expected ']' at the end of a table declaration at column 5; expected TOML"),
        ("[job]\nname = x\n", ":2: found invalid value at column 8; expected TOML"),
        ("[job]\nname = 'x'\nname = 'y'", ":3: found the end of the file (Cannot overwrite a value); expected TOML"),
        ('a = """\nx', ":2: found the end of the file (Unterminated string); expected TOML"),
        (b"a = 1\nb = '\xff'\n", ":2: found bytes that are no UTF-8 (invalid start byte); expected TOML in UTF-8"),
    ],
)
def test_what_is_no_toml(tmp_path: Path, text: str | bytes, line: str) -> None:
    assert told(write(tmp_path, text)) == [line]


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a = " + "9" * 5_000, "\x00", "\ufeff[job]"])
def test_hostile_text_is_one_error(tmp_path: Path, text: str) -> None:
    assert len(told(write(tmp_path, text))) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert told(missing) == [": found No such file or directory; expected a plan that can be read"]
    assert told(tmp_path) == [": found Is a directory; expected a plan that can be read"]
    assert told("a\0b") == [": found embedded null byte; expected the path of a plan"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\nb.c = 2\n", {"a": 1, "b": 2, "b.c": 2}),
        ("[x]\n\n  [ x . 'y z' ]\nk=1", {"x": 1, 'x."y z"': 3, 'x."y z".k': 4}),
        ("[[t]]\na=1\n[[t]]\na=1\n[t.u]\nb=1\n[[t.v]]\nc=1\n[[t.v]]\n",
         {"t": 1, "t[0]": 1, "t[0].a": 2, "t[1]": 3, "t[1].a": 4, "t[1].u": 5, "t[1].u.b": 6,
          "t[1].v": 7, "t[1].v[0]": 7, "t[1].v[0].c": 8, "t[1].v[1]": 9}),
        ("a = [\n [1],\n 'x]',\n]\nb = 2", {"a": 1, "b": 5}),
        ("a = '''\nb = 1\n'''\nc = 2", {"a": 1, "c": 4}),
        ('a = """x\\"""\nb = 1\n"""\nc = 2', {"a": 1, "c": 4}),
        ("a = '[' # [ {\nb = \"#[\"\nc = 3", {"a": 1, "b": 2, "c": 3}),
        ('"\\u0061" = 1', {"a": 1}),
        ("a = { b = 1 }\nc = 1", {"a": 1, "c": 2}),
    ],
)  # fmt: skip
def test_key_lines(text: str, lines: dict[str, int]) -> None:
    tomllib.loads(text)
    assert key_lines(text) == lines


def leaves(value: Any, at: str = "") -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in leaves(each, join(at, key))]
    return [at]


@given(
    st.dictionaries(
        st.text("ab. \"'[]#=", max_size=4),
        st.dictionaries(st.text("ab. \"'[]#=\n", max_size=4), st.text("ab\"'[]{}#=\n", max_size=8), max_size=3),
        max_size=3,
    )
)
def test_every_key_has_its_line(data: dict[str, dict[str, str]]) -> None:
    """Tables of strings, however they are quoted: each key is found where it was written."""
    text, where = "", {}
    for table, values in data.items():
        text += f"[{json.dumps(table)}]\n"
        where[join("", table)] = text.count("\n")
        for key, value in values.items():
            multi = '"""\n' + value.replace("\\", "\\\\").replace('"', '\\"') + '"""'
            where[join(join("", table), key)] = text.count("\n") + 1
            text += f"{json.dumps(key)} = {multi if len(value) % 2 else json.dumps(value)} # [{key!a}\n"
    assert tomllib.loads(text) == data
    assert key_lines(text) == where


PLANS = sorted((Path(__file__).parents[2] / "config" / "plans").glob("*.toml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_the_plans_that_come_with_us_are_good(path: Path) -> None:
    assert load_plan(path).size > 1
    assert jsonschema.Draft202012Validator(schema()).is_valid(tomllib.loads(path.read_text()))


# ----------------------------------------------------------------------------------------------------------- check


def test_a_good_plan_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD)
    assert run(path) == codes.OK
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: OK",
        "  name         bench",
        "  nodes        5",
        "  role         client: rank 0",
        "  role         server: ranks 1-2,4",
        "  role         extra: rank 3",
        "  coordinator  rank 0 (client)",
        "  finish       when the coordinator ends",
        "  contracts    result (per run, json); trace (per node, ranks 1-2,4, any, optional)",
        "  finalization 120 s for what comes last",
        "  time to end  240 s before Slurm's time limit",
    ]


def test_a_self_benchmark_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (path for path in PLANS if path.name == "fpm.toml")
    assert run(str(path)) == codes.OK
    assert "  contracts    benchmark (per node, ranks 0-1, fpm)\n" in capsys.readouterr().out


def test_what_slurm_is_asked_for_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm = """
[slurm]
time = 90
requeue = true
[[slurm.components]]
nodes = 1
partition = "cpu"
[[slurm.components]]
nodes = 4
gres = "gpu:8"
exclusive = true
options = ["--mem=0", "--exclude=n7"]
"""
    assert run(write(tmp_path, GOOD + slurm)) == codes.OK
    assert [line[15:] for line in capsys.readouterr().out.splitlines() if line.startswith("  slurm ")] == [
        "time 90, requeue",
        "nodes 1, partition cpu",
        "nodes 4, gres gpu:8, exclusive, --mem=0 --exclude=n7",
    ]


def test_a_plan_without_a_coordinator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD.replace('[coordinator]\nrole = "client"', '[run]\nfinish = "artifacts"')
    text = text.replace("nodes = 5", 'nodes = ["n1", "n2", "n3", "n4", "n5"]')
    assert run(write(tmp_path, text)) == codes.OK
    shown = capsys.readouterr().out
    assert "  nodes        5: n1, n2, n3, n4, n5\n" in shown
    assert "  coordinator  none\n  finish       when the artifacts are complete\n" in shown


def test_a_bad_plan_lists_every_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, BAD)
    assert run(path) == codes.CONFIG
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert f"{path}:13: roles.client.grace: found true; expected a number of seconds, 0..3600" in lines


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD)
    assert run("--json", path) == codes.OK
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "ok": True,
        "file": path,
        "errors": [],
        "name": "bench",
        "nodes": 5,
        "finish": "coordinator",
        "roles": [
            {"name": "client", "ranks": [0], "command": ["client"]},
            {"name": "server", "ranks": [1, 2, 4], "command": ["server"]},
            {"name": "extra", "ranks": [3], "command": ["extra"]},
        ],
        "coordinator": 0,
        "contracts": ["result", "trace@1", "trace@2", "trace@4"],
        "slurm": {
            **dict.fromkeys(("partition", "account", "qos", "time", "gres", "constraint", "array", "cluster")),
            "allocctl": None,
            "exclusive": False,
            "requeue": False,
            "options": [],
            "components": [],
        },
        "finalization": 120,
        "shutdown_budget": 240,
    }
    path = write(tmp_path, GOOD.replace("nodes = 5", "nodes = 4"))
    assert run("--json", path) == codes.CONFIG
    expected = "at least one node for each rank"
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "ok": False,
        "file": path,
        "errors": [
            {
                "line": 3,
                "key": "job.nodes",
                "found": "4 for 5 ranks",
                "expected": expected,
                "text": f"{path}:3: job.nodes: found 4 for 5 ranks; expected {expected}",
            }
        ],
    }


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schema") == codes.OK
    document = json.loads(capsys.readouterr().out)
    assert document["properties"]["roles"]["additionalProperties"]["properties"]["grace"] == {
        "description": "seconds from the stop signal to KILL",
        "type": "number",
        "minimum": 0,
        "maximum": 3600,
        "default": 30.0,
    }


def test_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == codes.CONFIG
    assert capsys.readouterr().err == "allocctl check: give a plan file, or --schema\n"


def test_another_owner_of_our_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distribution = tmp_path / "site" / "supervisor-4.2.5.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: supervisor\nVersion: 4.2.5\n")
    (distribution / "top_level.txt").write_text("supervisor\n")
    path = write(tmp_path, GOOD)
    assert check.strangers() == []
    monkeypatch.syspath_prepend(os.fspath(tmp_path / "site"))
    assert check.strangers() == ["supervisor"]
    assert run(path) == codes.CONFIG
    assert "the package `supervisor` also belongs to supervisor" in capsys.readouterr().err


@given(st.sets(st.integers(0, 40)))
def test_spans_are_what_a_plan_may_write(ranks: set[int]) -> None:
    text = check.spans(tuple(sorted(ranks)))
    expanded = {
        rank
        for part in filter(None, text.split(","))
        for first, _, last in [part.partition("-")]
        for rank in range(int(first), int(last or first) + 1)
    }
    assert expanded == ranks
    assert len(text.split(",")) == max(1, sum(rank - 1 not in ranks for rank in ranks))
