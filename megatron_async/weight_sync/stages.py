"""The ranks that send weights, over gloo groups: a trainer's pipeline stages in turns (see
`turns.py`), or, to engines on the trainer's own GPUs, one rank for each engine side by side.

Invariants
- `join` gives every leader the results of all, so that all of them decide alike.
- A wait for another rank has the group's time limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_async.errors import ComponentFailure
from megatron_async.models.export import stage_leader
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.seats import givers_of, seat_of
from megatron_async.weight_sync.transports.base import Bucket
from megatron_async.weight_sync.transports.tensor import HandedBucket, separate, serialise
from megatron_async.weight_sync.turns import Alone, EarlierStageFailed, TurnToken


class Leaders:
    """Ranks with a sender each, over a gloo group of their own.

    Construct it on every rank, in the same order as other groups; only leaders use it.
    """

    def __init__(self, leaders: list[int], timeout_seconds: float) -> None:
        self._leaders = leaders
        self._group = _gloo(leaders, timeout_seconds)

    @property
    def leads(self) -> bool:
        """Return whether this rank is one of them."""
        return dist.get_rank() in self._leaders

    def join(self, result: Any) -> list[Any]:
        """The results of all leaders, in their order."""
        results: list[Any] = [None] * len(self._leaders)
        dist.all_gather_object(results, result, group=self._group)
        return results


def _gloo(ranks: list[int], timeout_seconds: float) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo")


class StageTurns(Leaders):
    """Turns between the leaders of all pipeline stages."""

    def __init__(self, timeout_seconds: float) -> None:
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        super().__init__([stage_leader(stage) for stage in range(stages)], timeout_seconds)
        self.index = parallel_state.get_pipeline_model_parallel_rank()
        self.last = self.index == stages - 1

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


class SharedGpus(Alone, Leaders):
    """Engines on the GPUs of these ranks (`seats.py`): each has a leader, none waits for another's.

    Construct it on every rank, in the same order as other groups.
    """

    def __init__(self, count: int, tensor: int, timeout_seconds: float) -> None:
        super().__init__([givers_of(e, tensor)[0] for e in range(count)], timeout_seconds)
        groups = [_gloo(givers_of(e, tensor), timeout_seconds) for e in range(count)]
        self._seat = seat_of(dist.get_rank(), count, tensor)
        self._givers = None if self._seat is None else groups[self._seat.engine]
        self._size = tensor

    def mine(self, engines: Sequence[EngineAddress]) -> list[EngineAddress]:
        """The engine on this rank's GPU, if it is among them."""
        seat = self._seat
        return [e for e in engines if seat is not None and e.index == seat.engine]

    def collect(self, tensors: Bucket, by_value: bool) -> HandedBucket:
        """Collective over the engine's givers: a payload for each of its tensor ranks.

        Only the leader gets them, and each giver must keep its bucket until they are loaded.
        """
        seat = self._seat
        if seat is None:
            return HandedBucket([])
        bucket = separate(tensors, by_value)
        payload = serialise(bucket)
        if any(tensor.is_cuda for _, tensor in bucket):
            torch.cuda.synchronize()  # the engine reads what this rank has computed
        found: list[Any] | None = [None] * self._size if seat.leads else None
        dist.gather_object(payload, found, dst=self._leaders[seat.engine], group=self._givers)
        return HandedBucket(bucket, found or [])
