# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Provides the device functions that the Triton kernels of the language-model head share (tile
order, operand loads, one tile of logits), and the tile shapes.

Tile shapes are in a table by GPU architecture and element type; there is no autotuner.

Invariants
- Operands outside the matrix are read as zero or clamped to the last row; callers mask results, so
  the inner loop has no row masks.
- Products accumulate in float32; float32 operands multiply as IEEE float32, never as TF32.
- Every entry compiles for its architecture without register spills and within its shared memory
  (`tests/kernels/test_compile.py`; the report is in docs/kernels.md).
- A choice depends on (capability, element size, alignment) only, never on timing, so that two runs
  on the same kind of machine do the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

# Initial value of running maxima: the lowest finite float32, so that no maximum is -inf.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def grouped_tile(pid, num_rows_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Return the (row tile, column tile) of a program, in an order in which GROUP row tiles go
    through the columns together."""
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
    SPEC: tl.constexpr,
):
    """Compute hidden[row:, :] · weight[column:, :]ᵀ for one tile of the size in SPEC (a
    `TileSpec`), in float32.

    Both matrices are row-major with `depth` columns.
    """
    ROWS: tl.constexpr = SPEC.tile.tokens
    COLUMNS: tl.constexpr = SPEC.tile.vocab
    DEPTH: tl.constexpr = SPEC.tile.depth
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if SPEC.tile.descriptors:
        for k in range(0, depth, DEPTH):
            a = hidden.load([row, k])
            b = weight.load([column, k])
            if SPEC.upcast:
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
            if SPEC.even_depth:
                a = tl.load(a_ptrs)
                b = tl.load(b_ptrs)
            else:
                inside = steps[None, :] < depth - k
                a = tl.load(a_ptrs, mask=inside, other=0.0)
                b = tl.load(b_ptrs, mask=inside, other=0.0)
            if SPEC.upcast:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
            a_ptrs += DEPTH
            b_ptrs += DEPTH
    return acc


@triton.jit
def finite_below(value):
    """Replace values below -1e30 (also -inf, because 0 times -inf would be NaN) by -1e30; a NaN
    stays NaN."""
    return tl.where(value < -1e30, -1e30, value)


@triton.jit
def scaled_logits(acc, columns, num_columns, inv_temperature):
    """Return the logits `acc` divided by the temperature, with -inf in columns outside the
    vocabulary."""
    return tl.where((columns < num_columns)[None, :], acc * inv_temperature, float("-inf"))


@triton.jit
def column_parts(tile, SPEC: tl.constexpr):
    """Return a tile as a tuple: the whole tile, or its left and right half if SPEC says so.

    Epilogues work on one half after the other, so that their temporaries fit into the registers
    that a 128 x 256 accumulator leaves free.
    """
    if SPEC.tile.halves:
        ROWS: tl.constexpr = SPEC.tile.tokens
        HALF: tl.constexpr = SPEC.tile.vocab // 2
        parts = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
    else:
        parts = (tile,)
    return parts


@triton.jit
def add_pairs(a0, b0, a1, b1):
    """Add two pairs elementwise; used as a combine function that sums two quantities in one
    reduction."""
    return a0 + a1, b0 + b1


@dataclass(frozen=True)
class TileConfig:
    """Shape of a [tokens × vocab] tile of logits, computed in steps of `depth` along the hidden
    size.

    `group` token tiles go through the vocabulary together, so that the tiles in flight on all
    multiprocessors are about square and their operands stay in L2. `descriptors` loads operands
    through tensor descriptors (TMA on sm_90 and later); it needs rows aligned to 16 bytes. `halves`
    lets the epilogue work on the two halves of the columns one after the other.
    """

    tokens: int
    vocab: int
    depth: int
    warps: int
    stages: int
    group: int = 16
    descriptors: bool = False
    halves: bool = False


@dataclass(frozen=True)
class TileSpec:
    """Compile-time constants of the kernels that compute logits.

    `even_depth`: whether the hidden size is a multiple of the tile's depth. `upcast`: whether
    operands are converted to float32 first (the interpreter's bf16 arithmetic is wrong). `entropy`:
    whether the entropy is needed.
    """

    tile: TileConfig
    even_depth: bool
    upcast: bool
    entropy: bool


@dataclass(frozen=True)
class HeadConfigs:
    """Tile shapes of the three matrix products of the language-model head: softmax statistics,
    dLoss/dlogits, and the product that accumulates gradients.

    With entropy the statistics have one more sum, for which some architectures need another number
    of stages.
    """

    stats: TileConfig
    stats_entropy: TileConfig
    dlogits: TileConfig
    product: TileConfig


# For Triton's interpreter, in which tests run: small tiles, because the shapes in tests are odd. If
# rows are aligned, tiles are read through tensor descriptors, as on sm_90.
INTERPRETER = HeadConfigs(
    stats=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    stats_entropy=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    dlogits=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    product=TileConfig(16, 16, 32, 4, 1, group=2),
)

_WITH_TMA = HeadConfigs(
    stats=TileConfig(128, 256, 64, 8, 4, descriptors=True, halves=True),
    stats_entropy=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
    dlogits=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
    product=TileConfig(128, 128, 64, 8, 3, group=8),
)
_HALF = {
    80: HeadConfigs(
        stats=TileConfig(128, 128, 32, 8, 4),
        stats_entropy=TileConfig(128, 128, 32, 8, 4),
        dlogits=TileConfig(128, 128, 32, 8, 4),
        product=TileConfig(128, 128, 32, 8, 4, group=8),
    ),
    90: _WITH_TMA,
    100: _WITH_TMA,
}
_SINGLE = HeadConfigs(
    stats=TileConfig(64, 64, 32, 4, 3),
    stats_entropy=TileConfig(64, 64, 32, 4, 3),
    dlogits=TileConfig(64, 64, 32, 4, 3),
    product=TileConfig(64, 64, 32, 4, 3, group=8),
)
ARCHITECTURES = tuple(_HALF)


def head_configs(capability: tuple[int, int], dtype: torch.dtype) -> HeadConfigs:
    """Return the tile shapes for a GPU: those of the newest architecture in the table that is not
    newer than `capability`; float32 has its own shapes.

    sm_86 and sm_89 have 99 KiB of shared memory; the sm_80 entries need 64 KiB.
    """
    arch = 10 * capability[0] + capability[1]
    if dtype == torch.float32:
        return _SINGLE
    fitting = [known for known in ARCHITECTURES if known <= arch]
    return _HALF[max(fitting, default=80)]


def without_descriptors(config: TileConfig) -> TileConfig:
    """Return the tile shape for rows that are not aligned to 16 bytes, which are loaded through
    pointers.

    Pointers take registers, so the tile has half as many columns.
    """
    if not config.descriptors:
        return config
    return replace(config, descriptors=False, vocab=config.vocab // 2, halves=False)
