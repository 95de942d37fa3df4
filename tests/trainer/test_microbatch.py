"""The microbatch plan: a partition, in step on all ranks, within budget, balanced, repeatable."""

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
def test_every_sequence_is_in_exactly_one_microbatch(
    lengths: list[int], data_parallel: int, budget: int
) -> None:
    result = plan(lengths, data_parallel, budget)
    found = sorted(int(index) for rank in result for micro in rank for index in micro)
    assert found == list(range(len(lengths)))


@settings(max_examples=200)
@given(lengths=LENGTHS, data_parallel=st.integers(1, 5), budget=st.integers(1, 600))
def test_all_ranks_run_the_same_number_of_microbatches_within_the_budget(
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
def test_costs_of_the_shards_are_within_grahams_bound(lengths: list[int], parts: int) -> None:
    """No shard costs more than the mean plus the costliest sequence (Graham 1969)."""
    cost_S = sequence_cost(np.array(lengths), hidden_size=32)
    loads = [float(cost_S[shard].sum()) for shard in balance(cost_S, parts)]
    assert max(loads) <= cost_S.sum() / parts + cost_S.max() + 1e-6


def test_long_tailed_lengths_are_balanced_within_five_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 0.8, size=512).astype(np.int64) + 2
    cost_S = sequence_cost(lengths, hidden_size=2048)
    loads = [float(cost_S[shard].sum()) for shard in balance(cost_S, 8)]
    assert max(loads) / (sum(loads) / 8) < 1.05


def test_spare_microbatches_are_used_to_even_out_the_work() -> None:
    """Rank 1 could do in one microbatch what it is given; it must take two, and splits evenly."""
    result = plan([100, 90, 45, 45, 45, 45], data_parallel=2, budget=100)
    assert [len(rank) for rank in result] == [2, 2]
    for rank in result:
        assert all(len(micro) for micro in rank)
