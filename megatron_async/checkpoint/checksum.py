"""Computes a checksum of a tensor that equals the sum of the checksums of its slices, however the
tensor is cut.

    checksum(whole) == sum(checksum(piece) for piece in any cut of it)    (mod 2**64)

Each element's bits and its index in the whole tensor are hashed together; the checksum is the sum
of these hashes. Two tensors have the same checksum exactly when the same bits are at the same
indices (except by chance, with probability 2**-64). So ranks can compute the checksum of a tensor
that none of them has completely, however it is divided over them: each sums over its own slices,
and the sums are added.

A `TensorTally` accumulates the checksum slice by slice and rank by rank.

Invariants
- Checkpoints contain the value, so it does not depend on the layout, the device or the chunk size.
- The computation runs on the tensor's own device in chunks, so that it needs the memory of one
  chunk, whatever the tensor's size.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, repeat
from math import prod

import torch
from torch import Tensor

from megatron_async.checkpoint.manifest import CorruptCheckpoint, TensorRecord

# Odd constants of the hash: 2**64 divided by the golden ratio (Knuth 1998, section 6.4), and the
# two factors of SplitMix64's mixing function (Steele, Lea and Flood 2014, OOPSLA, figure 15).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of elements from which on a slice in host memory is divided over threads.
_LARGE = 1 << 22
# Number of elements that are processed at a time, by device: few enough for the cache of a CPU
# core; on a GPU many, so that it is busy.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}


def checksum(piece: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the checksum of `piece`, a slice of a larger tensor, as an int64 scalar on its device.

    Sums are modulo 2**64. A large slice in host memory is divided over as many threads as torch
    uses.

    Args:
        piece: A slice with one or two axes.
        offsets: Index of the slice's first element in the whole tensor, one number for each axis.
        shape: Shape of the whole tensor.
    """
    threads = torch.get_num_threads()
    if piece.device.type != "cpu" or threads == 1 or piece.numel() < _LARGE:
        return _checksum(piece, offsets, shape)
    slices = piece.chunk(threads)
    first_rows = accumulate((len(piece_slice) for piece_slice in slices), initial=offsets[0])
    slice_offsets = [(first, *offsets[1:]) for first in first_rows]
    with ThreadPoolExecutor(threads) as pool:
        sums = pool.map(_checksum, slices, slice_offsets, repeat(shape))
        return torch.stack(list(sums)).sum()


def _checksum(piece: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Compute the result of `checksum`, with the same arguments, in the calling thread and in
    chunks of limited size."""
    stride = shape[-1]
    first = offsets[-1] + (offsets[0] * stride if len(shape) == 2 else 0)
    bits_RC = piece.detach().view(_BITS[piece.element_size()])
    bits_RC = bits_RC.reshape(-1, piece.shape[-1])
    # If the slice has whole rows, its elements have consecutive indices, so treat it as one row.
    if bits_RC.shape[1] == stride and bits_RC.is_contiguous():
        bits_RC = bits_RC.reshape(1, -1)
    limit = _CHUNK.get(piece.device.type, _CHUNK["cpu"])
    cols = min(limit, max(1, bits_RC.shape[1]))
    rows = min(max(1, limit // cols), max(1, bits_RC.shape[0]))
    rows_R, cols_C = (torch.arange(count, device=piece.device) for count in (rows, cols))
    index_hashes_RC = rows_R[:, None] * stride + cols_C
    index_hashes_RC *= signed(_GOLDEN)
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for row, band_RC in enumerate(bits_RC.split(rows)):
        for column, chunk_RC in enumerate(band_RC.split(cols, dim=1)):
            begin = first + row * rows * stride + column * cols
            hashes_RC = index_hashes_RC[: chunk_RC.shape[0], : chunk_RC.shape[1]] + chunk_RC
            hashes_RC += signed(begin * _GOLDEN)
            for constant in _MIX:
                hashes_RC ^= hashes_RC >> 32
                hashes_RC *= signed(constant)
            hashes_RC ^= hashes_RC >> 32
            total += hashes_RC.sum()
    return total


def signed(number: int) -> int:
    """Return the int64 that has the same bits as `number` modulo 2**64."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


@dataclass
class TensorTally:
    """Running sum of the checksums and element counts of a tensor's slices.

    Attributes:
        dtype: Name of the tensor's precision.
        shape: Shape of the whole tensor.
        checksum: Sum of the checksums of the slices so far.
        elements: Number of elements of the slices so far.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: int = 0
    elements: int = 0

    def add(self, checksum: int, elements: int) -> None:
        """Add the checksum and the number of elements of one slice, or of another tally."""
        self.checksum += checksum
        self.elements += elements

    def record(self, name: str) -> TensorRecord:
        """Return the manifest's record of tensor `name`: its precision, shape and total checksum.

        Raises:
            CorruptCheckpoint: If the number of counted elements differs from the size of the whole
                tensor.
        """
        if self.elements != prod(self.shape):
            raise CorruptCheckpoint(
                f"tensor {name} has {self.elements} of {prod(self.shape)} elements"
            )
        return TensorRecord(self.dtype, self.shape, f"{self.checksum % (1 << 64):016x}")


def tally(
    tallies: dict[str, TensorTally], name: str, shape: Sequence[int], dtype: torch.dtype
) -> TensorTally:
    """Return the tally (running checksum and element count) of tensor `name` from `tallies`; add a
    new one if it does not exist."""
    return tallies.setdefault(name, TensorTally(dtype_name(dtype), tuple(shape)))


def check_tensor(tensors: Mapping[str, TensorRecord], name: str, shape: tuple[int, ...]) -> None:
    """Check that a checkpoint has tensor `name` with the model's `shape`.

    Args:
        tensors: The records of the checkpoint's manifest.

    Raises:
        CorruptCheckpoint: If the tensor is missing or has another shape.
    """
    record = tensors.get(name)
    if record is None:
        raise CorruptCheckpoint(f"tensor {name} of the model is missing in the checkpoint")
    if record.shape != shape:
        raise CorruptCheckpoint(
            f"tensor {name} has shape {record.shape}; the model's config.json requires {shape}"
        )


def compare(expected: Mapping[str, TensorRecord], found: Mapping[str, TensorTally]) -> None:
    """Check that the precision, shape and checksum of every loaded tensor are those that were
    saved.

    Args:
        expected: The tensors' records in the manifest.
        found: The tallies (checksums and element counts) of the loaded tensors.

    Raises:
        CorruptCheckpoint: For the first tensor, by name, that differs.
    """
    for name, record in sorted(expected.items()):
        loaded = found[name].record(name)
        if loaded != record:
            raise CorruptCheckpoint(
                f"tensor {name} has checksum {loaded.checksum} after loading; it was saved with "
                f"checksum {record.checksum}"
            )


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with this name, the inverse of `dtype_name`.

    Raises:
        CorruptCheckpoint: If the name does not belong to a floating-point dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise CorruptCheckpoint(f"{name!r} is not the name of a floating-point dtype")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype as checkpoints have it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
