"""Runs work on rank 0 while all other ranks wait: calls to the rollout manager, writing small
files.

Rank 0 may wait for a batch, or for engines to start, much longer than a collective may take: the
time limit `trainer.collective_timeout_seconds` is short, to detect a rank that hangs. So the other
ranks wait for rank 0 in a separate process group with a longer time limit.

Invariants
- The time limit of this group is longer than every time limit of rank 0's own waits. So rank 0
  fails first, with a message that names what it has waited for, and every rank raises this error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_async.config import RunConfig

T = TypeVar("T")
_SLACK_SECONDS = 120.0


def patience_seconds(config: RunConfig) -> float:
    """Return the largest number of seconds for which the other ranks wait for rank 0.

    This is longer than every time limit of rank 0's own waits, so that rank 0 fails first and
    reports what it has waited for.
    """
    return _SLACK_SECONDS + max(
        config.trainer.wait_for_batch_seconds,
        config.engines.start_timeout_seconds,
        2 * config.weights.timeout_seconds,
        config.checkpoint.timeout_seconds,
        2 * config.eval.timeout_seconds,
    )


@dataclass(frozen=True)
class RankZero:
    """Runs functions on rank 0 and gives every rank the result.

    `group` is the process group in which the other ranks wait for rank 0. None means the default
    group, which has the shorter time limit of other collectives.
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def with_timeout(cls, seconds: float) -> "RankZero":
        """Create a `RankZero` in which ranks wait for up to `seconds`. All ranks must call this
        together."""
        return cls(dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo"))

    def barrier(self) -> None:
        """Wait until every rank has called this method."""
        dist.barrier(group=self.group)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank. If `work` raises an error,
        raise the error on every rank. All ranks must call this together."""
        box: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                box[0] = work()
            except Exception as error:
                box[1] = error
                dist.broadcast_object_list(box, src=0, group=self.group)
                raise
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]
