"""Whether an adopted run's papers can still be seen: nobody but its own directory tells how it ended.

    they are there                 its follower reads them (`follow.py`)
    its engine lives               they are waited for: somebody has moved the directory, and may move it back
    the directory above is there   they are gone, if they do not come back within `patience` seconds
    else                           a file system is away, which is waited for, `outage` seconds

What is gone makes the run unverifiable (`Gone`): its job is somebody else's, whose end tells nothing about the run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final, NoReturn

from supervisor.loop.threads import in_thread
from supervisor.runs import start as starts
from supervisor.runs.papers import RUN_RECEIPT, Unreadable, opening_of

LIMIT: Final = 10.0  # seconds for a look
REST: Final = 10.0  # and from one to the next while all is there
AGAIN: Final = 1.0  # and while it is not


class Gone(Unreadable):
    """The papers of a run are gone; the message says what is known."""


async def lose_sight(
    directory: str, start: str, say: Callable[[str, bool], None], *, patience: float, outage: float
) -> NoReturn:
    """Look after a run's papers for as long as they are there. `start`: where its engine's start is kept ("": nobody
    knows); `say` is told when they are missed (True), and when they are back (False). Raises Gone."""
    limits = {True: patience, False: outage}
    said, left, since = "", dict(limits), time.monotonic()
    while True:
        missed, gone = await _look(directory)
        now = time.monotonic()
        if not missed:
            if said:
                say(f"the run directory {directory} can be read again", False)
            said, left = "", dict(limits)
        else:
            if engine := await _living(start):
                who = f"its engine, process {engine.pid} on {engine.host or 'its host'}"
                text = f"{missed}: what {who}, does cannot be seen (was it moved? move it back)"
            else:
                left[gone] -= now - since
                text = f"{missed}: it is waited for, {limits[gone]:g} s at most"
            if text != said:
                say(said := text, True)
            if left[gone] <= 0 and not engine:
                how = "how the run ended is told nowhere else, and the end of the job that it was in is no proof"
                raise Gone(f"{missed}: {how}")
        since = now
        await asyncio.sleep(AGAIN if missed else REST)


async def _look(directory: str) -> tuple[str, bool]:
    """What is missed ("" for nothing), and whether it is gone."""
    try:
        return await in_thread(_missed, directory, limit=LIMIT, place=directory)
    except OSError as error:  # a TimeoutError: a file system that does not answer
        return f"the run directory {directory} cannot be read: {error.strerror or error}", False


def _missed(directory: str) -> tuple[str, bool]:
    """In a thread. A network client that lists asks its server first. Raises OSError."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return f"the run directory {directory} is not there", os.path.isdir(os.path.dirname(directory))
    opening, why = opening_of(directory)
    return ("", False) if opening or RUN_RECEIPT in names else (why, True)


async def _living(start: str) -> starts.Engine | None:
    """The engine. Of one of which nothing can be learned it is not believed that it lives."""
    try:
        return await in_thread(starts.engine, start, limit=LIMIT, place=start) if start else None
    except (OSError, ValueError):
        return None
