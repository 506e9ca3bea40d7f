"""inotify through ctypes: a descriptor that becomes readable 0.2 ms after a name appeared.

For an event loop (`loop.add_reader(watch.fileno(), ...)`) or a `poll()` of one's own. It is a hint and
no more: network file systems raise nothing for what another machine writes, a queue that overflows
drops events, and a watch can be refused (ENOSPC: the user's watches are used up, EMFILE: the user's
instances). So whoever waits also looks by himself from time to time, and treats OSError here as
"no hints", never as a failure.

Errors are OSErrors with the kernel's errno. Linux only. Agents use this module too: Python 3.9, no typing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import namedtuple

TYPE_CHECKING = False  # not from typing: in an agent that import alone costs as much as all of ours
if TYPE_CHECKING:
    from typing import Final, NamedTuple

    class Event(NamedTuple):
        """`watch` is what `add` returned (-1 for an overflow), `name` an entry of that directory or ""."""

        watch: int
        mask: int
        name: str

else:
    Event = namedtuple("Event", ("watch", "mask", "name"))

IN_MODIFY: Final = 0x00000002
IN_CLOSE_WRITE: Final = 0x00000008
IN_MOVED_FROM: Final = 0x00000040
IN_MOVED_TO: Final = 0x00000080
IN_CREATE: Final = 0x00000100
IN_DELETE: Final = 0x00000200
IN_DELETE_SELF: Final = 0x00000400
IN_MOVE_SELF: Final = 0x00000800
IN_UNMOUNT: Final = 0x00002000
IN_Q_OVERFLOW: Final = 0x00004000
IN_IGNORED: Final = 0x00008000
IN_ONLYDIR: Final = 0x01000000
IN_DONT_FOLLOW: Final = 0x02000000
IN_ISDIR: Final = 0x40000000

APPEARED: Final = IN_CREATE | IN_MOVED_TO | IN_CLOSE_WRITE
"""A file got its name, or was completed. Without IN_MODIFY: a log that grows wakes nobody."""

_HEADER = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; then `len` bytes of name
_BUFFER: Final = 64 * 1024  # bytes; holds some 240 of the longest events, the kernel keeps the rest
_CLOEXEC_NONBLOCK: Final = os.O_CLOEXEC | os.O_NONBLOCK


class Inotify:
    """One inotify instance. `overflowed` is set when events were lost, until the owner clears it."""

    def __init__(self) -> None:
        """Raises OSError (EMFILE: no instance left for this user; ENOSYS: no inotify here)."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._add, self._remove = libc.inotify_add_watch, libc.inotify_rm_watch
            descriptor = libc.inotify_init1(_CLOEXEC_NONBLOCK)
        except AttributeError:
            raise OSError(errno.ENOSYS, "this C library has no inotify") from None
        self._add.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        self._remove.argtypes = (ctypes.c_int, ctypes.c_int)
        self._descriptor: int = _checked(descriptor)
        self.overflowed = False

    def fileno(self) -> int:
        """The descriptor, readable (level-triggered) while events wait; -1 once closed."""
        return self._descriptor

    def add(self, directory: str | os.PathLike[str], mask: int = APPEARED) -> int:
        """Watch a directory; returns its watch number. Raises OSError (ENOSPC: no watch left)."""
        name = os.fsencode(directory)
        return _checked(self._add(self._descriptor, name, mask | IN_ONLYDIR), os.fsdecode(name))

    def remove(self, watch: int) -> None:
        """Stop watching. Raises OSError (EINVAL) for a watch that is gone already."""
        _checked(self._remove(self._descriptor, watch))

    def events(self) -> list[Event]:
        """Everything that waits now, at most a buffer full; empty if nothing does. Never blocks."""
        try:
            data = os.read(self._descriptor, _BUFFER)
        except BlockingIOError:
            return []
        events, offset = [], 0
        while offset < len(data):
            watch, mask, _cookie, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            name = data[offset : offset + length].rstrip(b"\0")
            offset += length
            if mask & IN_Q_OVERFLOW:
                self.overflowed = True
            events.append(Event(watch, mask, os.fsdecode(name)))
        return events

    def read(self) -> list[tuple[int, str]]:
        """`events` for an owner of a single watch: (mask, name) pairs."""
        return [(event.mask, event.name) for event in self.events()]

    def close(self) -> None:
        """Give the descriptor back; take it out of the event loop first. Closing twice is harmless.

        The kernel waits for its readers here: 5 to 15 ms, 0.01 for `remove`. An event loop that cares uses a thread.
        """
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Inotify:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _checked(result: int, subject: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), subject)
    return result
