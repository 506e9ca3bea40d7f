"""What the files of a self-benchmark hold: judges for a rank's file, a merged file and a probe.

An engine with several data-parallel ranks measures the points of a grid, and writes on each node

    BASE.json, BASE_dp1.json, ...         one for each rank of the node: each point's measurement, and in
                                          `iteration_groups` every rank's, of all nodes
    BASE_merged.json                      the node's ranks together (BASE_dp4_merged.json where rank 4 is the first)
    BASE_merged_worker_probe.json         what the node's workers were seen to do, if the merged file announces it

What binds them:

    rank -- rank      run_id, grid_digest, config.mode, dp.size, coverage, status, measurement_protocol and the
                      iteration groups are the same in all ranks, of all nodes
    merged -- ranks   the same run, grid and mode; dp and rank_files name this node's ranks; coverage is that of a rank
                      times the number of ranks of all nodes; the iteration groups are those of the ranks
    probe -- merged   the same run; merged_output_path and rank_files are those of the merged file

A judge sees one document alone. It says what can never be right in it, and sums up what binds it; `fpm` compares. So
these are wrong: another kind of file under this name, a value of the wrong type, parts of one document that contradict
each other. A merged file of another run is not: it is bound elsewhere, which is for `fpm` to see.

`partial` is the status of a producer that ran out of time. A rank that says so is wrong, for the grid is not measured;
how far it came is in the summary. Keys that are not known are normal everywhere.

Paths inside are the producer's own (`/results/...` of a container): only their last component is looked at.

All judges take the document and options, and return Judged. Pure: standard library only, no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from supervisor.contracts.content import Judged
from supervisor.contracts.document import Field
from supervisor.core.substitution import show

SCHEMA_VERSION: Final = 2
MODES: Final = ("prefill", "decode", "agg")
PROBE_SCHEMA: Final = "dynamo.fpm.benchmark_worker_probe"
PROBE_VERSION: Final = 1
MERGED_SUFFIX: Final = "_merged.json"
PROBE_SUFFIX: Final = "_worker_probe.json"

_ENDS: Final[dict[str, dict[str, Any]]] = {
    "complete": {"valid": True, "usable": True, "stop_reason": None, "error": None},
    "partial": {"valid": False, "usable": True, "stop_reason": "timeout", "error": None},
}
"""status -> what goes with it."""
_COUNTS: Final = ("batch_size", "total_prefill_tokens", "total_kv_read_tokens")
_NEWER: Final = ("artifact_type", "dp", "run_id", "iteration_groups")
"""What the older, minimal files lack."""


@dataclass(frozen=True, slots=True)
class _Grid:
    """What the results of a document must fit; None where the document does not say so."""

    mode: str | None
    points: int | None  # expected, so benchmark_ids go from 1 to this
    completed: int | None
    size: int | None  # data-parallel ranks of all nodes


def rank(document: Any, options: dict[str, Any]) -> Judged:
    """Judge of a rank's file. Options: `rank`, its number; `size`, the number of all ranks or None; the pins `run_id`,
    `grid_digest` and `mode`, None where there is none; `legacy`, whether older files are accepted."""
    root = Field(document, [])
    if not root.table():
        return Judged(tuple(root.problems))
    older, number, size = _older(root, options["legacy"]), options["rank"], options["size"]
    if not (older and root["artifact_type"].absent) and not root["artifact_type"].equals("rank"):
        return Judged(tuple(root.problems))
    if not (older and root["dp"].absent) and root["dp"].table():
        root["dp"]["rank"].equals(number)
        said = root["dp"]["size"].whole(number + 1)
        if said is not None and size is not None:
            root["dp"]["size"].equals(size, ", the ranks of all nodes of the contract")
        size = said
    agree = _header(root, older)
    if agree["$.status"] == "partial":
        root["status"].equals("complete")
    for place, field, pin in (
        ("$.run_id", root["run_id"], options["run_id"]),
        ("$.grid_digest", root["grid_digest"], options["grid_digest"]),
        ("$.config.mode", root["config"]["mode"], options["mode"]),
    ):
        if pin is not None and agree[place] != pin and (older or agree[place] is not None):
            field.equals(pin, ", as the contract pins it")
    points, completed = _coverage(root, agree["$.status"])
    grid = _Grid(agree["$.config.mode"], points, completed, size)
    seen = _results(root, grid, completed, number)
    if not older or not root["iteration_groups"].absent:
        _groups(root, grid, seen)
    agree |= {"$.dp.size": size, "$.coverage.expected_points": points, "$.coverage.completed_points": completed}
    stopped = root["stop_reason"].value
    return Judged(tuple(root.problems), {"agree": agree, "stop_reason": stopped if isinstance(stopped, str) else None})


def merged(document: Any, options: dict[str, Any]) -> Judged:
    """Judge of a merged file. Options: `legacy`."""
    root, older = Field(document, []), options["legacy"]
    if not root.table() or not root["artifact_type"].equals("merged"):
        return Judged(tuple(root.problems))
    agree = _header(root, older)
    dp = root["dp"]
    size = dp["global_size"].whole(1) if dp.table() else None
    sources: list[int] = []
    if size is not None:
        dp["ranks"].counts_up(size)
        numbers = [field.whole(0, size - 1) for field in dp["source_ranks"].items()]
        sources = [number for number in numbers if number is not None]
        if len(sources) == len(numbers):
            if not sources or any(a >= b for a, b in pairwise(sources)):
                dp["source_ranks"].wrong("this node's ranks in order", show(sources))
            dp["managed_size"].equals(len(sources), ", the number of source_ranks")
    files = [field.file_name() for field in root["rank_files"].items()]
    if sources and len(files) != len(sources):
        root["rank_files"].wrong(f"a list of {len(sources)}, one for each of the source_ranks")
    own = root["merged_output_path"].file_name()
    announced = _announced(root, own)
    expected, count = _coverage(root, agree["$.status"])
    points, completed = _share(root, "expected_points", expected, size), _share(root, "completed_points", count, size)
    grid = _Grid(agree["$.config.mode"], points, completed, size)
    seen = _results(root, grid, count, None)
    if not older or not root["iteration_groups"].absent:
        _groups(root, grid, seen)
    agree |= {"$.dp.global_size": size, "$.coverage.expected_points": expected, "$.coverage.completed_points": count}
    return Judged(
        tuple(root.problems),
        {"agree": agree, "source_ranks": sources, "rank_files": files, "path": own, "probe": announced},
    )


def probe(document: Any, options: dict[str, Any]) -> Judged:
    """Judge of a probe. Options: `legacy`. What it has seen is summed up, and judged by nobody."""
    root = Field(document, [])
    known = root.table() and root["schema"].equals(PROBE_SCHEMA) and root["schema_version"].equals(PROBE_VERSION)
    if not known:
        return Judged(tuple(root.problems))
    run_id = None if options["legacy"] and root["run_id"].absent else root["run_id"].text()
    own = root["merged_output_path"].file_name()
    files = [field.file_name() for field in root["rank_files"].items()]
    whole = root["merged"]["resolution"].text() if root["merged"].table() else None
    ranks: list[int] = []
    resolutions: dict[str, list[int]] = {}
    for key in root["ranks"].value if root["ranks"].table() else ():
        entry = root["ranks"][key]
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
            entry.wrong("the number of a rank as key", show(key))
        elif entry.table():
            ranks.append(int(key))
            resolutions.setdefault(entry["resolution"].text() or "", []).append(int(key))
            name = entry["rank_file"].file_name()
            if name is not None and name not in files:
                entry["rank_file"].wrong("one of the rank_files")
    if not root.problems and len(ranks) != len(files):
        root["ranks"].wrong(f"as many as there are rank_files, {len(files)}", f"{len(ranks)} ranks")
    return Judged(
        tuple(root.problems),
        {
            "run_id": run_id,
            "path": own,
            "rank_files": files,
            "ranks": sorted(ranks),
            "merged": whole,
            "resolutions": {text: sorted(numbers) for text, numbers in resolutions.items()},
        },
    )


# ------------------------------------------------------------------------------------------- parts of ranks and merged


def _older(root: Field, accepted: bool) -> bool:
    """Whether what the older files lack may be absent; says so once when it all is, and must not be."""
    if not accepted and all(root[key].absent for key in _NEWER):
        root.wrong(
            "a file of kind rank, or legacy = true in the contract",
            f"an older, minimal file, without {', '.join(_NEWER[:-1])} and {_NEWER[-1]}",
        )
        return True
    return accepted


def _header(root: Field, older: bool) -> dict[str, Any]:
    """What ranks, and merged files with them, agree in: place -> value, None where it is absent or wrong."""
    root["schema_version"].equals(SCHEMA_VERSION)
    status, field = None, root["status"]
    if isinstance(field.value, str) and field.value in _ENDS:
        status = field.value
        for key, value in _ENDS[status].items():
            root[key].equals(value, f" with status {show(status)}")
    else:
        field.equals("complete")
    for key in ("skipped_points", "missing_phases"):
        if root[key].value != []:
            root[key].wrong("an empty list")
    groups, protocol = root["iteration_groups"], root["measurement_protocol"]
    return {
        "$.run_id": None if older and root["run_id"].absent else root["run_id"].text(),
        "$.grid_digest": root["grid_digest"].text(),
        "$.config.mode": root["config"]["mode"].one_of(MODES) if root["config"].table() else None,
        "$.status": status,
        "$.iteration_groups": None if groups.absent else {"sha256": _digest(groups.value)},
        "$.measurement_protocol": None if protocol.absent else {"sha256": _digest(protocol.value)},
    }


def _coverage(root: Field, status: str | None) -> tuple[int | None, int | None]:
    """Expected and completed points."""
    coverage = root["coverage"]
    if not coverage.table():
        return None, None
    points = coverage["expected_points"].whole(1)
    completed = coverage["completed_points"].whole(0)
    coverage["skipped_points"].equals(0)
    if points is not None and completed is not None:
        if status == "complete" and completed != points:
            coverage["completed_points"].equals(points, ", the expected_points")
        elif status == "partial" and completed >= points:
            coverage["completed_points"].wrong(f'less than the {points} expected_points with status "partial"')
    return points, completed


def _share(root: Field, key: str, count: int | None, size: int | None) -> int | None:
    """One rank's share of a merged file's coverage."""
    if count is None or size is None:
        return None
    if count % size:
        root["coverage"][key].wrong(f"a multiple of {size}, the number of ranks")
    return count // size


_Seen = dict[tuple[int, int], tuple[Any, Any]]
"""benchmark_id and rank -> point and fpms of the result."""


def _results(root: Field, grid: _Grid, count: int | None, number: int | None) -> _Seen:
    """The results: of rank `number`, or (None) of all ranks, which their points then name."""
    field, seen = root["results"], _Seen()
    entries = field.items()
    if isinstance(field.value, list) and count is not None and len(entries) != count:
        field.wrong(f"a list of {count}, one for each of the completed_points")
    for entry in entries:
        if not entry.table():
            continue
        point = entry["point"]
        benchmark = _point(point, grid)
        owner = number if number is not None else _owner(point, grid.size)
        if benchmark is None or owner is None:
            continue
        if (benchmark, owner) in seen:
            point["benchmark_id"].wrong("each point once", f"{benchmark} again")
        _fpms(entry["fpms"], owner, benchmark)
        seen[benchmark, owner] = (point.value, entry["fpms"].value)
    return seen


def _owner(point: Field, size: int | None) -> int | None:
    return point["dp_rank"].whole(0, None if size is None else size - 1) if isinstance(point.value, dict) else None


def _point(point: Field, grid: _Grid) -> int | None:
    """A point's benchmark_id."""
    if not point.table():
        return None
    if grid.mode is not None:
        point["point_type"].one_of(MODES[:2] if grid.mode == "agg" else (grid.mode,))
    for key in _COUNTS:
        point[key].whole(0)
    return point["benchmark_id"].whole(1, grid.points)


def _fpms(field: Field, number: int, benchmark: int) -> float | None:
    """The one measurement of a rank at a point: its wall_time (s)."""
    entries = field.items()
    if isinstance(field.value, list) and len(entries) != 1:
        field.wrong("a list of one")
    if len(entries) != 1 or not entries[0].table():
        return None
    (fpm,) = entries
    fpm["dp_rank"].equals(number)
    fpm["counter_id"].equals(benchmark, ", the benchmark_id")
    return fpm["wall_time"].positive()


def _groups(root: Field, grid: _Grid, seen: _Seen) -> None:
    """The iteration groups: one for each completed point, with every rank's measurement, and equal to the results."""
    field = root["iteration_groups"]
    groups = field.items()
    if isinstance(field.value, list) and grid.completed is not None and len(groups) != grid.completed:
        field.wrong(f"a list of {grid.completed}, one for each completed point")
    measured, done = {benchmark for benchmark, _ in seen}, set[int]()
    for group in groups:
        benchmark = group["benchmark_id"].whole(1, grid.points) if group.table() else None
        if benchmark is None:
            continue
        if benchmark in done:
            group["benchmark_id"].wrong("each point once", f"{benchmark} again")
        elif measured and benchmark not in measured:
            group["benchmark_id"].wrong("the benchmark_id of a result")
        done.add(benchmark)
        if _point(group["point"], grid) not in (None, benchmark):
            group["point"]["benchmark_id"].equals(benchmark, ", the group's benchmark_id")
        group["complete"].equals(True)
        if grid.size is not None:
            group["expected_dp_ranks"].counts_up(grid.size)
            _members(group, benchmark, grid.size, seen)


def _members(group: Field, benchmark: int, size: int, seen: _Seen) -> None:
    """The ranks of a group."""
    field, walls = group["rank_results"], list[float]()
    members = field.items()
    if isinstance(field.value, list) and len(members) != size:
        field.wrong(f"a list of {size}, one for each rank")
        return
    for number, member in enumerate(members):
        if not member.table():
            continue
        member["dp_rank"].equals(number)
        wall = _fpms(member["fpms"], number, benchmark)
        walls += [] if wall is None else [wall]
        if wall is None or (benchmark, number) not in seen:
            continue
        if member["fpms"].value != seen[benchmark, number][1]:
            member["fpms"].wrong(f"the fpms of the result of benchmark_id {benchmark} and rank {number}", "others")
    point = _ownerless(group["point"].value)
    if any(_ownerless(seen[key][0]) != point for key in ((benchmark, n) for n in range(size)) if key in seen):
        group["point"].wrong(f"the point of the result of benchmark_id {benchmark}", "another")
    if len(walls) == size and group["wall_time"].positive() not in (None, max(walls)):
        group["wall_time"].wrong(f"{max(walls)}, the slowest rank's")


def _ownerless(point: Any) -> Any:
    """A point without the rank that a merged file adds to it."""
    return {key: value for key, value in point.items() if key != "dp_rank"} if isinstance(point, dict) else point


def _announced(root: Field, own: str | None) -> str | None:
    """The file name of the probe that a merged file announces; null announces nothing."""
    field = root["worker_probe_path"]
    if field.value is None or field.absent:
        return None
    name = field.file_name()
    if name is not None and own is not None and name != probe_name(own):
        field.wrong(f"{show(probe_name(own))}, after the merged_output_path")
    return name


def probe_name(merged_name: str) -> str:
    """The file name of the probe of a merged file."""
    return merged_name.removesuffix(".json") + PROBE_SUFFIX


def _canonical(value: Any) -> str:
    """Equal for equal JSON: the order of keys is none of it, and 1 is neither true nor 1.0."""
    return json.dumps(value, sort_keys=True)


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in value if isinstance(value, list) else [value]:
        digest.update(_canonical(part).encode() + b"\n")
    return digest.hexdigest()
