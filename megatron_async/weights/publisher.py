"""Publishing a policy version: the collective export and the sender, as one call on every rank.

Invariants
- Every rank calls `publish` in the same order; the export is collective and always exhausted, also
  when the sending rank fails half-way.
- An engine that fails during a transfer is left out and the whole update is repeated for the
  others; each repetition has at least one engine less, so it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async.config import RunConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weights.architecture import Architecture
from megatron_async.weights.export import SENDER, export_buckets
from megatron_async.weights.http import EngineAddress, EngineCallError
from megatron_async.weights.placement import unwrap
from megatron_async.weights.transport import TransferReport, WeightSender, make_sender

_MIB = 1 << 20


class WeightPublisher:
    """Sends the policy of this trainer to engines; `report` is that of the newest transfer."""

    def __init__(
        self, config: RunConfig, chunks: Sequence[torch.nn.Module], directory: Path
    ) -> None:
        """`directory` is where the `disk` transport publishes."""
        self._settings = config.weights
        self._chunks = chunks
        self._architecture: Architecture = unwrap(chunks[0]).architecture
        # An in-flight update that keeps the KV cache must not flush it.
        self._flush_cache = config.schedule.weight_update == "boundary" or (
            config.schedule.kv == "recompute"
        )
        self._sender: WeightSender | None = None
        if dist.get_rank() == SENDER:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._sender = make_sender(config.weights, config.engines, device, directory)
        self.report: TransferReport | None = None

    def publish(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> list[str]:
        """Make `engines` hold `version`; returns the ids of those that do (same on every rank).

        The engines are ready for it (idle or paused). Raises ComponentFailure, on every rank, for
        a failure that is not one engine's.
        """
        wanted = list(engines)
        while wanted:
            failed = self._attempt(wanted, version)
            if not failed:
                break
            wanted = [engine for engine in wanted if engine.engine_id not in failed]
        return [engine.engine_id for engine in wanted]

    def close(self) -> None:
        """Leave the engines alone."""
        if self._sender is not None:
            self._sender.close()

    def _attempt(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> set[str]:
        """One transfer to all; the engines that are to blame where it failed."""
        buckets = export_buckets(self._chunks, self._architecture, self._settings.bucket_mib * _MIB)
        outcome: list[set[str] | Exception] = [set()]
        if self._sender is not None:
            try:
                self._sender.connect(engines)
                self.report = self._sender.send(buckets, version, self._flush_cache)
            except EngineCallError as error:
                outcome = [set(error.engine_ids)]
            except Exception as error:  # noqa: BLE001 - raised on every rank below
                outcome = [error]
        for _ in buckets:
            pass
        dist.broadcast_object_list(outcome, src=SENDER)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]
