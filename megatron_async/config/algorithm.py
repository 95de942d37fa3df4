"""Settings of advantages, rollout correction and losses, and the correction presets.

Invariants
- `correction.preset` supplies defaults for the other correction settings; what is set beside it
  wins. The arguments of the presets are those of verl 0.9.1.
- A combination that has no meaning (k1 as a loss term, a correction preset for another loss) is
  refused with a sentence; nothing is silently replaced.
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

# What a preset sets; all other correction settings keep their defaults (nothing corrected).
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
    """Correction of the gap between the rollout policy and the trained one.

    Decoupled mode (`bypass_mode: false`): pi_old is recomputed at the start of the update, weights
    and rejection come once per batch from pi_old / pi_rollout. Bypass mode: pi_old := pi_rollout,
    both come from pi_theta / pi_rollout at each minibatch.
    """

    preset: CorrectionPreset | None = None
    """Named defaults of this section."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights; none = no weights. In bypass mode it is the weight of loss
    `reinforce` (in place of loss.weight) and only a metric of others."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates above; `lo_hi` sets weights outside to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide truncated weights by their global mean."""
    rollout_rs: str | None = None
    """Rejection: comma-separated token_k1/k2/k3, seq_sum_k1/k2/k3, seq_mean_k1/k2/k3, seq_max_k2/k3
    (`sequence` = seq_sum_k1, `geometric` = seq_mean_k1); all must pass."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for all options or one each, comma-separated. k1: `lo_hi`, or a number u for
    1/u_u, bounds of exp(k1) = pi_rollout / pi_train; k2, k3: an upper bound."""
    bypass_mode: bool = False
    """pi_old := pi_rollout."""
    loss_type: Literal["ppo_clip", "reinforce"] | None = None
    """Bypass mode: the loss this correction is meant for; none = any."""

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
                raise ValueError(f"rollout_rs {self.rollout_rs!r} needs rollout_rs_threshold")
            parse_rejection(self.rollout_rs, self.rollout_rs_threshold)


class AdvantageConfig(Settings):
    """Settings of the step from rewards to advantages."""

    estimator: EstimatorName = "grpo"
    """grpo: (R - group mean) / group std; dr_grpo: without std; rloo: leave-one-out mean;
    reinforce_pp: whitened over the batch; pg: R - batch mean; rapid: importance-weighted group
    baseline under the current policy; none: 1 (SFT)."""


class LossSettings(Settings):
    """The surrogate loss and its thresholds (docs/algorithms.md has every formula)."""

    name: str = Field(
        "ppo_clip",
        description=f"One of {', '.join(LOSSES)}, or a function of your own: package.module:name, "
        "or file.py:name beside the YAML file (`loss: NAME` stands for `loss: {name: NAME}`).",
    )
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a function of your own."""
    aggregation: AggregationName = "token_mean"
    """How tokens are averaged."""
    fixed_normalizer: float = Field(1.0, gt=0)
    """Divisor of seq_mean_token_sum_norm, e.g. the longest response."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Ratio clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Ratio clipped above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """ppo_clip: bound of the ratio for negative advantages; none = off."""
    weight: Literal["none", "token", "sequence"] = "none"
    """reinforce: level of the detached ratio pi_theta / pi_old."""
    weight_threshold: float | str | None = None
    """reinforce: a number truncates above; `lo_hi` is IcePop; none = neither."""
    aipo_delta: float = Field(8.0, gt=0)
    """aipo: upper bound of the ratio."""
    aipo_form: Literal["objective", "coefficient"] = "objective"
    """`objective`: a clipped token has no gradient; `coefficient`: the clipped ratio is a detached
    weight."""

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LOSSES and not is_import_path(value):
            raise ValueError(
                f"is {value!r}; it must be one of {', '.join(LOSSES)}, or the import path of a "
                "function of your own (package.module:name or file.py:name)"
            )
        return value

    def check(self) -> None:
        if self.weight_threshold is not None:
            parse_weight_threshold(self.weight_threshold, "weight_threshold")
        if self.arguments and not is_import_path(self.name):
            raise ValueError(
                "loss.arguments are those of a function of your own, but loss.name is "
                f"{self.name!r}"
            )


class RapidConfig(Settings):
    """RAPID's importance-weighted group policy gradient."""

    eta: float = Field(2.0, gt=0)
    """Upper bound of a generation's weight."""
    clip_policy_weight: bool = True
    """Bound the weight in the gradient too, not only in the baseline."""
    leave_one_out: bool = False
    """Baseline over the other generations, divided by N - 1."""


class KLConfig(Settings):
    """Distance to a frozen reference policy."""

    reward_coef: float = Field(0.0, ge=0)
    """Reward minus this times sum_t (log pi_old - log pi_ref) (k1)."""
    loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss; 0 = none."""
    loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k2 or k3, both importance-weighted; k1 is refused."""

    @field_validator("loss_estimator")
    @classmethod
    def _no_k1(cls, value: str) -> str:
        if value == "k1":
            raise ValueError(
                "is 'k1', whose gradient is zero in expectation; use k2 or k3, or put k1 into the "
                "reward with kl.reward_coef"
            )
        return value


class OverlongConfig(Settings):
    """DAPO's soft punishment of responses near the length limit."""

    buffer_share: float = Field(0.0, ge=0, le=1)
    """Share of the limit over which it grows (DAPO 0.2); 0 = off."""
    penalty: float = Field(1.0, ge=0)
    """Reward taken away at the limit."""


class AlgorithmConfig(Settings):
    """Definition of the gradient: a recipe's defaults, each of which may be set by hand."""

    recipe: RecipeName = "copris"
    """Named set of defaults."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch, each of schedule.updates_per_batch updates."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    loss: LossSettings = LossSettings()
    """Surrogate loss."""
    correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Rollout correction."""
    rapid: RapidConfig = RapidConfig()
    """RAPID."""
    kl: KLConfig = KLConfig()
    """KL to the reference policy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    overlong: OverlongConfig = OverlongConfig()
    """Length shaping."""

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
                f"{self.advantage.estimator!r} do not fit: 'sft' and 'none' go together"
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
