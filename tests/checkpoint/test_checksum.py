"""The checksum of a tensor: the same for every cut of it, another one for every change."""

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
    return int(checksum(tensor, (0,) * tensor.dim(), tensor.shape))


def test_values_never_change() -> None:
    """They are in manifests: another value means another format."""
    ramp = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert f"{whole(ramp) % 2**64:016x}" == "c3c3f92f11377458"
    assert f"{whole(ramp.to(torch.bfloat16)) % 2**64:016x}" == "9836a71ca849a85e"


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, int], list[tuple[int, int, int, int]]]:
    """A shape, and a grid of boxes that covers it."""
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    row_cuts = sorted({0, rows, *draw(st.lists(st.integers(0, rows), max_size=3))})
    col_cuts = sorted({0, cols, *draw(st.lists(st.integers(0, cols), max_size=3))})
    grid = [(a, b, c, d) for a, b in pairwise(row_cuts) for c, d in pairwise(col_cuts)]
    return (rows, cols), grid


@pytest.mark.parametrize("dtype", DTYPES)
@given(cut=cut_tensors(), chunk=st.integers(1, 100))
def test_pieces_add_up_to_the_whole(dtype: torch.dtype, cut: Any, chunk: int) -> None:
    """Modulo 2**64, and whatever the size of the chunks in which it is computed."""
    shape, grid = cut
    tensor = random_tensor(shape, dtype)
    expected = whole(tensor)
    with mock.patch.dict(module._CHUNK, {"cpu": chunk}):
        views = [(tensor[a:b, c:d], (a, c)) for a, b, c, d in grid]
        found = sum(int(checksum(piece, place, shape)) for piece, place in views)
        copied = sum(int(checksum(piece.clone(), place, shape)) for piece, place in views)
    assert (found - expected) % 2**64 == (copied - expected) % 2**64 == 0


@pytest.mark.parametrize("shape", [(3, 700), (700, 3), (1, 999), (999,)])
def test_threads_add_up_to_the_same(shape: tuple[int, ...]) -> None:
    """Of a whole tensor, and of a piece that begins within a larger one."""
    tensor = random_tensor(shape)
    offsets, larger = (5,) * len(shape), tuple(count + 9 for count in shape)
    expected = whole(tensor), int(checksum(tensor, offsets, larger))
    with (
        mock.patch.object(module, "_LARGE", 1),
        mock.patch.object(torch, "get_num_threads", lambda: 4),
    ):
        assert (whole(tensor), int(checksum(tensor, offsets, larger))) == expected


class TestWhatItFinds:
    tensor = random_tensor((40, 30))

    def test_any_flipped_bit(self) -> None:
        seen = {whole(self.tensor)}
        bits = self.tensor.clone().view(torch.int32).view(-1)
        for number in range(0, len(bits), 7):
            for bit in range(32):
                bits[number] ^= -(1 << 31) if bit == 31 else 1 << bit
                seen.add(whole(bits.view(torch.float32).view(40, 30)))
                bits[number] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert len(seen) == 1 + len(range(0, len(bits), 7)) * 32

    def test_two_values_in_each_others_places(self) -> None:
        seen = {whole(self.tensor)}
        for other in range(1, 1200):
            swapped = self.tensor.clone().view(-1)
            swapped[[0, other]] = swapped[[other, 0]]
            seen.add(whole(swapped.view(40, 30)))
        assert len(seen) == 1200

    def test_the_same_values_in_another_shape_or_with_the_sign_of_zero_changed(self) -> None:
        zeros = torch.zeros(8)
        assert whole(-zeros) != whole(zeros)
        assert int(checksum(zeros, (8,), (16,))) != whole(zeros)

    def test_not_numbers_are_compared_by_their_bits(self) -> None:
        assert whole(torch.full((5,), torch.nan)) == whole(torch.full((5,), torch.nan))
