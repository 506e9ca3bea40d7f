"""allocd: an honest supervisor for multi-node Slurm jobs. Importing this package imports nothing else of ours."""

import os
import sys

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """What a receipt says of the software that made it."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"allocd": __version__, "python": python, "system": os.uname().release}
