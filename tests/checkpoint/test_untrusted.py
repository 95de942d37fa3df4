"""A checkpoint that somebody else wrote, checksums and all, never runs a program."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.manifest import MANIFEST_NAME, hash_file, read_checkpoint
from megatron_async.checkpoint.metadata import COMMON_NAME, METADATA_NAME
from megatron_async.checkpoint.start import load_checkpoint_weights
from megatron_async.checkpoint.state import load_weights, sharded_weights
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import UserError
from tests.checkpoint.hostile import Hostile
from tests.trainer.cases import (
    ragged_batch,
    settings,
    single_process,
    trainer_session,
    write_model,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def process() -> Iterator[None]:
    with single_process():
        yield


def in_the_metadata(folder: Path, program: Hostile) -> None:
    metadata = read_metadata(folder)
    metadata.planner_data = program
    write_metadata(folder, metadata)


def in_an_object(folder: Path, program: Hostile) -> None:
    """Where the random states are."""
    metadata = read_metadata(folder)
    (index,) = [index for index in metadata.storage_data if index.fqn.startswith("random")]
    store(folder, metadata, index, program)


def in_what_is_called_a_tensor(folder: Path, program: Hostile) -> None:
    """A parameter of the model whose description says that it is bytes, of the right shape."""
    metadata = read_metadata(folder)
    index = next(i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight")
    description = BytesStorageMetadata()
    description.size = metadata.state_dict_metadata[index.fqn].size
    metadata.state_dict_metadata[index.fqn] = description
    metadata.storage_data[MetadataIndex(index.fqn)] = metadata.storage_data.pop(index)
    store(folder, metadata, MetadataIndex(index.fqn), program)


def in_the_common_state(folder: Path, program: Hostile) -> None:
    torch.save({"optimizer": program}, folder / COMMON_NAME)


def read_metadata(folder: Path) -> Metadata:
    content: Metadata = pickle.loads((folder / METADATA_NAME).read_bytes())
    return content


def write_metadata(folder: Path, metadata: Metadata) -> None:
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))


def store(folder: Path, metadata: Metadata, index: MetadataIndex, program: Hostile) -> None:
    """The program in a file of its own, and the metadata says that the object is there."""
    content = io.BytesIO()
    torch.save([program], content)
    (folder / "__9_0.distcp").write_bytes(content.getvalue())
    metadata.storage_data[index] = replace(
        metadata.storage_data[index],
        relative_path="__9_0.distcp",
        offset=0,
        length=len(content.getvalue()),
    )
    write_metadata(folder, metadata)


def sign(folder: Path) -> None:
    """Checksums that fit what is there now."""
    manifest = read_checkpoint(folder).manifest
    files = {path.name: hash_file(path) for path in folder.iterdir() if path.name != MANIFEST_NAME}
    (folder / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json())


PLACES = [in_the_metadata, in_an_object, in_what_is_called_a_tensor, in_the_common_state]


@pytest.mark.parametrize("place", PLACES)
def test_a_resume_passes_over_a_checkpoint_that_holds_a_program(
    model_dir: Path,
    tmp_path: Path,
    process: None,
    place: Callable[[Path, Hostile], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    marker = tmp_path / "it-ran"
    checkpoints = CheckpointManager(tmp_path, CheckpointConfig(asynchronous=False))
    with trainer_session(settings(model_dir)) as trainer:
        checkpoints.save(trainer, {})
        trainer.train_batch(ragged_batch(0))
        checkpoints.save(trainer, {})
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 1, "what the trainer writes passes"
        place(newest.path, Hostile(marker))
        sign(newest.path)
        with caplog.at_level(logging.WARNING):
            found = checkpoints.newest()
        assert found is not None and found.step == 0
        assert "step_000001 is corrupt" in caplog.text
        with pytest.raises(UserError, match=r"model\.checkpoint .* is corrupt"):
            load_checkpoint_weights(trainer.model[0], newest.path)
        assert not marker.exists()
        if place is not in_the_common_state:  # that is read by torch with `weights_only`
            with contextlib.suppress(Exception):  # whether the load gets through does not matter
                checkpoints.load(trainer, newest)
            assert marker.exists(), "the program is one that a load without the check runs"


def test_what_transformer_engine_keeps_as_a_pickle_is_neither_saved_nor_loaded() -> None:
    class Model:
        def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
            return {"layer.weight": 1, "layer._extra_state": 2}

        def load_state_dict(self, given: Any, strict: bool) -> tuple[list[str], list[str]]:
            assert not strict
            return ["layer._extra_state", "lost"], ["odd"]

    assert sharded_weights(Model()) == {"layer.weight": 1}
    assert load_weights(Model(), {}) == (["lost"], ["odd"])
