"""Benchmark of the kernels: prints the tables to which docs/kernels.md refers.

python benchmarks/kernels.py                    timings on a CUDA device; without a device, the
                                                table of memory and time on the CPU
python benchmarks/kernels.py --compile-report   compiles every kernel configuration for sm_80,
                                                sm_90 and sm_100, without a GPU
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# This file has the name of a PyPI package that other packages import, so its folder must not be on
# the path.
sys.path[0] = str(Path(__file__).resolve().parents[1])

CPU_SHAPES = [
    (1024, 32_768, 256),
    (4096, 32_768, 256),
    (1024, 131_072, 256),
    (8192, 65_536, 64),
]


def compile_report() -> str:
    """Return a table of registers, spills and shared memory of all kernels on all architectures."""
    import torch
    from megatron_async_kernels.triton_tiles import ARCHITECTURES

    from benchmarks.compiled import compile_kernel, head_builds, loss_builds, markdown_table

    rows = []
    for arch in ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows += [compile_kernel(build, arch) for build in head_builds(arch, dtype)]
        rows += [compile_kernel(build, arch) for build in loss_builds()]
    return markdown_table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile-report", action="store_true")
    parser.add_argument("--workspace-mib", type=int, default=64, help="for the CPU table")
    options = parser.parse_args()

    import torch

    if options.compile_report:
        print(compile_report())
    elif torch.cuda.is_available():
        from benchmarks.kernels_gpu import gpu_report

        print(gpu_report())
    else:
        from benchmarks.kernels_cpu import memory_table

        print("GPU numbers: not measured (this machine has no CUDA device).\n")
        print(memory_table(CPU_SHAPES, options.workspace_mib))


if __name__ == "__main__":
    main()
