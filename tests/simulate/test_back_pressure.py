"""Tests of a scorer that is slower than generation: back-pressure limits the requests and
the lag."""

from __future__ import annotations

from typing import Any

from megatron_async.config.load import build_simulation, merge
from megatron_async.simulate.build import build_world
from megatron_async.simulate.world import World
from tests.simulate.test_world import SMALL

SLOW = {
    "warmup_steps": 1,
    "reward": {"scorer_seconds": 0.25},
    # Equal lengths and a fast trainer, so that neither stragglers nor the trainer cause lag.
    "lengths": {"distribution": "constant", "median": 100},
    "efficiency": {"batch_overhead_seconds": 0.1, "weight_update_overhead_seconds": 0.1},
}


def run(preset: str, scorers: int = 1, steps: int = 60, **schedule: Any) -> World:
    """Simulate a run with three quarters of a batch in flight, as in the quickstart."""
    sizes = {"preset": preset, "groups_per_batch": 8, "group_size": 4, "concurrency": 24}
    changes = {
        "schedule": {**sizes, **schedule},
        "simulate": SLOW,
        "task": {"scorer_workers": scorers},
    }
    world = build_world(build_simulation(merge(SMALL, changes)))
    world.run(steps)
    return world


def lags(world: World) -> list[int]:
    return [lag.lag_max for lag in world.statistics.lags]


def test_lag_stays_at_most_2_when_scorer_is_slower_than_generation() -> None:
    world = run("copris", steps=300)
    assert max(lags(world)) == 2
    assert "scoring_backlog" in world.statistics.warnings


def test_lag_grows_with_every_step_when_waiting_batches_are_unlimited() -> None:
    """This is the negative control: scoring limits the speed of this run."""
    unlimited = lags(run("copris", max_waiting_batches=10_000))
    assert unlimited[29] > 25 and unlimited[59] > 50
