"""Provides a real file system of a few megabytes that a test can fill and make read-only.

The file system is a separate tmpfs, because a full or read-only disk refuses root too, which file
permissions do not.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SECONDS = 20
_FILLER = ".filler"


class SmallDisk:
    """Small disk that is mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int = 0) -> None:
        """Fill the disk except for `leave` bytes (whole pages)."""
        file = os.open(self.path / _FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while (free := self.free_bytes() - leave) > 0:
                os.write(file, bytes(min(free, 1 << 20)))
        except OSError:  # Another process used the remaining space.
            pass
        finally:
            os.close(file)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        """Free the space that `fill` has used."""
        (self.path / _FILLER).unlink(missing_ok=True)

    def read_only(self) -> None:
        """Make the disk read-only; no file on it may be open for writing."""
        _run("mount", "-o", "remount,ro", str(self.path))

    def writable(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.path))


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """Mount a small disk at `path`; skip the test if this process may not mount."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "megatron-async-test", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk that can be filled needs permission to mount a tmpfs: {error}")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "-l", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
