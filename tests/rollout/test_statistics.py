"""Generation time is the time in which requests may run: paused and waiting time do not count."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.trajectory.batch import TokenBatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batch() -> TokenBatch:
    return TokenBatch(
        step=0,
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


def test_without_overlap_nothing_counts_between_a_batch_and_the_next_version() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=False, clock=clock)
    statistics.running_changed(4)
    clock.now += 2
    statistics.generated(100)
    first = statistics.batch_metrics(batch())
    assert first["rollout/seconds"] == pytest.approx(2)
    assert first["rollout/slots_busy_share"] == pytest.approx(1)

    clock.now += 3  # aborted requests are still leaving, the trainer works
    statistics.running_changed(0)
    statistics.update_began()
    clock.now += 1
    statistics.update_ended()
    statistics.running_changed(2)
    clock.now += 4
    statistics.generated(100)
    second = statistics.batch_metrics(batch())
    assert second["rollout/seconds"] == pytest.approx(4)
    assert second["rollout/tokens_per_second"] == pytest.approx(25)
    assert second["rollout/slots_busy_share"] == pytest.approx(0.5)  # 2 of 4
    assert second["rollout/seconds_since_last_batch"] == pytest.approx(8)
    assert second["rollout/update_pause_seconds"] == pytest.approx(1)


def test_with_overlap_only_the_pause_of_an_update_does_not_count() -> None:
    clock = Clock()
    statistics = RolloutStatistics(overlap=True, clock=clock)
    statistics.running_changed(4)
    clock.now += 2
    statistics.batch_metrics(batch())
    clock.now += 3
    statistics.update_began()
    clock.now += 1
    statistics.update_ended()
    clock.now += 2
    statistics.generated(50)
    metrics = statistics.batch_metrics(batch())
    assert metrics["rollout/seconds"] == pytest.approx(5)
    assert metrics["rollout/tokens_per_second"] == pytest.approx(10)
    assert metrics["rollout/slots_busy_share"] == pytest.approx(1)
