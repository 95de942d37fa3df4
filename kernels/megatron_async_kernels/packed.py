"""Provides reductions over the sequences of packed arrays, which contain the tokens of all
sequences one after the other.

`cu_seqlens_S1` [S + 1] has the start of each of the S sequences, and the end of the last one.

Invariant: sums are computed in a fixed order, without atomic additions, so equal inputs give
results that are equal bit for bit.
"""

from __future__ import annotations

import torch


def lengths_S(cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each sequence, int64 [S]."""
    return cu_seqlens_S1.diff().to(torch.int64)


def spread(
    values_S: torch.Tensor, cu_seqlens_S1: torch.Tensor, *, tokens: int | None = None
) -> torch.Tensor:
    """Repeat the value of each sequence for each of its tokens, [T]. Pass T as `tokens`; without
    it, the host must wait for the GPU to learn it."""
    return values_S.repeat_interleave(lengths_S(cu_seqlens_S1), output_size=tokens)


def segment_sum(values_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Return the sum of the token values of each sequence, [S]; 0 for an empty sequence."""
    return torch.segment_reduce(
        values_T, "sum", lengths=lengths_S(cu_seqlens_S1), unsafe=True, initial=0.0
    )


def segment_max(values_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Return the largest token value of each sequence, [S]; -inf for an empty sequence."""
    return torch.segment_reduce(
        values_T, "max", lengths=lengths_S(cu_seqlens_S1), unsafe=True, initial=float("-inf")
    )


def masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Return the values where the mask is not 0, and exactly 0 elsewhere, whatever the value was
    (NaN included)."""
    return torch.where(mask_T != 0, values_T, torch.zeros_like(values_T))
