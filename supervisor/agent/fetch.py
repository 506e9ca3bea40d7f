"""`agent.pyz fetch`: copy files from this node's own disks to where the run keeps them.

The specification is one JSON object on one line of standard input:

    patterns  absolute patterns, see copying.py: no link is followed behind the part without wildcards
    root      a directory of whoever asks; below it no link is followed either
    target    the directory below the root that gets the copies, each by its whole path
    facts     a file below the root, to which a JSON line is appended for each thing that happens
    size      bytes: at most so many are copied
    seconds   from now: past them no further file is copied

Lines of the file of facts: {"begin": PID}; {"path", "source", "size", "sha256"} of each copy; {"error"} a sentence;
{"end": PID} at last. A file without that end was left by a program that was cut off: what it says of copies is true,
and there may be more to fetch.

It runs in two ways: forked by a rank's agent before that leaves (no step could be started on the node after scancel),
or as a step of its own for a rank whose agent is lost, or that never had one.
"""

from __future__ import annotations

import json
import os
import sys

from supervisor.agent.copying import Gatherer, Limits, made, opened, split

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of ours
if TYPE_CHECKING:
    from typing import Any

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def fetch(spec: dict[str, Any]) -> None:
    """Do what the specification says. Raises OSError when the facts cannot be written, KeyError on a specification
    that is none."""
    limits = Limits(spec["size"], spec["seconds"])
    *way, name = spec["facts"].split("/")
    with made(spec["root"], way) as directory, opened(name, APPEND, directory, 0o644) as facts:

        def tell(what: dict[str, Any]) -> None:
            os.write(facts, json.dumps(what).encode() + b"\n")

        tell({"begin": os.getpid()})
        gatherer = Gatherer(
            spec["root"], spec["target"], "/", limits, tell, lambda path, why: tell({"error": f"{path}: {why}"})
        )
        for pattern in spec["patterns"]:
            if not gatherer.gather(*split(pattern)):
                tell({"error": f"nothing matches {pattern}"})
        tell({"end": os.getpid()})


def main() -> int:
    """The verb. 0: all is told in the file of facts."""
    try:
        fetch(json.loads(sys.stdin.buffer.readline()))
    except OSError as error:
        sys.stderr.write(f"fetch: {error.filename or ''}: {error.strerror}\n")
        return 1
    return 0
