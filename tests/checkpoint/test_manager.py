"""Tests saving and resuming a trainer in one process: bit-equal, in the background, failing."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.checkpoint.convert import hf_to_megatron
from megatron_async.checkpoint.manager import CheckpointManager, Finalized
from megatron_async.checkpoint.manifest import open_checkpoint
from megatron_async.checkpoint.writer import SaveJob
from megatron_async.config.load import merge
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trainer.step import PolicyTrainer
from tests.trainer.cases import ragged_batch, settings, trainer_session, weights


@pytest.fixture(params=["distributed", "replicated", "distributed bf16", "replicated bf16"])
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings of an optimizer; with bfloat16 weights it has separate float32 copies."""
    distributed = request.param.startswith("distributed")
    return {
        "model": {"dtype": "bfloat16" if "bf16" in request.param else "float32"},
        "optimizer": {"lr": 1e-3, "distributed": distributed, "weight_decay": 0.1},
    }


@contextmanager
def trainer_with(
    model_dir: Path, kind: dict[str, Any] | None = None, lineage: int = 0
) -> Iterator[PolicyTrainer]:
    config = settings(model_dir, merge({"optimizer": {"lr": 1e-3}, "steps": 8}, kind or {}))
    with trainer_session(config, lineage=lineage) as trainer:
        yield trainer


def manager(root: Path, **changes: Any) -> CheckpointManager:
    return CheckpointManager(root, CheckpointConfig(**{"asynchronous": False, **changes}))


def train(trainer: PolicyTrainer, steps: int) -> list[float]:
    return [trainer.train_batch(ragged_batch(trainer.step)).loss for _ in range(steps)]


def assert_bit_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# ------------------------------------------------------------ resuming


def test_resumed_run_is_bit_equal_to_an_uninterrupted_run(
    model_dir: Path, tmp_path: Path, kind: dict[str, Any], process: None
) -> None:
    """Trains on recorded batches, saves after step 2, and compares after step 5, also random
    states."""
    with trainer_with(model_dir, kind) as trainer:
        train(trainer, 2)
        manager(tmp_path).save(trainer, {"store_position": 17})
        losses = train(trainer, 3)
        draws = [random.random(), np.random.rand(), float(torch.rand(()))]
        reference = weights(trainer)
    with trainer_with(model_dir, kind, lineage=1) as trainer:
        checkpoints = manager(tmp_path)
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.manifest.extra == {"store_position": 17}
        checkpoints.load(trainer, newest)
        assert trainer.version == (1, 2)
        assert train(trainer, 3) == losses
        assert [random.random(), np.random.rand(), float(torch.rand(()))] == draws
        assert_bit_equal(weights(trainer), reference)


def test_checkpoint_of_step_zero_can_be_resumed(
    model_dir: Path, tmp_path: Path, kind: dict[str, Any], process: None
) -> None:
    with trainer_with(model_dir, kind) as trainer:
        manager(tmp_path).save(trainer, {})
        losses = train(trainer, 2)
    with trainer_with(model_dir, kind) as trainer:
        checkpoints = manager(tmp_path)
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(trainer, newest)
        assert train(trainer, 2) == losses


def test_load_refuses_checkpoint_when_it_has_only_weights(
    model_dir: Path, tmp_path: Path, process: None
) -> None:
    hf_to_megatron(model_dir, tmp_path / "converted")
    with (
        trainer_with(model_dir) as trainer,
        pytest.raises(UserError, match=r"cannot be loaded: tensor exp_avg/.* is missing"),
    ):
        manager(tmp_path).load(trainer, open_checkpoint(tmp_path / "converted"))


def test_load_keeps_hyperparameters_of_the_configuration(
    model_dir: Path, tmp_path: Path, process: None
) -> None:
    with trainer_with(model_dir, {"optimizer": {"betas": [0.9, 0.95]}}) as trainer:
        manager(tmp_path).save(trainer, {})
    with trainer_with(model_dir, {"optimizer": {"betas": [0.8, 0.9]}}) as trainer:
        manager(tmp_path).load(trainer, open_checkpoint(tmp_path / "step_000000"))
        assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.8, 0.9)}


def test_newest_raises_when_every_checkpoint_is_corrupt(
    model_dir: Path, tmp_path: Path, process: None
) -> None:
    assert manager(tmp_path).newest() is None
    with trainer_with(model_dir) as trainer:
        manager(tmp_path).save(trainer, {})
    next((tmp_path / "step_000000").glob("rank_*")).unlink()
    with pytest.raises(UserError, match="every checkpoint in"):
        manager(tmp_path).newest()


# ------------------------------------------------------------ saving


def test_manager_keeps_newest_checkpoints_and_reports_each_commit(
    model_dir: Path, tmp_path: Path, process: None
) -> None:
    checkpoints = manager(tmp_path, keep=2)
    with trainer_with(model_dir) as trainer:
        for _ in range(3):
            train(trainer, 1)
            checkpoints.save(trainer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    assert checkpoints.take_finalized() == [
        Finalized(1, ((0, 1),)),
        Finalized(2, ((0, 1), (0, 2))),
        Finalized(3, ((0, 2), (0, 3))),
    ]
    assert checkpoints.take_finalized() == []


def test_asynchronous_save_stores_weights_of_its_start_while_training_proceeds(
    model_dir: Path, tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has the weights at the call of `save`, however long the disk takes."""
    release = threading.Event()
    write = SaveJob._write_files

    def slow_write(job: SaveJob) -> Any:
        assert release.wait(30)
        return write(job)

    monkeypatch.setattr(SaveJob, "_write_files", slow_write)
    checkpoints = manager(tmp_path, asynchronous=True)
    with trainer_with(model_dir) as trainer:
        train(trainer, 1)
        saved = weights(trainer)
        checkpoints.save(trainer, {})
        train(trainer, 2)
        assert checkpoints.take_finalized() == []
        assert manager(tmp_path).newest() is None
        release.set()
        checkpoints.wait()
        assert checkpoints.take_finalized() == [Finalized(1, ((0, 1),))]
    with trainer_with(model_dir) as trainer:
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.load(trainer, newest)
        assert_bit_equal(weights(trainer), saved)


def test_close_raises_when_save_exceeds_its_time_limit(
    model_dir: Path, tmp_path: Path, process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(job: SaveJob) -> Any:
        release.wait(30)
        raise OSError("ended by the test")

    monkeypatch.setattr(SaveJob, "_write_files", hang)
    checkpoints = manager(tmp_path, asynchronous=True, timeout_seconds=0.3)
    with trainer_with(model_dir) as trainer:
        checkpoints.save(trainer, {})
        with pytest.raises(
            ComponentFailure, match=r"not written within checkpoint\.timeout_seconds"
        ):
            checkpoints.close()
    release.set()


def test_save_removes_directories_left_by_killed_saves(
    model_dir: Path, tmp_path: Path, process: None, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = tmp_path / ".saving_0.7"
    leftover.mkdir()
    (leftover / "rank_00000.f32.safetensors").write_bytes(b"half")
    with trainer_with(model_dir) as trainer, caplog.at_level(logging.WARNING):
        checkpoints = manager(tmp_path)
        assert checkpoints.newest() is None
        checkpoints.save(trainer, {})
    assert not leftover.exists()
    assert "left by an interrupted save" in caplog.text
