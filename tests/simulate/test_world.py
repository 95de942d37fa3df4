"""Tests of simulated runs with every preset: order of batches, accounting of tokens, lag and shared
GPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron_async.config.load import build_simulation, merge
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.scheduler.record import Recorder
from megatron_async.simulate.build import build_world, simulate
from megatron_async.simulate.statistics import BatchLag, Statistics
from megatron_async.simulate.world import World

SMALL: dict[str, Any] = {
    "parallel": {"ranks": 2},
    "engines": {"count": 2},
    "sampling": {"max_new_tokens": 2000},
    "schedule": {"groups_per_batch": 6, "group_size": 4, "concurrency": 40},
    "simulate": {
        "model": "qwen2.5-0.5b",
        "gpu": {"name": "A100"},
        "lengths": {"median": 400, "sigma": 0.8, "prompt_tokens": 50},
        "steps": 12,
        "warmup_steps": 4,
    },
}
PRESETS = ("sync", "rapid", "copris", "pipeline", "async")


def config(preset: str, **simulate: Any) -> SimulationConfig:
    schedule: dict[str, Any] = {"preset": preset}
    if preset == "rapid":
        schedule["updates_per_batch"] = 3
    return build_simulation(merge(SMALL, {"schedule": schedule, "simulate": simulate}))


def run(settings: SimulationConfig, recorder: Recorder | None = None) -> World:
    world = build_world(settings, recorder)
    world.run(settings.simulate.steps)
    return world


@pytest.mark.parametrize("preset", PRESETS)
def test_world_trains_batches_in_order_with_every_preset(preset: str) -> None:
    settings = config(preset)
    world = run(settings)
    rows = world.statistics.rows
    # With overlap a batch may be taken early, but no batch is skipped or repeated.
    assert [row.step for row in rows][:12] == list(range(12))
    assert all(row.sequences == 24 for row in rows)
    assert [lag.step for lag in world.statistics.lags][:12] == list(range(12))


@pytest.mark.parametrize("preset", PRESETS)
def test_simulation_repeats_when_settings_are_equal(preset: str) -> None:
    assert simulate(config(preset)) == simulate(config(preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_world_accounts_for_every_generated_token(preset: str) -> None:
    world = run(config(preset))
    statistics = world.statistics
    mark = statistics.marks[-1]
    trained = sum(lag.tokens for lag in statistics.lags)
    remaining = sum(response.tokens for response in world._responses.values())
    unreported = sum(
        engine.steps - request.joined - request.reported
        for engine in world._engines.values()
        for request in engine.running.values()
    )
    known = trained + remaining + mark.wasted + unreported
    # A request that is removed in the middle of a token generates that token again.
    interruptions = 12 * 40 + mark.engines.preemptions
    assert -1 <= mark.engines.generated - known <= interruptions


@pytest.mark.parametrize("preset", ["sync", "rapid"])
def test_draining_schedule_is_on_policy(preset: str) -> None:
    summary = simulate(config(preset))
    assert (summary.lag_max, summary.off_policy, summary.recomputed) == (0, 0, 0)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_async_schedule_keeps_lag_within_max_async_level(level: int) -> None:
    settings = merge(SMALL, {"schedule": {"preset": "async", "max_async_level": level}})
    world = run(build_simulation(settings))
    assert max(lag.lag_max for lag in world.statistics.lags) <= level
    if level:
        assert max(lag.lag_max for lag in world.statistics.lags) > 0


def test_step_phases_add_up_to_step_time_on_shared_gpus() -> None:
    summary = simulate(config("copris", placement="colocated", offload=True))
    step = summary.rollout_seconds + summary.train_seconds + summary.update_seconds
    assert step == pytest.approx(summary.step_seconds, rel=1e-6)


def test_build_world_refuses_unequal_gpu_counts_when_colocated() -> None:
    settings = merge(SMALL, {"parallel": {"ranks": 4}, "simulate": {"placement": "colocated"}})
    with pytest.raises(UserError, match=r"and 4 trainer GPUs \(parallel\.ranks\)"):
        build_world(build_simulation(merge(settings, {"schedule": {"preset": "copris"}})))


def test_statistics_exclude_masked_tokens_from_lag() -> None:
    whole, masked = Statistics([]), Statistics([])
    for step in range(5):
        for statistics in (whole, masked):
            statistics.batch(step, [[(step, 1)]], [step], None)
    written = [[(3, 10), (5, 20)], [(4, 1)], [(3, 7)]]
    whole.batch(5, written, [5, 4, 4], None)
    masked.batch(5, written, [5, 4, 4], 4)
    assert whole.lags[-1] == BatchLag(5, 38, 35.0, 8.0, 2, 18, 3, 5, 2)
    assert masked.lags[-1] == BatchLag(5, 21, 1.0, 1.0, 1, 1, 2, 1, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_lag_has_a_part_before_and_a_part_in_the_queue(preset: str) -> None:
    summary = simulate(config(preset))
    parts = (summary.lag_mean - summary.lag_in_queue, summary.lag_in_queue)
    assert min(parts) >= 0
    assert (min(parts) > 0) == (preset in ("copris", "pipeline", "async"))


def test_the_side_that_is_slower_does_not_wait() -> None:
    """With a fast trainer only the trainer waits, and with a slow one only the rollout side."""
    fast, slow = (
        simulate(
            config(
                "pipeline",
                trainer_seconds_per_token=1e-9,
                trainer_seconds_per_update=seconds,
                weight_update_seconds=0.01,
                efficiency={"batch_overhead_seconds": 0.0},
            )
        )
        for seconds in (0.0, 60.0)
    )
    assert fast.trainer_idle > 0.5 and fast.rollout_waits == 0
    assert slow.rollout_waits > 0.5 and slow.trainer_idle == 0
    assert slow.lag_in_queue > fast.lag_in_queue


def test_rollout_side_waits_for_the_whole_training_without_overlap() -> None:
    summary = simulate(config("sync"))
    waits = summary.rollout_waits * summary.step_seconds
    assert waits == pytest.approx(summary.train_seconds)


def publication(background: bool, train: float, transfer: float, preset: str = "pipeline") -> World:
    """Simulate a run whose trainer needs `train` seconds for a batch and whose weights take
    `transfer` seconds to send; copies and loads take 0.025 s."""
    return run(
        config(
            preset,
            trainer_seconds_per_token=1e-9,
            trainer_seconds_per_update=train,
            weight_update_seconds=transfer,
            background_publication=background,
            gpu={"name": "A100", "pcie_gb_per_s": 56.0},
            efficiency={"batch_overhead_seconds": 0.0, "weight_update_overhead_seconds": 0.0},
            steps=30,
            warmup_steps=10,
        )
    )


def step_seconds(world: World) -> float:
    marks = world.statistics.marks
    return (marks[-1].at - marks[9].at) / (len(marks) - 10)


@pytest.mark.parametrize("preset", ["pipeline", "async"])
def test_background_publication_takes_the_trainer_only_a_copy(preset: str) -> None:
    foreground, background = (publication(b, 20.0, 10.0, preset) for b in (False, True))
    assert step_seconds(foreground) == pytest.approx(30.0, rel=0.01)
    copy = background._trainer.copy_seconds
    assert 0.01 < copy < 0.1
    assert step_seconds(background) == pytest.approx(20.0 + copy, rel=0.01)


def test_next_publication_waits_for_the_one_under_way() -> None:
    """Updates are made every second, but a publication takes 10 s."""
    background = publication(True, 1.0, 10.0)
    costs = background._trainer
    publication_seconds = costs.copy_seconds + 10.0 + costs.publish_seconds
    assert step_seconds(background) == pytest.approx(publication_seconds, rel=0.01)
    times = [mark.at for mark in background.statistics.marks]
    assert min(b - a for a, b in itertools.pairwise(times)) >= publication_seconds * (1 - 1e-9)


def test_background_publication_counts_lag_by_loaded_versions() -> None:
    """The trainer is slow, so back-pressure lets groups start only when it takes a batch. Engines
    have loaded the version that it has made just before if the transfer takes no time. Otherwise
    they still serve the version before, so the lag is larger by one."""
    short, long = (publication(True, 20.0, seconds) for seconds in (0.0, 10.0))
    means = [
        sum(lag.lag_sum for lag in world.statistics.lags[10:])
        / sum(lag.tokens for lag in world.statistics.lags[10:])
        for world in (short, long)
    ]
    assert means[1] - means[0] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_async_schedule_keeps_its_bound_during_background_publication(level: int) -> None:
    changes = {"schedule": {"preset": "async", "max_async_level": level}}
    settings = merge(SMALL, {**changes, "simulate": {"background_publication": True}})
    world = run(build_simulation(settings))
    assert max(lag.lag_max for lag in world.statistics.lags) <= level


def test_background_publication_is_refused_on_shared_gpus() -> None:
    with pytest.raises(UserError, match="background_publication: false"):
        build_world(config("copris", placement="colocated", background_publication=True))
