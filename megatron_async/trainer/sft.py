"""Supervised fine-tuning: masked cross-entropy as one more loss of the same trainer.

The loss is -(1/N) sum over the N trained tokens of the whole batch of log pi(token); its gradient
with respect to a log-prob is -1/N. The surrogate `sft` of the loss interface is exactly that.
"""

from __future__ import annotations

import torch
from megatron_async_kernels import is_loss
from megatron_async_kernels.loss_types import Denominators, LossConfig, LossInputs, LossOutput

from megatron_async.trainer.forward import LossFunction, Microbatch
from megatron_async.trainer.packed import TokenLogprobs
from megatron_async.trajectory.batch import TokenBatch

_CROSS_ENTROPY = LossConfig(surrogate="sft")


def sft_loss(batch: TokenBatch) -> LossFunction:
    """Cross-entropy over the trained tokens of `batch`, averaged over all of them."""
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
