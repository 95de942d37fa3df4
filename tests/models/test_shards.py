"""Tests that merging the shards of all ranks gives the original tensors, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_async.models.shards import Rule, ShardLayout, merge, split


def _rule(layout: ShardLayout, shapes: list[tuple[int, ...]], groups: int = 0) -> Rule:
    names = tuple(f"tensor{i}" for i in range(len(shapes)))
    return Rule(("parameter",), names, tuple(shapes), layout, groups=groups)


def _tensors(rule: Rule, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in zip(rule.tensors, rule.shapes, strict=True)
    }


def _shards(rule: Rule, tensors: dict[str, Tensor], size: int) -> list[Tensor]:
    def read(name: str, dim: int, start: int, stop: int) -> Tensor:
        return tensors[name].narrow(dim, start, stop - start)

    return [split(rule, rule.tensors, read, size, rank) for rank in range(size)]


def _check_identity(rule: Rule, size: int, seed: int) -> list[Tensor]:
    tensors = _tensors(rule, seed)
    shards = _shards(rule, tensors, size)
    assert len({shard.shape for shard in shards}) == 1, "all ranks have equal shares"
    for merged, original in zip(merge(rule, shards), tensors.values(), strict=True):
        assert torch.equal(merged, original)
    return shards


SIZES = st.sampled_from([1, 2, 4])
COUNTS = st.integers(1, 3)
SEEDS = st.integers(0, 2**16)


@given(SIZES, COUNTS, COUNTS, SEEDS)
def test_merge_undoes_split_of_rows_and_of_columns(
    size: int, rows: int, columns: int, seed: int
) -> None:
    _check_identity(_rule(ShardLayout.ROWS, [(rows * size, columns)]), size, seed)
    _check_identity(_rule(ShardLayout.COLUMNS, [(rows, columns * size)]), size, seed)


@given(SIZES, COUNTS, COUNTS, COUNTS, st.booleans(), SEEDS)
def test_merge_undoes_split_of_qkv_with_grouped_heads(
    size: int, groups_per_rank: int, queries: int, head_dim: int, bias: bool, seed: int
) -> None:
    groups = groups_per_rank * size
    rows = [groups * queries * head_dim, groups * head_dim, groups * head_dim]
    shapes: list[tuple[int, ...]] = [(count,) if bias else (count, 5) for count in rows]
    _check_identity(_rule(ShardLayout.QKV, shapes, groups), size, seed)


@given(SIZES, COUNTS, SEEDS)
def test_merge_undoes_split_of_gate_and_up(size: int, rows: int, seed: int) -> None:
    _check_identity(_rule(ShardLayout.GATE_UP, [(rows * size, 3)] * 2), size, seed)


@given(SIZES, st.integers(16, 40), SEEDS)
def test_split_pads_vocabulary_with_zero_rows_when_not_divisible(
    size: int, vocab: int, seed: int
) -> None:
    shards = _check_identity(_rule(ShardLayout.VOCAB, [(vocab, 3)]), size, seed)
    padded = torch.cat(shards)
    assert padded.shape[0] % size == 0
    assert padded.shape[0] - vocab < size
    assert not padded[vocab:].any()
