"""Our own steps in accounting: its rows beside what we saw of them.

A step's record proves nothing about the job (DerivedExitCode decides nothing), but a success needs agreement: a row
that says otherwise than its agent leaves it unproven. A row that is missing or not finished confirms nothing and denies
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from supervisor.core.slurm import agrees
from supervisor.core.slurm_records import StepRecord


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Our own steps beside accounting's rows of them. A row that is missing or not finished confirms nothing and denies
    nothing; a contradiction denies a success."""

    contradictions: tuple[str, ...] = ()
    unconfirmed: tuple[str, ...] = ()


def compare_steps(steps: Sequence[StepRecord], seen: Mapping[str, int], unnamed: Sequence[int] = ()) -> StepComparison:
    """What accounting says of the steps in `seen` (raw step id -> the code we saw, 128 + N for signal N), and of those
    whose ids nobody knows (`unnamed`: the codes that we saw of them)."""
    rows = {step.step: step for step in steps}
    contradictions: list[str] = []
    unconfirmed: list[str] = []
    for name, code in seen.items():
        row = rows.get(name)
        if row is None:
            unconfirmed.append(f"accounting has no row of step {name}")
        elif not row.terminal:
            unconfirmed.append(f"accounting's row of step {name} is not finished ({row.state_text})")
        elif (code == 0) != (row.state.word == "COMPLETED") or (row.exit and not agrees(code, row.exit, "sacct")):
            said = f"{row.state_text} {row.exit or 'without a code'}"
            contradictions.append(f"step {name} ended with {code}; accounting says {said}")
        elif row.exit is None:
            unconfirmed.append(f"accounting's row of step {name} has no exit code ({row.state_text})")
    others = [step for step in steps if step.step not in seen and step.step.rpartition(".")[2].isdecimal()]
    denied, doubted = _compare_unnamed(others, unnamed)
    return StepComparison((*contradictions, *denied), (*unconfirmed, *doubted))


def _compare_unnamed(others: Sequence[StepRecord], unnamed: Sequence[int]) -> tuple[list[str], list[str]]:
    """Ranks without an agent tell no step id, and a step's name is free text: nobody is asked by it. But they can be
    counted: of the steps that may be theirs, at least as many must have succeeded as we saw succeed. Steps of others in
    the same job can hide a contradiction, never make one."""
    zeros = sum(code == 0 for code in unnamed)
    good = sum(step.terminal and step.state.word == "COMPLETED" for step in others)
    if not zeros or good >= zeros:
        return [], []
    if len(others) < len(unnamed) or not all(step.terminal for step in others):
        return [], [f"accounting has no finished rows of all {len(unnamed)} steps without an agent"]
    return [
        f"{zeros} steps without an agent ended with 0; of those that may be they, accounting says COMPLETED of {good}"
    ], []
