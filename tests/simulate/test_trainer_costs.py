"""Padding and updates in the trainer's cost model."""

from __future__ import annotations

import pytest

from megatron_async.config import build_config
from megatron_async.simulate.build import trainer_costs
from megatron_async.simulate.trainer_costs import TrainerCosts


def costs(**simulate: object) -> TrainerCosts:
    settings = {"model": "qwen2.5-0.5b", "gpu": {"name": "A100"}, **simulate}
    return trainer_costs(build_config({"parallel": {"ranks": 1}, "simulate": settings}))


def test_padding_goes_to_the_longest_of_the_batch_not_of_the_update() -> None:
    padded = costs(padding="batch").batch_seconds([300, 100, 100, 200], 2)
    assert padded == pytest.approx(costs().batch_seconds([300] * 4, 2))


def test_equal_lengths_need_no_padding() -> None:
    lengths = [200] * 8
    both = [costs(padding=p).batch_seconds(lengths, 2) for p in ("packed", "batch")]
    assert both[0] == both[1]


def test_each_update_adds_its_fixed_cost() -> None:
    given = costs(trainer_seconds_per_token=0.001, trainer_seconds_per_update=3.0)
    once, twice = (given.batch_seconds([100] * 4, updates) for updates in (1, 2))
    assert twice - once == pytest.approx(3.0)
