"""Packs the agent into the archive that is sent to the nodes.

The archive holds the agent's modules under their own names, and beside each the same compiled by the interpreter that
builds. Python looks for the compiled one first and passes over it, without a word, when another version made it; so the
usual agent starts without compiling and every other one still starts. Bytes depend on the source, on where it is
(tracebacks name it) and on that version alone.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

HERE = Path(__file__).parent
PACKAGES = ("supervisor/__init__", "supervisor/agent/__init__", "supervisor/watch/__init__")
MODULES = (
    *("agent/channel", "agent/processes", "agent/agent", "agent/copying", "agent/fetch"),
    *("agent/hints", "watch/inotify", "watch/names", "watch/trees"),
)
_MAIN = b"""\
import os, sys
from supervisor.agent.agent import main
status = main(sys.argv[1:])
sys.stderr.flush()
os._exit(status)  # srun waits for our end: the interpreter's own way out takes 2 ms more, and does nothing for us
"""
_UNCHECKED_HASH = 0b01  # PEP 552: validated by hash, and the hash is not to be checked


def agent_archive() -> bytes:
    """The agent as a zip archive for `python -I -S agent.pyz`, built in memory in a few milliseconds.

    Raises OSError when the package's own source cannot be read.
    """
    small = {"__main__": _MAIN, **dict.fromkeys(PACKAGES, b"")}
    modules = [(name, source, compile(source, f"{name}.py", "exec")) for name, source in small.items()]
    modules += map(_module, MODULES)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:  # stored: no zlib needed, nothing to unpack
        for name, source, code in modules:
            for suffix, data in ((".pyc", _compiled(source, code)), (".py", source)):
                entry = zipfile.ZipInfo(name + suffix)  # dated 1980, whatever the clock says
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, data)
    return out.getvalue()


def _module(name: str) -> tuple[str, bytes, CodeType]:
    """A module's name in the archive, its source, and its code from Python's own cache where that can be had: to
    compile them takes as long as all the rest."""
    path = HERE.parent / f"{name}.py"
    code = SourceFileLoader(name, str(path)).get_code(name)
    assert code is not None  # noqa: S101 - only what has no source has no code
    return f"supervisor/{name}", path.read_bytes(), code


def _compiled(source: bytes, code: CodeType) -> bytes:
    """A .pyc (PEP 552). Marshal's format 2 knows no references between objects: those would depend on what else the
    building process has interned."""
    flags = _UNCHECKED_HASH.to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + marshal.dumps(code, 2)
