"""What the trainer's cost model says of padding and of updates."""

from __future__ import annotations

import pytest

from megatron_async.config import build_config
from megatron_async.simulate.build import trainer_costs
from megatron_async.simulate.trainer_costs import TrainerCosts, padded


def costs(**simulate: object) -> TrainerCosts:
    settings = {"model": "qwen2.5-0.5b", "gpu": {"name": "A100"}, **simulate}
    return trainer_costs(build_config({"parallel": {"ranks": 1}, "simulate": settings}))


def test_padding_goes_to_the_longest_of_a_microbatch() -> None:
    assert padded([3, 1, 2, 5, 4], 2) == [3, 3, 5, 5, 4]
    assert padded([3, 1, 2], 0) == [3, 1, 2]


def test_padded_tokens_cost_what_tokens_cost() -> None:
    plain = costs(padded_microbatch_sequences=2).batch_seconds([300, 100], 1)
    assert plain == pytest.approx(costs().batch_seconds([300, 300], 1))


def test_equal_lengths_need_no_padding() -> None:
    lengths = [200] * 8
    both = [costs(padded_microbatch_sequences=n).batch_seconds(lengths, 2) for n in (0, 4)]
    assert both[0] == both[1]


def test_each_update_adds_its_fixed_cost() -> None:
    given = costs(trainer_seconds_per_token=0.001, trainer_seconds_per_update=3.0)
    once, twice = (given.batch_seconds([100] * 4, updates) for updates in (1, 2))
    assert twice - once == pytest.approx(3.0)
