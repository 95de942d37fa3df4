"""Compiles kernels for a GPU architecture without a GPU, and reads what the binary needs.

Invariants
- What is compiled is what the launchers launch: the same kernels, tile tables and flags.
- Numbers come from the binary (`cuobjdump` of the triton package), not from estimates.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Bytes of shared memory that one block may use (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class KernelBuild:
    """One kernel with the types and constants of one launch.

    `types` maps every runtime argument to its triton type; arguments in `aligned` are known to
    be multiples of 16 (as the launcher's specialisation finds them).
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
    """What one compiled kernel needs: registers per thread, bytes of the rest."""

    name: str
    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    warps: int
    stages: int
    tensor_core: str

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_MEMORY[self.arch]

    @property
    def spills(self) -> bool:
        return self.spill_stores > 0 or self.spill_loads > 0


def compile_kernel(build: KernelBuild, arch: int) -> Resources:
    """Compile for sm_`arch` and read the resources of the binary.

    Raises
        subprocess.CalledProcessError: the triton package's tools fail.
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
    registers, stack = _resource_usage(compiled.asm["cubin"])
    stores, loads = _spills(ptx, arch)
    return Resources(
        name=build.name,
        arch=arch,
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        stack=stack,
        shared=int(compiled.metadata.shared),
        warps=build.warps,
        stages=build.stages,
        tensor_core=_matrix_instruction(ptx),
    )


def markdown_table(rows: Sequence[Resources]) -> str:
    """The report, one line a kernel and architecture."""
    lines = [
        "| kernel | arch | matrix instruction | warps | stages | registers | spills (B) | "
        "shared (KiB) | of (KiB) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | sm_{row.arch} | {row.tensor_core} | {row.warps} | {row.stages} | "
        f"{row.registers} | {row.spill_stores + row.spill_loads} | {row.shared / 1024:.1f} | "
        f"{SHARED_MEMORY[row.arch] // 1024} |"
        for row in rows
    ]
    return "\n".join(lines)


def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes) from `cuobjdump --dump-resource-usage`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output("cuobjdump", "--dump-resource-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {text!r}")
    return int(found[1]), int(found[2])


def _spills(ptx: str, arch: int) -> tuple[int, int]:
    """(spill stores, spill loads) in bytes from `ptxas -v`."""
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
    return int(found[1]), int(found[2])


def _output(tool: str, *arguments: str) -> str:
    """What one of Triton's tools prints."""
    done = subprocess.run(
        [_tool(tool), *arguments], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def _matrix_instruction(ptx: str) -> str:
    for name in ("tcgen05.mma", "wgmma.mma_async", "mma.sync"):
        if name in ptx:
            return name
    return "-"
