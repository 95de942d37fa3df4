"""The head's kernels as the launchers build them, for `ahead_of_time`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron_async_kernels.triton_backward import accumulate_product_kernel, dlogits_kernel
from megatron_async_kernels.triton_forward import combine_kernel, head_stats_kernel
from megatron_async_kernels.triton_tiles import (
    TileConfig,
    TileSpec,
    head_configs,
    without_descriptors,
)

from benchmarks.compiled.ahead_of_time import KernelBuild

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def head_builds(arch: int, dtype: torch.dtype) -> Iterator[KernelBuild]:
    """Every kernel of the head for one architecture and element type, with and without entropy."""
    configs = head_configs((arch // 10, arch % 10), dtype)
    kind = _TYPE_NAMES[dtype]
    for entropy in (False, True):
        label = f"{kind}, entropy" if entropy else kind
        stats = configs.stats_entropy if entropy else configs.stats
        tiles = {stats, without_descriptors(stats)}
        for tile in sorted(tiles, key=lambda tile: not tile.descriptors):
            yield _stats_build(tile, kind, label, entropy)
        tiles = {configs.dlogits, without_descriptors(configs.dlogits)}
        for tile in sorted(tiles, key=lambda tile: not tile.descriptors):
            yield _dlogits_build(tile, kind, label, entropy)
        if dtype == torch.float32:
            yield _combine_build(entropy)
    for transposed in (False, True):
        yield _product_build(configs.product, kind, transposed)


def _operand_types(tile: TileConfig, kind: str) -> dict[str, str]:
    if not tile.descriptors:
        return {"hidden": f"*{kind}", "weight": f"*{kind}"}
    return {
        "hidden": f"tensordesc<{kind}[{tile.tokens}, {tile.depth}]>",
        "weight": f"tensordesc<{kind}[{tile.vocab}, {tile.depth}]>",
    }


def _tile_constants(tile: TileConfig, entropy: bool) -> dict[str, Any]:
    return {"SPEC": TileSpec(tile, even_depth=True, upcast=False, entropy=entropy)}


def _shape(tile: TileConfig) -> str:
    loads = "descriptors" if tile.descriptors else "pointers"
    return f"{tile.tokens}×{tile.vocab}×{tile.depth}, {loads}"


def _stats_build(tile: TileConfig, kind: str, label: str, entropy: bool) -> KernelBuild:
    outputs = ("max_out", "sum_out", "weighted_out", "target_out")
    types = {
        **_operand_types(tile, kind),
        "targets": "*i64",
        **dict.fromkeys(outputs, "*fp32"),
        **dict.fromkeys(("num_rows", "num_columns", "depth", "out_stride"), "i32"),
        **dict.fromkeys(("columns_per_split", "num_splits"), "i32"),
        "inv_temperature": "fp32",
    }
    pointers = () if tile.descriptors else ("hidden", "weight")
    return KernelBuild(
        name=f"statistics ({label}; {_shape(tile)})",
        kernel=head_stats_kernel,
        types=types,
        constants=_tile_constants(tile, entropy),
        aligned=(*pointers, "targets", *outputs, "depth"),
        warps=tile.warps,
        stages=tile.stages,
    )


def _dlogits_build(tile: TileConfig, kind: str, label: str, entropy: bool) -> KernelBuild:
    rows = ("log_sum_exp", "grad_logprob", "grad_entropy", "entropy")
    types = {
        **_operand_types(tile, kind),
        "targets": "*i64",
        **dict.fromkeys(rows, "*fp32"),
        "dlogits": f"*{kind}",
        **dict.fromkeys(("num_rows", "num_columns", "depth", "dlogits_stride"), "i32"),
        "first_column": "i32",
        "inv_temperature": "fp32",
    }
    pointers = () if tile.descriptors else ("hidden", "weight")
    return KernelBuild(
        name=f"dLoss/dlogits ({label}; {_shape(tile)})",
        kernel=dlogits_kernel,
        types=types,
        constants=_tile_constants(tile, entropy),
        aligned=(*pointers, "targets", *rows, "dlogits", "depth", "dlogits_stride"),
        warps=tile.warps,
        stages=tile.stages,
    )


def _product_build(tile: TileConfig, kind: str, transposed: bool) -> KernelBuild:
    """dlogits · W (left row-major), or dlogitsᵀ · hidden (left column-major)."""
    strides = ("left_row_stride", "left_depth_stride")
    unit = strides[0] if transposed else strides[1]
    sizes = ("num_rows", "num_columns", "depth", "right_stride", "out_stride")
    types = {
        "left": f"*{kind}",
        "right": f"*{kind}",
        "out": "*fp32",
        **dict.fromkeys((*sizes, *strides), "i32"),
    }
    # The launcher specialises a stride of 1 to a constant.
    del types[unit]
    return KernelBuild(
        name=f"product ({kind}{', left transposed' if transposed else ''}; {_shape(tile)})",
        kernel=accumulate_product_kernel,
        types=types,
        constants={
            "ROWS": tile.tokens,
            "COLUMNS": tile.vocab,
            "DEPTH": tile.depth,
            "GROUP": tile.group,
            "UPCAST": False,
            unit: 1,
        },
        aligned=(
            "left",
            "right",
            "out",
            "right_stride",
            "out_stride",
            *(stride for stride in strides if stride != unit),
        ),
        warps=tile.warps,
        stages=tile.stages,
    )


def _combine_build(entropy: bool) -> KernelBuild:
    arrays = ("max_in", "sum_in", "weighted_in", "max_out", "sum_out", "weighted_out")
    return KernelBuild(
        name=f"merge of splits{' (entropy)' if entropy else ''}",
        kernel=combine_kernel,
        types={
            **dict.fromkeys(arrays, "*fp32"),
            **dict.fromkeys(("num_rows", "num_splits"), "i32"),
        },
        constants={"BLOCK": 128, "ENTROPY": entropy},
        aligned=arrays,
        warps=4,
        stages=3,
    )
