"""Tests reported metrics: effective sample size (ESS), staleness, lags, and metrics by lag."""

import math

import numpy as np
import pytest
import torch
from megatron_async_kernels.loss_torch import policy_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    RejectionRule,
)

from megatron_async.algorithms.metrics import effective_sample_size, finalize, lag_shares


def report(config: LossConfig | None = None, **more: list[float]) -> dict[str, float]:
    """Return the metrics of two sequences of two trained tokens each.

    The log-ratios are 0, log 2, log 3 and log 4; the lags are 0, 1, 1 and 12.
    """
    ratios = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    inputs = LossInputs(
        logprobs_T=ratios.log() - 5.0,
        rollout_logprobs_T=torch.full((4,), -5.0, dtype=torch.float64),
        advantages_T=torch.tensor([1.0, 1.0, -1.0, 3.0], dtype=torch.float64),
        mask_T=torch.ones(4, dtype=torch.float64),
        cu_seqlens_S1=torch.tensor([0, 2, 4]),
        lag_T=torch.tensor([0, 1, 1, 12]),
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in more.items()},
    )
    output = policy_loss(inputs, config or LossConfig(dual_clip=1.5), Denominators(4.0, 2.0))
    return finalize(output.metrics)


def test_effective_sample_size_equals_kishs_formula() -> None:
    assert effective_sample_size(4.0, 4.0, 4) == 1.0
    assert effective_sample_size(1.0, 1.0, 4) == 0.25
    assert effective_sample_size(0.0, 0.0, 4) == effective_sample_size(0.0, 0.0, 0) == 0.0


def test_finalize_reports_raw_ess_per_token_and_per_sequence() -> None:
    got = report()
    assert got["off_policy/ess"] == pytest.approx(10**2 / (4 * 30))
    assert got["off_policy/ess_sequence"] == pytest.approx(14**2 / (2 * (4 + 144)))
    assert got["off_policy/weight"] == pytest.approx(2.5)
    assert got["off_policy/weight_sequence"] == pytest.approx(7.0)
    assert got["off_policy/chi2_token"] == pytest.approx(30 / 4 - 1)
    assert got["off_policy/chi2_sequence"] == pytest.approx(148 / 2 - 1)


def test_staleness_is_the_mean_log_of_the_bounded_generation_weight() -> None:
    got = report(LossConfig(staleness_clip=3.0))
    assert got["off_policy/staleness"] == pytest.approx((math.log(2) + math.log(3)) / 2)
    assert got["off_policy/clipped_generations"] == 0.5


def test_finalize_reports_kl_and_extreme_log_ratios() -> None:
    got = report()
    assert got["off_policy/kl"] == pytest.approx(-math.log(24) / 4)
    assert got["off_policy/k3"] == pytest.approx((10 - 4 - math.log(24)) / 4)
    assert got["off_policy/log_ratio_max"] == pytest.approx(math.log(4))
    assert got["off_policy/log_ratio_min"] == pytest.approx(0.0)
    assert got["off_policy/log_weight_sequence_max"] == pytest.approx(math.log(12))
    assert got["off_policy/log_weight_sequence_min"] == pytest.approx(math.log(2))


def test_clip_fraction_counts_both_bounds_over_kept_tokens() -> None:
    """The ratios are 0.5 (clipped below, A < 0), 2 (clipped above), 1, and e^3, whose token is
    rejected. The smallest log-ratios keep their negative sign."""
    ratios = torch.tensor([0.5, 2.0, 1.0, math.exp(3.0)], dtype=torch.float64)
    inputs = LossInputs(
        logprobs_T=ratios.log(),
        rollout_logprobs_T=torch.zeros(4, dtype=torch.float64),
        advantages_T=torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        mask_T=torch.ones(4, dtype=torch.float64),
        cu_seqlens_S1=torch.tensor([0, 1, 4]),
    )
    config = LossConfig(rejection=(RejectionRule("token", "k3", -math.inf, 10.0),))
    got = finalize(policy_loss(inputs, config, Denominators(4.0, 2.0)).metrics)
    assert got["actor/clip_low"] == got["actor/clip_high"] == pytest.approx(1 / 3)
    assert got["actor/clip_fraction"] == pytest.approx(2 / 3)
    assert got["actor/kept_fraction"] == 0.75
    assert got["off_policy/log_ratio_min"] == pytest.approx(-math.log(2.0))
    assert got["off_policy/log_weight_sequence_min"] == pytest.approx(-math.log(2.0))


def test_weights_are_reported_by_lag_with_an_open_last_bin() -> None:
    got = report()
    assert got["off_policy/lag_1/share"] == 0.5
    assert got["off_policy/lag_1/weight"] == pytest.approx(2.5)
    assert got["off_policy/lag_1/ess"] == pytest.approx(25 / (2 * 13))
    assert got["off_policy/lag_1/log_ratio"] == pytest.approx(math.log(6) / 2)
    assert got["off_policy/lag_8/weight"] == pytest.approx(4.0)
    assert "off_policy/lag_3/share" not in got


def test_actor_metrics_are_means_over_kept_tokens() -> None:
    got = report(entropy_T=[1.0, 2.0, 3.0, 4.0])
    assert got["actor/clip_high"] == pytest.approx(2 / 4), (
        "the tokens with ratios 2 and 4, where A > 0"
    )
    assert got["actor/clip_dual"] == pytest.approx(1 / 4), "the token with ratio 3, where A < 0"
    assert got["actor/clip_low"] == 0.0 and got["actor/clip_fraction"] == 0.5
    assert got["actor/ratio"] == pytest.approx(2.5)
    assert got["actor/ppo_kl"] == pytest.approx(-math.log(24) / 4)
    assert got["actor/entropy"] == 2.5
    assert got["actor/advantage_mean"] == 1.0
    assert got["actor/advantage_std"] == pytest.approx(math.sqrt(2.0))
    assert got["actor/kept_fraction"] == 1.0 and got["actor/tokens"] == 4.0


def test_coefficient_and_its_ess_are_computed_from_the_bounded_weights() -> None:
    got = report(LossConfig(surrogate="reinforce", weight_level="token", weight_upper=2.0))
    assert got["actor/coefficient"] == pytest.approx(7 / 4)
    assert got["actor/coefficient_ess"] == pytest.approx(49 / (4 * 13))


def test_finalize_reports_reference_distance_and_loss_terms() -> None:
    got = report(
        LossConfig(kl_estimator="k2", kl_coef=0.5, entropy_coef=0.1),
        ref_logprobs_T=[-5.0] * 4,
        entropy_T=[1.0] * 4,
    )
    assert got["ref/kl"] == pytest.approx(math.log(24) / 4)
    assert got["ref/k3"] == pytest.approx(np.mean([1 / r - 1 + math.log(r) for r in (1, 2, 3, 4)]))
    assert got["loss/entropy"] == pytest.approx(-0.1)
    assert got["loss/kl"] > 0


def test_finalize_reports_no_means_when_no_token_is_trained() -> None:
    got = finalize(LossMetrics.empty())
    assert got["actor/tokens"] == 0.0 and "off_policy/ess" not in got


def test_lag_shares_ignore_untrained_tokens() -> None:
    got = lag_shares(torch.tensor([9, 0, 0, 2, 10]), torch.tensor([0.0, 1, 1, 1, 1]))
    assert got["staleness/lag_share_0"] == 0.5 and got["staleness/lag_share_2"] == 0.25
    assert got["staleness/lag_share_8"] == 0.25
    assert sum(got.values()) == 1.0
    assert lag_shares(torch.tensor([1]), torch.tensor([0.0])) == {}
