"""Provides the plain torch reference of `token_logprob`, with full logits and autograd's own
gradients.

It stores a [T × V] tensor and supports only one shard. Every other implementation is tested against
it in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_async_kernels.head_types import accumulation_dtype


def reference_token_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    token_mask_T: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(hidden · weightᵀ / temperature) at the target tokens, and the entropy of
    the softmax, from all logits at once; both results are [T].

    Rows of `weight_VD` at or beyond `vocab_size` are ignored. Masked tokens get 0 for both results.
    """
    dtype = accumulation_dtype(hidden_TD.dtype)
    rows = weight_VD.shape[0] if vocab_size is None else vocab_size
    logits_TV = hidden_TD.to(dtype) @ weight_VD[:rows].to(dtype).t()
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    keep_T = (
        torch.ones_like(targets_T, dtype=torch.bool)
        if token_mask_T is None
        else token_mask_T.to(torch.bool)
    )
    safe_T = torch.where(keep_T, targets_T, 0).to(torch.int64)
    picked_T = logprobs_TV.gather(1, safe_T[:, None])[:, 0]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1)
    return torch.where(keep_T, picked_T, 0.0), torch.where(keep_T, entropy_T, 0.0)
