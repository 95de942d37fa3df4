"""Provides random microbatches and the loss configurations with which every implementation is
tested."""

from __future__ import annotations

from decimal import Decimal, localcontext

import torch
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossOutput,
    RejectionRule,
)

CONFIGS: dict[str, LossConfig] = {
    "ppo": LossConfig(clip_low=0.15, clip_high=0.28),
    "ppo dual, old": LossConfig(dual_clip=1.5, ratio_to="old", clip_high=0.3),
    "ppo, kl k3, entropy": LossConfig(
        kl_estimator="k3", kl_coef=0.3, kl_weight_upper=1.1, entropy_coef=0.05
    ),
    "reinforce": LossConfig(surrogate="reinforce"),
    "reinforce, token weight, truncated": LossConfig(
        surrogate="reinforce", weight_level="token", weight_upper=1.2
    ),
    "icepop": LossConfig(
        surrogate="reinforce", weight_level="token", weight_lower=0.7, weight_upper=1.3
    ),
    "rapid": LossConfig(
        surrogate="reinforce",
        weight_level="sequence",
        weight_upper=2.0,
        aggregation="seq_mean_token_sum",
    ),
    "aipo, kl k2": LossConfig(
        surrogate="aipo", aipo_delta=1.3, kl_estimator="k2", kl_coef=0.2, ratio_to="old"
    ),
    "cispo": LossConfig(surrogate="cispo", clip_low=0.1, clip_high=0.4),
    "gspo": LossConfig(
        surrogate="gspo", aggregation="seq_mean_token_mean", clip_low=0.02, clip_high=0.03
    ),
    "sft": LossConfig(surrogate="sft", aggregation="seq_mean_token_sum_norm", fixed_normalizer=7.0),
    "token rejection": LossConfig(
        aggregation="seq_mean_token_mean",
        rejection=(
            RejectionRule("token", "k1", -0.4, 0.3),
            RejectionRule("token", "k3", -1.0, 0.05),
        ),
    ),
    "sequence rejection": LossConfig(
        rejection=(
            RejectionRule("seq_mean", "k1", -0.1, 0.05),
            RejectionRule("seq_max", "k2", -1.0, 0.4),
            RejectionRule("seq_sum", "k3", -1.0, 3.0),
        )
    ),
    "gspo, mixed rejection": LossConfig(
        surrogate="gspo",
        rejection=(RejectionRule("token", "k2", -1.0, 0.1), RejectionRule("seq_sum", "k1", -2, 3)),
        entropy_coef=0.01,
    ),
}


def make_inputs(
    lengths: list[int],
    *,
    mask_share: float = 0.7,
    drift: float = 0.3,
    lag: bool = True,
    correction: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> LossInputs:
    """Return packed sequences with every stream present; untrained tokens have NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    mask_T = torch.rand(total, generator=generator) < mask_share
    logprobs_T = -normal(1.0).abs() - 0.1

    def stream(values_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, values_T, torch.nan).to(dtype)

    return LossInputs(
        logprobs_T=stream(logprobs_T),
        rollout_logprobs_T=stream(logprobs_T + normal(drift)),
        advantages_T=stream(normal(1.0)),
        mask_T=mask_T.to(dtype),
        cu_seqlens_S1=torch.tensor(
            [0, *torch.tensor(lengths).cumsum(0).tolist()][: len(lengths) + 1]
        ),
        old_logprobs_T=stream(logprobs_T + normal(drift)),
        ref_logprobs_T=stream(logprobs_T + normal(2 * drift)),
        entropy_T=stream(normal(1.0).abs()),
        is_weights_T=stream(normal(0.2).exp()) if correction else None,
        lag_T=torch.randint(0, 12, (total,), generator=generator) if lag else None,
    )


def exact_k3(distance: float) -> tuple[float, float]:
    """Compute exp(-d) - 1 + d of exactly this float, and 1 - exp(-d), to the last bit."""
    with localcontext(prec=60):
        d = Decimal(distance)
        return float((-d).exp() - 1 + d), float(1 - (-d).exp())


def kl_alone(weight_upper: float) -> tuple[LossInputs, LossConfig, Denominators, torch.Tensor]:
    """Return a loss of on-policy tokens at distances d of 1e-8 to 20 from the reference, whose only
    component is k3; the last result are the distances, [T].

    A `weight_upper` below 1 truncates the weight, which is 1 otherwise.
    """
    sizes_N = torch.cat([torch.logspace(-8, 1.3, 400), torch.tensor([0.05, 0.5, 1.0, 20.0])])
    distance_T = torch.cat([sizes_N.clamp(max=20.0), -sizes_N.clamp(max=20.0)]).float()
    zero_T = torch.zeros_like(distance_T)
    inputs = LossInputs(
        logprobs_T=zero_T,
        rollout_logprobs_T=zero_T,
        advantages_T=zero_T,
        mask_T=torch.ones_like(zero_T),
        cu_seqlens_S1=torch.tensor([0, len(zero_T)]),
        ref_logprobs_T=-distance_T,
    )
    config = LossConfig(kl_estimator="k3", kl_coef=1.0, kl_weight_upper=weight_upper)
    return inputs, config, Denominators(tokens=1.0, sequences=1.0), distance_T


def expected_slopes(distance_T: torch.Tensor, weight_upper: float) -> torch.Tensor:
    """Return the exact gradient of `kl_alone`, [T] in float64: d if the weight changes with the
    policy, otherwise y (1 - exp(-d))."""
    if weight_upper >= 1:
        return distance_T.double()
    slopes = [weight_upper * exact_k3(d)[1] for d in distance_T.tolist()]
    return torch.tensor(slopes, dtype=torch.float64)


DENOMINATORS = Denominators(tokens=37.0, sequences=5.0, weight_mean=1.1)


def assert_same_output(mine: LossOutput, theirs: LossOutput, *, rtol: float, atol: float) -> None:
    """Assert that all numbers of two loss outputs agree, whichever package's types they are."""
    close = {"rtol": rtol, "atol": atol, "check_dtype": False, "equal_nan": False}
    torch.testing.assert_close(mine.dlogp_T, theirs.dlogp_T, **close)
    torch.testing.assert_close(mine.loss_sum, theirs.loss_sum, **close)
    assert (mine.dentropy_T is None) == (theirs.dentropy_T is None)
    if mine.dentropy_T is not None:
        torch.testing.assert_close(mine.dentropy_T, theirs.dentropy_T, **close)
    torch.testing.assert_close(mine.metrics.sums_M, theirs.metrics.sums_M, **close)
    torch.testing.assert_close(mine.metrics.lag_sums_LB, theirs.metrics.lag_sums_LB, **close)
    torch.testing.assert_close(mine.metrics.maxima_E, theirs.metrics.maxima_E, **close)
