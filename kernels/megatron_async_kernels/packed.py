"""Reductions over the sequences of a packed stream.

Invariant: sums have a fixed order (no atomics), so equal inputs give equal bits.
"""

from __future__ import annotations

import torch


def lengths_S(cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Tokens of each sequence, int64 [S]."""
    return cu_seqlens_S1.diff().to(torch.int64)


def spread(
    values_S: torch.Tensor, cu_seqlens_S1: torch.Tensor, *, tokens: int | None = None
) -> torch.Tensor:
    """Each sequence's value at each of its tokens, [T]; a GPU is waited for unless T is given."""
    return values_S.repeat_interleave(lengths_S(cu_seqlens_S1), output_size=tokens)


def segment_sum(values_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Sum over each sequence, [S]; 0 where it is empty."""
    return torch.segment_reduce(
        values_T, "sum", lengths=lengths_S(cu_seqlens_S1), unsafe=True, initial=0.0
    )


def segment_max(values_T: torch.Tensor, cu_seqlens_S1: torch.Tensor) -> torch.Tensor:
    """Largest value of each sequence, [S]; -inf where it is empty."""
    return torch.segment_reduce(
        values_T, "max", lengths=lengths_S(cu_seqlens_S1), unsafe=True, initial=float("-inf")
    )


def masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Values where the mask is not 0, else exactly 0 (whatever stood there, NaN included)."""
    return torch.where(mask_T != 0, values_T, torch.zeros_like(values_T))
