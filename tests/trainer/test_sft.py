"""Supervised fine-tuning: the loss is the masked cross-entropy, and training lowers it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_async.trainer.step import PolicyTrainer
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(model_dir: Path) -> Iterator[PolicyTrainer]:
    config = settings(model_dir, {"sft": {"optimizer": {"lr": 3e-3, "schedule": "cosine"}}})
    with single_process(), trainer_session(config, purpose="sft") as trainer:
        yield trainer


def test_the_loss_is_transformers_cross_entropy_over_the_trained_tokens(
    trainer: PolicyTrainer, model_dir: Path
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
    report = trainer.train_sft(batch)
    assert report.loss == pytest.approx(total / batch.num_trained_tokens, rel=1e-5)


def test_training_lowers_the_loss(trainer: PolicyTrainer) -> None:
    batch = ragged_batch()
    losses = [trainer.train_sft(batch).loss for _ in range(12)]
    assert losses[-1] < 0.75 * losses[0]
    assert trainer.step == 12


def test_the_report_counts_the_batch(trainer: PolicyTrainer) -> None:
    batch = ragged_batch()
    report = trainer.train_sft(batch)
    assert (report.step, report.updates, report.skipped) == (0, 1, False)
    assert report.num_tokens == batch.num_tokens
    assert report.num_trained_tokens == int(np.count_nonzero(batch.loss_mask_T))
    assert report.num_microbatches > 1
    assert report.learning_rate == pytest.approx(3e-3)
