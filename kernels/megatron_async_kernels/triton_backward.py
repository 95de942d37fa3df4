# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Provides the backward kernels of the language-model head (output projection and softmax): one
computes dLoss/dlogits of a block, and one adds a matrix product to a matrix.

Invariants
- dLoss/dlogits exists for one block of rows and vocabulary columns at a time, in the type of hidden
  states and weight, and is written once. The logits themselves are never written to memory.
- `accumulate_product_kernel` sums in a fixed order (no split of the inner dimension, no atomics).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async_kernels.triton_tiles import (
    column_parts,
    finite_below,
    grouped_tile,
    logits_tile,
    scaled_logits,
)


@triton.jit
def store_dlogits(
    acc,
    columns,
    rows,
    target,
    lse,
    grad,
    offset,
    entropy_grad,
    dlogits,
    num_rows,
    num_columns,
    dlogits_stride,
    inv_temperature,
    SPEC: tl.constexpr,
):
    """Compute dLoss/dlogits of one tile by the formula in `dlogits_kernel`, and store it. In the
    symbols of that formula, `grad` is a, `entropy_grad` is b, and `offset` is a + b * H.

    Positions are computed with 32 bits, so a block of dLoss/dlogits must have less than 2 ** 31
    elements. With the default workspace it has at most 2 ** 27.
    """
    logits = scaled_logits(acc, columns, num_columns, inv_temperature)
    log_p = logits - lse[:, None]
    pull = tl.exp(log_p)
    if SPEC.entropy:
        pull = pull * (offset[:, None] + entropy_grad[:, None] * finite_below(log_p))
    else:
        pull = pull * grad[:, None]
    hit = columns[None, :] == target[:, None]
    value = (tl.where(hit, grad[:, None], 0.0) - pull) * inv_temperature
    at = rows[:, None] * dlogits_stride + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(dlogits + at, value.to(dlogits.dtype.element_ty), mask=inside)


@triton.jit
def dlogits_kernel(
    hidden,
    weight,
    targets,
    log_sum_exp,
    grad_logprob,
    grad_entropy,
    entropy,
    dlogits,
    num_rows,
    num_columns,
    depth,
    dlogits_stride,
    first_column,
    inv_temperature,
    SPEC: tl.constexpr,
):
    """Compute dLoss/dlogits of one tile: (1 / τ) * (a * [j = y] - p_j * (a + b * (z_j - lse + H)))
    for column j of a row. τ is the temperature, y the target token, a = dLoss/dlogp and b =
    dLoss/dH. z are the scaled logits, with probabilities p, log-sum-exp lse and entropy H.
    `HeadCotangents` derives the formula.

    `weight` has the `num_columns` vocabulary rows of the shard that begin at number `first_column`.
    """
    ROWS: tl.constexpr = SPEC.tile.tokens
    COLUMNS: tl.constexpr = SPEC.tile.vocab
    row_tile, column_tile = grouped_tile(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS), SPEC.tile.group
    )
    row = row_tile * ROWS
    column = column_tile * COLUMNS
    acc = logits_tile(hidden, weight, row, column, num_rows, num_columns, depth, SPEC)
    rows = row + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    target = tl.load(targets + rows, mask=row_inside, other=-1) - first_column
    lse = tl.load(log_sum_exp + rows, mask=row_inside, other=0.0)
    grad = tl.load(grad_logprob + rows, mask=row_inside, other=0.0)
    if SPEC.entropy:
        entropy_grad = tl.load(grad_entropy + rows, mask=row_inside, other=0.0)
        offset = grad + entropy_grad * tl.load(entropy + rows, mask=row_inside, other=0.0)
    else:
        entropy_grad = grad
        offset = grad
    PARTS: tl.constexpr = 2 if SPEC.tile.halves else 1
    parts = column_parts(acc, SPEC)
    first = column + tl.arange(0, COLUMNS // PARTS)
    for part in tl.static_range(PARTS):
        store_dlogits(
            parts[part],
            first + part * (COLUMNS // PARTS),
            rows,
            target,
            lse,
            grad,
            offset,
            entropy_grad,
            dlogits,
            num_rows,
            num_columns,
            dlogits_stride,
            inv_temperature,
            SPEC,
        )


@triton.jit
def accumulate_product_kernel(
    left,
    right,
    out,
    num_rows,
    num_columns,
    depth,
    left_row_stride,
    left_depth_stride,
    right_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute out += left · right for one tile of `out`. `left` [M, K] may have any memory layout;
    `right` [K, N] and `out` [M, N] are row-major."""
    row_tile, column_tile = grouped_tile(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS), GROUP
    )
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    safe_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    safe_columns = tl.minimum(columns, num_columns - 1)
    steps = tl.arange(0, DEPTH)
    left_ptrs = left + safe_rows[:, None] * left_row_stride
    left_ptrs += steps.to(tl.int64)[None, :] * left_depth_stride
    right_ptrs = right + steps.to(tl.int64)[:, None] * right_stride + safe_columns[None, :]
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, depth, DEPTH):
        inside = steps < depth - k
        a = tl.load(left_ptrs, mask=inside[None, :], other=0.0)
        b = tl.load(right_ptrs, mask=inside[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        left_ptrs += DEPTH * left_depth_stride
        right_ptrs += DEPTH * right_stride
    at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside_out = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    before = tl.load(at, mask=inside_out, other=0.0).to(tl.float32)
    tl.store(at, (before + acc).to(out.dtype.element_ty), mask=inside_out)
