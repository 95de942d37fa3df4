"""Tests private directories below /tmp, and directories for temporary files of child processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron_async.files.private_directory import (
    large_files_directory,
    private_directory,
    process_directory,
    temporary_files,
    user_directory,
)


def test_temporary_files_go_to_private_directory_except_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert large_files_directory() == tmp_path
    with private_directory() as directory:
        found = temporary_files(directory, {})
        assert found["TMPDIR"] == str(directory) and len(str(directory)) < 50
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert tempfile.gettempdir() == str(directory)
        assert large_files_directory() == tmp_path
    assert not directory.exists()


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("TORCHINDUCTOR_CACHE_DIR", "torchinductor"),
        ("TRITON_CACHE_DIR", "triton"),
        ("SGLANG_CACHE_DIR", "sglang"),
    ],
)
def test_compiled_kernels_stay_on_this_node_unless_user_sets_a_directory(
    tmp_path: Path, variable: str, name: str
) -> None:
    home = {"HOME": "/network/home", "XDG_CACHE_HOME": "/network/cache"}
    kept = Path(f"/tmp/megatron-async-compiled-{os.getuid()}")
    assert temporary_files(tmp_path, home)[variable] == str(kept / name)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert temporary_files(tmp_path, home | {variable: "/mine"})[variable] == "/mine"


def test_private_directory_removes_unlocked_directories_when_old_and_empty() -> None:
    parent = user_directory("megatron-async")
    with private_directory() as mine:
        old, new = (parent / f"left{seconds}{mine.name}" for seconds in (90, 0))
        for left, seconds in ((old, 90), (new, 0)):
            left.mkdir()
            os.utime(left, (time.time() - seconds,) * 2)
        used = parent / f"used{mine.name}"
        used.mkdir()
        (used / "socket").touch()
        os.utime(used, (time.time() - 90,) * 2)
        with private_directory():
            assert not old.exists() and new.exists(), "its creator may not have locked it yet"
            assert used.exists(), "its process may be running although its lock file is gone"
        new.rmdir()
        shutil.rmtree(used)


def test_process_directory_removes_directories_of_dead_processes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from megatron_async.files.private_directory import process_directory\n"
        "print(process_directory('made-by-', Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    left = Path(done.stdout.strip())
    foreign = tmp_path / "made-by-hand"
    foreign.mkdir()
    assert left.exists()
    mine = process_directory("made-by-", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, foreign])
