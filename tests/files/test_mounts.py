"""Tests the detection of a path's kind of file system, also in a chroot whose mount table lacks
the root."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.files import mounts
from megatron_async.files.mounts import FileSystem, file_system_of


def table(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str]) -> None:
    rows = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in kinds.items()]
    monkeypatch.setattr(mounts.psutil, "disk_partitions", lambda all: rows)


def test_file_system_of_returns_the_innermost_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(monkeypatch, {"/": "ext4", str(tmp_path): "lustre"})
    assert str(file_system_of(tmp_path / "missing")) == f"lustre (mounted at {tmp_path})"
    assert not file_system_of(tmp_path).local and file_system_of(Path("/")).local


def test_file_system_of_asks_stat_when_mount_table_lacks_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_system_of(tmp_path)
    table(monkeypatch, {"/proc": "proc", "/sys": "sysfs"})
    assert file_system_of(tmp_path).local == real.local


@pytest.mark.parametrize(
    ("answer", "kind", "local"),
    [("ext2/ext3", "ext2/ext3", True), ("nfs", "nfs", False), ("fuseblk", "unknown", False)],
)
def test_file_system_kind_is_what_stat_reports_when_mount_table_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, kind: str, local: bool
) -> None:
    table(monkeypatch, {})
    (tmp_path / "stat").write_text(f"#!/bin/sh\necho {answer}\n")
    (tmp_path / "stat").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = file_system_of(tmp_path)
    assert (found.kind, found.local) == (kind, local)


def test_file_system_kind_is_unknown_when_stat_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(monkeypatch, {})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(file_system_of(tmp_path)) == "unknown (mounted at /)"
    assert not file_system_of(tmp_path).local


@pytest.mark.parametrize(
    ("kind", "local", "shared"),
    [
        ("ext4", True, False),
        ("overlay", True, False),
        ("fuse.fuse-overlayfs", True, False),
        ("nfs4", False, True),
        ("lustre", False, True),
        ("fuse.sshfs", False, True),
        ("fuse.ceph-fuse", False, True),
        ("fuse.glusterfs", False, True),
        ("9p", False, False),
        ("virtiofs", False, False),
        ("fuse.something", False, False),
        ("unknown", False, False),
    ],
)
def test_file_system_kind_is_local_shared_or_neither(kind: str, local: bool, shared: bool) -> None:
    found = FileSystem(kind, "/")
    assert (found.local, found.shared) == (local, shared)
