"""Tests that planned blocks and memory stay within the workspace, whatever the shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels_cpu import Case, run_case

pytest.importorskip("triton")

from megatron_async_kernels.chunked import plan_chunks
from megatron_async_kernels.head_types import HeadProblem
from megatron_async_kernels.triton_head import plan_backward


def problem(
    tokens: int, vocab: int, hidden: int, dtype: torch.dtype, *, masked: bool, workspace: int
) -> HeadProblem:
    """Return the inputs of a head with these shapes, as meta tensors, which take no memory."""
    return HeadProblem(
        hidden_TD=torch.empty(tokens, hidden, dtype=dtype, device="meta"),
        rows_R=torch.empty(tokens, device="meta") if masked else None,
        weight_VD=torch.empty(vocab, hidden, dtype=dtype, device="meta"),
        targets_R=torch.empty(tokens, device="meta"),
        inv_temperature=1.0,
        workspace_bytes=workspace,
    )


@settings(max_examples=200)
@given(
    tokens=st.integers(1, 100_000),
    vocab=st.integers(1, 300_000),
    hidden=st.sampled_from([1, 37, 896, 3584, 8192]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    masked=st.booleans(),
    workspace=st.sampled_from([2**23, 2**26, 2**28]),
)
def test_planned_blocks_fit_into_the_workspace(
    tokens: int, vocab: int, hidden: int, dtype: torch.dtype, masked: bool, workspace: int
) -> None:
    head = problem(tokens, vocab, hidden, dtype, masked=masked, workspace=workspace)
    plan = plan_backward(head)
    element = head.hidden_TD.element_size()
    used = plan.rows * plan.columns * element
    used += plan.rows * hidden * ((4 if element < 4 else 0) + (element if masked else 0))
    assert used <= workspace
    assert 1 <= plan.rows <= tokens and 1 <= plan.columns <= vocab
    chunks = plan_chunks(head)
    assert chunks.bytes <= workspace and chunks.tokens >= 1 and chunks.vocab >= 1


@pytest.mark.parametrize(("vocab", "hidden"), [(152_064, 3584), (128_256, 8192)])
def test_backward_blocks_stay_large_for_large_heads(vocab: int, hidden: int) -> None:
    """With 256 MiB a block has thousands of rows and columns, so that the products run at the
    library's full speed."""
    for tokens in (4096, 16_384, 65_536):
        head = problem(tokens, vocab, hidden, torch.bfloat16, masked=True, workspace=2**28)
        plan = plan_backward(head)
        assert plan.rows >= 2048 and plan.columns >= 4096, plan


WORKSPACE = 16
# Memory in addition to the workspace: the [T] statistics, and the BLAS library's packing buffers.
SLACK = 32


@pytest.mark.slow
@pytest.mark.one_core
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """The logits would take 64 MiB, 256 MiB and 256 MiB. The measurement of full logits shows that
    it can detect them."""
    extra = {
        (tokens, vocab): run_case(Case("chunked", tokens, vocab, 16, WORKSPACE)).extra_mib
        for tokens, vocab in ((1024, 16384), (4096, 16384), (1024, 65536))
    }
    assert max(extra.values()) < WORKSPACE + SLACK, extra
    full = run_case(Case("full", 1024, 16384, 16)).extra_mib
    assert full > 2 * 64
