"""Rollout correction: importance weights and rejection masks between two policies' log-probs.

Definitions are those of verl 0.9.1 (`verl.trainer.ppo.rollout_corr_helper`; the guide
docs/algo/rollout_corr.md), re-implemented on packed streams. Where its code and its guide differ
the code holds; docs/algorithms.md lists each such place.

Invariants
- A padded [B, L] input and the packed [T] input of the same rows give the same numbers.
- Weights never depend on rejection, and rejection changes nothing but the mask.
- Weights carry no gradient.

l = log pi_old - log pi_rollout, m the mask, c(x) = clamp(x, -20, 20).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron_async_kernels.loss_torch import generation_log_weight, rejection_statistic
from megatron_async_kernels.loss_types import RejectionRule, check_finite
from megatron_async_kernels.packed import segment_sum, spread
from megatron_async_kernels.surrogates import bounded_exp, truncate

from megatron_async.algorithms.correction_metrics import (
    MaskedRows,
    off_policy_metrics,
    rejection_metrics,
    weight_metrics,
)
from megatron_async.algorithms.reduce import mean, total
from megatron_async.config.algorithm import RolloutCorrectionConfig
from megatron_async.config.thresholds import (
    ParsedRejection,
    parse_rejection,
    parse_weight_threshold,
)

PREFIX = "rollout_corr/"
_SMALLEST_MEAN = 1e-8


def compute_rollout_correction(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Weights (None without `rollout_is`), the mask after rejection, and all metrics.

    Inputs are padded [B, L], or packed [T] with `cu_seqlens` [S + 1]; outputs have their shape.
    Weights: token exp(c(l)) m; sequence exp(c(sum_t l m)) m. A number truncates above, `lo_hi`
    zeroes outside (both bounds inclusive). `rollout_is_batch_normalize` then divides by the mean
    over tokens, or over non-empty sequences (unless it is <= 1e-8). Rejection: see
    `RejectionRule`; all options must pass.

    Raises NonFiniteError naming the tensor; ValueError for a malformed threshold, shapes that do
    not fit, or a batch without any trained token.
    """
    if not old_logprobs.shape == rollout_logprobs.shape == response_mask.shape:
        raise ValueError(
            f"shapes differ: old_logprobs {tuple(old_logprobs.shape)}, rollout_logprobs "
            f"{tuple(rollout_logprobs.shape)}, response_mask {tuple(response_mask.shape)}"
        )
    if (old_logprobs.ndim == 1) != (cu_seqlens is not None) or old_logprobs.ndim > 2:
        raise ValueError(
            "log-probs must be [B, L] without cu_seqlens, or [T] with them; got shape "
            f"{tuple(old_logprobs.shape)}"
        )
    check_finite(
        {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs}, response_mask
    )
    rows = _rows(old_logprobs, rollout_logprobs, response_mask, cu_seqlens)
    if not rows.trained_T.any():
        raise ValueError("response_mask has no trained token")
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None:
        weights_T, found = _weights(
            rows, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        dtype = torch.promote_types(old_logprobs.dtype, torch.float32)
        weights = weights_T.to(dtype).reshape(old_logprobs.shape)
        metrics |= found
    mask = response_mask.clone()
    if rollout_rs is not None:
        if rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs {rollout_rs!r} needs rollout_rs_threshold")
        keep_T, found = _reject(rows, parse_rejection(rollout_rs, rollout_rs_threshold))
        mask = mask * keep_T.to(mask.dtype).reshape(mask.shape)
        metrics |= found
    metrics |= off_policy_metrics(rows)
    return weights, mask, {PREFIX + name: value for name, value in metrics.items()}


def correct(
    config: RolloutCorrectionConfig,
    old_logprobs_T: torch.Tensor,
    rollout_logprobs_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """`compute_rollout_correction` with the settings of `config`, on a packed stream."""
    return compute_rollout_correction(
        old_logprobs_T,
        rollout_logprobs_T,
        mask_T,
        cu_seqlens=cu_seqlens_S1,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )


def rejection_rules(config: RolloutCorrectionConfig) -> tuple[RejectionRule, ...]:
    """The rules of a correction config as the loss reads them (empty without `rollout_rs`)."""
    if config.rollout_rs is None or config.rollout_rs_threshold is None:
        return ()
    parsed = parse_rejection(config.rollout_rs, config.rollout_rs_threshold)
    return tuple(_rule(option) for option in parsed)


def _rule(option: ParsedRejection) -> RejectionRule:
    return RejectionRule(option.level, option.divergence, option.lower, option.upper)  # type: ignore[arg-type]


def _rows(
    old: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> MaskedRows:
    if cu_seqlens is None:
        batch, length = old.shape
        cu_seqlens = torch.arange(batch + 1, device=old.device) * length
    mask_T = (mask.reshape(-1) != 0).double()
    zero_T = torch.zeros_like(mask_T)
    trained_T = mask_T != 0
    return MaskedRows(
        old_T=torch.where(trained_T, old.detach().reshape(-1).double(), zero_T),
        rollout_T=torch.where(trained_T, rollout.detach().reshape(-1).double(), zero_T),
        mask_T=mask_T,
        cu_seqlens_S1=cu_seqlens,
    )


def _weights(
    rows: MaskedRows, level: str, threshold: float | str, normalize: bool
) -> tuple[torch.Tensor, dict[str, float]]:
    lower, upper = parse_weight_threshold(threshold, "rollout_is_threshold")
    log_T, mask_T, cu_S1 = rows.log_ratio_T, rows.mask_T, rows.cu_seqlens_S1
    if level == "token":
        raw_T = bounded_exp(log_T)[0] * mask_T
    elif level == "sequence":
        total_S = generation_log_weight(log_T, mask_T, cu_S1)
        raw_T = spread(bounded_exp(total_S)[0], cu_S1) * mask_T
    else:
        raise ValueError(f"rollout_is must be 'token' or 'sequence', got {level!r}")
    weights_T, _, _ = truncate(raw_T, lower, upper)
    metrics = weight_metrics(rows, level, raw_T, weights_T, lower, upper)
    if normalize:
        factor = weight_mean(weights_T, mask_T, cu_S1, level)
        weights_T = weights_T / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights_T, metrics


def weight_mean(
    weights_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
    level: str,
) -> float:
    """Mean weight over tokens, or over non-empty sequences; 1 if it is <= 1e-8."""
    if level == "token":
        found = total(weights_T * mask_T) / max(total(mask_T), 1.0)
    else:
        length_S = segment_sum(mask_T, cu_seqlens_S1)
        sums_S = segment_sum(weights_T * mask_T, cu_seqlens_S1)[length_S > 0]
        found = mean(sums_S / length_S[length_S > 0])
    return found if found > _SMALLEST_MEAN else 1.0


@dataclass(frozen=True, eq=False)
class _Decision:
    """An option's result: statistic by token, by sequence (None at token level), tokens kept."""

    statistic_T: torch.Tensor
    statistic_S: torch.Tensor | None
    keep_T: torch.Tensor


def _decide(rows: MaskedRows, option: ParsedRejection) -> _Decision:
    statistic = rejection_statistic(
        rows.log_ratio_T, rows.mask_T, rows.cu_seqlens_S1, option.level, option.divergence
    )
    keep = ((statistic >= option.lower) & (statistic <= option.upper)).double()
    if option.level == "token":
        return _Decision(statistic, None, keep)
    cu_S1 = rows.cu_seqlens_S1
    return _Decision(spread(statistic, cu_S1), statistic, spread(keep, cu_S1))


def _reject(
    rows: MaskedRows, options: tuple[ParsedRejection, ...]
) -> tuple[torch.Tensor, dict[str, float]]:
    metrics: dict[str, float] = {}
    keep_T = torch.ones_like(rows.mask_T)
    for option in options:
        found = _decide(rows, option)
        keep_T = keep_T * found.keep_T
        metrics |= rejection_metrics(
            rows, option, found.statistic_T, found.statistic_S, found.keep_T
        )
    lost_T = (1.0 - keep_T) * rows.mask_T
    touched_S = (segment_sum(lost_T, rows.cu_seqlens_S1) > 0).double()
    metrics["rollout_rs_masked_fraction"] = total(lost_T) / total(rows.mask_T)
    metrics["rollout_rs_seq_masked_fraction"] = mean(touched_S)
    return keep_T, metrics
