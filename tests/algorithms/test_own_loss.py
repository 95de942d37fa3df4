"""Tests losses that a user names by import path: they give the same numbers as a built-in loss with
the same formula, and faulty losses are refused with a clear message."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_async_kernels import LossInputs, NonFiniteError, policy_loss

from megatron_async.algorithms.algorithm import Algorithm, build_algorithm
from megatron_async.algorithms.own_loss import check_own_loss
from megatron_async.config import build_config, load_config
from megatron_async.config.load import dump
from megatron_async.errors import UserError
from tests.algorithms.batches import current_logprobs, device_batch

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loss"


def ppo(tokens: LossInputs, clip: float = 0.2) -> torch.Tensor:
    ratio_T = (tokens.logprobs_T - tokens.rollout_logprobs_T).exp()
    clipped_T = ratio_T.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio_T * tokens.advantages_T, clipped_T * tokens.advantages_T)


def gspo(tokens: LossInputs) -> torch.Tensor:
    """Return the loss of sequence-level PPO, which couples the tokens of a sequence: each token's
    value depends on its sequence's mean log-ratio."""
    log_T = tokens.logprobs_T - tokens.rollout_logprobs_T
    losses = []
    bounds = tokens.cu_seqlens_S1.tolist()
    for a, b in itertools.pairwise(bounds):
        count = tokens.mask_T[a:b].sum().clamp(min=1.0)
        ratio = (log_T[a:b].sum() / count).exp()
        clipped = ratio.clamp(0.8, 1.2)
        A_T = tokens.advantages_T[a:b]
        losses.append(-torch.minimum(ratio * A_T, clipped * A_T))
    return torch.cat(losses)


def entropy_only(tokens: LossInputs) -> torch.Tensor:
    assert tokens.entropy_T is not None
    return -0.05 * tokens.entropy_T


def scalar(tokens: LossInputs) -> torch.Tensor:
    return tokens.logprobs_T.sum()


def infinite(tokens: LossInputs) -> torch.Tensor:
    return tokens.logprobs_T / 0.0


def raising(tokens: LossInputs) -> torch.Tensor:
    return tokens.logprobs_T * (1 // 0)


def constant(tokens: LossInputs) -> torch.Tensor:
    return torch.ones_like(tokens.logprobs_T)


not_a_function = 3


def algorithm_of(loss: object, **algorithm: object) -> Algorithm:
    settings = {"algorithm": {"recipe": "copris", "loss": loss, **algorithm}}
    return build_algorithm(build_config(settings))


def outputs(own: Algorithm, ours: Algorithm) -> tuple:  # type: ignore[type-arg]
    batch = device_batch(seed=2)
    logprobs_T = current_logprobs(batch, 2)
    entropy_T = torch.rand(len(logprobs_T), dtype=torch.float64)
    results = []
    for algorithm in (own, ours):
        prepared, _ = algorithm.prepare(batch)
        prepared, denominators = algorithm.prepare_minibatch(prepared, logprobs_T)
        inputs = algorithm.inputs(prepared, logprobs_T, entropy_T)
        results.append(algorithm.loss(inputs, denominators))
    return tuple(results)


def path_of(name: str) -> str:
    return f"{__name__}:{name}"


@pytest.mark.parametrize(
    ("own_name", "ours"),
    [
        ("ppo", {"name": "ppo_clip", "clip_high": 0.2, "clip_low": 0.2, "dual_clip": None}),
        (
            "gspo",
            {
                "name": "gspo",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "aggregation": "seq_mean_token_mean",
            },
        ),
    ],
)
def test_own_loss_equals_the_built_in_loss_when_both_have_the_same_formula(
    own_name: str, ours: dict
) -> None:  # type: ignore[type-arg]
    aggregation = {"aggregation": ours.get("aggregation", "token_mean")}
    own, known = outputs(
        algorithm_of({"name": path_of(own_name), **aggregation}), algorithm_of(ours)
    )
    torch.testing.assert_close(own.loss_sum, known.loss_sum, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(own.dlogp_T, known.dlogp_T, rtol=1e-9, atol=1e-12)
    own_sums, known_sums = own.metrics.sums(), known.metrics.sums()
    for name in ("tokens", "loss", "log_ratio", "is_weight", "seq_weight", "entropy", "lag"):
        assert own_sums[name] == pytest.approx(known_sums[name], rel=1e-9)


def test_own_loss_receives_its_arguments() -> None:
    wide = {"name": path_of("ppo"), "arguments": {"clip": 0.5}}
    known = {"name": "ppo_clip", "clip_low": 0.5, "clip_high": 0.5, "dual_clip": None}
    own, ours = outputs(algorithm_of(wide), algorithm_of(known))
    torch.testing.assert_close(own.dlogp_T, ours.dlogp_T, rtol=1e-9, atol=1e-12)


def test_own_loss_may_depend_only_on_the_entropy() -> None:
    """Such a loss equals the built-in entropy bonus, and both together add up."""
    alone, _ = outputs(algorithm_of(path_of("entropy_only")), algorithm_of(path_of("ppo")))
    assert not bool(alone.dlogp_T.any())
    both, bonus = outputs(
        algorithm_of(path_of("entropy_only"), entropy_coef=0.05),
        algorithm_of(path_of("ppo"), entropy_coef=0.1),
    )
    torch.testing.assert_close(both.dentropy_T, bonus.dentropy_T)


def test_own_loss_raises_when_its_shape_is_wrong_or_its_value_infinite() -> None:
    with pytest.raises(ValueError, match=r"the loss returned \(\), not a tensor of shape \[\d+\]"):
        outputs(algorithm_of(path_of("scalar")), algorithm_of(path_of("ppo")))
    with pytest.raises(NonFiniteError, match="own loss has"):
        outputs(algorithm_of(path_of("infinite")), algorithm_of(path_of("ppo")))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_package.losses:f", "there is no module 'no_such_package.losses'"),
        (path_of("nothing"), "has no 'nothing'"),
        (path_of("not_a_function"), "it must import a function"),
        ("/nowhere/loss.py:f", "there is no file /nowhere/loss.py"),
        ("nonsense", "is 'nonsense'; it must be one of ppo_clip"),
    ],
)
def test_own_loss_is_refused_when_it_cannot_be_imported(path: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        algorithm_of(path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("scalar", r"returned \(\), not a tensor"),
        ("infinite", "own loss has 5 non-finite"),
        ("raising", r"ZeroDivisionError: .* at .*test_own_loss\.py:\d+"),
        ("constant", "no gradient"),
    ],
)
def test_check_own_loss_refuses_a_faulty_loss(name: str, sentence: str) -> None:
    config = build_config({"algorithm": {"loss": path_of(name)}})
    with pytest.raises(UserError, match=sentence):
        check_own_loss(config.algorithm)


def test_check_own_loss_accepts_valid_losses() -> None:
    for name in ("ppo", "gspo", "entropy_only"):
        check_own_loss(build_config({"algorithm": {"loss": path_of(name)}}).algorithm)
    check_own_loss(load_config(EXAMPLE / "config.yaml").algorithm)


def test_own_loss_file_is_found_relative_to_the_yaml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(EXAMPLE / "config.yaml")
    assert config.algorithm.loss.name == f"{EXAMPLE / 'loss.py'}:narrowing_clip"
    (tmp_path / "run.yaml").write_text(dump(config))
    again = load_config(tmp_path / "run.yaml")
    assert build_algorithm(again).loss_config.surrogate == "own"


def test_example_loss_is_ppo_for_fresh_tokens_and_clips_old_tokens_sooner() -> None:
    algorithm = build_algorithm(load_config(EXAMPLE / "config.yaml"))
    ones_T = torch.ones(2)
    inputs = LossInputs(
        logprobs_T=torch.log(1.2 * ones_T),
        rollout_logprobs_T=torch.zeros(2),
        advantages_T=ones_T,
        mask_T=ones_T,
        cu_seqlens_S1=torch.tensor([0, 2]),
        lag_T=torch.tensor([0, 2]),
    )
    _, denominators = algorithm.prepare_minibatch(*_prepared(algorithm))
    fresh, old = algorithm.loss(inputs, denominators).dlogp_T.tolist()
    assert fresh < 0.0, "a fresh token is not clipped within 0.3"
    assert old == 0.0, "an old token is clipped beyond 0.3 / 4"
    with pytest.raises(ValueError, match="pass the function"):
        policy_loss(inputs, algorithm.loss_config, denominators)


def _prepared(algorithm: Algorithm) -> tuple:  # type: ignore[type-arg]
    return (algorithm.prepare(device_batch(seed=0))[0],)


def test_own_loss_ignores_values_of_untrained_tokens() -> None:
    algorithm = algorithm_of(path_of("ppo"))
    batch = device_batch(seed=1)
    logprobs_T = current_logprobs(batch, 1)
    prepared, _ = algorithm.prepare(batch)
    prepared, denominators = algorithm.prepare_minibatch(prepared)
    inputs = algorithm.inputs(prepared, logprobs_T)
    broken_T = torch.where(inputs.mask_T == 0, torch.nan, inputs.logprobs_T)
    broken = algorithm.loss(replace(inputs, logprobs_T=broken_T), denominators)
    torch.testing.assert_close(broken.dlogp_T, algorithm.loss(inputs, denominators).dlogp_T)
