"""Tests the settings of the algorithm: presets, recipes and refused combinations."""

import pytest

from megatron_async.algorithms.algorithm import build_algorithm
from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.config import build_config
from megatron_async.config.algorithm import (
    CORRECTION_PRESETS,
    AlgorithmConfig,
    RolloutCorrectionConfig,
)
from megatron_async.config.load import parse_override
from megatron_async.errors import UserError

# (rollout_is, threshold, rollout_rs, its threshold, bypass, loss type): verl 0.9.1's arguments.
PRESETS = {
    "decoupled_token_is": ("token", 2.0, None, None, False, None),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False, None),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, False, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", False, None),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", False, None),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", False, None),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", False, None),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, False, None),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, False, None),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, False, None),
    "bypass": (None, 2.0, None, None, True, None),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, True, "reinforce"),
    "bypass_pg_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": (
        "sequence",
        2.0,
        "seq_mean_k1",
        "0.999_1.001",
        True,
        "reinforce",
    ),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "disabled": (None, 2.0, None, None, False, None),
}


def test_correction_presets_have_the_arguments_of_verl() -> None:
    assert PRESETS.keys() == CORRECTION_PRESETS.keys()
    for name, expected in PRESETS.items():
        config = RolloutCorrectionConfig(preset=name)  # type: ignore[arg-type]
        assert expected == (
            config.rollout_is,
            config.rollout_is_threshold,
            config.rollout_rs,
            config.rollout_rs_threshold,
            config.bypass_mode,
            config.loss_type,
        ), name
        assert not config.rollout_is_batch_normalize


def test_explicit_correction_setting_overrides_its_preset() -> None:
    config = RolloutCorrectionConfig(preset="decoupled_seq_is", rollout_is_threshold=5.0)
    assert (config.rollout_is, config.rollout_is_threshold) == ("sequence", 5.0)


def test_correction_preset_replaces_the_recipes_correction() -> None:
    config = build_config(
        {"algorithm": {"recipe": "copris", "correction": {"preset": "decoupled_token_is"}}}
    )
    correction = config.algorithm.correction
    assert (correction.bypass_mode, correction.rollout_is) == (False, "token")


# recipe: (estimator, surrogate, ratio to, aggregation, weight, upper bound, preset, needs old)
RECIPES = {
    "copris": ("grpo", "ppo_clip", "rollout", "token_mean", "none", None, "copris", False),
    "pipeline_rl": (
        "dr_grpo",
        "reinforce",
        "rollout",
        "token_mean",
        "token",
        5.0,
        "pipeline",
        False,
    ),
    "prime_rl": ("dr_grpo", "aipo", "rollout", "token_mean", "none", None, "async", False),
    "rapid": (
        "rapid",
        "reinforce",
        "rollout",
        "seq_mean_token_sum",
        "sequence",
        2.0,
        "rapid",
        False,
    ),
    "grpo": ("grpo", "ppo_clip", "old", "seq_mean_token_mean", "none", None, "sync", True),
    "dapo": ("grpo", "ppo_clip", "old", "token_mean", "none", None, "sync", True),
    "pg": ("pg", "reinforce", "rollout", "token_mean", "none", None, "sync", False),
    "sft": ("none", "sft", "rollout", "token_mean", "none", None, "copris", False),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_have_the_methods_that_their_sources_describe(recipe: str) -> None:
    config = build_config({"algorithm": {"recipe": recipe}})
    algorithm = build_algorithm(config)
    loss = algorithm.loss_config
    assert RECIPES[recipe] == (
        config.algorithm.advantage.estimator,
        loss.surrogate,
        loss.ratio_to,
        loss.aggregation,
        loss.weight_level,
        loss.weight_upper,
        config.schedule.preset,
        algorithm.needs_old_logprobs,
    )
    assert algorithm.needs_ref_logprobs == (recipe == "grpo")
    assert algorithm.needs_minibatch_pass == (recipe == "rapid")
    assert loss.entropy_coef == 0.0 and loss.rejection == ()


def test_recipes_have_the_hyperparameters_of_their_sources() -> None:
    def of(recipe: str) -> AlgorithmConfig:
        return build_config({"algorithm": {"recipe": recipe}}).algorithm

    assert (of("dapo").loss.clip_low, of("dapo").loss.clip_high) == (0.2, 0.28)
    assert of("dapo").overlong.buffer_share == 0.2
    assert build_config({"algorithm": {"recipe": "dapo"}}).schedule.dynamic_sampling
    assert (of("grpo").kl.loss_coef, of("grpo").kl.loss_estimator) == (0.04, "k3")
    assert (of("prime_rl").loss.aipo_delta, of("prime_rl").loss.aipo_form) == (8.0, "objective")
    assert (of("rapid").rapid.eta, of("rapid").rapid.clip_policy_weight) == (2.0, True)
    rapid = build_config({"algorithm": {"recipe": "rapid"}})
    assert (rapid.schedule.updates_per_batch, rapid.schedule.group_size) == (8, 4)
    assert (rapid.sampling.max_new_tokens, rapid.optimizer.lr) == (2048, 1e-6)
    assert build_config({"algorithm": {"recipe": "prime_rl"}}).schedule.max_async_level == 2
    assert build_config({"algorithm": {"recipe": "copris"}}).schedule.concurrency == 1024


def algorithm(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def test_rapid_weight_has_no_bound_when_clip_policy_weight_is_false() -> None:
    config = algorithm(
        loss={"name": "rapid"},
        advantage={"estimator": "rapid"},
        rapid={"clip_policy_weight": False, "eta": 3.0},
        correction={"preset": "bypass"},
    )
    loss = loss_config(config)
    assert (loss.weight_level, loss.weight_upper, loss.staleness_clip) == ("sequence", None, 3.0)


def test_aipo_coefficient_form_is_reinforce_with_a_bounded_weight() -> None:
    loss = loss_config(algorithm(loss={"name": "aipo", "aipo_form": "coefficient"}))
    assert (loss.surrogate, loss.weight_level, loss.weight_upper) == ("reinforce", "token", 8.0)


def test_bypass_preset_sets_reinforce_weights_and_rejection_rules_of_the_loss() -> None:
    config = algorithm(
        loss={"name": "reinforce", "weight": "token", "weight_threshold": 5.0},
        correction={"preset": "bypass_pg_geo_rs_seq_tis"},
    )
    loss = loss_config(config)
    assert (loss.weight_level, loss.weight_upper, loss.weight_lower) == ("sequence", 2.0, None)
    assert [(rule.level, rule.divergence) for rule in loss.rejection] == [("seq_mean", "k1")]
    assert loss_config(algorithm(correction={"preset": "decoupled_geo_rs"})).rejection == ()
    icepop = loss_config(
        algorithm(loss={"name": "reinforce"}, correction={"preset": "bypass_pg_token_icepop"})
    )
    assert (icepop.weight_lower, icepop.weight_upper) == (0.5, 5.0)


def test_loss_ratio_is_to_recomputed_log_probs_when_correction_is_disabled() -> None:
    config = build_config(
        {"algorithm": {"recipe": "pipeline_rl", "correction": {"preset": "disabled"}}}
    )
    built = build_algorithm(config)
    assert built.needs_old_logprobs and built.loss_config.ratio_to == "old"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": {"loss_estimator": "k1"}}, r"algorithm\.kl\.loss_estimator.* 'k1'.*k2 or k3"),
        ({"correction": {"preset": "bypass_pg_is"}}, "bypass_pg_is.*'reinforce'.*'ppo_clip'"),
        ({"correction": {"rollout_rs": "token_k1"}}, "is 'token_k1'; set rollout_rs_threshold"),
        ({"correction": {"rollout_is_threshold": "2.0_1.0"}}, "rollout_is_threshold.*'2.0_1.0'"),
        ({"correction": {"rollout_rs": "x", "rollout_rs_threshold": 2}}, "rollout_rs option 'x'"),
        ({"loss": {"weight_threshold": "a"}}, "weight_threshold.*'a'"),
        ({"loss": {"name": "sft"}}, "'sft' requires 'none'"),
        ({"advantage": {"estimator": "none"}}, "'sft' requires 'none'"),
        (
            {
                "loss": {"name": "sft"},
                "advantage": {"estimator": "none"},
                "correction": {"preset": "decoupled_k3_rs"},
            },
            "rollout_rs 'seq_mean_k3' has no meaning",
        ),
        (
            {"correction": {"preset": "bypass", "rollout_is_batch_normalize": True}},
            "rollout_is_batch_normalize true in bypass mode",
        ),
        ({"loss": {"clip_low": 1.5}}, r"algorithm\.loss\.clip_low is 1\.5"),
        ({"correction": {"preset": "magic"}}, r"algorithm\.correction\.preset is 'magic'"),
    ],
)
def test_config_refuses_algorithm_settings_without_meaning(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_config({"algorithm": {"recipe": "copris", **settings}})


def test_parse_override_keeps_a_pair_of_bounds_as_text() -> None:
    assert parse_override('a.b="0.5_2"') == {"a": {"b": "0.5_2"}}
    assert parse_override("a.b=0.5_2.0") == {"a": {"b": "0.5_2.0"}}
