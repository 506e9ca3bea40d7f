"""Signals for an event loop: heard, heard by a busy loop, and what takes the handlers' place afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from supervisor.engine.signals import hearing

NUMBER = signal.SIGUSR2
LIMIT = 10.0  # seconds for what takes none


async def test_a_signal_is_heard_by_a_loop_that_waits() -> None:
    heard = asyncio.Event()
    with hearing({NUMBER: heard.set}):
        sender = threading.Timer(0.05, os.kill, (os.getpid(), NUMBER))
        sender.start()
        async with asyncio.timeout(LIMIT):
            await heard.wait()
        sender.join()


async def test_no_signal_is_lost_while_threads_fill_the_pipe_that_wakes_the_loop() -> None:
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()

    def flood() -> None:
        for _ in range(5000):
            loop.call_soon_threadsafe(int)

    with hearing({NUMBER: heard.set}):
        thread = threading.Thread(target=flood)
        thread.start()
        thread.join()  # the loop stands still meanwhile
        os.kill(os.getpid(), NUMBER)
        async with asyncio.timeout(LIMIT):
            await heard.wait()


@pytest.mark.parametrize("after", [None, signal.SIG_IGN])
async def test_what_was_before_or_is_wanted_takes_the_place(after: signal.Handlers | None) -> None:
    before = signal.getsignal(NUMBER)
    try:
        with hearing({NUMBER: time.time}, after=after):
            assert callable(signal.getsignal(NUMBER))
        assert signal.getsignal(NUMBER) == (before if after is None else after)
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(NUMBER, before)
