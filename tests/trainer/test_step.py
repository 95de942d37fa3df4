"""Tests one trainer in one process: RL updates, minibatches, the reference policy, skipped steps,
and SFT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_async_kernels import LossInputs
from transformers import AutoModelForCausalLM

from megatron_async.config.model import OptimizerConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trainer.optimizer import learning_rate
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session, weights


@contextmanager
def trainer_with(model_dir: Path, **changes: Any) -> Iterator[PolicyTrainer]:
    config = settings(model_dir, {"optimizer": {"lr": 1e-3}, **changes})
    with single_process(), trainer_session(config, lineage=3) as trainer:
        yield trainer


def on_policy(trainer: PolicyTrainer, batch: TokenBatch) -> TokenBatch:
    """Return the batch with log-probs as if the current policy had generated it."""
    return replace(batch, rollout_logprobs_T=trainer.compute_logprobs(batch))


def poisoned(batch: TokenBatch) -> TokenBatch:
    """Return the batch with NaN as the behavior log-prob of one trained token."""
    logprobs_T = batch.rollout_logprobs_T.copy()
    logprobs_T[np.flatnonzero(batch.loss_mask_T)[5]] = np.nan
    return replace(batch, rollout_logprobs_T=logprobs_T)


def changed(trainer: PolicyTrainer, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_compute_logprobs_masks_tokens_and_applies_the_temperature(
    model_dir: Path,
) -> None:
    batch = ragged_batch()
    with trainer_with(model_dir) as trainer:
        logprobs_T = trainer.compute_logprobs(batch)
        hot_T = trainer.compute_logprobs(replace(batch, temperature=100.0))
    assert logprobs_T.shape == (batch.num_tokens,)
    assert (logprobs_T[batch.loss_mask_T == 0] == 0).all()
    assert (logprobs_T[batch.loss_mask_T != 0] < 0).all()
    uniform = -np.log(trainer.vocab_size)
    np.testing.assert_allclose(hot_T[batch.loss_mask_T != 0], uniform, atol=0.1)
    assert np.abs(logprobs_T[batch.loss_mask_T != 0] - uniform).max() > 0.5


def test_train_batch_raises_log_probs_of_rewarded_responses(model_dir: Path) -> None:
    with trainer_with(model_dir) as trainer:
        batch = on_policy(trainer, ragged_batch())
        before_T = trainer.compute_logprobs(batch)
        reports = [trainer.train_batch(batch) for _ in range(3)]
        gain_T = trainer.compute_logprobs(batch) - before_T
    trained = batch.loss_mask_T != 0
    good_T = np.repeat(batch.rewards_S, batch.lengths_S()) > 0
    assert gain_T[trained & good_T].mean() > gain_T[trained & ~good_T].mean()
    assert reports[0].metrics["off_policy/ess"] == pytest.approx(1.0, abs=1e-4)
    assert reports[2].metrics["off_policy/ess"] < 0.9999
    weights_R = np.exp(reports[2].log_weights.astype(np.float64))
    assert weights_R.size == trained.sum() and np.abs(reports[0].log_weights).max() < 1e-3
    ess = weights_R.sum() ** 2 / (weights_R.size * (weights_R**2).sum())
    assert ess == pytest.approx(reports[2].metrics["off_policy/ess"]), (
        "histogram and metric must agree"
    )
    assert trainer.version == PolicyVersion(3, 3)


def test_train_batch_makes_as_many_updates_as_the_setting(model_dir: Path) -> None:
    with trainer_with(model_dir, schedule={"updates_per_batch": 3}) as trainer:
        report = trainer.train_batch(ragged_batch())
        assert (report.updates, trainer.step) == (3, 1)
        assert report.log_weights.size == report.num_trained_tokens, (
            "the report must cover all minibatches"
        )


def test_learning_rate_reaches_its_minimum_at_the_last_update_of_the_run(
    model_dir: Path,
) -> None:
    """The schedule must be right even if updates or a complete batch were skipped, and after a
    resume."""
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-5, schedule="cosine", warmup_steps=2)
    changes = {
        "steps": 5,
        "optimizer": optimizer.model_dump(),
        "schedule": {"groups_per_batch": 6, "group_size": 4, "updates_per_batch": 2},
        "algorithm": {"epochs": 3},
    }
    batch = ragged_batch()
    no_rewards = replace(batch, rewards_S=np.full_like(batch.rewards_S, np.nan))
    with trainer_with(model_dir, **changes) as trainer:
        reports = [trainer.train_batch(each) for each in (batch, poisoned(batch), no_rewards)]
        progress = trainer.progress()
    with trainer_with(model_dir, **changes) as trainer:
        trainer.restore_progress(progress)
        reports += [trainer.train_batch(ragged_batch(step)) for step in (3, 4)]
    assert [report.updates for report in reports] == [6, 3, 0, 6, 6]
    last = [learning_rate(optimizer, 6 * (step + 1) - 1, 30) for step in range(5)]
    assert [report.learning_rate for report in reports] == pytest.approx([*last[:2], 0, *last[3:]])
    assert 1e-5 < last[4] < 2e-5 < 1e-4 < last[3]


@pytest.mark.parametrize(
    "recipe", ["copris", "pipeline_rl", "prime_rl", "rapid", "grpo", "dapo", "pg"]
)
def test_every_recipe_changes_weights_in_a_step(model_dir: Path, recipe: str) -> None:
    changes = {"recipe": recipe}
    schedule = {"groups_per_batch": 6, "group_size": 4, "updates_per_batch": 2}
    with trainer_with(model_dir, algorithm=changes, schedule=schedule) as trainer:
        before = weights(trainer)
        report = trainer.train_batch(on_policy(trainer, ragged_batch()))
        assert not report.skipped
        assert np.isfinite(report.loss)
        assert report.grad_norm > 0
        assert 0 < report.metrics["actor/entropy"] <= np.log(trainer.vocab_size)
        assert changed(trainer, before)


def test_bfloat16_weights_are_updated_through_float32_copies(model_dir: Path) -> None:
    """Norm weights start at 1, where half a step of bfloat16 is 2e-3 or more.

    Updates of at most 1e-3 change the norm weights only because they accumulate in float32.
    Gradients are float32.
    """
    changes = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-3}}
    with trainer_with(model_dir, **changes) as trainer:
        parameter = next(trainer.model[0].parameters())
        assert parameter.dtype is torch.bfloat16
        assert parameter.main_grad.dtype is torch.float32
        batch = on_policy(trainer, ragged_batch())
        before = weights(trainer)
        reports = [trainer.train_batch(batch) for _ in range(8)]
        assert reports[-1].loss < reports[0].loss
        after = weights(trainer)
        norms = [name for name in after if "norm" in name]
        assert any(not torch.equal(after[name], before[name]) for name in norms)


def test_reference_policy_is_unchanged_by_updates(model_dir: Path) -> None:
    """KL to the reference is 0 before the first update and positive later, and computing it does
    not change the policy."""
    algorithm = {"kl": {"loss_coef": 0.1, "loss_estimator": "k3"}}
    with trainer_with(model_dir, algorithm=algorithm) as trainer:
        batch = on_policy(trainer, ragged_batch())
        first = trainer.train_batch(batch)
        between = weights(trainer)
        second = trainer.train_batch(replace(batch, rewards_S=np.zeros_like(batch.rewards_S)))
        assert first.metrics["ref/k3"] == pytest.approx(0.0, abs=1e-7)
        assert second.metrics["ref/k3"] > 1e-6
        assert changed(trainer, between)


received: list[LossInputs] = []


def reading_routes(tokens: LossInputs) -> torch.Tensor:
    received.append(tokens)
    return -tokens.logprobs_T * tokens.columns["routes"][:, 1, 3].float()


def test_batch_columns_reach_a_user_loss_with_their_tokens(model_dir: Path) -> None:
    """The column and the log-prob of a token both contain the token's index in the batch."""
    batch = ragged_batch()
    index_T = np.arange(batch.num_tokens)
    routes_T = np.broadcast_to(index_T[:, None, None], (batch.num_tokens, 2, 4)).astype(np.int16)
    logprobs_T = (-index_T * batch.loss_mask_T / 1024).astype(np.float32)
    batch = replace(batch, rollout_logprobs_T=logprobs_T, columns={"routes": routes_T})
    changes: dict[str, Any] = {
        "algorithm": {"recipe": "copris", "loss": f"{__name__}:reading_routes"},
        "schedule": {"updates_per_batch": 2},
    }
    received.clear()
    with trainer_with(model_dir, **changes) as trainer:
        assert not trainer.train_batch(batch).skipped
    assert len(received) > 3
    indices = torch.cat([tokens.columns["routes"][:, 0, 0] for tokens in received])
    logprobs = torch.cat([tokens.rollout_logprobs_T for tokens in received])
    assert indices.dtype is torch.int16 and torch.equal(-logprobs * 1024, indices.float())
    assert sorted(indices.tolist()) == np.flatnonzero(batch.loss_mask_T).tolist()


# ------------------------------------------------------------ steps that are not finite


def test_train_batch_is_skipped_when_a_log_prob_is_not_finite(model_dir: Path) -> None:
    with trainer_with(model_dir) as trainer:
        before = weights(trainer)
        report = trainer.train_batch(poisoned(ragged_batch()))
        assert report.skipped
        assert report.skip_reason is not None
        assert "rollout_logprobs" in report.skip_reason
        assert not changed(trainer, before)
        assert trainer.step == 1
        assert not trainer.train_batch(ragged_batch()).skipped


def test_train_batch_applies_no_gradient_that_is_not_finite(model_dir: Path) -> None:
    """The loss is finite, but the backward pass is not; a hook simulates an overflow."""
    with trainer_with(model_dir) as trainer:
        before = weights(trainer)
        parameter = next(trainer.model[0].parameters())
        handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        report = trainer.train_batch(ragged_batch())
        handle.remove()
        assert report.skipped
        assert report.skip_reason is not None
        assert "gradient norm is nan" in report.skip_reason
        assert not changed(trainer, before)
        assert np.isfinite(trainer.train_batch(ragged_batch()).grad_norm)


def test_train_batch_skips_only_the_minibatch_that_is_not_finite(model_dir: Path) -> None:
    batch = ragged_batch()
    last = batch.cu_seqlens_S1[-2]
    logprobs_T = batch.rollout_logprobs_T.copy()
    logprobs_T[last + np.flatnonzero(batch.loss_mask_T[last:])[0]] = np.nan
    batch = replace(batch, rollout_logprobs_T=logprobs_T)
    with trainer_with(model_dir, schedule={"updates_per_batch": 3}) as trainer:
        report = trainer.train_batch(batch)
    assert (report.updates, report.skipped_updates, report.skipped) == (2, 1, False)


def test_train_batch_raises_after_three_skipped_updates_in_a_row(model_dir: Path) -> None:
    with trainer_with(model_dir) as trainer:
        trainer.train_batch(poisoned(ragged_batch()))
        trainer.train_batch(ragged_batch())
        trainer.train_batch(poisoned(ragged_batch()))
        trainer.train_batch(poisoned(ragged_batch()))
        with pytest.raises(ComponentFailure, match="3 optimizer updates in a row were not finite"):
            trainer.train_batch(poisoned(ragged_batch()))


def test_trainer_error_names_the_missing_model_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"), trainer_with(tmp_path / "nowhere"):
        pass


@pytest.fixture
def tuned_trainer(model_dir: Path) -> Iterator[PolicyTrainer]:
    config = settings(model_dir, {"sft": {"optimizer": {"lr": 3e-3, "schedule": "cosine"}}})
    with single_process(), trainer_session(config, purpose="sft") as trainer:
        yield trainer


def test_sft_loss_equals_transformers_cross_entropy_of_trained_tokens(
    tuned_trainer: PolicyTrainer, model_dir: Path
) -> None:
    batch = ragged_batch()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = 0.0
    for start, stop in zip(batch.cu_seqlens_S1[:-1], batch.cu_seqlens_S1[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids_T[start:stop]).long()
        mask = torch.from_numpy(batch.loss_mask_T[start:stop])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
        chosen = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        total -= float((chosen * mask[1:]).sum())
    report = tuned_trainer.train_sft(batch)
    assert report.loss == pytest.approx(total / batch.num_trained_tokens, rel=1e-5)


def test_train_sft_lowers_the_loss(tuned_trainer: PolicyTrainer) -> None:
    batch = ragged_batch()
    losses = [tuned_trainer.train_sft(batch).loss for _ in range(12)]
    assert losses[-1] < 0.75 * losses[0]
    assert tuned_trainer.step == 12


def test_train_sft_reports_the_counts_of_the_batch(tuned_trainer: PolicyTrainer) -> None:
    batch = ragged_batch()
    report = tuned_trainer.train_sft(batch)
    assert (report.step, report.updates, report.skipped) == (0, 1, False)
    assert report.num_tokens == batch.num_tokens
    assert report.num_trained_tokens == int(np.count_nonzero(batch.loss_mask_T))
    assert report.num_microbatches > 1
    assert report.learning_rate == pytest.approx(3e-3)
