"""Packs the tensors of a bucket (a set of tensors that are sent together) into one byte tensor, in
the format of SGLang's `flattened_bucket`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from megatron_async.weight_sync.transports.base import Bucket, NamedTensor, size_of


@dataclass(frozen=True, eq=False)
class FlatBucket:
    """Tensors packed end to end in one byte tensor, with their names, types and shapes."""

    bytes_N: Tensor
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @cached_property
    def tensors(self) -> list[tuple[str, Tensor, int]]:
        """One tuple for each tensor: its name, the tensor as a view of `bytes_N`, and the index of
        its first byte."""
        found, start = [], 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            stop = start + prod(shape) * kind.itemsize
            found.append((name, self.bytes_N[start:stop].view(kind).view(shape), start))
            start = stop
        return found


def flatten(bucket: Bucket, allocate: Callable[[int], Tensor]) -> FlatBucket:
    """Copy the tensors of a bucket into the start of the byte tensor that `allocate(size)` returns.

    Tensors with larger elements come first, so that every tensor starts at a multiple of its
    element size. A tensor whose memory is that position already is not copied.
    """
    ordered: list[NamedTensor] = sorted(bucket, key=lambda item: -item[1].element_size())
    size = size_of(bucket)
    flat = FlatBucket(
        allocate(size)[:size],
        [name for name, _ in ordered],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered],
        [list(tensor.shape) for _, tensor in ordered],
    )
    for (_, source), (_, target, _) in zip(ordered, flat.tensors, strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source.detach())
    return flat


class Buffers:
    """Two byte tensors that are used alternately: one is sent while the other is filled.

    They are kept and used again, because the first use of new memory is slow.
    """

    def __init__(self, device: torch.device) -> None:
        self._turn = 0
        self._held = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        # Device of a tensor, which always has an index (`cuda:0`), so that it can be compared with
        # the devices of other tensors; the argument `device` may have none.
        self.device = self._held[0].device

    def next(self, size: int) -> Tensor:
        """Return a buffer of at least `size` bytes. It is the buffer that was returned before the
        last one, so the caller must no longer use that."""
        self._turn ^= 1
        if self._held[self._turn].nbytes < size:
            self._held[self._turn] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._held[self._turn]

    def flatten(self, bucket: Bucket) -> FlatBucket:
        """Copy the tensors of a bucket into the next buffer; return the packed tensors.

        A bucket that is a single contiguous tensor on the device of the buffers is not copied: its
        own memory is used. Every tensor larger than the bucket size is a bucket by itself, so the
        buffers need not grow to the size of the largest tensor, such as an embedding.
        """
        alone = bucket[0][1].detach() if len(bucket) == 1 else None
        if alone is None or not alone.is_contiguous() or alone.device != self.device:
            return flatten(bucket, self.next)
        bytes_N = alone.reshape(-1).view(torch.uint8)
        return flatten(bucket, lambda _: bytes_N)
