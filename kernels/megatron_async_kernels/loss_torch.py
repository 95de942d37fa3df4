"""Computes the loss of one microbatch in plain torch, on any device and also in float64.

The invariants of `loss_types` hold. Gradients are computed by formulas, without autograd, except
for a user-defined loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_async_kernels import surrogates
from megatron_async_kernels.loss_types import (
    LAG_SUM_NAMES,
    NUM_LAG_BINS,
    SUM_NAMES,
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    RejectionRule,
    check_finite,
    nonfinite_counts,
)
from megatron_async_kernels.packed import masked, segment_max, segment_sum, spread

# A user-defined loss: a function from the inputs of a microbatch to the loss of each token, [T].
# Inputs are 0 at untrained tokens, and `logprobs_T` and `entropy_T` require gradients. The loss of
# a token may depend on other tokens of its sequence, but not on other sequences, because a batch is
# split into microbatches of whole sequences.
OwnLoss = Callable[[LossInputs], torch.Tensor]


@torch.no_grad()
def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    denominators: Denominators,
    *,
    check: bool = True,
    own: OwnLoss | None = None,
) -> LossOutput:
    """Compute the loss, its gradient and the metric sums of one microbatch of whole sequences, in
    plain torch.

    Computations are in the dtype of `logprobs_T`, but at least in float32. If the surrogate is
    `own`, the function `own` returns the loss of each token and autograd computes its gradient;
    `config` still determines aggregation, rejection, KL and entropy bonus.

    Args:
        inputs: The microbatch.
        config: Thresholds and choices of the loss.
        denominators: Counts over all ranks and microbatches of the optimizer step, by which losses
            are divided.
        check: Whether to raise if an input is not finite, for which the host waits for the device.
        own: User-defined loss; required if the surrogate is `own`.

    Raises:
        NonFiniteError: `check` is set and an input is not finite at a trained token; the message
            names the input.
        ValueError: An input that `config` needs is missing, shapes differ, `own` is missing, or
            `own` does not return a tensor of shape [T].
    """
    inputs.require(config)
    if check:
        check_finite(inputs.streams(), inputs.mask_T)
    nonfinite = nonfinite_counts(list(inputs.streams().values()), inputs.mask_T).sum()
    stream = _Stream(inputs, config)
    kept_T = stream.mask_T * rejection_keep(
        stream.log_ratio_T, stream.mask_T, inputs.cu_seqlens_S1, config.rejection
    )
    scale_T = token_scale(kept_T, inputs.cu_seqlens_S1, config, denominators)
    dentropy_T = None
    if config.surrogate == "own":
        if own is None:
            raise ValueError("surrogate is 'own'; pass the function that computes it as `own`")
        terms = surrogates.own(stream.anchor_ratio_T)
        policy_T, dlogp_T, dentropy_T = _differentiated(own, inputs, scale_T, check)
    else:
        terms = _surrogate(stream, kept_T, config, denominators)
        policy_T, dlogp_T = terms.value_T * scale_T, terms.dlogp_T * scale_T
    kl_T = torch.zeros_like(policy_T)
    if config.kl_estimator != "none":
        value_T, slope_T = surrogates.kl_to_reference(
            stream.logprobs_T, stream.ref_T, stream.anchor_ratio_T, stream.correction_T, config
        )
        kl_T = config.kl_coef * value_T * scale_T
        dlogp_T = dlogp_T + config.kl_coef * slope_T * scale_T
    entropy_T = torch.zeros_like(policy_T)
    if config.entropy_coef != 0.0:
        bonus_T = -config.entropy_coef * scale_T
        entropy_T = bonus_T * stream.entropy_T
        dentropy_T = bonus_T if dentropy_T is None else dentropy_T + bonus_T
    parts_3T = torch.stack([policy_T, kl_T, entropy_T])
    parts_3 = parts_3T.double().sum(dim=1)
    metrics = _metrics(stream, kept_T, terms, parts_3, config)
    return LossOutput(parts_3.sum().to(policy_T.dtype), dlogp_T, dentropy_T, metrics, nonfinite)


def _differentiated(
    own: OwnLoss, inputs: LossInputs, scale_T: torch.Tensor, check: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Call the user-defined loss `own` and differentiate it with autograd.

    Args:
        own: The loss.
        inputs: The microbatch.
        scale_T: Factor by which each token's loss is multiplied; 0 at tokens that are not trained.
        check: Whether to raise NonFiniteError if the loss is not finite at a trained token.

    Returns:
        The scaled loss of each token, and the gradients of the sum of scaled losses with respect to
        the log-probs and to the entropy. The last is None if the loss does not depend on the
        entropy.
    """
    shown = _without_untrained(inputs, scale_T.dtype)
    leaves = [shown.logprobs_T.requires_grad_()]
    if shown.entropy_T is not None:
        leaves.append(shown.entropy_T.requires_grad_())
    with torch.enable_grad():
        value_T = own(shown)
        if not isinstance(value_T, torch.Tensor) or value_T.shape != scale_T.shape:
            got = tuple(value_T.shape) if isinstance(value_T, torch.Tensor) else type(value_T)
            raise ValueError(f"the loss returned {got}, not a tensor of shape [{len(scale_T)}]")
        if check:
            check_finite({"own loss": value_T}, scale_T)
        policy_T = masked(value_T, scale_T) * scale_T
        slopes: list[torch.Tensor | None] = [None] * len(leaves)
        if policy_T.requires_grad:
            slopes = list(torch.autograd.grad(policy_T.sum(), leaves, allow_unused=True))
    # If the loss of a token depends on other tokens, there may be gradients at untrained tokens
    # too. Set them to 0, because the policy did not generate these tokens.
    slopes = [None if slope is None else masked(slope, shown.mask_T) for slope in slopes]
    dlogp_T = torch.zeros_like(scale_T) if slopes[0] is None else slopes[0]
    return policy_T.detach(), dlogp_T, slopes[1] if len(slopes) > 1 else None


def _without_untrained(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    """Return a copy of the inputs with 0 at untrained tokens."""

    def copy(stream_T: torch.Tensor) -> torch.Tensor:
        kept_T = masked(stream_T, inputs.mask_T)
        return kept_T.to(dtype) if kept_T.is_floating_point() else kept_T

    streams = {
        name: copy(stream_T)
        for name, stream_T in vars(inputs).items()
        if name != "cu_seqlens_S1" and isinstance(stream_T, torch.Tensor)
    }
    return replace(inputs, **streams)


class _Stream:
    """Inputs of a microbatch, converted to one dtype and set to exactly 0 at untrained tokens."""

    def __init__(self, inputs: LossInputs, config: LossConfig) -> None:
        dtype = torch.promote_types(inputs.logprobs_T.dtype, torch.float32)

        def read(tensor_T: torch.Tensor | None, default: float = 0.0) -> torch.Tensor:
            if tensor_T is None:
                return torch.full_like(inputs.logprobs_T, default, dtype=dtype)
            return masked(tensor_T.to(dtype), inputs.mask_T)

        self.cu_seqlens_S1 = inputs.cu_seqlens_S1
        self.mask_T = (inputs.mask_T != 0).to(dtype)
        self.logprobs_T = read(inputs.logprobs_T)
        self.advantages_T = read(inputs.advantages_T)
        self.correction_T = read(inputs.is_weights_T, 1.0)
        self.entropy_T = read(inputs.entropy_T)
        self.has_ref = inputs.ref_logprobs_T is not None
        self.ref_T = read(inputs.ref_logprobs_T)
        self.log_ratio_T = self.logprobs_T - read(inputs.rollout_logprobs_T)
        self.anchor_ratio_T = (
            self.logprobs_T - read(inputs.old_logprobs_T)
            if config.ratio_to == "old"
            else self.log_ratio_T
        )
        lag_T = inputs.lag_T
        self.lag_T = (
            torch.zeros_like(self.mask_T, dtype=torch.int64)
            if lag_T is None
            else masked(lag_T.to(torch.int64), inputs.mask_T)
        )


def divergence(log_ratio_T: torch.Tensor, name: str) -> torch.Tensor:
    """Compute the divergence `name` of each token (k1 = -x, k2 = x^2 / 2 or k3 = exp(x) - 1 - x)
    from the clamped log-ratio x of the trained policy to the policy that generated the token.

    x is `log_ratio_T`, clamped to [-SAFETY_BOUND, SAFETY_BOUND].
    """
    clamped_T = surrogates.bounded_exp(log_ratio_T)[1]
    if name == "k1":
        return -clamped_T
    if name == "k2":
        return 0.5 * clamped_T.square()
    return surrogates.k3_of(clamped_T)


def rejection_statistic(
    log_ratio_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    level: str,
    divergence_name: str,
) -> torch.Tensor:
    """Compute the statistic that one rejection rule compares with its bounds. With level `token` it
    is the divergence of each token, [T]; otherwise the sum, mean or maximum over the trained tokens
    of each sequence, [S], or 0 for a sequence without trained tokens."""
    values_T = divergence(log_ratio_T, divergence_name)
    if level == "token":
        return values_T
    if level == "seq_max":
        floor_T = torch.where(mask_T != 0, values_T, torch.full_like(values_T, -math.inf))
        maximum_S = segment_max(floor_T, cu_seqlens_S1)
        return torch.where(maximum_S == -math.inf, torch.zeros_like(maximum_S), maximum_S)
    total_S = segment_sum(masked(values_T, mask_T), cu_seqlens_S1)
    if level == "seq_sum":
        return total_S
    return total_S / segment_sum(mask_T, cu_seqlens_S1).clamp(min=1.0)


def rejection_keep(
    log_ratio_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    rules: tuple[RejectionRule, ...],
) -> torch.Tensor:
    """Return 1 for each token that every rejection rule keeps, otherwise 0, [T] in the dtype of the
    mask."""
    keep_T = torch.ones_like(mask_T)
    for rule in rules:
        statistic = rejection_statistic(
            log_ratio_T, mask_T, cu_seqlens_S1, rule.level, rule.divergence
        )
        passes = ((statistic >= rule.lower) & (statistic <= rule.upper)).to(mask_T.dtype)
        if rule.level != "token":
            passes = spread(passes, cu_seqlens_S1, tokens=len(keep_T))
        keep_T = keep_T * passes
    return keep_T


def token_scale(
    kept_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    config: LossConfig,
    denominators: Denominators,
) -> torch.Tensor:
    """Return the factor by which each token's loss is multiplied in the total loss, according to
    `config.aggregation`, [T]. It is 0 for tokens that are not kept."""
    divisor = loss_divisor(config, denominators)
    if config.aggregation != "seq_mean_token_mean":
        return kept_T / divisor
    length_S = segment_sum(kept_T, cu_seqlens_S1).clamp(min=1.0)
    return kept_T / (divisor * spread(length_S, cu_seqlens_S1, tokens=len(kept_T)))


def loss_divisor(config: LossConfig, denominators: Denominators) -> float:
    """Return the number by which the loss of every kept token is divided. With
    `seq_mean_token_mean`, it is divided by the number of kept tokens of its sequence in
    addition."""
    if config.aggregation == "token_mean":
        return max(denominators.tokens, 1.0)
    normed = config.aggregation == "seq_mean_token_sum_norm"
    return max(denominators.sequences, 1.0) * (config.fixed_normalizer if normed else 1.0)


def generation_log_weight(
    log_ratio_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the log-ratios over each sequence's trained tokens, without clamping,
    [S]."""
    return segment_sum(masked(log_ratio_T, mask_T), cu_seqlens_S1)


def raw_weights(
    log_ratio_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor, level: str
) -> torch.Tensor:
    """Return the weight exp(clamp(x, -SAFETY_BOUND, SAFETY_BOUND)) of each token, [T]. With level
    `token`, x is the token's log-ratio; with `sequence`, it is the sum of log-ratios over the
    trained tokens of its sequence."""
    if level == "token":
        return surrogates.bounded_exp(log_ratio_T)[0]
    total_S = generation_log_weight(log_ratio_T, mask_T, cu_seqlens_S1)
    weight_S = surrogates.bounded_exp(total_S)[0]
    return spread(weight_S, cu_seqlens_S1, tokens=len(log_ratio_T))


def _surrogate(
    stream: _Stream, kept_T: torch.Tensor, config: LossConfig, denominators: Denominators
) -> surrogates.Terms:
    ratio_T, A_T, v_T = stream.anchor_ratio_T, stream.advantages_T, stream.correction_T
    if config.surrogate == "ppo_clip":
        return surrogates.ppo_clip(ratio_T, A_T, v_T, config)
    if config.surrogate == "aipo":
        return surrogates.aipo(ratio_T, A_T, v_T, config)
    if config.surrogate == "cispo":
        return surrogates.cispo(stream.logprobs_T, ratio_T, A_T, v_T, config)
    if config.surrogate == "gspo":
        length_S = segment_sum(kept_T, stream.cu_seqlens_S1).clamp(min=1.0)
        mean_S = segment_sum(ratio_T * kept_T, stream.cu_seqlens_S1) / length_S
        mean_T = spread(mean_S, stream.cu_seqlens_S1, tokens=len(kept_T))
        return surrogates.gspo(ratio_T, mean_T, A_T, v_T, config)
    if config.surrogate == "sft":
        return surrogates.sft(stream.logprobs_T)
    if config.surrogate != "reinforce":
        raise ValueError(f"loss_torch has no surrogate {config.surrogate!r}")
    weight_T = torch.ones_like(ratio_T)
    if config.weight_level != "none":
        weight_T = raw_weights(ratio_T, stream.mask_T, stream.cu_seqlens_S1, config.weight_level)
    return surrogates.reinforce(
        stream.logprobs_T, ratio_T, weight_T, A_T, v_T, config, denominators.weight_mean
    )


def _metrics(
    stream: _Stream,
    kept_T: torch.Tensor,
    terms: surrogates.Terms,
    parts_3: torch.Tensor,
    config: LossConfig,
) -> LossMetrics:
    mask_T, cu_S1 = stream.mask_T.double(), stream.cu_seqlens_S1
    kept_T = kept_T.double()
    log_T = stream.log_ratio_T.double()
    weight_T = surrogates.bounded_exp(log_T)[0]
    nonempty_S = segment_sum(mask_T, cu_S1) > 0
    total_S = segment_sum(log_T, cu_S1)
    seq_weight_S, seq_log_S, _ = surrogates.bounded_exp(total_S)
    seq_weight_S, staleness_S = (
        masked(x_S, nonempty_S)
        for x_S in (seq_weight_S, seq_log_S.clamp(max=math.log(config.staleness_clip)))
    )
    distance_T = (stream.logprobs_T - stream.ref_T).double() * float(stream.has_ref)
    A_T, lag_T = stream.advantages_T.double(), stream.lag_T
    x_T = terms.coefficient_T.double()
    per_token = {
        "tokens": mask_T,
        "kept_tokens": kept_T,
        "log_ratio": log_T * mask_T,
        "k3": divergence(log_T, "k3") * mask_T,
        "is_weight": weight_T * mask_T,
        "is_weight_sq": weight_T.square() * mask_T,
        "ratio": terms.ratio_T.double() * kept_T,
        "ratio_log": terms.log_ratio_T.double() * kept_T,
        "coefficient": x_T * kept_T,
        "coefficient_sq": x_T.square() * kept_T,
        "clip_high": terms.clip_high_T * kept_T,
        "clip_low": terms.clip_low_T * kept_T,
        "clip_dual": terms.clip_dual_T * kept_T,
        "entropy": stream.entropy_T.double() * mask_T,
        "advantage": A_T * mask_T,
        "advantage_sq": A_T.square() * mask_T,
        "ref_k1": distance_T * mask_T,
        "ref_k3": divergence(-distance_T, "k3") * mask_T,
        "lag": lag_T.double() * mask_T,
        "off_policy_tokens": (lag_T > 0) * mask_T,
    }
    totals = dict(zip(per_token, torch.stack(list(per_token.values())).sum(dim=1), strict=True))
    policy, kl, entropy = parts_3.unbind()
    totals |= {
        "sequences": nonempty_S.sum(),
        "loss": parts_3.sum(),
        "policy_loss": policy,
        "kl_loss": kl,
        "entropy_loss": entropy,
        "seq_weight": seq_weight_S.sum(),
        "seq_weight_sq": seq_weight_S.square().sum(),
        "seq_staleness": staleness_S.sum(),
        "seq_weight_clipped": (seq_weight_S > config.staleness_clip).sum(),
    }
    trained_T = mask_T != 0
    maxima = [
        _largest(log_T, trained_T),
        _largest(-log_T, trained_T),
        _largest(total_S, nonempty_S),
        _largest(-total_S, nonempty_S),
        _largest(lag_T.double(), trained_T),
    ]
    return LossMetrics(
        torch.stack([totals[name].double() for name in SUM_NAMES]),
        _by_lag(mask_T, weight_T, log_T, lag_T),
        torch.stack(maxima),
    )


def _largest(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the largest of the values at which `counted` is true; -inf if there are none. Values
    that are not counted are replaced by -inf, because selecting by index would make the host wait
    for a GPU."""
    lowest = values.new_full((1,), -math.inf)
    return torch.cat([lowest, torch.where(counted, values, lowest)]).max()


def _by_lag(
    mask_T: torch.Tensor, weight_T: torch.Tensor, log_T: torch.Tensor, lag_T: torch.Tensor
) -> torch.Tensor:
    streams_LT = torch.stack([mask_T, weight_T * mask_T, weight_T.square() * mask_T, log_T])
    assert streams_LT.shape[0] == len(LAG_SUM_NAMES)
    bin_T = lag_T.clamp(0, NUM_LAG_BINS - 1)
    columns = [masked(streams_LT, bin_T == lag).sum(dim=1) for lag in range(NUM_LAG_BINS)]
    return torch.stack(columns, dim=1)
