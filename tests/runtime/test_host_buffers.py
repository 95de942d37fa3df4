"""Tests that pinned host memory has the exact size and is released with its last view."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from megatron_async.runtime.host_buffers import pinned_bytes


class CudaRuntime:
    """Stand-in for torch's binding of the CUDA runtime that records the registered memory."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> str:
        assert flags == 1
        self.registered[address] = size
        return "success"

    def cudaHostUnregister(self, address: int) -> str:
        del self.registered[address]
        return "success"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", SimpleNamespace(results=[]).results.append)
    return runtime


def test_pinned_bytes_has_the_exact_size_and_starts_at_a_page(cuda: CudaRuntime) -> None:
    size = 5 * 2**20 + 12
    bytes_N = pinned_bytes(size)
    assert bytes_N.shape == (size,) and bytes_N.dtype is torch.uint8
    assert cuda.registered == {bytes_N.data_ptr(): size}
    assert bytes_N.data_ptr() % mmap.PAGESIZE == 0, "no other memory is in its pages"


def test_pinned_bytes_are_released_with_their_last_view(cuda: CudaRuntime) -> None:
    view = pinned_bytes(64).view(torch.float32).view(4, 4)[1:]
    gc.collect()
    assert cuda.registered
    view.fill_(3.0)
    del view
    gc.collect()
    assert not cuda.registered


def test_pinned_bytes_raises_when_pinning_fails(
    cuda: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(result: str) -> None:
        raise RuntimeError(result)

    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    with pytest.raises(RuntimeError, match="success"):
        pinned_bytes(8)
