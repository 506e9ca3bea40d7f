"""Is a name in a directory? Told by a listing, for who asks for a name that is missing makes a network file system's
client remember that it is, for up to a minute, whatever others write meanwhile.

In two cases a listing cannot tell, and the name has to be asked for: in a directory that may be entered and not be
listed, and in one whose entries are mounted by the automounter when somebody asks for them.

Agents use this module too: Python 3.9, no typing.
"""

from __future__ import annotations

import os


def shows(directory: int | str, name: str) -> bool:
    """Whether the name is, or may be, in a directory (its path, or an open descriptor); False when there is no such
    directory. Raises OSError. Blocks like its file system."""
    try:
        return name in os.listdir(directory) or _is_automounted(directory)
    except PermissionError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_automounted(directory: int | str) -> bool:
    device = (os.fstat(directory) if isinstance(directory, int) else os.stat(directory)).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            rows = [line.split(" ") for line in file]
    except OSError:
        return False
    return any(row[2] == number and row[row.index("-") + 1] == "autofs" for row in rows)  # proc_pid_mountinfo(5)
