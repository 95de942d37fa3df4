"""Sends weights to engines on the same host: by value to CPUs, by CUDA IPC handle to GPUs.

A bucket is sent as one flat tensor, because one handle for each tensor would cost several times as
much (benchmarks/results/gpu/h100.md).

An engine on one GPU gets the handles of the rank that sends. An engine on several GPUs
(`gpu_sharing.py`) gets, for each of its tensor ranks, the handles of the trainer rank on the same
GPU (`PayloadBucket`).

Invariants
- To a GPU only a handle is sent; the tensor stays alive until every engine has replied. To engines
  on a CPU values are sent, wherever the trainer is.
- While engines load one bucket, the next is gathered and serialized.
- Handles name their device by UUID, as SGLang reads them, because the device numbers of the engine
  may differ from the trainer's.
- Only a plain tensor and its metadata are pickled, and only for engines of this run.
"""

import base64
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.weight_sync.background_stage import BackgroundStage
from megatron_async.weight_sync.prefetch import FLATTENED
from megatron_async.weight_sync.transports.base import (
    Bucket,
    NamedTensor,
    Transfer,
    WeightSender,
    time_left,
    with_next,
)
from megatron_async.weight_sync.transports.flat_bucket import FlatBucket, flatten

# Index of the device among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


class _HandlePickler(pickle.Pickler):
    """Pickles CUDA tensors as IPC handles whose device is a UUID, and everything else by value.

    It is not a ForkingPickler, because that class shares CPU tensors through a socket, which kills
    SGLang's server.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(value)
        changed = list(arguments)
        properties = torch.cuda.get_device_properties(changed[_DEVICE_ARGUMENT])
        changed[_DEVICE_ARGUMENT] = str(properties.uuid)
        return rebuild, tuple(changed)


class PayloadBucket(list[NamedTensor]):
    """A bucket with a payload for each tensor rank of an engine; only the engine's leader has
    payloads.

    The payload of this rank may be a handle to `flat`, which lives as long as this object.
    """

    def __init__(self, flat: FlatBucket | None, payloads: Sequence[str] = ()) -> None:
        super().__init__([] if flat is None else [(name, x) for name, x, _ in flat.tensors])
        self.flat = flat
        self.payloads = list(payloads)


def flat_copy(bucket: Bucket, by_value: bool) -> FlatBucket:
    """Copy a bucket into new memory: on the host if `by_value`, otherwise on the bucket's
    device."""
    device = torch.device("cpu") if by_value else bucket[0][1].device
    return flatten(bucket, lambda size: torch.empty(size, dtype=torch.uint8, device=device))


def serialize(flat: FlatBucket) -> str:
    """Return the base64 of a pickle that SGLang's unpickler accepts as a `flattened_bucket`."""
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            start_idx=start,
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,  # SGLang expects the number of bytes here.
        )
        for name, tensor, start in flat.tensors
    ]
    buffer = io.BytesIO()
    payload = {"flattened_tensor": flat.bytes_N, "metadata": metadata}
    _HandlePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(payload)
    if flat.bytes_N.is_cuda:
        torch.cuda.synchronize()  # The engine must not read before this rank's copy has ended.
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class TensorSender(WeightSender):
    """Implements `weights.transport: tensor`."""

    def __init__(
        self, settings: WeightsConfig, engines: EngineConfig, device: torch.device
    ) -> None:
        super().__init__(settings, engines)
        self._by_value = device.type == "cpu"

    def _transfer(self, transfer: Transfer) -> None:
        begun = False
        with BackgroundStage[tuple[PayloadBucket, bool]](
            lambda load: self._load(*load, transfer)
        ) as loads:
            for tensors, following in with_next(transfer.buckets()):
                bucket = tensors if isinstance(tensors, PayloadBucket) else self._handed(tensors)
                transfer.report.sent_bytes += sum(map(len, bucket.payloads))
                transfer.lap("gather")
                if not begun:
                    self._begin_session(transfer)
                    begun = True
                loads.put((bucket, transfer.is_last and following is None))
                transfer.lap("wait for load")
            loads.wait()
            transfer.lap("wait for load")
        transfer.report.phases["load"] += loads.busy_seconds
        self._end_session(transfer)

    def _handed(self, tensors: Bucket) -> PayloadBucket:
        """Return a bucket with the same payload for every tensor rank, made by this rank only."""
        flat = flat_copy(tensors, self._by_value)
        return PayloadBucket(flat, [serialize(flat)] * self.engine_settings.tensor)

    def _load(self, bucket: PayloadBucket, last: bool, transfer: Transfer) -> None:
        body: dict[str, Any] = {
            "serialized_named_tensors": bucket.payloads,
            "load_format": FLATTENED,
            "flush_cache": transfer.flush_cache and last,
        }
        if last:
            body["weight_version"] = str(transfer.version)
        self.calls.every("update_weights_from_tensor", body, time_left(transfer.deadline))
