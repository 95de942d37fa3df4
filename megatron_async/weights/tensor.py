"""Weights to engines on the same host: by value on CPU, by CUDA IPC handle on GPU.

Invariants
- On GPU only a handle travels; the tensor stays alive until every engine has answered.
- Handles name their device by UUID, which is how SGLang reads them: the engine's device numbers
  may differ from the trainer's.
- Nothing but plain tensors is pickled, and only for engines of this run.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weights.http import gather
from megatron_async.weights.transport import (
    Bucket,
    Stopwatch,
    WeightSender,
    time_left,
    with_last,
)

_DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor


class _HandlePickler(pickle.Pickler):
    """Pickles CUDA tensors as IPC handles whose device is a UUID; everything else by value.

    Not a ForkingPickler: that one shares CPU tensors through a socket, which kills the server.
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


def serialise(bucket: Bucket) -> str:
    """`[(name, tensor), ...]` as base64 of a pickle that SGLang's unpickler accepts."""
    named: list[tuple[str, Tensor]] = [
        (name, _own_storage(tensor.detach())) for name, tensor in bucket
    ]
    buffer = io.BytesIO()
    _HandlePickler(buffer, pickle.HIGHEST_PROTOCOL).dump(named)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _own_storage(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is a part of something larger: a pickle takes whole storages."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.contiguous().clone()


class TensorSender(WeightSender):
    """`weights.transport: tensor`."""

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
        self._begin_session(deadline)
        watch.lap("begin")
        for bucket, last in with_last(buckets):
            payload = serialise(bucket)
            if any(tensor.is_cuda for _, tensor in bucket):
                torch.cuda.synchronize()
            watch.lap("gather")
            body: dict[str, Any] = {
                "serialized_named_tensors": [payload] * self.engine_settings.tensor,
                "flush_cache": flush_cache and last,
            }
            if last:
                body["weight_version"] = str(version)
            gather(
                self.calls.start(
                    "update_weights_from_tensor",
                    lambda _, body=body: body,  # type: ignore[misc]
                    time_left(deadline),
                )
            )
            watch.lap("load")
        self._end_session(deadline)
        watch.lap("end")
