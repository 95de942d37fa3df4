"""The plain torch reference of `is_loss` (float64-capable), and the version for CPU tensors.

Formulas: PPO-clip (Schulman et al. 2017, Eq. 7), dual clip (Ye et al. 2020, Eq. 5), truncated
importance sampling (Espeholt et al. 2018), IcePop (Ling Team 2025), PipelineRL (arXiv 2509.19128,
Eq. 5), AIPO (arXiv 2505.07291), CISPO (arXiv 2506.13585, Eqs. 4-5), GSPO (arXiv 2507.18071,
Eqs. 5, 7 and 14), KL estimators k1 to k3 (Schulman 2020).

Notation: m mask, l = log π − log b with b the reference of the ratio, r = exp(c(l)),
c(x) = clamp(x, ±SAFETY_BOUND), L = log π − log μ, A advantage, v the given correction weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_async_kernels.loss_types import (
    GSPO_LOG_BOUND,
    NUM_LAG_BINS,
    SAFETY_BOUND,
    SUM_NAMES,
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    RejectionRule,
    raise_non_finite,
    require_inputs,
)


@dataclass(frozen=True, eq=False)
class _Terms:
    """Per token: loss, dLoss/dlogp, weight in use, ratio, its logarithm, three clip flags."""

    value_T: Tensor
    slope_T: Tensor
    coefficient_T: Tensor
    ratio_T: Tensor
    ratio_log_T: Tensor
    high_T: Tensor
    low_T: Tensor
    dual_T: Tensor


class _Sequences:
    """Sums and maxima over the sequences of a packed stream."""

    def __init__(self, cu_seqlens_S1: Tensor) -> None:
        self.lengths_S = cu_seqlens_S1.diff().to(torch.int64)
        self.count = int(self.lengths_S.shape[0])
        index_S = torch.arange(self.count, device=cu_seqlens_S1.device)
        self.index_T = index_S.repeat_interleave(self.lengths_S)

    def sum(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(self.count).index_add_(0, self.index_T, values_T)

    def max(self, values_T: Tensor) -> Tensor:
        lowest_S = values_T.new_full((self.count,), -math.inf)
        return lowest_S.scatter_reduce_(0, self.index_T, values_T, "amax")

    def spread(self, values_S: Tensor) -> Tensor:
        return values_S[self.index_T]


@torch.no_grad()
def reference_is_loss(
    inputs: LossInputs, config: LossConfig, denominators: Denominators, *, check: bool = True
) -> LossOutput:
    """Loss, gradient and metric sums of one microbatch of whole sequences.

    Raises
        NonFiniteInput: `check` and a stream is not finite at a trained token.
        ValueError: `config` needs a stream that is missing.
    """
    require_inputs(inputs, config)
    if check:
        raise_non_finite(inputs)
    dtype = torch.promote_types(inputs.logprobs_T.dtype, torch.float32)
    trained_T = inputs.mask_T != 0

    def read(tensor_T: Tensor | None, default: float) -> Tensor:
        if tensor_T is None:
            return torch.full(inputs.mask_T.shape, default, dtype=dtype, device=trained_T.device)
        return torch.where(trained_T, tensor_T.to(dtype), 0.0)

    sequences = _Sequences(inputs.cu_seqlens_S1)
    mask_T = trained_T.to(dtype)
    logp_T, advantage_T = read(inputs.logprobs_T, 0.0), read(inputs.advantages_T, 0.0)
    correction_T = read(inputs.is_weights_T, 1.0)
    log_ratio_T = logp_T - read(inputs.rollout_logprobs_T, 0.0)
    anchor_T = log_ratio_T
    if config.ratio_to == "old":
        anchor_T = logp_T - read(inputs.old_logprobs_T, 0.0)
    kept_T = mask_T * _keep(log_ratio_T, mask_T, sequences, config.rejection)
    scale_T = kept_T * _scale(kept_T, sequences, config, denominators)
    terms = _terms(
        logp_T, anchor_T, advantage_T, correction_T, mask_T, kept_T, sequences, config, denominators
    )

    policy_T, dlogp_T = terms.value_T * scale_T, terms.slope_T * scale_T
    distance_T = torch.zeros_like(logp_T)
    if inputs.ref_logprobs_T is not None:
        distance_T = logp_T - read(inputs.ref_logprobs_T, 0.0)
    kl_T = torch.zeros_like(logp_T)
    if config.kl_estimator != "none":
        value_T, slope_T = _kl(distance_T, anchor_T, correction_T, config)
        kl_T = config.kl_coef * value_T * scale_T
        dlogp_T = dlogp_T + config.kl_coef * slope_T * scale_T
    entropy_T, dentropy_T = read(inputs.entropy_T, 0.0), None
    bonus_T = torch.zeros_like(logp_T)
    if config.entropy_coef != 0.0:
        dentropy_T = -config.entropy_coef * scale_T
        bonus_T = dentropy_T * entropy_T
    losses = [part_T.double().sum() for part_T in (policy_T, kl_T, bonus_T)]
    lag_T = torch.zeros_like(mask_T, dtype=torch.int64)
    if inputs.lag_T is not None:
        lag_T = torch.where(trained_T, inputs.lag_T.to(torch.int64), 0)
    streams = {
        "mask": mask_T,
        "kept": kept_T,
        "log_ratio": log_ratio_T,
        "advantage": advantage_T,
        "entropy": entropy_T,
        "distance": distance_T,
    }
    metrics = _metrics(streams, lag_T, terms, losses, sequences, config)
    return LossOutput(sum(losses[1:], losses[0]).to(dtype), dlogp_T, dentropy_T, metrics)


def _bounded_exp(log_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(c(x)), c(x), whether x lies inside the bounds."""
    clamped_T = log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    return clamped_T.exp(), clamped_T, log_T.abs() <= SAFETY_BOUND


def _keep(
    log_ratio_T: Tensor,
    mask_T: Tensor,
    sequences: _Sequences,
    rules: tuple[RejectionRule, ...],
) -> Tensor:
    """1 where every rule keeps the token, [T]."""
    keep_T = torch.ones_like(mask_T)
    weight_T, clamped_T, _ = _bounded_exp(log_ratio_T)
    for rule in rules:
        statistic = {
            "k1": -clamped_T,
            "k2": 0.5 * clamped_T.square(),
            "k3": weight_T - 1.0 - clamped_T,
        }[rule.divergence]
        if rule.level == "seq_max":
            lowest_T = torch.where(mask_T != 0, statistic, -math.inf)
            statistic = sequences.max(lowest_T)
            statistic = torch.where(statistic == -math.inf, 0.0, statistic)
        elif rule.level != "token":
            statistic = sequences.sum(statistic * mask_T)
            if rule.level == "seq_mean":
                statistic = statistic / sequences.sum(mask_T).clamp(min=1.0)
        passes = ((statistic >= rule.lower) & (statistic <= rule.upper)).to(mask_T.dtype)
        keep_T = keep_T * (passes if rule.level == "token" else sequences.spread(passes))
    return keep_T


def _scale(
    kept_T: Tensor, sequences: _Sequences, config: LossConfig, denominators: Denominators
) -> Tensor | float:
    """What a kept token's loss counts in the global loss."""
    if config.aggregation == "token_mean":
        return 1.0 / max(denominators.tokens, 1.0)
    count = max(denominators.sequences, 1.0)
    if config.aggregation == "seq_mean_token_sum":
        return 1.0 / count
    if config.aggregation == "seq_mean_token_sum_norm":
        return 1.0 / (count * config.fixed_normalizer)
    return 1.0 / (count * sequences.spread(sequences.sum(kept_T).clamp(min=1.0)))


def _terms(
    logp_T: Tensor,
    anchor_T: Tensor,
    advantage_T: Tensor,
    correction_T: Tensor,
    mask_T: Tensor,
    kept_T: Tensor,
    sequences: _Sequences,
    config: LossConfig,
    denominators: Denominators,
) -> _Terms:
    ratio_T, ratio_log_T, inside_T = _bounded_exp(anchor_T)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    never_T = torch.zeros_like(mask_T, dtype=torch.bool)
    if config.surrogate == "sft":
        zero_T, one_T = torch.zeros_like(logp_T), torch.ones_like(logp_T)
        return _Terms(-logp_T, -one_T, one_T, zero_T, zero_T, never_T, never_T, never_T)
    if config.surrogate == "aipo":
        above_T = ratio_T > config.aipo_delta
        weight_T = ratio_T.clamp(max=config.aipo_delta) * correction_T
        slope_T = -correction_T * ratio_T * advantage_T * (~above_T & inside_T)
        value_T = -weight_T * advantage_T
        return _Terms(value_T, slope_T, weight_T, ratio_T, ratio_log_T, above_T, never_T, never_T)
    if config.surrogate in ("cispo", "reinforce"):
        if config.surrogate == "cispo":
            weight_T, above_T, below_T = ratio_T.clamp(low, high), ratio_T > high, ratio_T < low
        else:
            weight_T, above_T, below_T = _reinforce_weight(anchor_T, mask_T, sequences, config)
            weight_T = weight_T / denominators.weight_mean
        weight_T = weight_T * correction_T
        slope_T = -weight_T * advantage_T
        return _Terms(
            slope_T * logp_T, slope_T, weight_T, ratio_T, ratio_log_T, above_T, below_T, never_T
        )
    dual_clip = config.dual_clip
    if config.surrogate == "gspo":
        dual_clip = None
        mean_S = sequences.sum(anchor_T * kept_T) / sequences.sum(kept_T).clamp(min=1.0)
        mean_T = sequences.spread(mean_S)
        ratio_T = mean_T.clamp(max=GSPO_LOG_BOUND).exp()
        inside_T = mean_T <= GSPO_LOG_BOUND
    free_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * ratio_T.clamp(low, high)
    clipped_T = bounded_T > free_T
    value_T = torch.maximum(free_T, bounded_T)
    dual_T = never_T
    if dual_clip is not None:
        limit_T = -advantage_T * dual_clip
        dual_T = (advantage_T < 0) & (limit_T < value_T)
        value_T = torch.where(dual_T, limit_T, value_T)
    return _Terms(
        correction_T * value_T,
        correction_T * free_T * (~clipped_T & ~dual_T & inside_T),
        correction_T,
        ratio_T,
        ratio_log_T,
        clipped_T & (ratio_T > high),
        clipped_T & (ratio_T < low),
        dual_T,
    )


def _reinforce_weight(
    anchor_T: Tensor, mask_T: Tensor, sequences: _Sequences, config: LossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated weight (or IcePop's), and where the raw one was above or below the bounds."""
    raw_T = torch.ones_like(anchor_T)
    if config.weight_level == "token":
        raw_T = _bounded_exp(anchor_T)[0]
    elif config.weight_level == "sequence":
        raw_T = sequences.spread(_bounded_exp(sequences.sum(anchor_T * mask_T))[0])
    above_T = torch.zeros_like(mask_T, dtype=torch.bool)
    below_T = above_T
    if config.weight_upper is not None:
        above_T = raw_T > config.weight_upper
    if config.weight_lower is not None:
        below_T = raw_T < config.weight_lower
        return torch.where(above_T | below_T, 0.0, raw_T), above_T, below_T
    weight_T = raw_T if config.weight_upper is None else raw_T.clamp(max=config.weight_upper)
    return weight_T, above_T, below_T


def _kl(
    distance_T: Tensor, anchor_T: Tensor, correction_T: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Importance-weighted KL to the reference policy and its derivative, per token."""
    ratio_T, _, inside_T = _bounded_exp(anchor_T)
    weight_T = ratio_T.clamp(max=config.kl_weight_upper) * correction_T
    if config.kl_estimator == "k2":
        return 0.5 * weight_T * distance_T.square(), weight_T * distance_T
    inverse_T, negative_T, near_T = _bounded_exp(-distance_T)
    k3_T = inverse_T - 1.0 - negative_T
    moves_T = (ratio_T <= config.kl_weight_upper) & inside_T
    return weight_T * k3_T, weight_T * ((1.0 - inverse_T) * near_T + k3_T * moves_T)


def _metrics(
    streams: dict[str, Tensor],
    lag_T: Tensor,
    terms: _Terms,
    losses: list[Tensor],
    sequences: _Sequences,
    config: LossConfig,
) -> LossMetrics:
    mask_T, kept_T = streams["mask"].double(), streams["kept"].double()
    log_T, advantage_T = streams["log_ratio"].double(), streams["advantage"].double()
    weight_T, clamped_T, _ = _bounded_exp(log_T)
    distance_T = streams["distance"].double()
    inverse_T, negative_T, _ = _bounded_exp(-distance_T)
    trained_S = sequences.sum(mask_T) > 0
    total_S = sequences.sum(log_T * mask_T)[trained_S]
    seq_weight_S, seq_log_S, _ = _bounded_exp(total_S)
    x_T = terms.coefficient_T.double()
    values = {
        "tokens": mask_T,
        "kept_tokens": kept_T,
        "sequences": trained_S,
        "kept_sequences": sequences.sum(kept_T) > 0,
        "loss": torch.stack(losses),
        "policy_loss": losses[0],
        "kl_loss": losses[1],
        "entropy_loss": losses[2],
        "log_ratio": log_T * mask_T,
        "k3": (weight_T - 1.0 - clamped_T) * mask_T,
        "is_weight": weight_T * mask_T,
        "is_weight_sq": weight_T.square() * mask_T,
        "seq_weight": seq_weight_S,
        "seq_weight_sq": seq_weight_S.square(),
        "seq_staleness": seq_log_S.clamp(max=math.log(config.staleness_clip)),
        "seq_weight_clipped": seq_weight_S > config.staleness_clip,
        "ratio": terms.ratio_T.double() * kept_T,
        "ratio_log": terms.ratio_log_T.double() * kept_T,
        "coefficient": x_T * kept_T,
        "coefficient_sq": x_T.square() * kept_T,
        "clip_high": terms.high_T * kept_T,
        "clip_low": terms.low_T * kept_T,
        "clip_dual": terms.dual_T * kept_T,
        "entropy": streams["entropy"].double() * mask_T,
        "advantage": advantage_T * mask_T,
        "advantage_sq": advantage_T.square() * mask_T,
        "ref_k1": distance_T * mask_T,
        "ref_k3": (inverse_T - 1.0 - negative_T) * mask_T,
        "lag": lag_T * mask_T,
        "off_policy_tokens": (lag_T > 0) * mask_T,
    }
    by_lag = torch.stack([mask_T, weight_T * mask_T, weight_T.square() * mask_T, log_T * mask_T])
    bins = torch.zeros(4, NUM_LAG_BINS, dtype=torch.float64, device=mask_T.device)
    bins.index_add_(1, lag_T.clamp(0, NUM_LAG_BINS - 1), by_lag)
    on_T = mask_T != 0
    extremes = (log_T[on_T], -log_T[on_T], total_S, -total_S, lag_T[on_T].double())
    lowest = torch.full((1,), -math.inf, dtype=torch.float64, device=mask_T.device)
    return LossMetrics(
        torch.stack([values[name].double().sum() for name in SUM_NAMES]),
        bins,
        torch.stack([torch.cat([lowest, values_X]).max() for values_X in extremes]),
    )
