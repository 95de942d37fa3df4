"""Work that rank 0 does for all ranks while they wait: calls to the rollout side, small files.

Rank 0 may wait for a batch, or for engines to start, much longer than a collective may take
(`trainer.collective_timeout_seconds` exists to reveal a stuck rank). So the other ranks wait for it
in a separate process group.

Invariants
- The time limit of that group is longer than any limit that rank 0 observes itself. So rank 0 gives
  up first, with a message that names what it waited for, and every rank raises that error.
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
    """Return the time limit of other ranks that wait for rank 0.

    It is longer than any limit that rank 0 has itself, so that rank 0 fails first and reports the
    cause.
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
    group, whose time limit is that of every collective (see `trainer.parallel`).
    """

    group: dist.ProcessGroup | None = None

    @classmethod
    def with_timeout(cls, seconds: float) -> "RankZero":
        """Create a `RankZero` whose waits may take up to `seconds`. Collective."""
        return cls(dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo"))

    def barrier(self) -> None:
        """Wait until every rank has called this method. Collective."""
        dist.barrier(group=self.group)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; raise its error on every rank.
        Collective."""
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
