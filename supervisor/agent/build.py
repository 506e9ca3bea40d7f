"""Packs the agent into the archive that is sent to the nodes.

The archive holds the agent's modules under their own names, and beside each the same compiled by the interpreter that
builds. Python looks for the compiled one first and passes over it, without a word, when another version made it; so the
usual agent starts without compiling and every other one still starts. Bytes depend on the source and on that version
alone.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
MODULES = ("lines", "processes", "agent")
_MAIN = b"import sys\nfrom supervisor.agent.agent import main\nsys.exit(main(sys.argv[1:]))\n"
_UNCHECKED_HASH = 0b01  # PEP 552: validated by hash, and the hash is not to be checked


def agent_archive() -> bytes:
    """The agent as a zip archive for `python -I -S agent.pyz`, built in memory in a few milliseconds.

    Raises OSError when the package's own source cannot be read.
    """
    sources = {"__main__": _MAIN, "supervisor/__init__": b"", "supervisor/agent/__init__": b""}
    sources |= {f"supervisor/agent/{name}": (HERE / f"{name}.py").read_bytes() for name in MODULES}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:  # stored: no zlib needed, nothing to unpack
        for name, source in sources.items():
            for suffix, data in ((".pyc", _compiled(name, source)), (".py", source)):
                entry = zipfile.ZipInfo(name + suffix)  # dated 1980, whatever the clock says
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, data)
    return out.getvalue()


def _compiled(name: str, source: bytes) -> bytes:
    """A .pyc (PEP 552) without docstrings. Marshal's format 2 knows no references between objects: those
    would depend on what else the building process has interned."""
    code = compile(source, f"{name}.py", "exec", dont_inherit=True, optimize=2)
    flags = _UNCHECKED_HASH.to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + marshal.dumps(code, 2)
