"""Tests that a tensor's checksum is the same for every cut, and differs after every change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.checkpoint import checksum as module
from megatron_async.checkpoint.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return bits.to(torch.uint8).view(dtype)


def whole(tensor: Tensor) -> int:
    """Return the checksum of a whole tensor."""
    return int(checksum(tensor, (0,) * tensor.dim(), tensor.shape))


def test_checksum_values_are_those_of_earlier_versions() -> None:
    """Manifests contain the values, so other values would need another format version."""
    ramp = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert f"{whole(ramp) % 2**64:016x}" == "c3c3f92f11377458"
    assert f"{whole(ramp.to(torch.bfloat16)) % 2**64:016x}" == "9836a71ca849a85e"


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[int, int, int, int]]]:
    """Draw a shape, and a grid of boxes that covers it."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    col_cuts = sorted({0, cols, *draw(st.lists(st.integers(0, cols), max_size=3))})
    grid = [(a, b, c, d) for a, b in pairwise(row_cuts) for c, d in pairwise(col_cuts)]
    return (rows, cols), grid


@pytest.mark.parametrize("dtype", DTYPES)
@given(cut=cut_tensors(), chunk=st.integers(1, 100))
def test_checksums_of_slices_sum_to_the_tensors_for_any_cut_and_chunk(
    dtype: torch.dtype, cut: Any, chunk: int
) -> None:
    """The sum is modulo 2**64, and does not depend on the size of the chunks of the computation."""
    shape, grid = cut
    tensor = random_tensor(shape, dtype)
    expected = whole(tensor)
    with mock.patch.dict(module._CHUNK, {"cpu": chunk}):
        views = [(tensor[a:b, c:d], (a, c)) for a, b, c, d in grid]
        found = sum(int(checksum(piece, offsets, shape)) for piece, offsets in views)
        copied = sum(int(checksum(piece.clone(), offsets, shape)) for piece, offsets in views)
    assert (found - expected) % 2**64 == (copied - expected) % 2**64 == 0


@pytest.mark.parametrize("shape", [(3, 700), (700, 3), (1, 999), (999,)])
def test_checksum_is_equal_when_computed_by_several_threads(shape: tuple[int, ...]) -> None:
    """Covers a whole tensor, and a slice that begins within a larger tensor."""
    tensor = random_tensor(shape)
    offsets, larger = (5,) * len(shape), tuple(count + 9 for count in shape)
    expected = whole(tensor), int(checksum(tensor, offsets, larger))
    with (
        mock.patch.object(module, "_LARGE", 1),
        mock.patch.object(torch, "get_num_threads", lambda: 4),
    ):
        assert (whole(tensor), int(checksum(tensor, offsets, larger))) == expected


class TestChecksumDiffers:
    tensor = random_tensor((40, 30))

    def test_checksum_differs_when_any_bit_is_flipped(self) -> None:
        seen = {whole(self.tensor)}
        bits = self.tensor.clone().view(torch.int32).view(-1)
        for number in range(0, len(bits), 7):
            for bit in range(32):
                bits[number] ^= -(1 << 31) if bit == 31 else 1 << bit
                seen.add(whole(bits.view(torch.float32).view(40, 30)))
                bits[number] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert len(seen) == 1 + len(range(0, len(bits), 7)) * 32

    def test_checksum_differs_when_two_values_are_swapped(self) -> None:
        seen = {whole(self.tensor)}
        for other in range(1, 1200):
            swapped = self.tensor.clone().view(-1)
            swapped[[0, other]] = swapped[[other, 0]]
            seen.add(whole(swapped.view(40, 30)))
        assert len(seen) == 1200

    def test_checksum_differs_when_index_or_sign_of_zero_changes(self) -> None:
        zeros = torch.zeros(8)
        assert whole(-zeros) != whole(zeros)
        assert int(checksum(zeros, (8,), (16,))) != whole(zeros)

    def test_checksum_is_equal_for_nans_of_equal_bits(self) -> None:
        assert whole(torch.full((5,), torch.nan)) == whole(torch.full((5,), torch.nan))
