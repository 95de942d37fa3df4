# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Provides the forward kernels of the language-model head (output projection and softmax), which
compute softmax statistics tile by tile over the vocabulary.

Invariants
- A program of the kernel processes ROWS tokens and one split of the vocabulary, which is a number
  of consecutive tiles. For each token it writes the maximum, the sum and, if needed, the entropy
  term. So the partial statistics are [splits, R], and no array is [T, V].
- A target's logit is written only by the program whose split contains the target, so no atomic
  operations are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_async_kernels.triton_tiles import (
    LOWEST,
    add_pairs,
    column_parts,
    finite_below,
    grouped_tile,
    logits_tile,
    scaled_logits,
)


@triton.jit
def update_stats(
    acc,
    columns,
    target,
    num_columns,
    inv_temperature,
    running_max,
    running_sum,
    running_weighted,
    picked,
    SPEC: tl.constexpr,
):
    """Merge the logits of one tile into each row's running statistics (max, sum, weighted sum,
    target logit), and return them.

    Logits may be -inf, as those of columns outside the vocabulary are. NaN and +inf make the sums
    NaN.
    """
    logits = scaled_logits(acc, columns, num_columns, inv_temperature)
    hit = columns[None, :] == target[:, None]
    picked += tl.sum(tl.where(hit, logits, 0.0), axis=1)
    new_max = tl.maximum(running_max, tl.max(logits, axis=1))
    shift = finite_below(running_max - new_max)
    scale = tl.exp(shift)
    centered = logits - new_max[:, None]
    exps = tl.exp(centered)
    if SPEC.entropy:
        tile_sum, tile_weighted = tl.reduce((exps, exps * finite_below(centered)), 1, add_pairs)
        running_weighted = (running_weighted + running_sum * shift) * scale + tile_weighted
        running_sum = running_sum * scale + tile_sum
    else:
        running_sum = running_sum * scale + tl.sum(exps, axis=1)
    return new_max, running_sum, running_weighted, picked


@triton.jit
def head_stats_kernel(
    hidden,
    weight,
    targets,
    max_out,
    sum_out,
    weighted_out,
    target_out,
    num_rows,
    num_columns,
    depth,
    out_stride,
    columns_per_split,
    num_splits,
    inv_temperature,
    SPEC: tl.constexpr,
):
    """Compute the partial softmax statistics of one tile of tokens over one split of the
    vocabulary, which has `columns_per_split` rows.

    `columns_per_split` is a multiple of the tile's columns. `max_out`, `sum_out` and `weighted_out`
    are [num_splits, out_stride]; `targets` and `target_out` are [num_rows]. The caller has set
    `target_out` to 0, because only targets in the split are written.
    """
    ROWS: tl.constexpr = SPEC.tile.tokens
    COLUMNS: tl.constexpr = SPEC.tile.vocab
    row_tile, split = grouped_tile(
        tl.program_id(0), tl.cdiv(num_rows, ROWS), num_splits, SPEC.tile.group
    )
    row = row_tile * ROWS
    rows = row + tl.arange(0, ROWS)
    row_inside = rows < num_rows
    target = tl.load(targets + rows, mask=row_inside, other=-1)

    running_max = tl.full((ROWS,), LOWEST, dtype=tl.float32)
    running_sum = tl.zeros((ROWS,), dtype=tl.float32)
    running_weighted = tl.zeros((ROWS,), dtype=tl.float32)
    picked = tl.zeros((ROWS,), dtype=tl.float32)
    PARTS: tl.constexpr = 2 if SPEC.tile.halves else 1
    first = split * columns_per_split
    last = tl.minimum(first + columns_per_split, num_columns)
    for column in range(first, last, COLUMNS):
        acc = logits_tile(hidden, weight, row, column, num_rows, num_columns, depth, SPEC)
        parts = column_parts(acc, SPEC)
        for part in tl.static_range(PARTS):
            running_max, running_sum, running_weighted, picked = update_stats(
                parts[part],
                column + part * (COLUMNS // PARTS) + tl.arange(0, COLUMNS // PARTS),
                target,
                num_columns,
                inv_temperature,
                running_max,
                running_sum,
                running_weighted,
                picked,
                SPEC,
            )

    at = split.to(tl.int64) * out_stride + rows
    tl.store(max_out + at, running_max, mask=row_inside)
    tl.store(sum_out + at, running_sum, mask=row_inside)
    if SPEC.entropy:
        tl.store(weighted_out + at, running_weighted, mask=row_inside)
    holds = (target >= first) & (target < last)
    tl.store(target_out + rows, picked, mask=row_inside & holds)


@triton.jit
def combine_kernel(
    max_in,
    sum_in,
    weighted_in,
    max_out,
    sum_out,
    weighted_out,
    num_rows,
    num_splits,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Combine the partial softmax statistics of all splits of the vocabulary, [num_splits, R], into
    the statistics of the shard, [R], in the order of the splits."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    best = tl.full((BLOCK,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    weighted = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(num_splits):
        at = split * num_rows + rows
        other_max = tl.load(max_in + at, mask=inside, other=0.0)
        other_sum = tl.load(sum_in + at, mask=inside, other=1.0)
        new_max = tl.maximum(best, other_max)
        shift = finite_below(best - new_max)
        other_shift = finite_below(other_max - new_max)
        scale = tl.exp(shift)
        other_scale = tl.exp(other_shift)
        if ENTROPY:
            other_weighted = tl.load(weighted_in + at, mask=inside, other=0.0)
            weighted = (weighted + total * shift) * scale
            weighted += (other_weighted + other_sum * other_shift) * other_scale
        total = total * scale + other_sum * other_scale
        best = new_max
    tl.store(max_out + rows, best, mask=inside)
    tl.store(sum_out + rows, total, mask=inside)
    if ENTROPY:
        tl.store(weighted_out + rows, weighted, mask=inside)
