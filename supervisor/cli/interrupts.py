"""The signals by which somebody wants a verb to leave: each is heard once, whenever it comes.

An event loop that ends takes its own signal handlers with it, and what comes before the next loop has handlers would
end the process: nobody would say that there is a job. So the handlers here outlive the loops. While a loop listens
(`told_to`) it is told; a signal that comes between two loops waits for the next one.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Hears the signals while it is entered; one that is ignored (nohup) stays so. `raises`: one that no loop listens
    to is a KeyboardInterrupt at once, instead of waiting for the next."""

    def __init__(self) -> None:
        self.raises = False
        self._before: dict[signal.Signals, Any] = {}
        self._unheard: deque[int] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ask: Callable[[], object] = lambda: None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def told_to(self, ask: Callable[[], object]) -> Iterator[None]:
        """The running loop calls `ask` for each signal, those that nobody has heard yet included."""
        self._ask, self._loop = ask, asyncio.get_running_loop()
        self._tell()
        try:
            yield
        finally:
            self._tell()
            self._loop = None

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self._loop is None and self.raises:
            raise KeyboardInterrupt
        self._unheard.append(number)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)  # also wakes it

    def _tell(self) -> None:
        while self._unheard:
            self._unheard.popleft()
            self._ask()
