"""Tests the microbatch plan: each sequence is in one microbatch, all ranks have equally many, and
the plan is within budget and balanced."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.trainer.microbatch import IndexArray, balance, plan_microbatches, sequence_cost

LENGTHS = st.lists(st.integers(2, 400), min_size=0, max_size=60)


def plan(lengths: list[int], data_parallel: int = 1, budget: int = 256) -> list[list[IndexArray]]:
    return plan_microbatches(
        np.array(lengths, dtype=np.int32),
        data_parallel=data_parallel,
        token_budget=budget,
        hidden_size=64,
    )


@settings(max_examples=200)
@given(lengths=LENGTHS, data_parallel=st.integers(1, 5), budget=st.integers(1, 600))
def test_microbatch_plan_contains_every_sequence_exactly_once(
    lengths: list[int], data_parallel: int, budget: int
) -> None:
    result = plan(lengths, data_parallel, budget)
    found = sorted(int(index) for rank in result for micro in rank for index in micro)
    assert found == list(range(len(lengths)))


@settings(max_examples=200)
@given(lengths=LENGTHS, data_parallel=st.integers(1, 5), budget=st.integers(1, 600))
def test_microbatch_plan_has_equal_counts_on_all_ranks_within_the_budget(
    lengths: list[int], data_parallel: int, budget: int
) -> None:
    result = plan(lengths, data_parallel, budget)
    assert len({len(rank) for rank in result}) == 1
    assert len(result[0]) >= 1
    for rank in result:
        for micro in rank:
            tokens = sum(lengths[index] for index in micro)
            assert tokens <= budget or len(micro) == 1


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(2, 400), min_size=1, max_size=60), parts=st.integers(1, 6))
def test_balance_keeps_shard_costs_within_grahams_bound(lengths: list[int], parts: int) -> None:
    """No shard costs more than the mean plus the costliest sequence (Graham 1969)."""
    cost_S = sequence_cost(np.array(lengths), hidden_size=32)
    loads = [float(cost_S[shard].sum()) for shard in balance(cost_S, parts)]
    assert max(loads) <= cost_S.sum() / parts + cost_S.max() + 1e-6


def test_balance_is_within_five_percent_when_lengths_are_long_tailed() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, size=512).astype(np.int64) + 2
    cost_S = sequence_cost(lengths, hidden_size=2048)
    loads = [float(cost_S[shard].sum()) for shard in balance(cost_S, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.05


def test_microbatch_plan_splits_evenly_when_a_rank_needs_fewer_microbatches() -> None:
    """One microbatch would be enough for rank 1, but it must run two like rank 0, and splits its
    sequences evenly."""
    result = plan([100, 90, 45, 45, 45, 45], data_parallel=2, budget=100)
    assert [len(rank) for rank in result] == [2, 2]
    for rank in result:
        assert all(len(micro) for micro in rank)
