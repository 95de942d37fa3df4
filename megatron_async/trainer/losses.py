"""The losses of microbatches, of reinforcement learning and of fine-tuning; the reference policy.

Invariant: a loss sees only trained rows, in the order of the packed stream, so nothing of the
size of the prompts is moved or computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron_async_kernels import is_loss
from megatron_async_kernels.loss_types import Denominators, LossConfig, LossInputs, LossOutput

from megatron_async.algorithms.algorithm import Algorithm
from megatron_async.algorithms.transfer import HostBuffers
from megatron_async.trainer.forward import LossFunction, Microbatch
from megatron_async.trainer.packed import TokenLogprobs
from megatron_async.trajectory.batch import TokenBatch

_CROSS_ENTROPY = LossConfig(surrogate="sft")


def policy_gradient_loss(
    algorithm: Algorithm, batch: TokenBatch, denominators: Denominators
) -> LossFunction:
    """The algorithm's loss of a prepared minibatch."""

    def loss(micro: Microbatch, output: TokenLogprobs, *, check: bool) -> LossOutput:
        inputs = algorithm.inputs(
            batch,
            output.logprobs_R,
            output.entropy_R,
            rows_R=micro.rows_R,
            cu_seqlens=micro.cu_rows_S1,
        )
        return algorithm.loss(inputs, denominators, check=check)

    return loss


def sft_loss(batch: TokenBatch) -> LossFunction:
    """Cross-entropy over the trained tokens of `batch`, averaged over all of them.

    -(1/N) sum of log pi(token) over all N; its gradient with respect to a log-prob is -1/N. The
    surrogate `sft` of the loss interface is exactly that.
    """
    trained = batch.loss_mask_T != 0
    denominators = Denominators(tokens=float(trained.sum()), sequences=float(batch.num_sequences))

    def loss(micro: Microbatch, output: TokenLogprobs, *, check: bool) -> LossOutput:
        zeros_R = torch.zeros_like(output.logprobs_R, requires_grad=False)
        return is_loss(
            LossInputs(
                logprobs_T=output.logprobs_R.detach(),
                rollout_logprobs_T=zeros_R,
                advantages_T=zeros_R,
                mask_T=torch.ones_like(zeros_R),
                cu_seqlens_S1=micro.cu_rows_S1,
            ),
            _CROSS_ENTROPY,
            denominators,
            check=check,
        )

    return loss


class ReferencePolicy:
    """The weights that a model had when this was made, kept in host memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own = HostBuffers()
        self._frozen = self._snapshot(HostBuffers())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference weights inside, bit-exactly its own after."""
        own = self._snapshot(self._own)
        try:
            self._install(self._frozen)
            yield
        finally:
            self._install(own)

    def _snapshot(self, buffers: HostBuffers) -> list[torch.Tensor]:
        return [
            buffers.copy(place, parameter.detach())
            for place, parameter in enumerate(self._model.parameters())
        ]

    @torch.no_grad()
    def _install(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def mean_of(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it."""
    names = {name: None for one in metrics for name in one}
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}
