"""Weights through a directory that the engines share: safetensors shards, a manifest, a rename.

Invariants
- A version's directory exists complete or not at all (`version_directory.py`).
- The version being served is never removed; of the older ones `KEEP` - 1 stay.
- Pipeline stages write their shards side by side; the last stage publishes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.double_buffer import OneAhead
from megatron_async.weight_sync.transports.base import Bucket, Transfer, WeightSender, time_left
from megatron_async.weight_sync.version_directory import (
    ShardRecord,
    VersionManifest,
    VersionWriter,
    serialise,
)

KEEP = 2


class ShardWriter:
    """The shards of a version from one stage, one for each bucket."""

    def __init__(self, target: VersionWriter, stage: int) -> None:
        self._target = target
        self._stage = stage
        self.shards: dict[str, ShardRecord] = {}
        self.owners: dict[str, str] = {}

    def write(self, bucket: Bucket) -> None:
        """The next shard."""
        name = f"model-{self._stage:02d}-{len(self.shards) + 1:05d}.safetensors"
        self.shards[name] = self._target.add(name, serialise(bucket))
        self.owners.update((tensor, name) for tensor, _ in bucket)


def publish(buckets: Iterable[Bucket], version: PolicyVersion, directory: Path) -> Path:
    """Write a version atomically; returns its directory."""
    target = VersionWriter(directory, str(version))
    writer = ShardWriter(target, 0)
    try:
        for bucket in buckets:
            writer.write(bucket)
        return target.finish(VersionManifest(str(version), writer.shards, writer.owners))
    finally:
        target.discard()


class DiskSender(WeightSender):
    """`weights.transport: disk`."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig, directory: Path) -> None:
        super().__init__(settings, engines)
        self._directory = directory
        self._published: list[Path] = []

    def _open_link(self) -> None:
        """HTTP is all that is needed."""

    def _close_link(self) -> None:
        """Nothing beside HTTP was opened."""

    def _transfer(self, transfer: Transfer) -> None:
        target = VersionWriter(self._directory, str(transfer.version))
        try:
            writer = ShardWriter(target, transfer.stage)
            with OneAhead[Bucket](writer.write) as writes:
                for bucket in transfer.buckets():
                    transfer.watch.lap("gather")
                    writes.put(bucket)
                    transfer.watch.lap("wait for write")
            transfer.watch.lap("wait for write")
            transfer.watch.add("write", writes.busy_seconds)
            transfer.sent_bytes = sum(shard.bytes for shard in writer.shards.values())
            before = transfer.turn()
            shards = {**before.get("shards", {}), **writer.shards}
            owners = {**before.get("owners", {}), **writer.owners}
            transfer.written = {"shards": shards, "owners": owners}
            if transfer.is_last:
                path = target.finish(VersionManifest(str(transfer.version), shards, owners))
                self._load(path, transfer)
        except BaseException:
            target.discard()
            raise

    def _load(self, path: Path, transfer: Transfer) -> None:
        body: dict[str, Any] = {
            "model_path": str(path.resolve()),
            "weight_version": str(transfer.version),
            "load_format": "auto",
            "flush_cache": transfer.flush_cache,
        }
        self.calls.every("update_weights_from_disk", body, time_left(transfer.deadline))
        transfer.watch.lap("load")
        keep(self._published, path)


def keep(published: list[Path], path: Path) -> None:
    """`path` is served now: remove all but the newest `KEEP` directories of the list."""
    if path in published:
        published.remove(path)
    published.append(path)
    while len(published) > KEEP:
        shutil.rmtree(published.pop(0), ignore_errors=True)
