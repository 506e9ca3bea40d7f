"""A table of small self-benchmarks, and what each amounts to: how a case is kept, and put on the disk.

`bases/NAME/` holds whole sets of files, as a producer writes them. A case (`cases/NAME.json`) starts from one of these:

    about              what the case is, in words
    base               the set of files
    without            files that are left out
    files              name -> what is put there instead: {"text"}, {"repeat", "times"}, {"copy": a file of the base},
                       {"copy_of": [base, file]}, {"link": target}, {"hard_link": file}, {"directory"} or {"fifo"}
    change, drop       file -> JSON paths, with a new value, or to be removed
    replace, prefix    file -> [old text, new text], or text that goes before all
    contract           keys of the [[artifacts]] table; ranks_per_node is 1 unless told
    node, nodes        this node's number, and the number of nodes; 0 and 1 unless told
    answer             what has to be concluded
    problems, notes    how each sentence begins that has to be told, all of them, in order

What has to be concluded is what a person says who knows the format; what the code concludes is never copied into it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from supervisor.contracts import Place
from supervisor.core.artifact_table import Artifact
from supervisor.core.artifacts import Instance

HERE: Final = Path(__file__).parent
BASES: Final = HERE / "bases"
CASES: Final = tuple(sorted(path.stem for path in (HERE / "cases").glob("*.json")))


@dataclass(frozen=True)
class Case:
    """A case as it is kept."""

    about: str
    base: str
    answer: str
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    change: dict[str, dict[str, Any]] = field(default_factory=dict)
    drop: dict[str, list[str]] = field(default_factory=dict)
    replace: dict[str, tuple[str, str]] = field(default_factory=dict)
    prefix: dict[str, str] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    node: int = 0
    nodes: int = 1

    @classmethod
    def load(cls, name: str) -> Case:
        """The case of this name."""
        return cls(**json.loads((HERE / "cases" / f"{name}.json").read_text()))

    def place(self, root: Path) -> Place:
        """Its contract, with its files below `root`."""
        return place(root, self.node, self.nodes, **self.contract)

    def put(self, root: Path) -> None:
        """Write its files."""
        for file in sorted((BASES / self.base).iterdir()):
            if file.name not in self.without:
                shutil.copyfile(file, root / file.name)
        for name, what in self.files.items():
            self._make(root, name, what)
        for name in {**self.change, **self.drop}:
            document = json.loads((root / name).read_text())
            for path, value in self.change.get(name, {}).items():
                parent, key = _parent(document, path)
                parent[key] = value
            for path in self.drop.get(name, ()):
                parent, key = _parent(document, path)
                del parent[key]
            (root / name).write_text(json.dumps(document))
        for name, (old, new) in self.replace.items():
            text = (root / name).read_text()
            assert old in text, f"{name} does not hold {old}"
            (root / name).write_text(text.replace(old, new))
        for name, text in self.prefix.items():
            (root / name).write_text(text + (root / name).read_text())

    def _make(self, root: Path, name: str, what: dict[str, Any]) -> None:
        path = root / name
        path.unlink(missing_ok=True)
        ((word, value),) = ((key, value) for key, value in what.items() if key != "times")
        if word == "directory":
            path.mkdir()
        elif word == "fifo":
            os.mkfifo(path)
        elif word == "link":
            path.symlink_to(value)
        elif word == "hard_link":
            path.hardlink_to(root / value)
        elif word in ("copy", "copy_of"):
            base, file = (self.base, value) if word == "copy" else value
            shutil.copyfile(BASES / base / file, path)
        else:
            path.write_text({"text": value, "repeat": value * what.get("times", 1)}[word])


def place(root: Path, node: int = 0, nodes: int = 1, **keys: Any) -> Place:
    """A node's place: `bench.json` below `root`."""
    artifact = Artifact("fpm", "bench.json", **{"contract": "fpm", "per": "node", "ranks_per_node": 1, **keys})
    return Place(Instance(f"fpm@{node}", artifact, node, node, nodes), root, {"run_dir": str(root)})


def _parent(document: Any, path: str) -> tuple[Any, str | int]:
    """What holds the value at a JSON path, and under which key."""
    steps: list[str | int] = [int(i) if i else name for name, i in re.findall(r"\.(\w+)|\[(\d+)\]", path)]
    for step in steps[:-1]:
        document = document[step]
    return document, steps[-1]
