"""Benchmark of the kernels: one call prints every table that docs/kernels.md refers to.

python benchmarks/kernels.py                    checks and timings on a CUDA device; without
                                                one, the CPU's memory and time table
python benchmarks/kernels.py --compile-report   every kernel configuration compiled for sm_80,
                                                sm_90 and sm_100 without a GPU
python benchmarks/kernels.py --sweep 300        random shapes through chunked torch (and the
                                                interpreter, with TRITON_INTERPRET=1)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# This file is called like a PyPI package that others import; keep its folder off the path.
sys.path[0] = str(Path(__file__).resolve().parents[1])

CPU_SHAPES = [
    (1024, 32_768, 256),
    (4096, 32_768, 256),
    (1024, 131_072, 256),
    (8192, 65_536, 64),
]
GPU_SECONDS = 420.0


def compile_report() -> str:
    """Registers, spills and shared memory of every kernel on every architecture."""
    import torch
    from megatron_async_kernels.triton_tiles import ARCHITECTURES

    from benchmarks.compiled.ahead_of_time import compile_kernel, markdown_table
    from benchmarks.compiled.head_builds import head_builds
    from benchmarks.compiled.loss_builds import loss_builds

    rows = []
    for arch in ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            rows += [compile_kernel(build, arch) for build in head_builds(arch, dtype)]
        rows += [compile_kernel(build, arch) for build in loss_builds()]
    return markdown_table(rows)


def sweep(cases: int) -> str:
    """Largest error over random shapes against the float64 reference."""
    import torch
    from megatron_async_kernels import reference_token_logprob, token_logprob
    from megatron_async_kernels.backend import Backend
    from megatron_async_kernels.triton_head import interpreted

    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    backend: Backend = "triton" if interpreted() else "chunked"
    worst = {"log-prob": 0.0, "entropy": 0.0, "dHidden": 0.0, "dWeight": 0.0}
    for _ in range(cases):
        tokens, vocab, hidden = draw(1, 90), draw(2, 400), draw(1, 80)
        temperature = 10 ** (2 * float(torch.rand(1, generator=generator)) - 1)
        hidden_TD = torch.randn(tokens, hidden, generator=generator)
        weight_VD = torch.randn(vocab, hidden, generator=generator) / hidden**0.5
        targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
        mask_T = torch.rand(tokens, generator=generator) < 0.8
        mine = [hidden_TD.clone().requires_grad_(), weight_VD.clone().requires_grad_()]
        exact = [hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()]
        actual = token_logprob(
            mine[0],
            mine[1],
            targets_T,
            temperature=temperature,
            token_mask=mask_T,
            return_entropy=True,
            workspace_bytes=16_000 + 16 * hidden,
            deterministic=bool(draw(0, 1)),
            backend=backend,
        )
        expected = reference_token_logprob(
            exact[0], exact[1], targets_T, temperature=temperature, token_mask_T=mask_T
        )
        (actual[0].sum() + actual[1].sum()).backward()
        (expected[0].sum() + expected[1].sum()).backward()
        pairs = [*zip(actual, expected, strict=True)]
        pairs += [(a.grad, b.grad) for a, b in zip(mine, exact, strict=True)]
        for name, (ours, theirs) in zip(worst, pairs, strict=True):
            scale = max(1.0, float(theirs.detach().abs().max()))
            error = float((ours.detach() - theirs.detach()).abs().max()) / scale
            worst[name] = max(worst[name], error)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return (
        f"{cases} random float32 shapes, backend {backend}"
        f"{' (interpreter)' if backend == 'triton' else ''}: largest error relative to "
        f"max(1, largest value): {errors}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile-report", action="store_true")
    parser.add_argument("--sweep", type=int, metavar="CASES")
    parser.add_argument("--seconds", type=float, default=GPU_SECONDS, help="limit of the GPU run")
    parser.add_argument("--workspace-mib", type=int, default=64, help="of the CPU table")
    options = parser.parse_args()

    import torch

    if options.compile_report:
        print(compile_report())
    elif options.sweep is not None:
        print(sweep(options.sweep))
    elif torch.cuda.is_available():
        from benchmarks.kernels_gpu import gpu_report

        print(gpu_report(options.seconds))
    else:
        from benchmarks.kernels_cpu import table

        print("GPU numbers: not measured (no CUDA device on this machine).\n")
        print(table(CPU_SHAPES, options.workspace_mib))


if __name__ == "__main__":
    main()
