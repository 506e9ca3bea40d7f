"""How a plan is to be submitted: everything that is not in the plan itself, found out and checked. Nothing is written.

What the caller's environment says counts, whether it is this process's (`allocctl submit`) or came with a request:
where runs are made, which allocctl the nodes have, which cluster is meant, and what sbatch reads.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor import __version__
from supervisor.core.plan import Plan
from supervisor.core.submission import Order, make_order, submission_environment

VERSION_LIMIT: Final = 20.0
"""Seconds for `allocctl --version`: on a cold network file system Python takes some."""


class Unfit(Exception):
    """Nothing can be submitted so; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Terms:
    """`base`: where the submission's directory is made; `allocctl`: that of the nodes; `environ` and `cwd`: sbatch's,
    and the job's. Paths are absolute."""

    base: str
    allocctl: str
    cluster: str | None
    options: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: str = "/"

    def order(self, plan: Plan) -> Order:
        """The order for one submission, with a directory of its own. Raises Misfit."""
        return make_order(
            plan,
            base=self.base,
            token=secrets.token_hex(8),
            allocctl=self.allocctl,
            version=__version__,
            options=self.options,
            environ=self.environ,
            cluster=self.cluster,
            user=getpass.getuser(),
            uid=os.getuid(),
        )


def terms(
    plan: Plan,
    environ: Mapping[str, str],
    *,
    directory: str | None = None,
    cwd: str | None = None,
    allocctl: str | None = None,
    cluster: str | None = None,
    options: Sequence[str] = (),
) -> tuple[Terms, tuple[str, ...]]:
    """The terms, and notes for people. `cwd` (default: this process's) is where relative paths start, and the job.
    Blocks, at most `VERSION_LIMIT` seconds. Raises Unfit."""
    try:
        cwd = cwd or os.getcwd()
    except FileNotFoundError:
        raise Unfit("the working directory does not exist any more: change to one that does") from None
    kept = submission_environment(environ)
    if not shutil.which("sbatch", path=kept.get("PATH")):
        raise Unfit("there is no sbatch on PATH: add Slurm's bin directory, or use `allocctl run` on this machine")
    found, notes = find_allocctl(allocctl, plan, environ)
    base = _base(directory or environ.get("ALLOCD_RUNS") or plan.base, cwd)
    return Terms(base, found, _cluster(cluster, plan, environ), tuple(options), kept, cwd), notes


def _base(given: str, cwd: str) -> str:
    """Where the submission's directory is made, from the root. Raises Unfit."""
    path = os.path.normpath(os.path.join(cwd, given))
    if not path.isprintable():
        raise Unfit(f"{path!a}: a path that is no printable text: choose another place with --dir")
    return path


def _cluster(given: str | None, plan: Plan, environ: Mapping[str, str]) -> str | None:
    """One cluster's name, or None for this one. sbatch's own variables are above the plan. Raises Unfit."""
    variables = (environ.get(name) for name in ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"))
    name = given or next(filter(None, variables), None) or plan.slurm.cluster
    if name and ("," in name or name == "all" or not name.isprintable() or name.startswith("-")):
        raise Unfit(f"{name!r} is no single cluster: name one with --cluster")
    return name


def find_allocctl(given: str | None, plan: Plan, environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The absolute path of the allocctl that the job execs, and notes for people: the flag's, $ALLOCCTL, the plan's, or
    this one. One that was named need not be here, for the nodes may have another file system. Raises Unfit."""
    named = given or environ.get("ALLOCCTL") or plan.slurm.allocctl
    path = named or _this_one()
    if not os.path.isabs(path) or not path.isprintable():
        raise Unfit(f"{path!r}: the nodes need an absolute path of allocctl")
    if not os.path.exists(path):
        if not named:
            raise Unfit(f"{path} is not there: name the nodes' allocctl with --allocctl")
        return path, (f"{path} is not there on this machine: the job will say if it is not there on the node either",)
    _check_version(path)
    return path, ()


def _this_one() -> str:
    """The command of this very installation: what was typed, else the one beside the interpreter."""
    typed = os.path.abspath(sys.argv[0])
    return typed if os.path.basename(typed) == "allocctl" else os.path.join(os.path.dirname(sys.executable), "allocctl")


_CHECKED: Final[set[tuple[str, int, int, int]]] = set()
"""What has been found to be ours, by path, inode, size and time: the daemon asks often, and asking takes 100 ms."""


def _check_version(path: str) -> None:
    """It runs here, and is ours. Raises Unfit."""
    try:
        status = os.stat(path)
        seen = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        if seen in _CHECKED:
            return
        done = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=VERSION_LIMIT
        )
    except FileNotFoundError:  # the file is there
        raise Unfit(f"{path} does not run: the interpreter that its first line names is not there") from None
    except OSError as error:
        raise Unfit(f"{path} does not run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise Unfit(f"{path} --version did not end within {VERSION_LIMIT:g} s") from None
    if done.returncode != 0 or done.stdout.strip() != f"allocctl {__version__}":
        said = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or "nothing")[:200]
        raise Unfit(f"{path} --version says {said!r}, and this is allocctl {__version__}: name one of the same version")
    _CHECKED.add(seen)
