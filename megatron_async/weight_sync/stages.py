"""Turns between the leaders of a trainer's pipeline stages (see `turns.py`), over a gloo group.

Invariants
- `join` gives every leader the results of all, so that all of them decide alike.
- A wait for another stage has the group's time limit.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.errors import ComponentFailure
from megatron_async.models.export import stage_leader
from megatron_async.weight_sync.turns import EarlierStageFailed, TurnToken


class StageTurns:
    """Turns between the leaders of all pipeline stages, over a gloo group of their own.

    Construct it on every rank, in the same order as other groups; only leaders use it.
    """

    def __init__(self, timeout_seconds: float) -> None:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._leaders = [stage_leader(stage) for stage in range(stages)]
        self._group = dist.new_group(
            self._leaders, timeout=timedelta(seconds=timeout_seconds), backend="gloo"
        )
        self.index = parallel_state.get_pipeline_model_parallel_rank()
        self.last = self.index == stages - 1

    @property
    def leads(self) -> bool:
        """Return whether this rank is the leader of its stage."""
        return dist.get_rank() == self._leaders[self.index]

    def take(self) -> TurnToken:
        if self.index == 0:
            return TurnToken()
        box: list[Any] = [None]
        try:
            dist.recv_object_list(box, src=self._leaders[self.index - 1], group=self._group)
        except RuntimeError as error:
            raise ComponentFailure(
                f"pipeline stage {self.index} waited too long for stage {self.index - 1} to send "
                f"its weights: {error}"
            ) from error
        token: TurnToken = box[0]
        if token.failed:
            raise EarlierStageFailed(f"pipeline stage {self.index - 1} did not send its weights")
        return token

    def hand_on(self, token: TurnToken) -> None:
        if not self.last:
            dist.send_object_list([token], dst=self._leaders[self.index + 1], group=self._group)

    def join(self, result: Any) -> list[Any]:
        """The results of all leaders, by stage."""
        results: list[Any] = [None] * len(self._leaders)
        dist.all_gather_object(results, result, group=self._group)
        return results
