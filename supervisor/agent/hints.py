"""Hints for the engine: something has changed in the directories that it waits on, seen where it was written.

On a network file system the engine's node hears nothing of what this node writes; this node's kernel does. So the agent
watches here, and tells the engine no more than "look": the files are read and judged there.

A directory on a file system that does not answer blocks whoever names it, and the agent has a rank to stop. So a thread
watches, and speaks through a pipe: an empty line is a hint, any other a note. It blocks until there is something to
say: without any events it costs nothing. The agent's end stops it.

The agent imports this module with the spec, before the start: its archive may be on a file system that dies later.
"""

from __future__ import annotations

import os
import select
import signal
from _thread import start_new_thread

from supervisor.watch.trees import Trees

TYPE_CHECKING = False  # not from typing: that import alone costs as much as all of ours
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from supervisor.watch.trees import Tree

LONGEST = 500  # bytes of a note; the kernel writes at least PIPE_BUF, 4096, in one piece


class Hints:
    """Watches directories in a thread, to so many levels below each."""

    def __init__(self, trees: Iterable[Tree]) -> None:
        """Raises OSError."""
        self._trees = set(trees)
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def begin(self) -> None:
        """Watch from now on. Raises RuntimeError when there is no thread to be had."""
        start_new_thread(self._watch, ())

    def fileno(self) -> int:
        """The descriptor that is readable while there is something to be `heard`."""
        return self._reading

    def heard(self) -> Iterator[str]:
        """What was said since the last time: "" for a hint, else a note."""
        *lines, _ = os.read(self._reading, 65536).decode("utf-8", "replace").split("\n")
        return iter(dict.fromkeys(lines))

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the agent answers those
        try:
            trees = Trees(careful=True)
            events = select.poll()
            events.register(trees.fileno(), select.POLLIN)
            unsettled = self._trees
            changed: set[Tree] = set()
            while True:
                changed |= {tree for tree in unsettled if self._settle(trees, tree)}
                if changed:
                    self._say("")
                events.poll()
                changed, unsettled = trees.read()
                trees.lost()  # then everything has changed, and is settled again
        except OSError as error:
            self._say(f"no hints about files from this node: {error}")

    def _settle(self, trees: Trees, tree: Tree) -> bool:
        try:
            return trees.settle(tree)
        except OSError as error:
            self._say(f"no hints about all files in {tree[1]} from this node: {error.strerror}")
            return True

    def _say(self, words: str) -> None:
        line = words.replace("\n", " ").encode("utf-8", "replace")[:LONGEST] + b"\n"
        try:
            os.write(self._writing, line)
        except BlockingIOError:
            pass  # so much was not heard yet that a hint is among it
