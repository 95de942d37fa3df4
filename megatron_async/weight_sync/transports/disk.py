"""Sends weights through a directory that trainer and engines share: writes safetensors files
(shards) and a manifest, renames the directory, and lets the engines load it.

Invariants
- The directory of a version exists completely or not at all (`version_directory.py`).
- The `KEEP` newest versions are kept, so the version that engines use is never removed.
- The directory belongs to this run only. Once an update is verified, versions of earlier processes
  and incomplete versions are removed.
- Pipeline stages write their shards in parallel; the last stage publishes the version.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.weight_sync.background_stage import BackgroundStage
from megatron_async.weight_sync.http import gather
from megatron_async.weight_sync.receiver import DELTA_SUFFIX
from megatron_async.weight_sync.transports.base import Bucket, Transfer, WeightSender, time_left
from megatron_async.weight_sync.version_directory import (
    ShardRecord,
    VersionManifest,
    VersionWriter,
    serialize,
)

KEEP = 2


class ShardWriter:
    """Writes the tensors of one pipeline stage to files (shards) of a version directory, one for
    each bucket."""

    def __init__(self, target: VersionWriter, stage: int) -> None:
        self._target = target
        self._stage = stage
        self.shards: dict[str, ShardRecord] = {}
        self.owners: dict[str, str] = {}

    def write(self, bucket: Bucket) -> tuple[str, bytes]:
        """Write a bucket of tensors as the next shard (a safetensors file); return the file's name
        and content."""
        name = f"model-{self._stage:02d}-{len(self.shards) + 1:05d}.safetensors"
        data = serialize(bucket)
        self.shards[name] = self._target.add(name, data)
        self.owners.update((tensor, name) for tensor, _ in bucket)
        return name, data

    def write_all(self, transfer: Transfer) -> None:
        """Write every bucket of a transfer as a shard. While a bucket is written, the next one is
        gathered."""
        with BackgroundStage[Bucket](self.write) as writes:
            for bucket in transfer.buckets():
                transfer.lap("gather")
                writes.put(bucket)
                transfer.lap("wait for write")
        transfer.lap("wait for write")
        transfer.report.phases["write"] += writes.busy_seconds

    def with_stages_before(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest entries of all shards that this pipeline stage and the stages before
        it wrote.

        The result has the fields `shards` and `owners` of `VersionManifest`, and `before` has them
        for the stages before.
        """
        return {
            "shards": {**before.get("shards", {}), **self.shards},
            "owners": {**before.get("owners", {}), **self.owners},
        }


class DiskSender(WeightSender):
    """Writes weights to a directory that trainer and engines share, and lets the engines load it
    (`weights.transport: disk`)."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig, directory: Path) -> None:
        super().__init__(settings, engines)
        self._directory = directory
        self._published: list[Path] = []

    def _transfer(self, transfer: Transfer) -> None:
        target = VersionWriter(self._directory, str(transfer.version))
        try:
            writer = ShardWriter(target, transfer.stage)
            writer.write_all(transfer)
            transfer.report.sent_bytes = sum(shard.bytes for shard in writer.shards.values())
            transfer.written = writer.with_stages_before(transfer.turn())
            if transfer.is_last:
                manifest = VersionManifest(str(transfer.version), **transfer.written)
                path = target.finish(manifest)
                self._load([str(path.resolve())] * len(self.calls.engines), transfer)
                keep(self._published, path)
        except BaseException:
            target.discard()
            raise

    def settle(self) -> None:
        """Remove everything from the directory except the newest versions that this sender has
        published.

        Do nothing in a pipeline stage other than the last, which is the only one that publishes.
        """
        if self._published:
            wanted = {path.name for path in self._published}
            for found in self._directory.iterdir():
                if found.name.removesuffix(DELTA_SUFFIX) not in wanted:
                    shutil.rmtree(found, ignore_errors=True)

    def _load(self, paths: Sequence[str], transfer: Transfer) -> None:
        """Let each engine load the version from its entry of `paths`; wait until all have."""
        loads = self.calls.start(
            "update_weights_from_disk",
            lambda index: {
                "model_path": paths[index],
                "weight_version": str(transfer.version),
                "load_format": "auto",
                "flush_cache": transfer.flush_cache,
            },
            time_left(transfer.deadline),
        )
        gather(loads)
        transfer.lap("load")


def keep(published: list[Path], path: Path) -> None:
    """Add `path` to the list of published directories; delete the oldest ones from disk and from
    the list until `KEEP` remain."""
    if path in published:
        published.remove(path)
    published.append(path)
    while len(published) > KEEP:
        shutil.rmtree(published.pop(0), ignore_errors=True)
