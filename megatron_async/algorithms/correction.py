"""Computes rollout correction: importance weights and rejection masks that account for the
difference between two policies: pi_rollout, which generated the tokens, and pi_old, which is
trained.

The definitions are those of verl 0.9.1 (`verl.trainer.ppo.rollout_corr_helper`, and its guide
docs/algo/rollout_corr.md), for packed arrays of tokens. If code and guide of verl differ, this
module follows the code; docs/algorithms.md lists each such difference.

Names of metrics begin with `rollout_corr/`, and the docstrings name the function of verl that
computes them. A row is a sequence. "All rows" includes rows without trained tokens; their mean over
tokens is an empty mean, and each formula says its value.

Symbols in this module: m is the mask of trained tokens (0 or 1), l = log pi_old - log pi_rollout of
a token, and c(x) = clamp(x, -20, 20). n is the number of trained tokens, n_i their number in row i,
and B the number of rows.

Invariants
- A padded input [B, L] and the packed input [T] of the same rows give the same numbers.
- Weights do not depend on rejection, and rejection changes only the mask.
- Weights have no gradient.
- Computations are in float64. Weights are returned in float32, or in the inputs' type if that is
  wider.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron_async_kernels.loss_torch import raw_weights, rejection_statistic
from megatron_async_kernels.loss_types import SAFETY_BOUND, RejectionRule, check_finite
from megatron_async_kernels.packed import segment_sum, spread
from megatron_async_kernels.surrogates import k3_of, truncate

from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.algorithms.metrics import largest, mean, smallest, std, total
from megatron_async.config.algorithm import RolloutCorrectionConfig
from megatron_async.config.thresholds import (
    ParsedRejection,
    parse_rejection,
    parse_weight_threshold,
)

_EPSILON = 1e-8
_PREFIX = "rollout_corr/"
_SMALLEST_MEAN = 1e-8


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Packed log-probs of two policies in float64, which are 0 at untrained tokens, and the mask of
    trained tokens (0 or 1). A row is a sequence."""

    old_T: torch.Tensor
    rollout_T: torch.Tensor
    mask_T: torch.Tensor
    cu_seqlens_S1: torch.Tensor

    @cached_property
    def log_ratio_T(self) -> torch.Tensor:
        return self.old_T - self.rollout_T

    @cached_property
    def length_S(self) -> torch.Tensor:
        return segment_sum(self.mask_T, self.cu_seqlens_S1)

    @cached_property
    def trained_T(self) -> torch.Tensor:
        return self.mask_T != 0

    def row_mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the mean of `values_T` over the trained tokens of each row (sequence), [S]; 0 for
        a row without trained tokens."""
        return segment_sum(values_T * self.mask_T, self.cu_seqlens_S1) / self.length_S.clamp(min=1)

    def trained(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the values at trained tokens only, [n]."""
        return values_T[self.trained_T]


def weight_metrics(
    rows: MaskedRows,
    level: str,
    raw_T: torch.Tensor,
    weights_T: torch.Tensor,
    lower: float | None,
    upper: float,
) -> dict[str, float]:
    """Return the metrics of importance weights before they are normalized (verl's
    `compute_is_metrics`).

    Symbols: m is the mask of trained tokens (0 or 1), l = log pi_old - log pi_rollout of a token, n
    the number of trained tokens, and B the number of rows (sequences). r is a weight before
    truncation and w after it. C is `upper`, and lo is `lower`, or 1 / C if there is no lower bound.
    b = clamp(w, 0, C). All rows count, also those without trained tokens.

        rollout_is_mean                sum of m * w over tokens, divided by n
        rollout_is_std                 population standard deviation of b over tokens; 0 if n <= 1
        rollout_is_eff_sample_size     1 / mean over tokens of (b / (mean of b + 1e-8)) ** 2;
                                       0 if every weight is 0

    With level `token`:

        rollout_is_max, _min           of w over trained tokens
        rollout_is_ratio_fraction_*    high: share of tokens with r > C; low: with r < lo

    With level `sequence`, where L_i is the sum of m * l over row i (0 without trained tokens):

        rollout_is_max                 exp(min(largest L_i, 20))
        rollout_is_min                 exp(smallest L_i), not clamped
        rollout_is_ratio_fraction_*    high: share of rows with L_i > log C; low: with L_i < log lo

    With both levels, where w_i and r_i are the means of w and r over the trained tokens of row i (0
    without trained tokens):

        rollout_is_seq_mean, _max, _min    of w_i
        rollout_is_seq_std             standard deviation of w_i with B - 1; 0 if B = 1
        rollout_is_seq_max_deviation   largest |w_i - 1|
        rollout_is_seq_fraction_*      high: share of rows with r_i > C; low: with r_i < lo
        rollout_is_oob_ratio           share of tokens with r outside [lo, C]; only if `lower` is
                                       given, so that weights outside become 0 (IcePop)
    """
    floor = 1.0 / upper if lower is None else lower
    used, raw = rows.trained(weights_T), rows.trained(raw_T)
    metrics = {"rollout_is_mean": mean(used)}
    if level == "sequence":
        total_S = segment_sum(rows.log_ratio_T, rows.cu_seqlens_S1)
        metrics["rollout_is_max"] = math.exp(min(largest(total_S), SAFETY_BOUND))
        metrics["rollout_is_min"] = float(total_S.new_tensor(smallest(total_S)).exp())
        metrics["rollout_is_ratio_fraction_high"] = mean(total_S > math.log(upper))
        metrics["rollout_is_ratio_fraction_low"] = mean(total_S < math.log(floor))
    else:
        metrics["rollout_is_max"] = largest(used)
        metrics["rollout_is_min"] = smallest(used)
        metrics["rollout_is_ratio_fraction_high"] = mean(raw > upper)
        metrics["rollout_is_ratio_fraction_low"] = mean(raw < floor)
    bounded = used.clamp(0.0, upper)
    metrics["rollout_is_std"] = std(bounded, unbiased=False)
    normalized = bounded / (mean(bounded) + _EPSILON)
    second = mean(normalized.square())
    metrics["rollout_is_eff_sample_size"] = 1.0 / second if second > 0 else 0.0
    used_S, raw_S = rows.row_mean(weights_T), rows.row_mean(raw_T)
    metrics["rollout_is_seq_mean"] = mean(used_S)
    metrics["rollout_is_seq_std"] = std(used_S, unbiased=True)
    metrics["rollout_is_seq_max"] = largest(used_S)
    metrics["rollout_is_seq_min"] = smallest(used_S)
    metrics["rollout_is_seq_max_deviation"] = largest((used_S - 1.0).abs())
    metrics["rollout_is_seq_fraction_high"] = mean(raw_S > upper)
    metrics["rollout_is_seq_fraction_low"] = mean(raw_S < floor)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = mean((raw < lower) | (raw > upper))
    return metrics


def rejection_metrics(
    rows: MaskedRows,
    option: ParsedRejection,
    statistic_T: torch.Tensor,
    statistic_S: torch.Tensor | None,
    keep_T: torch.Tensor,
) -> dict[str, float]:
    """Return the metrics of one rejection option, named `rollout_rs_{option}_*` (verl's
    `compute_rs_metrics`).

    Symbols: m is the mask of trained tokens (0 or 1), n is their number, and a row is a sequence. s
    is the statistic of a token; with a sequence level, each token has the statistic of its
    sequence. hi and lo are the bounds `option.upper` and `option.lower`, for k1 logarithms of
    ratios; only k1 has a lower bound. s_i is the statistic of row i, or with level `token` the mean
    of s over row i. In every metric per row, only rows with trained tokens count.

        mean                 sum of m * s over tokens, divided by n
        max, min             with level `token` of s over trained tokens, otherwise of s_i
        fraction_high        share of tokens with s > hi (level `token`), or of rows with s_i > hi
        fraction_low         the same with values < lo; 0 for k2 and k3
        std                  population standard deviation over tokens of clamp(s, lo, hi), where
                             lo = 0 for k2 and k3; 0 if n <= 1
        seq_mean, seq_max, seq_min    of s_i
        seq_std              standard deviation of s_i with (number of rows) - 1; 0 for one row
        seq_max_deviation    largest |s_i|
        seq_fraction_high    share of rows with s_i > hi
        seq_fraction_low     share of rows with s_i < lo; only for k1
        masked_fraction      share of tokens that the option rejects
        seq_masked_fraction  share of rows in which the option rejects at least one token
    """
    prefix, two_sided = f"rollout_rs_{option.option}", option.divergence == "k1"
    low = option.lower if two_sided else 0.0
    nonempty_S = rows.length_S > 0
    tokens = rows.trained(statistic_T)
    per_row_S = rows.row_mean(statistic_T) if statistic_S is None else statistic_S
    per_row = per_row_S[nonempty_S]
    population = tokens if statistic_S is None else per_row
    lost_T = (1.0 - keep_T) * rows.mask_T
    lost_S = (segment_sum(lost_T, rows.cu_seqlens_S1) > 0)[nonempty_S]
    metrics = {
        "mean": mean(tokens),
        "max": largest(population),
        "min": smallest(population),
        "fraction_high": mean(population > option.upper),
        "fraction_low": mean(population < low) if two_sided else 0.0,
        "std": std(tokens.clamp(low, option.upper), unbiased=False),
        "seq_mean": mean(per_row),
        "seq_std": std(per_row, unbiased=True),
        "seq_max": largest(per_row),
        "seq_min": smallest(per_row),
        "seq_max_deviation": largest(per_row.abs()),
        "seq_fraction_high": mean(per_row > option.upper),
        "masked_fraction": mean(rows.trained(lost_T)),
        "seq_masked_fraction": mean(lost_S),
    }
    if two_sided:
        metrics["seq_fraction_low"] = mean(per_row < low)
    return {f"{prefix}_{name}": value for name, value in metrics.items()}


def off_policy_metrics(rows: MaskedRows) -> dict[str, float]:
    """Return metrics of the difference between the two policies, which do not depend on the
    correction (verl's `compute_offpolicy_metrics`).

    Symbols: m is the mask of trained tokens (0 or 1), l = log pi_old - log pi_rollout of a token,
    c(x) = clamp(x, -20, 20), and a row is a sequence. a_i and b_i are the means of log pi_old and
    log pi_rollout over the trained tokens of row i (0 without trained tokens). A mean over i is
    over all rows, and a mean over tokens is over trained tokens.

        training_ppl, rollout_ppl            mean over i of exp(-a_i), and of exp(-b_i)
        training_log_ppl, rollout_log_ppl    mean over i of -a_i, and of -b_i
        log_ppl_diff                         mean over i of b_i - a_i; positive if pi_old gives the
                                             tokens less probability
        log_ppl_abs_diff                     mean over i of |b_i - a_i|
        log_ppl_diff_max, _min               largest and smallest b_i - a_i
        ppl_ratio                            mean over i of exp(b_i - a_i)
        kl                                   mean over tokens of -l: the estimate k1 of
                                             KL(pi_rollout || pi_old)
        k3_kl                                mean over tokens of exp(l) - l - 1, not clamped
        chi2_token                           mean over tokens of exp(2 * c(l)), minus 1
        chi2_seq                             mean over i of exp(2 * c(sum of m * l over row i)),
                                             minus 1
    """
    old_S, rollout_S = rows.row_mean(rows.old_T), rows.row_mean(rows.rollout_T)
    diff_S = rollout_S - old_S
    log = rows.trained(rows.log_ratio_T)
    total_S = segment_sum(rows.log_ratio_T, rows.cu_seqlens_S1)
    return {
        "training_ppl": mean((-old_S).exp()),
        "training_log_ppl": mean(-old_S),
        "rollout_ppl": mean((-rollout_S).exp()),
        "rollout_log_ppl": mean(-rollout_S),
        "log_ppl_diff": mean(diff_S),
        "log_ppl_abs_diff": mean(diff_S.abs()),
        "log_ppl_diff_max": largest(diff_S),
        "log_ppl_diff_min": smallest(diff_S),
        "ppl_ratio": mean(diff_S.exp()),
        "kl": mean(-log),
        "k3_kl": mean(k3_of(log)),
        "chi2_token": mean((2.0 * log.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp()) - 1.0,
        "chi2_seq": mean((2.0 * total_S.clamp(-SAFETY_BOUND, SAFETY_BOUND)).exp()) - 1.0,
    }


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
    """Compute importance weights (None without `rollout_is`), the mask without rejected tokens, and
    metrics.

    Inputs are padded [B, L], or packed [T] with `cu_seqlens` [S + 1]; the outputs have the same
    shape.

    Symbols: m is `response_mask`, l = `old_logprobs` - `rollout_logprobs`, and c(x) = clamp(x, -20,
    20). With `rollout_is: token`, the weight of a token is exp(c(l)) * m. With `sequence`, each
    token of a sequence has the weight exp(c(sum of m * l over the sequence)) * m. If the threshold
    is a number, larger weights are reduced to it. If it is a text `lo_hi`, weights outside [lo, hi]
    become 0. With `rollout_is_batch_normalize`, weights are then divided by their mean over tokens,
    or with `sequence` over sequences with trained tokens, unless the mean is at most 1e-8.
    `rollout_rs` names rejection options (`RejectionRule`); a token is kept if every option keeps
    it.

    Raises:
        NonFiniteError: If a tensor has non-finite values; the message names it.
        ValueError: If a threshold or the shapes are invalid, or no token is trained.
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
    return weights, mask, {_PREFIX + name: value for name, value in metrics.items()}


def correct(
    config: RolloutCorrectionConfig, batch: DeviceBatch, logprobs_T: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor, dict[str, float]]:
    """Compute the rollout correction of a batch by `compute_rollout_correction`.

    Args:
        config: Settings of the correction.
        batch: The batch, with the log-probs of pi_rollout.
        logprobs_T: Log-probs of pi_old.

    Returns:
        The importance weights (None without `rollout_is`), the loss mask without rejected tokens,
        and metrics.
    """
    return compute_rollout_correction(
        logprobs_T,
        batch.rollout_logprobs_T,
        batch.loss_mask_T,
        cu_seqlens=batch.cu_seqlens_S1,
        **config.model_dump(exclude={"preset", "bypass_mode", "loss_type"}),
    )


def rejection_rules(config: RolloutCorrectionConfig) -> tuple[RejectionRule, ...]:
    """Return the rules by which the loss rejects tokens, from the settings of the correction; empty
    if `rollout_rs` is not set."""
    if config.rollout_rs is None or config.rollout_rs_threshold is None:
        return ()
    return tuple(
        RejectionRule(option.level, option.divergence, option.lower, option.upper)  # type: ignore[arg-type]
        for option in parse_rejection(config.rollout_rs, config.rollout_rs_threshold)
    )


def _rows(
    old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor | None
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
    if level not in ("token", "sequence"):
        raise ValueError(f"rollout_is must be 'token' or 'sequence', got {level!r}")
    raw_T = raw_weights(log_T, mask_T, cu_S1, level) * mask_T
    weights_T, _, _ = truncate(raw_T, lower, upper)
    metrics = weight_metrics(rows, level, raw_T, weights_T, lower, upper)
    if normalize:
        factor = weight_mean(weights_T, mask_T, cu_S1, level)
        weights_T = weights_T / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights_T, metrics


def weight_mean(
    weights_T: torch.Tensor, mask_T: torch.Tensor, cu_seqlens_S1: torch.Tensor, level: str
) -> float:
    """Return the mean weight. With level `token` it is over trained tokens; otherwise it is the
    mean, over sequences with trained tokens, of each sequence's mean weight. If the mean is at most
    1e-8, return 1, because weights are divided by it."""
    if level == "token":
        found = total(weights_T * mask_T) / max(total(mask_T), 1.0)
    else:
        length_S = segment_sum(mask_T, cu_seqlens_S1)
        sums_S = segment_sum(weights_T * mask_T, cu_seqlens_S1)[length_S > 0]
        found = mean(sums_S / length_S[length_S > 0])
    return found if found > _SMALLEST_MEAN else 1.0


def _reject(
    rows: MaskedRows, options: tuple[ParsedRejection, ...]
) -> tuple[torch.Tensor, dict[str, float]]:
    metrics: dict[str, float] = {}
    keep_T, cu_S1 = torch.ones_like(rows.mask_T), rows.cu_seqlens_S1
    for option in options:
        statistic = rejection_statistic(
            rows.log_ratio_T, rows.mask_T, cu_S1, option.level, option.divergence
        )
        passes = ((statistic >= option.lower) & (statistic <= option.upper)).double()
        of_sequence = None if option.level == "token" else statistic
        if of_sequence is not None:
            statistic, passes = spread(statistic, cu_S1), spread(passes, cu_S1)
        keep_T = keep_T * passes
        metrics |= rejection_metrics(rows, option, statistic, of_sequence, passes)
    lost_T = (1.0 - keep_T) * rows.mask_T
    touched_S = segment_sum(lost_T, cu_S1) > 0
    metrics["rollout_rs_masked_fraction"] = total(lost_T) / total(rows.mask_T)
    metrics["rollout_rs_seq_masked_fraction"] = mean(touched_S)
    return keep_T, metrics
