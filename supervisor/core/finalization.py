"""The finalization window as the environment sets it, over the plan's `deadlines.finalization`.

Two variables say how many seconds a node gets for what comes after its last rank's file: allocd's own, and, for plans
with a self-benchmark, the one that jobs of that kind set already. Ours wins where both are set. Both are read strictly:
a window that was not meant (`0`, `1.5`, `120s`, an empty word left over by a script) is refused before anything starts,
for what is lost by a wrong one is the measurement.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from supervisor.core.fields import PlanError
from supervisor.core.plan import Plan
from supervisor.core.substitution import show

OURS: Final = "ALLOCD_FINALIZATION_TIMEOUT"
SELF_BENCHMARKS: Final = "FPM_FINALIZATION_TIMEOUT_SECONDS"
LEAST, MOST = 1, 3600


def seconds(text: str) -> int | None:
    """The seconds that a variable's value says; None when it is not an ASCII integer from 1 to 3600."""
    value = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
    return value if LEAST <= value <= MOST else None


def mistakes(plan: Plan | None, environ: Mapping[str, str]) -> list[PlanError]:
    """What is wrong with the variables that count for `plan` (None: a plan that could not be read)."""
    expected = f"seconds as an integer, {LEAST}..{MOST}, or no such variable"
    names = [OURS] if plan is None else _names(plan)
    return [
        PlanError(f"environment: {name}", show(environ[name]), expected)
        for name in names
        if name in environ and seconds(environ[name]) is None
    ]


def with_window(plan: Plan, environ: Mapping[str, str]) -> Plan:
    """The plan with the window that the environment says, if it says one; of `mistakes` there must be none."""
    for name in _names(plan):
        value = seconds(environ.get(name, ""))
        if value is not None:
            return replace(plan, deadlines=replace(plan.deadlines, finalization=value))
    return plan


def _names(plan: Plan) -> list[str]:
    """The variables that count, the first that is set wins."""
    benchmarks = any(artifact.contract == "fpm" for artifact in plan.artifacts)
    return [OURS, SELF_BENCHMARKS] if benchmarks else [OURS]
