"""Tests that every kernel configuration compiles for sm_80, sm_90 and sm_100 without spills and
fits into shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from megatron_async_kernels.triton_tiles import ARCHITECTURES

from benchmarks.compiled import compile_kernel, head_builds, loss_builds

MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_head_kernels_compile_without_spills(arch: int, dtype: torch.dtype) -> None:
    reports = [compile_kernel(build, arch) for build in head_builds(arch, dtype)]
    assert [report.build.name for report in reports if report.spills] == []
    assert [report.build.name for report in reports if not report.fits] == []
    if dtype == torch.bfloat16:
        instructions = {report.tensor_core for report in reports}
        assert instructions == {MATRIX_INSTRUCTION[arch]}


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loss_kernels_compile_without_spills(arch: int) -> None:
    reports = [compile_kernel(build, arch) for build in loss_builds()]
    assert [report.build.name for report in reports if report.spills] == []
    assert [report.build.name for report in reports if not report.fits] == []
