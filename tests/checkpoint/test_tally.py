"""The checksum of a tensor as ranks add it up: modulo 2^64, of every element once."""

from __future__ import annotations

import pytest
import torch

from megatron_async.checkpoint.checksum import (
    TensorTally,
    compare,
    dtype_name,
    dtype_named,
    signed,
    tally,
)
from megatron_async.checkpoint.manifest import CorruptCheckpoint, TensorRecord

SHAPE = (3, 4)


def saved(checksum: str = "000000000000000c", shape: tuple[int, ...] = SHAPE) -> TensorRecord:
    return TensorRecord("float32", shape, checksum)


def test_pieces_add_up_modulo_2_to_the_64() -> None:
    known = TensorTally("float32", SHAPE)
    known.add((1 << 63) + 5, 8)
    known.add((1 << 63) + 7, 4)
    assert known.record("w") == saved()


@pytest.mark.parametrize("elements", [0, 11, 13, 24])
def test_elements_that_are_missing_or_counted_twice_are_corrupt(elements: int) -> None:
    known = TensorTally("float32", SHAPE, 12, elements)
    with pytest.raises(CorruptCheckpoint, match=f"tensor w has {elements} of 12 elements"):
        known.record("w")


@pytest.mark.parametrize(
    "found",
    [
        TensorTally("float32", SHAPE, 13, 12),
        TensorTally("float32", SHAPE, 12 + (1 << 63), 12),
        TensorTally("bfloat16", SHAPE, 12, 12),
        TensorTally("float32", (4, 3), 12, 12),
    ],
)
def test_every_tensor_is_compared_and_the_first_that_differs_is_named(found: TensorTally) -> None:
    equal = TensorTally("float32", SHAPE, 12, 12)
    compare({"a": saved(), "b": saved()}, {"a": equal, "b": equal})
    with pytest.raises(CorruptCheckpoint, match="tensor b as loaded has checksum"):
        compare({"b": saved(), "a": saved()}, {"a": equal, "b": found})


@pytest.mark.parametrize("checksum", [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) + 3])
def test_a_tensor_of_int64_holds_all_of_its_bits(checksum: int) -> None:
    held = int(torch.tensor(signed(checksum), dtype=torch.int64))
    assert held % (1 << 64) == checksum % (1 << 64)


def test_an_entry_is_made_once_and_added_to() -> None:
    tallies: dict[str, TensorTally] = {}
    for _ in range(2):
        tally(tallies, "w", torch.Size(SHAPE), torch.bfloat16).add(1, 6)
    assert tallies == {"w": TensorTally("bfloat16", SHAPE, 2, 12)}


def test_names_of_precisions_go_there_and_back() -> None:
    assert dtype_named(dtype_name(torch.bfloat16)) is torch.bfloat16
    for other in ("int64", "Tensor", "nonsense"):
        with pytest.raises(CorruptCheckpoint, match="is not the name of a precision"):
            dtype_named(other)
