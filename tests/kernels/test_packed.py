"""Reductions over packed sequences."""

import math

import torch
from megatron_async_kernels.packed import masked, segment_max, segment_sum, spread

CU_SEQLENS = torch.tensor([0, 2, 2, 5])


def test_sums_maxima_and_spreading_respect_borders_and_empty_sequences() -> None:
    values_T = torch.tensor([-1.0, -3.0, -2.0, -5.0, -4.0])
    assert segment_sum(values_T, CU_SEQLENS).tolist() == [-4.0, 0.0, -11.0]
    assert segment_max(values_T, CU_SEQLENS).tolist() == [-1.0, -math.inf, -2.0]
    spread_T = spread(torch.tensor([1.0, 2.0, 3.0]), CU_SEQLENS)
    assert spread_T.tolist() == [1.0, 1.0, 3.0, 3.0, 3.0]


def test_an_empty_stream_reduces_to_nothing() -> None:
    nothing = torch.zeros(0)
    assert segment_sum(nothing, torch.tensor([0])).numel() == 0
    assert segment_sum(nothing, torch.tensor([0, 0])).tolist() == [0.0]


def test_masking_replaces_nan() -> None:
    got = masked(torch.tensor([math.nan, 2.0]), torch.tensor([0.0, 1.0]))
    assert got.tolist() == [0.0, 2.0]
