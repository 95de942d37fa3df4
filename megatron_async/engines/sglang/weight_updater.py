"""SGLang's weight updater, made to receive one bucket ahead.

Why and how: `weight_sync/prefetch.py`.

The functions are hooks of SGLang's plugin registry; announcements without the size of a next
bucket are left to SGLang.

Invariant: the groups of a trainer that was killed end when updates of the next one begin. Each
sender of an update sends something, so a group that was there in a whole update without taking part
has no sender any more. (A group costs threads and connections, and with NCCL device memory.)
"""

import logging
from collections.abc import Callable
from typing import Any

from megatron_async.weight_sync.nccl_errors import errors_raised_by_wait
from megatron_async.weight_sync.prefetch import BucketPrefetcher, next_bytes_of

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
RECEIVE = f"{UPDATER}.receive_weights_from_distributed"
JOIN = f"{UPDATER}.init_weights_update_group"
LEAVE = f"{UPDATER}.destroy_weights_update_group"
BEGIN = f"{UPDATER}.begin_weight_update"
_logger = logging.getLogger(__name__)


def join(original: Callable[..., Any], updater: Any, *given: Any, **named: Any) -> Any:
    """Run `JOIN` so that a lost sender or engine fails the update and not this engine."""
    with errors_raised_by_wait():
        return original(updater, *given, **named)


class AheadHooks:
    """The hooks of one engine process and what they hold between two buckets."""

    def __init__(self) -> None:
        self._ahead = BucketPrefetcher()
        # The groups that were there when the newest update began, and those it was received from.
        self._there: frozenset[str] = frozenset()
        self._used: set[str] = set()

    def receive(self, original: Callable[..., Any], updater: Any, **asked: Any) -> Any:
        """Around `RECEIVE`: named tensors of one bucket."""
        self._used.add(asked["group_name"])
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
        """End what a killed trainer has left, before `BEGIN`, the first call of an update."""
        groups = updater._model_update_group
        left = self._ahead.clear()
        if self._used:  # else that update was only begun, which proves nothing
            left |= self._there - self._used
        for name in sorted(left & groups.keys()):
            groups[name].abort()  # its other ranks are gone: there is nothing to wait for
            ended, message = updater.destroy_weights_update_group(name)
            if not ended:
                _logger.warning("the weight-update group %s of a lost trainer: %s", name, message)
        self._there = frozenset(groups)
        self._used = set()
