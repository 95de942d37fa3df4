"""The language-model head as plain data shared by every backend.

Invariants
- `weight_VD` holds only rows that exist in the vocabulary: padding rows are cut off before a
  backend sees them, so no backend can give them probability.
- `targets_R` are local to the shard; a target of another shard lies outside [0, V).
- `rows_R` lists the rows of `hidden_TD` that take part (tokens with mask 1). A backend reads
  hidden states through it, block by block, so that masked rows cost nothing.

Axes: T tokens of the stream, R rows that take part, D hidden size, V vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = 256 * 2**20
# Stands for -inf where that would make NaN (0 * -inf, -inf - -inf): exp(-1e30) is 0, too.
LOWEST_SHIFT = -1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 inputs accumulate in float64 (the reference's precision), all others in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """A shard of `softmax(hidden · weightᵀ / temperature)` at R targets."""

    hidden_TD: Tensor
    rows_R: Tensor | None
    weight_VD: Tensor
    targets_R: Tensor
    inv_temperature: float
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    chunk_tokens: int | None = None
    deterministic: bool = False

    @property
    def num_rows(self) -> int:
        return int(self.targets_R.shape[0])

    @property
    def accumulate(self) -> torch.dtype:
        return accumulation_dtype(self.hidden_TD.dtype)

    def hidden_block(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of the taking-part hidden states, [stop - start, D]."""
        if self.rows_R is None:
            return self.hidden_TD[start:stop]
        return self.hidden_TD.index_select(0, self.rows_R[start:stop])


@dataclass(frozen=True, eq=False)
class HeadStats:
    """Online-softmax statistics of one shard (or of all, once reduced), each [R].

    With z the scaled logits: `max_R` = max z, `sum_R` = Σ exp(z − max), `target_R` = z at the
    target (0 where the target is elsewhere), `weighted_R` = Σ exp(z − max)·(z − max), needed for
    the entropy only. z may be −inf, max is finite: without a finite z it is the lowest number that
    there is, beside sums of 0 (an empty shard), and the log-prob of a row without any is NaN.
    """

    max_R: Tensor
    sum_R: Tensor
    target_R: Tensor
    weighted_R: Tensor | None

    def log_sum_exp(self) -> Tensor:
        return self.max_R + self.sum_R.log()

    def logprob(self) -> Tensor:
        """log p(target), [R]: subtracting the maximum first keeps large logits exact."""
        return (self.target_R - self.max_R) - self.sum_R.log()

    def entropy(self) -> Tensor | None:
        """H = log Σ exp(z − m) − Σ p·(z − m), [R]."""
        if self.weighted_R is None:
            return None
        return self.sum_R.log() - self.weighted_R / self.sum_R


@dataclass(frozen=True, eq=False)
class HeadCotangents:
    """Factors of backward for each row, each [R].

    dLoss/dlogit_j = (1/τ)·[a·1(j = y) − p_j·(a + b·(z_j − lse + H))] with a = dLoss/dlogp and
    b = dLoss/dH, from d log p_y / dz_j = 1(j = y) − p_j and dH/dz_j = −p_j·(log p_j + H).
    """

    log_sum_exp_R: Tensor
    grad_logprob_R: Tensor
    grad_entropy_R: Tensor | None
    entropy_R: Tensor | None


@dataclass(frozen=True, eq=False)
class HeadGrads:
    """Targets to which backward adds its products; a `None` is not wanted.

    All are added to in place: `dhidden_TD` (hidden's dtype, zeroed by the caller),
    `dweight_VD` (the weight's dtype, or the float32 main gradient).
    """

    dhidden_TD: Tensor | None
    dweight_VD: Tensor | None


class HeadKernels(Protocol):
    """A backend: statistics forward, gradients backward, both on one shard."""

    def stats(self, problem: HeadProblem, *, want_entropy: bool) -> HeadStats: ...

    def grads(self, problem: HeadProblem, cotangents: HeadCotangents, grads: HeadGrads) -> None: ...
