"""Sends weights to engines on the same host by HTTP calls. For engines on CPUs the calls contain
the values. For engines on GPUs they contain CUDA IPC handles, with which the engine opens the
trainer's memory.

The tensors of a bucket are packed into one byte tensor, because sending one handle for each tensor
was measured to take several times as long (benchmarks/results/gpu/h100.md).

Every tensor-parallel rank of an engine needs a payload, which contains values or a handle. If the
engine is on the trainer's own GPUs (`gpu_sharing.py`), each payload is made by the trainer rank on
the same GPU (`PayloadBucket`). Otherwise all are the same, made by the rank that sends.

Invariants
- A tensor of which a handle was sent stays alive until every engine has replied. Engines on CPUs
  get values even if the trainer is on GPUs.
- While engines load one bucket, the next is gathered and serialized.
- A handle names its GPU by UUID, which SGLang supports, because the same GPU may have different
  numbers in the engine and in the trainer.
- Pickles contain only a plain tensor and its metadata, and are sent only to engines of this run.
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

# Index of the argument `storage_device` of torch.multiprocessing.reductions.rebuild_cuda_tensor.
_DEVICE_ARGUMENT = 6


class _HandlePickler(pickle.Pickler):
    """Pickles CUDA tensors as IPC handles whose device is a UUID, and everything else by value.

    torch's ForkingPickler cannot be used, because it shares CPU tensors through a socket, which
    kills SGLang's server.
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
    """A bucket with a payload (serialized values, or a memory handle) for each tensor-parallel rank
    of an engine. Only the rank that sends to the engine has payloads.

    This rank's payload may be a handle to the memory of `flat`, so `flat` is kept as long as this
    object exists.
    """

    def __init__(self, flat: FlatBucket | None, payloads: Sequence[str] = ()) -> None:
        super().__init__([] if flat is None else [(name, x) for name, x, _ in flat.tensors])
        self.flat = flat
        self.payloads = list(payloads)


def flat_copy(bucket: Bucket, by_value: bool) -> FlatBucket:
    """Copy a bucket into new memory as one byte tensor: on the host if `by_value`, otherwise on the
    bucket's device."""
    device = torch.device("cpu") if by_value else bucket[0][1].device
    return flatten(bucket, lambda size: torch.empty(size, dtype=torch.uint8, device=device))


def serialize(flat: FlatBucket) -> str:
    """Return a flat bucket as a base64 text of a pickle, in the form that SGLang accepts for
    `load_format: flattened_bucket`."""
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
        # Wait until the copy into `flat` has ended on the GPU, because an engine with the handle
        # could read before.
        torch.cuda.synchronize()
    return base64.b64encode(buffer.getvalue()).decode("ascii")


class TensorSender(WeightSender):
    """Sends weights by HTTP calls to engines on the same host, as values or as CUDA IPC handles
    (`weights.transport: tensor`)."""

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
        """Copy a bucket into one byte tensor and serialize that tensor; return a bucket with the
        resulting payload once for each tensor-parallel rank of the engine."""
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
