"""Computes token log-probs in plain torch, chunk by chunk; CPU runs use this version.

Invariants
- No tensor grows with T * V (tokens times vocabulary). Logits exist only for one block at a time,
  some tokens times some vocabulary rows, whose temporaries stay within `workspace_bytes`
  (`plan_chunks`).
- Computations are in float32 for inputs of any type, but in float64 for float64 inputs.
- The order of all sums depends on shapes only, so results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async_kernels.head_types import (
    LOWEST_SHIFT,
    HeadCotangents,
    HeadGrads,
    HeadProblem,
    HeadStats,
)

MAX_CHUNK_TOKENS = 2048
MAX_CHUNK_VOCAB = 8192


@dataclass(frozen=True)
class ChunkPlan:
    """Size of one block of logits: number of rows (`tokens`), number of vocabulary columns
    (`vocab`), and number of bytes of all its temporaries (`bytes`)."""

    tokens: int
    vocab: int
    bytes: int


@dataclass(frozen=True, eq=False)
class _Buffers:
    """Memory for the logits of one block and for a second array of the same size (None if it is not
    needed). It is used again for every block, so that memory is allocated only once."""

    logits: Tensor
    scratch: Tensor | None

    def first(self, rows: int, columns: int) -> Tensor:
        return self.logits[: rows * columns].view(rows, columns)

    def second(self, rows: int, columns: int) -> Tensor:
        assert self.scratch is not None
        return self.scratch[: rows * columns].view(rows, columns)


def _buffers(problem: HeadProblem, plan: ChunkPlan, *, two: bool) -> _Buffers:
    options = {"dtype": problem.accumulate, "device": problem.hidden_TD.device}
    size = plan.tokens * plan.vocab
    return _Buffers(torch.empty(size, **options), torch.empty(size, **options) if two else None)


def plan_chunks(problem: HeadProblem) -> ChunkPlan:
    """Choose the largest blocks of logits whose temporaries fit into `workspace_bytes`.

    A block needs memory for two arrays [tokens, vocab] (logits; probabilities or products), three
    arrays [tokens, D] (hidden states, their gradient, and a cast copy), and, if the weight is in
    low precision, two arrays [vocab, D] (the weight in higher precision, and its gradient).

    Raises:
        ValueError: Not even one row and one column fit into `workspace_bytes`.
    """
    element = torch.empty((), dtype=problem.accumulate).element_size()
    hidden_size = int(problem.weight_VD.shape[1])
    vocab_rows = int(problem.weight_VD.shape[0])
    upcast = problem.weight_VD.dtype != problem.accumulate
    per_column = 2 * hidden_size * element if upcast else 0

    tokens = max(1, min(problem.num_rows, problem.chunk_tokens or MAX_CHUNK_TOKENS))
    while tokens > 1 and 3 * tokens * hidden_size * element > problem.workspace_bytes // 2:
        tokens = (tokens + 1) // 2
    fixed = 3 * tokens * hidden_size * element
    per_column += 2 * tokens * element
    vocab = min(vocab_rows, MAX_CHUNK_VOCAB, (problem.workspace_bytes - fixed) // per_column)
    if vocab < 1 and vocab_rows > 0:
        raise ValueError(
            f"workspace_bytes={problem.workspace_bytes} is too small for hidden size {hidden_size}"
        )
    vocab = max(vocab, 1)
    return ChunkPlan(tokens=tokens, vocab=vocab, bytes=fixed + vocab * per_column)


def _blocks(total: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _scaled_logits(
    problem: HeadProblem, buffers: _Buffers, hidden_CD: Tensor, weight_BD: Tensor
) -> Tensor:
    """Compute hidden · weightᵀ / temperature for C tokens and B rows of the vocabulary; return it
    as [C, B], stored in the first of the two buffers."""
    logits_CB = buffers.first(hidden_CD.shape[0], weight_BD.shape[0])
    torch.mm(hidden_CD, weight_BD.t(), out=logits_CB)
    if problem.inv_temperature != 1.0:
        logits_CB *= problem.inv_temperature
    return logits_CB


def _local_targets(
    problem: HeadProblem, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return, for each token of a block, the column of its target within the block, and whether the
    target is in the block; both [C]. Columns of targets outside are clamped to the block, so that
    they are valid indices."""
    column_C = problem.targets_R[rows[0] : rows[1]] - columns[0]
    width = columns[1] - columns[0]
    inside_C = (column_C >= 0) & (column_C < width)
    return column_C.clamp(0, width - 1), inside_C


class ChunkedKernels:
    """Backend of `token_logprob` in plain torch, for any device and dtype."""

    def stats(self, problem: HeadProblem, *, want_entropy: bool) -> HeadStats:
        """Compute the softmax statistics of one vocabulary shard, block by block: maximum, sum of
        exponentials, target logit and, if wanted, the sum that the entropy needs, each [R]."""
        plan = plan_chunks(problem)
        options = {"dtype": problem.accumulate, "device": problem.hidden_TD.device}
        sum_R = torch.zeros(problem.num_rows, **options)
        max_R = torch.full_like(sum_R, torch.finfo(sum_R.dtype).min)
        target_R = torch.zeros_like(sum_R)
        weighted_R = torch.zeros_like(sum_R) if want_entropy else None
        stats = HeadStats(max_R, sum_R, target_R, weighted_R)
        buffers = _buffers(problem, plan, two=want_entropy)
        for rows in _blocks(problem.num_rows, plan.tokens):
            hidden_CD = problem.hidden_block(*rows).to(problem.accumulate)
            for columns in _blocks(problem.weight_VD.shape[0], plan.vocab):
                _merge_block(problem, buffers, stats, hidden_CD, rows, columns)
        return stats

    def grads(self, problem: HeadProblem, cotangents: HeadCotangents, grads: HeadGrads) -> None:
        """Compute the gradients of hidden states and weight for one vocabulary shard into `grads`.
        Each block of logits is recomputed, converted to dLoss/dlogits, and multiplied with the
        weight and the hidden states."""
        plan = plan_chunks(problem)
        buffers = _buffers(problem, plan, two=cotangents.grad_entropy_R is not None)
        for rows in _blocks(problem.num_rows, plan.tokens):
            hidden_CD = problem.hidden_block(*rows).to(problem.accumulate)
            dhidden_CD = torch.zeros_like(hidden_CD) if grads.dhidden_TD is not None else None
            for columns in _blocks(problem.weight_VD.shape[0], plan.vocab):
                weight_BD = problem.weight_VD[columns[0] : columns[1]].to(problem.accumulate)
                dlogits_CB = _dlogits(
                    problem, buffers, cotangents, hidden_CD, weight_BD, rows, columns
                )
                _add_products(grads, hidden_CD, dhidden_CD, weight_BD, dlogits_CB, columns)
            if grads.dhidden_TD is not None and dhidden_CD is not None:
                dhidden_CD = dhidden_CD.to(grads.dhidden_TD.dtype)
                if problem.rows_R is None:
                    grads.dhidden_TD[rows[0] : rows[1]] = dhidden_CD
                else:
                    grads.dhidden_TD[problem.rows_R[rows[0] : rows[1]]] = dhidden_CD


def _merge_block(
    problem: HeadProblem,
    buffers: _Buffers,
    stats: HeadStats,
    hidden_CD: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> None:
    """Merge one block of logits into the running softmax statistics of its rows, in place."""
    at = slice(*rows)
    weight_BD = problem.weight_VD[columns[0] : columns[1]].to(problem.accumulate)
    logits_CB = _scaled_logits(problem, buffers, hidden_CD, weight_BD)
    column_C, inside_C = _local_targets(problem, rows, columns)
    picked_C = logits_CB.gather(1, column_C[:, None])[:, 0]
    stats.target_R[at] = torch.where(inside_C, picked_C, stats.target_R[at])

    new_max_C = torch.maximum(stats.max_R[at], logits_CB.amax(dim=1))
    shift_C = (stats.max_R[at] - new_max_C).clamp(min=LOWEST_SHIFT)
    scale_C = shift_C.exp()
    logits_CB -= new_max_C[:, None]
    if stats.weighted_R is None:
        exp_CB = logits_CB.exp_()
    else:
        exp_CB = torch.exp(logits_CB, out=buffers.second(*logits_CB.shape))
        carried_C = (stats.weighted_R[at] + stats.sum_R[at] * shift_C) * scale_C
        centered_CB = logits_CB.clamp_(min=LOWEST_SHIFT)
        stats.weighted_R[at] = carried_C + centered_CB.mul_(exp_CB).sum(dim=1)
    stats.sum_R[at] = stats.sum_R[at] * scale_C + exp_CB.sum(dim=1)
    stats.max_R[at] = new_max_C


def _add_products(
    grads: HeadGrads,
    hidden_CD: Tensor,
    dhidden_CD: Tensor | None,
    weight_BD: Tensor,
    dlogits_CB: Tensor,
    columns: tuple[int, int],
) -> None:
    """Multiply one block of dLoss/dlogits with the weight, and add the product to the gradient of
    the hidden states; multiply it with the hidden states, and add the product to the gradient of
    the weight."""
    at = slice(*columns)
    if dhidden_CD is not None:
        dhidden_CD.addmm_(dlogits_CB, weight_BD)
    if grads.dweight_VD is not None:
        _add_product(grads.dweight_VD[at], dlogits_CB.t(), hidden_CD)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute out += left · right. If `out` has another dtype than the factors, the product is
    computed in the factors' dtype and then cast."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += (left @ right).to(out.dtype)


def _dlogits(
    problem: HeadProblem,
    buffers: _Buffers,
    cotangents: HeadCotangents,
    hidden_CD: Tensor,
    weight_BD: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> Tensor:
    """Compute the gradient of the loss with respect to one block of logits before their division by
    the temperature, [C, B], by the formula of `HeadCotangents`."""
    at = slice(*rows)
    logits_CB = _scaled_logits(problem, buffers, hidden_CD, weight_BD)
    logits_CB -= cotangents.log_sum_exp_R[at, None]
    grad_C = cotangents.grad_logprob_R[at]
    if cotangents.grad_entropy_R is None or cotangents.entropy_R is None:
        dlogits_CB = logits_CB.exp_().mul_(-grad_C[:, None])
    else:
        dlogits_CB = torch.exp(logits_CB, out=buffers.second(*logits_CB.shape))
        logits_CB.clamp_(min=LOWEST_SHIFT).add_(cotangents.entropy_R[at, None])
        logits_CB *= cotangents.grad_entropy_R[at, None]
        logits_CB += grad_C[:, None]
        dlogits_CB.mul_(logits_CB).neg_()
    column_C, inside_C = _local_targets(problem, rows, columns)
    dlogits_CB.scatter_add_(1, column_C[:, None], torch.where(inside_C, grad_C, 0.0)[:, None])
    if problem.inv_temperature != 1.0:
        dlogits_CB *= problem.inv_temperature
    return dlogits_CB
