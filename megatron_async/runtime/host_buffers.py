"""Provides `HostBuffers`: reusable host memory for copies of device tensors.

Invariants
- Host memory for tensors of a GPU is pinned (locked in memory), which makes copies fast. Pinning
  itself is slow, so each buffer is kept for the next copy.
- A buffer has the size of its tensor, rounded up to whole pages. torch's own allocator of pinned
  memory would need up to twice as much, since it rounds each size up to a power of two.
"""

import mmap
import sys

import torch
from torch import Tensor

# Value of the CUDA flag cudaHostRegisterPortable, which pins memory for every CUDA context.
_PORTABLE = 1


class HostBuffers:
    """Buffers in host memory for tensors that are copied repeatedly, always in the same order."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copy(self, place: int, values: Tensor) -> Tensor:
        """Copy the tensor `values` to host memory, into the buffer with the number `place`.

        There is one buffer for each number, so the next copy with the same number overwrites this
        one. New numbers must be used in order, from 0.

        Returns:
            The copy, which is the buffer itself.
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

    The system counts this memory as shared memory, because Python makes mappings without a file
    shared. For the same reason, the pages are not copied after a fork.
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
        # Unpin the memory, because unmapping alone would leave it pinned. While Python shuts down
        # this is not needed, because the CUDA driver unpins everything when the process ends.
        if hasattr(self, "address") and not sys.is_finalizing():
            runtime = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.address)


def pinned_bytes(size: int) -> Tensor:
    """Return a uint8 tensor of shape [size] in pinned memory, freed with the tensor's last view.

    `size` must be positive.
    """
    memory = _PinnedMemory(-1, size)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    memory.pin(bytes_N.data_ptr())
    return bytes_N
