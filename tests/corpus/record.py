"""Make the cases of the corpus again, for real: `python -m tests.corpus.record [CASE...]`.

Brings up the cluster of the tests, plays the scenes on it (scenes.py, parts.py, swift.py, faults.py), and writes a
directory for each scene that played to its end; a scene that fails is reported, and leaves its case as it was. Takes
some minutes. Run it after changing a scene, or for another version of Slurm, and read what has changed.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import sys
import tempfile
import traceback
from pathlib import Path

from tests.cluster import Cluster
from tests.corpus import faults, files, parts, scenes, swift
from tests.corpus.scenes import Play
from tests.corpus.stage import Scene


def name_of(play: Play) -> str:
    """The directory of a scene: `failed_7` is in `failed-7`."""
    return play.__name__.replace("_", "-")


async def play_one(cluster: Cluster, play: Play, version: str) -> bool:
    """Play one scene and write its case; False, with the reason on stderr, when it did not come to its end."""
    what = inspect.cleandoc(play.__doc__ or "").replace("\n", " ")
    case = files.Case(name_of(play), what, "real", version)
    try:
        await play(Scene(cluster, case))
    except Exception:  # noqa: BLE001 - whatever broke one scene, the others are worth their minutes
        print(f"{case.name}: failed\n{traceback.format_exc()}", file=sys.stderr)
        return False
    files.write(case)
    print(f"{case.name}: {len(case.answers)} answers, {len(case.expect)} expectations")
    return True


async def play_all(cluster: Cluster, names: set[str], version: str) -> bool:
    """The scenes that bear company together, then the others one by one, each on a whole cluster."""
    chosen = [play for play in (*scenes.SCENES, *parts.SCENES) if not names or name_of(play) in names]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(play_one(cluster, play, version)) for play in chosen]
    good = all(task.result() for task in tasks)
    for play in (*swift.SCENES, *faults.SCENES):
        if not names or name_of(play) in names:
            cluster.heal()
            good = await play_one(cluster, play, version) and good
    return good


def main() -> int:
    """0 when every scene was played to its end, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.corpus.record", description=(__doc__ or "").split("\n")[0])
    every = sorted(map(name_of, (*scenes.SCENES, *parts.SCENES, *swift.SCENES, *faults.SCENES)))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(every))
    names = set(parser.parse_args().cases)
    if unheard := names - set(every):
        parser.error(f"no such case: {', '.join(sorted(unheard))}")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)  # slurmd runs the prolog from there
        with Cluster(extra=faults.configuration(Path(directory))) as cluster:
            version = cluster.run(["scontrol", "--version"], check=True).stdout.split()[-1]
            return 0 if asyncio.run(play_all(cluster, names, version)) else 1


if __name__ == "__main__":
    sys.exit(main())
