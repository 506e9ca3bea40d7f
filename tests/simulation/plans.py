"""Random plans for the simulation, as data like a TOML file gives it. A chooser makes every choice, so that hypothesis
or a seeded generator can drive the same code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Pick(Protocol):
    """Chooses one of several; the first is the plainest (hypothesis shrinks towards it)."""

    def __call__(self, options: Sequence[T]) -> T: ...


def plan_data(pick: Pick) -> dict[str, Any]:
    """A plan of 1..5 ranks, each in a role of its own, that obeys every rule."""
    size = pick((2, 1, 3, 4, 5))
    finish = pick(("coordinator", "artifacts"))
    coordinator = pick((0, size - 1)) if finish == "coordinator" or pick((False, True)) else None
    data: dict[str, Any] = {
        "job": {"name": "simulated", "nodes": size},
        "run": {"finish": finish, "start": pick(("together", "each"))},
        "roles": {f"r{rank}": _role(pick, rank, rank == coordinator) for rank in range(size)},
        "marker": {"recheck": pick((5, 0))},
        "artifacts": _artifacts(pick, size, at_least=1 if finish == "artifacts" else 0),
        "deadlines": _deadlines(pick),
        "collect": pick(({"required": False}, {"required": True, "nodes": ["/tmp/*"]})),
    }
    if coordinator is not None:
        data["coordinator"] = {"rank": coordinator}
        data["marker"]["by"] = pick(("supervisor", "coordinator"))
    return data


def _role(pick: Pick, rank: int, coordinator: bool) -> dict[str, Any]:
    return {
        "ranks": rank,
        "command": ["true"],
        "grace": pick((30, 0, 2)),
        "critical": coordinator or pick((True, True, False)),
        "may_finish": pick((False, False, True)),
        "agent": pick(("on", "on", "on", "off")),
    }


def _artifacts(pick: Pick, size: int, at_least: int) -> list[dict[str, Any]]:
    found = []
    for number in range(max(at_least, pick((0, 1, 2)))):
        artifact: dict[str, Any] = {"name": f"a{number}", "path": f"a{number}.json", "required": pick((True, False))}
        if pick((False, True)):
            artifact |= {"per": "node", "path": f"a{number}.{{rank}}.json", "roles": [f"r{pick(range(size))}"]}
        elif pick((False, True)):
            artifact |= {"contract": "fpm", "ranks_per_node": 4}
        found.append(artifact)
    return found


def _deadlines(pick: Pick) -> dict[str, Any]:
    limits = {"hello": 20, "finalization": pick((10, 60)), "collect": 10, "silence": pick((60, 10))}
    optional = {"run": pick((None, 100, 5)), "artifacts": pick((None, 30))}
    return limits | {name: value for name, value in optional.items() if value is not None}
