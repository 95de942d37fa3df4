"""Describes the language-model head (output projection and softmax) as plain data that every
backend shares.

Invariants
- `weight_VD` has only rows that exist in the vocabulary: padding rows are removed before a backend
  sees them, so no backend can give them probability.
- `targets_R` are local to the shard; a target of another shard is outside [0, V).
- `rows_R` lists the rows of `hidden_TD` that take part (tokens with mask 1). A backend reads hidden
  states through it, block by block, so that masked rows cost nothing.

Axes: T tokens of the stream, R rows that take part, D hidden size, V vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = 256 * 2**20
# Replaces -inf where that would give NaN (0 * -inf, -inf - -inf): exp(-1e30) is 0, too.
LOWEST_SHIFT = -1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are accumulated: float64 for float64 inputs (the reference's
    precision), float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """Inputs of one shard of the head: `softmax(hidden · weightᵀ / temperature)` is evaluated at R
    targets.

    Attributes:
        hidden_TD: Hidden states of all tokens.
        rows_R: Rows of `hidden_TD` that take part; None for all.
        weight_VD: Vocabulary rows of this shard.
        targets_R: Target ids, counted from the first row of this shard.
        inv_temperature: 1 / temperature.
        workspace_bytes: Upper bound on temporaries that are not results.
        chunk_tokens: Upper bound on the rows of a block of the chunked version; None to plan it.
        deterministic: Whether atomics are forbidden.
    """

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
        """Number of tokens that take part (tokens with mask 1), R."""
        return int(self.targets_R.shape[0])

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype in which sums are accumulated."""
        return accumulation_dtype(self.hidden_TD.dtype)

    def hidden_block(self, start: int, stop: int) -> Tensor:
        """Return the hidden states of the rows `start` to `stop` among those that take part, [stop
        - start, D]."""
        if self.rows_R is None:
            return self.hidden_TD[start:stop]
        return self.hidden_TD.index_select(0, self.rows_R[start:stop])


@dataclass(frozen=True, eq=False)
class HeadStats:
    """Online-softmax statistics of one shard, or of all shards once they are reduced; each is [R].

    With z the scaled logits: `max_R` = max z, `sum_R` = Σ exp(z − max), `target_R` = z at the
    target (0 if the target is in another shard), `weighted_R` = Σ exp(z − max)·(z − max), which
    only the entropy needs. z may be −inf, but max is finite: without any finite z (an empty shard)
    it is the lowest finite number and the sums are 0, and the log-prob of a row without any finite
    z is NaN.
    """

    max_R: Tensor
    sum_R: Tensor
    target_R: Tensor
    weighted_R: Tensor | None

    def log_sum_exp(self) -> Tensor:
        """Return log Σ exp(z) of the scaled logits of each row, [R]."""
        return self.max_R + self.sum_R.log()

    def logprob(self) -> Tensor:
        """Return the log-prob of each row's target, [R]. The maximum is subtracted first, which
        keeps large logits exact."""
        return (self.target_R - self.max_R) - self.sum_R.log()

    def entropy(self) -> Tensor | None:
        """Return the entropy H = log Σ exp(z − m) − Σ p·(z − m) of each row's softmax, [R]; None if
        the statistics have no `weighted_R`."""
        if self.weighted_R is None:
            return None
        return self.sum_R.log() - self.weighted_R / self.sum_R


@dataclass(frozen=True, eq=False)
class HeadCotangents:
    """Factors of the backward pass for each row, each [R]: the gradients of log-prob and entropy,
    with the row's log-sum-exp and entropy.

    dLoss/dlogit_j = (1/τ)·[a·1(j = y) − p_j·(a + b·(z_j − lse + H))] with a = dLoss/dlogp and b =
    dLoss/dH, from d log p_y / dz_j = 1(j = y) − p_j and dH/dz_j = −p_j·(log p_j + H).
    """

    log_sum_exp_R: Tensor
    grad_logprob_R: Tensor
    grad_entropy_R: Tensor | None
    entropy_R: Tensor | None


@dataclass(frozen=True, eq=False)
class HeadGrads:
    """Tensors to which the backward pass adds the gradients of hidden states and weight; None where
    a gradient is not needed.

    Both are added to in place: `dhidden_TD` (dtype of the hidden states, zeroed by the caller) and
    `dweight_VD` (dtype of the weight, or the float32 main gradient).
    """

    dhidden_TD: Tensor | None
    dweight_VD: Tensor | None


class HeadKernels(Protocol):
    """Interface of a backend of `token_logprob`: statistics for the forward pass and gradients for
    the backward pass.

    Both methods compute the share of one tensor rank, which may have only some of the vocabulary's
    rows.
    """

    def stats(self, problem: HeadProblem, *, want_entropy: bool) -> HeadStats: ...

    def grads(self, problem: HeadProblem, cotangents: HeadCotangents, grads: HeadGrads) -> None: ...
