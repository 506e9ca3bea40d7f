"""What a measurement is, how several ways are measured in turn, and the table of them all.

A machine's speed drifts, so the ways of doing a thing are measured one after another in every round (each round begins
with another one), and medians are compared, never single figures of different minutes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

Sample = Callable[[float], float]
"""One measurement. Its argument is a phase, evenly spread over 0..1: what waits for the tick of a poll is to be met
at every phase of it."""

PAUSE = 0.3  # seconds: Slurm goes on tidying up after a step, and that is no part of the next sample
_HEADS = ("measure", "allocd", "beside", "", "ratio", "difference")


@dataclass(frozen=True)
class Row:
    """A measure in `unit`, ours and what it replaces; or why it was not taken (`skipped`)."""

    measure: str
    unit: str = ""
    ours: Sequence[float] = ()
    beside: str = ""
    theirs: Sequence[float] = ()
    skipped: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as text. The ratio and the difference are of the medians."""
        name = f"{self.measure}, {self.unit}" if self.unit else self.measure
        if self.skipped:
            return name, f"skipped: {self.skipped}", "", "", "", ""
        ratio = difference = ""
        if self.theirs:
            ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
            ratio = number(ours / theirs) if theirs else ""
            difference = f"{'+' if ours >= theirs else '-'}{number(abs(ours - theirs))}"
        return name, spread(self.ours), self.beside, spread(self.theirs), ratio, difference


def interleaved(runs: int, ways: Mapping[str, Sample]) -> dict[str, list[float]]:
    """Measure every way once a round, in turn. Phases go up, then down: no drift follows them. What comes first finds
    cold caches, and is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    phases = [(index + 0.5) / runs for index in range(runs)]
    for way in ways.values():
        way(0.0)
    for index, phase in enumerate(phases[::2] + phases[1::2][::-1]):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            time.sleep(PAUSE)
            samples[name].append(ways[name](phase))
    return samples


def rows(measure: str, unit: str, samples: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each way beside the first, which is ours."""
    ours, *others = samples
    return [Row(measure, unit, samples[ours], name, samples[name]) for name in others]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or not value else 4
    return f"{value:.{digits}f}"


def spread(values: Sequence[float]) -> str:
    """Median, range and count."""
    if not values:
        return ""
    return f"{number(statistics.median(values))} ({number(min(values))}..{number(max(values))}, n={len(values)})"


def render(table: Iterable[Row]) -> str:
    """The whole table. A measure that stands beside several others is named once."""
    lines = [_HEADS, *(row.cells() for row in table)]
    shown = [lines[0]]
    for above, line in itertools.pairwise(lines):
        same = line[:2] == above[:2] and bool(line[2])
        shown.append(("", "", *line[2:]) if same else line)
    widths = [max(len(line[at]) for line in shown if not line[1].startswith("skipped")) for at in range(len(_HEADS))]
    widths[0] = max(len(line[0]) for line in shown)
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in shown]
    padded.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in padded)
