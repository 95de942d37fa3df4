"""Provides the losses in the form that one would write for autograd, row by row, in float64.

Weights that must not be differentiated are detached; autograd computes everything else, so that it
checks the closed forms of the implementation.
"""

from __future__ import annotations

import itertools
import math

import torch
from megatron_async_kernels.loss_types import Denominators, LossConfig, LossInputs


def autograd_loss(
    inputs: LossInputs, config: LossConfig, denominators: Denominators
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the loss, its gradient with respect to the log-probs [T] and its gradient with respect
    to the entropy [T]."""
    p_T = inputs.logprobs_T.nan_to_num(0.0).requires_grad_()
    entropy_T = inputs.entropy_T.nan_to_num(0.0).requires_grad_()  # type: ignore[union-attr]
    bounds = inputs.cu_seqlens_S1.tolist()
    total = p_T.sum() * 0.0 + entropy_T.sum() * 0.0
    for low, high in itertools.pairwise(bounds):
        trained = (inputs.mask_T[low:high] != 0).nonzero().flatten() + low
        if trained.numel():
            row = {name: getattr(inputs, f"{name}_T")[trained] for name in _OTHERS}
            total = total + _row(p_T[trained], entropy_T[trained], row, config, denominators)
    dlogp_T, dentropy_T = torch.autograd.grad(total, [p_T, entropy_T])
    return float(total.detach()), dlogp_T, dentropy_T


_OTHERS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "is_weights")


def _bounded(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Clamp `x` with slope 1 at the bounds, where `torch.clamp` has slope 1 up to torch 2.13 and
    slope 0 from 2.14 on."""
    inside = (x >= low) & (x <= high)
    return torch.where(inside, x, x.detach().clamp(low, high))


def _row(
    p: torch.Tensor,
    entropy: torch.Tensor,
    row: dict[str, torch.Tensor],
    config: LossConfig,
    denominators: Denominators,
) -> torch.Tensor:
    behavior = (p - row["rollout_logprobs"]).detach()
    keep = torch.ones_like(p)
    for rule in config.rejection:
        x = behavior.clamp(-20, 20)
        stat = {"k1": -x, "k2": x**2 / 2, "k3": torch.expm1(x) - x}[rule.divergence]
        if rule.level != "token":
            stat = getattr(
                stat, {"seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}[rule.level]
            )()
        keep = keep * ((stat >= rule.lower) & (stat <= rule.upper))
    anchor = p - row["old_logprobs" if config.ratio_to == "old" else "rollout_logprobs"]
    per_token = _surrogate(p, anchor, keep, row, config, denominators)
    ratio = _bounded(anchor, -20, 20).exp()
    v, distance = row["is_weights"], p - row["ref_logprobs"]
    weight = _bounded(ratio, 0, config.kl_weight_upper) * v
    if config.kl_estimator == "k2":
        per_token = per_token + config.kl_coef * weight.detach() * distance**2 / 2
    elif config.kl_estimator == "k3":
        x = _bounded(distance, -20, 20)
        per_token = per_token + config.kl_coef * weight * ((-x).exp() - 1 + x)
    per_token = (per_token - config.entropy_coef * entropy) * keep
    if config.aggregation == "token_mean":
        return per_token.sum() / denominators.tokens
    if config.aggregation == "seq_mean_token_mean":
        return per_token.sum() / keep.sum().clamp(min=1) / denominators.sequences
    if config.aggregation == "seq_mean_token_sum":
        return per_token.sum() / denominators.sequences
    return per_token.sum() / denominators.sequences / config.fixed_normalizer


def _surrogate(
    p: torch.Tensor,
    anchor: torch.Tensor,
    keep: torch.Tensor,
    row: dict[str, torch.Tensor],
    config: LossConfig,
    denominators: Denominators,
) -> torch.Tensor:
    a, v = row["advantages"], row["is_weights"]
    ratio = _bounded(anchor, -20, 20).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.surrogate == "sft":
        return -p
    if config.surrogate == "cispo":
        return -v * ratio.clamp(low, high).detach() * a * p
    if config.surrogate == "aipo":
        return -v * _bounded(ratio, 0, config.aipo_delta) * a
    if config.surrogate == "reinforce":
        total = anchor.sum().clamp(-20, 20).exp()
        weight = {"none": torch.ones_like(p), "token": ratio, "sequence": total.expand_as(p)}[
            config.weight_level
        ].detach()
        upper = float("inf") if config.weight_upper is None else config.weight_upper
        if config.weight_lower is None:
            weight = weight.clamp(max=upper)
        else:
            weight = weight * ((weight >= config.weight_lower) & (weight <= upper))
        return -v * weight / denominators.weight_mean * a * p
    if config.surrogate == "gspo":
        mean = ((anchor * keep).sum() / keep.sum().clamp(min=1)).detach()
        ratio = _bounded(p - p.detach() + mean, -math.inf, 10).exp()
    loss = torch.maximum(-a * ratio, -a * _bounded(ratio, low, high))
    if config.surrogate == "ppo_clip" and config.dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * config.dual_clip), loss)
    return v * loss
