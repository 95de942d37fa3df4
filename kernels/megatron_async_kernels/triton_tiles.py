# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Device functions that the head's kernels share: tile order, operand loads, one logits tile.

Invariants
- Operands outside the matrix are read as zero or clamped to the last row; callers mask results,
  so the inner loop carries no row masks.
- Products accumulate in float32; float32 operands multiply as IEEE float32, never as TF32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(pid, num_rows_tiles, num_column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles walk the columns together."""
    per_group = GROUP * num_column_tiles
    first = (pid // per_group) * GROUP
    width = tl.minimum(num_rows_tiles - first, GROUP)
    inside = pid % per_group
    return first + inside % width, inside // width


@triton.jit
def logits_tile(
    hidden,
    weight,
    row,
    column,
    num_rows,
    num_columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """hidden[row:, :] · weight[column:, :]ᵀ, one [ROWS, COLUMNS] tile in float32.

    Both matrices are row-major with `depth` columns. UPCAST converts operands to float32 first
    (the interpreter's bf16 arithmetic is wrong).
    """
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if DESCRIPTORS:
        for k in range(0, depth, DEPTH):
            a = hidden.load([row, k])
            b = weight.load([column, k])
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        columns = tl.minimum(column + tl.arange(0, COLUMNS), num_columns - 1).to(tl.int64)
        steps = tl.arange(0, DEPTH)
        a_ptrs = hidden + rows[:, None] * depth + steps[None, :]
        b_ptrs = weight + columns[:, None] * depth + steps[None, :]
        for k in range(0, depth, DEPTH):
            if EVEN_DEPTH:
                a = tl.load(a_ptrs)
                b = tl.load(b_ptrs)
            else:
                inside = steps[None, :] < depth - k
                a = tl.load(a_ptrs, mask=inside, other=0.0)
                b = tl.load(b_ptrs, mask=inside, other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
            a_ptrs += DEPTH
            b_ptrs += DEPTH
    return acc


@triton.jit
def scaled_logits(acc, bias, columns, num_columns, inv_temperature, HAS_BIAS: tl.constexpr):
    """(acc + bias) / temperature with columns outside the vocabulary at -1e30."""
    if HAS_BIAS:
        bias_B = tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        acc = acc + bias_B[None, :]
    return tl.where((columns < num_columns)[None, :], acc * inv_temperature, -1e30)


@triton.jit
def column_halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and right half of a [ROWS, COLUMNS] tile.

    Epilogues work on one half after the other, so that their temporaries fit into the registers
    that a 128 x 256 accumulator leaves.
    """
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def add_pairs(a0, b0, a1, b1):
    """Sums two quantities in one reduction."""
    return a0 + a1, b0 + b1
