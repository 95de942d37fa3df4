"""Provides `publish`, which writes a version of the weights to a directory without engines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.transports.base import Bucket
from megatron_async.weight_sync.transports.disk import ShardWriter
from megatron_async.weight_sync.version_directory import VersionManifest, VersionWriter


def publish(buckets: Iterable[Bucket], version: PolicyVersion, directory: Path) -> Path:
    """Write a version atomically below `directory`; return the version's directory."""
    target = VersionWriter(directory, str(version))
    writer = ShardWriter(target, 0)
    try:
        for bucket in buckets:
            writer.write(bucket)
        return target.finish(VersionManifest(str(version), writer.shards, writer.owners))
    finally:
        target.discard()
