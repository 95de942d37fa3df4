"""Provides environments in which a process has a disk that fails in a chosen way.

A library that is compiled from `disk.c` is preloaded into the process.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@functools.cache
def _library() -> Path:
    library = Path(tempfile.mkdtemp(prefix="disk-")) / "disk.so"
    source = Path(__file__).with_name("disk.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def keeping(root: Path, durable: Path) -> dict[str, str]:
    """Return an environment whose process copies to `durable` what it fsyncs below `root`.

    After the process, `durable` holds what a power loss would have left of `root`.
    """
    durable.mkdir(parents=True, exist_ok=True)
    return {**_preloaded(root), "DISK_KEEP": str(durable)}


def environment_without(root: Path, *abilities: str) -> dict[str, str]:
    """Return an environment whose process has a file system without `abilities` at `root`.

    The abilities are `flock` (file locks) and `shm` (the shared memory of SQLite's log).
    """
    return _preloaded(root) | {f"DISK_NO_{ability.upper()}": "1" for ability in abilities}


def _preloaded(root: Path) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(_library()), "DISK_ROOT": str(root)}
