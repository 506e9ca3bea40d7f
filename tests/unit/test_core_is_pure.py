"""The house's two laws, read from the sources: the core touches nothing, and imports go one way.

cli, service -> runs -> engine -> launch, watch, scheduler, hosts -> core;   contracts -> watch, core;   agent stands
alone, and so does loop, which all but agents and the core use
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import supervisor

HOUSE = Path(supervisor.__file__).parent
CORE = sorted((HOUSE / "core").glob("*.py"))

PURE = {
    "__future__": None,
    "bisect": None,
    "collections": None,
    "collections.abc": None,
    "dataclasses": None,
    "datetime": None,  # to read and write times that were given; CLOCKS forbids asking for one
    "difflib": None,
    "enum": None,
    "functools": None,
    "hashlib": None,
    "itertools": None,
    "json": None,
    "math": None,
    "operator": None,
    "pathlib": {"PurePath", "PurePosixPath"},  # names only: the other classes reach the disk
    "re": None,
    "shlex": {"join", "quote"},
    "string": None,
    "types": None,
    "typing": None,
}
"""What core may import of the standard library: the module, and which names if not all."""

REACHING = {"open", "input", "print", "exec", "eval", "compile", "__import__", "breakpoint"}
"""Builtins that reach the world, or that hide what is imported."""
CLOCKS = {"now", "utcnow", "today", "monotonic", "perf_counter", "time_ns"}

ANYTHING = frozenset(
    {"agent", "cli", "contracts", "core", "engine", "hosts", "launch", "loop", "runs", "scheduler", "service", "watch"}
)
ARROWS: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "agent": frozenset({"watch"}),  # it runs alone on a node, and its archive holds what it takes from there
    "contracts": frozenset({"core", "watch"}),
    "watch": frozenset(),  # agents use it
    "loop": frozenset(),
    "hosts": frozenset({"core"}),
    "scheduler": frozenset({"core", "hosts", "loop"}),
    "launch": frozenset({"core", "hosts", "scheduler", "agent"}),  # a step is signalled through Slurm's client
    "engine": frozenset({"core", "contracts", "agent", "launch", "loop", "watch", "scheduler", "hosts"}),
    "runs": frozenset({"core", "engine", "loop", "scheduler", "agent"}),  # files are copied in the same way everywhere
    "service": ANYTHING - {"cli", "service"},
    "cli": ANYTHING - {"cli"},
}
"""package -> the packages of ours that it may import, besides itself."""


def imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each imported module and the names taken from it; imports inside functions and TYPE_CHECKING count too. A
    relative one keeps its dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)


def impurities(source: str) -> list[str]:
    """What a module of the core does that it must not."""
    tree, found = ast.parse(source), []
    for module, names in imports(tree):
        if module == "supervisor.core" or module.startswith("supervisor.core."):
            continue
        allowed = PURE.get(module)
        if module not in PURE:
            found.append(f"import {module}")
        elif allowed is not None and (not names or set(names) - allowed):
            found.append(f"from {module} import {', '.join(names) or '(all of it)'}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REACHING:
            found.append(f"{node.func.id}()")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            found.append(f".{node.func.attr}()")
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            found.append("async")
    return found


def wrong_arrows(package: str, source: str) -> list[str]:
    """Imports of our packages that `package` must not have, and relative ones: those are to have the whole name."""
    found = []
    for module, names in imports(ast.parse(source)):
        if module.startswith("."):
            found.append(module)
        if module.split(".")[0] != "supervisor":
            continue
        parts = module.split(".")
        targets = {parts[1]} if len(parts) > 1 else {name for name in names if name in ARROWS}
        found += sorted(targets - ARROWS[package] - {package})
    return found


def test_core_imports_only_pure_modules_and_asks_no_clock() -> None:
    found = {path.name: impurities(path.read_text()) for path in CORE}
    assert {name: what for name, what in found.items() if what} == {}


def test_imports_go_one_way() -> None:
    modules = {path.relative_to(HOUSE): path.read_text() for path in sorted(HOUSE.glob("*/**/*.py"))}
    assert len(modules) > len(CORE)
    found = {str(path): wrong_arrows(path.parts[0], source) for path, source in modules.items()}
    assert {path: what for path, what in found.items() if what} == {}


def test_every_package_has_its_arrows() -> None:
    found = {path.parent.name for path in HOUSE.glob("*/__init__.py")}
    assert found <= set(ARROWS)
    assert {"core", "contracts", "cli"} <= found


def test_the_arrows_have_no_circle() -> None:
    done: set[str] = set()
    while free := {name for name, targets in ARROWS.items() if targets <= done} - done:
        done |= free
    assert done == set(ARROWS)


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import asyncio",
        "import supervisor.engine.journal",
        "from supervisor.cli import plans",
        "from pathlib import Path",
        "import pathlib",
        "def f():\n    import time",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket",
        "import msgspec",
        "open('x')",
        "from datetime import datetime\ndatetime.now()",
        "async def f(): ...",
        "from .plan import Plan",
    ],
)
def test_an_impurity_is_seen(source: str) -> None:
    assert impurities(source)


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("core", "import supervisor.engine"),
        ("watch", "from supervisor import engine"),
        ("scheduler", "from supervisor.launch.base import Launcher"),
        ("engine", "def f():\n    from supervisor.cli.plans import load_plan"),
        ("agent", "from supervisor.core import codes"),
        ("service", "from supervisor.cli import check"),
        ("service", "from . import api"),
    ],
)
def test_a_wrong_arrow_is_seen(package: str, source: str) -> None:
    assert wrong_arrows(package, source)
