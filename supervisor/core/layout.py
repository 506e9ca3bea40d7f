"""What a run is made of by name: its directory, its files, its steps, and what each rank gets. Pure strings.

RUN_DIR/                made exclusively, one per run
  plan.toml             the plan as it was
  journal.jsonl         everything that happened; every view is computed from it
  agent.pyz, marker.sh  what runs beside the ranks, so that a node needs nothing of ours installed
  .bench_done.JOBID     the marker (the plan can name another path)
  logs/rank-R.ROLE.out  and .err: the rank's own; .srun: its srun's (or agent's) own words
  collected/            what the plan asks to collect; nodes/R/ from rank R's node, nodes/R.jsonl tells of it
  receipt.run.json      what the engine saw; receipt.json: sealed with Slurm's record
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from supervisor.core.plan import Plan, values_for
from supervisor.core.substitution import literal, substitute

JOURNAL: Final = "journal.jsonl"
PLAN_COPY: Final = "plan.toml"
AGENT: Final = "agent.pyz"
SHELL: Final = "marker.sh"
RUN_RECEIPT: Final = "receipt.run.json"
RECEIPT: Final = "receipt.json"
COLLECTED: Final = "collected"


@dataclass(frozen=True)
class Layout:
    """One run: who it is, where it lives, on which nodes its ranks run (`nodes[rank]`), and its secretless nonce, by
    which our own lines on a channel and our own processes on a node are told from foreign ones."""

    plan: Plan
    run_id: str
    jobid: str
    run_dir: str
    nodes: tuple[str, ...]
    nonce: str

    @property
    def logs(self) -> str:
        return self.at("logs")

    @property
    def marker(self) -> str:
        """The marker's path."""
        return substitute(self.plan.marker.path, self.values(None))

    def at(self, *names: str) -> str:
        """A path in the run directory."""
        return str(PurePosixPath(self.run_dir, *names))

    def log(self, rank: int, kind: str) -> str:
        """The path of a rank's log: `out`, `err`, or `srun` for the launcher's own words."""
        return self.at("logs", f"rank-{rank}.{self.plan.role_of(rank).name}.{kind}")

    def values(self, rank: int | None) -> dict[str, str]:
        """What the substitutions of the plan stand for, for a rank or for the run (None)."""
        return values_for(
            self.plan, jobid=self.jobid, run_dir=self.run_dir, logs=self.logs, nodes=self.nodes, rank=rank
        )

    def step_name(self, rank: int) -> str:
        """The step's name, by which a run finds its own steps and no other's. A run's id is unique in its base
        directory only: with another `--dir`, a second run in the allocation has the same one. Hence a piece of the
        nonce."""
        return f"{self.step_prefix}r{rank}"

    @property
    def step_prefix(self) -> str:
        """How the names of all steps of this run begin; those of its short helpers have a word in front of that."""
        return f"allocd-{self.run_id}-{self.nonce[:8]}-"

    def tag(self, rank: int) -> str:
        """What every process of the rank carries in its environment, and a search of the node looks for."""
        return f"{self.run_id}.{self.nonce}.{rank}"

    def rank_command(self, rank: int) -> list[str]:
        """The rank's command, substituted."""
        values = self.values(rank)
        return [substitute(word, values) for word in self.plan.role_of(rank).command]

    def srun_options(self, rank: int) -> list[str]:
        """What the plan adds to the command line of the rank's srun, substituted."""
        values = self.values(None)
        return [substitute(option, values) for option in self.plan.role_of(rank).srun_options]

    def rank_environment(self, rank: int) -> dict[str, str]:
        """What is added to the environment that the rank finds on its node."""
        values = self.values(rank)
        role = self.plan.role_of(rank)
        ours = {
            "ALLOCD_RUN_ID": self.run_id,
            "ALLOCD_RUN_DIR": self.run_dir,
            "ALLOCD_LOGS": self.logs,
            "ALLOCD_RANK": str(rank),
            "ALLOCD_ROLE": role.name,
            "ALLOCD_NODE": self.nodes[rank],
            "ALLOCD_NODES": ",".join(self.nodes),
            "ALLOCD_COORDINATOR_NODE": values.get("coordinator_node", ""),
            "ALLOCD_MARKER": self.marker,
            "ALLOCD_MARKER_RECHECK": str(math.ceil(self.plan.marker.recheck)),
            "ALLOCD_SH": self.at(SHELL),
            "ALLOCD_TAG": self.tag(rank),
        }
        return {**{name: substitute(text, values) for name, text in role.env.items()}, **ours}

    def collected_from(self, rank: int) -> str:
        """The directory of what was fetched from the rank's node, below the run directory; with `.jsonl` behind it, the
        file of facts."""
        return f"{COLLECTED}/nodes/{rank}"

    @property
    def node_share(self) -> int:
        """Bytes that may be fetched from each node. The nodes fetch at the same time and know nothing of each other;
        what they leave of `collect.size_max`, and a share in any case, is for the files that all can see."""
        return self.plan.collect.size_max // (self.plan.size + 1)

    def fetch_specification(self, rank: int, seconds: float) -> dict[str, Any]:
        """What is to be fetched from the rank's node within `seconds`, as `agent/fetch.py` reads it."""
        values = {word: literal(value) for word, value in self.values(rank).items()}
        target = self.collected_from(rank)
        return {
            "patterns": [substitute(pattern, values) for pattern in self.plan.collect.nodes],
            "root": self.run_dir,
            "target": target,
            "facts": f"{target}.jsonl",
            "size": self.node_share,
            "seconds": seconds,
        }

    def specification(self, rank: int, stop_signal: int, cwd: str) -> dict[str, Any]:
        """What the agent of a rank is told: the document that its channel carries before `start`. `cwd` is used where
        the role names none."""
        role = self.plan.role_of(rank)
        return {
            "argv": self.rank_command(rank),
            "env": self.rank_environment(rank),
            "unset": [],
            "cwd": substitute(role.cwd, self.values(rank)) if role.cwd else cwd,
            "out": self.log(rank, "out"),
            "err": self.log(rank, "err"),
            "tag": self.tag(rank),
            "stop_signal": stop_signal,
            "grace": role.grace,
            "fetch": self.fetch_specification(rank, self.plan.deadlines.collect) if self.plan.collect.nodes else None,
        }
