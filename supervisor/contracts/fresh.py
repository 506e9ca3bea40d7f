"""The status of an open file as its server tells it now.

A network file system's client remembers attributes, and which of its calls ask the server depends on the file system:
on NFS opening does, on FUSE neither opening nor fstat. statx(AT_STATX_FORCE_SYNC) is the call that asks anyhow; what it
was told, the next fstat says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Final

_AT_EMPTY_PATH: Final = 0x1000
_AT_STATX_FORCE_SYNC: Final = 0x2000
_STATX_BASIC_STATS: Final = 0x7FF
_STATX_SIZE: Final = 256  # bytes of struct statx


def fresh_status(descriptor: int) -> os.stat_result:
    """Like fstat. What keeps the server from being asked (no such call, a file system that refuses it) is no trouble:
    then it is what the client knows. Raises OSError. Blocks like the file system."""
    _ask()(descriptor)
    return os.fstat(descriptor)


@cache
def _ask() -> Callable[[int], object]:
    import ctypes  # not needed before the first file is there

    try:
        statx = ctypes.CDLL(None).statx
    except AttributeError:
        return lambda descriptor: None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)

    def ask(descriptor: int) -> object:
        answer = ctypes.create_string_buffer(_STATX_SIZE)
        return statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, answer)

    return ask
