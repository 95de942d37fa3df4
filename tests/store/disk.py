"""Disks that fail in a chosen way: a library, preloaded into the process under test (`disk.c`)."""

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
    """Environment of a process that loses power: `durable` gets what of `root` was fsynced."""
    durable.mkdir(parents=True, exist_ok=True)
    return {**_preloaded(root), "DISK_KEEP": str(durable)}


def without(root: Path, *abilities: str) -> dict[str, str]:
    """Environment of a process to which `root` is on a file system without `flock`, `shm`."""
    return _preloaded(root) | {f"DISK_NO_{ability.upper()}": "1" for ability in abilities}


def _preloaded(root: Path) -> dict[str, str]:
    return {**os.environ, "LD_PRELOAD": str(_library()), "DISK_ROOT": str(root)}
