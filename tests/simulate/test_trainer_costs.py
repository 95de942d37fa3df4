"""Padding and updates in the trainer's cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_async.config.load import build_simulation, merge
from megatron_async.launcher.derived import Machine, derive
from megatron_async.simulate.assumptions import assumptions
from megatron_async.simulate.build import trainer_costs
from megatron_async.simulate.trainer_costs import TrainerCosts
from megatron_async.weight_sync.stage_order import SENDERS_AT_ONCE

H100 = Machine("cuda", "H100", 80e9)


def costs(**simulate: object) -> TrainerCosts:
    settings = {"model": "qwen2.5-0.5b", "gpu": {"name": "A100"}, **simulate}
    return trainer_costs(build_simulation({"parallel": {"ranks": 1}, "simulate": settings}))


def test_padding_goes_to_the_longest_of_the_batch_not_of_the_update() -> None:
    padded = costs(padding="batch").batch_seconds([300, 100, 100, 200], 2)
    assert padded == pytest.approx(costs().batch_seconds([300] * 4, 2))


def test_batch_seconds_count_extra_passes_once_when_epochs_repeat() -> None:
    simulated = {"trainer_seconds_per_update": 3.0, "extra_forward_passes": 2.0}
    once = costs(**simulated)
    thrice = replace(once, epochs=3)
    without = costs(trainer_seconds_per_update=3.0)
    passes = once.batch_seconds([100] * 4, 2) - without.batch_seconds([100] * 4, 2)
    overhead = once.settings.efficiency.batch_overhead_seconds
    trained = without.batch_seconds([100] * 4, 2) - overhead
    expected = overhead + 3 * trained + passes
    assert passes > 0 and thrice.batch_seconds([100] * 4, 2) == pytest.approx(expected)
    config = build_simulation({"simulate": {"model": "qwen2.5-0.5b"}, "algorithm": {"epochs": 3}})
    assert trainer_costs(config).epochs == 3


def test_a_weight_update_takes_one_link_whatever_the_layout() -> None:
    """Stages send in turn (tests/weight_sync/test_stages.py), each from one leader."""
    simulated = {"model": "llama-3-70b", "gpu": {"name": "H100"}}

    def update(**layout: object) -> TrainerCosts:
        engines = {"count": 4, "tensor": 8}
        return trainer_costs(
            build_simulation({"parallel": layout, "engines": engines, "simulate": simulated})
        )

    alone = update(ranks=1)
    for layout in ({"ranks": 16, "tensor": 8, "pipeline": 2}, {"ranks": 32, "pipeline": 4}):
        assert update(**layout).publish_seconds == alone.publish_seconds
    share = alone.settings.efficiency
    sent = alone.publish_seconds - share.weight_update_overhead_seconds
    assert sent == pytest.approx(2 * 70.55e9 / (alone.gpu.network * share.weight_update), rel=0.01)
    assert SENDERS_AT_ONCE == 1, "count the links of all who send at once"


def test_a_simulation_recomputes_what_a_start_would_choose() -> None:
    model = {"simulate": {"model": "qwen2.5-7b"}, "parallel": {"ranks": 8, "tensor": 2}}
    sizes = {"trainer": {"microbatch_tokens": 20480}}
    config = build_simulation(merge(model, sizes))
    assert trainer_costs(config).recompute == derive(config, H100).config.trainer.recompute
    assert isinstance(trainer_costs(config).recompute, int)
    assert f"trainer.recompute: {trainer_costs(config).recompute}" in assumptions(config)
    given = build_simulation(merge(model, {"trainer": {"recompute": "none"}}))
    assert trainer_costs(given).recompute == "none"
