"""SGLang's weight updater, made to receive one bucket ahead (weights/ahead.py says why and how).

The functions are hooks of SGLang's plugin registry; announcements without the size of a next
bucket are left to SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_async.weights.ahead import ReceiveAhead, next_bytes_of

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
RECEIVE = f"{UPDATER}.receive_weights_from_distributed"
LEAVE = f"{UPDATER}.destroy_weights_update_group"
BEGIN = f"{UPDATER}.begin_weight_update"


class AheadHooks:
    """The hooks of one engine process and what they hold between two buckets."""

    def __init__(self) -> None:
        self._ahead = ReceiveAhead()

    def receive(self, original: Callable[..., Any], updater: Any, **asked: Any) -> Any:
        """Around `RECEIVE`: named tensors of one bucket."""
        next_bytes = next_bytes_of(asked.get("load_format"))
        if next_bytes is None:
            return original(updater, **asked)
        import torch.distributed as dist
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        name = asked["group_name"]
        group = updater._model_update_group[name]
        plan = FlattenedTensorBucket.empty(asked["names"], asked["dtypes"], asked["shapes"], "meta")
        flat_N = self._ahead.take(
            name,
            plan.get_flattened_tensor().nbytes,
            next_bytes,
            lambda tensor: dist.broadcast(tensor, src=0, group=group, async_op=True),
            updater.device,
        )
        bucket = FlattenedTensorBucket(flattened_tensor=flat_N, metadata=plan.get_metadata())
        return bucket.reconstruct_tensors()

    def leave(
        self, original: Callable[..., Any], updater: Any, group_name: str
    ) -> tuple[bool, str]:
        """Around `LEAVE`: leaving waits for what is posted, which nobody may send any more."""
        if self._ahead.forget(group_name):
            updater._model_update_group[group_name].abort()
        left: tuple[bool, str] = original(updater, group_name)
        return left

    def begin(self, updater: Any) -> None:
        """Before `BEGIN`, the first call of an update."""
        self._ahead.clear()
