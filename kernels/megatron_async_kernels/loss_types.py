"""Defines the interface of every loss: what a loss reads, its thresholds, and what it returns.

`is_loss(inputs, config, denominators) -> LossOutput` computes a loss, with Triton on CUDA and with
`loss_torch.policy_loss` elsewhere; both take and return these structs.

Invariants
- Every array is a packed stream of T tokens: S whole sequences, one after the other, separated by
  `cu_seqlens_S1`. A sequence is never split over two calls.
- A token with mask 0 contributes nothing, whatever its other values are (NaN included).
- Denominators are global (over data-parallel ranks and microbatches of one optimizer step) and come
  from outside, so the sum of `loss_sum`, of `dlogp_T` as a gradient, and of the metric sums over
  any split of the minibatch is the same.
- The gradient is returned, not recorded by autograd: `dlogp_T` is d loss_sum / d logprobs_T in
  closed form.
- c(x) = clamp(x, -SAFETY_BOUND, SAFETY_BOUND) bounds every exponent; beyond it the gradient of a
  ratio is 0, as in autograd through clamp.

Notation used below: m the mask, p the log-prob under the current policy, mu = `rollout_logprobs_T`,
b the log-prob in the denominator of the ratio (mu or `old_logprobs_T`, as `ratio_to` says), A the
advantage, l = p - b, r = exp(c(l)), v = `is_weights_T` or 1, n_i the kept tokens of sequence i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

SAFETY_BOUND = 20.0
GSPO_LOG_BOUND = 10.0
NUM_LAG_BINS = 9  # lags 0 to 7, and 8 or more


class NonFiniteError(ArithmeticError):
    """Raised when a tensor that must be finite is not finite; the message names the tensor. A
    trainer skips the step."""


Surrogate = Literal["reinforce", "aipo", "ppo_clip", "gspo", "cispo", "sft", "own"]
Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]
RejectionLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class RejectionRule:
    """Rule that keeps a token or a sequence if lower <= statistic <= upper (bounds inclusive,
    already in the statistic's space).

    Per token with x = c(p - mu): k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x. `seq_sum`, `seq_mean`
    and `seq_max` reduce it over the trained tokens (mask 1) of a sequence (0 for a sequence without
    any) and decide for the whole sequence. For k1 the bounds are logarithms of ratio bounds.
    """

    level: RejectionLevel
    divergence: Divergence
    lower: float
    upper: float


@dataclass(frozen=True)
class LossConfig:
    """Choice of the loss (surrogate, aggregation, KL, entropy) with all its thresholds.

    Per-token loss l_t and its derivative d_t with respect to p (loss_sum = sum_t a_t l_t):

    ```text
    reinforce  -v w A p            d = -v w A      w detached, see `weight_level`
    aipo       -v min(r, delta) A  d = -v r A where r <= delta and |l| <= SAFETY_BOUND, else 0
    ppo_clip   v max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with A < 0 and `dual_clip` C
               also v min(that, -A C).  d = -v A r where the unclipped term is the one taken
               (ties count as unclipped) and |l| <= SAFETY_BOUND, else 0
    gspo       as ppo_clip without dual clip, with r replaced by
               s = exp(min(mean_i(p - b), GSPO_LOG_BOUND)) of the token's sequence (mean over its
               kept tokens; no safety bound below); d = -v A s where unclipped and the mean is
               <= GSPO_LOG_BOUND, else 0 (the token form: each token owns 1/n_i of the sequence)
    cispo      -v u A p            d = -v u A      u = clip(r, 1 - clip_low, 1 + clip_high) detached
    sft        -p                  d = -1          (neither advantage nor weights)
    own        returned by a function of the user, d by autograd (`loss_torch.policy_loss`)
    ```

    a_t: token_mean 1/N_tokens; seq_mean_token_mean 1/(N_sequences n_i); seq_mean_token_sum
    1/N_sequences; seq_mean_token_sum_norm 1/(N_sequences `fixed_normalizer`); 0 where mask or
    rejection is 0. n_i counts the kept tokens of sequence i in this call; the N come from
    `Denominators`.

    KL to the reference, added as kl_coef * a_t * q, with d = p - ref, x = c(d) and
    y = v min(r, `kl_weight_upper`), detached in k2, differentiable in k3:

    ```text
    k2  y d^2 / 2                              derivative y d
    k3  y k, k = exp(-x) - 1 + x               derivative y (1 - exp(-x)) [|d| <= SAFETY_BOUND]
                                               + y k [r <= kl_weight_upper and |l| <= SAFETY_BOUND]
                                               (both: y d)
    ```

    Entropy: -entropy_coef * a_t * H, d/dH = -entropy_coef * a_t.
    """

    surrogate: Surrogate = "ppo_clip"
    ratio_to: Literal["rollout", "old"] = "rollout"
    aggregation: Aggregation = "token_mean"
    fixed_normalizer: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aipo_delta: float = 8.0
    # reinforce: w = exp(c(l)) per token or exp(c(sum_i m l)) per sequence; `weight_upper` alone
    # truncates above (min), with `weight_lower` weights outside [lower, upper] become 0 (IcePop).
    # The result is divided by `Denominators.weight_mean`.
    weight_level: Literal["none", "token", "sequence"] = "none"
    weight_upper: float | None = None
    weight_lower: float | None = None
    # Only in bypass mode: rules are evaluated on p - mu; a token is kept if all rules keep it.
    rejection: tuple[RejectionRule, ...] = ()
    kl_estimator: Literal["none", "k2", "k3"] = "none"
    kl_coef: float = 0.0
    kl_weight_upper: float = 2.0
    entropy_coef: float = 0.0
    # RAPID's eta, used only in the reported staleness; it does not change the gradient.
    staleness_clip: float = 2.0


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Input tensors of a loss for one microbatch of whole sequences. Floating arrays are [T];
    `mask_T` is 0/1; `cu_seqlens_S1` (the start of each sequence, and the end of the last one) is
    int32 or int64 [S + 1].

    `old_logprobs_T` is needed with `ratio_to: old`, `ref_logprobs_T` with a KL estimator,
    `entropy_T` with an entropy bonus (and is only reported otherwise). `is_weights_T` are the
    detached weights of decoupled correction, and `mask_T` is the mask after its rejection. `lag_T`
    is the lag of each token in versions (int, n - a); None counts as 0. Built-in losses use it only
    in metrics. `columns` [T, *inner], by name, are the additional columns of the tokens, for a
    user-defined loss.

    Built-in losses have closed-form gradients and do not differentiate through these tensors. For a
    user-defined loss, `logprobs_T` and `entropy_T` are leaves that autograd differentiates.
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
        """Return the floating-point streams that are present, by the names that error messages
        use."""
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
        """Raise ValueError if `config` needs a stream that is missing, or if the streams have
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
    """Global counts of one optimizer step, over data-parallel ranks and microbatches, by which
    losses are divided.

    `tokens` and `sequences` count mask-1 tokens, and sequences with at least one, after decoupled
    and before bypass rejection (as in verl 0.9.1, whose counts are fixed before the loss runs).
    `weight_mean` is the batch-normalization factor of `reinforce` weights, otherwise 1. Counts of 0
    are read as 1: then nothing is trained and the loss is 0.
    """

    tokens: float
    sequences: float
    weight_mean: float = 1.0


# Sums over tokens or sequences, additive over microbatches and ranks. k = m * kept by rejection;
# L = p - mu, w = exp(c(L)), W_i = exp(c(sum_i m L)) over sequences with any m = 1.
SUM_NAMES: tuple[str, ...] = (
    "tokens",  # sum m
    "kept_tokens",  # sum k
    "sequences",  # sequences with at least one token of mask 1
    "loss",  # loss_sum
    "policy_loss",  # surrogate component of loss_sum
    "kl_loss",  # KL component of loss_sum, kl_coef included
    "entropy_loss",  # entropy component of loss_sum, entropy_coef included
    "log_ratio",  # sum m L, unclamped
    "k3",  # sum m (exp(c(L)) - 1 - c(L))
    "is_weight",  # sum m w
    "is_weight_sq",  # sum m w^2
    "seq_weight",  # sum_i W_i
    "seq_weight_sq",  # sum_i W_i^2
    "seq_staleness",  # sum_i min(c(sum_i m L), log staleness_clip)
    "seq_weight_clipped",  # sequences with W_i > staleness_clip
    "ratio",  # sum k r (gspo: s instead of r); sft: 0
    "ratio_log",  # sum k c(l); sft: 0
    # Sum of k * x, where x is the weight by which the surrogate multiplies a token's term:
    # reinforce v * w / weight_mean, cispo v * u, aipo v * min(r, delta), ppo_clip and gspo v, sft
    # and own 1.
    "coefficient",
    "coefficient_sq",  # Sum of k * x^2, with the same x.
    # Number of kept tokens at the upper bound. ppo_clip: r > 1 + clip_high, and the clipped term is
    # larger than the unclipped term, so that the loss is the clipped term. gspo: the same with s.
    # cispo: r > 1 + clip_high. aipo: r > delta. reinforce: weight before truncation > weight_upper.
    # 0 for other surrogates.
    "clip_high",
    # Number of kept tokens at the lower bound: the same conditions with r (or s) < 1 - clip_low,
    # and for reinforce with a weight before truncation < weight_lower. aipo has no lower bound.
    "clip_low",
    # ppo_clip: number of kept tokens whose loss is the bound -A C of the dual clip, because A < 0
    # and the bound is smaller than the clipped loss. 0 for other surrogates.
    "clip_dual",
    "entropy",  # sum m H, 0 without entropy
    "advantage",  # sum m A
    "advantage_sq",  # sum m A^2
    "ref_k1",  # sum m (p - ref), 0 without reference
    "ref_k3",  # sum m (exp(-x) - 1 + x), x = c(p - ref)
    # No metric of a run uses the sums and the maximum of lags. They are kept because without them
    # one variant of the fused loss spills registers on sm_80 (Triton 3.8).
    "lag",  # sum m lag
    "off_policy_tokens",  # sum m [lag > 0]
)
LAG_SUM_NAMES: tuple[str, ...] = ("lag_tokens", "lag_weight", "lag_weight_sq", "lag_log_ratio")
MAX_NAMES: tuple[str, ...] = (
    "log_ratio_max",  # max L over mask-1 tokens, -inf without any
    "log_ratio_neg_min",  # max -L
    "seq_log_weight_max",  # max_i sum_i m L
    "seq_log_weight_neg_min",  # max_i -sum_i m L
    "lag_max",
)


@dataclass(frozen=True, eq=False)
class LossMetrics:
    """Metric sums of a loss: float64 sums [len(SUM_NAMES)], sums by lag [4, NUM_LAG_BINS] and
    maxima [len(MAX_NAMES)].

    Rows of `lag_sums_LB` follow LAG_SUM_NAMES (sums of m, m w, m w^2, m L by lag bin min(lag,
    NUM_LAG_BINS - 1)). Over microbatches and ranks, sums are added and the larger maximum is taken.
    """

    sums_M: torch.Tensor
    lag_sums_LB: torch.Tensor
    maxima_E: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> LossMetrics:
        """Return metrics without any token, the neutral element of `merge`."""
        return cls(
            torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=device),
            torch.zeros(len(LAG_SUM_NAMES), NUM_LAG_BINS, dtype=torch.float64, device=device),
            torch.full((len(MAX_NAMES),), -math.inf, dtype=torch.float64, device=device),
        )

    def merge(self, other: LossMetrics) -> LossMetrics:
        """Return these metrics combined with those of another microbatch."""
        return LossMetrics(
            self.sums_M + other.sums_M,
            self.lag_sums_LB + other.lag_sums_LB,
            torch.maximum(self.maxima_E, other.maxima_E),
        )

    def all_reduce(self, group: torch.distributed.ProcessGroup) -> LossMetrics:
        """Return the metrics combined over all ranks of `group` (two collectives)."""
        flat = torch.cat([self.sums_M, self.lag_sums_LB.reshape(-1)])
        maxima_E = self.maxima_E.clone()
        torch.distributed.all_reduce(flat, group=group)
        torch.distributed.all_reduce(maxima_E, torch.distributed.ReduceOp.MAX, group=group)
        sums_M, lag_flat = flat.split([len(SUM_NAMES), flat.numel() - len(SUM_NAMES)])
        return LossMetrics(sums_M, lag_flat.view_as(self.lag_sums_LB), maxima_E)

    def sums(self) -> dict[str, float]:
        """Return sums and maxima by name (one copy to the host); `metrics.finalize` computes means
        from them."""
        names = SUM_NAMES + MAX_NAMES
        return dict(zip(names, torch.cat([self.sums_M, self.maxima_E]).tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Result of a loss: `loss_sum` [] is this call's share of the loss, and the gradients are those
    of `loss_sum`.

    `nonfinite` [] counts the values that are not finite among the streams' trained tokens.
    """

    loss_sum: torch.Tensor
    dlogp_T: torch.Tensor
    dentropy_T: torch.Tensor | None
    metrics: LossMetrics
    nonfinite: torch.Tensor

    @property
    def finite(self) -> torch.Tensor:
        """Whether the streams and the loss are finite, as a tensor [] on their device; reading it
        waits for the device."""
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
    """Return a scalar with value `loss_sum` whose backward pass gives the closed-form gradients to
    log-probs and entropy.

    For trainers whose log-probs are part of an autograd graph. Data-parallel ranks have shares of
    one sum, so their gradients are added, not averaged.
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

    This copies to the host once, however many tensors there are.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not present:
        return
    counts_N = nonfinite_counts(list(present.values()), mask_T)
    for name, bad in zip(present, counts_N.tolist(), strict=True):
        if bad:
            raise NonFiniteError(f"{name} has {bad} non-finite values among its trained tokens")


def nonfinite_counts(tensors: Sequence[torch.Tensor], mask_T: torch.Tensor) -> torch.Tensor:
    """Count the NaNs and infinities of each tensor where the mask is not 0, [N] on the device."""
    trained_T = mask_T != 0
    return torch.stack([(~torch.isfinite(tensor) & trained_T).sum() for tensor in tensors])
