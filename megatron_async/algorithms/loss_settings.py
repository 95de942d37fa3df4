"""Converts the `algorithm` settings of a run to the `LossConfig` that losses and kernels read.

Invariant: the meaning of each loss name is defined only here. Losses and kernels see only
`LossConfig`.
"""

from megatron_async_kernels.loss_types import LossConfig

from megatron_async.algorithms.correction import rejection_rules
from megatron_async.config.algorithm import AlgorithmConfig
from megatron_async.config.thresholds import parse_weight_threshold
from megatron_async.runtime.import_path import is_import_path


def loss_config(config: AlgorithmConfig) -> LossConfig:
    """Return the `LossConfig` of a run's `algorithm` settings.

    The loss `rapid` is `reinforce` with one importance weight for each whole response, bounded by
    `rapid.eta` or unbounded. `aipo` in its coefficient form is `reinforce` with token weights
    bounded by `loss.aipo_delta`. In bypass mode, `reinforce` uses the weights that
    `correction.rollout_is` sets, and the loss itself rejects tokens.
    """
    loss, correction = config.loss, config.correction
    surrogate, level = "own" if is_import_path(loss.name) else str(loss.name), "none"
    threshold: float | str | None = None
    if loss.name == "reinforce":
        level, threshold = loss.weight, loss.weight_threshold
        if correction.bypass_mode and correction.rollout_is is not None:
            level, threshold = correction.rollout_is, correction.rollout_is_threshold
    elif loss.name == "rapid":
        surrogate, level = "reinforce", "sequence"
        threshold = config.rapid.eta if config.rapid.clip_policy_weight else None
    elif loss.name == "aipo" and loss.aipo_form == "coefficient":
        surrogate, level, threshold = "reinforce", "token", loss.aipo_delta
    lower, upper = None, None
    if level != "none" and threshold is not None:
        lower, upper = parse_weight_threshold(threshold, "weight_threshold")
    return LossConfig(
        surrogate=surrogate,  # type: ignore[arg-type]
        ratio_to="rollout" if correction.bypass_mode or loss.name == "sft" else "old",
        aggregation=loss.aggregation,
        fixed_normalizer=loss.fixed_normalizer,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        aipo_delta=loss.aipo_delta,
        weight_level=level,  # type: ignore[arg-type]
        weight_upper=upper,
        weight_lower=lower,
        rejection=rejection_rules(correction) if correction.bypass_mode else (),
        kl_estimator=config.kl.loss_estimator if config.kl.loss_coef > 0 else "none",  # type: ignore[arg-type]
        kl_coef=config.kl.loss_coef,
        entropy_coef=config.entropy_coef,
        staleness_clip=config.rapid.eta,
    )
