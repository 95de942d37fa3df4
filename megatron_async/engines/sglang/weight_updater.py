"""Provides hooks with which SGLang's weight updater receives the next bucket of weights (tensors
that are sent together) while it loads one; see `weight_sync/prefetch.py`.

The hooks use SGLang's plugin registry. Each bucket is announced with the size of the next bucket.
Announcements without this size are left to SGLang, which receives nothing ahead.

A group here is a torch process group over which one sender (a trainer rank) broadcasts weights to
the engines. It costs threads and connections, and with NCCL device memory.

Invariant: the groups of a killed trainer are ended when updates of the next trainer begin. A group
with a posted receive (a receive that has started and waits for its data) is ended at the first
update. Any other group is ended when an update begins after an update in which nothing was received
over it: every sender broadcasts at least one bucket in each update, so the sender of this group no
longer exists.
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
    """Hook around `JOIN`, the call by which an engine joins a group: make errors of the group
    exceptions. If a sender or another engine is lost, the update then fails but this engine
    survives."""
    with errors_raised_by_wait():
        return original(updater, *given, **named)


class AheadHooks:
    """Hooks around SGLang's weight updater in one engine process: while SGLang loads a bucket
    (tensors that are sent together), the next one is already received.

    The object keeps the posted receives (receives that wait for their data), and the groups over
    which buckets were received in the current update.
    """

    def __init__(self) -> None:
        self._ahead = BucketPrefetcher()
        # Groups that existed when the newest update began, and groups over which a bucket was
        # received in it.
        self._there: frozenset[str] = frozenset()
        self._used: set[str] = set()

    def receive(self, original: Callable[..., Any], updater: Any, **asked: Any) -> Any:
        """Hook around `RECEIVE`, the call that receives a bucket: return the named tensors of the
        bucket, and start to receive the next bucket."""
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
        """Hook around `LEAVE`, the call by which an engine leaves a group. If a receive of the
        group still waits for its data, abort the group first, because leaving would wait for the
        receive."""
        if self._ahead.forget(group_name):
            updater._model_update_group[group_name].abort()
        left: tuple[bool, str] = original(updater, group_name)
        return left

    def begin(self, updater: Any) -> None:
        """Hook before `BEGIN`, the first call of an update: end the groups whose trainer was
        killed."""
        groups = updater._model_update_group
        left = self._ahead.clear()
        if self._used:
            # Groups over which nothing was received in the previous update belong to lost trainers.
            # If nothing was received over any group, the previous update stopped before its first
            # bucket, and it shows nothing about the groups.
            left |= self._there - self._used
        for name in sorted(left & groups.keys()):
            # Abort the group first: its other ranks are dead, and a normal end would wait for them.
            groups[name].abort()
            ended, message = updater.destroy_weights_update_group(name)
            if not ended:
                _logger.warning("the weight-update group %s of a lost trainer: %s", name, message)
        self._there = frozenset(groups)
        self._used = set()
