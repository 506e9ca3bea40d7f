"""A producer of self-benchmark artifacts: what the engine of one node writes, in the order and at the times asked for.

Standard library only; run it by its path on any node:

    python producer.py --base /results/bench.json --node 1 --nodes 2 --local 4 --points 3

    --base PATH         data-parallel rank 0's file; the other names follow from it (bench_dp5.json, ...)
    --node N            this node's number, from 0                              (default 0)
    --nodes M           number of nodes                                         (default 1)
    --local L           data-parallel ranks of each node                        (default 1)
    --points K          points of the grid                                      (default 2)
    --mode MODE         prefill, decode or agg                                  (default decode)
    --run-id TEXT       the run_id                                              (default run-1)
    --inside DIR        the directory that the paths inside the files name      (default /results)
    --order I,I,...     local ranks (0..L-1) in the order in which they are written
    --delay S           seconds before each rank's file                         (default 0)
    --merged-first      the merged file (and then the probe) before the ranks
    --merged-delay S    seconds before the merged file                          (default 0)
    --probe-delay S     seconds before the probe                                (default 0)
    --no-merged         neither the merged file nor the probe ever comes
    --no-probe          the merged file announces a probe that never comes
    --foreign-probe S   a probe of another run comes first, and the right one S seconds after it
    --resolution TEXT   what the probe says it has seen                         (default worker_probe)
    --no-engine         an older producer: no engine block, so no probe and no announcement
    --legacy            the minimal oldest files: no artifact_type, dp, run_id or iteration_groups, and no engine block
    --partial           time ran out: status "partial", the last point is missing
    --stay              when all is written, wait for SIGTERM; then, or when it comes earlier, exit 0

Each file is written beside its place (NAME.json.tmp) and renamed, as real producers do. What each rank measured follows
from the point and the rank, so that the producers of several nodes agree without talking to each other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark of `nodes * local` data-parallel ranks, and how its files are to look."""

    nodes: int = 1
    local: int = 1
    points: int = 2
    mode: str = "decode"
    run_id: str = "run-1"
    base: str = "bench"
    inside: str = "/results"
    resolution: str = "worker_probe"
    engine: bool = True
    legacy: bool = False
    partial: bool = False

    @property
    def size(self) -> int:
        """Number of data-parallel ranks of all nodes."""
        return self.nodes * self.local

    @property
    def measured(self) -> list[int]:
        """The benchmark_ids that have results."""
        return list(range(1, self.points + (0 if self.partial else 1)))

    def ranks(self, node: int) -> list[int]:
        """The ranks of a node."""
        return list(range(node * self.local, (node + 1) * self.local))

    def rank_name(self, rank: int) -> str:
        """File name of a rank."""
        return f"{self.base}_dp{rank}.json" if rank else f"{self.base}.json"

    def merged_name(self, node: int) -> str:
        """File name of a node's merged file."""
        return self.rank_name(node * self.local).removesuffix(".json") + "_merged.json"

    def probe_name(self, node: int) -> str:
        """File name of a node's probe."""
        return self.merged_name(node).removesuffix(".json") + "_worker_probe.json"

    def rank(self, rank: int) -> Document:
        """A rank's document."""
        document: Document = {
            "schema_version": 2,
            "artifact_type": "rank",
            "status": "partial" if self.partial else "complete",
            "valid": not self.partial,
            "usable": True,
            "stop_reason": "timeout" if self.partial else None,
            "error": None,
            "run_id": self.run_id,
            "grid_digest": f"grid-{self.mode}-{self.points}",
            "config": {"mode": self.mode, "warmup_iterations": 1},
            "dp": {"rank": rank, "size": self.size},
            "coverage": self._coverage(1),
            "skipped_points": [],
            "missing_phases": [],
            "limits": {"max_num_seqs": 64},
            "timing": {"total_seconds": round(1 + 0.1 * rank, 3)},
            "results": [{"point": self._point(point), "fpms": [self._fpm(point, rank)]} for point in self.measured],
            "iteration_groups": [self._group(point) for point in self.measured],
        }
        if self.engine:
            document["engine"] = {"name": "vllm", "model": "tiny"}
        if self.legacy:
            for key in ("artifact_type", "run_id", "dp", "iteration_groups"):
                del document[key]
        return document

    def merged(self, node: int) -> Document:
        """A node's merged document."""
        ranks = self.ranks(node)
        results = [
            {"point": self._point(point) | {"dp_rank": rank}, "fpms": [self._fpm(point, rank)]}
            for point in self.measured
            for rank in range(self.size)
        ]
        document = self.rank(ranks[0])
        document |= {
            "artifact_type": "merged",
            "dp": {
                "ranks": list(range(self.size)),
                "source_ranks": ranks,
                "managed_size": len(ranks),
                "global_size": self.size,
            },
            "coverage": self._coverage(self.size),
            "rank_files": [f"{self.inside}/{self.rank_name(rank)}" for rank in ranks],
            "merged_output_path": f"{self.inside}/{self.merged_name(node)}",
            "timing": {"total_seconds": round(1 + 0.1 * ranks[-1], 3)},
            "results": results,
        }
        if self.engine:
            document["worker_probe_path"] = f"{self.inside}/{self.probe_name(node)}"
        return document

    def probe(self, node: int) -> Document:
        """A node's probe."""
        ranks = self.ranks(node)
        return {
            "schema": "dynamo.fpm.benchmark_worker_probe",
            "schema_version": 1,
            "run_id": self.run_id,
            "merged_output_path": f"{self.inside}/{self.merged_name(node)}",
            "rank_files": [f"{self.inside}/{self.rank_name(rank)}" for rank in ranks],
            "merged": {"resolved": True, "resolved_scope": "merged", "resolution": self.resolution},
            "ranks": {
                str(rank): {"rank_file": f"{self.inside}/{self.rank_name(rank)}", "resolution": self.resolution}
                for rank in ranks
            },
        }

    def _coverage(self, times: int) -> Document:
        return {
            "expected_points": self.points * times,
            "completed_points": len(self.measured) * times,
            "skipped_points": 0,
        }

    def _point(self, point: int) -> Document:
        kind = ("prefill", "decode")[point % 2] if self.mode == "agg" else self.mode
        return {
            "point_type": kind,
            "benchmark_id": point,
            "batch_size": point,
            "total_prefill_tokens": 128 * point if kind == "prefill" else 0,
            "total_kv_read_tokens": 256 * point if kind == "decode" else 0,
        }

    def _wall_time(self, point: int, rank: int) -> float:
        return round(0.01 * point + 0.001 * rank, 6)

    def _fpm(self, point: int, rank: int) -> Document:
        return {"dp_rank": rank, "counter_id": point, "wall_time": self._wall_time(point, rank)}

    def _group(self, point: int) -> Document:
        everyone = range(self.size)
        return {
            "benchmark_id": point,
            "point": self._point(point),
            "expected_dp_ranks": list(everyone),
            "complete": True,
            "rank_results": [{"dp_rank": rank, "fpms": [self._fpm(point, rank)]} for rank in everyone],
            "wall_time": max(self._wall_time(point, rank) for rank in everyone),
        }


def write(directory: str, name: str, document: Document) -> None:
    """Put a document in its place, whole at once."""
    path = os.path.join(directory, name)
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump(document, file)
    os.replace(f"{path}.tmp", path)


def produce(benchmark: Benchmark, directory: str, asked: argparse.Namespace) -> None:
    """Write a node's files as they were asked for."""
    ranks, node = benchmark.ranks(asked.node), asked.node

    def measure() -> None:
        for local in asked.order or range(benchmark.local):
            time.sleep(asked.delay)
            write(directory, benchmark.rank_name(ranks[local]), benchmark.rank(ranks[local]))

    def merge() -> None:
        if asked.no_merged:
            return
        time.sleep(asked.merged_delay)
        write(directory, benchmark.merged_name(node), benchmark.merged(node))
        if not benchmark.engine or asked.no_probe:
            return
        time.sleep(asked.probe_delay)
        if asked.foreign_probe is not None:
            write(directory, benchmark.probe_name(node), {**benchmark.probe(node), "run_id": "of-another-run"})
            time.sleep(asked.foreign_probe)
        write(directory, benchmark.probe_name(node), benchmark.probe(node))

    for step in (merge, measure) if asked.merged_first else (measure, merge):
        step()


def main(arguments: Sequence[str]) -> None:
    """Produce what the command line asks for (see the module)."""
    parser = argparse.ArgumentParser(description="writes a node's self-benchmark artifacts")
    parser.add_argument("--base", required=True)
    parser.add_argument("--mode", choices=("prefill", "decode", "agg"), default="decode")
    parser.add_argument("--run-id", default="run-1")
    parser.add_argument("--inside", default="/results")
    parser.add_argument("--resolution", default="worker_probe")
    parser.add_argument("--order", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--foreign-probe", type=float)
    for option, default in (("node", 0), ("nodes", 1), ("local", 1), ("points", 2)):
        parser.add_argument(f"--{option}", type=int, default=default)
    for option in ("delay", "merged-delay", "probe-delay"):
        parser.add_argument(f"--{option}", type=float, default=0.0)
    for option in ("merged-first", "no-merged", "no-probe", "no-engine", "legacy", "partial", "stay"):
        parser.add_argument(f"--{option}", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.stay:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    directory, name = os.path.split(asked.base)
    benchmark = Benchmark(
        nodes=asked.nodes,
        local=asked.local,
        points=asked.points,
        mode=asked.mode,
        run_id=asked.run_id,
        base=name.removesuffix(".json"),
        inside=asked.inside,
        resolution=asked.resolution,
        engine=not (asked.no_engine or asked.legacy),
        legacy=asked.legacy,
        partial=asked.partial,
    )
    produce(benchmark, directory or ".", asked)
    while asked.stay:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
