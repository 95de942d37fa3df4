"""`HostBuffers`: host memory for tensors of a device that are copied again and again.

Invariant: host memory for a GPU's tensors is pinned, which is slow to get, so each buffer is kept.
"""

import torch


class HostBuffers:
    """Host memory for tensors that are copied in the same order every time."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def copy(self, place: int, values: torch.Tensor) -> torch.Tensor:
        """Copy `values`, number `place` in the order; the copy of the last time is overwritten."""
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._kept[place : place + 1] = [kept]
        return kept.copy_(values)
