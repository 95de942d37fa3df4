"""Needs of a reinforcement-learning batch beside the optimizer: the loss of its microbatches,
and the log-probs of a frozen reference policy.

Invariant: the loss sees only trained rows, in the order of the packed stream, so nothing of the
size of the prompts is moved or computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron_async_kernels.loss_types import Denominators, LossOutput

from megatron_async.algorithms.algorithm import Algorithm
from megatron_async.trainer.forward import LossFunction, Microbatch
from megatron_async.trainer.packed import TokenLogprobs
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray


@dataclass(frozen=True, eq=False)
class TrainedRows:
    """The trained rows of a microbatch, with the field names that the algorithm reads.

    Per-token arrays have R entries; `cu_seqlens_S1` are the borders of the sequences among them.
    The per-sequence arrays of a batch are not read by a loss and are left out.
    """

    loss_mask_T: FloatArray
    rollout_logprobs_T: FloatArray
    lag_T: Any
    cu_seqlens_S1: torch.Tensor
    advantages_T: FloatArray | None
    old_logprobs_T: FloatArray | None
    ref_logprobs_T: FloatArray | None
    is_weights_T: FloatArray | None
    rewards_S: None = None
    group_ids_S: None = None
    prompt_lengths_S: None = None
    resumed_S: None = None


def trained_rows(batch: TokenBatch, micro: Microbatch) -> TrainedRows:
    """The rows of `micro` out of the batch that it was made from."""

    def take(array_T: FloatArray | None) -> FloatArray | None:
        return None if array_T is None else array_T[micro.rows_R]

    return TrainedRows(
        loss_mask_T=batch.loss_mask_T[micro.rows_R],
        rollout_logprobs_T=batch.rollout_logprobs_T[micro.rows_R],
        lag_T=batch.lag_T[micro.rows_R],
        cu_seqlens_S1=micro.cu_rows_S1,
        advantages_T=take(batch.advantages_T),
        old_logprobs_T=take(batch.old_logprobs_T),
        ref_logprobs_T=take(batch.ref_logprobs_T),
        is_weights_T=take(batch.is_weights_T),
    )


def policy_gradient_loss(
    algorithm: Algorithm, batch: TokenBatch, denominators: Denominators
) -> LossFunction:
    """The algorithm's loss of a prepared minibatch."""

    def loss(micro: Microbatch, output: TokenLogprobs) -> LossOutput:
        rows = trained_rows(batch, micro)
        return algorithm.loss(
            algorithm.inputs(rows, output.logprobs_R, output.entropy_R), denominators
        )

    return loss


class ReferencePolicy:
    """The weights that a model had when this was made, kept in host memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._frozen = self._snapshot()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference weights inside, bit-exactly its own after."""
        own = self._snapshot()
        try:
            self._install(self._frozen)
            yield
        finally:
            self._install(own)

    def _snapshot(self) -> list[torch.Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self._model.parameters()]

    @torch.no_grad()
    def _install(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def mean_of(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it."""
    names = {name: None for one in metrics for name in one}
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}
