"""The implementations that the head's benchmark runs side by side, each a forward-to-loss function.

Invariants
- Every peer gets the same hidden states, weight and targets, and returns a scalar to differentiate:
  the mean negative log-prob of the taking-part tokens.
- A peer that is not installed, or whose logits would not fit, is left out with a reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron_async_kernels import token_logprob
from torch import Tensor

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Full logits in bf16, their float32 log-softmax and both gradients must fit beside the inputs.
EAGER_BYTES_PER_LOGIT = 14


@dataclass(frozen=True)
class Peer:
    """`run(hidden_TD, weight_VD, targets_T, mask_T)`; `reason` where it cannot run."""

    name: str
    run: LossFunction | None
    reason: str = ""


def ours(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
    logprobs_T = token_logprob(hidden_TD, weight_VD, targets_T, token_mask=mask_T)
    assert isinstance(logprobs_T, Tensor)
    return -logprobs_T.sum() / targets_T.shape[0]


def eager(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
    """Full logits in the inputs' type, cross-entropy in float32; masked tokens ignored after it."""
    logits_TV = hidden_TD @ weight_VD.t()
    losses_T = torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none")
    return (losses_T * mask_T).sum() / targets_T.shape[0]


OURS = Peer("megatron_async", ours)


def peers(tokens: int, vocab: int, free_bytes: int) -> list[Peer]:
    """Ours first, then whatever is installed and fits."""
    found = [OURS]
    if EAGER_BYTES_PER_LOGIT * tokens * vocab < 0.8 * free_bytes:
        found += [Peer("torch eager", eager), Peer("torch.compile", torch.compile(eager))]
    else:
        reason = "full logits do not fit"
        found += [Peer("torch eager", None, reason), Peer("torch.compile", None, reason)]
    found.append(_liger())
    found.append(_cut_cross_entropy())
    return found


def _liger() -> Peer:
    name = "liger-kernel"
    if importlib.util.find_spec("liger_kernel") is None:
        return Peer(name, None, "not installed")
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=-100, reduction="sum")

    def run(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
        labels_T = torch.where(mask_T != 0, targets_T, -100)
        return loss(weight_VD, hidden_TD, labels_T) / targets_T.shape[0]

    return Peer(name, run)


def _cut_cross_entropy() -> Peer:
    name = "cut-cross-entropy"
    if importlib.util.find_spec("cut_cross_entropy") is None:
        return Peer(name, None, "not installed")
    from cut_cross_entropy import linear_cross_entropy

    def run(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, mask_T: Tensor) -> Tensor:
        labels_T = torch.where(mask_T != 0, targets_T, -100)
        total = linear_cross_entropy(hidden_TD, weight_VD, labels_T, reduction="sum")
        return total / targets_T.shape[0]

    return Peer(name, run)
