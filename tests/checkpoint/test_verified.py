"""Tests that values which a save or a load misplaces are detected and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_async.checkpoint import state, writer
from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_async.checkpoint.files import PieceReader, RankFiles
from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.manifest import open_checkpoint
from megatron_async.checkpoint.state import ParameterShard
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trainer.step import PolicyTrainer
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session

NAME = "decoder.layers.1.mlp.linear_fc1.weight"
MISMATCH = (
    r"tensor {} has checksum [0-9a-f]{{16}} after loading; it was saved with checksum [0-9a-f]"
)


@pytest.fixture
def trainer(model_dir: Path) -> Iterator[PolicyTrainer]:
    """Return a trainer one step away from its initial model, so that no moment is zero."""
    with single_process(), trainer_session(settings(model_dir)) as trainer:
        trainer.train_batch(ragged_batch(0))
        yield trainer


def save(trainer: PolicyTrainer, root: Path) -> Path:
    manager = CheckpointManager(root, CheckpointConfig(asynchronous=False))
    manager.save(trainer, {})
    return root / f"step_{trainer.step:06d}"


def load(trainer: PolicyTrainer, path: Path) -> None:
    CheckpointManager(path.parent, CheckpointConfig()).load(trainer, open_checkpoint(path))


def moved(values: Tensor) -> Tensor:
    return values.reshape(-1).roll(1).view(values.shape)


def misplacing_writes(name: str) -> AbstractContextManager[Any]:
    """Make saves put the values of tensor `name` at wrong indices during the block."""
    add = RankFiles.add

    def shifted(files: RankFiles, key: str, piece: Tensor) -> None:
        add(files, key, moved(piece) if key.startswith(f"{name}@") else piece)

    return mock.patch.object(RankFiles, "add", shifted)


def misplacing_reads(name: str) -> AbstractContextManager[Any]:
    """Make loads put the values of tensor `name` at wrong indices during the block."""
    read = PieceReader.read

    def shifted(reader: PieceReader, found: str, offsets: Any, into: Tensor) -> None:
        read(reader, found, offsets, into)
        if found == name:
            into.copy_(moved(into.clone()))

    return mock.patch.object(PieceReader, "read", shifted)


@pytest.mark.parametrize("tensor", ["weights", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("at", [misplacing_writes, misplacing_reads])
def test_load_names_the_tensor_when_values_are_at_wrong_indices(
    trainer: PolicyTrainer,
    tmp_path: Path,
    tensor: str,
    at: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """All files match the manifest, so that only the tensor's checksum differs."""
    name = f"{tensor}/{NAME}"
    with at(name):
        path = save(trainer, tmp_path)
        open_checkpoint(path)
        with pytest.raises(UserError, match=MISMATCH.format(name)) as refused:
            load(trainer, path)
    assert "--from-step" in str(refused.value)


@pytest.mark.parametrize("at", [misplacing_writes, misplacing_reads])
def test_conversion_names_the_tensor_when_values_are_at_wrong_indices(
    model_dir: Path, tmp_path: Path, at: Callable[[str], AbstractContextManager[Any]]
) -> None:
    name = f"weights/{NAME}"
    with at(name):
        hf_to_megatron(model_dir, tmp_path / "megatron", tensor=2)
        with pytest.raises(UserError, match=MISMATCH.format(name)):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_start_from_weights_names_the_tensor_when_values_are_misplaced(
    model_dir: Path, tmp_path: Path
) -> None:
    with misplacing_writes(f"weights/{NAME}"):
        hf_to_megatron(model_dir, tmp_path / "megatron", tensor=2)
    config = settings(model_dir, {"model": {"checkpoint": str(tmp_path / "megatron")}})
    with (
        single_process(),
        pytest.raises(UserError, match=MISMATCH.format(f"weights/{NAME}")),
        trainer_session(config),
    ):
        pass


@pytest.mark.parametrize("times", [0, 2])
def test_save_fails_when_elements_are_missing_or_saved_twice(
    trainer: PolicyTrainer, tmp_path: Path, times: int
) -> None:
    described = state.saved_shards

    def other(trainer: Any) -> Iterator[ParameterShard]:
        for shard in described(trainer):
            yield from [shard] * (times if shard.name == f"exp_avg/{NAME}" else 1)

    with (
        mock.patch.object(writer, "saved_shards", other),
        pytest.raises(ComponentFailure, match="could not be written") as failed,
    ):
        save(trainer, tmp_path)
    problem = "has 24576 of 12288 elements" if times else "was saved by no rank"
    assert f"tensor exp_avg/{NAME} {problem}" in str(failed.value)
    assert list(tmp_path.iterdir()) == []


def test_save_fails_when_model_differs_from_rounded_optimizer_copy(
    model_dir: Path, tmp_path: Path
) -> None:
    config = settings(model_dir, {"model": {"dtype": "bfloat16"}})
    with single_process(), trainer_session(config) as trainer:
        save(trainer, tmp_path)
        with torch.no_grad():
            next(p for n, p in trainer.wrapped.named_parameters() if n.endswith(NAME))[0, 0] += 1
        with pytest.raises(
            ComponentFailure, match=f"parameter {NAME} differs from the optimizer's"
        ):
            trainer.step = 1
            save(trainer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000"]


def test_load_unpickles_nothing(trainer: PolicyTrainer, tmp_path: Path) -> None:
    path = save(trainer, tmp_path)
    with (
        mock.patch("pickle.loads", side_effect=AssertionError),
        mock.patch("pickle.Unpickler", side_effect=AssertionError),
        mock.patch("torch.load", side_effect=AssertionError),
    ):
        load(trainer, path)
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
