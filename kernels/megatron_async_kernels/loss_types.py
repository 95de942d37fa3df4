"""The loss interface as plain data, field for field that of `megatron_async.algorithms.interface`.

The kernels are usable without megatron_async, so they carry their own copy of the types; a test
holds the two equal. `mirror` turns any object with the same attributes into these types, so that
callers pass theirs as they are.

Invariants
- Packed streams of T tokens; S whole sequences end to end, told apart by `cu_seqlens_S1`.
- A token with mask 0 contributes nothing, whatever its other values are (NaN included).
- `dlogp_T` is d loss_sum / d logprobs_T in closed form; denominators are global.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch

SAFETY_BOUND = 20.0
GSPO_LOG_BOUND = 10.0
NUM_LAG_BINS = 9


@dataclass(frozen=True)
class RejectionRule:
    """Keep where lower <= statistic <= upper; statistics of x = c(log π − log μ)."""

    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    divergence: Literal["k1", "k2", "k3"]
    lower: float
    upper: float


@dataclass(frozen=True)
class LossConfig:
    """Every threshold of the loss; the formulas stand in `loss_reference` and docs/kernels.md."""

    surrogate: Literal["reinforce", "aipo", "ppo_clip", "gspo", "cispo", "sft"] = "ppo_clip"
    ratio_to: Literal["rollout", "old"] = "rollout"
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "token_mean"
    fixed_normalizer: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aipo_delta: float = 8.0
    weight_level: Literal["none", "token", "sequence"] = "none"
    weight_upper: float | None = None
    weight_lower: float | None = None
    rejection: tuple[RejectionRule, ...] = ()
    kl_estimator: Literal["none", "k2", "k3"] = "none"
    kl_coef: float = 0.0
    kl_weight_upper: float = 2.0
    entropy_coef: float = 0.0
    staleness_clip: float = 2.0


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One microbatch: floating arrays [T], `mask_T` 0/1, `cu_seqlens_S1` int [S + 1]."""

    logprobs_T: torch.Tensor
    rollout_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    cu_seqlens_S1: torch.Tensor
    old_logprobs_T: torch.Tensor | None = None
    ref_logprobs_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None
    is_weights_T: torch.Tensor | None = None
    lag_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """Global counts of one optimizer step; 0 is read as 1."""

    tokens: float
    sequences: float
    weight_mean: float = 1.0


SUM_NAMES: tuple[str, ...] = (
    "tokens",
    "kept_tokens",
    "sequences",
    "kept_sequences",
    "loss",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "log_ratio",
    "k3",
    "is_weight",
    "is_weight_sq",
    "seq_weight",
    "seq_weight_sq",
    "seq_staleness",
    "seq_weight_clipped",
    "ratio",
    "ratio_log",
    "coefficient",
    "coefficient_sq",
    "clip_high",
    "clip_low",
    "clip_dual",
    "entropy",
    "advantage",
    "advantage_sq",
    "ref_k1",
    "ref_k3",
    "lag",
    "off_policy_tokens",
)
LAG_SUM_NAMES: tuple[str, ...] = ("lag_tokens", "lag_weight", "lag_weight_sq", "lag_log_ratio")
MAX_NAMES: tuple[str, ...] = (
    "log_ratio_max",
    "log_ratio_neg_min",
    "seq_log_weight_max",
    "seq_log_weight_neg_min",
    "lag_max",
)


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """float64 sums [len(SUM_NAMES)], by-lag sums [4, NUM_LAG_BINS], maxima [len(MAX_NAMES)]."""

    sums_M: torch.Tensor
    lag_sums_LB: torch.Tensor
    maxima_E: torch.Tensor


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss_sum` [] is this call's share of the loss; the gradients are those of `loss_sum`."""

    loss_sum: torch.Tensor
    dlogp_T: torch.Tensor
    dentropy_T: torch.Tensor | None
    metrics: LossMetrics


class NonFiniteInput(ArithmeticError):
    """A tensor that must be finite is not at a trained token; names the tensor."""


Mirrored = TypeVar("Mirrored", LossConfig, LossInputs, Denominators, RejectionRule)


def mirror(kind: type[Mirrored], other: Any) -> Mirrored:
    """`other` as `kind`, by attribute names; itself where it already is one."""
    if isinstance(other, kind):
        return other
    values = {field.name: getattr(other, field.name) for field in fields(kind)}
    if "rejection" in values:
        values["rejection"] = tuple(mirror(RejectionRule, rule) for rule in values["rejection"])
    return kind(**values)


def floating_inputs(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """The present floating streams by the names that errors use."""
    named = {
        "logprobs": inputs.logprobs_T,
        "rollout_logprobs": inputs.rollout_logprobs_T,
        "old_logprobs": inputs.old_logprobs_T,
        "ref_logprobs": inputs.ref_logprobs_T,
        "advantages": inputs.advantages_T,
        "entropy": inputs.entropy_T,
        "is_weights": inputs.is_weights_T,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def require_inputs(inputs: LossInputs, config: LossConfig) -> None:
    """Raise ValueError where `config` needs a stream that is missing or lengths differ."""
    needed = (
        ("old_logprobs_T", inputs.old_logprobs_T, config.ratio_to == "old"),
        ("ref_logprobs_T", inputs.ref_logprobs_T, config.kl_estimator != "none"),
        ("entropy_T", inputs.entropy_T, config.entropy_coef != 0.0),
    )
    for name, tensor_T, required in needed:
        if required and tensor_T is None:
            raise ValueError(f"the loss needs {name}, got None")
    shape = inputs.mask_T.shape
    for name, tensor in floating_inputs(inputs).items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the mask {tuple(shape)}")


def raise_non_finite(inputs: LossInputs) -> None:
    """Raise NonFiniteInput naming the first stream that is not finite at a trained token."""
    untrained_T = inputs.mask_T == 0
    for name, tensor in floating_inputs(inputs).items():
        bad = int((~torch.isfinite(tensor) & ~untrained_T).sum())
        if bad:
            raise NonFiniteInput(f"{name} has {bad} non-finite values among its trained tokens")
