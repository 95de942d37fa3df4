"""Publishing a policy version: the collective export and the senders, as one call on every rank.

The ranks that send weights communicate over gloo groups: a trainer's pipeline stages, one after the
other, or, to engines on the trainer's own GPUs, one rank for each engine, side by side.

The transport of a run is chosen here: no other module imports them all.

Invariants
- Every rank calls `publish` in the same order; the export is collective and always exhausted, also
  when a sending rank fails half-way.
- The leader of every pipeline stage sends its own layers, stage after stage (`stage_order.py`): no
  layer passes through another stage on its way to the engines. Engines on the trainer's own GPUs
  (`gpu_sharing.py`) get all layers from the ranks on theirs, so there every rank gathers all.
- An engine that fails during a transfer is left out and the whole update is repeated for the
  others; each repetition has at least one engine less, so it ends.
- `join` gives every leader the results of all, so that all of them decide alike.
- A wait for another rank has the group's time limit.
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
# For the leaders' own messages, and what engines that are well take to be connected.
_SLACK_SECONDS = 60.0
_HELD_BUCKETS = 3


def make_sender(
    settings: WeightsConfig, engines: EngineConfig, device: torch.device, directory: Path
) -> WeightSender:
    """The sender that `weights.transport` names.

    `device` is the engines' kind of device; `directory` is where `disk` and `delta` publish (a
    file system that the engines' hosts see under the same name).
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
    """Ranks with a sender each, over a gloo group of their own.

    Construct it on every rank, in the same order as other groups; only leaders use it.
    """

    def __init__(self, leaders: list[int], timeout_seconds: float) -> None:
        self._leaders = leaders
        self._group = _gloo(leaders, timeout_seconds)

    @property
    def leads(self) -> bool:
        """Return whether this rank is one of them."""
        return dist.get_rank() in self._leaders

    def join(self, result: Any) -> list[Any]:
        """The results of all leaders, in their order."""
        results: list[Any] = [None] * len(self._leaders)
        dist.all_gather_object(results, result, group=self._group)
        return results


def _gloo(ranks: list[int], timeout_seconds: float) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo")


class StageLeaders(StageOrder, Leaders):
    """The order of the leaders of all pipeline stages."""

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
                f"pipeline stage {self.index} waited too long for stage {self.index - 1} to send "
                f"its weights: {error}"
            ) from error
        token: StageToken = box[0]
        if token.failed:
            raise EarlierStageFailed(f"pipeline stage {self.index - 1} did not send its weights")
        return token

    def hand_on(self, token: StageToken) -> None:
        if not self.last:
            dist.send_object_list([token], dst=self._leaders[self.index + 1], group=self._group)


class SharedGpus(StageOrder, Leaders):
    """Engines on the GPUs of these ranks: each has a leader, and none waits for another's.

    Construct it on every rank, in the same order as other groups.
    """

    def __init__(self, count: int, tensor: int, timeout_seconds: float) -> None:
        super().__init__([trainer_ranks_of(e, tensor)[0] for e in range(count)], timeout_seconds)
        groups = [_gloo(trainer_ranks_of(e, tensor), timeout_seconds) for e in range(count)]
        self._engine = engine_on(dist.get_rank(), count, tensor)
        self._ranks = None if self._engine is None else groups[self._engine]
        self._size = tensor

    def mine(self, engines: Sequence[EngineAddress]) -> list[EngineAddress]:
        """The engine on this rank's GPU, if it is among them."""
        return [e for e in engines if e.index == self._engine]

    def collect(self, tensors: Bucket, by_value: bool) -> PayloadBucket:
        """Collective over the ranks on the engine's GPUs: a payload for each of its tensor ranks.

        Only the leader gets them, and each of them must keep its bucket until they are loaded.
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
    """Result of one leader's part: a value, the engines that failed, or another error."""

    value: Any = None
    failed: frozenset[str] = frozenset()
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return not self.failed and self.error is None


class WeightPublisher:
    """Sends the policy of this trainer to engines.

    `report` is that of the newest transfer, over all stages; on leading ranks only.
    """

    def __init__(
        self, config: RunConfig, chunks: Sequence[torch.nn.Module], directory: Path
    ) -> None:
        """Collective. `directory`: where `disk` and `delta` publish; only this run may use it."""
        self._settings, self._directory = config.weights, directory
        self._chunks = chunks
        self._architecture: Architecture = unwrap(chunks[0]).architecture
        # An in-flight update that keeps the KV cache must not flush it.
        self._flush_cache = config.schedule.weight_update == "boundary" or (
            config.schedule.kv == "recompute"
        )
        if config.engines.placement == "colocated":
            self._flush_cache = False  # its memory was given back, and the cache with it
        self._names_in_fp8: frozenset[str] = frozenset()
        if config.engines.quantization == "fp8":
            self._names_in_fp8 = quantized_names(self._architecture)
        limit = seconds_to_give_up(config.weights) + _SLACK_SECONDS
        self._shared: SharedGpus | None = None
        if config.engines.placement == "colocated":
            self._shared = SharedGpus(config.engines.count, config.engines.tensor, limit)
        self._order: StageLeaders | SharedGpus = self._shared or StageLeaders(limit)
        # An engine loads one bucket while this rank makes the next two.
        self._held: deque[Bucket] = deque(maxlen=_HELD_BUCKETS)
        self._sender: WeightSender | None = None
        device = sending_device(config.engines)
        self._by_value = device.type == "cpu"
        if self._order.leads:
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

    def settle(self) -> None:
        """Remove files published by earlier processes; call this once an update is verified."""
        if isinstance(self._sender, DiskSender):
            self._sender.settle()
        elif self._sender is not None:  # an earlier launch may have published files here
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Leave the engines alone."""
        if self._sender is not None:
            self._sender.close()

    def _attempt(self, engines: Sequence[EngineAddress], version: PolicyVersion) -> set[str]:
        """Transfer once to all; returns the engines at which it failed."""
        stream = self._stream()
        outcomes: list[_Outcome] = []
        sender, shared = self._sender, self._shared
        if sender is not None:
            mine = engines if shared is None else shared.mine(engines)
            outcomes = self._order.join(_outcome_of(lambda: self._connect(sender, mine)))
            if all(outcome.ok for outcome in outcomes):
                send = partial(sender.send, stream, version, self._flush_cache, self._order)
                outcome = _outcome_of(send) if mine else _Outcome()
                for _ in stream:  # other leaders may need this rank's shards
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
        """Buckets for the engines; collective."""
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
        """Connect in turn, as engines join one group after the other; to none: leave the last."""
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
    """The engines that failed. Raises the error of the first stage that had another one."""
    failed = {engine_id for outcome in outcomes for engine_id in outcome.failed}
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    own = [error for error in errors if not isinstance(error, EarlierStageFailed)]
    if own:
        raise own[0]
    if errors and not failed:
        raise ComponentFailure(f"weights could not be sent: {errors[0]}")
    return failed
