"""Settings of advantages, rollout correction and losses, and the presets of the correction.

Invariants
- `correction.preset` supplies defaults for the other correction settings; explicit settings win.
  The presets have the arguments of verl 0.9.1.
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

    Decoupled mode (`bypass_mode: false`): pi_old is recomputed at the start of the update. Weights
    and rejection are computed once per batch from pi_old / pi_rollout. Bypass mode: pi_old :=
    pi_rollout, and both are computed from pi_theta / pi_rollout at each minibatch.
    """

    preset: CorrectionPreset | None = None
    """Named defaults of this section."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Level of the importance weights; none = no weights. In bypass mode it is the weight of loss
    `reinforce` (instead of loss.weight), and only a metric with other losses."""
    rollout_is_threshold: float | str = 2.0
    """Threshold of the importance weights: a number truncates larger weights; `lo_hi` sets weights
    outside the interval to 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Whether truncated weights are divided by their global mean."""
    rollout_rs: str | None = None
    """Rejection rules, comma-separated: token_k1/k2/k3, seq_sum_k1/k2/k3, seq_mean_k1/k2/k3,
    seq_max_k2/k3 (`sequence` = seq_sum_k1, `geometric` = seq_mean_k1). A token must pass all of
    them; none = no rejection."""
    rollout_rs_threshold: float | str | None = None
    """One threshold for all rejection rules, or one for each, comma-separated. For k1: `lo_hi`, or
    a number u for 1/u_u, as bounds of exp(k1) = pi_rollout / pi_train. For k2 and k3: an upper
    bound."""
    bypass_mode: bool = False
    """Whether pi_old is replaced by pi_rollout (bypass mode)."""
    loss_type: Literal["ppo_clip", "reinforce"] | None = None
    """In bypass mode, the loss that this correction is meant for; none = any loss."""

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
    """Advantage estimator. grpo: (R - group mean) / group std; dr_grpo: the same without std; rloo:
    leave-one-out mean; reinforce_pp: whitened over the batch; pg: R - batch mean; rapid:
    importance-weighted group baseline under the current policy; none: 1 (SFT)."""


class LossSettings(Settings):
    """The surrogate loss and its thresholds (docs/algorithms.md has every formula)."""

    name: str = Field(
        "ppo_clip",
        description=f"Loss: one of {', '.join(LOSSES)}, or your own function: package.module:name, "
        "or file.py:name beside the YAML file (`loss: NAME` is short for `loss: {name: NAME}`).",
    )
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own loss function."""
    aggregation: AggregationName = "token_mean"
    """Average of the loss over tokens and sequences."""
    fixed_normalizer: float = Field(1.0, gt=0)
    """Divisor of seq_mean_token_sum_norm, for example the longest response in tokens."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Distance below 1 at which the ratio is clipped."""
    clip_high: float = Field(0.2, ge=0)
    """Distance above 1 at which the ratio is clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of ppo_clip's ratio for negative advantages; none = no bound."""
    weight: Literal["none", "token", "sequence"] = "none"
    """Level of the detached ratio pi_theta / pi_old that weights `reinforce`."""
    weight_threshold: float | str | None = None
    """Threshold of the weights of `reinforce`: a number truncates larger weights; `lo_hi` is
    IcePop; none = no threshold."""
    aipo_delta: float = Field(8.0, gt=0)
    """Upper bound of the ratio in `aipo`."""
    aipo_form: Literal["objective", "coefficient"] = "objective"
    """Form of `aipo`. `objective`: a clipped token has no gradient. `coefficient`: the clipped
    ratio is a detached weight."""

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
    """Upper bound of a generation's weight."""
    clip_policy_weight: bool = True
    """Whether the weight is bounded in the gradient too, and not only in the baseline."""
    leave_one_out: bool = False
    """Whether the baseline uses only the other generations, and is divided by N - 1."""


class KLConfig(Settings):
    """KL divergence to a frozen reference policy."""

    reward_coef: float = Field(0.0, ge=0)
    """Factor of sum_t (log pi_old - log pi_ref) (k1), which is subtracted from the reward; 0 = no
    penalty."""
    loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss; 0 = no term."""
    loss_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term in the loss: k2 or k3, both importance-weighted. k1 is refused."""

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
    """Share of the length limit over which the punishment grows (0.2 in DAPO); 0 = no
    punishment."""
    penalty: float = Field(1.0, ge=0)
    """Reward subtracted at the length limit."""


class AlgorithmConfig(Settings):
    """Definition of the gradient: the defaults of a recipe, each of which may be set."""

    recipe: RecipeName = "copris"
    """Named set of defaults."""
    epochs: int = Field(1, ge=1)
    """Number of passes over a batch, each with schedule.updates_per_batch updates."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantages."""
    loss: LossSettings = LossSettings()
    """Surrogate loss."""
    correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Rollout correction."""
    rapid: RapidConfig = RapidConfig()
    """RAPID."""
    kl: KLConfig = KLConfig()
    """KL divergence to the reference policy."""
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
