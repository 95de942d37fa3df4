"""Arrays of a batch to the device that computes with them, and copies of a device's tensors.

Invariants
- To a GPU an array goes through pinned memory (of torch's cache, so that it is pinned once): a copy
  from other host memory makes the host wait for all that the GPU has been given.
- Host memory for a GPU's tensors is pinned too, which is slow to get: what is copied again and
  again keeps its own.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(
    array: npt.NDArray[Any] | torch.Tensor, device: torch.device | str | None
) -> torch.Tensor:
    """A tensor of its own there: arrays of a batch may be read-only."""
    tensor = array.detach() if isinstance(array, torch.Tensor) else torch.tensor(array)
    target = tensor.device if device is None else torch.device(device)
    if target.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(target, non_blocking=True)


class HostBuffers:
    """Host memory for tensors that are copied in the same order every time."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def copy(self, place: int, values: torch.Tensor) -> torch.Tensor:
        """A copy of what is copied as number `place`; the one of the last time is overwritten."""
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._kept[place : place + 1] = [kept]
        return kept.copy_(values)
