"""Copies of what a run left, for whoever keeps results elsewhere: receipts, journal, outcome, logs, collected.

Not the plan: the values of its `env` may be secrets, and copies are uploaded. The journal begins with it, without them.

What lies in a run directory may have been put there by a job: see `agent/copying.py`, by which everything here is
copied. An older copy of the same name is replaced. Trouble with one file is a sentence and hinders no other.
"""

from __future__ import annotations

import os
import re
from typing import Final

from supervisor.agent.copying import DIRECTORY, ROOT, Gatherer, Limits, copy, escape, made, opened

WANTED: Final = re.compile(
    r"receipt(\.run)?\.json|journal\.jsonl|slurm_job_[\w+]+_outcome\.txt|logs|collected|\.bench_done\.[\w.+]+"
)
"""Entries of a run directory that are copied."""

UNLIMITED: Final = 1 << 63  # bytes
LIMIT: Final = 86_400.0  # seconds


def copy_run(run_dir: str, target: str) -> list[str]:
    """Copy a run's files into `target/RUNID/`. Returns what could not be copied, in sentences."""
    trouble: list[str] = []
    base, name = os.path.split(os.path.abspath(run_dir))

    def tell(path: str, why: str) -> None:
        trouble.append(f"{os.path.relpath(path, base)!a} could not be copied: {why}")

    try:
        with opened(run_dir, DIRECTORY) as source:
            wanted = sorted(filter(WANTED.fullmatch, os.listdir(source)))
        os.makedirs(os.path.join(target, name), exist_ok=True)
    except OSError as error:
        return [f"{run_dir} could not be copied: {error.strerror or error}"]
    gatherer = Gatherer(os.path.abspath(target), "", base, Limits(UNLIMITED, LIMIT), lambda fact: None, tell)
    for entry in wanted:  # a file, or a directory with all that is in it
        gatherer.gather(base, [escape(name), escape(entry)])
        gatherer.gather(base, [escape(name), escape(entry), "**"], hidden=True)
    return trouble


def copy_file(path: str, target: str) -> list[str]:
    """Copy one file into the directory `target`. Returns what went wrong, in sentences."""
    try:
        with opened(os.path.dirname(path) or ".", ROOT) as source, made(target, []) as directory:
            copy(source, os.path.basename(path), directory, Limits(UNLIMITED, LIMIT))
    except OSError as error:
        return [f"{path} could not be copied: {error.strerror or error}"]
    return []
