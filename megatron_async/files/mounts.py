"""Finds the file system of a path, and whether it is local to this node or shared.

This matters because memory that processes share through a file, as SQLite's write-ahead log does,
works only within one node. On a file system shared by several nodes it may seem to work, but the
data is wrong.

The kind of file system comes from the mount table. In a chroot the table lacks the root file
system, so the command `stat` is used there. `stat` calls every FUSE file system `fuseblk`, whether
local or shared, so that reply counts as unknown.

A kind on neither list below may be local or shared, such as `9p` of WSL and gVisor or `virtiofs` of
virtual machines. Callers prefer a directory that is known to be local, and otherwise accept one of
unknown kind.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "hfs", "jfs"}
    | {"ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
    | {"ext2/ext3", "overlayfs", "msdos"}  # Names that `stat` gives ext2 to ext4, overlay, vfat.
    | {"fuse.fuse-overlayfs", "fuse-overlayfs"}
)
# The prefix `fuse.`, which the mount table gives file systems served by FUSE, is left out here.
_SHARED = frozenset(
    {"acfs", "afs", "beegfs", "ceph", "ceph-fuse", "cifs", "fhgfs", "gfs", "gfs2", "glusterfs"}
    | {"gpfs", "lustre", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte"}
    | {"smb2", "smb3", "smbfs", "wekafs", "blobfuse", "blobfuse2", "gcsfuse", "goofys", "juicefs"}
    | {"lizardfs", "mfs", "moosefs", "mountpoint-s3", "rclone", "s3fs", "sshfs"}
)
_STAT_SECONDS = 10.0


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system: its kind and its mount point.

    `kind` is a name as in the mount table: ext4, nfs4, lustre, fuse.glusterfs, ...
    """

    kind: str
    mount: str

    @property
    def local(self) -> bool:
        """Whether the file system is known to be local to this node."""
        return self.kind in _LOCAL

    @property
    def shared(self) -> bool:
        """Whether the file system is known to be shared between nodes."""
        return self.kind.removeprefix("fuse.") in _SHARED

    def __str__(self) -> str:
        return f"{self.kind} (mounted at {self.mount})"


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of `path` or, if it does not exist, of its nearest existing parent."""
    real = existing(path.resolve())
    # If several file systems are mounted at one path, the last one hides the others. It is the one
    # that the dictionary keeps.
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}
    for folder in (real, *real.parents):
        if str(folder) in mounts:
            return FileSystem(mounts[str(folder)], str(folder))
    return FileSystem(_kind_by_stat(real), "/")


def _kind_by_stat(path: Path) -> str:
    """Return the kind of a path's file system that the command `stat` reports, else `unknown`."""
    command = ["stat", "--file-system", "--format=%T", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STAT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    kind = done.stdout.strip()
    return "unknown" if done.returncode != 0 or kind == "fuseblk" else kind


def existing(path: Path) -> Path:
    """Return `path` if it exists, else its nearest parent folder that does."""
    while not path.exists():
        path = path.parent
    return path
