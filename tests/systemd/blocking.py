"""allocd with a fault that can be called up: SIGUSR1 blocks its event loop, as a defect would. All else is real."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from supervisor.service import main

run = asyncio.run


def run_with_fault(coroutine: Coroutine[Any, Any, int]) -> int:
    signal.signal(signal.SIGUSR1, hang)  # in the loop's own thread
    return run(coroutine)


def hang(*_: object) -> None:
    time.sleep(3600)


if __name__ == "__main__":
    asyncio.run = run_with_fault  # type: ignore[assignment]
    sys.exit(main.main())
