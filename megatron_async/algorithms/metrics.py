"""Computes the metrics that a run reports from sums over tokens and sequences.

Invariants
- Every metric is a function of sums and maxima over the whole minibatch, so it does not depend on
  microbatches or ranks.
- A mean over no tokens or sequences is left out; it is not reported as 0.

A raw weight is exp(c(log pi_theta - log pi_rollout)), before any truncation, where pi_theta is the
trained policy, pi_rollout generated the token, and c(x) = clamp(x, -SAFETY_BOUND, SAFETY_BOUND), as
in `megatron_async_kernels.loss_types`.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from megatron_async_kernels.loss_types import LAG_SUM_NAMES, NUM_LAG_BINS, LossMetrics

from megatron_async.algorithms.advantages import informative_groups


def effective_sample_size(weight_sum: float, weight_square_sum: float, count: float) -> float:
    """Return `weight_sum` ** 2 / (`count` * `weight_square_sum`): the effective sample size of
    `count` weights, as a share of `count` (Kish 1965).

    It is 0 if all weights are 0.
    """
    if count <= 0 or weight_square_sum <= 0:
        return 0.0
    return weight_sum * weight_sum / (count * weight_square_sum)


def finalize(metrics: LossMetrics) -> dict[str, float]:
    """Return the metrics of one minibatch, computed from its sums `metrics`, which are merged over
    microbatches and ranks.

    Symbols: L = log pi_theta - log pi_rollout of a token, with the trained policy pi_theta and the
    policy pi_rollout that generated the token. w = exp(clamp(L, -SAFETY_BOUND, SAFETY_BOUND)) is
    the raw weight, and c(x) below is the same clamp. For a sequence, L is summed over its trained
    tokens. r is the probability ratio in the loss, relative to pi_old or pi_rollout (for gspo the
    ratio of the token's sequence; for sft 0). Kept tokens are trained tokens that the loss does not
    reject. ESS is `effective_sample_size`.

        loss/policy, kl, entropy              components of the loss
        actor/tokens, sequences               numbers of trained tokens and sequences
        actor/clip_high, clip_low, clip_dual  share of kept tokens where that bound is active
        actor/clip_fraction                   clip_high + clip_low
        actor/ratio, ppo_kl                   mean over kept tokens of r, and of -c(log r)
        actor/coefficient, coefficient_ess    mean and ESS, over kept tokens, of the weights that
                                              the loss uses
        actor/kept_fraction                   kept tokens / trained tokens
        actor/entropy                         mean over trained tokens
        actor/advantage_mean, advantage_std   over trained tokens; population standard deviation
        ref/kl, ref/k3                        mean of log pi_theta - log pi_ref (reference policy),
                                              and of its estimate k3
        off_policy/ess, ess_sequence          ESS of w over trained tokens, and over sequences
        off_policy/kl, k3                     mean over tokens of -L, and of exp(c(L)) - 1 - c(L):
                                              two estimates of KL(pi_rollout || pi_theta)
        off_policy/weight, weight_sequence    mean of w over tokens, and over sequences
        off_policy/chi2_token, chi2_sequence  the mean of w ** 2, minus 1, in the same order
        off_policy/log_ratio_{max, min}       extremes of L over tokens
        off_policy/log_weight_sequence_{max, min}   extremes of L over sequences
        off_policy/staleness                  for RAPID: mean over sequences of log min(w, eta)
        off_policy/clipped_generations        for RAPID: share of sequences with w > eta
        off_policy/lag_{k}/share              share of tokens that have the lag k (for the largest
                                              k: k or more)
        off_policy/lag_{k}/{weight, ess, log_ratio}   of these tokens: mean w, ESS of w, mean L
    """
    s = metrics.sums()
    result = {
        "loss/policy": s["policy_loss"],
        "loss/kl": s["kl_loss"],
        "loss/entropy": s["entropy_loss"],
        "actor/tokens": s["tokens"],
        "actor/sequences": s["sequences"],
    }
    tokens, kept, sequences = s["tokens"], s["kept_tokens"], s["sequences"]
    if kept > 0:
        result |= {
            "actor/clip_high": s["clip_high"] / kept,
            "actor/clip_low": s["clip_low"] / kept,
            "actor/clip_dual": s["clip_dual"] / kept,
            "actor/clip_fraction": (s["clip_high"] + s["clip_low"]) / kept,
            "actor/ratio": s["ratio"] / kept,
            "actor/ppo_kl": -s["ratio_log"] / kept,
            "actor/coefficient": s["coefficient"] / kept,
            "actor/coefficient_ess": effective_sample_size(
                s["coefficient"], s["coefficient_sq"], kept
            ),
        }
    if tokens > 0:
        mean = s["advantage"] / tokens
        result |= {
            "actor/kept_fraction": kept / tokens,
            "actor/entropy": s["entropy"] / tokens,
            "actor/advantage_mean": mean,
            "actor/advantage_std": math.sqrt(max(s["advantage_sq"] / tokens - mean * mean, 0.0)),
            "ref/kl": s["ref_k1"] / tokens,
            "ref/k3": s["ref_k3"] / tokens,
            "off_policy/ess": effective_sample_size(s["is_weight"], s["is_weight_sq"], tokens),
            "off_policy/kl": -s["log_ratio"] / tokens,
            "off_policy/k3": s["k3"] / tokens,
            "off_policy/weight": s["is_weight"] / tokens,
            "off_policy/chi2_token": s["is_weight_sq"] / tokens - 1.0,
            "off_policy/log_ratio_max": s["log_ratio_max"],
            "off_policy/log_ratio_min": -s["log_ratio_neg_min"],
        }
        result |= _by_lag(metrics, tokens)
    if sequences > 0:
        result |= {
            "off_policy/ess_sequence": effective_sample_size(
                s["seq_weight"], s["seq_weight_sq"], sequences
            ),
            "off_policy/weight_sequence": s["seq_weight"] / sequences,
            "off_policy/chi2_sequence": s["seq_weight_sq"] / sequences - 1.0,
            "off_policy/staleness": s["seq_staleness"] / sequences,
            "off_policy/clipped_generations": s["seq_weight_clipped"] / sequences,
            "off_policy/log_weight_sequence_max": s["seq_log_weight_max"],
            "off_policy/log_weight_sequence_min": -s["seq_log_weight_neg_min"],
        }
    return result


def mean_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over those dicts in `metrics`, one for each update, that
    contain it."""
    names = {name: None for one in metrics for name in one}
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}


def _by_lag(metrics: LossMetrics, tokens: float) -> dict[str, float]:
    result: dict[str, float] = {}
    for lag, column in enumerate(metrics.lag_sums_LB.T.tolist()):
        sums = dict(zip(LAG_SUM_NAMES, column, strict=True))
        count = sums["lag_tokens"]
        if count > 0:
            result[f"off_policy/lag_{lag}/share"] = count / tokens
            result[f"off_policy/lag_{lag}/weight"] = sums["lag_weight"] / count
            result[f"off_policy/lag_{lag}/log_ratio"] = sums["lag_log_ratio"] / count
            result[f"off_policy/lag_{lag}/ess"] = effective_sample_size(
                sums["lag_weight"], sums["lag_weight_sq"], count
            )
    return result


def lag_shares(lag_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, float]:
    """Return the share of a batch's trained tokens at each lag, as `staleness/lag_share_{k}`.

    The last k counts all tokens with this lag or a larger one. The result is empty if no token is
    trained.
    """
    bins = lag_T[mask_T != 0].clamp(max=NUM_LAG_BINS - 1)
    if not bins.numel():
        return {}
    return {f"staleness/lag_share_{k}": mean(bins == k) for k in range(NUM_LAG_BINS)}


def reward_metrics(rewards_S: torch.Tensor, group_index_S: torch.Tensor) -> dict[str, float]:
    """Return the `reward/...` metrics of a batch; empty for a batch without sequences.

    `reward/standard_error` is the standard error of the mean. It assumes that groups are
    independent, but not their members (cluster-robust estimate, Liang and Zeger 1986). A residual
    is a reward minus the mean. The residuals are summed within each group; the result is the square
    root of the sum of the squares of these sums, divided by the number of rewards.
    """
    if not rewards_S.numel():
        return {}
    groups = int(group_index_S.max()) + 1
    residuals_S = rewards_S.double() - mean(rewards_S)
    sums_G = residuals_S.new_zeros(groups).index_add(0, group_index_S, residuals_S)
    return {
        "reward/standard_error": math.sqrt(total(sums_G**2)) / rewards_S.numel(),
        "reward/mean": mean(rewards_S),
        "reward/std": std(rewards_S, unbiased=False),
        "reward/min": smallest(rewards_S),
        "reward/max": largest(rewards_S),
        "reward/uninformative_groups": 1.0 - mean(informative_groups(rewards_S, group_index_S)),
    }


# ---------------------------------------------------------------- statistics of elements


def total(values: torch.Tensor) -> float:
    """Return the sum of all elements, computed in float64."""
    return float(values.double().sum())


def mean(values: torch.Tensor) -> float:
    """Return the mean of all elements, computed in float64; 0 if there are none."""
    return total(values) / values.numel() if values.numel() else 0.0


def largest(values: torch.Tensor) -> float:
    """Return the largest element; -inf if there are none."""
    return float(values.double().max()) if values.numel() else -math.inf


def smallest(values: torch.Tensor) -> float:
    """Return the smallest element; inf if there are none."""
    return -largest(-values.double())


def std(values: torch.Tensor, *, unbiased: bool) -> float:
    """Return the standard deviation (n - 1 if `unbiased`, else n); 0 for fewer than two elements.

    It is computed in float64, in two passes.
    """
    return float(values.double().std(correction=int(unbiased))) if values.numel() > 1 else 0.0
