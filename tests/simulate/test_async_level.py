"""Tests of `max_async_level` under `async`: k = 1 suffices for equal stages, and k = 2 for a slow
broadcast.

The trainer's seconds are set to those that generation takes without a trainer, so both stages last
equally long. Batches have 24 responses.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.config.load import build_simulation, merge
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary
from tests.simulate.test_world import SMALL

BATCH = 24
EQUAL_LENGTHS = {"distribution": "constant", "median": 400.0}
SPREAD_LENGTHS = {"distribution": "lognormal", "median": 400.0, "sigma": 0.3}
IDLE = 0.02
"""Share of the time up to which a side counts as busy. Measured are 0.2 % at most with k = 1 and
equal lengths, and 1.2 % with k = 2 and a slow broadcast."""


def run(
    level: int,
    lengths: dict[str, Any],
    *,
    train: float = 0.0,
    update: float = 0.0,
    in_flight: int = BATCH,
) -> Summary:
    """Simulate 50 steps after the warm-up, in which only generation, training and the weight update
    take time."""
    changes = {
        "schedule": {
            "preset": "async",
            "max_async_level": level,
            "on_stale": "wait",
            "concurrency": in_flight,
        },
        "simulate": {
            "lengths": lengths,
            "trainer_seconds_per_token": 1e-12,
            "trainer_seconds_per_update": train,
            "weight_update_seconds": update,
            "efficiency": {"batch_overhead_seconds": 0.0},
            "reward": {"scorer_seconds": 0.0},
            "steps": 60,
            "warmup_steps": 10,
        },
    }
    return simulate(build_simulation(merge(SMALL, changes)))


def generation_seconds(lengths: dict[str, Any]) -> float:
    """Return the seconds to generate one batch, with a trainer that takes no time."""
    return run(1, lengths).step_seconds


def test_engines_and_trainer_stay_busy_when_k_is_1_and_stages_are_equal() -> None:
    stage = generation_seconds(EQUAL_LENGTHS)
    both = run(1, EQUAL_LENGTHS, train=stage)
    assert both.engine_idle < IDLE and both.trainer_idle < IDLE
    assert both.step_seconds == pytest.approx(stage, rel=IDLE)


def test_engines_and_trainer_idle_half_the_time_when_k_is_0() -> None:
    """This is the control: without asynchrony, each side waits while the other works."""
    stage = generation_seconds(EQUAL_LENGTHS)
    both = run(0, EQUAL_LENGTHS, train=stage)
    assert both.engine_idle == pytest.approx(0.5, abs=IDLE)
    assert both.trainer_idle == pytest.approx(0.5, abs=IDLE)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_trainer_stays_busy_with_slow_broadcast_when_k_is_2(share: float) -> None:
    """The broadcast takes a quarter of a stage, or a whole stage, and lengths differ.

    With k = 1 the trainer waits for the longest response of every batch. With k = 2 it has the next
    batch when the broadcast is over: a step consists of training and broadcast only.
    """
    train = generation_seconds(SPREAD_LENGTHS)
    update = share * train
    one, two = (
        run(level, SPREAD_LENGTHS, train=train, update=update, in_flight=2 * BATCH)
        for level in (1, 2)
    )
    assert one.trainer_idle > 0.10
    assert two.trainer_idle < IDLE
    assert two.step_seconds == pytest.approx(train + update, rel=IDLE)
    assert one.step_seconds > 1.10 * two.step_seconds
