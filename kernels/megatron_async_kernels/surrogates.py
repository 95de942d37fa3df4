"""Computes the surrogate losses of single tokens, with their derivatives in closed form.

Invariants
- Every function computes each of T tokens by itself, from its log-ratio and other values of the
  token or its sequence.
- Arguments must be finite, so the caller sets them to 0 at untrained tokens. The caller also
  applies masks, aggregation and denominators.
- The derivative of a bounded term is 0 if the bound is active. If a term equals its bound, the
  bound is not active.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_async_kernels.loss_types import GSPO_LOG_BOUND, SAFETY_BOUND, LossConfig


@dataclass(frozen=True, eq=False)
class Terms:
    """Values of a surrogate loss for each token, before masks and aggregation.

    A clip flag may be False instead of a tensor; that clip is then active for no token.

    Attributes:
        value_T: Loss of the token.
        dlogp_T: Derivative of the loss with respect to the token's log-prob.
        coefficient_T: Weight by which the surrogate multiplies the token's term;
            `loss_types.SUM_NAMES` has its formulas under `coefficient`.
        ratio_T: The token's probability under the current policy, divided by its probability under
            the policy that `ratio_to` names. For gspo it is the ratio of the token's sequence, and
            for sft 0.
        log_ratio_T: Logarithm of the token's ratio, clamped to [-SAFETY_BOUND, SAFETY_BOUND]; for
            sft 0.
        clip_high_T: Whether the upper clip is active.
        clip_low_T: Whether the lower clip is active.
        clip_dual_T: Whether the dual clip is active.
    """

    value_T: torch.Tensor
    dlogp_T: torch.Tensor
    coefficient_T: torch.Tensor
    ratio_T: torch.Tensor
    log_ratio_T: torch.Tensor
    clip_high_T: torch.Tensor | bool = False
    clip_low_T: torch.Tensor | bool = False
    clip_dual_T: torch.Tensor | bool = False


def bounded_exp(log_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clamp `log_T` to [-SAFETY_BOUND, SAFETY_BOUND], and compute the exponential of the result.

    Returns:
        The exponential, the clamped values, and whether each value of `log_T` is within the bounds;
        outside them, the derivatives of the first two results are 0.
    """
    clamped_T = log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return clamped_T.exp(), clamped_T, log_T.abs() <= SAFETY_BOUND


def k3_of(x_T: torch.Tensor) -> torch.Tensor:
    """Compute exp(x) - 1 - x. Near 0, where the log-ratios of on-policy tokens are, a series is
    used, because the difference would lose all precision."""
    series_T = torch.ones_like(x_T)
    for n in range(14, 2, -1):
        series_T = 1.0 + series_T * x_T / n
    return torch.where(x_T.abs() < 0.5, 0.5 * x_T * x_T * series_T, x_T.expm1() - x_T)


def truncate(
    weights: torch.Tensor, lower: float | None, upper: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Truncate weights; return the truncated weights, whether each weight was above `upper`, and
    whether it was below `lower`.

    With only an upper bound, a weight w becomes min(w, upper) (Espeholt et al. 2018, IMPALA; Yao et
    al. 2025, TIS). With a lower bound, weights outside [lower, upper] become 0 (IcePop, Ling Team
    2025).
    """
    never = torch.zeros_like(weights, dtype=torch.bool)
    high = never if upper is None else weights > upper
    low = never if lower is None else weights < lower
    if lower is not None:
        return torch.where(high | low, torch.zeros_like(weights), weights), high, low
    return weights if upper is None else weights.clamp(max=upper), high, low


def reinforce(
    logprobs_T: torch.Tensor,
    log_ratio_T: torch.Tensor,
    raw_weight_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
    weight_mean: float,
) -> Terms:
    """Compute the REINFORCE loss -w * A * log pi of each token, with the advantage A (Williams
    1992; PipelineRL, arXiv 2509.19128). The weight w is `raw_weight_T` after truncation, divided by
    `weight_mean` and multiplied by `correction_T`; it counts as a constant in the derivative.

    With one weight for each sequence and the aggregation `seq_mean_token_sum`, this is Eq. 3 of
    RAPID.
    """
    weight_T, high_T, low_T = truncate(raw_weight_T, config.weight_lower, config.weight_upper)
    coefficient_T = weight_T / weight_mean * correction_T
    ratio_T, clamped_T, _ = bounded_exp(log_ratio_T)
    return Terms(
        value_T=-coefficient_T * advantages_T * logprobs_T,
        dlogp_T=-coefficient_T * advantages_T,
        coefficient_T=coefficient_T,
        ratio_T=ratio_T,
        log_ratio_T=clamped_T,
        clip_high_T=high_T,
        clip_low_T=low_T,
    )


def aipo(
    log_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
) -> Terms:
    """Compute the AIPO loss -min(r, delta) * A of each token in the form of PRIME-RL, times
    `correction_T`. r is the probability ratio, delta is `config.aipo_delta`, and A is the advantage
    (LlamaRL, arXiv 2505.24034)."""
    ratio_T, clamped_T, inside_T = bounded_exp(log_ratio_T)
    high_T = ratio_T > config.aipo_delta
    coefficient_T = ratio_T.clamp(max=config.aipo_delta) * correction_T
    active_T = ~high_T & inside_T
    return Terms(
        value_T=-coefficient_T * advantages_T,
        dlogp_T=-correction_T * ratio_T * advantages_T * active_T,
        coefficient_T=coefficient_T,
        ratio_T=ratio_T,
        log_ratio_T=clamped_T,
        clip_high_T=high_T,
    )


def ppo_clip(
    log_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
) -> Terms:
    """Compute the PPO-clip loss of each token, max(-r * A, -clip(r) * A) (Schulman et al. 2017, Eq.
    7), times `correction_T`. r is the probability ratio and A the advantage. If A < 0 and
    `config.dual_clip` is set, the loss before the factor is at most -`dual_clip` * A (dual clip, Ye
    et al. 2020, arXiv 1912.09729, Eq. 5)."""
    ratio_T, clamped_T, inside_T = bounded_exp(log_ratio_T)
    return _clipped(ratio_T, clamped_T, inside_T, advantages_T, correction_T, config, dual=True)


def gspo(
    log_ratio_T: torch.Tensor,
    mean_log_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
) -> Terms:
    """Compute the GSPO loss of each token: the PPO-clip loss with the geometric mean of the ratios
    of the sequence instead of the token's ratio (arXiv 2507.18071, Eqs. 5 and 7).

    The derivative is that of GSPO-token (Eq. 14 of the paper). With the aggregation
    `seq_mean_token_mean` and one advantage for each sequence, it equals the gradient of the
    sequence objective.
    """
    ratio_T = mean_log_ratio_T.clamp(max=GSPO_LOG_BOUND).exp()
    clamped_T = log_ratio_T.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    inside_T = mean_log_ratio_T <= GSPO_LOG_BOUND
    return _clipped(ratio_T, clamped_T, inside_T, advantages_T, correction_T, config, dual=False)


def _clipped(
    ratio_T: torch.Tensor,
    clamped_T: torch.Tensor,
    inside_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
    *,
    dual: bool,
) -> Terms:
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    free_T = -advantages_T * ratio_T
    bounded_T = -advantages_T * ratio_T.clamp(low, high)
    clipped_T = bounded_T > free_T
    value_T = torch.maximum(free_T, bounded_T)
    dual_T = torch.zeros_like(clipped_T)
    if dual and config.dual_clip is not None:
        limit_T = -advantages_T * config.dual_clip
        dual_T = (advantages_T < 0) & (limit_T < value_T)
        value_T = torch.where(dual_T, limit_T, value_T)
    active_T = ~clipped_T & ~dual_T & inside_T
    return Terms(
        value_T=correction_T * value_T,
        dlogp_T=correction_T * free_T * active_T,
        coefficient_T=correction_T,
        ratio_T=ratio_T,
        log_ratio_T=clamped_T,
        clip_high_T=clipped_T & (ratio_T > high),
        clip_low_T=clipped_T & (ratio_T < low),
        clip_dual_T=dual_T,
    )


def cispo(
    logprobs_T: torch.Tensor,
    log_ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
) -> Terms:
    """Compute the CISPO loss -clip(r) * A * log pi of each token, times `correction_T`. r is the
    probability ratio and A the advantage; clip(r) counts as a constant in the derivative
    (MiniMax-M1, arXiv 2506.13585, Eqs. 4 and 5)."""
    ratio_T, clamped_T, _ = bounded_exp(log_ratio_T)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    coefficient_T = ratio_T.clamp(low, high) * correction_T
    return Terms(
        value_T=-coefficient_T * advantages_T * logprobs_T,
        dlogp_T=-coefficient_T * advantages_T,
        coefficient_T=coefficient_T,
        ratio_T=ratio_T,
        log_ratio_T=clamped_T,
        clip_high_T=ratio_T > high,
        clip_low_T=ratio_T < low,
    )


def sft(logprobs_T: torch.Tensor) -> Terms:
    """Compute the cross-entropy loss -log pi of each token."""
    zero_T, one_T = torch.zeros_like(logprobs_T), torch.ones_like(logprobs_T)
    return Terms(-logprobs_T, -one_T, one_T, zero_T, zero_T)


def own(log_ratio_T: torch.Tensor) -> Terms:
    """Return the terms that are reported for a user-defined loss: the probability ratio, and a
    weight of 1. Value and derivative are 0 here; `loss_torch.policy_loss` gets them from the user's
    function."""
    zero_T, one_T = torch.zeros_like(log_ratio_T), torch.ones_like(log_ratio_T)
    ratio_T, clamped_T, _ = bounded_exp(log_ratio_T)
    return Terms(zero_T, zero_T, one_T, ratio_T, clamped_T)


def kl_to_reference(
    logprobs_T: torch.Tensor,
    ref_logprobs_T: torch.Tensor,
    log_ratio_T: torch.Tensor,
    correction_T: torch.Tensor,
    config: LossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate KL(pi || pi_ref) at each token with importance weights; return the estimate and its
    derivative with respect to the token's log-prob.

    Let d = log pi - log pi_ref, r the probability ratio, v the weight `correction_T`, and
    y = v * min(r, kl_weight_upper). The estimate is

    - k2: y * d^2 / 2, where y is not differentiated.
    - k3: y * (exp(-d) - 1 + d), where y is differentiated if r is not truncated. Then the
      derivative is v * r * d, which is the derivative of the KL itself.

    For k3 the code uses d directly, because (1 - exp(-d)) + (exp(-d) - 1 + d) would lose it to
    cancellation. The estimators are from Schulman 2020, "Approximating KL divergence".
    """
    ratio_T, _, inside_T = bounded_exp(log_ratio_T)
    weight_T = ratio_T.clamp(max=config.kl_weight_upper) * correction_T
    distance_T = logprobs_T - ref_logprobs_T
    if config.kl_estimator == "k2":
        return 0.5 * weight_T * distance_T.square(), weight_T * distance_T
    _, negative_T, near_T = bounded_exp(-distance_T)
    k3_T = k3_of(negative_T)
    moves_T = (ratio_T <= config.kl_weight_upper) & inside_T
    slope_T = torch.where(moves_T, distance_T, -negative_T.expm1())
    return weight_T * k3_T, weight_T * torch.where(near_T, slope_T, k3_T * moves_T)
