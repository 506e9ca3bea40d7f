"""Signals for an event loop, none of which is lost.

asyncio hears of a signal by a byte in the pipe by which threads wake the loop as well, and that byte is dropped when
the pipe is full: a loop that was busy while some hundred threads ended never hears of it. Python's own handlers run in
any case, in the main thread between two instructions. So they queue what is to be done; and a pipe of its own, which
says nothing else, wakes a loop that waits.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def hearing(handlers: Mapping[signal.Signals, Callable[[], object]], after: Any = None) -> Iterator[None]:
    """The running loop, in the main thread, calls the handler of each signal that comes. At the end `after` (SIG_IGN),
    or what was before, takes their place; blocked meanwhile, so that no signal meets with its default."""
    loop = asyncio.get_running_loop()
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    loop.add_reader(reader, reader.recv, 4096)
    woken_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {
        number: signal.signal(number, lambda *_, handler=handler: loop.call_soon_threadsafe(handler))
        for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        for number, handler in before.items():
            signal.signal(number, handler if after is None else after)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        signal.set_wakeup_fd(woken_before)
        loop.remove_reader(reader)
        reader.close()
        writer.close()
