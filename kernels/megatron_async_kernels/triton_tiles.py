# Kernel arguments are tensors and constants of the Triton compiler, which types them itself.
# mypy: allow-untyped-defs
"""Provides device functions that several Triton kernels of the language-model head (output
projection and softmax) use, such as the computation of one tile of logits, and the table of tile
shapes.

Tile shapes are in a table by GPU architecture and element type; there is no autotuner.

Invariants
- A tile may extend beyond its matrix. Elements outside are read as 0, or as those of the last row,
  and callers mask the results, so that the inner loop needs no masks for rows.
- Products accumulate in float32; float32 operands multiply as IEEE float32, never as TF32.
- Every entry compiles for its architecture without register spills and within its shared memory
  (`tests/kernels/test_compile.py`; the report is in docs/kernels.md).
- The tile shape depends only on GPU architecture, element size and alignment, never on measured
  times, so that two runs on the same kind of machine compute the same results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

# Initial value of running maxima. It is the lowest finite float32 and not -inf, so that differences
# to it are never NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def grouped_tile(pid, num_rows_tiles, num_column_tiles, GROUP: tl.constexpr):
    """Return the row tile and the column tile that program `pid` computes. Consecutive programs
    compute GROUP row tiles with the same column tile before the next column tile, so that they
    share operands in the cache."""
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
    """Replace values below -1e30 by -1e30; a NaN stays NaN. In particular -inf is replaced, because
    0 * -inf would be NaN."""
    return tl.where(value < -1e30, -1e30, value)


@triton.jit
def scaled_logits(acc, columns, num_columns, inv_temperature):
    """Return the logits `acc` divided by the temperature, with -inf in columns outside the
    vocabulary."""
    return tl.where((columns < num_columns)[None, :], acc * inv_temperature, float("-inf"))


@triton.jit
def column_parts(tile, SPEC: tl.constexpr):
    """Return a tuple with the whole tile or, if SPEC asks for it, with the tile's left and right
    half.

    The code that follows the matrix product processes one part after the other. With halves, its
    temporaries fit into the registers that an accumulator of 128 x 256 elements leaves free.
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
    """Add two pairs of values elementwise. It is passed to a Triton reduction as the function that
    combines elements, so that the reduction sums two quantities at once."""
    return a0 + a1, b0 + b1


@dataclass(frozen=True)
class TileConfig:
    """Shape of a [tokens × vocab] tile of logits, computed in steps of `depth` along the hidden
    size.

    `group` tiles of tokens are processed with the same part of the vocabulary at about the same
    time. Together, the tiles that run on all multiprocessors are then about square, and their
    operands stay in the L2 cache. With `descriptors`, operands are loaded through tensor
    descriptors (TMA on sm_90 and later), which requires rows that are aligned to 16 bytes. With
    `halves`, the code after the matrix product processes the left and the right half of the tile
    one after the other.
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

    `even_depth` says whether the hidden size is a multiple of the tile's depth. `upcast` says
    whether operands are converted to float32 before they are multiplied, which Triton's interpreter
    needs because its bf16 arithmetic is wrong. `entropy` says whether the entropy is needed.
    """

    tile: TileConfig
    even_depth: bool
    upcast: bool
    entropy: bool


@dataclass(frozen=True)
class HeadConfigs:
    """Tile shapes of the kernels of the language-model head: for softmax statistics without and
    with entropy, for dLoss/dlogits, and for the products that are added to gradients.

    The entropy needs one more sum, for which some architectures need another number of pipeline
    stages.
    """

    stats: TileConfig
    stats_entropy: TileConfig
    dlogits: TileConfig
    product: TileConfig


# Tile shapes for Triton's interpreter, in which tests run. The tiles are small, because the
# matrices in tests have small and odd sizes. If rows are aligned, tiles are read through tensor
# descriptors, as on sm_90.
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
    """Return the tile shapes for a GPU with this compute capability: those of the newest
    architecture in the table that is not newer. There are separate shapes for float32.

    GPUs of sm_86 and sm_89 get the shapes of sm_80: these need 64 KiB of shared memory, and the
    GPUs have 99 KiB.
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
