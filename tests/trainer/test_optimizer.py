"""The learning-rate schedule (the optimizer itself is tested through training steps)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.model import OptimizerConfig
from megatron_async.trainer.optimizer import learning_rate


def test_warm_up_is_linear_and_never_zero() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=3)
    rates = [learning_rate(config, update, 10) for update in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_the_cosine_goes_from_peak_to_minimum() -> None:
    config = OptimizerConfig(lr=2.0, min_lr=1.0, schedule="cosine")
    rates = [learning_rate(config, update, 4) for update in (0, 2, 4, 100)]
    assert rates == pytest.approx([2.0, 1.5, 1.0, 1.0])


@given(
    warmup=st.integers(0, 20),
    total=st.integers(1, 100),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_the_rate_stays_within_its_bounds_and_only_falls_after_warm_up(
    warmup: int, total: int, schedule: str
) -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(config, update, total) for update in range(total + 5)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
