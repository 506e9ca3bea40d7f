"""Who holds a state directory."""

from __future__ import annotations

import os
import subprocess

from supervisor.service.place import boot_id, process_start


def test_a_process_that_has_ended_and_was_not_waited_for_holds_nothing() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin
    try:
        assert process_start(child.pid)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert process_start(child.pid) is None
    finally:
        child.wait()
    assert process_start(child.pid) is None and boot_id()
