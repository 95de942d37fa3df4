"""Defines the interface of every loss: its inputs, its choices and thresholds, and its result.

`is_loss(inputs, config, denominators) -> LossOutput` computes a loss, with Triton on CUDA and with
`loss_torch.policy_loss` elsewhere; both have these classes as arguments and result.

Invariants
- Every array with the suffix `_T` is packed: it has one entry for each of T tokens, of S whole
  sequences one after the other, whose borders are in `cu_seqlens_S1`. A sequence is never split
  over two calls.
- A token with mask 0 contributes nothing, whatever its other values are (NaN included).
- Denominators are counts over all data-parallel ranks and microbatches of one optimizer step, and
  are passed by the caller. So however a minibatch is split, the sums of `loss_sum`, of the
  gradients and of the metric sums over all calls are the same.
- The gradient is not computed by autograd but returned: `dlogp_T` is the derivative of `loss_sum`
  with respect to `logprobs_T`, by a formula.
- Every exponent is bounded by c(x) = clamp(x, -SAFETY_BOUND, SAFETY_BOUND). Beyond the bound the
  gradient of a ratio is 0, as autograd computes for clamp.

Symbols in this module: m is the mask, p the log-prob under the current policy, mu =
`rollout_logprobs_T`, and b the log-prob in the denominator of the ratio (mu or `old_logprobs_T`, as
`ratio_to` says). A is the advantage, l = p - b, r = exp(c(l)), v is `is_weights_T` or 1, and n_i is
the number of kept tokens of sequence i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

SAFETY_BOUND = 20.0
GSPO_LOG_BOUND = 10.0
NUM_LAG_BINS = 9  # one bin for each lag from 0 to 7, and one for 8 or more


class NonFiniteError(ArithmeticError):
    """Error for a tensor with a NaN or an infinity that must be finite; the message names the
    tensor. The trainer then skips the optimizer step."""


Surrogate = Literal["reinforce", "aipo", "ppo_clip", "gspo", "cispo", "sft", "own"]
Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
RejectionLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class RejectionRule:
    """Rule that keeps a token, or all tokens of a sequence, if lower <= statistic <= upper.

    Symbols: x is the log-prob of a token under the trained policy minus its log-prob under the
    policy that generated it, clamped to [-SAFETY_BOUND, SAFETY_BOUND].

    Attributes:
        level: With `token`, the statistic is the token's divergence, and the rule decides for the
            token. With `seq_sum`, `seq_mean` and `seq_max`, it is the sum, mean or maximum of the
            divergences over the trained tokens of a sequence (0 without trained tokens), and the
            rule decides for the whole sequence.
        divergence: Divergence of a token: k1 is -x, k2 is x ** 2 / 2, and k3 is exp(x) - 1 - x.
        lower: Smallest statistic that is kept; for k1 a logarithm of a ratio.
        upper: Largest statistic that is kept; for k1 a logarithm of a ratio.
    """

    level: RejectionLevel
    divergence: Divergence
    lower: float
    upper: float


@dataclass(frozen=True)
class LossConfig:
    """Choice of the loss (surrogate, aggregation, KL, entropy) with all its thresholds.

    Symbols for one token: p is its log-prob under the current policy, and b is the log-prob in the
    denominator of the ratio (`old_logprobs_T` or `rollout_logprobs_T`, as `ratio_to` says). A is
    the advantage, l = p - b, c(x) = clamp(x, -SAFETY_BOUND, SAFETY_BOUND), r = exp(c(l)), and v is
    `is_weights_T` or 1. A token is kept if its mask is 1 and no rejection rule rejects it; n_i is
    the number of kept tokens of its sequence i. A detached value counts as a constant in
    derivatives.

    The loss of a microbatch, `loss_sum`, is the sum over tokens of
    a * (loss + kl_coef * q - entropy_coef * H) with the following terms, where H is the entropy.

    The loss of a token for each surrogate, and its derivative d with respect to p:

    ```text
    reinforce  loss = -v * w * A * p    d = -v * w * A    w is a detached weight (`weight_level`)
    aipo       loss = -v * min(r, aipo_delta) * A
               d = -v * r * A if r <= aipo_delta and |l| <= SAFETY_BOUND, otherwise 0
    ppo_clip   loss = v * max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high)), but if A < 0
               and `dual_clip` is set, at most -v * A * dual_clip
               d = -v * A * r if the loss is the unclipped term (also if both terms are equal)
               and |l| <= SAFETY_BOUND, otherwise 0
    gspo       as ppo_clip without dual clip, with r replaced by s = exp(min(M, GSPO_LOG_BOUND)),
               where M is the mean of p - b over the kept tokens of the sequence
               d = -v * A * s if the loss is the unclipped term and M <= GSPO_LOG_BOUND,
               otherwise 0 (the token form: each token has the share 1 / n_i of its sequence)
    cispo      loss = -v * u * A * p    d = -v * u * A
               u = clip(r, 1 - clip_low, 1 + clip_high) is detached
    sft        loss = -p                d = -1
    own        returned by a function of the user; autograd computes d (`loss_torch.policy_loss`)
    ```

    The factor a for each aggregation; it is 0 for tokens that are not kept. N_tokens and
    N_sequences are those of `Denominators`; n_i is counted in this call:

    ```text
    token_mean               1 / N_tokens
    seq_mean_token_mean      1 / (N_sequences * n_i)
    seq_mean_token_sum       1 / N_sequences
    seq_mean_token_sum_norm  1 / (N_sequences * fixed_normalizer)
    ```

    q is the KL to the reference policy, with e = p - `ref_logprobs_T`, x = c(e) and
    y = v * min(r, kl_weight_upper), which is detached in k2 and differentiated in k3:

    ```text
    k2  q = y * e ** 2 / 2    derivative y * e
    k3  q = y * k with k = exp(-x) - 1 + x
        derivative y * (1 - exp(-x)) if |e| <= SAFETY_BOUND (otherwise 0), plus
        y * k if r <= kl_weight_upper and |l| <= SAFETY_BOUND (otherwise 0);
        the sum of both terms is y * e
    ```
    """

    surrogate: Surrogate = "ppo_clip"
    ratio_to: Literal["rollout", "old"] = "rollout"
    aggregation: Aggregation = "token_mean"
    fixed_normalizer: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aipo_delta: float = 8.0
    # Weight w of `reinforce`: exp(c(l)) with level "token", or exp(c(sum of l over the trained
    # tokens of the sequence)) with level "sequence". `weight_upper` alone gives min(w, upper); with
    # `weight_lower`, weights outside [lower, upper] become 0 (IcePop). The result is divided by
    # `Denominators.weight_mean`.
    weight_level: Literal["none", "token", "sequence"] = "none"
    weight_upper: float | None = None
    weight_lower: float | None = None
    # Used only in bypass mode. The rules read the log-ratio of the current policy to the policy
    # that generated the token; a token is kept if all rules keep it.
    rejection: tuple[RejectionRule, ...] = ()
    kl_estimator: Literal["none", "k2", "k3"] = "none"
    kl_coef: float = 0.0
    kl_weight_upper: float = 2.0
    entropy_coef: float = 0.0
    # RAPID's bound of sequence weights (eta), used only in the reported metric of staleness; it
    # does not change the gradient.
    staleness_clip: float = 2.0


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Input tensors of a loss for one microbatch of whole sequences. Floating arrays are [T];
    `mask_T` is 0/1; `cu_seqlens_S1` (the start of each sequence, and the end of the last one) is
    int32 or int64 [S + 1].

    `old_logprobs_T` is needed with `ratio_to: old`, `ref_logprobs_T` with a KL estimator, and
    `entropy_T` with an entropy bonus (without it, the entropy is only reported). In decoupled mode,
    `is_weights_T` are the importance weights, which count as constants, and `mask_T` is the mask
    without rejected tokens. `lag_T` is the age of each token in policy versions (int); None counts
    as 0, and built-in losses use it only in metrics. `columns` are further arrays [T, ...] with
    values of the tokens, by name, for a user-defined loss.

    Gradients of built-in losses are computed by formulas, so these tensors need no autograd graph.
    For a user-defined loss, autograd differentiates with respect to copies of `logprobs_T` and
    `entropy_T`.
    """

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
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def streams(self) -> dict[str, torch.Tensor]:
        """Return the floating-point arrays [T] that are not None, by the names that error messages
        use for them."""
        named = {
            "logprobs": self.logprobs_T,
            "rollout_logprobs": self.rollout_logprobs_T,
            "old_logprobs": self.old_logprobs_T,
            "ref_logprobs": self.ref_logprobs_T,
            "advantages": self.advantages_T,
            "entropy": self.entropy_T,
            "is_weights": self.is_weights_T,
        }
        return {name: stream for name, stream in named.items() if stream is not None}

    def require(self, config: LossConfig) -> None:
        """Raise ValueError if `config` needs an array that is missing, or if the arrays have
        different lengths."""
        needed = (
            ("old_logprobs_T", self.old_logprobs_T, config.ratio_to == "old"),
            ("ref_logprobs_T", self.ref_logprobs_T, config.kl_estimator != "none"),
            ("entropy_T", self.entropy_T, config.entropy_coef != 0.0),
        )
        for name, stream_T, required in needed:
            if required and stream_T is None:
                raise ValueError(f"the loss needs {name}, got None")
        shape = self.mask_T.shape
        for name, stream in self.streams().items():
            if stream.shape != shape:
                raise ValueError(f"{name} has shape {tuple(stream.shape)}; mask has {tuple(shape)}")


@dataclass(frozen=True)
class Denominators:
    """Counts over all data-parallel ranks and microbatches of one optimizer step, by which losses
    are divided.

    `tokens` is the number of tokens with mask 1, and `sequences` the number of sequences with at
    least one such token. Tokens that were rejected in decoupled mode have mask 0 and are not
    counted; tokens that the loss itself rejects in bypass mode are counted, as in verl 0.9.1, which
    counts before the loss runs. `weight_mean` is the mean by which weights of `reinforce` are
    divided if they are normalized, otherwise 1. A count of 0 is used as 1, because nothing is
    trained then and the loss is 0.
    """

    tokens: float
    sequences: float
    weight_mean: float = 1.0


# Names of the metric sums over tokens or sequences, which are added over microbatches and ranks.
# Symbols: m is the mask of trained tokens, and k = m for tokens that no rejection rule rejects,
# otherwise 0. p is the log-prob under the current policy, L = p - rollout_logprobs_T,
# w = exp(c(L)), and W_i = exp(c(sum of m * L over sequence i)), for sequences with trained tokens.
# A, H, l, r, s, u, v and c are those of `LossConfig`.
SUM_NAMES: tuple[str, ...] = (
    "tokens",  # number of tokens with mask 1: sum of m
    "kept_tokens",  # number of tokens with mask 1 that no rejection rule rejects: sum of k
    "sequences",  # number of sequences with at least one token of mask 1
    "loss",  # loss_sum
    "policy_loss",  # component of loss_sum from the surrogate
    "kl_loss",  # component of loss_sum from the KL, with the factor kl_coef
    "entropy_loss",  # component of loss_sum from the entropy, with the factor entropy_coef
    "log_ratio",  # sum of m * L, unclamped
    "k3",  # sum of m * (exp(c(L)) - 1 - c(L))
    "is_weight",  # sum of m * w
    "is_weight_sq",  # sum of m * w ** 2
    "seq_weight",  # sum of W_i over sequences
    "seq_weight_sq",  # sum of W_i ** 2 over sequences
    # Sum over sequences of min(c(sum of m * L over the sequence), log staleness_clip).
    "seq_staleness",
    "seq_weight_clipped",  # number of sequences with W_i > staleness_clip
    "ratio",  # sum of k * r; for gspo s instead of r; for sft 0
    "ratio_log",  # sum of k * c(l); for sft 0
    # Sum of k * x, where x is the weight by which the surrogate multiplies a token's term:
    # v * w / weight_mean for reinforce with its weight w, v * u for cispo, v * min(r, aipo_delta)
    # for aipo, v for ppo_clip and gspo, and 1 for sft and own.
    "coefficient",
    "coefficient_sq",  # sum of k * x ** 2, with the x of `coefficient`
    # Number of kept tokens at the upper bound. ppo_clip: r > 1 + clip_high, and the clipped term is
    # larger than the unclipped term, so that the loss is the clipped term. gspo: the same with s.
    # cispo: r > 1 + clip_high. aipo: r > aipo_delta. reinforce: weight before truncation >
    # weight_upper. 0 for other surrogates.
    "clip_high",
    # Number of kept tokens at the lower bound: as `clip_high`, but with r (or s) < 1 - clip_low,
    # and for reinforce with a weight before truncation < weight_lower. aipo has no lower bound.
    "clip_low",
    # For ppo_clip, number of kept tokens whose loss is the bound of the dual clip, because A < 0
    # and the bound is smaller than the clipped loss. 0 for other surrogates.
    "clip_dual",
    "entropy",  # sum of m * H; 0 without entropies
    "advantage",  # sum of m * A
    "advantage_sq",  # sum of m * A ** 2
    "ref_k1",  # sum of m * (p - ref_logprobs_T); 0 without a reference policy
    "ref_k3",  # sum of m * (exp(-x) - 1 + x) with x = c(p - ref_logprobs_T)
    # No reported metric uses these sums of lags and the maximum `lag_max`. They are kept because
    # without them one variant of the fused loss kernel spills registers on sm_80 (Triton 3.8).
    "lag",  # sum of m * lag
    "off_policy_tokens",  # number of tokens with mask 1 and lag > 0
)
LAG_SUM_NAMES: tuple[str, ...] = ("lag_tokens", "lag_weight", "lag_weight_sq", "lag_log_ratio")
MAX_NAMES: tuple[str, ...] = (
    "log_ratio_max",  # largest L over tokens with mask 1; -inf if there are none
    "log_ratio_neg_min",  # largest -L
    "seq_log_weight_max",  # largest sum of m * L over a sequence
    "seq_log_weight_neg_min",  # largest -(sum of m * L) over a sequence
    "lag_max",
)


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """Sums and maxima of a loss, from which metrics are computed, in float64: sums
    [len(SUM_NAMES)], sums for each lag [4, NUM_LAG_BINS], and maxima [len(MAX_NAMES)].

    The rows of `lag_sums_LB` are named by LAG_SUM_NAMES. They are the sums of m, m * w, m * w ** 2
    and m * L (see SUM_NAMES) over the tokens with each lag; the last bin has all tokens with a lag
    of at least NUM_LAG_BINS - 1. To combine microbatches or ranks, sums are added, and of two
    maxima the larger one is taken.
    """

    sums_M: torch.Tensor
    lag_sums_LB: torch.Tensor
    maxima_E: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> LossMetrics:
        """Return the metrics of no tokens, which change nothing when they are merged with
        others."""
        return cls(
            torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device),
            torch.zeros(len(LAG_SUM_NAMES), NUM_LAG_BINS, dtype=torch.float64, device=device),
            torch.full((len(MAX_NAMES),), -math.inf, dtype=torch.float64, device=device),
        )

    def merge(self, other: LossMetrics) -> LossMetrics:
        """Return these metrics combined with the metrics of another microbatch."""
        return LossMetrics(
            self.sums_M + other.sums_M,
            self.lag_sums_LB + other.lag_sums_LB,
            torch.maximum(self.maxima_E, other.maxima_E),
        )

    def all_reduce(self, group: torch.distributed.ProcessGroup) -> LossMetrics:
        """Return the metrics combined over all ranks of `group`. This is collective and needs two
        all-reduces."""
        flat = torch.cat([self.sums_M, self.lag_sums_LB.reshape(-1)])
        maxima_E = self.maxima_E.clone()
        torch.distributed.all_reduce(flat, group=group)
        torch.distributed.all_reduce(maxima_E, torch.distributed.ReduceOp.MAX, group=group)
        sums_M, lag_flat = flat.split([len(SUM_NAMES), flat.numel() - len(SUM_NAMES)])
        return LossMetrics(sums_M, lag_flat.view_as(self.lag_sums_LB), maxima_E)

    def sums(self) -> dict[str, float]:
        """Return the sums and maxima by name, with one copy to the host. `metrics.finalize` in the
        package `megatron_async.algorithms` computes means from them."""
        names = SUM_NAMES + MAX_NAMES
        return dict(zip(names, torch.cat([self.sums_M, self.maxima_E]).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Result of a loss for one call.

    Attributes:
        loss_sum: This call's share of the total loss, [].
        dlogp_T: Derivative of `loss_sum` with respect to the log-prob of each token.
        dentropy_T: Derivative of `loss_sum` with respect to the entropy of each token; None if the
            loss does not depend on it.
        metrics: Sums from which metrics are computed.
        nonfinite: Number of values in the inputs that are not finite at trained tokens, []. The
            Triton version counts each token only once.
    """

    loss_sum: torch.Tensor
    dlogp_T: torch.Tensor
    dentropy_T: torch.Tensor | None
    metrics: LossMetrics
    nonfinite: torch.Tensor

    @property
    def finite(self) -> torch.Tensor:
        """Whether the inputs at trained tokens and the loss are finite, as a tensor [] on the
        device. Converting it to a bool makes the host wait for the device."""
        return torch.isfinite(self.loss_sum) & (self.nonfinite == 0)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        loss: torch.Tensor,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor | None,
        dlogp_T: torch.Tensor,
        dentropy_T: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.dlogp_T, ctx.dentropy_T = dlogp_T, dentropy_T  # type: ignore[attr-defined]
        return loss.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        dentropy_T = ctx.dentropy_T  # type: ignore[attr-defined]
        entropy_grad_T = None if dentropy_T is None else grad * dentropy_T
        return None, grad * ctx.dlogp_T, entropy_grad_T, None, None  # type: ignore[attr-defined]


def attach_gradient(
    output: LossOutput, logprobs_T: torch.Tensor, entropy_T: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a scalar with the value `loss_sum`. Its backward pass gives the gradients in `output`
    to `logprobs_T` and `entropy_T`.

    Use this if the log-probs are part of an autograd graph. Each data-parallel rank has a share of
    one total loss, so gradients of ranks must be added, not averaged.
    """
    dlogp_T = output.dlogp_T.to(logprobs_T.dtype)
    dentropy_T = output.dentropy_T
    if entropy_T is None or dentropy_T is None:
        return _Attach.apply(output.loss_sum, logprobs_T, None, dlogp_T, None)
    return _Attach.apply(
        output.loss_sum, logprobs_T, entropy_T, dlogp_T, dentropy_T.to(entropy_T.dtype)
    )


def check_finite(tensors: Mapping[str, torch.Tensor | None], mask_T: torch.Tensor) -> None:
    """Raise NonFiniteError naming the first tensor with a NaN or infinity where the mask is not 0.

    The host waits for the device only once, however many tensors there are.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not present:
        return
    counts_N = nonfinite_counts(list(present.values()), mask_T)
    for name, bad in zip(present, counts_N.tolist(), strict=True):
        if bad:
            raise NonFiniteError(f"{name} has {bad} non-finite values among its trained tokens")


def nonfinite_counts(tensors: Sequence[torch.Tensor], mask_T: torch.Tensor) -> torch.Tensor:
    """Count the NaNs and infinities of each of N tensors where the mask is not 0; return the counts
    as [N] on the device."""
    trained_T = mask_T != 0
    return torch.stack([(~torch.isfinite(tensor) & trained_T).sum() for tensor in tensors])
