"""Provides `HostBuffers`: reusable host memory for copies of device tensors.

Invariants
- Host memory for a GPU's tensors is pinned. Pinning is slow, so each buffer is kept.
- A buffer has the size of its tensor, rounded up to whole pages. torch's own allocator of pinned
  memory would round each size up to a power of two.
"""

import mmap
import sys

import torch
from torch import Tensor

# The value of cudaHostRegisterPortable, which pins memory for every CUDA context.
_PORTABLE = 1


class HostBuffers:
    """Host memory for tensors that are copied again and again, always in the same order."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copy(self, place: int, values: Tensor) -> Tensor:
        """Copy the tensor `values` to host memory, into the buffer with the number `place`.

        Every number has one buffer, so this overwrites the copy that was made last with the same
        number. Numbers are used in order, from 0.

        Returns:
            The copy.
        """
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            if values.is_cuda and values.nbytes:
                kept = pinned_bytes(values.nbytes).view(values.dtype).view(values.shape)
            else:
                kept = torch.empty(values.shape, dtype=values.dtype)
            self._kept[place : place + 1] = [kept]
        return kept.copy_(values)


class _PinnedMemory(mmap.mmap):
    """Whole pages of anonymous memory that are pinned until the object is deleted.

    The system counts them as shared memory, because Python's mappings without a file are shared. A
    fork therefore does not copy pinned pages.
    """

    address: int

    def pin(self, address: int) -> None:
        """Pin the memory, which starts at `address`.

        Raises:
            CudaError: If CUDA refuses.
        """
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        self.address = address

    def __del__(self) -> None:
        # Unregister the memory, because it would stay pinned after it is unmapped. When the process
        # ends, the CUDA driver does so.
        if hasattr(self, "address") and not sys.is_finalizing():
            runtime = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.address)


def pinned_bytes(size: int) -> Tensor:
    """Return a uint8 tensor [size] in pinned memory, which is freed with the tensor's last view.

    `size` must be positive.
    """
    memory = _PinnedMemory(-1, size)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    memory.pin(bytes_N.data_ptr())
    return bytes_N
