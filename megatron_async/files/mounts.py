"""The file system of a path, and whether it belongs to one node.

The kind comes from the table of mounts. In a chroot the table lacks the root file system; `stat`
then reports the kind. It calls every FUSE file system `fuseblk`, local ones and shared ones.

Memory that processes share through a file, as SQLite's write-ahead log, reaches over one node: on a
file system of several nodes it may seem to work and is wrong. A kind on neither list below may be
either, such as `9p` of WSL and gVisor or `virtiofs` of virtual machines: a directory that is known
to be local is preferred, and without one the kind is accepted.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOCAL = frozenset(
    {"apfs", "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fuseblk", "hfs", "jfs"}
    | {"ntfs", "ntfs3", "overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
    | {"ext2/ext3", "overlayfs", "msdos"}  # as `stat` calls ext2 to ext4, overlay and vfat
    | {"fuse.fuse-overlayfs", "fuse-overlayfs"}
)
# Without the prefix of those that FUSE serves.
_SHARED = frozenset(
    {"acfs", "afs", "beegfs", "ceph", "ceph-fuse", "cifs", "fhgfs", "gfs", "gfs2", "glusterfs"}
    | {"gpfs", "lustre", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte"}
    | {"smb2", "smb3", "smbfs", "wekafs", "blobfuse", "blobfuse2", "gcsfuse", "goofys", "juicefs"}
    | {"lizardfs", "mfs", "moosefs", "mountpoint-s3", "rclone", "s3fs", "sshfs"}
)
_STAT_SECONDS = 10.0


@dataclass(frozen=True)
class FileSystem:
    """`kind` as in the table of mounts: ext4, nfs4, lustre, fuse.glusterfs, ..."""

    kind: str
    mount: str

    @property
    def local(self) -> bool:
        """Return whether it is known to belong to this node alone."""
        return self.kind in _LOCAL

    @property
    def shared(self) -> bool:
        """Return whether it is known to be shared between nodes."""
        return self.kind.removeprefix("fuse.") in _SHARED

    def __str__(self) -> str:
        return f"{self.kind} (mounted at {self.mount})"


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of `path`, or of the nearest folder of it that exists."""
    real = existing(path.resolve())
    mounts = {m.mountpoint: m.fstype for m in psutil.disk_partitions(all=True)}  # the last one wins
    for place in (real, *real.parents):
        if str(place) in mounts:
            return FileSystem(mounts[str(place)], str(place))
    return FileSystem(_kind_by_stat(real), "/")


def _kind_by_stat(path: Path) -> str:
    """Return the kind that `stat` reports, `unknown` where it fails."""
    command = ["stat", "--file-system", "--format=%T", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STAT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    kind = done.stdout.strip()
    return "unknown" if done.returncode != 0 or kind == "fuseblk" else kind


def existing(path: Path) -> Path:
    """`path`, or the nearest folder of it that exists."""
    while not path.exists():
        path = path.parent
    return path
