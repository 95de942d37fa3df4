"""Weights through a directory that the engines share: safetensors shards, a manifest, a rename.

    <directory>/<lineage.number>/{model-00001.safetensors, ..., model.safetensors.index.json,
                                  manifest.json}

Invariants
- A version's directory exists complete or not at all: it is written under another name, flushed
  and renamed.
- The manifest holds the SHA-256 of every shard; `read_manifest` raises on a difference.
- The version being served is never removed; of the older ones `_KEEP` - 1 stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weights.transport import Bucket, Stopwatch, WeightSender, time_left

_KEEP = 2
MANIFEST = "manifest.json"


def publish(buckets: Iterable[Bucket], version: PolicyVersion, directory: Path) -> Path:
    """Write a version atomically; returns its directory. One shard a bucket."""
    final = directory / str(version)
    partial = directory / f".{version}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    owners: dict[str, str] = {}
    shards: dict[str, dict[str, Any]] = {}
    total = 0
    try:
        for number, bucket in enumerate(buckets, start=1):
            data = save({name: t.detach().cpu().contiguous() for name, t in bucket})
            shard = f"model-{number:05d}.safetensors"
            _write(partial / shard, data)
            shards[shard] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            owners.update((name, shard) for name, _ in bucket)
            total += sum(tensor.nbytes for _, tensor in bucket)
        if not shards:
            raise ValueError("an update without any tensor")
        index = {"metadata": {"total_size": total}, "weight_map": owners}
        _write(partial / "model.safetensors.index.json", _json(index))
        _write(partial / MANIFEST, _json({"version": str(version), "shards": shards}))
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a published version. Raises ComponentFailure if a shard is not as written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ComponentFailure(f"published weights {path} have no readable manifest") from error
    for shard, expected in manifest["shards"].items():
        try:
            found = hashlib.sha256((path / shard).read_bytes()).hexdigest()
        except OSError as error:
            raise ComponentFailure(f"published weights {path} lack {shard}") from error
        if found != expected["sha256"]:
            raise ComponentFailure(f"published weights {path}: {shard} is damaged")
    return dict(manifest)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


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

    def _transfer(
        self,
        buckets: Iterator[Bucket],
        version: PolicyVersion,
        flush_cache: bool,
        deadline: float,
        watch: Stopwatch,
    ) -> None:
        path = publish(buckets, version, self._directory)
        watch.lap("write")
        self.calls.every(
            "update_weights_from_disk",
            {
                "model_path": str(path.resolve()),
                "weight_version": str(version),
                "flush_cache": flush_cache,
            },
            time_left(deadline),
        )
        watch.lap("load")
        if path not in self._published:
            self._published.append(path)
        while len(self._published) > _KEEP:
            shutil.rmtree(self._published.pop(0), ignore_errors=True)
