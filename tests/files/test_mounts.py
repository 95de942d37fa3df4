"""The kind of file system of a path, in a chroot too, whose table of mounts lacks the root."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.files import mounts
from megatron_async.files.mounts import file_system_of


def table(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]) -> None:
    rows = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in kinds.items()]
    monkeypatch.setattr(mounts.psutil, "disk_partitions", lambda all: rows)


def test_the_innermost_mount_of_a_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(monkeypatch, {"/": "ext4", str(tmp_path): "lustre"})
    assert str(file_system_of(tmp_path / "missing")) == f"lustre (mounted at {tmp_path})"
    assert not file_system_of(tmp_path).local and file_system_of(Path("/")).local


def test_the_root_of_a_chroot_is_local_though_the_table_lacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_system_of(tmp_path)
    table(monkeypatch, {"/proc": "proc", "/sys": "sysfs"})
    assert file_system_of(tmp_path).local == real.local


def test_an_unknown_kind_is_not_local_when_stat_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(monkeypatch, {})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(file_system_of(tmp_path)) == "unknown (mounted at /)"
    assert not file_system_of(tmp_path).local
