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
from megatron_async.weight_sync.transports.base import Bucket, Update, WeightSender, time_left
from megatron_async.weight_sync.version_directory import Manifest, Publication, Shard, serialise

KEEP = 2


class ShardWriter:
    """One stage's shards of a publication, one for each bucket."""

    def __init__(self, publication: Publication, stage: int) -> None:
        self._publication = publication
        self._stage = stage
        self.shards: dict[str, Shard] = {}
        self.owners: dict[str, str] = {}

    def write(self, bucket: Bucket) -> None:
        """The next shard."""
        name = f"model-{self._stage:02d}-{len(self.shards) + 1:05d}.safetensors"
        self.shards[name] = self._publication.add(name, serialise(bucket))
        self.owners.update((tensor, name) for tensor, _ in bucket)


def publish(buckets: Iterable[Bucket], version: PolicyVersion, directory: Path) -> Path:
    """Write a version atomically; returns its directory."""
    publication = Publication(directory, str(version))
    writer = ShardWriter(publication, 0)
    try:
        for bucket in buckets:
            writer.write(bucket)
        return publication.finish(Manifest(str(version), writer.shards, writer.owners))
    finally:
        publication.discard()


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

    def _transfer(self, update: Update) -> None:
        publication = Publication(self._directory, str(update.version))
        try:
            writer = ShardWriter(publication, update.stage)
            with OneAhead[Bucket](writer.write) as writes:
                for bucket in update.buckets():
                    update.watch.lap("gather")
                    writes.put(bucket)
                    update.watch.lap("wait for write")
            update.watch.lap("wait for write")
            update.watch.add("write", writes.busy_seconds)
            update.sent_bytes = sum(shard.bytes for shard in writer.shards.values())
            before = update.turn()
            shards = {**before.get("shards", {}), **writer.shards}
            owners = {**before.get("owners", {}), **writer.owners}
            update.written = {"shards": shards, "owners": owners}
            if update.is_last:
                path = publication.finish(Manifest(str(update.version), shards, owners))
                self._load(path, update)
        except BaseException:
            publication.discard()
            raise

    def _load(self, path: Path, update: Update) -> None:
        body: dict[str, Any] = {
            "model_path": str(path.resolve()),
            "weight_version": str(update.version),
            "load_format": "auto",
            "flush_cache": update.flush_cache,
        }
        self.calls.every("update_weights_from_disk", body, time_left(update.deadline))
        update.watch.lap("load")
        keep(self._published, path)


def keep(published: list[Path], path: Path) -> None:
    """`path` is served now: remove all but the newest `KEEP` directories of the list."""
    if path in published:
        published.remove(path)
    published.append(path)
    while len(published) > KEEP:
        shutil.rmtree(published.pop(0), ignore_errors=True)
