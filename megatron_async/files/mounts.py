"""The file system of a path, by the table of mounts, and whether it belongs to one node.

Memory that processes share through a file, as SQLite's write-ahead log, reaches over one node: on a
file system of several nodes it may seem to work and is wrong. So only kinds that are known to be
local count as local.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "hfs", "jfs"}
    | {"ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
)


@dataclass(frozen=True)
class FileSystem:
    """`kind` as in the table of mounts: ext4, nfs4, lustre, fuse.glusterfs, ..."""

    kind: str
    mount: str

    @property
    def local(self) -> bool:
        """Return whether it is known to belong to this node alone."""
        return self.kind in _LOCAL

    def __str__(self) -> str:
        return f"{self.kind} (mounted at {self.mount})"


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of `path`, or of the nearest folder of it that exists."""
    real = existing(path.resolve())
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}  # the last one wins
    for place in (real, *real.parents):
        if str(place) in mounts:
            return FileSystem(mounts[str(place)], str(place))
    return FileSystem("unknown", "/")


def existing(path: Path) -> Path:
    """`path`, or the nearest folder of it that exists."""
    while not path.exists():
        path = path.parent
    return path
