"""The finalization window as the environment sets it: what is accepted, what is refused, and which variable counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor.core.finalization import OURS, SELF_BENCHMARKS, mistakes, seconds, with_window
from supervisor.core.plan import Plan, parse_plan

FPM: dict[str, Any] = {"name": "fpm", "path": "bench.json", "contract": "fpm", "ranks_per_node": 1}
FILE: dict[str, Any] = {"name": "result", "path": "r.json"}
WRONG = (
    "0",
    "3601",
    "-1",
    "",
    "1.5",
    "120s",
    " 120",
    "120 ",
    "+120",
    "1e2",
    "0x78",
    "１２０",
    "٣",
    "120\n",
    "9" * 5000,
)


def plan(*artifacts: dict[str, Any]) -> Plan:
    data = {
        "job": {"name": "j", "nodes": 1},
        "coordinator": {"rank": 0},
        "roles": {"client": {"ranks": 0, "command": ["true"]}},
        "artifacts": list(artifacts),
        "deadlines": {"finalization": 90},
    }
    return parse_plan(data, "p.toml")


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_window_is_refused(text: str) -> None:
    assert seconds(text) is None
    assert [error.key_path for error in mistakes(plan(), {OURS: text})] == [f"environment: {OURS}"]
    both = mistakes(plan(FPM), {OURS: text, SELF_BENCHMARKS: text})
    assert [error.key_path for error in both] == [f"environment: {OURS}", f"environment: {SELF_BENCHMARKS}"]


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("120", 120), ("3600", 3600), ("0007", 7)])
def test_integers_from_1_to_3600(text: str, value: int) -> None:
    assert seconds(text) == value
    assert with_window(plan(), {OURS: text}).deadlines.finalization == value


@pytest.mark.parametrize(
    ("environ", "of_files", "of_benchmarks"),
    [
        ({}, 90, 90),
        ({OURS: "5"}, 5, 5),
        ({SELF_BENCHMARKS: "7"}, 90, 7),
        ({OURS: "5", SELF_BENCHMARKS: "7"}, 5, 5),
    ],
)
def test_which_variable_counts(environ: dict[str, str], of_files: int, of_benchmarks: int) -> None:
    assert with_window(plan(FILE), environ).deadlines.finalization == of_files
    assert with_window(plan(FILE, FPM), environ).deadlines.finalization == of_benchmarks


def test_a_variable_that_does_not_count_is_not_judged() -> None:
    assert mistakes(plan(FILE), {SELF_BENCHMARKS: "soon"}) == []
    assert mistakes(None, {SELF_BENCHMARKS: "soon"}) == []
    assert len(mistakes(None, {OURS: "soon"})) == 1


# --- the commands ------------------------------------------------------------------------------------------------

TOML = """
[job]
name = "j"
nodes = 1
[coordinator]
rank = 0
[roles.client]
ranks = 0
command = ["touch", "{run_dir}/started", "{run_dir}/r.json"]
[[artifacts]]
name = "result"
path = "r.json"
non_empty = false
"""


def allocctl(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (directory / "plan.toml").write_text(TOML)
    command = [sys.executable, "-m", "supervisor.cli.main", *words]
    env = {"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(directory), **environ}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_refused_at_check_and_again_before_any_rank_starts(tmp_path: Path) -> None:
    told = 'plan.toml: environment: ALLOCD_FINALIZATION_TIMEOUT: found "0"; expected seconds as an integer, 1..3600'
    checked = allocctl(tmp_path, "check", "plan.toml", **{OURS: "0"})
    assert (checked.returncode, told in checked.stdout) == (78, True)
    started = allocctl(tmp_path, "run", "--local", "plan.toml", **{OURS: "0"})
    assert (started.returncode, told in started.stderr) == (78, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_window_that_counts_is_journalled(tmp_path: Path) -> None:
    assert "17 s for what comes last" in allocctl(tmp_path, "check", "plan.toml", **{OURS: "17"}).stdout
    ended = allocctl(tmp_path, "run", "--local", "-q", "plan.toml", **{OURS: "17"})
    assert ended.returncode == 0, ended.stderr
    journal = tmp_path / "runs" / ended.stdout.strip() / "journal.jsonl"
    opened = json.loads(journal.read_text().splitlines()[0])
    assert opened["plan"]["deadlines"]["finalization"] == 17
