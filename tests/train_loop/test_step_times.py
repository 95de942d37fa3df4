"""Tests that the times of a trainer's step add up."""

from __future__ import annotations

import pytest

from megatron_async.telemetry.metrics import TRAINER_PHASES
from megatron_async.train_loop.step_times import StepTimes


def test_step_times_exclude_the_time_of_inner_phases_and_add_up() -> None:
    now = 0.0
    times = StepTimes(lambda: now)
    with times.measure("time/train"):
        now += 2
        with times.measure("time/verify"):
            now += 3
        now += 4
    now += 100  # No phase is running.
    with pytest.raises(ValueError), times.measure("time/publish"):
        now += 5
        raise ValueError
    found = times.take()
    assert found["time/train"] == 6 and found["time/verify"] == 3 and found["time/publish"] == 5
    assert found["time/step"] == 14
    assert found.keys() == {*(metric for _, metric in TRAINER_PHASES), "time/step"}
    assert set(times.take().values()) == {0.0}, "each time belongs to one step"
