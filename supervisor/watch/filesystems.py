"""Which file system a directory is on, and whether its events are the whole truth.

inotify tells what this kernel did. Where every writer goes through this kernel that is everything; where others write
as well (another node, a server, a program behind FUSE) it is silent about them, without an error. So events are
believed on the file systems of the first table only. The second table says why not for those that are met most; one
that is in neither is not believed: to poll what need not be polled costs little, and to wait for events that never come
costs the run.

The kernel tells which mount a descriptor is on (`mnt_id` in /proc/self/fdinfo), and /proc/self/mountinfo what that
mount is. Device numbers would not do: a btrfs subvolume's is in no table, and two mounts may share one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_DISK: Final = "a local disk: every writer goes through this kernel"
_MEMORY: Final = "memory of this machine: every writer goes through this kernel"
_MACHINES: Final = "events say nothing of what other machines write"

BELIEVED: Final[dict[str, str]] = {
    **dict.fromkeys(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "nilfs2"), _DISK),
    **dict.fromkeys(("reiserfs", "vfat", "exfat", "ntfs3", "hfsplus"), _DISK),
    **dict.fromkeys(("tmpfs", "ramfs"), _MEMORY),
    "overlay": "layers of local file systems: a container's writers go through the overlay itself",
}
"""Kind of file system, and why its events can be believed."""

SILENT: Final[dict[str, str]] = {
    **dict.fromkeys(("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "afs", "wekafs"), _MACHINES),
    **dict.fromkeys(("gfs2", "ocfs2"), _MACHINES),
    **dict.fromkeys(("9p", "virtiofs"), "events say nothing of what its host writes"),
    "fuse": "events say nothing of what is written behind it",
}
"""Beginning of a kind, and why its events are not enough."""

UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system. `kind` is the kernel's word, with FUSE's own behind it: ext4, nfs4, fuse.sshfs."""

    kind: str
    mount: str  # its mount point

    @property
    def believed(self) -> bool:
        """Whether its events tell of every writer."""
        return self.kind in BELIEVED

    @property
    def reason(self) -> str:
        """Why its events are believed, or not."""
        if self.believed:
            return BELIEVED[self.kind]
        return next((why for kind, why in SILENT.items() if self.kind.startswith(kind)), "not known to tell everything")


def file_system(descriptor: int) -> FileSystem:
    """The file system that an open file or directory is on; of kind `unknown` where /proc does not say. Does not touch
    that file system itself, and so does not block."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii", errors="replace") as file:
            mount = re.search(r"^mnt_id:\s*(\d+)$", file.read(), re.MULTILINE)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            table = file.read()
    except OSError:
        return FileSystem(UNKNOWN, "")
    return _row(table, mount[1]) if mount else FileSystem(UNKNOWN, "")


def _row(table: str, mount: str) -> FileSystem:
    """The row of a mount in the text of /proc/self/mountinfo, see proc_pid_mountinfo(5)."""
    for line in table.splitlines():
        fields = line.split(" ")
        if fields[0] == mount and "-" in fields[6:]:
            kind = fields[fields.index("-", 6) + 1]
            return FileSystem(_plain(kind), _plain(fields[4]))
    return FileSystem(UNKNOWN, "")


def _plain(word: str) -> str:
    """A word of mountinfo, in which space, tab, newline and backslash are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)
