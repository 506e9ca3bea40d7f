"""config/ci/github-actions.yml: as much of it as can be held against the program without a runner."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from supervisor.cli.github import outputs
from supervisor.cli.main import VERBS
from tests.unit.test_github import outputs_of
from tests.unit.test_receipt import SUCCESS, completed, sealed

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "config/ci/github-actions.yml").read_text()
LINES = [line.split(" #")[0].rstrip() for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
STEPS = re.split(r"\n      - ", "\n".join(LINES))[1:]
COMMANDS = [line.partition("allocctl ")[2] for line in LINES if re.search(r"(^\s+|run: )(exec )?allocctl ", line)]


def test_its_commands_were_found() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["check", "submit", "receipt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_typed(command: str) -> None:
    verb, *words = shlex.split(command)
    if verb not in VERBS:
        pytest.skip(f"there is no verb {verb} yet")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    import_module(f"supervisor.cli.{verb}").add(parser.add_subparsers())
    parser.parse_args([verb, *words])
    for word in words:
        assert not word.endswith(".toml") or (ROOT / word).is_file()


def test_the_outputs_that_it_names_are_there() -> None:
    named = set(re.findall(r"steps\.job\.outputs\.(\w+)", TEXT))
    assert named <= set(outputs_of(outputs([sealed(completed(), SUCCESS)])))
    assert "\n        id: job\n" in TEXT


def test_what_comes_after_the_job_comes_always() -> None:
    job = next(number for number, step in enumerate(STEPS) if "allocctl submit" in step)
    assert "run: exec allocctl" in STEPS[job]
    assert len(STEPS) > job + 1
    for step in STEPS[job + 1 :]:
        assert "if: always()" in step
    (upload,) = [step for step in STEPS if "upload-artifact" in step]
    for pattern in ("slurm_job_*_outcome.txt", "runs/**/receipt*.json", "runs/**/logs/**", "junit.xml"):
        assert f"\n            {pattern}\n" in f"{upload}\n"


def test_no_script_has_an_expression_in_its_text() -> None:
    """An output is somebody's words: in a script's text it would be a part of the script."""
    for step in STEPS:
        script = re.search(r"run: \|?(.*)", step, re.DOTALL)
        assert script is None or "${{" not in script[1]


def test_it_is_yaml_as_far_as_can_be_seen() -> None:
    assert "\t" not in TEXT
    depth = 0
    for line in filter(None, LINES):
        indent = len(line) - len(line.lstrip())
        assert indent % 2 == 0, line
        assert indent <= depth + 4, line
        depth = indent
