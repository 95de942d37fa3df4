"""The checksum of a tensor as it is added up, piece by piece and rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megatron_async.checkpoint.manifest import CorruptCheckpoint, TensorRecord


@dataclass
class TensorTally:
    """Running checksum of one tensor: that of the pieces seen, and their elements."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int = 0
    elements: int = 0

    def add(self, checksum: int, elements: int) -> None:
        self.checksum += checksum
        self.elements += elements

    def record(self, name: str) -> TensorRecord:
        """Return the sums. Raises CorruptCheckpoint if elements are missing or counted twice."""
        if self.elements != prod(self.shape):
            raise CorruptCheckpoint(
                f"tensor {name} has {self.elements} of {prod(self.shape)} elements"
            )
        return TensorRecord(self.dtype, self.shape, f"{self.checksum % (1 << 64):016x}")


def tally(
    tallies: dict[str, TensorTally], name: str, shape: Sequence[int], dtype: torch.dtype
) -> TensorTally:
    """The entry of a tensor, made where it is missing."""
    return tallies.setdefault(name, TensorTally(dtype_name(dtype), tuple(shape)))


def compare(expected: Mapping[str, TensorRecord], found: Mapping[str, TensorTally]) -> None:
    """Compare with what was saved. Raises CorruptCheckpoint for the first tensor that differs."""
    for name, record in sorted(expected.items()):
        loaded = found[name].record(name)
        if loaded != record:
            raise CorruptCheckpoint(
                f"tensor {name} as loaded has checksum {loaded.checksum}, as saved "
                f"{record.checksum}"
            )


def dtype_named(name: str) -> torch.dtype:
    """Inverse of `dtype_name`. Raises CorruptCheckpoint for one that no checkpoint has."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CorruptCheckpoint(f"{name!r} is not the name of a precision")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_int64(checksum: int) -> int:
    """The number of 64 bits, as tensors hold it."""
    return (checksum + (1 << 63)) % (1 << 64) - (1 << 63)
