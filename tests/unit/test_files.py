"""The contract "files": what it finds on a real disk, and what it refuses to touch."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.contracts import Place, directories, examiner, places, preexisting, reading, walk
from supervisor.core.artifact_table import Artifact, FieldRule
from supervisor.core.artifacts import FileFact, Finding, Instance
from supervisor.core.substitution import SubstitutionError
from supervisor.watch import polling
from supervisor.watch.trees import Trees
from tests.mounts import two_mounts

VALUES = {"jobid": "7", "rank": "1", "node": "n1", "role": "w", "nodes": "n0,n1"}


def instance(path: str, **rules: Any) -> Instance:
    return Instance("result", Artifact("result", path, **rules), None)


def json_file(path: str = "r.json", **fields: FieldRule) -> Instance:
    return instance(path, format="json", fields={name.replace("_", "."): rule for name, rule in fields.items()})


def look(root: Path, what: Instance, **values: str) -> Finding:
    return check(what, root, {"run_dir": str(root), **VALUES, **values})


def check(what: Instance, root: Path, values: dict[str, str]) -> Finding:
    """A first look."""
    place = Place(what, root, values)
    finding = examiner([place]).look(place)
    return replace(finding, files=tuple(replace(fact, mtime_ns=None) for fact in finding.files))


def whole(finding: Finding) -> list[str]:
    """The files that were read."""
    return [fact.path for fact in finding.files if fact.sha256 is not None]


def before(root: Path, what: Instance, run_dir: Path | None = None) -> tuple[str, ...]:
    return preexisting(Place(what, root, {"run_dir": str(run_dir or root), **VALUES}))


def put(root: Path, path: str, content: str | bytes = "{}") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def sha(content: str | bytes) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else content.encode()).hexdigest()


# --------------------------------------------------------------------------------------------------- what is found


def test_a_valid_file(tmp_path: Path) -> None:
    put(tmp_path, "out/r.json", '{"a": 1}')
    assert look(tmp_path, json_file("out/r.json")) == Finding(
        "result", "valid", (), (FileFact("out/r.json", 8, sha('{"a": 1}')),)
    )


def test_an_opaque_file_is_hashed_too(tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    put(tmp_path, "x.bin", content)
    assert look(tmp_path, instance("x.bin")).files == (FileFact("x.bin", len(content), sha(content)),)


@pytest.mark.parametrize(
    ("files", "rules", "problem"),
    [
        ([], {}, "r*: found nothing; expected a file"),
        (["r1"], {"count": 3}, "r*: found 1; expected at least 3 files"),
        (["other"], {"count": 2}, "r*: found nothing; expected at least 2 files"),
    ],
)
def test_missing_files_are_pending(tmp_path: Path, files: list[str], rules: dict[str, Any], problem: str) -> None:
    for name in files:
        put(tmp_path, name)
    finding = look(tmp_path, instance("r*", **rules))
    assert (finding.answer, finding.problems) == ("pending", (problem,))


def test_a_root_that_does_not_exist_yet_is_pending(tmp_path: Path) -> None:
    for root in (tmp_path / "later", tmp_path / "later" / "below"):
        finding = check(instance("r"), root, {"run_dir": str(tmp_path)})
        assert (finding.answer, finding.problems) == ("pending", ("r: found nothing; expected a file",))


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("a.json", {"a.json"}),
        ("*.json", {"a.json", "b.json", "c.json"}),
        ("?.json", {"a.json", "b.json", "c.json"}),
        ("[!a].json", {"b.json", "c.json"}),
        ("A.json", set()),
        ("*/c.json", {"d/c.json", "e/c.json"}),
        ("d/*", {"d/c.json"}),
        ("**/c.json", {"c.json", "d/c.json", "e/c.json", "e/f/c.json"}),
        ("**/f/*", {"e/f/c.json"}),
        ("e/**", {"e/c.json", "e/f/c.json"}),
        ("**/**/f/c.json", {"e/f/c.json"}),
        (".h*", {".hidden.json"}),
        ("*/*/*/*", set()),
    ],
)  # fmt: skip
def test_patterns(tmp_path: Path, pattern: str, matches: set[str]) -> None:
    names = (
        "a.json",
        "b.json",
        ".hidden.json",
        "c.json.d",
        "c.json",
        "d/c.json",
        "e/c.json",
        "e/f/c.json",
        ".g/c.json",
    )
    for name in names:
        put(tmp_path, name)
    finding = look(tmp_path, instance(pattern))
    assert {fact.path for fact in finding.files} == matches
    assert finding.answer == ("valid" if matches else "pending")
    assert before(tmp_path, instance(pattern)) == tuple(sorted(matches))


def test_values_are_no_patterns(tmp_path: Path) -> None:
    put(tmp_path, "r_n1.json")
    put(tmp_path, "r_*.json")
    assert [fact.path for fact in look(tmp_path, instance("r_{node}.json"), node="*").files] == ["r_*.json"]
    assert look(tmp_path, instance("r_{node}.json"), node="[n]1").answer == "pending"
    assert look(tmp_path, instance("r_{node}.json"), node="[n]1").problems == (
        "r_[n]1.json: found nothing; expected a file",
    )


@pytest.mark.parametrize("node", ["..", "a/b", "/etc", "", ".", "a\0b"])
def test_a_value_that_would_climb_is_our_fault(tmp_path: Path, node: str) -> None:
    with pytest.raises(ValueError, match="no path below a root"):
        look(tmp_path, instance("{node}"), node=node)


def test_a_missing_value_is_our_fault(tmp_path: Path) -> None:
    with pytest.raises(SubstitutionError):
        check(instance("{rank}"), tmp_path, {"run_dir": str(tmp_path)})


@pytest.mark.parametrize(
    ("pattern", "directory"),
    [("a.json", ""), ("a/b/c.json", "a/b"), ("a/*/c.json", "a"), ("*.json", ""), ("a/r{rank}/[ab]/x", "a/r1")],
)
def test_the_deepest_directory_that_a_pattern_names(tmp_path: Path, pattern: str, directory: str) -> None:
    place = Place(instance(pattern), tmp_path, {"run_dir": str(tmp_path), **VALUES})
    assert list(directories(place)) == [tmp_path / directory]


def test_the_root_is_substituted() -> None:
    what = instance("x", root="{run_dir}/{node}")
    assert places([what], lambda rank: {"run_dir": "/r", **VALUES})[0].root == Path("/r/n1")


# ------------------------------------------------------------------------------------------------- pending contents


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "found an empty file; expected content"),
        (" \n", "found no whole JSON document"),
        ('{"a": 1', "found no whole JSON document"),
        ('{"a": 1}}', "found no whole JSON document"),
        ('{"a": 1}{"a": 1}', "found no whole JSON document"),
        ("nul", "found no whole JSON document"),
        (b'{"a": "\xc3', "found no whole JSON document"),
        (b'{"a": "\xff"}', "found no whole JSON document"),
        (b"\0" * 100, "found no whole JSON document"),
        ("{'a': 1}", "found no whole JSON document"),
        ('{"a": NaN', "found no whole JSON document"),
        ('{"a": 1, "a": 2', "found no whole JSON document"),
    ],
)
def test_half_written_json_is_pending(tmp_path: Path, content: str | bytes, reason: str) -> None:
    put(tmp_path, "r.json", content)
    finding = look(tmp_path, json_file())
    assert finding.answer == "pending"
    assert finding.problems[0].startswith(f"r.json: {reason}")
    assert finding.files == (FileFact("r.json", len(content), None, problems=finding.problems),)


def test_an_empty_file_may_be_wanted(tmp_path: Path) -> None:
    put(tmp_path, "done", "")
    assert look(tmp_path, instance("done")).answer == "pending"
    assert look(tmp_path, instance("done", non_empty=False)).answer == "valid"
    put(tmp_path, "r.json", "")
    assert look(tmp_path, instance("r.json", non_empty=False, format="json")).answer == "pending"


def test_one_half_written_file_holds_the_others(tmp_path: Path) -> None:
    put(tmp_path, "r1.json", "{}")
    put(tmp_path, "r2.json", "{")
    finding = look(tmp_path, json_file("r*.json"))
    assert finding.answer == "pending"
    assert whole(finding) == ["r1.json"]


documents = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=25, deadline=None)  # a few hundred looks at a disk each
@given(document=documents, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_any_strict_prefix_of_a_json_object_is_pending(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    root = tmp_path_factory.mktemp("r")
    data = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    file, what = put(root, "r.json", data), json_file("r.json")
    assert look(root, what).answer == "valid"
    for size in reversed(range(len(data))):
        os.truncate(file, size)
        assert look(root, what).answer == "pending", data[:size]


@pytest.mark.parametrize(("what", "moment"), [(json_file(), 1), (instance("r.json"), 2)], ids=["json", "any"])
@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_text('{"a": 12345}'),
        lambda file: os.truncate(file, 1),
        lambda file: os.truncate(file, 0),
        lambda file: os.utime(file, ns=(1, 1)),
    ],
    ids=["grows", "shrinks", "is emptied", "is touched"],
)
def test_a_file_that_changes_while_it_is_read_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Instance, moment: int, change: Callable[[Path], Any]
) -> None:
    """The change comes between the first status of the look that reads (`moment`) and the reading."""
    file = put(tmp_path, "r.json", '{"a": 1}')
    original, calls = os.fstat, iter(range(1, 10))

    def fstat(descriptor: int) -> os.stat_result:
        status = original(descriptor)
        if next(calls) == moment:
            change(file)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        finding = look(tmp_path, what)
    assert (finding.answer, whole(finding)) == ("pending", [])
    assert finding.problems == ("r.json: found a file that is being written; expected it to stay as it is",)


# ------------------------------------------------------------------------------------------------- invalid contents


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("3", "found 3; expected a JSON object or list"),
        ('"x"', 'found "x"; expected a JSON object or list'),
        ("null", "found null; expected a JSON object or list"),
        ('{"a": NaN}', "found NaN; expected JSON, which has finite numbers only"),
        ('{"a": [-Infinity]}', "found -Infinity; expected JSON, which has finite numbers only"),
        ('{"a": 1e999}', 'found "1e999"; expected JSON, which has finite numbers only'),
        ('{"a": 1, "b": 2, "a": 1}', 'found the key "a" twice in one object; expected it once'),
        ('[{"a": {"b": 1, "b": 2}}]', 'found the key "b" twice in one object; expected it once'),
        (
            "[" * 100_000 + "]" * 100_000,
            "found lists or objects nested too deeply; expected less than a thousand levels",
        ),
        ("[" + "1" * 5000 + "]", "found a number of 5000 digits; expected JSON, which has finite numbers only"),
    ],
)
def test_json_that_is_wrong_is_invalid(tmp_path: Path, content: str, problem: str) -> None:
    put(tmp_path, "r.json", content)
    finding = look(tmp_path, json_file())
    assert finding.answer == "invalid"
    assert finding.problems == (f"r.json: {problem}",)
    assert finding.files == (FileFact("r.json", len(content), sha(content), problems=finding.problems),)


DOCUMENT = {
    "requests": {"failed": 3, "done": 10, "rate": 2.5, "ok": True, "none": None},
    "points": [{"x": 1}, {"x": 2}],
    "name": "run",
    "a.b": {"c": 5},
}


@pytest.mark.parametrize(
    ("path", "rule", "problem"),
    [
        ("requests.failed", FieldRule(equals=3), None),
        ("requests.failed", FieldRule(equals=3.0), None),
        ("requests.failed", FieldRule(equals=0), "found 3; expected 0"),
        ("requests.failed", FieldRule(equals="3"), 'found 3; expected "3"'),
        ("requests.ok", FieldRule(equals=True), None),
        ("requests.ok", FieldRule(equals=1), "found true; expected 1"),
        ("requests.done", FieldRule(equals=True), "found 10; expected true"),
        ("requests.ok", FieldRule(min=0), "found true; expected a number, 0 or more"),
        ("requests.rate", FieldRule(min=2, max=3), None),
        ("requests.rate", FieldRule(min=3), "found 2.5; expected a number, 3 or more"),
        ("requests.rate", FieldRule(max=2), "found 2.5; expected a number, 2 or less"),
        ("name", FieldRule(max=2), 'found "run"; expected a number, 2 or less'),
        ("name", FieldRule(equals="run", length_min=3), None),
        ("name", FieldRule(length_min=4), 'found "run"; expected a length of 4 or more'),
        ("points", FieldRule(length_min=2), None),
        ("points", FieldRule(length_max=2), None),
        ("points", FieldRule(length_max=1), "found a list of 2; expected a length of 1 or less"),
        ("requests.done", FieldRule(length_max=9), "found 10; expected a length of 9 or less"),
        ("points", FieldRule(length_min=3), "found a list of 2; expected a length of 3 or more"),
        ("requests", FieldRule(length_min=6), "found an object; expected a length of 6 or more"),
        ("requests.done", FieldRule(length_min=0), "found 10; expected a length of 0 or more"),
        ("points.1.x", FieldRule(equals=2), None),
        ("points.2.x", FieldRule(exists=True), "found nothing; expected a value"),
        ("points.-1.x", FieldRule(exists=True), "found nothing; expected a value"),
        ("points.01.x", FieldRule(exists=True), None),
        ("points.x", FieldRule(exists=True), "found nothing; expected a value"),
        ("name.x", FieldRule(exists=True), "found nothing; expected a value"),
        ("missing", FieldRule(equals=0), "found nothing; expected 0"),
        ("missing", FieldRule(min=0), "found nothing; expected a number, 0 or more"),
        ("missing", FieldRule(exists=False), None),
        ("requests.none", FieldRule(exists=True), None),
        ("requests.none", FieldRule(exists=False), "found null; expected no such field"),
        (r"a\.b.c", FieldRule(equals=5), None),
        ("a.b.c", FieldRule(equals=5), "found nothing; expected 5"),
    ],
)
def test_field_rules(tmp_path: Path, path: str, rule: FieldRule, problem: str | None) -> None:
    put(tmp_path, "results/r.json", json.dumps(DOCUMENT))
    finding = look(tmp_path, instance("results/r.json", format="json", fields={path: rule}))
    if problem is None:
        assert (finding.answer, finding.problems) == ("valid", ())
    else:
        assert (finding.answer, finding.problems) == ("invalid", (f"results/r.json: {path}: {problem}",))


def test_every_broken_rule_is_told(tmp_path: Path) -> None:
    put(tmp_path, "r1.json", '{"n": 3}')
    put(tmp_path, "r2.json", '{"n": "x"}')
    put(tmp_path, "r3.json", "{")
    finding = look(tmp_path, json_file("r*.json", n=FieldRule(equals=0, max=2), m=FieldRule(exists=True)))
    assert finding.answer == "invalid"
    told = [problem for problem in finding.problems if not problem.startswith("r3.json")]
    assert told == [
        "r1.json: n: found 3; expected 0",
        "r1.json: n: found 3; expected a number, 2 or less",
        "r1.json: m: found nothing; expected a value",
        'r2.json: n: found "x"; expected 0',
        'r2.json: n: found "x"; expected a number, 2 or less',
        "r2.json: m: found nothing; expected a value",
    ]


def test_a_big_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SIZE_CAP", 10)
    put(tmp_path, "r.json", json.dumps({"a": "0123456789"}))
    finding = look(tmp_path, json_file())
    assert (finding.answer, finding.problems) == ("invalid", ("r.json: found 19 bytes; expected at most 10 of JSON",))
    finding = look(tmp_path, instance("r.json"))
    assert (finding.answer, finding.files) == ("valid", (FileFact("r.json", 19, None),))


# ------------------------------------------------------------------------------------- sizes, lines, several files


@pytest.mark.parametrize("rules", [{}, {"format": "json"}, {"format": "jsonl"}], ids=["any", "json", "jsonl"])
@pytest.mark.parametrize(
    ("sizes", "answer", "problem"),
    [
        ({"size_min": 8, "size_max": 8}, "valid", None),
        ({"size_min": 9}, "pending", "r: found 8 bytes; expected 9 or more"),
        ({"size_max": 7}, "invalid", "r: found 8 bytes; expected 7 or fewer"),
    ],
)
def test_sizes(tmp_path: Path, rules: dict[str, Any], sizes: dict[str, Any], answer: str, problem: str | None) -> None:
    put(tmp_path, "r", '{"a": 1}')
    finding = look(tmp_path, instance("r", **rules, **sizes))
    assert (finding.answer, finding.problems) == (answer, () if problem is None else (problem,))
    if answer == "valid":
        assert whole(finding) == ["r"]


def test_what_is_wrong_is_told_before_what_is_half_written(tmp_path: Path) -> None:
    put(tmp_path, "a.json", '{"n": ')
    put(tmp_path, "z.json", '{"n": 2}')
    finding = look(tmp_path, json_file("*.json", n=FieldRule(equals=1)))
    assert [problem.split(":")[0] for problem in finding.problems] == ["z.json", "a.json"]


def test_a_broken_rule_outweighs_what_is_missing(tmp_path: Path) -> None:
    put(tmp_path, "r.json", '{"n": 3}')
    finding = look(tmp_path, instance("r.json", format="json", size_min=100, fields={"n": FieldRule(equals=4)}))
    assert (finding.answer, finding.problems) == ("invalid", ("r.json: n: found 3; expected 4",))


@pytest.mark.parametrize(
    ("text", "answer", "problem"),
    [
        ('{"n": 1}\n{"n": 2}\n', "valid", None),
        ('{"n": 1}\n', "pending", "found 1 lines; expected 2 or more"),
        ("", "pending", "found an empty file; expected content"),
        ('{"n": 1}\n{"n": 9}\n', "invalid", "line 2: n: found 9; expected a number, 5 or less"),
        ('{"n": 1}\n{"n": 2}\n{"n"', "pending", "line 3: found no whole JSON document; expected one"),
    ],
)
def test_json_lines(tmp_path: Path, text: str, answer: str, problem: str | None) -> None:
    put(tmp_path, "r.jsonl", text)
    finding = look(tmp_path, instance("r.jsonl", format="jsonl", lines_min=2, fields={"n": FieldRule(max=5)}))
    assert finding.answer == answer
    assert finding.problems[:1] == (() if problem is None else (f"r.jsonl: {problem}",))


def test_an_empty_file_of_lines_may_be_wanted(tmp_path: Path) -> None:
    put(tmp_path, "r.jsonl", "")
    assert look(tmp_path, instance("r.jsonl", format="jsonl", non_empty=False)).answer == "valid"


@settings(max_examples=20, deadline=None)
@given(lines=st.lists(documents, min_size=1, max_size=3), newline=st.booleans())
def test_any_prefix_of_json_lines_that_lacks_one_is_pending(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], newline: bool
) -> None:
    root = tmp_path_factory.mktemp("r")
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    data = text.encode()
    file = put(root, "r.jsonl", data + b"\n" * newline)
    what = instance("r.jsonl", format="jsonl", lines_min=len(lines))
    assert look(root, what).answer == "valid"
    for size in reversed(range(len(data))):
        os.truncate(file, size)
        assert look(root, what).answer == "pending", data[:size]


CONTENTS = {"a/1.json": '{"n": 1}', "a/2.json": '{"n": 2}', "b/1.json": '{"n": 3}'}


@settings(max_examples=30, deadline=None)
@given(order=st.permutations([*CONTENTS, "SHA256SUMS"]))
def test_any_order_of_arrival_ends_the_same(tmp_path_factory: pytest.TempPathFactory, order: list[str]) -> None:
    root = tmp_path_factory.mktemp("r")
    sums = "".join(f"{sha(text)}  {name}\n" for name, text in CONTENTS.items())
    what = instance("*/*.json", format="json", count=3, checksums="SHA256SUMS")
    place = Place(what, root, {"run_dir": str(root), **VALUES})
    examined = examiner([place])
    for name in order:
        assert examined.look(place).answer == "pending"
        put(root, name, "")
        assert examined.look(place).answer == "pending"
        put(root, name, {**CONTENTS, "SHA256SUMS": sums}[name])
    finding = examined.look(place)
    assert (finding.answer, finding.problems) == ("valid", ())
    assert whole(finding) == [*CONTENTS, "SHA256SUMS"]
    assert [fact.kind for fact in finding.files] == ["file", "file", "file", "checksums"]
    assert (finding.answer, whole(finding)) == ("valid", whole(look(root, what)))


# ---------------------------------------------------------------------------------------------- lists of checksums


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ("{right}  out/r.bin\n", None),
        ("{right} *out/r.bin", None),
        ("{upper}  ./out/r.bin\r\n", None),
        ("{right}  r.bin\n", None),
        ("{right}  /scratch/run/out/r.bin\n", None),
        ("{wrong}  r.bin\n{right}  out/r.bin\n", None),
        ("", "out/r.bin: found no entry in SUMS[1]; expected its sha256 there"),
        ("{right}  other/r.bin\n", "out/r.bin: found no entry in SUMS[1]; expected its sha256 there"),
        ("{right}  ../r.bin\n", "out/r.bin: found no entry in SUMS[1]; expected its sha256 there"),
        ("{right}  out/r.bi", "out/r.bin: found no entry in SUMS[1]; expected its sha256 there"),
        ("{wrong}  r.bin\n", "out/r.bin: found sha256 {right}; expected {wrong} (SUMS[1])"),
        ("{right}  r.bin\nrubbish\n", "SUMS[1]: line 2: found no checksum; expected HASH  NAME"),
    ],
)
def test_checksums(tmp_path: Path, listed: str, problem: str | None) -> None:
    content, words = b"content", {"right": sha("content"), "wrong": sha("x"), "upper": sha("content").upper()}
    put(tmp_path, "out/r.bin", content)
    put(tmp_path, "SUMS[1]", listed.format(**words))
    finding = look(tmp_path, instance("out/*", checksums="SUMS[1]"))
    assert finding.problems == (() if problem is None else (problem.format(**words),))
    assert finding.answer == ("valid" if problem is None else "pending")
    assert before(tmp_path, instance("out/*", checksums="SUMS[1]")) == ("SUMS[1]", "out/r.bin")


@pytest.mark.parametrize("root", ["late", "late/a/b"])
def test_a_root_that_comes_late_is_found_at_once_through_a_client_that_remembers(tmp_path: Path, root: str) -> None:
    """Nobody named it while it was missing: neither who looks whether something is there before, nor who looks for the
    file, nor who watches, here or on the writer's node."""
    with two_mounts(tmp_path) as (here, there):
        place = Place(json_file("out/r.json"), there / root, {"run_dir": "/run", **VALUES})
        eyes, careful = examiner([place]), Trees(careful=True)
        known, target = polling.TOP, polling.Target(f"{there}/{root}", f"{there}/{root}/out")
        assert preexisting(place) == ()
        for _ in range(2):
            assert eyes.look(place).answer == "pending"
            careful.settle((target.root, target.directory, target.depth))
            with polling.opened(target, known, lambda descriptor: False) as found:
                known = found.path
        put(here, f"{root}/out/r.json")
        assert eyes.look(place).answer == "valid"
        with polling.opened(target, known, lambda descriptor: False) as found:
            assert found.there
        assert careful.settle((target.root, target.directory, target.depth))
        assert preexisting(place) == ("out/r.json",)
        eyes.close()
        careful.close()


def test_what_is_above_many_roots_is_not_listed_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way, listed, real = walk.Way(), list[Any](), os.listdir

    def counting(directory: Any) -> list[str]:
        listed.append(directory)
        return real(directory)

    monkeypatch.setattr(os, "listdir", counting)
    for number in range(30):
        (tmp_path / f"n{number}").mkdir()
        place = Place(json_file(), tmp_path / f"n{number}", {"run_dir": "/run", **VALUES})
        assert preexisting(place, way) == ()
    assert (
        len(listed) == len(tmp_path.parts) - 1 + 2 * 30
    )  # the way there, once; then what holds the root, and the root


@pytest.mark.parametrize("content", [b"", b"half", b"wrong", b"too long"])
def test_a_file_is_found_replaced_through_a_client_that_remembers(tmp_path: Path, content: bytes) -> None:
    """Whatever it lacked: attributes that are remembered for 20 s do not hide it."""
    with two_mounts(tmp_path) as (here, there):
        put(here, "r.bin", content)
        put(here, "SUMS", f"{hashlib.sha256(b'right').hexdigest()}  r.bin")
        place = Place(instance("r.bin", checksums="SUMS"), there, {"run_dir": "/run", **VALUES})
        eyes = examiner([place])
        waits = eyes.look(place)
        assert waits.answer == "pending"
        assert waits.files[0].problems == waits.problems
        put(here, "r.bin", b"right")
        assert eyes.look(place).answer == "valid"
        eyes.close()


def test_a_name_with_escapes_in_a_list_of_checksums(tmp_path: Path) -> None:
    put(tmp_path, "r\\n.bin", b"content")
    put(tmp_path, "SUMS", f"\\{sha('content')}  r\\\\n.bin\n")
    assert look(tmp_path, instance("r*", checksums="SUMS")).answer == "valid"


def test_a_list_of_checksums_is_no_output_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "r.bin", b"content")
    put(tmp_path, "SUMS", f"{sha('content')}  r.bin\n")
    finding = look(tmp_path, instance("*", checksums="SUMS"))
    assert [(fact.path, fact.kind) for fact in finding.files] == [("r.bin", "file"), ("SUMS", "checksums")]


def test_a_list_of_checksums_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = instance("r.bin", checksums="SUMS")
    put(tmp_path, "r.bin", b"content")
    assert look(tmp_path, what).problems == ("SUMS: found nothing; expected a list of checksums",)
    put(tmp_path, "real", f"{sha('content')}  r.bin\n")
    link(tmp_path, "real", "SUMS")
    assert look(tmp_path, what).problems == ("SUMS: found a symbolic link; expected a plain file",)
    (tmp_path / "SUMS").unlink()
    (tmp_path / "real").rename(tmp_path / "SUMS")
    monkeypatch.setattr(reading, "TEXT_CAP", 10)
    assert look(tmp_path, what).problems == ("SUMS: found 72 bytes; expected at most 10 of text",)


# -------------------------------------------------------------------------------------------------- hostile places


def link(root: Path, target: str | Path, name: str = "r.json") -> None:
    (root / name).symlink_to(target)


def serve(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(root / "r.json"))


HOSTILE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda root: link(root, put(root, "../outside.json")), "found a symbolic link; expected a plain file"),
    (lambda root: link(root, put(root, "inside.json")), "found a symbolic link; expected a plain file"),
    (lambda root: link(root, "nowhere"), "found a symbolic link; expected a plain file"),
    (lambda root: link(root, "r.json"), "found a symbolic link; expected a plain file"),
    (lambda root: os.mkfifo(root / "r.json"), "found a FIFO; expected a plain file"),
    (serve, "found a socket; expected a plain file"),
    (lambda root: (root / "r.json").mkdir(), "found a directory; expected a plain file"),
    (
        lambda root: os.link(put(root, "x.json"), root / "r.json"),
        "found a file with 2 names (hard links); expected one",
    ),
]


@pytest.mark.parametrize(("make", "reason"), HOSTILE)
@pytest.mark.timeout(10)
def test_what_is_no_plain_file_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(root)
    make(root)
    for what in (json_file(), instance("r.json")):
        finding = look(root, what)
        assert (finding.answer, finding.problems, whole(finding)) == ("pending", (f"r.json: {reason}",), [])
        assert before(root, what) == ("r.json",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(put(tmp_path, "r.json"), 12345, 12345)
    assert look(tmp_path, json_file()).problems == (
        "r.json: found a file of user 12345; expected one of user 0 or root",
    )


@pytest.mark.parametrize("target", ["{outside}", "real", "nowhere", "out"])
@pytest.mark.parametrize("pattern", ["out/r.json", "*/r.json", "**/r.json"])
def test_a_link_in_the_place_of_a_directory_is_refused(tmp_path: Path, target: str, pattern: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    put(outside, "r.json")
    root.mkdir()
    put(root, "real/other")
    link(root, target.format(outside=outside), "out")
    problem = "out: found a symbolic link; expected a directory"
    finding = look(root, json_file(pattern))
    assert (finding.answer, finding.files) == ("pending", ())
    assert problem in finding.problems
    assert before(root, json_file(pattern)) == (problem,)


def test_a_root_that_became_a_link_is_refused(tmp_path: Path) -> None:
    run_dir, outside = tmp_path / "run", tmp_path / "outside"
    put(outside, "r.json")
    run_dir.mkdir()
    link(run_dir, outside, "results")
    finding = check(json_file(), run_dir / "results", {"run_dir": str(run_dir)})
    assert finding.answer == "pending"
    assert finding.problems[0] == f"{run_dir}/results: Not a directory"
    assert before(run_dir / "results", json_file(), run_dir) == (".: Not a directory",)


def test_links_on_the_way_to_the_plans_own_directories_are_the_sites(tmp_path: Path) -> None:
    real = tmp_path / "real"
    put(real, "run/r.json")
    put(real, "data/r.json")
    link(tmp_path, real, "scratch")
    run_dir = tmp_path / "scratch" / "run"
    assert check(json_file(), run_dir, {"run_dir": str(run_dir)}).answer == "valid"
    assert check(json_file(), tmp_path / "scratch" / "data", {"run_dir": str(run_dir)}).answer == "valid"


@pytest.mark.timeout(10)
@pytest.mark.parametrize("swapped", ["link", "fifo"])
def test_a_file_that_is_swapped_after_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    root, secret = tmp_path / "root", put(tmp_path, "secret.json", '{"secret": 1}')
    file = put(root, "r.json", '{"a": 1}')
    original = os.open

    def swapping_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == "r.json":
            file.unlink()
            file.symlink_to(secret) if swapped == "link" else os.mkfifo(file)
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapping_open)
    finding = look(root, json_file())
    assert (finding.answer, whole(finding)) == ("pending", [])
    words = "Too many levels of symbolic links" if swapped == "link" else "found a FIFO; expected a plain file"
    assert finding.problems == (f"r.json: {words}",)


@pytest.mark.parametrize("moment", ["before the open", "after the open"])
def test_a_directory_that_is_swapped_after_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Swapped before it is opened, it is refused; swapped after, what was opened is what is read."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside, "r.json", '{"secret": 1}')
    put(root, "out/r.json", '{"a": 1}')
    original = os.open

    def swap() -> None:
        (root / "out").rename(root / "old")
        (root / "out").symlink_to(outside)

    def swapping_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == "out" and moment == "before the open":
            swap()
        if path == "r.json" and moment == "after the open":
            swap()
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", swapping_open)
    finding = look(root, json_file("out/r.json"))
    if moment == "before the open":
        assert (finding.answer, finding.problems, finding.files) == ("pending", ("out: Not a directory",), ())
    else:
        assert finding.files == (FileFact("out/r.json", 8, sha('{"a": 1}')),)


@pytest.mark.parametrize("name", ["r\n.json", "r\x1b[2J.json", "r\udcff.json", "r\u202e.json"])
def test_names_that_would_garble_a_terminal_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    finding = look(tmp_path, json_file("*.json"))
    assert finding.answer == "pending"
    assert finding.files == ()
    assert all(problem.isprintable() for problem in finding.problems)
    assert "found control characters; expected a plain file name" in finding.problems[0]


def test_a_file_in_the_place_of_a_directory(tmp_path: Path) -> None:
    put(tmp_path, "out")
    problem = "out: found a file; expected a directory"
    assert look(tmp_path, json_file("out/r.json")).problems == (problem,)
    assert before(tmp_path, json_file("out/r.json")) == (problem,)


def test_trees_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "DEPTH_CAP", 3)
    put(tmp_path, "a/b/c/d/r.json")
    assert look(tmp_path, json_file("**/r.json")).problems == (
        "a/b/c/d: found more directories; expected at most 3 levels",
    )


def test_a_look_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "NAMES_CAP", 5)
    for number in range(4):
        put(tmp_path, f"wide/{number}")
    assert look(tmp_path, instance("wide/*")).answer == "valid"  # wide, and four names in it
    put(tmp_path, "wide/4")
    assert look(tmp_path, instance("wide/*")).problems == (
        "wide: found too many names; expected at most 5 in one look",
    )


def failing(code: int, wanted: str) -> Callable[..., int]:
    original = os.open

    def fail(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if path == wanted:
            raise OSError(code, os.strerror(code))
        return original(path, flags, *args, **kwargs)

    return fail


@pytest.mark.parametrize("place", ["out", "r.json"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int) -> None:
    put(tmp_path, "out/r.json")
    monkeypatch.setattr(os, "open", failing(code, place))
    finding = look(tmp_path, json_file("out/r.json"))
    where = "out" if place == "out" else "out/r.json"
    assert (finding.answer, finding.problems) == ("pending", (f"{where}: {os.strerror(code)}",))


@pytest.mark.parametrize("place", ["out", "r.json"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_a_fault_of_ours_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int) -> None:
    put(tmp_path, "out/r.json")
    monkeypatch.setattr(os, "open", failing(code, place))
    with pytest.raises(OSError, match=os.strerror(code)):
        look(tmp_path, json_file("out/r.json"))


@pytest.mark.parametrize("pattern", ["out/r.json", "**/*.json", "missing/*/x", "out/link/x", "*"])
def test_no_descriptor_is_left_open(tmp_path: Path, pattern: str) -> None:
    root = tmp_path / "a" / "b"
    put(root, "out/r.json")
    put(root, "out/half.json", "{")
    link(root / "out", "nowhere", "link")
    held = set(os.listdir("/proc/self/fd"))
    for place in (root, root / "missing", root / "out" / "link"):
        check(json_file(pattern), place, {"run_dir": str(tmp_path)})
        before(place, json_file(pattern), tmp_path)
    assert set(os.listdir("/proc/self/fd")) == held


@pytest.mark.parametrize("path", ["r.json", "out/r.json", "*/r.json"])
@pytest.mark.parametrize("root", ["", "later", "out/later"])
def test_only_names_that_a_listing_showed_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, path: str
) -> None:
    """A name that is looked for and missing stays missing on a network file system, for up to a minute."""
    put(tmp_path, "out/other.json")
    asked: list[str] = []

    def recording(call: Callable[..., Any]) -> Callable[..., Any]:
        def record(name: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(str(name))
            return call(name, *args, **kwargs)

        return record

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", recording(os.open))
        patch.setattr(os, "stat", recording(os.stat))
        check(json_file(path), tmp_path / root, {"run_dir": str(tmp_path)})
    assert set(asked) <= {str(tmp_path), "out", "other.json"}
    assert str(tmp_path) in asked


@pytest.mark.parametrize("what", [json_file("r.bin"), instance("r.bin")], ids=["json", "any"])
def test_a_file_that_is_read_cut_short_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Instance
) -> None:
    """Seen on a network file system: the status tells the new size, and reading ends before it."""
    put(tmp_path, "r.bin", "[1, 2]")
    original = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        fields = list(original(descriptor))
        fields[6] += 2  # st_size
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        finding = look(tmp_path, what)
    assert (finding.answer, whole(finding)) == ("pending", [])
    assert "being written" in finding.problems[0]


def test_a_file_that_matches_in_two_ways_is_told_once(tmp_path: Path) -> None:
    put(tmp_path, "a/a/r.json", "")
    what = json_file("**/a/**/r.json")
    assert look(tmp_path, what).problems == ("a/a/r.json: found an empty file; expected content",)
    assert before(tmp_path, what) == ("a/a/r.json",)


# ------------------------------------------------------------------------------------------------- before the run


def test_what_exists_before_the_run(tmp_path: Path) -> None:
    what = json_file("out/r*.json")
    assert before(tmp_path / "nowhere", what) == ()
    assert before(tmp_path, what) == ()
    put(tmp_path, "out/other.json")
    assert before(tmp_path, what) == ()
    put(tmp_path, "out/r1.json", "")
    link(tmp_path / "out", "nowhere", "r2.json")
    os.mkfifo(tmp_path / "out" / "r3.json")
    (tmp_path / "out" / "r4.json").mkdir()  # fits the wildcard by chance
    assert before(tmp_path, what) == ("out/r1.json", "out/r2.json", "out/r3.json")


def test_what_cannot_be_known_before_the_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "out/x")
    monkeypatch.setattr(os, "open", failing(errno.EACCES, "out"))
    assert before(tmp_path, json_file("out/r.json")) == ("out: Permission denied",)
