"""How fast allocd is on this machine, beside what it replaces: `python -m tests.bench [BENCH...] [--runs N]`.

One table. What is compared is measured in turn in the same run; figures are medians with their range. Nothing here
passes or fails: a machine that does other things as well is slower, and says so by its load.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import asking, calls, costs, ends, files, outages, service, verdicts, waits, watching
from tests.bench.stage import RANKS, Stage, environment, see_first
from tests.bench.table import Row, render
from tests.cluster import Cluster
from tests.slurm.jobs import Jobs

Bench = Callable[[Stage], list[Row]]

ON_A_CLUSTER: dict[str, Bench] = {
    "failure": ends.failure,
    "overhead": ends.overhead,
    "look": calls.look,
    "waiting": waits.waiting,
    "verdict": verdicts.verdict,
}
ON_THIS_MACHINE: dict[str, Bench] = {
    "marker": files.marker,
    "artifact": files.artifact,
    "status": costs.status,
    "idle": costs.idle,
    "calls": calls.calls,
    "socket": asking.asked,
    "service": service.service,
    "watchers": watching.watchers,
    "found": watching.found,
}
ASKED_FOR: dict[str, Bench] = {"outages": outages.outages}
"""What takes many minutes, and is measured only when it is named."""
USUAL = {**ON_A_CLUSTER, **ON_THIS_MACHINE}
BENCHES = {**USUAL, **ASKED_FOR}


def main() -> int:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("benches", metavar="BENCH", nargs="*", help=f"{', '.join(BENCHES)} (default: all but outages)")
    parser.add_argument("--runs", type=int, default=10, help="how often each way is measured (default: 10)")
    args = parser.parse_args()
    if unknown := set(args.benches) - BENCHES.keys():
        parser.error(f"no bench {', '.join(sorted(unknown))}: there are {', '.join(BENCHES)}")
    if args.runs < 1:
        parser.error("--runs: at least 1")
    see_first()
    before = _load()
    table = measure(args.benches or list(USUAL), args.runs)
    machine = f"{os.cpu_count()} processors, Linux {platform.release()}, Python {platform.python_version()}"
    print(f"{machine}, load {before} before and {_load()} after\n\n{render(table)}")
    return 0


def measure(names: Sequence[str], runs: int) -> list[Row]:
    """The rows of the benches, in order. The cluster is up only for those that need it."""
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="allocd-bench-") as directory:
        here = Stage(Path(directory), runs, environment(Path(directory)))
        on_cluster = [name for name in names if name in ON_A_CLUSTER]
        missing = Cluster.missing() if on_cluster else None
        if missing:
            table += (Row(name, skipped=missing) for name in on_cluster)
        elif on_cluster:
            with Cluster() as cluster:
                stage = _allocation(Jobs(cluster, here.place()), here)
                for name in on_cluster:
                    table += _measured(name, stage)
        for name in names:
            if name not in ON_A_CLUSTER:
                table += _measured(name, here)
    return table


def _measured(name: str, stage: Stage) -> list[Row]:
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    return BENCHES[name](stage)


def _allocation(jobs: Jobs, here: Stage) -> Stage:
    """A stage in an allocation of four nodes, which a sleeping job holds."""
    held = jobs.hold(RANKS)
    # Without a share for each step (--overlap, no memory of its own) a step would wait for the one before to be gone.
    srun = ("srun", f"--jobid={held.jobid}", "--overlap", "--mem=0", "--cpu-bind=none", "--ntasks-per-node=1")
    return Stage(here.place(), here.runs, environment(here.directory, jobs.env, held.env), srun)


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    sys.exit(main())
