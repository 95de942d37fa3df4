"""Compiles the kernels for GPU architectures without a GPU, and reads the binaries' resources.

Invariants
- The compiled kernels, tile tables and flags are the same as those that the launchers use.
- Numbers are read from the binary with tools of the triton package (`cuobjdump`, `ptxas`). None is
  an estimate.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from megatron_async_kernels.is_loss import BLOCK, SEQUENCE_BLOCK, WARPS
from megatron_async_kernels.loss_types import NUM_LAG_BINS, LossConfig, RejectionRule
from megatron_async_kernels.triton_backward import accumulate_product_kernel, dlogits_kernel
from megatron_async_kernels.triton_forward import combine_kernel, head_stats_kernel
from megatron_async_kernels.triton_loss_sequences import sequence_kernel, sequence_pass_kernel
from megatron_async_kernels.triton_loss_spec import (
    CHUNK,
    LAG_OFFSET,
    LAG_STRIDE,
    MAX_WIDTH,
    NUM_SEQUENCE_VALUES,
    NUM_SLOT_COLUMNS,
    ROW_WIDTH,
    LossSpec,
    needs_sequences,
)
from megatron_async_kernels.triton_loss_tokens import token_pass_kernel
from megatron_async_kernels.triton_tiles import (
    TileConfig,
    TileSpec,
    head_configs,
    without_descriptors,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.reporting import table

# Bytes of shared memory that one block may use, by compute capability (CUDA programming guide).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class KernelBuild:
    """A kernel with the types and constants of one launch.

    Attributes:
        types: Triton type of every runtime argument.
        aligned: Arguments that are multiples of 16, which the launcher's specialization detects.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    warps: int
    stages: int


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: Registers per thread.
        spill_bytes: Bytes of spill stores and spill loads together.
        shared: Bytes of shared memory per block.
        tensor_core: Matrix instruction that the kernel uses; "-" if it uses none.
    """

    build: KernelBuild
    arch: int
    registers: int
    spill_bytes: int
    shared: int
    tensor_core: str

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_MEMORY[self.arch]

    @property
    def spills(self) -> bool:
        return self.spill_bytes > 0


def compile_kernel(build: KernelBuild, arch: int) -> Resources:
    """Compile a kernel for the architecture sm_`arch`; return the resources of the binary.

    Raises:
        subprocess.CalledProcessError: A tool of the triton package failed.
    """
    names = build.kernel.arg_names
    signature = {name: build.types.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned}
    source = ASTSource(
        fn=build.kernel, signature=signature, constexprs=dict(build.constants), attrs=attrs
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": build.warps, "num_stages": build.stages},
    )
    ptx = compiled.asm["ptx"]
    return Resources(
        build=build,
        arch=arch,
        registers=_registers(compiled.asm["cubin"]),
        spill_bytes=_spill_bytes(ptx, arch),
        shared=int(compiled.metadata.shared),
        tensor_core=_matrix_instruction(ptx),
    )


def markdown_table(rows: Iterable[Resources]) -> str:
    """Return a table with a line for each kernel and architecture."""
    header = (
        "kernel | arch | matrix instruction | warps | stages | registers | spills (B) "
        "| shared (KiB) | of (KiB)"
    )
    cells = [
        (
            row.build.name,
            f"sm_{row.arch}",
            row.tensor_core,
            row.build.warps,
            row.build.stages,
            row.registers,
            row.spill_bytes,
            f"{row.shared / 1024:.1f}",
            SHARED_MEMORY[row.arch] // 1024,
        )
        for row in rows
    ]
    return table(header, cells)


def _registers(cubin: bytes) -> int:
    """Return the number of registers per thread, from `cuobjdump --dump-resource-usage`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text!r}")
    return int(found[1])


def _spill_bytes(ptx: str, arch: int) -> int:
    """Return the sum of the bytes of spill stores and spill loads, from `ptxas -v`."""
    tool = "ptxas-blackwell" if arch >= 100 else "ptxas"
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = f"--gpu-name=sm_{arch}{suffix}"
        text = _output(tool, "-v", target, str(source), "-o", f"{folder}/out")
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if found is None:
        raise ValueError(f"ptxas printed no spill counts: {text!r}")
    return int(found[1]) + int(found[2])


def _output(tool: str, *arguments: str) -> str:
    """Run one of Triton's tools; return its output."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run(
        [path, *arguments], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def _matrix_instruction(ptx: str) -> str:
    for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync"):
        if name in ptx:
            return name
    return "-"


# ------------------------------------------------------------ the head

_TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def head_builds(arch: int, dtype: torch.dtype) -> Iterator[KernelBuild]:
    """Generate the kernels of the head for one architecture and dtype, with and without entropy."""
    configs = head_configs((arch // 10, arch % 10), dtype)
    kind = _TYPE_NAMES[dtype]
    for entropy in (False, True):
        label = f"{kind}, entropy" if entropy else kind
        stats = configs.stats_entropy if entropy else configs.stats
        for tile in _both_loads(stats):
            yield _stats_build(tile, kind, label, entropy)
        for tile in _both_loads(configs.dlogits):
            yield _dlogits_build(tile, kind, label, entropy)
        if dtype == torch.float32:
            yield _combine_build(entropy)
    for transposed in (False, True):
        yield _product_build(configs.product, kind, transposed)


def _both_loads(tile: TileConfig) -> list[TileConfig]:
    """Return the tile and, if it uses descriptors, also its variant without descriptors."""
    return [tile, without_descriptors(tile)] if tile.descriptors else [tile]


def _shape(tile: TileConfig) -> str:
    loads = "descriptors" if tile.descriptors else "pointers"
    return f"{tile.tokens}×{tile.vocab}×{tile.depth}, {loads}"


def _tile_build(
    name: str,
    kernel: Any,
    tile: TileConfig,
    kind: str,
    entropy: bool,
    types: dict[str, str],
    aligned: tuple[str, ...],
) -> KernelBuild:
    """Return a kernel over tiles of logits.

    `types` and `aligned` describe only the arguments that other kernels over tiles do not have.
    """
    operands = {"hidden": f"*{kind}", "weight": f"*{kind}"}
    pointers: tuple[str, ...] = ("hidden", "weight")
    if tile.descriptors:
        operands = {
            "hidden": f"tensordesc<{kind}[{tile.tokens}, {tile.depth}]>",
            "weight": f"tensordesc<{kind}[{tile.vocab}, {tile.depth}]>",
        }
        pointers = ()
    sizes = dict.fromkeys(("num_rows", "num_columns", "depth"), "i32")
    shared = {"targets": "*i64", "inv_temperature": "fp32", **sizes}
    return KernelBuild(
        name=name,
        kernel=kernel,
        types={**operands, **shared, **types},
        constants={"SPEC": TileSpec(tile, even_depth=True, upcast=False, entropy=entropy)},
        aligned=(*pointers, "targets", "depth", *aligned),
        warps=tile.warps,
        stages=tile.stages,
    )


def _stats_build(tile: TileConfig, kind: str, label: str, entropy: bool) -> KernelBuild:
    outputs = ("max_out", "sum_out", "weighted_out", "target_out")
    types = dict.fromkeys(outputs, "*fp32")
    types |= dict.fromkeys(("out_stride", "columns_per_split", "num_splits"), "i32")
    name = f"statistics ({label}; {_shape(tile)})"
    return _tile_build(name, head_stats_kernel, tile, kind, entropy, types, outputs)


def _dlogits_build(tile: TileConfig, kind: str, label: str, entropy: bool) -> KernelBuild:
    rows = ("log_sum_exp", "grad_logprob", "grad_entropy", "entropy")
    types = dict.fromkeys(rows, "*fp32")
    types |= {"dlogits": f"*{kind}", "dlogits_stride": "i32", "first_column": "i32"}
    aligned = (*rows, "dlogits", "dlogits_stride")
    name = f"dLoss/dlogits ({label}; {_shape(tile)})"
    return _tile_build(name, dlogits_kernel, tile, kind, entropy, types, aligned)


def _product_build(tile: TileConfig, kind: str, transposed: bool) -> KernelBuild:
    """Return the kernel of dlogits · W or, with `transposed`, of dlogitsᵀ · hidden.

    The left operand is row-major or, with `transposed`, column-major.
    """
    strides = ("left_row_stride", "left_depth_stride")
    unit = strides[0] if transposed else strides[1]
    others = [stride for stride in strides if stride != unit]
    sizes = ("num_rows", "num_columns", "depth", "right_stride", "out_stride")
    types = {
        "left": f"*{kind}",
        "right": f"*{kind}",
        "out": "*fp32",
        **dict.fromkeys((*sizes, *strides), "i32"),
    }
    # The launcher specializes a stride of 1 to a constant.
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
        aligned=("left", "right", "out", "right_stride", "out_stride", *others),
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


# ------------------------------------------------------------ the loss

# The default configuration, and for each kind of loss the configuration that computes the most.
COMPILED_CONFIGS: dict[str, LossConfig] = {
    "ppo_clip": LossConfig(),
    "ppo_clip, dual clip, k3, entropy, rules": LossConfig(
        ratio_to="old",
        dual_clip=3.0,
        kl_estimator="k3",
        kl_coef=0.1,
        entropy_coef=0.1,
        rejection=(
            RejectionRule("token", "k1", -1.0, 1.0),
            RejectionRule("seq_max", "k2", -1.0, 1.0),
            RejectionRule("seq_mean", "k3", -1.0, 1.0),
        ),
    ),
    "reinforce, IcePop": LossConfig(
        surrogate="reinforce", weight_level="token", weight_lower=0.5, weight_upper=2.0
    ),
    "gspo": LossConfig(surrogate="gspo", aggregation="seq_mean_token_mean"),
}
_INT64 = {"lag", "cu_seqlens"}
_FLOAT64 = {"slots", "sums", "maxima"}
_INTEGERS = {"num_tokens", "num_sequences", "first_row"}
_SCALARS = {"scale", "inv_weight_mean", "log_staleness_clip"}


def loss_builds() -> Iterator[KernelBuild]:
    """Generate every kernel of `is_loss` for each of `COMPILED_CONFIGS`."""
    for name, config in COMPILED_CONFIGS.items():
        two_pass = needs_sequences(config)
        spec = LossSpec(
            config=config,
            num_rules=len(config.rejection),
            two_pass=two_pass,
            has_correction=config.ratio_to == "old",
            has_reference=config.kl_estimator != "none",
            has_entropy=config.entropy_coef != 0.0,
            has_lag=True,
        )
        yield _loss_build("tokens", name, token_pass_kernel, BLOCK, WARPS, spec)
        if two_pass:
            yield _loss_build("sequence sums", name, sequence_pass_kernel, BLOCK, WARPS, spec)
        yield _loss_build("sequences", name, sequence_kernel, SEQUENCE_BLOCK, 4, spec)


def _loss_build(
    part: str, label: str, kernel: Any, block: int, warps: int, spec: LossSpec
) -> KernelBuild:
    constants = {
        "CHUNK": CHUNK,
        "BLOCK": block,
        "SLOT_WIDTH": NUM_SLOT_COLUMNS,
        "VALUE_WIDTH": NUM_SEQUENCE_VALUES,
        "ROW_WIDTH": ROW_WIDTH,
        "MAX_WIDTH": MAX_WIDTH,
        "LAG_OFFSET": LAG_OFFSET,
        "LAG_STRIDE": LAG_STRIDE,
        "NUM_LAGS": NUM_LAG_BINS,
        "SPEC": spec,
    }
    types = {name: _loss_type(name) for name in kernel.arg_names if name not in constants}
    return KernelBuild(
        name=f"loss, {part} ({label})",
        kernel=kernel,
        types=types,
        constants={name: constants[name] for name in kernel.arg_names if name in constants},
        aligned=tuple(name for name, kind in types.items() if kind.startswith("*")),
        warps=warps,
        stages=3,
    )


def _loss_type(name: str) -> str:
    if name in _INTEGERS:
        return "i32"
    if name in _SCALARS:
        return "fp32"
    if name in _INT64:
        return "*i64"
    return "*fp64" if name in _FLOAT64 else "*fp32"
