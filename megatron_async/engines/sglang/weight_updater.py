"""Hooks that make SGLang's weight updater receive one bucket ahead; `weight_sync/prefetch.py`
explains it.

The hooks use SGLang's plugin registry. Announcements that lack the size of the next bucket are
handled by SGLang.

A group here is a torch process group over which one sender (a trainer rank) broadcasts weights to
the engines. It costs threads and connections, and with NCCL device memory.

Invariant: the groups of a killed trainer are ended when updates of the next trainer begin. A group
with a posted receive is ended at the first update. Another group is ended after an update in which
nothing was received over it: every sender broadcasts at least one bucket in each update, so the
sender of this group no longer exists.
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
    """Hook around `JOIN`: a lost sender or engine then fails the update, but not this engine."""
    with errors_raised_by_wait():
        return original(updater, *given, **named)


class AheadHooks:
    """Hooks around SGLang's weight updater in one engine process: while SGLang loads a bucket
    (tensors that are sent together), the next one is already received.

    The object keeps the posted receives, and the groups of the current update.
    """

    def __init__(self) -> None:
        self._ahead = BucketPrefetcher()
        # Groups that existed when the newest update began, and groups from which it was received.
        self._there: frozenset[str] = frozenset()
        self._used: set[str] = set()

    def receive(self, original: Callable[..., Any], updater: Any, **asked: Any) -> Any:
        """Hook around `RECEIVE`: return the named tensors of one bucket, and post the next
        receive."""
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
        """Hook around `LEAVE`: abort the group first if a receive is posted, since leaving would
        wait for it."""
        if self._ahead.forget(group_name):
            updater._model_update_group[group_name].abort()
        left: tuple[bool, str] = original(updater, group_name)
        return left

    def begin(self, updater: Any) -> None:
        """Hook before `BEGIN`, the first call of an update: end the groups that a killed trainer
        has left."""
        groups = updater._model_update_group
        left = self._ahead.clear()
        if self._used:
            # Groups that the previous update did not use belong to lost trainers. If it used none,
            # it was only begun, and nothing is known about the groups.
            left |= self._there - self._used
        for name in sorted(left & groups.keys()):
            # Abort the group first: its other ranks are dead, and a normal end would wait for them.
            groups[name].abort()
            ended, message = updater.destroy_weights_update_group(name)
            if not ended:
                _logger.warning("the weight-update group %s of a lost trainer: %s", name, message)
        self._there = frozenset(groups)
        self._used = set()
