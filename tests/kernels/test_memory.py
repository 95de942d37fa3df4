"""The chunked head's memory is bounded by its workspace, whatever T and V."""

from __future__ import annotations

import pytest

from benchmarks.kernels_cpu import Case, run_case

WORKSPACE = 16
# Beyond the workspace: the [T] statistics, and the packing buffers of the BLAS library.
SLACK = 32


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """64 MiB, 256 MiB and 256 MiB of logits; full logits show that the measurement can see them."""
    extra = {
        (tokens, vocab): run_case(Case("chunked", tokens, vocab, 16, WORKSPACE)).extra_mib
        for tokens, vocab in ((1024, 16384), (4096, 16384), (1024, 65536))
    }
    assert max(extra.values()) < WORKSPACE + SLACK, extra
    full = run_case(Case("full", 1024, 16384, 16)).extra_mib
    assert full > 2 * 64
