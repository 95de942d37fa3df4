"""Work of rank 0 for all ranks while the others wait: calls to the rollout side, small files.

Rank 0 may wait for a batch, or for engines to start, for much longer than a collective may take
(`trainer.collective_timeout_seconds` shows a stuck rank). So the others wait for it in a
group of their own.

Invariants
- That group's limit is longer than any limit that rank 0 itself observes: it is rank 0 that gives
  up first, with a sentence of what it waited for, and every rank raises that.
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
    """Longer than whatever rank 0, or one rank's disk, may take while the others wait."""
    return _SLACK_SECONDS + max(
        config.trainer.wait_for_batch_seconds,
        config.engines.start_timeout_seconds,
        2 * config.weights.timeout_seconds,
        config.checkpoint.timeout_seconds,
        2 * config.eval.timeout_seconds,
    )


@dataclass(frozen=True)
class RankZero:
    """`group` None: the default group with its own limit."""

    group: dist.ProcessGroup | None = None

    @classmethod
    def with_timeout(cls, seconds: float) -> "RankZero":
        """Collective: over a group whose operations may take this long."""
        return cls(dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo"))

    def barrier(self) -> None:
        """Collective: returns once every rank has called it."""
        dist.barrier(group=self.group)

    def run(self, work: Callable[[], T]) -> T:
        """Do it on rank 0 and give every rank the result; an error there is raised everywhere."""
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
