"""Publishes a policy version: exports the weights and sends them to the engines, by one call that
every trainer rank makes.

Only some ranks, the leaders, send weights. With engines on separate GPUs, each pipeline stage of
the trainer has one leader, and the leaders send one after the other. With engines on the trainer's
own GPUs, each engine has one leader, and the leaders send in parallel. Leaders communicate over
gloo groups.

Only this module imports all transports, and chooses the transport of the run.

Invariants
- Every rank makes the same calls of `publish` in the same order. The export is collective, so every
  rank completes it, even if a leader fails in the middle.
- With engines on separate GPUs, each leader sends the layers of its own pipeline stage directly to
  the engines, stage after stage (`stage_order.py`). With engines on the trainer's own GPUs, each
  engine gets all layers from the ranks on the same GPUs (`gpu_sharing.py`), so every rank gathers
  all layers.
- An engine that fails during a transfer is excluded, and the whole update is repeated for the other
  engines. Each repetition has at least one engine less, so the repetitions end.
- `Leaders.join` gives every leader the results of all leaders, so that all come to the same
  decision.
- Every wait for another rank has the time limit of their gloo group.
"""

import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.config import RunConfig
from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.errors import ComponentFailure
from megatron_async.models.architecture import Architecture
from megatron_async.models.export import SENDER, stage_buckets, stage_leader
from megatron_async.models.parameters import unwrap
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.gpu_sharing import engine_on, trainer_ranks_of
from megatron_async.weight_sync.http import EngineAddress, EngineCallError
from megatron_async.weight_sync.quantize import quantized_names, quantized_tensors
from megatron_async.weight_sync.stage_order import EarlierStageFailed, StageOrder, StageToken
from megatron_async.weight_sync.transports.base import (
    Bucket,
    TransferReport,
    WeightSender,
    combined,
    seconds_to_give_up,
    sending_device,
)
from megatron_async.weight_sync.transports.delta import DeltaSender
from megatron_async.weight_sync.transports.disk import DiskSender
from megatron_async.weight_sync.transports.distributed import DistributedSender
from megatron_async.weight_sync.transports.tensor import (
    PayloadBucket,
    TensorSender,
    flat_copy,
    serialize,
)

_MIB = 1 << 20
# Seconds that are added to the longest time of an attempt to send weights, for messages between
# leaders and for connecting to healthy engines. The sum is the time limit of the gloo groups.
_SLACK_SECONDS = 60.0
_HELD_BUCKETS = 3


def make_sender(
    settings: WeightsConfig, engines: EngineConfig, device: torch.device, directory: Path
) -> WeightSender:
    """Create the sender of the transport that `weights.transport` names.

    Args:
        settings: Settings of the weight exchange.
        engines: Settings of the engines.
        device: Kind of device that the engines run on.
        directory: Directory to which `disk` and `delta` write versions. It must have the same path
            on the engines' machines.
    """
    match settings.transport:
        case "distributed":
            return DistributedSender(settings, engines, device)
        case "tensor":
            return TensorSender(settings, engines, device)
        case "disk":
            return DiskSender(settings, engines, directory)
        case "delta":
            return DeltaSender(settings, engines, directory)


class Leaders:
    """The leaders, which are the trainer ranks that send weights to engines, and the gloo group in
    which they communicate.

    Creating a group is collective, so every rank must construct this object, in the same order as
    other groups. Only leaders may use it.
    """

    def __init__(self, leaders: list[int], timeout_seconds: float) -> None:
        self._leaders = leaders
        self._group = _gloo(leaders, timeout_seconds)

    @property
    def leads(self) -> bool:
        """Whether this rank is a leader."""
        return dist.get_rank() in self._leaders

    def join(self, result: Any) -> list[Any]:
        """Exchange `result` with all leaders; return the results of all leaders in their order."""
        results: list[Any] = [None] * len(self._leaders)
        dist.all_gather_object(results, result, group=self._group)
        return results


def _gloo(ranks: list[int], timeout_seconds: float) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo")


class StageLeaders(StageOrder, Leaders):
    """Leaders of all pipeline stages, and the order in which they send."""

    def __init__(self, timeout_seconds: float) -> None:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        super().__init__([stage_leader(stage) for stage in range(stages)], timeout_seconds)
        self.index = parallel_state.get_pipeline_model_parallel_rank()
        self.last = self.index == stages - 1

    def take(self) -> StageToken:
        if self.index == 0:
            return StageToken()
        box: list[Any] = [None]
        try:
            dist.recv_object_list(box, src=self._leaders[self.index - 1], group=self._group)
        except RuntimeError as error:
            raise ComponentFailure(
                f"pipeline stage {self.index} timed out waiting for stage {self.index - 1} to send "
                f"its weights: {error}"
            ) from error
        token: StageToken = box[0]
        if token.failed:
            raise EarlierStageFailed(f"pipeline stage {self.index - 1} failed to send its weights")
        return token

    def hand_on(self, token: StageToken) -> None:
        if not self.last:
            dist.send_object_list([token], dst=self._leaders[self.index + 1], group=self._group)


class SharedGpus(StageOrder, Leaders):
    """Leaders (ranks that send weights) for engines on the trainer's own GPUs: one for each engine.
    They send in parallel.

    Creating a group is collective, so every rank must construct this object, in the same order as
    other groups.
    """

    def __init__(self, count: int, tensor: int, timeout_seconds: float) -> None:
        super().__init__([trainer_ranks_of(e, tensor)[0] for e in range(count)], timeout_seconds)
        groups = [_gloo(trainer_ranks_of(e, tensor), timeout_seconds) for e in range(count)]
        self._engine = engine_on(dist.get_rank(), count, tensor)
        self._ranks = None if self._engine is None else groups[self._engine]
        self._size = tensor

    def mine(self, engines: Sequence[EngineAddress]) -> list[EngineAddress]:
        """Return a list with the engine on this rank's GPU, or an empty list if `engines` does not
        contain it."""
        return [e for e in engines if e.index == self._engine]

    def collect(self, tensors: Bucket, by_value: bool) -> PayloadBucket:
        """Collect a bucket's payloads for the engine on this rank's GPU at the engine's leader: one
        payload for each of its tensor-parallel ranks, made by the trainer rank on the same GPU.

        All trainer ranks on the engine's GPUs must make this call. Only the leader's result has the
        payloads. A payload may be a handle to memory of the rank that made it, so every rank must
        keep its result until the engine has loaded the bucket.
        """
        if self._engine is None:
            return PayloadBucket(None)
        flat = flat_copy(tensors, by_value)
        payload = serialize(flat)
        found: list[Any] | None = [None] * self._size if self.leads else None
        dist.gather_object(payload, found, dst=self._leaders[self._engine], group=self._ranks)
        return PayloadBucket(flat, found or [])


@dataclass(frozen=True)
class _Outcome:
    """Result of one leader's work: its return value, the ids of engines that have made it fail, or
    another error that it raised."""

    value: Any = None
    failed: frozenset[str] = frozenset()
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return not self.failed and self.error is None


class WeightPublisher:
    """Sends the weights of this trainer's policy to engines.

    `report` is the report of the newest transfer, over all pipeline stages; it is set only on ranks
    that send weights.
    """

    def __init__(
        self, config: RunConfig, chunks: Sequence[torch.nn.Module], directory: Path
    ) -> None:
        """Create process groups and, on ranks that send weights, the sender. Every rank must make
        this call.

        Args:
            config: Settings of the run.
            chunks: The model chunks of this rank.
            directory: Directory to which `disk` and `delta` write versions; no other run may use
                it.
        """
        self._settings, self._directory = config.weights, directory
        self._chunks = chunks
        self._architecture: Architecture = unwrap(chunks[0]).architecture
        # With `weight_update: in_flight` and `kv: keep`, running requests keep their KV cache, so
        # the update must not flush it.
        self._flush_cache = config.schedule.weight_update == "boundary" or (
            config.schedule.kv == "recompute"
        )
        if config.engines.placement == "colocated":
            # Nothing to flush: the KV cache was released when the engine was offloaded.
            self._flush_cache = False
        self._names_in_fp8: frozenset[str] = frozenset()
        if config.engines.quantization == "fp8":
            self._names_in_fp8 = quantized_names(self._architecture)
        limit = seconds_to_give_up(config.weights) + _SLACK_SECONDS
        self._shared: SharedGpus | None = None
        if config.engines.placement == "colocated":
            self._shared = SharedGpus(config.engines.count, config.engines.tensor, limit)
        self._order: StageLeaders | SharedGpus = self._shared or StageLeaders(limit)
        # Keeps the memory of payloads alive: an engine may still load one bucket while this rank
        # makes the next two.
        self._held: deque[Bucket] = deque(maxlen=_HELD_BUCKETS)
        self._sender: WeightSender | None = None
        device = sending_device(config.engines)
        self._by_value = device.type == "cpu"
        if self._order.leads:
            self._sender = make_sender(config.weights, config.engines, device, directory)
        self.report: TransferReport | None = None

    def publish(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> list[str]:
        """Send `version` to `engines`, which must be idle or paused. Every trainer rank must make
        this call.

        Returns:
            The ids of the engines that have loaded the version, the same on every rank.

        Raises:
            ComponentFailure: The update failed and no engine was at fault; raised on every rank.
        """
        wanted = list(engines)
        while wanted:
            failed = self._attempt(wanted, version)
            if not failed:
                break
            wanted = [engine for engine in wanted if engine.engine_id not in failed]
        return [engine.engine_id for engine in wanted]

    def settle(self) -> None:
        """Remove versions that earlier processes have written to the directory. Call this once an
        update is verified."""
        if isinstance(self._sender, DiskSender):
            self._sender.settle()
        elif self._sender is not None:
            # Remove versions that an earlier launch of the run with another transport may have
            # written.
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Disconnect from the engines."""
        if self._sender is not None:
            self._sender.close()

    def _attempt(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> set[str]:
        """Send the version to all `engines` once; return the ids of the engines that failed."""
        stream = self._stream()
        outcomes: list[_Outcome] = []
        sender, shared = self._sender, self._shared
        if sender is not None:
            mine = engines if shared is None else shared.mine(engines)
            outcomes = self._order.join(_outcome_of(lambda: self._connect(sender, mine)))
            if all(outcome.ok for outcome in outcomes):
                send = partial(sender.send, stream, version, self._flush_cache, self._order)
                outcome = _outcome_of(send) if mine else _Outcome()
                # Complete the export, because other ranks may need this rank's shards.
                for _ in stream:
                    pass
                outcomes = self._order.join(outcome)
            reports = [outcome.value for outcome in outcomes if outcome.value is not None]
            if not all(outcome.ok for outcome in outcomes):
                sender.disconnect()
            elif reports:
                self.report = combined(reports) if shared is None else reports[0]
        for _ in stream:
            pass
        box = [outcomes]
        dist.broadcast_object_list(box, src=SENDER)
        self._held.clear()
        return _failed_engines(box[0])

    def _stream(self) -> Iterator[Bucket]:
        """Yield the buckets of weights for the engines. Every trainer rank must iterate to the end,
        because making a bucket is collective."""
        shared, size = self._shared, self._settings.bucket_mib * _MIB
        stream = stage_buckets(
            self._chunks,
            self._architecture,
            size,
            partial(quantized_tensors, names=self._names_in_fp8),
            everywhere=shared is not None,
        )
        for bucket in stream:
            if shared is not None:
                self._held.append(shared.collect(bucket, self._by_value))
            yield bucket if shared is None else self._held[-1]

    def _connect(self, sender: WeightSender, engines: Sequence[EngineAddress]) -> None:
        """Wait for this sender's turn, and then connect the sender to `engines`; if `engines` is
        empty, disconnect it.

        The leaders of pipeline stages connect one after the other, because an engine can join only
        one group at a time, and all engines must join the groups in the same order. Leaders of
        engines on the trainer's own GPUs do not wait.
        """
        self._order.take()
        token = StageToken(failed=True)
        try:
            if engines:
                sender.connect(engines)
            else:
                sender.disconnect()
            token = StageToken()
        finally:
            self._order.hand_on(token)


def _outcome_of(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except EngineCallError as error:
        return _Outcome(failed=frozenset(error.engine_ids))
    except Exception as error:  # noqa: BLE001 - raised on every rank by `_failed_engines`
        return _Outcome(error=error)


def _failed_engines(outcomes: Sequence[_Outcome]) -> set[str]:
    """Return the ids of all engines that failed according to any leader's outcome.

    Raises:
        Exception: If a leader failed for another reason than an engine; the error of the first such
            leader.
    """
    failed = {engine_id for outcome in outcomes for engine_id in outcome.failed}
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    own = [error for error in errors if not isinstance(error, EarlierStageFailed)]
    if own:
        raise own[0]
    if errors and not failed:
        raise ComponentFailure(f"weights could not be sent: {errors[0]}")
    return failed
