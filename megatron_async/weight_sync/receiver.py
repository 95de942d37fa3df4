"""Receives weights in an engine (`weights.transport: delta`), and computes complete weights from
the previous version and published differences.

It runs in the engine's server process (`engines/sglang/receiver.py`) and keeps one policy version
in a directory of its machine, as safetensors in bfloat16, from which the engine loads it.

Invariants
- A version exists completely and with the checksums in its manifest, or not at all, so a mixture of
  versions is never loaded.
- If differences cannot be used (they are relative to a version that the receiver does not have, or
  a file is damaged), `FullVersionNeeded` is raised and the previous version is kept. If a published
  complete version is damaged, a ComponentFailure is raised.
"""

import mmap
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import CannotWrite
from megatron_async.files.private_directory import large_files_directory, process_directory
from megatron_async.weight_sync.blocks import DeltaError, apply
from megatron_async.weight_sync.version_directory import (
    ShardRecord,
    VersionManifest,
    VersionWriter,
    read_manifest,
    read_shard,
    shard_of,
)

DELTA_SUFFIX = ".delta"
_PREFIX = "megatron-async-weights-"


class FullVersionNeeded(ComponentFailure):
    """Error if the requested version cannot be computed from the receiver's version and the
    published differences, so that the complete version must be read."""


@dataclass(frozen=True)
class Received:
    """Directory of a complete version on this machine, and the number of bytes of published files
    that were read for it."""

    path: Path
    bytes: int


class WeightReceiver:
    """Keeps the newest version of the weights below `root`, a directory to which only this object
    may write."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: tuple[VersionManifest, Path] | None = None

    def receive(self, directory: Path, version: str, *, full: bool) -> Received:
        """Write the complete weights of `version` to this machine's disk, from the files that are
        published in `directory`.

        Args:
            directory: Directory in which versions are published.
            version: The policy version.
            full: Whether to read the complete version; otherwise its differences to the previous
                version are read.

        Raises:
            FullVersionNeeded: If `full` is false and the version cannot be computed from
                differences.
            ComponentFailure: If the published files are missing, damaged or from another version,
                or the weights cannot be written.
        """
        source = directory / (version if full else version + DELTA_SUFFIX)
        try:
            manifest = read_manifest(source)
        except ComponentFailure as error:
            if full:
                raise
            raise FullVersionNeeded(str(error)) from error
        if manifest.version != version:
            raise ComponentFailure(
                f"published weights {directory / version} are labeled {manifest.version}"
            )
        if not full:
            return self._take_delta(source, manifest)
        size = sum(shard.bytes for shard in manifest.shards.values())
        return self._make(manifest, partial(read_shard, source), size)

    def _take_delta(self, source: Path, manifest: VersionManifest) -> Received:
        if self._held is None:
            raise FullVersionNeeded(
                f"{manifest.version} was published as differences, but this engine has no version "
                "yet"
            )
        held, base = self._held
        if held.digest == manifest.digest and held.version == manifest.version:
            # The receiver has this version already: it is sent again after a failed update. Damaged
            # files on this machine may have caused the failure, so check them.
            try:
                for name, expected in held.shards.items():
                    read_shard(base, name, expected)
            except ComponentFailure as error:
                raise FullVersionNeeded(
                    f"the files of {held.version} are damaged: {error}"
                ) from error
            return Received(base, 0)
        if held.digest != manifest.base:
            raise FullVersionNeeded(
                f"the differences to {manifest.version} are not relative to {held.version}, which "
                "this engine has"
            )
        files = manifest.files or {}

        def shard(name: str, expected: ShardRecord) -> bytes:
            try:
                delta = read_shard(source, name, files[name])
                with (base / name).open("rb") as file:
                    data = apply(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), delta)
            except (ComponentFailure, DeltaError, OSError, KeyError, ValueError) as error:
                raise FullVersionNeeded(
                    f"the differences from {held.version} to {manifest.version} cannot be applied: "
                    f"{name}: {error}"
                ) from error
            if shard_of(data) != expected:
                raise FullVersionNeeded(
                    f"{name} of {manifest.version} differs from what was published"
                )
            return data

        return self._make(manifest, shard, sum(file.bytes for file in files.values()))

    def _make(
        self, manifest: VersionManifest, shard: Callable[[str, ShardRecord], bytes], size: int
    ) -> Received:
        """Write all shards (files with a part of the tensors) of a version, and then remove the
        previous version.

        Args:
            shard: Function that returns the content of a shard.
            size: Number of bytes of published files that it reads.
        """
        target = VersionWriter(self._root, f"{manifest.version}-{manifest.digest[:16]}")
        try:
            for name, expected in manifest.shards.items():
                target.add(name, shard(name, expected))
            path = target.finish(
                VersionManifest(manifest.version, manifest.shards, manifest.owners)
            )
        except (OSError, CannotWrite) as error:
            raise ComponentFailure(f"weights cannot be written to {self._root}: {error}") from error
        finally:
            target.discard()
        before, self._held = self._held, (manifest, path)
        if before is not None and before[1] != path:
            shutil.rmtree(before[1], ignore_errors=True)
        return Received(path, size)


def make_root(parent: Path | None = None) -> Path:
    """Create a directory in which one `WeightReceiver` of this process keeps its weights; return
    its path.

    Args:
        parent: Directory in which it is created; None for the machine's directory for large files.
    """
    return process_directory(_PREFIX, parent or large_files_directory())


def remove_roots(owner: int, parent: Path | None = None) -> None:
    """Remove the directories that `make_root` made for process `owner`."""
    where = parent or large_files_directory()
    for root in where.glob(f"{_PREFIX}{owner}-*"):
        shutil.rmtree(root, ignore_errors=True)
