"""Tests the interface between algorithms and the trainer: from a batch to gradients, for every
recipe and every split into microbatches."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_async_kernels.loss_types import LossMetrics, NonFiniteError

from megatron_async.algorithms.algorithm import Algorithm, build_algorithm
from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.algorithms.metrics import finalize
from megatron_async.config import build_config
from megatron_async.config.recipes import RECIPES
from tests.algorithms import oracle
from tests.algorithms.batches import current_logprobs, device_batch, oracle_rows
from tests.algorithms.cases import assert_close


def algorithm_of(recipe: str, **algorithm: Any) -> Algorithm:
    config = build_config(
        {
            "algorithm": {"recipe": recipe, **algorithm},
            "schedule": {"groups_per_batch": 64},
            "sampling": {"max_new_tokens": 6},
        }
    )
    return build_algorithm(config)


REJECTION = {"preset": "disabled", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.05}
# Together, these variants contain every computation over more than one sequence.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{recipe: (recipe, {}) for recipe in RECIPES},
    "decoupled": (
        "copris",
        {
            "correction": {
                "preset": "decoupled_seq_is_rs",
                "rollout_is_batch_normalize": True,
                "rollout_rs": "token_k3,seq_mean_k1",
                "rollout_rs_threshold": "0.9,0.6_1.4",
            }
        },
    ),
    "bypass_normalized": (
        "pipeline_rl",
        {
            "advantage": {"estimator": "reinforce_pp"},
            "correction": {
                "preset": "bypass_pg_geo_rs_seq_tis",
                "rollout_is_batch_normalize": True,
                "rollout_rs_threshold": "0.5_2.0",
            },
        },
    ),
    "token_normalized": (
        "pipeline_rl",
        {
            "correction": {
                "preset": "bypass_pg_token_icepop",
                "rollout_is_batch_normalize": True,
            }
        },
    ),
    "rapid_loo": (
        "rapid",
        {"rapid": {"leave_one_out": True}, "kl": {"reward_coef": 0.1}},
    ),
    "rapid_decoupled": ("rapid", {"rapid": {"eta": 1.5}, "correction": {"preset": "disabled"}}),
    "rapid_rejected": (
        "rapid",
        {"rapid": {"eta": 1e9}, "kl": {"reward_coef": 0.1}, "correction": REJECTION},
    ),
    "whitened": ("copris", {"advantage": {"estimator": "reinforce_pp"}, "correction": REJECTION}),
    "shaped": (
        "copris",
        {
            "advantage": {"estimator": "pg"},
            "kl": {"reward_coef": 0.5},
            "overlong": {"buffer_share": 0.5, "penalty": 2.0},
        },
    ),
    "gspo": (
        "grpo",
        {
            "loss": {"name": "gspo", "clip_low": 0.01},
            "advantage": {"estimator": "rloo"},
            "kl": {"reward_coef": 0.05, "loss_coef": 0.01, "loss_estimator": "k2"},
        },
    ),
}


def train_step(
    algorithm: Algorithm,
    batch: DeviceBatch,
    logprobs_T: torch.Tensor,
    microbatches: list[list[int]],
) -> tuple[np.ndarray, dict[str, float], DeviceBatch]:
    """Compute one update; return the gradient of every token [T], all metrics and the prepared
    batch."""
    batch, metrics = algorithm.prepare(batch)
    batch, denominators = algorithm.prepare_minibatch(batch, logprobs_T)
    gradient_T, total = np.zeros(batch.num_tokens), LossMetrics.empty()
    cu_S1 = batch.cu_seqlens_S1.tolist()
    for microbatch in microbatches:
        index_T = np.concatenate([np.arange(cu_S1[i], cu_S1[i + 1]) for i in microbatch])
        inputs = algorithm.inputs(batch.select(torch.tensor(microbatch)), logprobs_T[index_T])
        output = algorithm.loss(inputs, denominators)
        gradient_T[index_T] = output.dlogp_T.numpy()
        total = total.merge(output.metrics)
    metrics = metrics | finalize(total) | algorithm.correction_metrics(batch, logprobs_T)
    return gradient_T, metrics, batch


def single_microbatch(batch: DeviceBatch) -> list[list[int]]:
    return [list(range(len(batch.rewards_S)))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_and_metrics_do_not_depend_on_the_split_into_microbatches(variant: str) -> None:
    recipe, settings = VARIANTS[variant]
    algorithm, batch = algorithm_of(recipe, **settings), device_batch()
    logprobs_T = current_logprobs(batch)
    expected_T, expected, _ = train_step(algorithm, batch, logprobs_T, single_microbatch(batch))
    assert np.abs(expected_T).sum() > 0.01, (
        "the gradient must not be zero, or the test shows nothing"
    )
    for microbatches in ([[i] for i in range(9)], [[8, 0, 3], [1], [7, 2, 4, 5, 6]]):
        gradient_T, metrics, _ = train_step(algorithm, batch, logprobs_T, microbatches)
        np.testing.assert_allclose(gradient_T, expected_T, rtol=1e-6, atol=1e-9)
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            assert_close(value, expected[name], name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_of_a_prepared_batch_equals_the_oracle(variant: str) -> None:
    recipe, settings = VARIANTS[variant]
    algorithm, batch = algorithm_of(recipe, **settings), device_batch(seed=3)
    logprobs_T = current_logprobs(batch)
    gradient_T, _, prepared = train_step(algorithm, batch, logprobs_T, single_microbatch(batch))
    rows = oracle_rows(prepared, logprobs_T)
    if variant == "sft":
        rows = [[{**token, "rollout": token["p"]} for token in row] for row in rows]
    tokens, sequences = sum(map(len, rows)), sum(1 for row in rows if row)
    _, denominators = algorithm.prepare_minibatch(prepared, logprobs_T)
    assert (denominators.tokens, denominators.sequences) == (tokens, sequences)
    expected = oracle.loss(rows, algorithm.loss_config, tokens, sequences, denominators.weight_mean)
    flat = [slope for row in expected.dlogp for slope in row]
    np.testing.assert_allclose(gradient_T[prepared.loss_mask_T != 0], flat, rtol=1e-6, atol=1e-9)


def response_logs(batch: DeviceBatch, a_T: torch.Tensor, b_T: torch.Tensor) -> list[float]:
    return [
        float(((a_T - b_T) * batch.loss_mask_T)[low:high].sum())
        for low, high in zip(batch.cu_seqlens_S1[:-1], batch.cu_seqlens_S1[1:], strict=True)
    ]


def sequence_advantages(batch: DeviceBatch) -> list[float]:
    """Return the advantage of each sequence, read from its first token."""
    return [float(batch.advantages_T[i]) for i in batch.cu_seqlens_S1[:-1]]  # type: ignore[index]


def shaped_rewards(algorithm: Algorithm, batch: DeviceBatch, anchor_T: torch.Tensor) -> list[float]:
    """Return the rewards minus the KL penalty of each sequence's trained tokens and the penalty for
    overlong responses."""
    kl, overlong = algorithm.config.kl, algorithm.config.overlong
    rewards = batch.rewards_S.tolist()
    if kl.reward_coef:
        assert batch.ref_logprobs_T is not None
        distances = response_logs(batch, anchor_T, batch.ref_logprobs_T)
        rewards = [r - kl.reward_coef * d for r, d in zip(rewards, distances, strict=True)]
    if overlong.buffer_share:
        lengths = (batch.cu_seqlens_S1.diff() - batch.prompt_lengths_S).tolist()
        buffer = 6 * overlong.buffer_share
        shares = [min(max((n - 6 + buffer) / buffer, 0.0), 1.0) for n in lengths]
        rewards = [r - overlong.penalty * s for r, s in zip(rewards, shares, strict=True)]
    return rewards


@pytest.mark.parametrize("variant", VARIANTS)
def test_prepared_batch_equals_the_formulas(variant: str) -> None:
    """Compared are the mask and the weights of decoupled correction, the rewards, and the
    advantages under the current policy."""
    recipe, settings = VARIANTS[variant]
    algorithm, batch = algorithm_of(recipe, **settings), device_batch(seed=6)
    correction, estimator = algorithm.config.correction, algorithm.config.advantage.estimator
    anchor_T, logprobs_T = batch.rollout_logprobs_T, current_logprobs(batch)
    prepared, metrics = algorithm.prepare(batch)
    prepared, denominators = algorithm.prepare_minibatch(prepared, logprobs_T)
    if algorithm.needs_old_logprobs:
        assert batch.old_logprobs_T is not None
        anchor_T = batch.old_logprobs_T
        rows = oracle_rows(replace(batch, advantages_T=batch.loss_mask_T), batch.loss_mask_T)
        rejection = correction.rollout_rs or ""
        expected = oracle.correction(
            rows,
            level=correction.rollout_is,
            threshold=correction.rollout_is_threshold,
            normalize=correction.rollout_is_batch_normalize,
            options=[option for option in rejection.split(",") if option],
            thresholds=str(correction.rollout_rs_threshold).split(",") if rejection else [],
        )
        trained_T = batch.loss_mask_T != 0
        keep = [k for row in expected.keep for k in row]
        assert prepared.loss_mask_T[trained_T].tolist() == keep
        assert denominators.tokens == sum(keep)
        assert not rejection or 0 < sum(keep) < len(keep)
        weights_T = prepared.is_weights_T
        assert (weights_T is None) == (expected.weights is None)
        if weights_T is not None:
            weights = [w for row in expected.weights or [] for w in row]
            np.testing.assert_allclose(weights_T[trained_T], weights)
        for name, value in expected.metrics.items():
            assert_close(metrics[name], value, name)
        assert algorithm.correction_metrics(prepared, logprobs_T) == {}
    rewards = shaped_rewards(algorithm, batch, anchor_T)
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    if estimator != "none":
        advantages = oracle.advantages(
            estimator,
            rewards,
            batch.group_ids_S.tolist(),
            tokens=[int(count) for count in prepared.trained_S],
            log_weights=response_logs(prepared, logprobs_T, anchor_T),
            eta=algorithm.config.rapid.eta,
            leave_one_out=algorithm.config.rapid.leave_one_out,
        )
        assert sequence_advantages(prepared) == pytest.approx(advantages)


def test_ppo_clip_is_not_multiplied_by_weights_in_bypass_mode() -> None:
    batch = device_batch()
    plain, _ = algorithm_of("copris").prepare(batch)
    config = {"preset": "bypass_ppo_clip", "rollout_is": "token"}
    weighted = algorithm_of("copris", correction=config)
    prepared, _ = weighted.prepare(batch)
    assert prepared.is_weights_T is None
    logprobs_T = current_logprobs(batch)
    _, denominators = weighted.prepare_minibatch(prepared)
    gradients = [
        algorithm.loss(algorithm.inputs(batch_, logprobs_T), denominators).dlogp_T
        for algorithm, batch_ in ((weighted, prepared), (algorithm_of("copris"), plain))
    ]
    assert torch.equal(*gradients)
    metrics = weighted.correction_metrics(prepared, logprobs_T)
    assert "rollout_corr/rollout_is_mean" in metrics, (
        "the weights must be reported although they are not used"
    )


@pytest.mark.parametrize("preset", ["bypass_pg_is", "bypass_pg_token_icepop"])
def test_batch_normalized_reinforce_weights_are_divided_by_their_mean(preset: str) -> None:
    correction = {"preset": preset, "rollout_is_batch_normalize": True}
    algorithm = algorithm_of("pg", correction=correction)
    batch, _ = algorithm.prepare(device_batch())
    logprobs_T = current_logprobs(batch)
    batch, denominators = algorithm.prepare_minibatch(batch, logprobs_T)
    metrics = algorithm.correction_metrics(batch, logprobs_T)
    factor = metrics["rollout_corr/rollout_is_batch_norm_factor"]
    assert denominators.weight_mean == pytest.approx(factor) and factor != 1.0


def test_correction_metrics_report_the_weights_of_the_loss() -> None:
    batch = device_batch()
    logprobs_T = current_logprobs(batch)
    for recipe, largest in (("pipeline_rl", 5.0), ("prime_rl", 8.0)):
        algorithm = algorithm_of(recipe, loss={"weight_threshold": 5.0})
        metrics = algorithm.correction_metrics(algorithm.prepare(batch)[0], logprobs_T * 0 + 3.0)
        assert metrics["rollout_corr/rollout_is_max"] == largest
    icepop = algorithm_of("pipeline_rl", loss={"weight_threshold": "0.9_1.1"})
    metrics = icepop.correction_metrics(icepop.prepare(batch)[0], logprobs_T)
    assert 0 < metrics["rollout_corr/rollout_is_oob_ratio"] <= 1
    assert "rollout_corr/kl" in algorithm_of("pg").correction_metrics(batch, logprobs_T)
    untrained = replace(batch, loss_mask_T=0 * batch.loss_mask_T)
    assert icepop.correction_metrics(untrained, logprobs_T) == {}


def test_prepare_reports_the_fraction_of_uninformative_groups() -> None:
    batch = device_batch()
    rewards_S = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
    metrics = algorithm_of("copris").prepare(replace(batch, rewards_S=rewards_S))[1]
    assert metrics["reward/uninformative_groups"] == pytest.approx(2 / 3)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/std"] == pytest.approx(rewards_S.numpy().std())


@pytest.mark.parametrize(
    ("field", "name", "recipe"),
    [
        ("rewards_S", "rewards", "copris"),
        ("old_logprobs_T", "old_logprobs", "grpo"),
        ("rollout_logprobs_T", "rollout_logprobs", "grpo"),
        ("ref_logprobs_T", "ref_logprobs", "kl"),
    ],
)
def test_prepare_names_the_array_that_is_not_finite(field: str, name: str, recipe: str) -> None:
    settings = {"kl": {"reward_coef": 0.1}} if recipe == "kl" else {}
    algorithm = algorithm_of("copris" if recipe == "kl" else recipe, **settings)
    broken = getattr(device_batch(), field).clone()
    broken[-1] = math.nan
    with pytest.raises(NonFiniteError, match=rf"^{name} has 1"):
        algorithm.prepare(replace(device_batch(), **{field: broken}))


def test_gradient_is_zero_when_the_whole_batch_is_rejected() -> None:
    batch = replace(device_batch(), loss_mask_T=0 * device_batch().loss_mask_T)
    gradient_T, metrics, _ = train_step(
        algorithm_of("grpo"), batch, current_logprobs(batch), single_microbatch(batch)
    )
    assert not gradient_T.any() and metrics["actor/tokens"] == 0.0
