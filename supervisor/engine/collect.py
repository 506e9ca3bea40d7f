"""Collecting after the end: what the plan names is copied into the run directory, with checksums.

    the contracts' files   are compared with what was judged, first of all; and, last of all, checksummed where they are
                           if nobody has done that (`promised.py`)
    collect.paths          files that this host sees: copied by a thread
    collect.nodes          files on the nodes' own disks. Most were fetched by the ranks' agents before those left, and
                           a file of facts says so (`agent/fetch.py`). For a rank whose agent is lost, or that has none,
                           a step of its own fetches them now
    collect.bundle         an archive of all that, and of the logs

One limit holds for everything; past it, what is there is told, and the rest is an error. Every file that cannot be had
is a sentence in `errors`, and none of them changes how a rank ended. How files are found and copied, and what a job
cannot trick us into: `agent/copying.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from collections.abc import Collection as Several
from dataclasses import dataclass, field
from typing import Any, Final

from supervisor.agent.copying import Gatherer, Limits, escape, opened_file, split
from supervisor.core.layout import COLLECTED, PLAN_COPY, Layout
from supervisor.core.substitution import substitute
from supervisor.engine.promised import Collection, Promised, compare, read
from supervisor.loop.threads import in_thread

NEVER_RAN: Final = "it was never started"
CUT_OFF: Final = "its fetching was cut off"
LAST_READ: Final = 1.0
"""Seconds to read, after the limit, what was fetched until then."""
FACTS_CAP: Final = 64 << 20
"""Bytes of one node's facts that are read."""


@dataclass
class NodeFacts:
    """What a node's file of facts says. `whole`: whoever fetched there came to the end."""

    files: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    whole: bool = False


async def collect(
    layout: Layout,
    fetch: Callable[[int, float], Awaitable[str]],
    limit: float,
    *,
    promised: Several[Promised],
    started: Several[int],
    again: bool = False,
    archive: str | None = None,
) -> Collection:
    """Collect everything within `limit` seconds; never raises for what cannot be collected.

    `fetch` fetches from a rank's node within seconds, and answers what went wrong; `again`: from every node, whatever
    was fetched before. `started`: the ranks that ever ran. `archive`: the bundle's path.
    """
    loop = asyncio.get_running_loop()
    due = loop.time() + limit
    done, plan = Collection(), layout.plan
    nodes = await _fetched(layout, plan.ranks if plan.collect.nodes else (), limit)
    left = [rank for rank, facts in nodes.items() if rank in started and (again or not facts.whole)]
    spent = sum(item["size"] for rank, facts in nodes.items() if rank not in left for item in facts.files)
    rest = plan.collect.size_max - spent - len(left) * layout.node_share
    seconds = max(0.0, due - loop.time())
    copying = _in_time("copying", due, done, collect_shared, layout, promised, Limits(rest, seconds), done)
    fetching = asyncio.gather(*(fetch(rank, seconds) for rank in left))
    _, words = await asyncio.gather(copying, fetching)
    nodes |= await _fetched(layout, left, max(LAST_READ, due - loop.time()))
    trouble = {rank: NEVER_RAN for rank in plan.ranks if rank not in started} | dict(zip(left, words, strict=True))
    for rank, facts in nodes.items():
        _tell_of_node(layout, rank, facts, trouble.get(rank, ""), done)
    if archive is not None:
        limits = Limits(plan.collect.size_max, due - loop.time())
        await _in_time("the archive", due, done, _archive, layout.run_dir, archive, limits, done)
    return done


async def _in_time(what: str, due: float, done: Collection, function: Any, *args: Any) -> None:
    """A part of the collection in a thread; what breaks, or lasts too long, is told, and holds nobody."""
    left = max(0.05, due - asyncio.get_running_loop().time())
    try:
        await in_thread(function, *args, limit=left)
    except TimeoutError:
        done.errors.append(f"collect: {what} did not end within the time for collecting")
    except Exception as error:  # noqa: BLE001 - see above
        done.errors.append(f"collect: {what} broke: {type(error).__name__}: {error}")


# --- files that this host sees -----------------------------------------------------------------------------------


def collect_shared(layout: Layout, promised: Several[Promised], limits: Limits, done: Collection) -> None:
    """Compare the contracts' files with what was judged, copy what `collect.paths` names, and make the checksums that
    are missing then. Blocks."""
    unread = compare(promised, layout.run_dir, done)
    copies: dict[str, dict[str, Any]] = {}

    def fact(found: dict[str, Any]) -> None:
        copies[found["source"]] = found
        done.files.append(found)

    gatherer = Gatherer(layout.run_dir, COLLECTED, layout.run_dir, limits, fact, done.trouble)
    gatherer.seen.add(layout.at(PLAN_COPY))  # its env may hold what is nobody else's business
    if layout.plan.collect.bundle:
        gatherer.seen.add(layout.at(layout.plan.collect.bundle))
    for pattern in layout.plan.collect.paths:
        if not gatherer.gather(*_meaning(layout, pattern)):
            done.errors.append(f"collect: nothing matches {pattern}")
    read(unread, copies, layout.run_dir, limits, done)


def _meaning(layout: Layout, pattern: str) -> tuple[str, list[str]]:
    """The directory below which no link is followed, and the parts of the pattern there."""
    values = {word: escape(value) for word, value in layout.values(None).items()}
    return _trusted(layout.run_dir, *split(os.path.join(escape(layout.run_dir), substitute(pattern, values))))


def _trusted(run_dir: str, root: str, parts: list[str]) -> tuple[str, list[str]]:
    """The same place, told from a directory that no job can have replaced: the run directory; or, elsewhere, the root,
    for the plan names it literally, and links on the way to there are the site's."""
    if not f"{root}/".startswith(f"{run_dir}/"):
        return root, parts
    inside = root[len(run_dir) :].split("/")
    return run_dir, [*(escape(name) for name in inside if name), *parts]


# --- files on the nodes' own disks -------------------------------------------------------------------------------


async def _fetched(layout: Layout, ranks: Several[int], limit: float) -> dict[int, NodeFacts]:
    """What was fetched from each rank's node until now."""

    def read() -> dict[int, NodeFacts]:
        return {rank: node_facts(layout, rank) for rank in ranks}

    try:
        return await in_thread(read, limit=limit) if ranks else {}
    except OSError as error:  # TimeoutError is one
        return {rank: NodeFacts(errors=[f"what was fetched is not known: {error}"]) for rank in ranks}


def node_facts(layout: Layout, rank: int) -> NodeFacts:
    """What the rank's file of facts says; nothing when there is none. Each try begins anew; a copy that an earlier one
    made is there all the same. Raises OSError."""
    path = layout.at(f"{layout.collected_from(rank)}.jsonl")
    try:
        with opened_file(path) as (descriptor, _), open(descriptor, "rb", closefd=False) as file:
            lines = file.read(FACTS_CAP).split(b"\n")[:-1]
    except FileNotFoundError:
        return NodeFacts()
    files: dict[str, dict[str, Any]] = {}
    errors: list[str] = []
    whole = False
    for line in lines:
        try:
            item = json.loads(line)
        except ValueError:
            continue  # two programs wrote at once on a network file system
        match item:
            case {"begin": _}:
                errors, whole = [], False
            case {"end": _}:
                whole = True
            case {"error": str(text)}:
                errors.append(text)
            case {"path": str(copy), "source": str(source), "size": int(size), "sha256": str(digest)}:
                files[source] = {"path": copy, "source": source, "size": size, "sha256": digest, "rank": rank}
    return NodeFacts(list(files.values()), errors, whole)


def _tell_of_node(layout: Layout, rank: int, facts: NodeFacts, why: str, done: Collection) -> None:
    where = f"collect: rank {rank} on {layout.nodes[rank]}"
    done.files += facts.files
    done.errors += (f"{where}: {text}" for text in facts.errors)
    if why or not facts.whole:
        done.errors.append(f"{where}: not everything was fetched: {why or CUT_OFF}")


# --- the archive -------------------------------------------------------------------------------------------------


def _archive(run_dir: str, path: str, limits: Limits, done: Collection) -> None:
    from supervisor.engine.bundle import bundle  # few runs make one

    try:
        done.files.append(bundle(run_dir, path, limits, done.trouble))
    except OSError as error:
        done.trouble(path, str(error.strerror or error))
