"""Tests the metrics of a batch: times, differences since the batch before, and only what was
measured.

Generation time is the time in which requests may run; pauses and waits do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler.counts import SchedulerView
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.sample_lag import SamplesTrained
from megatron_async.trajectory.types import PolicyVersion


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def view(**counts: Any) -> SchedulerView:
    start = Scheduler(ScheduleConfig(), first_step=0, version=PolicyVersion(0, 0))
    return replace(start.view(), **counts)


def batch(step: int = 0) -> TokenBatch:
    return TokenBatch(
        step=step,
        token_ids_T=np.zeros(2, np.int32),
        loss_mask_T=np.array([0, 1], np.float32),
        rollout_logprobs_T=np.zeros(2, np.float32),
        version_T=np.array([-1, 0], np.int32),
        lag_T=np.zeros(2, np.int32),
        cu_seqlens_S1=np.array([0, 2], np.int32),
        rewards_S=np.ones(1, np.float32),
        group_ids_S=np.zeros(1, np.int64),
        trajectory_ids_S=np.zeros(1, np.int64),
        prompt_lengths_S=np.ones(1, np.int32),
        truncated_S=np.zeros(1, np.bool_),
        resumed_S=np.zeros(1, np.bool_),
    )


def metrics_of(
    statistics: RolloutStatistics, batch: TokenBatch, view: SchedulerView
) -> dict[str, float]:
    return statistics.batch_metrics(batch, view, ScorerCount(8, count=3, seconds=0.2))


def test_generation_time_stops_between_batch_and_update_when_overlap_is_off() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=False, clock=clock)
    statistics.running_changed(4)
    clock.now += 2
    statistics.generated(100)
    first = metrics_of(statistics, batch(), view())
    assert first["rollout/seconds"] == pytest.approx(2)
    assert first["rollout/slots_busy_share"] == pytest.approx(1)

    clock.now += 3  # Aborted requests are ending and the trainer works.
    statistics.running_changed(0)
    statistics.update_started()
    clock.now += 1
    statistics.update_ended()
    statistics.running_changed(2)
    clock.now += 4
    statistics.generated(100)
    second = metrics_of(statistics, batch(1), view())
    assert second["rollout/seconds"] == pytest.approx(4)
    assert second["rollout/tokens_per_second"] == pytest.approx(25)
    # There are 2 requests, and at most 4 are permitted.
    assert second["rollout/slots_busy_share"] == pytest.approx(0.5)
    assert second["rollout/seconds_since_last_batch"] == pytest.approx(8)
    assert second["rollout/update_pause_seconds"] == pytest.approx(1)


def test_token_rate_is_measured_over_generation_time() -> None:
    """A batch that was complete before the trainer asked for it has no generation time; its tokens
    count for the next rate."""
    clock = Clock()
    statistics = RolloutStatistics(overlap=True, clock=clock)
    rates = []
    for step, (seconds, tokens) in enumerate([(2.0, 100), (0.001, 500), (3.0, 40)]):
        clock.now += seconds
        statistics.generated(tokens)
        rates.append(metrics_of(statistics, batch(step), view()).get("rollout/tokens_per_second"))
    assert rates == [pytest.approx(50), None, pytest.approx(540 / 3.001)]


def test_generation_time_excludes_only_update_pauses_when_overlap_is_on() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=True, clock=clock)
    statistics.running_changed(4)
    clock.now += 2
    metrics_of(statistics, batch(), view())
    clock.now += 3
    statistics.update_started()
    clock.now += 1
    statistics.update_ended()
    clock.now += 2
    statistics.generated(50)
    metrics = metrics_of(statistics, batch(1), view())
    assert metrics["rollout/seconds"] == pytest.approx(5)
    assert metrics["rollout/tokens_per_second"] == pytest.approx(10)
    assert metrics["rollout/slots_busy_share"] == pytest.approx(1)


def test_kv_usage_is_the_mean_of_new_reports_or_else_of_the_last_ones() -> None:
    statistics = RolloutStatistics(overlap=False, clock=Clock())
    assert "rollout/kv_usage" not in metrics_of(statistics, batch(), view()), (
        "no engine reported it"
    )
    for engine, usage in (("a", 0.2), ("a", 0.4), ("b", 0.9)):
        statistics.loaded(engine, usage, 0)
    seen = [metrics_of(statistics, batch(step), view()) for step in (1, 2)]
    assert [m["rollout/kv_usage"] for m in seen] == pytest.approx([0.5, 0.65])
    assert [m["rollout/kv_usage_max"] for m in seen] == [0.9, 0.9]
    statistics.engine_lost("b")
    assert metrics_of(statistics, batch(3), view())["rollout/kv_usage"] == pytest.approx(0.4)


def test_trajectories_of_a_dropped_batch_are_not_counted_as_trained() -> None:
    statistics = RolloutStatistics(overlap=False, clock=Clock())
    metrics_of(statistics, batch(), view())
    old = replace(batch(1), version_T=np.array([-1, 0], np.int32))
    statistics.batch_dropped(0, "nonfinite", 1)
    metrics = metrics_of(statistics, old, view())
    assert metrics["rollout/lag_samples_max"] == 0
    assert metrics["rollout/dropped_nonfinite"] == 1


def test_busy_share_is_relative_to_a_concurrency_that_was_lowered() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=True, clock=clock)
    statistics.running_changed(8)
    clock.now += 1
    metrics_of(statistics, batch(), view(concurrency=8))
    statistics.running_changed(4)
    metrics_of(statistics, batch(1), view(concurrency=4))
    clock.now += 1
    metrics = metrics_of(statistics, batch(2), view(concurrency=4))
    assert metrics["rollout/slots_busy_share"] == pytest.approx(1)


def test_environment_metrics_count_since_the_batch_before() -> None:
    statistics = RolloutStatistics(overlap=False, clock=Clock())
    for seconds, turns in ((0.5, 7), (0.1, 2)):
        statistics.environment_called(seconds, Counter())
        statistics.episode_ended(turns)
    first = metrics_of(statistics, batch(), view())
    assert (first["rollout/turns_mean"], first["rollout/turns_max"]) == (4.5, 7)
    assert first["rollout/environment_seconds"] == pytest.approx(0.3)
    assert first["rollout/environment_seconds_max"] == 0.5
    statistics.environment_called(0.2, Counter())
    second = metrics_of(statistics, batch(1), view())
    assert (second["rollout/turns_mean"], second["rollout/turns_max"]) == (0, 0)
    assert second["rollout/environment_seconds_max"] == 0.2


def test_lag_is_split_at_the_version_under_which_the_group_was_completed() -> None:
    """Batch 7 has group 0, whose trajectories 0 and 1 got rewards under versions 4 and 6, and group
    1, which was complete when the process started with version 3."""
    trained = SamplesTrained(7, 3, {})
    statistics = RolloutStatistics(overlap=True, trained=trained, version=3, clock=Clock())
    statistics.rewarded(0, 4)
    statistics.rewarded(1, 5)
    statistics.rewarded(1, 6)  # Trajectory 1 was generated again, after a failure of its scorer.
    version_T = np.array([-1, 2, -1, 5, -1, 1, 1], np.int32)
    trained_T = version_T >= 0
    packed = replace(
        batch(7),
        token_ids_T=np.zeros(7, np.int32),
        loss_mask_T=trained_T.astype(np.float32),
        version_T=version_T,
        lag_T=np.where(trained_T, 7 - version_T, 0).astype(np.int32),
        cu_seqlens_S1=np.array([0, 2, 4, 7], np.int32),
        rewards_S=np.ones(3, np.float32),
        group_ids_S=np.array([0, 0, 1]),
        trajectory_ids_S=np.array([0, 1, 2]),
        prompt_lengths_S=np.ones(3, np.int32),
        truncated_S=np.zeros(3, np.bool_),
        resumed_S=np.zeros(3, np.bool_),
    )
    metrics = metrics_of(statistics, packed, view())
    assert metrics["rollout/lag_mean"] == pytest.approx((5 + 2 + 6 + 6) / 4)
    assert metrics["rollout/lag_in_queue_mean"] == pytest.approx((1 + 1 + 4 + 4) / 4)
    assert metrics["rollout/lag_before_queue_mean"] == pytest.approx((4 + 1 + 2 + 2) / 4)
    assert not statistics._rewarded, "rewards of trained trajectories are kept for ever"


def test_waiting_for_the_trainer_counts_only_while_it_is_awaited() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=True, clock=clock)
    seconds = []
    for step, (waits, passed) in enumerate([(False, 2.0), (True, 3.0), (True, 4.0), (False, 5.0)]):
        statistics.trainer_awaited(waits)
        clock.now += passed
        metrics = metrics_of(statistics, batch(step), view())
        seconds.append(metrics["rollout/wait_for_trainer_seconds"])
    assert seconds == pytest.approx([0.0, 3.0, 4.0, 0.0])
