"""`HostBuffers`: host memory for tensors of a device that are copied again and again.

Invariants
- Host memory for a GPU's tensors is pinned. Pinning is slow, so each buffer is kept.
- A buffer takes the bytes of its tensor, up to whole pages. torch's own allocator of pinned memory
  would round each size up to a power of two.
"""

import mmap
import sys

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


class HostBuffers:
    """Host memory for tensors that are copied in the same order every time."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copy(self, place: int, values: Tensor) -> Tensor:
        """Copy `values`, number `place` in the order; the copy of the last time is overwritten."""
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            if values.is_cuda and values.nbytes:
                kept = pinned_bytes(values.nbytes).view(values.dtype).view(values.shape)
            else:
                kept = torch.empty(values.shape, dtype=values.dtype)
            self._kept[place : place + 1] = [kept]
        return kept.copy_(values)


class _PinnedMemory(mmap.mmap):
    """Whole pages of anonymous memory, pinned until the object is deleted.

    The system counts them as shared memory, as a mapping without a file is shared in Python. A fork
    therefore does not copy pinned pages.
    """

    address: int

    def pin(self, address: int) -> None:
        """Pin the memory, which starts at `address`. Raises torch's CudaError."""
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        self.address = address

    def __del__(self) -> None:
        # Unmapped memory that is still registered would stay pinned. At the process's end the
        # driver releases it.
        if hasattr(self, "address") and not sys.is_finalizing():
            runtime = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.address)


def pinned_bytes(size: int) -> Tensor:
    """Return a uint8 tensor [size] in pinned memory; its views keep the memory. `size` > 0."""
    memory = _PinnedMemory(-1, size)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    memory.pin(bytes_N.data_ptr())
    return bytes_N
