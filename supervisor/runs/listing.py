"""What is in the places where run directories are made, for many who follow jobs there at the same time.

A place is shared: a thousand jobs have their runs in one directory, beside their submissions. Were each of their
followers to list it, the cost would grow with the square of their number. Here one listing serves all who ask within
`AGE`, and each gets its own job's names only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from supervisor.runs.registry import job_in

AGE: Final = 1.0  # seconds


class _Place:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at = float("-inf")
        self.listed: Sequence[str] = ()
        self.names: Mapping[str, Sequence[str]] = {}


class Listings:
    """For any thread. While a listing hangs, whoever asks about that place waits for it."""

    def __init__(self, age: float = AGE, clock: Callable[[], float] = time.monotonic) -> None:
        self._age = age
        self._clock = clock
        self._places: defaultdict[str, _Place] = defaultdict(_Place)

    def names(self, place: str, jobid: str, *, fresh: bool = False) -> Sequence[str]:
        """The names of what may be runs of a job, or of its array's tasks, as they were `age` seconds ago at most; with
        `fresh`, as they are. Raises OSError."""
        known = self._places[place]
        with known.lock:
            begun = self._clock()
            if fresh or begun - known.at > self._age:
                listed, known.at = os.listdir(place), begun
                if listed != known.listed:  # mostly nothing has changed, and to read two thousand names takes a while
                    known.listed, known.names = listed, by_job(listed)
            return known.names.get(whole(jobid), ())


def by_job(names: Sequence[str]) -> dict[str, list[str]]:
    """Names of runs by the job that they are of."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if (job := job_in(name.partition("@")[0])) is not None:
            found[whole(job)].append(name)
    return dict(found)


def whole(jobid: str) -> str:
    """The job that an array's task or a component is of."""
    return jobid.partition("_")[0].partition("+")[0]
