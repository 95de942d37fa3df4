"""Describes the inputs and results of the language-model head (output projection and softmax) as
plain data, which all backends of `token_logprob` use.

Invariants
- `weight_VD` has only rows that exist in the vocabulary: padding rows are removed before a backend
  sees them, so no backend can give them probability.
- `targets_R` are counted from the first vocabulary row of the shard, so a target of another shard
  is outside [0, V).
- `rows_R` are the indices of the rows of `hidden_TD` that take part (tokens with mask 1). A backend
  reads only these rows, block by block, so that masked rows cost nothing.

Axes: T tokens of the stream, R rows that take part, D hidden size, V vocabulary rows of this shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = 256 * 2**20
# Used instead of -inf where -inf would give NaN (0 * -inf, or -inf - -inf); exp(-1e30) is 0 too.
LOWEST_SHIFT = -1e30


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are accumulated for inputs of `dtype`: float64 for float64,
    with which tests compare against the reference, and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """Inputs of one vocabulary shard of the head, which evaluates softmax(hidden · weightᵀ /
    temperature) at the targets of R tokens.

    Attributes:
        hidden_TD: Hidden states of all tokens.
        rows_R: Rows of `hidden_TD` that take part; None for all.
        weight_VD: Vocabulary rows of this shard.
        targets_R: Target ids, counted from the first row of this shard.
        inv_temperature: 1 / temperature.
        workspace_bytes: Upper bound on the memory of temporaries.
        chunk_tokens: Upper bound on the tokens of a block in the chunked backend; None to choose it
            from `workspace_bytes`.
        deterministic: Whether results must repeat bit for bit, so that atomic additions are
            forbidden.
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
        """Return the hidden states of the tokens that take part, from number `start` to number
        `stop` - 1 among them, as [number of these tokens, D]."""
        if self.rows_R is None:
            return self.hidden_TD[start:stop]
        return self.hidden_TD.index_select(0, self.rows_R[start:stop])


@dataclass(frozen=True, eq=False)
class HeadStats:
    """Softmax statistics of one vocabulary shard, or of all shards after they are reduced; each is
    [R].

    z are a row's logits divided by the temperature. They may be -inf, but `max_R` is always finite:
    if a row has no finite z (for instance in an empty shard), it is the lowest finite number and
    the sums are 0, and the log-prob of the row is NaN.

    Attributes:
        max_R: Largest z.
        sum_R: Sum of exp(z - max_R).
        target_R: z of the target; 0 if the target is in another shard.
        weighted_R: Sum of exp(z - max_R) * (z - max_R), which only the entropy needs; None without.
    """

    max_R: Tensor
    sum_R: Tensor
    target_R: Tensor
    weighted_R: Tensor | None

    def log_sum_exp(self) -> Tensor:
        """Return log(sum of exp(z)) for each row, [R], where z are its logits divided by the
        temperature."""
        return self.max_R + self.sum_R.log()

    def logprob(self) -> Tensor:
        """Return the log-prob of each row's target, [R]. The maximum is subtracted from the
        target's logit before anything is added, so that large logits lose no precision."""
        return (self.target_R - self.max_R) - self.sum_R.log()

    def entropy(self) -> Tensor | None:
        """Return the entropy of each row's softmax, [R]; None if the statistics have no
        `weighted_R`. With the probabilities p, the scaled logits z and m = `max_R`, it is log(sum
        of exp(z - m)) - sum of p * (z - m)."""
        if self.weighted_R is None:
            return None
        return self.sum_R.log() - self.weighted_R / self.sum_R


@dataclass(frozen=True, eq=False)
class HeadCotangents:
    """Values that the backward pass needs for each row, each [R]: the gradients of the loss with
    respect to the row's log-prob and entropy, and the row's log-sum-exp and entropy.

    The gradient with respect to logit j of a row with target y is

        dLoss/dlogit_j = (1 / τ) * (a * [j = y] - p_j * (a + b * (z_j - lse + H)))

    with the temperature τ, the scaled logits z, their probabilities p, their log-sum-exp lse, the
    entropy H, a = dLoss/dlogp and b = dLoss/dH; [j = y] is 1 if j is y, otherwise 0. It follows
    from d log p_y / dz_j = [j = y] - p_j and dH/dz_j = -p_j * (log p_j + H).
    """

    log_sum_exp_R: Tensor
    grad_logprob_R: Tensor
    grad_entropy_R: Tensor | None
    entropy_R: Tensor | None


@dataclass(frozen=True, eq=False)
class HeadGrads:
    """Tensors into which the backward pass computes the gradients; None if a gradient is not
    needed.

    Attributes:
        dhidden_TD: Gradient of the hidden states, in their dtype. The caller has set it to 0; rows
            that take part are written.
        dweight_VD: Gradient of the weight, in the weight's dtype or in float32, to which the pass
            adds.
    """

    dhidden_TD: Tensor | None
    dweight_VD: Tensor | None


class HeadKernels(Protocol):
    """Interface of a backend of `token_logprob`: `stats` computes the forward pass, and `grads` the
    backward pass.

    Both compute the share of one tensor-parallel rank, which may have only some of the vocabulary's
    rows.
    """

    def stats(self, problem: HeadProblem, *, want_entropy: bool) -> HeadStats: ...

    def grads(self, problem: HeadProblem, cotangents: HeadCotangents, grads: HeadGrads) -> None: ...
