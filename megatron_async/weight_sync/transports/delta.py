"""Weights as differences from the version before, in bfloat16: for engines behind slow links.

    <directory>/<lineage.number>/          whole, as `disk` publishes it, in bfloat16
    <directory>/<lineage.number>.delta/    each shard's difference from the version before

Only the `.delta` directory is read on the way to an engine that holds the version before; the
whole one is what differences are made against, and what a receiver reads that asks for it.

Invariants
- What a receiver makes is what was published, bit for bit: both manifests hold the same checksums
  of the whole shards, and a difference carries the checksum of what it must lead to.
- Engines load only when all of them have the version whole on their own machine.
- Every `FULL_EVERY`-th version has no differences, so that all read it whole.
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
# Versions from one that is read whole to the next. A whole version bounds how far back an engine
# that starts late has to read, and a sixteenth of the versions costs little bandwidth.
FULL_EVERY = 16
# Scales of quantized weights (`quantize.py`) lose their meaning when they are rounded.
_KEPT_AS_IT_IS = "_scale_inv"


def rounded(bucket: Bucket) -> list[tuple[str, Tensor]]:
    """Wider floating-point numbers to bfloat16; everything else as it is."""

    def convert(name: str, tensor: Tensor) -> Tensor:
        wide = tensor.is_floating_point() and tensor.element_size() > 2
        if not wide or name.endswith(_KEPT_AS_IT_IS):
            return tensor
        return tensor.to(torch.bfloat16)

    return [(name, convert(name, tensor.detach())) for name, tensor in bucket]


class _StageWriter(ShardWriter):
    """A stage's shards of a version: whole, and as differences from the version before."""

    def __init__(self, whole: VersionWriter, delta: VersionWriter, stage: int, base: Path | None):
        super().__init__(whole, stage)
        self._delta = delta
        self._base = base
        # None: this stage has no differences, because a shard has no counterpart in the base.
        self.files: dict[str, ShardRecord] | None = None if base is None else {}

    def write(self, bucket: Bucket) -> tuple[str, bytes]:
        """The next shard, and its differences; its name and content."""
        name, data = super().write(rounded(bucket))
        if self.files is not None and self._base is not None:
            difference = _difference(self._base / name, data)
            if difference is None:
                self.files = None
            else:
                self.files[name] = self._delta.add(name, difference)
        return name, data

    def with_stages_before(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Join `files` with those of stages before; None where any stage has no differences."""
        files, earlier = self.files, before.get("files", {})
        both = None if files is None or earlier is None else {**earlier, **files}
        return {**super().with_stages_before(before), "files": both}


def _difference(base: Path, data: bytes) -> bytes | None:
    """Difference from the file `base` to `data`; None if there is none."""
    try:
        with base.open("rb") as file:
            old = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    return encode(old, data) if len(old) == len(data) else None


class DeltaSender(DiskSender):
    """`weights.transport: delta`."""

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
        """The newest other version that is published whole; None when it is a full one's turn."""
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
        """Publish both directories; return the manifest that receivers begin with."""
        written = transfer.written
        manifest = VersionManifest(str(transfer.version), written["shards"], written["owners"])
        keep(self._published, whole.finish(manifest))
        against = None
        if base is not None and written["files"] is not None:
            with suppress(ComponentFailure):  # damaged since: then there are no differences to it
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
        """Every receiver makes the version whole; then, and only then, all engines load it."""
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
        """Answers by engine. One that asks for the whole version is left out, unless it had one.

        Raises EngineCallError for every other refusal.
        """
        body = {
            "directory": str(self._directory.resolve()),
            "version": str(transfer.version),
            "full": full,
        }
        seconds = time_left(transfer.deadline)
        calls = self.calls.start("receive_weights", lambda _: body, seconds, only=indices)
        for call in calls:
            call.exception()  # waits, bounded by the call's own limit
        failures = failures_of(calls)
        raise_together([e for e in failures if full or e.status != NEEDS_FULL_STATUS])
        answered = zip(indices, calls, strict=True)
        return {i: call.result() for i, call in answered if call.exception() not in failures}
