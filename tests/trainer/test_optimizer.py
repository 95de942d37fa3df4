"""Tests the learning-rate schedule, weight decay and the gradient norm; other tests cover the
optimizer through training steps."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.model import OptimizerConfig
from megatron_async.trainer import optimizer
from megatron_async.trainer.optimizer import gradient_norm, learning_rate
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session, weights


def test_learning_rate_warm_up_is_linear_and_never_zero() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=3)
    rates = [learning_rate(config, update, 10) for update in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_schedule_falls_from_peak_to_minimum() -> None:
    config = OptimizerConfig(lr=2.0, min_lr=1.0, schedule="cosine")
    rates = [learning_rate(config, update, 4) for update in (0, 2, 4, 100)]
    assert rates == pytest.approx([2.0, 1.5, 1.0, 1.0])


@given(
    warmup=st.integers(0, 20),
    total=st.integers(1, 100),
    schedule=st.sampled_from(["constant", "cosine"]),
)
def test_learning_rate_stays_in_bounds_and_never_rises_after_warm_up(
    warmup: int, total: int, schedule: str
) -> None:
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    rates = [learning_rate(config, update, total) for update in range(total + 5)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


@pytest.mark.parametrize(
    "optimizer", [{"distributed": True}, {"distributed": False}, {"name": "muon"}]
)
def test_weight_decay_applies_to_matrices_but_not_to_norms(
    model_dir: Path, optimizer: dict[str, Any]
) -> None:
    after = []
    for decay in (0.0, 0.5):
        optimizer_settings = {"lr": 0.01, "weight_decay": decay, **optimizer}
        with (
            single_process(),
            trainer_session(settings(model_dir, {"optimizer": optimizer_settings})) as trainer,
        ):
            before = weights(trainer)
            trainer.train_batch(ragged_batch())
            after.append(weights(trainer))
    without, decayed = after
    assert any("norm" in name for name in before)
    for name, value in before.items():
        decay_step = 0.0 if "norm" in name else 0.01 * 0.5
        assert decayed[name] == pytest.approx(without[name] - decay_step * value, abs=1e-6), name


def test_gradient_norm_is_exact_when_a_tensor_is_large(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this number of elements, the result of `torch.norm` in float32 is 1.7e-3 too small."""
    large = torch.full((28_000_000,), 1e-3)
    with single_process(), trainer_session(settings(model_dir)) as trainer:
        assert len(trainer.optimizer.chained_optimizers) == 1
        for pieces in (1, 7):
            cut = large.chunk(pieces)
            monkeypatch.setattr(optimizer, "_gradients_of", lambda _part, cut=cut: [*cut])
            norm = gradient_norm(trainer.optimizer)
            assert norm == pytest.approx(1e-3 * math.sqrt(len(large)), rel=1e-7)
