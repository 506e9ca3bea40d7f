"""Fetching from a node by a step of its own, where no agent of the rank is left that could do it.

The step runs `agent.pyz fetch` on the rank's node and ends; what it did is in the rank's file of facts. After the job's
end no step can be started any more, which is then said in the launcher's own words.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Final

from supervisor.core.layout import Layout
from supervisor.core.text import printable
from supervisor.engine.steps import NOISE, ROOT, WORDS
from supervisor.launch.base import Launcher
from supervisor.launch.process import KILL_AFTER, StepProcess

FOR_COPYING: Final = 0.8  # of the limit; the rest is for the step's own start and end, at most
STEP_MARGIN: Final = 2.0  # seconds
REAPED_AFTER: Final = 0.5  # seconds from KILL to the end


async def fetch(layout: Layout, launcher: Launcher, rank: int, limit: float) -> str:
    """Run the step, for at most `limit` seconds. Returns what went wrong, or nothing; never raises."""
    specification = layout.fetch_specification(rank, max(FOR_COPYING * limit, limit - STEP_MARGIN))
    wanted = launcher.fetch(layout, rank)
    process: StepProcess | None = None
    words = -1
    try:
        words = os.memfd_create("words")
        process = await StepProcess.start(wanted.argv, wanted.env, lambda line: None, stderr=words, cwd=ROOT)
        process.send(json.dumps(specification).encode() + b"\n")
        async with asyncio.timeout(limit):
            code = await process.wait()
        return f"its step ended with {code}: {_tail(words)}" if code else ""
    except TimeoutError:  # before OSError, of which it is one
        return f"its step did not end within {limit:g} s: {_tail(words)}"
    except OSError as error:
        return f"its step was not made: {error.strerror or error}"
    finally:
        if process is not None:
            await _end(process)
        if words >= 0:
            os.close(words)


async def _end(process: StepProcess) -> None:
    """A srun that overstays is ended, TERM first; nothing when it has ended by itself."""
    process.terminate()
    try:
        async with asyncio.timeout(KILL_AFTER + REAPED_AFTER):
            await process.wait()
    except TimeoutError:
        pass  # it cannot die: a dead file system


def _tail(words: int) -> str:
    """The launcher's last words."""
    size = os.fstat(words).st_size
    text = os.pread(words, WORDS, max(0, size - WORDS)).decode(errors="replace")
    return "; ".join(printable(line) for line in text.splitlines() if line.strip() and NOISE not in line)
