"""Tile shapes by GPU architecture and element type: an explicit table, no autotuner.

Invariants
- Every entry compiles for its architecture without register spills and within its shared memory
  (`tests/kernels/test_compile.py`; the report is in docs/kernels.md).
- A choice depends on (capability, element size, alignment) only, never on timing, so that two runs
  on the same kind of machine do the same arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class TileConfig:
    """A [tokens × vocab] tile of logits, made in steps of `depth` along the hidden size.

    `group` token tiles share a walk over the vocabulary, so that the tiles in flight on all
    multiprocessors are about square and their operands stay in L2. `descriptors` loads operands
    through tensor descriptors (TMA on sm_90 and later); it needs rows aligned to 16 bytes.
    `halves` lets the epilogue work on the two halves of the columns one after the other.
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
class HeadConfigs:
    """Tiles of the three products: statistics, dLoss/dlogits, and the accumulating product.

    With entropy the statistics carry one more sum, for which some architectures need other stages.
    """

    stats: TileConfig
    stats_entropy: TileConfig
    dlogits: TileConfig
    product: TileConfig


# Small tiles for ragged test shapes; with descriptors where rows are aligned, as on sm_90.
INTERPRETER = HeadConfigs(
    stats=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    stats_entropy=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    dlogits=TileConfig(16, 32, 16, 4, 1, group=2, descriptors=True, halves=True),
    product=TileConfig(16, 16, 32, 4, 1, group=2),
)

_HALF = {
    80: HeadConfigs(
        stats=TileConfig(128, 128, 32, 8, 4),
        stats_entropy=TileConfig(128, 128, 32, 8, 4),
        dlogits=TileConfig(128, 128, 32, 8, 4),
        product=TileConfig(128, 128, 32, 8, 4, group=8),
    ),
    90: HeadConfigs(
        stats=TileConfig(128, 256, 64, 8, 4, descriptors=True, halves=True),
        stats_entropy=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
        dlogits=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
        product=TileConfig(128, 128, 64, 8, 3, group=8),
    ),
    100: HeadConfigs(
        stats=TileConfig(128, 256, 64, 8, 4, descriptors=True, halves=True),
        stats_entropy=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
        dlogits=TileConfig(128, 256, 64, 8, 3, descriptors=True, halves=True),
        product=TileConfig(128, 128, 64, 8, 3, group=8),
    ),
}
_SINGLE = {
    arch: HeadConfigs(
        stats=TileConfig(64, 64, 32, 4, 3),
        stats_entropy=TileConfig(64, 64, 32, 4, 3),
        dlogits=TileConfig(64, 64, 32, 4, 3),
        product=TileConfig(64, 64, 32, 4, 3, group=8),
    )
    for arch in (80, 90, 100)
}
ARCHITECTURES = tuple(_HALF)


def head_configs(capability: tuple[int, int], dtype: torch.dtype) -> HeadConfigs:
    """The table's entry for the newest architecture not newer than `capability`.

    sm_86 and sm_89 have 99 KiB of shared memory; the sm_80 entries need 64 KiB.
    """
    arch = 10 * capability[0] + capability[1]
    table = _SINGLE if dtype == torch.float32 else _HALF
    fitting = [known for known in ARCHITECTURES if known <= arch]
    return table[max(fitting, default=80)]


def without_descriptors(config: TileConfig) -> TileConfig:
    """The tile for rows that are not aligned to 16 bytes: loaded through pointers.

    Pointers take registers, so the tile has at most 128 columns.
    """
    if not config.descriptors:
        return config
    return replace(config, descriptors=False, vocab=min(config.vocab, 128), halves=False)
