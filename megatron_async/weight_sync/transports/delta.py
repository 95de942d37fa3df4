"""Sends weights as differences from the previous version, in bfloat16, for engines on slow
networks.

    <directory>/<lineage.number>/          the complete version, as `disk` writes it, in bfloat16
    <directory>/<lineage.number>.delta/    difference of each file from the previous version

A receiver is the part of an engine that reads these directories (`weight_sync/receiver.py`). If it
has the previous version, it reads only the `.delta` directory, otherwise the complete version. The
trainer needs the complete version too, to compute the next differences.

Invariants
- The weights that a receiver computes are equal to the published ones bit for bit. This is checked:
  both directories' manifests contain checksums of the complete files, and each difference contains
  the checksum of its result.
- Engines load a version only after all of them have it completely on their own machines.
- Every `FULL_EVERY`-th version is published without differences, so that all engines read the
  complete version.
"""

import mmap
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.weight_sync.blocks import encode
from megatron_async.weight_sync.http import failures_of, raise_together
from megatron_async.weight_sync.receiver import DELTA_SUFFIX
from megatron_async.weight_sync.transports.base import Bucket, Transfer, time_left
from megatron_async.weight_sync.transports.disk import KEEP, DiskSender, ShardWriter, keep
from megatron_async.weight_sync.version_directory import (
    MANIFEST,
    ShardRecord,
    VersionManifest,
    VersionWriter,
    read_manifest,
)

NEEDS_FULL_STATUS = 409
# Every 16th version is published without differences, so all engines read it completely. This
# limits how many versions depend on each other, and reading one of 16 versions completely costs
# little bandwidth.
FULL_EVERY = 16
# Suffix of names of scales of quantized weights (`quantize.py`). They must not be rounded, because
# that would change all weights of a block.
_KEPT_AS_IT_IS = "_scale_inv"


def rounded(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """Convert floating-point tensors with more than 16 bits to bfloat16. Scales of quantized
    weights and all other tensors are kept unchanged."""

    def convert(name: str, tensor: Tensor) -> Tensor:
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        if not wide or name.endswith(_KEPT_AS_IT_IS):
            return tensor
        return tensor.to(torch.bfloat16)

    return [(name, convert(name, tensor.detach())) for name, tensor in bucket]


class _StageWriter(ShardWriter):
    """Writes the tensors of one pipeline stage twice: as complete files (shards), and as
    differences from the files of the previous version."""

    def __init__(self, whole: VersionWriter, delta: VersionWriter, stage: int, base: Path | None):
        super().__init__(whole, stage)
        self._delta = delta
        self._base = base
        # Files with the differences of this stage's shards from the base (the previous version), by
        # shard name. None if the stage has no differences, because there is no base or the base
        # lacks a shard.
        self.files: dict[str, ShardRecord] | None = None if base is None else {}

    def write(self, bucket: Bucket) -> tuple[str, bytes]:
        """Write a bucket of tensors as the next shard (a safetensors file), and if possible the
        difference from the same file of the previous version; return the shard's name and
        content."""
        name, data = super().write(rounded(bucket))
        if self.files is not None and self._base is not None:
            difference = _difference(self._base / name, data)
            if difference is None:
                self.files = None
            else:
                self.files[name] = self._delta.add(name, difference)
        return name, data

    def with_stages_before(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the manifest entries of all shards that this pipeline stage and the stages before
        it wrote.

        `before` has the entries of the stages before it. The result has the fields `shards`,
        `owners` and `files` of `VersionManifest`. `files` describes the differences; it is None if
        any of these stages has no differences.
        """
        files, earlier = self.files, before.get("files", {})
        both = None if files is None or earlier is None else {**earlier, **files}
        return {**super().with_stages_before(before), "files": both}


def _difference(base: Path, data: bytes) -> bytes | None:
    """Return the difference from the file `base` to `data`.

    None if the file cannot be read or has another size.
    """
    try:
        with base.open("rb") as file:
            old = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    return encode(old, data) if len(old) == len(data) else None


class DeltaSender(DiskSender):
    """Writes complete weights and their differences from the previous version, and lets each engine
    read one of the two (`weights.transport: delta`)."""

    def __init__(self, settings: WeightsConfig, engines: EngineConfig, directory: Path) -> None:
        super().__init__(settings, engines, directory)
        self._sent: list[str] = []
        self._deltas: list[Path] = []
        self._in_a_row = 0

    def _transfer(self, transfer: Transfer) -> None:
        name = str(transfer.version)
        whole = VersionWriter(self._directory, name)
        delta = VersionWriter(self._directory, name + DELTA_SUFFIX)
        base = self._find_base(name)
        try:
            writer = _StageWriter(whole, delta, transfer.stage, base)
            writer.write_all(transfer)
            self._note_sent(name, with_delta=writer.files is not None)
            transfer.written = writer.with_stages_before(transfer.turn())
            if transfer.is_last:
                manifest = self._publish(whole, delta, base, transfer)
                self._deliver(manifest, transfer)
        except BaseException:
            whole.discard()
            delta.discard()
            raise

    def _find_base(self, name: str) -> Path | None:
        """Return the directory of the newest completely published version other than `name`, from
        which differences are computed.

        Return None if there is no such version, or if this version must be published without
        differences, as every `FULL_EVERY`-th.
        """
        if self._in_a_row + 1 >= FULL_EVERY:
            return None
        for sent in reversed(self._sent):
            if sent != name and (self._directory / sent / MANIFEST).exists():
                return self._directory / sent
        return None

    def _note_sent(self, name: str, with_delta: bool) -> None:
        self._sent = [*(sent for sent in self._sent if sent != name), name][-KEEP:]
        self._in_a_row = self._in_a_row + 1 if with_delta else 0

    def _publish(
        self, whole: VersionWriter, delta: VersionWriter, base: Path | None, transfer: Transfer
    ) -> VersionManifest:
        """Publish the complete version and, if they exist, its differences; return the manifest
        that receivers read."""
        written = transfer.written
        manifest = VersionManifest(str(transfer.version), written["shards"], written["owners"])
        keep(self._published, whole.finish(manifest))
        against = None
        if base is not None and written["files"] is not None:
            # The base may have been damaged since the differences were computed. If its manifest
            # cannot be read, only the complete version is published, without differences.
            with suppress(ComponentFailure):
                against = read_manifest(base).digest
        if against is not None:
            manifest = replace(manifest, base=against, files=written["files"])
            keep(self._deltas, delta.finish(manifest, index=False))
        else:
            delta.discard()
            shutil.rmtree(delta.path, ignore_errors=True)
        transfer.lap("publish")
        return manifest

    def _deliver(self, manifest: VersionManifest, transfer: Transfer) -> None:
        """Let every engine's receiver write the complete version on its machine; when all have done
        so, let all engines load it."""
        everybody = range(len(self.calls.engines))
        received: dict[int, dict[str, Any]] = {}
        if manifest.files is not None:
            received = self._receive(everybody, transfer, full=False)
        missing = [index for index in everybody if index not in received]
        if missing:
            received |= self._receive(missing, transfer, full=True)
        transfer.report.sent_bytes = max(int(answer["bytes"]) for answer in received.values())
        transfer.lap("receive")
        self._load([received[index]["path"] for index in everybody], transfer)

    def _receive(
        self, indices: Sequence[int], transfer: Transfer, *, full: bool
    ) -> dict[int, dict[str, Any]]:
        """Let some engines read the published version onto their own machines; return their replies
        by the index of the engine.

        With `full` false, engines that reply that they need the whole version are left out.

        Raises:
            EngineCallError: If a call fails in another way.
        """
        body = {
            "directory": str(self._directory.resolve()),
            "version": str(transfer.version),
            "full": full,
        }
        seconds = time_left(transfer.deadline)
        calls = self.calls.start("receive_weights", lambda _: body, seconds, only=indices)
        for call in calls:
            # Wait for the call, which has its own time limit, without raising its error.
            call.exception()
        failures = failures_of(calls)
        raise_together([e for e in failures if full or e.status != NEEDS_FULL_STATUS])
        answered = zip(indices, calls, strict=True)
        return {i: call.result() for i, call in answered if call.exception() not in failures}
