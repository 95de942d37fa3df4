"""A checksum of a tensor that adds over its pieces, wherever and by whom they are held.

    checksum(whole) == sum(checksum(piece) for piece in any cut of it)    (mod 2**64)

It is the sum of a hash of (place in the whole tensor, bits) over all elements: equal exactly when
the same bits are at the same places (but for chance, 2**-64). So the ranks of any layout can
agree on it without one of them seeing the tensor: each adds up what it holds, and the sums are
added.

A `TensorTally` is the checksum as it is added up, piece by piece and rank by rank.

Invariants
- The value is part of the checkpoint format: it does not depend on layout, device or chunk size.
- Works on the tensor's own device, in chunks: memory for one chunk, whatever the tensor's size.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import prod

import torch
from torch import Tensor

from megatron_async.checkpoint.manifest import CorruptCheckpoint, TensorRecord

# Odd constants: of the golden ratio (Knuth 1998, section 6.4), and of the mixing function of
# SplitMix64 (Steele, Lea and Flood 2014, OOPSLA, figure 15).
_PLACE = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Small enough for a core's cache; a GPU wants larger pieces of work.
_LARGE = 1 << 22
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}


def checksum(piece: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Sum over the elements of `piece`, which lies at `offsets` of a tensor of shape `shape`.

    One or two axes. The result is a number of int64 on the piece's device: 64 bits, wrapping. A
    large piece in host memory is divided over as many threads as torch has.
    """
    threads = torch.get_num_threads()
    if piece.device.type != "cpu" or threads == 1 or piece.numel() < _LARGE:
        return _checksum(piece, offsets, shape)
    parts = piece.chunk(threads)
    first_rows = accumulate((len(part) for part in parts), initial=offsets[0])
    places = [(first, *offsets[1:]) for first in first_rows]
    with ThreadPoolExecutor(threads) as pool:
        sums = pool.map(_checksum, parts, places, repeat(shape))
        return torch.stack(list(sums)).sum()


def _checksum(piece: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    stride = shape[-1]
    first = offsets[-1] + (offsets[0] * stride if len(shape) == 2 else 0)
    bits_RC = piece.detach().view(_BITS[piece.element_size()])
    bits_RC = bits_RC.reshape(-1, piece.shape[-1])
    if bits_RC.shape[1] == stride and bits_RC.is_contiguous():  # one run of places
        bits_RC = bits_RC.reshape(1, -1)
    limit = _CHUNK.get(piece.device.type, _CHUNK["cpu"])
    cols = min(limit, max(1, bits_RC.shape[1]))
    rows = min(max(1, limit // cols), max(1, bits_RC.shape[0]))
    rows_R, cols_C = (torch.arange(count, device=piece.device) for count in (rows, cols))
    places_RC = rows_R[:, None] * stride + cols_C
    places_RC *= signed(_PLACE)
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for row, band_RC in enumerate(bits_RC.split(rows)):
        for column, chunk_RC in enumerate(band_RC.split(cols, dim=1)):
            begin = first + row * rows * stride + column * cols
            hashes_RC = places_RC[: chunk_RC.shape[0], : chunk_RC.shape[1]] + chunk_RC
            hashes_RC += signed(begin * _PLACE)
            for constant in _MIX:
                hashes_RC ^= hashes_RC >> 32
                hashes_RC *= signed(constant)
            hashes_RC ^= hashes_RC >> 32
            total += hashes_RC.sum()
    return total


def signed(number: int) -> int:
    """The number modulo 2**64, as the int64 of the same bits."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


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


def check_tensor(tensors: Mapping[str, TensorRecord], name: str, shape: tuple[int, ...]) -> None:
    """A tensor of the model is there with its shape. Raises CorruptCheckpoint."""
    record = tensors.get(name)
    if record is None:
        raise CorruptCheckpoint(f"it has no tensor {name}, and the model has one")
    if record.shape != shape:
        raise CorruptCheckpoint(
            f"tensor {name} has shape {record.shape}, the model's config.json asks for {shape}"
        )


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
