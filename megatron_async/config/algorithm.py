"""Settings of advantages, rollout correction and losses, and the presets of the correction.

Invariants
- `correction.preset` supplies defaults for the other correction settings; explicit settings win.
  Each preset sets the same values as the preset of that name in verl 0.9.1.
- A combination without meaning (k1 as a loss term, a correction preset for another loss) is refused
  with a message. Nothing is replaced silently.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from megatron_async.config.base import Settings
from megatron_async.config.thresholds import parse_rejection, parse_weight_threshold
from megatron_async.runtime.import_path import is_import_path

RecipeName = Literal["copris", "pipeline_rl", "prime_rl", "rapid", "grpo", "dapo", "pg", "sft"]
LOSSES: Final = ("ppo_clip", "reinforce", "aipo", "rapid", "gspo", "cispo", "sft")
EstimatorName = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "pg", "rapid", "none"]
AggregationName = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
]

_SEQ_IS: Final = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_IS: Final = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP: Final = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO_RS: Final = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS: Final = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_SEQ_RS: Final = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_CLIP: Final = {"bypass_mode": True, "loss_type": "ppo_clip"}
_PG: Final = {"bypass_mode": True, "loss_type": "reinforce"}

# Settings of each preset. All other correction settings keep their defaults (no correction).
CORRECTION_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQ_IS,
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_seq_is_rs": {**_SEQ_IS, **_SEQ_RS},
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": {**_SEQ_IS, **_GEO_RS},
    "decoupled_geo_rs_token_tis": {**_TOKEN_IS, **_GEO_RS},
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": {**_SEQ_IS, **_K3_RS},
    "decoupled_k3_rs_token_tis": {**_TOKEN_IS, **_K3_RS},
    "bypass": {"bypass_mode": True},
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": {**_CLIP, **_GEO_RS},
    "bypass_ppo_clip_k3_rs": {**_CLIP, **_K3_RS},
    "bypass_pg_is": {**_PG, **_SEQ_IS},
    "bypass_pg_token_icepop": {**_PG, **_TOKEN_ICEPOP},
    "bypass_pg_rs": {**_PG, **_GEO_RS},
    "bypass_pg_geo_rs": {**_PG, **_GEO_RS},
    "bypass_pg_geo_rs_seq_tis": {**_PG, **_SEQ_IS, **_GEO_RS},
    "bypass_pg_geo_rs_token_tis": {**_PG, **_TOKEN_IS, **_GEO_RS},
    "disabled": {},
}
CorrectionPreset = Literal[*CORRECTION_PRESETS]  # type: ignore[valid-type]


class RolloutCorrectionConfig(Settings):
    """Correction of the gap between the rollout policy and the trained policy.

    pi_rollout is the policy that generated a token, and pi_theta the policy in training. pi_old is
    the denominator of the loss's ratio pi_theta / pi_old.

    In decoupled mode (`bypass_mode: false`), pi_old is the trainer's policy at the start of a step,
    whose log-probs the trainer computes then. Importance weights and rejection follow from pi_old /
    pi_rollout, once per batch. In bypass mode, pi_rollout replaces pi_old. Importance weights and
    rejection follow from pi_theta / pi_rollout, at each minibatch.
    """

    preset: CorrectionPreset | None = None
    """Named set of defaults for the other settings of this section; none = the defaults shown here,
    which correct nothing."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Whether there is one importance weight per token or one per sequence; none = no weights. In
    bypass mode, loss `reinforce` is multiplied by these weights instead of those of loss.weight,
    and for any other loss the weights are only reported as metrics."""
    rollout_is_threshold: float | str = 2.0
    """Threshold of the importance weights: a number truncates larger weights; `lo_hi` sets weights
    outside the interval to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether importance weights are divided by their mean over all ranks, after truncation. The
    mean is over the batch, or in bypass mode (only with loss `reinforce`) over the minibatch."""
    rollout_rs: str | None = None
    """Rejection rules, comma-separated. A rule compares a divergence of the trained policy from the
    rollout policy (estimator k1, k2 or k3) with a threshold, for each token, or as its sum, mean or
    maximum over a sequence: token_k1/k2/k3, seq_sum_k1/k2/k3, seq_mean_k1/k2/k3, seq_max_k2/k3.
    `sequence` is short for seq_sum_k1, `geometric` for seq_mean_k1. A token must pass all rules to
    be trained; none = no rejection."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for all rejection rules, or one for each, comma-separated. The threshold of a
    k2 or k3 rule is an upper bound. The threshold of a k1 rule bounds exp(k1) = pi_rollout /
    pi_train: `lo_hi` is a lower and an upper bound, and a single number u is the bounds 1 / u and
    u."""
    bypass_mode: bool = False
    """Whether pi_old is replaced by pi_rollout (bypass mode)."""
    loss_type: Literal["ppo_clip", "reinforce"] | None = None
    """In bypass mode, the only loss that this correction accepts; another `loss.name` is refused.
    none = any loss."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        preset = data.get("preset") if isinstance(data, dict) else None
        if isinstance(preset, str) and preset in CORRECTION_PRESETS:
            return {**CORRECTION_PRESETS[preset], **data}
        return data

    def check(self) -> None:
        parse_weight_threshold(self.rollout_is_threshold, "rollout_is_threshold")
        if self.rollout_rs is not None:
            if self.rollout_rs_threshold is None:
                raise ValueError(f"rollout_rs is {self.rollout_rs!r}; set rollout_rs_threshold too")
            parse_rejection(self.rollout_rs, self.rollout_rs_threshold)


class AdvantageConfig(Settings):
    """Computation of advantages from rewards."""

    estimator: EstimatorName = "grpo"
    """Estimator of the advantage from the reward R. grpo: (R - group mean) / group std. dr_grpo: R
    minus the group mean. rloo: R minus the mean of the other members of the group. reinforce_pp: (R
    - mean) / std over all trained tokens of the batch. pg: R minus the batch mean. rapid: R minus
    the mean of the group's rewards, each weighted by the generation's importance weight under the
    current policy. none: 1 for every token (SFT)."""


class LossSettings(Settings):
    """The surrogate loss and its thresholds (docs/algorithms.md has every formula)."""

    name: str = Field(
        "ppo_clip",
        description=f"Loss: one of {', '.join(LOSSES)}, or your own function: package.module:name, "
        "or file.py:name next to the YAML file (`loss: NAME` is short for `loss: {name: NAME}`).",
    )
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own loss function, if `name` is one."""
    aggregation: AggregationName = "token_mean"
    """How the losses of tokens become one number: their mean (`token_mean`), or the mean over
    sequences of each sequence's mean (`seq_mean_token_mean`) or sum (`seq_mean_token_sum`), or of
    the sum divided by `fixed_normalizer` (`seq_mean_token_sum_norm`)."""
    fixed_normalizer: float = Field(1.0, gt=0)
    """Divisor of seq_mean_token_sum_norm, for example the longest response in tokens."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Lower end of the clip range of a clipped loss: its ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper end of the clip range of a clipped loss: its ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the ratio of loss `ppo_clip` for tokens with a negative advantage; none = no
    bound."""
    weight: Literal["none", "token", "sequence"] = "none"
    """Whether loss `reinforce` is multiplied by the ratio pi_theta / pi_old of each token or of the
    whole sequence (without its gradient); none = not multiplied."""
    weight_threshold: float | str | None = None
    """Threshold of the ratios of setting `weight`: a number truncates larger ratios; `lo_hi` sets
    ratios outside the interval to 0 (IcePop); none = no threshold."""
    aipo_delta: float = Field(8.0, gt=0)
    """Upper bound delta of the ratio in loss `aipo`, -min(ratio, delta) * advantage."""
    aipo_form: Literal["objective", "coefficient"] = "objective"
    """Form of loss `aipo`. `objective`: the ratio is differentiated, so a token whose ratio is
    above `aipo_delta` has no gradient. `coefficient`: the bounded ratio is a constant factor of the
    gradient of the log-prob, so such a token keeps a gradient."""

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LOSSES and not is_import_path(value):
            raise ValueError(
                f"is {value!r}; it must be one of {', '.join(LOSSES)}, or the import path of "
                "your own function (package.module:name or file.py:name)"
            )
        return value

    def check(self) -> None:
        if self.weight_threshold is not None:
            parse_weight_threshold(self.weight_threshold, "weight_threshold")
        if self.arguments and not is_import_path(self.name):
            raise ValueError(
                f"loss.arguments is set and loss.name is {self.name!r}; only your own loss "
                "function has arguments"
            )


class RapidConfig(Settings):
    """RAPID's importance-weighted group policy gradient."""

    eta: float = Field(2.0, gt=0)
    """Upper bound of the importance weight of a generation."""
    clip_policy_weight: bool = True
    """Whether `eta` bounds the importance weight in the gradient too, and not only in the
    baseline."""
    leave_one_out: bool = False
    """Whether the baseline of a generation is the weighted sum of the rewards of the other N - 1
    generations of its group, divided by N - 1, instead of the sum over all N, divided by N."""


class KLConfig(Settings):
    """KL divergence to a frozen reference policy."""

    reward_coef: float = Field(0.0, ge=0)
    """Factor of the KL penalty sum_t (log pi_old - log pi_ref) over the tokens t of a response
    (estimator k1). The product is subtracted from the reward; 0 = no penalty."""
    loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss; 0 = no term."""
    loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term in the loss: k2 or k3, both importance-weighted. k1 is refused,
    because its gradient is zero in expectation."""

    @field_validator("loss_estimator")
    @classmethod
    def _no_k1(cls, value: str) -> str:
        if value == "k1":
            raise ValueError(
                "is 'k1'; its gradient is zero in expectation. Use k2 or k3, or subtract k1 from "
                "the reward with kl.reward_coef."
            )
        return value


class OverlongConfig(Settings):
    """DAPO's soft punishment of responses near the length limit."""

    buffer_share: float = Field(0.0, ge=0, le=1)
    """Last share of sampling.max_new_tokens, over which the punishment grows linearly from 0 to
    `penalty` (0.2 in DAPO); 0 = no punishment."""
    penalty: float = Field(1.0, ge=0)
    """Amount subtracted from the reward of a response that reaches sampling.max_new_tokens."""


class AlgorithmConfig(Settings):
    """Definition of the gradient. A recipe supplies the defaults, each of which you can
    override."""

    recipe: RecipeName = "copris"
    """Published method that supplies the defaults of this and other sections
    (docs/algorithms.md)."""
    epochs: int = Field(1, ge=1)
    """Number of passes over a batch, each with schedule.updates_per_batch updates."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Settings of advantages."""
    loss: LossSettings = LossSettings()
    """Settings of the surrogate loss."""
    correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Settings of the rollout correction."""
    rapid: RapidConfig = RapidConfig()
    """Settings of loss and advantage estimator `rapid`."""
    kl: KLConfig = KLConfig()
    """KL divergence to the reference policy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    overlong: OverlongConfig = OverlongConfig()
    """Settings of the punishment of long responses."""

    def check(self) -> None:
        name, correction = self.loss.name, self.correction
        if correction.bypass_mode and correction.loss_type not in (None, name):
            raise ValueError(
                f"algorithm.correction (preset {correction.preset}) is for loss "
                f"{correction.loss_type!r}, but algorithm.loss.name is {name!r}"
            )
        if (name == "sft") != (self.advantage.estimator == "none"):
            raise ValueError(
                f"algorithm.loss.name {name!r} and algorithm.advantage.estimator "
                f"{self.advantage.estimator!r} do not fit together; 'sft' requires 'none'"
            )
        if name == "sft" and correction.rollout_rs is not None:
            raise ValueError(
                f"algorithm.correction.rollout_rs {correction.rollout_rs!r} has no meaning with "
                "algorithm.loss.name 'sft'"
            )
        normalizes = correction.rollout_is_batch_normalize
        if normalizes and correction.bypass_mode and name != "reinforce":
            raise ValueError(
                "algorithm.correction.rollout_is_batch_normalize true in bypass mode is a setting "
                f"of loss 'reinforce', but algorithm.loss.name is {name!r}"
            )
