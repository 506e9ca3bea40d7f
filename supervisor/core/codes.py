"""Exit codes: part of the interface. Documented in the README, tested, never reused for another meaning.

A native exit code (a rank's own) is passed on as it is and may equal one of these; the *origin*
(`native`, `slurm`, `allocd`) is therefore part of every JSON answer and of the last line on stderr.
"""

from __future__ import annotations

from typing import Final

OK: Final = 0  # verified success
FAILED: Final = 1  # a failure that carries no code of its own
PENDING: Final = 10  # artifacts: pending or finalizing
ARTIFACTS: Final = 65  # artifacts invalid, late by finalization, or a required one not collected
UNREACHABLE: Final = 69  # the service (or the run asked for) cannot be reached
NO_ENGINE: Final = 70  # an agent whose engine is gone
UNVERIFIABLE: Final = 75  # neither success nor failure could be proven
CONFIG: Final = 78  # the plan, the settings or the machine are not fit to start
INTERRUPTED: Final = 79  # the wait was interrupted; the job goes on
DEADLINE: Final = 124  # a deadline passed, Slurm's TIMEOUT included
FAULT: Final = 125  # our own fault
CANCELLED: Final = 130  # cancelled, or interrupted from the keyboard
STOPPED: Final = 143  # the engine was told to stop

SIGNAL_BASE: Final = 128
"""A process killed by signal N counts as code 128 + N (the shell's convention)."""
